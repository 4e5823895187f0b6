import pytest
import torch
from torch import nn

from posttrain.train.offload import CpuOffload


def test_tensors_leave_and_come_back_in_place():
    """The same tensor objects, with the same contents; views, tied weights and empty tensors among them."""
    torch.manual_seed(0)
    model = nn.Linear(7, 5)
    tied = nn.Parameter(model.weight.data)
    padded = torch.randn(10, 3)
    view = padded[:8]
    scalar, nothing = torch.tensor(3.0), torch.empty(0)
    tensors = [model.weight, model.bias, tied, view, scalar, nothing]
    expected = [t.detach().clone() for t in tensors]
    offloaded = CpuOffload()
    for _ in range(3):
        offloaded.offload(tensors)
        assert model.weight.untyped_storage().nbytes() == padded.untyped_storage().nbytes() == 0
        offloaded.onload()
        for tensor, wanted in zip(tensors, expected, strict=True):
            assert torch.equal(tensor, wanted)
        with torch.no_grad():
            model.weight += 1.0
        expected[0], expected[2] = model.weight.detach().clone(), tied.detach().clone()
        assert torch.equal(expected[0], expected[2])


def test_an_optimizer_steps_on_afterwards():
    """As one whose state never left."""

    def steps(offloaded):
        torch.manual_seed(0)
        model = nn.Linear(7, 5)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, fused=True)
        for _ in range(4):
            optimizer.zero_grad()
            model(torch.ones(2, 7)).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            if offloaded is not None:
                offloaded.offload([*model.parameters(), *(t for s in optimizer.state.values() for t in s.values())])
                offloaded.onload()
        return model.weight

    assert torch.equal(steps(CpuOffload()), steps(None))


@pytest.mark.slow
def test_eight_bit_state():
    optim = pytest.importorskip("torchao.optim")
    weight = nn.Parameter(torch.randn(64, 256))
    optimizer = optim.AdamW8bit([weight], lr=0.1)
    weight.grad = torch.randn_like(weight)
    optimizer.step()
    moment = optimizer.state[weight]["exp_avg"]
    before = moment.dequantize()
    offloaded = CpuOffload()
    offloaded.offload([moment])
    assert moment.codes.untyped_storage().nbytes() == moment.scale.untyped_storage().nbytes() == 0
    offloaded.onload()
    assert torch.equal(moment.dequantize(), before)


def test_nothing_offloaded_is_nothing_fetched():
    CpuOffload().onload()

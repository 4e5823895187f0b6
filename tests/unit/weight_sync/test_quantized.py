"""What engines with loaders of their own check of an update in FP8: that it has reached every element."""

import pickle

import pytest
import torch
from torch import nn

from posttrain.core.errors import WeightSyncError
from posttrain.models import fp8
from posttrain.weight_sync import sglang_worker
from posttrain.weight_sync.buckets import Bucket
from posttrain.weight_sync.quantized import check_overwritten, poison
from posttrain.weight_sync.sender import WeightSender

PARTS = {"q_proj": (0, 128), "k_proj": (128, 64), "v_proj": (192, 64)}
"""Rows of each in the joined matrix"""
BLOCK = 64


class Joined(nn.Module):
    """A layer in which an engine has joined three matrices, with a loader of its own that may leave something out."""

    def __init__(self, leaves_out=()):
        super().__init__()
        self.leaves_out = leaves_out
        self.weight = nn.Parameter(torch.zeros(256, 128).to(fp8.DTYPE), requires_grad=False)
        self.weight_scale_inv = nn.Parameter(torch.ones(4, 2), requires_grad=False)
        self.norm = nn.Parameter(torch.ones(128), requires_grad=False)

    def load_weights(self, tensors):
        for name, tensor in tensors:
            if name in self.leaves_out:
                continue
            if name == "norm":
                self.norm.data.copy_(tensor)
                continue
            start, count = PARTS[name.partition(".")[0]]
            if name.endswith("_scale_inv"):
                self.weight_scale_inv.data[start // BLOCK : (start + count) // BLOCK].copy_(tensor)
            else:
                self.weight.data[start : start + count].copy_(tensor)


class LlamaForCausalLM(Joined):
    """Renames scales as SGLang 0.5.16 does for its Llama models, and leaves out what it then does not know."""

    def load_weights(self, tensors):
        known = dict(self.named_parameters())
        for name, tensor in tensors:
            if name.endswith(".weight_scale_inv"):
                name = name.replace(".weight_scale_inv", ".weight_scale")
            if name.rpartition(".")[2] in known:
                super().load_weights([("".join(name), tensor)])  # a plain str, whatever name came


def sent():
    generator = torch.Generator().manual_seed(0)
    weights = [(f"{n}.weight", torch.randn(rows, 128, generator=generator)) for n, (_, rows) in PARTS.items()]
    names = frozenset(name for name, _ in weights)
    layers = fp8.Fp8Layers(BLOCK, names, (), 256 * 128, 256 * 128)
    return [("norm", torch.ones(128)), *fp8.quantized_weights(weights, layers)]


def update(model, monkeypatch):
    """As SGLang's scheduler does it, bucket by bucket and to the end."""
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(sglang_worker, "_reader", lambda rank: sglang_worker.BucketReader(rank))
    monkeypatch.setattr(sglang_worker, "_forget_features", lambda: None)  # it is of SGLang, which is not here

    def pass_on(bucket):
        sglang_worker.load(model, pickle.loads(sglang_worker.pack(bucket, 0)))

    sender = WeightSender(sent(), torch.bfloat16, "host", bucket_bytes=1 << 14)
    while (bucket := sender.next(0)) is not None:
        pass_on(bucket)
    sender.close()
    pass_on(Bucket(()))


@pytest.mark.parametrize("kind", [Joined, LlamaForCausalLM])
def test_a_whole_update_passes(monkeypatch, kind):
    model = kind()
    for _ in range(2):
        update(model, monkeypatch)
    tensors = dict(sent())
    assert torch.equal(model.weight[128:192].view(torch.uint8), tensors["k_proj.weight"].view(torch.uint8))
    assert torch.equal(model.weight_scale_inv[3:], tensors["v_proj.weight_scale_inv"])


@pytest.mark.parametrize(
    ("left_out", "named"), [("k_proj.weight", "weight"), ("v_proj.weight_scale_inv", "weight_scale_inv")]
)
def test_a_part_that_the_engine_does_not_load_is_told_of(monkeypatch, left_out, named):
    """Also where what was there before is from the last update, and as good as the new."""
    model = Joined()
    update(model, monkeypatch)
    model.leaves_out = (left_out,)
    with pytest.raises(WeightSyncError, match=f"new weights did not reach all of {named}$"):
        update(model, monkeypatch)


def test_only_what_is_quantized_is_overwritten():
    model = Joined()
    poison(model)
    assert model.weight.float().isnan().all()
    assert model.weight_scale_inv.isnan().all()
    assert torch.equal(model.norm, torch.ones(128))
    with pytest.raises(WeightSyncError, match="weight, weight_scale_inv"):
        check_overwritten(model)


def test_quantized_tensors_travel_in_their_own_types():
    """Whatever the type of the others, and after each other's bytes."""
    sender = WeightSender(sent(), torch.bfloat16, "host")
    bucket = sender.next(0)
    found = {name: (kind, shape) for name, kind, shape, _ in bucket.entries}
    assert found["norm"] == ("bfloat16", (128,))
    assert found["q_proj.weight"] == ("float8_e4m3fn", (128, 128))
    assert found["q_proj.weight_scale_inv"] == ("float32", (2, 2))
    for name, tensor in sglang_worker.BucketReader().tensors(bucket):
        assert torch.equal(tensor.view(torch.uint8), dict(sent())[name].to(tensor.dtype).view(torch.uint8))
    sender.close()

"""Attention of vision towers in one call for all windows, beside transformers' own, which makes a call for each."""

import gc
import weakref

import pytest
import torch
from transformers import AutoModelForImageTextToText

from posttrain.models import attention, tower_attention, vision
from posttrain.models.load import implementations
from posttrain.train.model import PackedLM
from posttrain.train.parallel import parallelize
from tests.helpers.seeing import config_of

GRIDS = torch.tensor([[1, 8, 8], [1, 4, 6], [1, 12, 4], [1, 4, 6]])
"""Of several sizes, so that windows at the right and at the bottom have fewer patches"""


def towers(family):
    """The same model twice: as transformers computes its tower, and as runs do."""
    models = []
    for ours in (False, True):
        torch.manual_seed(0)
        config = config_of(family)
        model = AutoModelForImageTextToText.from_config(config, **implementations(config))
        if ours:
            model.set_attn_implementation(vision.attention_of(config, attention.NAME))
        models.append(model)
    return models


def features_and_gradients(model, patches):
    found = vision.features_of(model, patches, GRIDS)
    torch.cat([found.last, *found.deeper]).square().sum().backward()
    parts = vision.tower(model)
    return found.last.detach(), [p.grad for part in parts for p in part.parameters() if p.grad is not None]


@pytest.mark.parametrize("compiled", [False, pytest.param(True, marks=pytest.mark.slow)])
@pytest.mark.parametrize("family", ["qwen2_5_vl", "qwen3_vl"])
def test_features_and_gradients_are_those_of_transformers(family, compiled):
    theirs, ours = towers(family)
    parallelize(PackedLM(ours), None, dtype=torch.float32, activation_checkpointing="none", compiled=compiled)
    assert theirs.config.vision_config._attn_implementation == "sdpa"
    assert ours.config.vision_config._attn_implementation == tower_attention.NAME
    tower = theirs.config.vision_config
    values = tower.in_channels * tower.temporal_patch_size * tower.patch_size**2
    patches = torch.randn(int(GRIDS.prod(1).sum()), values)
    expected, wanted = features_and_gradients(theirs, patches)
    found, grads = features_and_gradients(ours, patches)
    torch.testing.assert_close(found, expected, atol=1e-6, rtol=1e-5)
    assert len(grads) == len(wanted) > 10
    for grad, other in zip(grads, wanted, strict=True):
        torch.testing.assert_close(grad, other, atol=1e-6 * float(other.abs().max()) + 1e-7, rtol=1e-4)


def test_it_is_called_once_for_each_layer(monkeypatch):
    calls = []

    def counted(q, k, v, windows, scaling, plain=tower_attention._by_length):
        calls.append(len(windows.offsets) - 1)
        return plain(q, k, v, windows, scaling)

    monkeypatch.setattr(tower_attention, "_by_length", counted)
    _, ours = towers("qwen2_5_vl")
    tower = ours.config.vision_config
    patches = torch.randn(int(GRIDS.prod(1).sum()), tower.in_channels * tower.temporal_patch_size * tower.patch_size**2)
    vision.features_of(ours, patches, GRIDS)
    assert len(calls) == tower.depth
    assert min(calls) == len(GRIDS) < max(calls)  # layers that look at whole images, and others


def test_no_patch_sees_another_window():
    torch.manual_seed(0)
    offsets = torch.tensor([0, 3, 3 + 5, 3 + 5 + 3], dtype=torch.int32)
    q, k, v = (torch.randn(1, 2, 11, 4, dtype=torch.float64, requires_grad=True) for _ in range(3))
    out, weights = tower_attention.attend(torch.nn.Module(), q, k, v, None, scaling=0.3, cu_seq_lens_q=offsets)
    assert weights is None
    for start, end in ((0, 3), (3, 8), (8, 11)):
        scores = (q[0, :, start:end] @ k[0, :, start:end].transpose(1, 2) * 0.3).softmax(-1)
        torch.testing.assert_close(out[0, start:end], (scores @ v[0, :, start:end]).transpose(0, 1))
    (grad,) = torch.autograd.grad(out[0, 3:8].sum(), v)
    assert not grad[0, :, :3].any()
    assert not grad[0, :, 8:].any()
    assert grad[0, :, 3:8].all()


def test_masks_and_dropout_are_refused():
    x = torch.zeros(1, 1, 2, 4)
    offsets = torch.tensor([0, 2])
    for wrong in ({"attention_mask": torch.zeros(1)}, {"attention_mask": None, "dropout": 0.1}):
        with pytest.raises(ValueError, match="neither a mask nor dropout"):
            tower_attention.attend(torch.nn.Module(), x, x, x, cu_seq_lens_q=offsets, **wrong)


def test_windows_are_worked_out_once_and_live_as_long_as_their_offsets():
    offsets = torch.tensor([0, 2, 4])
    windows = tower_attention.Windows.of(offsets)
    assert tower_attention.Windows.of(offsets) is windows
    assert windows.longest == 2
    gone = weakref.ref(windows)
    gc.disable()
    try:
        del offsets, windows
        assert gone() is None
    finally:
        gc.enable()

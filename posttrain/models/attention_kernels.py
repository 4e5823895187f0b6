"""Choose what computes attention over packed rows: a kernel over ragged rows, or padded scaled dot-product attention.

The kernels are FlashAttention, where it is installed, and core torch's varlen attention
(``torch.nn.attention.varlen``), all in half precision on CUDA. A kernel that cannot do what a model's layers ask for is
not chosen. ``models/attention.py`` calls the one that is.

Shape legend: T tokens of all sequences, C of them with queries (the last ones of each), B sequences, H query heads, K
key/value heads, D head size.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from posttrain.core.errors import ConfigError

if TYPE_CHECKING:
    from transformers import PreTrainedModel

HALF = (torch.bfloat16, torch.float16)
"""Types that the kernels compute in."""

Varlen = Callable[..., Tensor]
"""(q [C, H, D], k [T, K, D], v [T, K, D], offsets of queries and of keys, [B + 1] int32 each, longest, scale) ->
[C, H, D], with the keyword arguments ``window`` and ``softcap`` where a layer has them and the kernel supports them.
The queries of a sequence are its last tokens."""


@dataclass(frozen=True)
class Kernel:
    """What computes attention over packed rows."""

    name: str
    """As in `train.attention`."""
    title: str
    """For the log."""
    varlen: Varlen | None = None
    """None: padded scaled dot-product attention, or the same step by step."""


def needs(model: PreTrainedModel) -> frozenset[str]:
    """Return what the model's layers ask for beyond plain causal attention: window, softcap, sinks."""
    config = model.config.get_text_config()
    found = {
        "window": bool(getattr(config, "sliding_window", None)),
        "softcap": bool(getattr(config, "attn_logit_softcapping", None)),
        "sinks": any(name.endswith(".sinks") for name, _ in model.named_parameters()),
    }
    return frozenset(name for name, needed in found.items() if needed)


def available(device: torch.device, dtype: torch.dtype, needed: frozenset[str] = frozenset()) -> list[str]:
    """Return the names of kernels that run here and do what is needed (``needs``), the fastest first; padded attention
    runs everywhere and does everything."""
    return [*(name for name in _RAGGED if _why_not(name, device, dtype, needed) is None), "sdpa"]


def choose(name: str, device: torch.device, dtype: torch.dtype, needed: frozenset[str] = frozenset()) -> Kernel:
    """Return the kernel that ``name`` (`train.attention`) stands for; ``auto`` is the fastest one that is there and
    does what the model needs (``needs``).

    Raises:
        ConfigError: it is not installed, does not run on this device in this type, or lacks what is needed.
    """
    if name == "auto":
        name = available(device, dtype, needed)[0]
    if name == "sdpa":
        return Kernel("sdpa", "padded SDPA in length groups")
    why_not = _why_not(name, device, dtype, needed)
    if why_not is not None:
        raise ConfigError(f"train.attention = {name!r}: {why_not}", hint="auto takes the fastest one that is there")
    return Kernel(name, _RAGGED[name].title, _RAGGED[name].load())


def torch_varlen(
    q: Tensor, k: Tensor, v: Tensor, cu_q: Tensor, cu_k: Tensor, longest: tuple[int, int], scale: float | None,
    window: int | None = None, *, causal: bool = True,
) -> Tensor:  # fmt: skip
    """Compute attention as a ``Varlen`` does, with core torch; ``longest``: of the queries and of the keys. Not
    ``causal``: all tokens of a sequence see each other."""
    from torch.nn.attention.varlen import varlen_attn

    repeat = q.shape[1] // k.shape[1]
    if repeat > 1:  # torch 2.11 has no grouped-query flag here
        k, v = k.repeat_interleave(repeat, dim=1), v.repeat_interleave(repeat, dim=1)
    q, k, v = q.contiguous(), k.contiguous(), v.contiguous()
    window_size = (-1 if window is None else window - 1, 0 if causal else -1)
    out = varlen_attn(q, k, v, cu_q, cu_k, *longest, scale=scale, window_size=window_size)
    assert isinstance(out, Tensor)  # a pair only where the log-sum-exp is asked for too
    return out


@dataclass(frozen=True)
class _Ragged:
    """A kernel over ragged rows, before it is known to run here."""

    title: str
    module: str
    """What must be installed."""
    load: Callable[[], Varlen]
    supports: frozenset[str] = frozenset()
    """Which of ``_NEEDS`` it computes."""
    hopper: bool = False
    """True: it needs compute capability 9.0."""


def _flash4() -> Varlen:
    from posttrain.models import flash4

    attend: Varlen = flash4.attend
    return attend


def _flash(module: str) -> Varlen:
    flash_attn_varlen_func: Callable[..., Any] = import_module(module).flash_attn_varlen_func

    def attend(
        q: Tensor, k: Tensor, v: Tensor, cu_q: Tensor, cu_k: Tensor, longest: int, scale: float | None,
        window: int | None = None, softcap: float | None = None,
    ) -> Tensor:  # fmt: skip
        out = flash_attn_varlen_func(
            q, k, v, cu_q, cu_k, longest, longest, softmax_scale=scale, causal=True,
            window_size=(-1, -1) if window is None else (window - 1, 0), softcap=softcap or 0.0,
        )  # fmt: skip
        result: Tensor = out[0] if isinstance(out, tuple) else out
        return result

    outside_of_graphs: Varlen = torch.compiler.disable(attend)
    return outside_of_graphs


def _torch() -> Varlen:
    def attend(
        q: Tensor, k: Tensor, v: Tensor, cu_q: Tensor, cu_k: Tensor, longest: int, scale: float | None,
        window: int | None = None,
    ) -> Tensor:  # fmt: skip
        return torch_varlen(q, k, v, cu_q, cu_k, (longest, longest), scale, window)

    return attend


_CAPPED = frozenset({"window", "softcap"})
_RAGGED = {
    "flash4": _Ragged("FlashAttention-4", "flash_attn.cute", _flash4, hopper=True),
    "flash3": _Ragged(
        "FlashAttention-3", "flash_attn_interface", partial(_flash, "flash_attn_interface"), _CAPPED, hopper=True
    ),
    "flash2": _Ragged("FlashAttention-2", "flash_attn.flash_attn_interface", partial(_flash, "flash_attn"), _CAPPED),
    "torch": _Ragged("torch varlen (FlashAttention-2)", "torch.nn.attention.varlen", _torch, frozenset({"window"})),
}
"""By name in `train.attention`, the fastest first."""

_NEEDS = {"window": "a sliding window", "softcap": "a cap of its scores", "sinks": "sinks"}


def _why_not(name: str, device: torch.device, dtype: torch.dtype, needed: frozenset[str]) -> str | None:
    """Return why a kernel over ragged rows cannot run; None: it can."""
    kernel = _RAGGED[name]
    if device.type != "cuda":
        return "it needs a GPU"
    if dtype not in HALF:
        return f"it needs train.dtype = 'bfloat16', not {str(dtype).removeprefix('torch.')!r}"
    if kernel.hopper and torch.cuda.get_device_capability(device) < (9, 0):
        return "it needs a Hopper GPU or a later one"
    if lacking := sorted(needed - kernel.supports):
        return f"the model's attention has {' and '.join(_NEEDS[need] for need in lacking)}, which it does not compute"
    return None if _installed(kernel.module) else f"the package of {kernel.module} is not installed"


@cache
def _installed(module: str) -> bool:
    try:
        return find_spec(module) is not None
    except ModuleNotFoundError:  # a parent package is missing
        return False

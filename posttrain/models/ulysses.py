"""Ulysses sequence parallelism (Jacobs et al. 2023, arXiv:2309.14509): workers share long sequences.

Each of ``size`` workers holds a stretch of the packed tokens and computes everything but attention on it alone. For
attention the workers exchange: each gets all tokens of its share of the heads, and gives back what it computed.

Shape legend: T packed tokens, S = T / size of them on this worker, H query heads, K key/value heads, D head size.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from posttrain.core.errors import ConfigError


@dataclass(frozen=True)
class SequenceParallel:
    """The workers that share this worker's sequences."""

    group: dist.ProcessGroup
    rank: int
    """Rank of this worker in the group."""
    size: int

    @staticmethod
    def among(size: int, rank: int, world_size: int) -> SequenceParallel | None:
        """The group of this worker where ``size`` neighbours each share their sequences; None: nothing is shared.

        A collective: every worker makes every group.
        """
        if size == 1:
            return None
        groups = [dist.new_group(list(range(first, first + size))) for first in range(0, world_size, size)]
        return SequenceParallel(groups[rank // size], rank % size, size)

    def stretch(self, tokens: int) -> slice:
        """Which of ``tokens`` packed tokens, a multiple of ``size``, are this worker's."""
        each = tokens // self.size
        return slice(self.rank * each, (self.rank + 1) * each)

    @torch.compiler.disable
    def all_tokens_of_some_heads(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """q [S, H, D], k and v [S, K, D] -> q [T, H / size, D], k and v [T, max(1, K / size), D].

        Where there are fewer key heads than workers, several workers get the same one.
        """
        repeat = max(1, self.size // k.shape[1])
        if repeat > 1:
            k, v = k.repeat_interleave(repeat, dim=1), v.repeat_interleave(repeat, dim=1)
        return self._exchange(q, to_tokens=True), self._exchange(k, to_tokens=True), self._exchange(v, to_tokens=True)

    @torch.compiler.disable
    def some_tokens_of_all_heads(self, x: Tensor) -> Tensor:
        """[T, H / size, D] -> [S, H, D]"""
        return self._exchange(x, to_tokens=False)

    def _exchange(self, x: Tensor, *, to_tokens: bool) -> Tensor:
        # torch leaves ``Function.apply`` without types.
        result: Tensor = _Exchange.apply(x, self.group, self.size, to_tokens)  # type: ignore[no-untyped-call]
        return result


def check_heads(config: Any, size: int) -> None:
    """Check that the heads of a model can be shared by ``size`` workers. Raises ``ConfigError``."""
    heads, kv_heads = config.num_attention_heads, getattr(config, "num_key_value_heads", config.num_attention_heads)
    if heads % size or (kv_heads % size and size % kv_heads):
        raise ConfigError(
            f"train.sequence_parallel = {size}: the model has {heads} query heads and {kv_heads} key heads, "
            "which so many workers cannot share",
            hint="choose a divisor of both",
        )


def _tokens_to_heads(x: Tensor, group: dist.ProcessGroup, size: int) -> Tensor:
    """[T, h, D] -> [S, h * size, D]"""
    received = torch.empty_like(x := x.contiguous())
    dist.all_to_all_single(received, x, group=group)
    parts = received.view(size, x.shape[0] // size, *x.shape[1:])  # [size, S, h, D]
    return parts.transpose(0, 1).flatten(1, 2)


def _heads_to_tokens(x: Tensor, group: dist.ProcessGroup, size: int) -> Tensor:
    """[S, h * size, D] -> [T, h, D]"""
    parts = x.unflatten(1, (size, -1)).transpose(0, 1).contiguous()  # [size, S, h, D]
    received = torch.empty_like(parts)
    dist.all_to_all_single(received, parts, group=group)
    return received.flatten(0, 1)


class _Exchange(torch.autograd.Function):
    """One of the two exchanges forward, the other one backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup, size: int, to_tokens: bool) -> Tensor:
        ctx.group, ctx.size, ctx.to_tokens = group, size, to_tokens
        return (_heads_to_tokens if to_tokens else _tokens_to_heads)(x, group, size)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None]:
        back = _tokens_to_heads if ctx.to_tokens else _heads_to_tokens
        return back(grads[0], ctx.group, ctx.size), None, None, None

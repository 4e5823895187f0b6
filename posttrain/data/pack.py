"""Ragged batches: sequences side by side without padding, balanced over workers, cut into micro-batches.

Shape legend: T tokens of all sequences, B sequences, I images, P patches of all images.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from itertools import accumulate, pairwise
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from posttrain.algos.segments import segment_ids, segment_sum
from posttrain.core.types import Ids
from posttrain.data.bins import assign
from posttrain.data.prompts import Prompts

Bools = Sequence[bool] | npt.NDArray[np.bool_]


@dataclass(frozen=True)
class Images:
    """The images of a batch, one after another in the order of their sequences."""

    pixels: Tensor
    """[P, channels * side * side] uint8 patches"""
    grids: Tensor
    """[I, 3] int64 patches of each image: of how many pictures, and in height and width of each"""
    counts: Tensor
    """[B] int64 images of each sequence"""
    merge: int
    """Patches along each side of what becomes one token."""
    smallest: tuple[int, int, int]
    """The grid of the smallest image that the model reads."""

    @property
    def patches(self) -> list[int]:
        """Return the patches of each image."""
        return self.grids.prod(1).tolist()

    def patches_of_sequences(self) -> list[int]:
        """Return the patches of each sequence."""
        return [sum(part) for part in _split(self.patches, self.counts.tolist())]

    def select(self, sequences: Sequence[int]) -> Images | None:
        """Return the images of these sequences, in this order; None where they have none."""
        numbers = _split(range(len(self.grids)), self.counts.tolist())
        chosen = [image for b in sequences for image in numbers[b]]
        if not chosen:
            return None
        rows = self.pixels.split(self.patches)
        return Images(
            torch.cat([rows[image] for image in chosen]),
            self.grids[chosen],
            self.counts[list(sequences)],
            self.merge,
            self.smallest,
        )

    def blank(self, sequences: int) -> Images:
        """Return one small image that belongs to none of so many sequences: a worker that has no images computes it
        where others compute theirs, since collectives need every worker."""
        return Images(
            self.pixels.new_zeros(math.prod(self.smallest), self.pixels.shape[1]),
            torch.tensor([self.smallest]),
            torch.zeros(sequences, dtype=torch.int64),
            self.merge,
            self.smallest,
        )


def _split(items: Sequence[int], counts: Sequence[int]) -> list[Sequence[int]]:
    """Return stretches of so many items each."""
    ends = list(accumulate(counts, initial=0))
    return [items[start:end] for start, end in pairwise(ends)]


@dataclass
class PackedBatch:
    """B sequences side by side in T tokens. The same type feeds SFT and RL; columns a stage has no use for are None.

    Log-probability columns hold at position t the log-probability of token t given those before it.
    """

    input_ids: Tensor
    """[T] int64"""
    position_ids: Tensor
    """[T] int64, restarting at 0 in each sequence"""
    cu_seqlens: Tensor
    """[B + 1] int32 offsets: sequence b is tokens cu_seqlens[b]:cu_seqlens[b + 1]"""
    loss_mask: Tensor
    """[T] bool, true where the token carries loss (the assistant wrote it)"""
    loss_weights: Tensor | None = None
    """[T] float32: the loss is the sum of weight times per-token loss (see ``algos.reduce``)"""
    advantages: Tensor | None = None
    """[T] float32"""
    rollout_logprobs: Tensor | None = None
    """[T] float32, the engine's"""
    old_logprobs: Tensor | None = None
    """[T] float32, under the policy that ratios are taken to; None: the policy has not moved since it sampled"""
    ref_logprobs: Tensor | None = None
    """[T] float32, the reference model's"""
    correction: Tensor | None = None
    """[T] float32 factor of the loss weights (``algos.corrections``)"""
    prepared: Tensor | None = None
    """[T] column that the policy loss reads (``algos.catalog.PolicyLoss.prepare``)"""
    values: Tensor | None = None
    """[T] float32, the critic's before this step's first update"""
    returns: Tensor | None = None
    """[T] float32, what the critic is to predict"""
    routing: Tensor | None = None
    """[T, bytes of a token] uint8, the experts that the engine chose, as ``models.experts`` stores them"""
    shared: Tensor | None = None
    """[B] int64: so many first tokens of a sequence are those of the last sequence before it that has 0 here, and are
    computed once for both; None: every sequence is computed whole. The batch holds all tokens of all sequences in
    either case."""
    image_tokens: Tensor | None = None
    """[T] bool, true where a token stands for a piece of an image"""
    rotary_ids: Tensor | None = None
    """[T, 3] int64 positions in time, height and width, for models whose rotary embedding takes these; None:
    ``position_ids`` in each"""
    images: Images | None = None
    """The images; None: no sequence has any"""

    @property
    def num_tokens(self) -> int:
        return len(self.input_ids)

    @property
    def num_sequences(self) -> int:
        return len(self.cu_seqlens) - 1

    @property
    def lengths(self) -> list[int]:
        return self.cu_seqlens.diff().tolist()

    @property
    def carrying(self) -> list[int]:
        """Return the sequences with a token that carries loss."""
        counts = segment_sum(self.loss_mask, segment_ids(self.cu_seqlens), self.num_sequences)
        return counts.nonzero().flatten().tolist()

    @staticmethod
    def from_sequences(ids: Sequence[Ids], masks: Sequence[Bools]) -> PackedBatch:
        """Pack sequences in order. The first token of a sequence never carries loss: nothing predicts it."""
        lengths = torch.tensor([len(s) for s in ids], dtype=torch.int64)
        offsets = torch.zeros(len(ids) + 1, dtype=torch.int32)
        offsets[1:] = lengths.cumsum(0)
        mask = torch.cat([torch.as_tensor(m, dtype=torch.bool) for m in masks])
        mask[offsets[:-1].long()] = False
        return PackedBatch(
            input_ids=torch.cat([torch.as_tensor(s, dtype=torch.int64) for s in ids]),
            position_ids=torch.cat([torch.arange(n) for n in lengths.tolist()]),
            cu_seqlens=offsets,
            loss_mask=mask,
        )

    def select(self, sequences: Sequence[int]) -> PackedBatch:
        """Return the batch of these sequences, in this order. Nothing is shared in it."""
        starts = self.cu_seqlens.tolist()
        tokens = torch.cat([torch.arange(starts[b], starts[b + 1]) for b in sequences])
        lengths = torch.tensor([starts[b + 1] - starts[b] for b in sequences])
        offsets = torch.zeros(len(sequences) + 1, dtype=torch.int32)
        offsets[1:] = lengths.cumsum(0)
        columns: dict[str, Any] = {
            f.name: None if (column := getattr(self, f.name)) is None else column[tokens]
            for f in fields(self)
            if f.name not in ("cu_seqlens", "shared", "images")
        }
        images = None if self.images is None else self.images.select(sequences)
        return PackedBatch(cu_seqlens=offsets, images=images, **columns)

    def empty_like(self) -> PackedBatch:
        """Return a two-token batch without loss, for a worker that has run out of micro-batches while others have not
        (collectives need every worker)."""
        one = replace(self.select([0]), images=None)
        blank: dict[str, Any] = {
            f.name: None if (column := getattr(one, f.name)) is None else column.new_zeros(2, *column.shape[1:])
            for f in fields(one)
        }
        blank |= {"cu_seqlens": torch.tensor([0, 2], dtype=torch.int32), "position_ids": torch.arange(2)}
        return PackedBatch(**blank)


@dataclass(frozen=True)
class Placement:
    """Which sequences go to which worker and micro-batch. ``parts[rank][m]`` lists sequence indices; every rank has the
    same number of micro-batches, and an empty list stands for a micro-batch without work."""

    parts: list[list[list[int]]]
    prompts: Prompts | None = None
    """Prompts that each micro-batch computes once; None: every sequence is computed whole."""
    among: Sequence[int] | None = None
    """Sequences of the batch that ``parts`` and ``prompts`` count; the others are not computed. None: all."""

    def shards(self, batch: PackedBatch) -> list[list[PackedBatch]]:
        """Return ``batch`` as ``[rank][micro-batch]``."""
        shards = [[self._micro_batch(batch, part) for part in rank] for rank in self.parts]
        return shards if batch.images is None else _in_step(shards, batch.images)

    def _micro_batch(self, batch: PackedBatch, part: list[int]) -> PackedBatch:
        if not part:
            return batch.empty_like()
        shared = [0] if self.prompts is None else self.prompts.shared(part)
        return replace(batch.select(self._numbers(part)), shared=torch.tensor(shared) if any(shared) else None)

    def _numbers(self, part: list[int]) -> list[int]:
        """Return the numbers that sequences of a micro-batch have in the batch."""
        return part if self.among is None else [self.among[b] for b in part]

    def gather(self, columns: Sequence[Sequence[Tensor]], batch: PackedBatch) -> Tensor:
        """Put per-token columns computed as ``[rank][micro-batch]`` back into the order of ``batch``: [T]; 0 where
        nothing was computed."""
        starts = batch.cu_seqlens.tolist()
        out = torch.zeros(batch.num_tokens, dtype=columns[0][0].dtype)
        for rank, rank_columns in zip(self.parts, columns, strict=True):
            for part, column in zip(rank, rank_columns, strict=True):
                at = 0
                for b in self._numbers(part):
                    n = starts[b + 1] - starts[b]
                    out[starts[b] : starts[b + 1]] = column[at : at + n]
                    at += n
        return out


def _in_step(shards: list[list[PackedBatch]], images: Images) -> list[list[PackedBatch]]:
    """Give every rank's micro-batch an image where any rank's has one. So has the last: what is summed over workers
    once a step is summed in it, and a tower whose images are all of sequences that are left out gets its gradient, of
    zeros."""
    seen = [any(micro.images is not None for micro in micros) for micros in zip(*shards, strict=True)]
    seen[-1] = True
    return [
        [
            replace(micro, images=images.blank(micro.num_sequences)) if has and micro.images is None else micro
            for has, micro in zip(seen, rank, strict=True)
        ]
        for rank in shards
    ]


def place(lengths: Sequence[int], *, ranks: int, token_budget: int, sequence_limit: int | None = None) -> Placement:
    """Return the worker and the micro-batch of each sequence; see ``assign``."""
    return Placement(assign(lengths, ranks=ranks, token_budget=token_budget, sequence_limit=sequence_limit))


def costs(batch: PackedBatch, token_budget: int, patch_budget: int | None) -> list[int]:
    """Return what each sequence takes of ``token_budget``: its tokens, or its patches' share of theirs if that is more.
    What fits so fits both budgets."""
    if batch.images is None or patch_budget is None:
        return batch.lengths
    patches = batch.images.patches_of_sequences()
    return [max(n, -(-p * token_budget // patch_budget)) for n, p in zip(batch.lengths, patches, strict=True)]


def place_by_prompt(prompts: Prompts, *, ranks: int, token_budget: int) -> Placement:
    """Return a placement in which a micro-batch computes each of its prompts once; see ``Prompts.assign``."""
    return Placement(prompts.assign(ranks=ranks, token_budget=token_budget), prompts)

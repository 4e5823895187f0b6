"""How a step divides: over ranks, micro-batches and optimizer steps. By the functions that a run divides with."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from posttrain.config import Config
from posttrain.data.bins import assign
from posttrain.plan.images import ImageLoad
from posttrain.plan.speed import RankWork
from posttrain.train.schedule import learning_rate


@dataclass(frozen=True)
class Lengths:
    """Tokens of the sequences that are trained on."""

    mean: float
    longest: int
    """That the config allows"""
    prompt: float = 0.0
    """Mean of those that carry no loss, which are part of ``mean``: in `rl` the prompt"""
    source: str = ""
    """Where the mean comes from, in words"""
    turns: float = 1.0
    """Requests of an episode to the engine"""
    images: ImageLoad = field(default_factory=ImageLoad)

    @property
    def loss_share(self) -> float:
        """Share of the tokens that carry loss."""
        return 1.0 - self.prompt / self.mean if self.mean else 1.0


def longest_of(cfg: Config) -> int:
    """Most tokens of a sequence."""
    if cfg.command in ("sft", "prefer"):
        return cfg.data.max_length
    return cfg.rollout.max_prompt_tokens + cfg.rollout.max_response_tokens


def assumed_lengths(cfg: Config, mean: float | None = None) -> Lengths:
    """Without data: all sequences are as long as the config allows, or of a ``mean`` that somebody gives."""
    longest = longest_of(cfg)
    of_rl = cfg.command not in ("sft", "prefer")
    share = cfg.rollout.max_prompt_tokens / longest if of_rl else 0.0
    turns = float(cfg.rollout.max_turns)
    if mean is None:
        return Lengths(longest, longest, longest * share, "assumed: the longest that the config allows", turns)
    mean = min(mean, longest)
    prompt = min(mean * share, cfg.rollout.max_prompt_tokens) if of_rl else 0.0
    return Lengths(mean, longest, prompt, "--length", turns)


def sequences_of_step(cfg: Config) -> int:
    """Sequences that a step trains on, over all workers."""
    factor = {"sft": 1, "prefer": 2}.get(cfg.command, cfg.rollout.n)
    return cfg.data.batch_size * factor


@dataclass(frozen=True)
class StepBatch:
    """The arithmetic of one step."""

    sequences: int
    """Sequences of a step, over all workers"""
    groups: int
    """Prompts (`rl`), pairs or rows of them"""
    updates: int
    """Optimizer steps of a step"""
    groups_per_update: tuple[int, ...]
    ranks: int
    """Data-parallel: workers that get different sequences"""
    tokens: int
    """Tokens of a step, over all ranks"""
    micro_batches: int
    """Micro-batches of an optimizer step on each rank; the most of its updates"""
    largest: int
    """Tokens of its largest micro-batch"""
    worst: int
    """Tokens that a micro-batch can have at most"""
    work: RankWork
    """Work of the rank with the most tokens, in its largest optimizer step"""
    steps: int | None
    """Steps of the run; None: the data is not there to count them"""
    rates: tuple[tuple[int, float], ...]
    """(optimizer step, learning rate) of some of them"""

    @property
    def tokens_per_rank(self) -> float:
        return self.tokens / self.ranks

    @property
    def total_updates(self) -> int | None:
        """Optimizer steps of the run; of RL with a critic those of the actor."""
        return self.rates[-1][0] if self.rates else None


def batch_of(cfg: Config, lengths: Lengths, steps: int | None, of_step: Sequence[int] | None = None) -> StepBatch:
    """The arithmetic of a step.

    Args:
        lengths: what is known of them.
        of_step: tokens of each sequence of a step, in order; None: all of the mean.
    """
    train = cfg.train
    ranks = max(1, cfg.cluster.workers // train.sequence_parallel)
    updates = cfg.algo.updates_per_step if cfg.command == "rl" else 1
    sequences = list(of_step) if of_step is not None else [round(lengths.mean)] * sequences_of_step(cfg)
    of_mean = of_step is None and lengths.mean < lengths.longest
    members = cfg.rollout.n if cfg.command == "rl" else 1
    groups = len(sequences) // members
    sizes = _split(groups, updates)
    parts, start = [], 0
    for size in sizes:
        part = sequences[start : start + size * members]
        start += size * members
        if part:
            budget, limit = train.tokens_per_microbatch, train.sequences_per_microbatch
            parts.append(_placed(tuple(part), ranks, budget, limit, of_mean=of_mean))
    works = [max(ranks_of, key=lambda work: work.tokens) for ranks_of in parts]
    work = max(works, key=lambda work: work.tokens, default=RankWork(()))
    most = max((len(work.micro_batches) for work in works), default=0)
    share = -(-sum(sequences) // ranks) if sequences else 0
    return StepBatch(
        sequences=len(sequences),
        groups=groups,
        updates=updates,
        groups_per_update=tuple(sizes),
        ranks=ranks,
        tokens=sum(sequences),
        micro_batches=most,
        largest=max((w.largest for ranks_of in parts for w in ranks_of), default=0),
        worst=_worst(cfg, lengths, share, ranks, max(sizes, default=0) * members),
        work=RankWork(work.micro_batches, lengths.loss_share, lengths.images.count, lengths.images.patches),
        steps=steps,
        rates=_rates(cfg, steps, updates),
    )


def patches_at_most(cfg: Config, lengths: Lengths, tokens: int, merged: int) -> int:
    """Return the patches of a micro-batch of so many tokens, of which an image has one for each ``merged`` patches.
    Where the data is not known all tokens may be of images."""
    images = lengths.images
    share = _densest(cfg, lengths) if images.source and lengths.mean else merged
    budget = cfg.train.patches_per_microbatch
    found = min(math.ceil(tokens * min(share, merged)), budget or tokens * merged)
    return max(found, math.ceil(images.patches)) if images.count else found


def _densest(cfg: Config, lengths: Lengths) -> float:
    """Return the patches for each token of the micro-batch that has the most of them, where sequences are those rows
    that were looked at, with as much text as the mean has: those with large images are longer, and come together."""
    rows = lengths.images.rows
    text = max(1.0, lengths.mean - lengths.images.count * lengths.images.tokens)
    copies = min(sequences_of_step(cfg), _SIMULATED) // len(rows) or 1
    patches, tokens = zip(*rows * copies, strict=True)
    micros = _assigned(tuple(round(text + each) for each in tokens), cfg.train.tokens_per_microbatch)
    dense: float = max(sum(patches[i] for i in micro) / sum(text + tokens[i] for i in micro) for micro in micros)
    return dense


_SIMULATED = 256
"""Sequences that are enough to see which come together."""


@functools.lru_cache(maxsize=64)
def _assigned(lengths: tuple[int, ...], budget: int) -> list[list[int]]:
    return assign(lengths, ranks=1, token_budget=budget)[0]


def _split(groups: int, updates: int) -> list[int]:
    """Groups of each optimizer step, as numpy's ``array_split`` divides them."""
    each, more = divmod(groups, updates)
    return [each + (i < more) for i in range(updates)]


@functools.lru_cache(maxsize=256)
def _placed(lengths: tuple[int, ...], ranks: int, budget: int, limit: int | None, *, of_mean: bool) -> list[RankWork]:
    """Return the work of each rank. Cached, because most settings that a plan tries leave it as it is.

    Args:
        of_mean: lengths that are all the same stand for others, of which they are the mean.
    """
    if len(set(lengths)) == 1:
        fit = min(max(1, budget // lengths[0]), limit or len(lengths))
        # Where several fit, those that are longer and shorter fill a micro-batch up.
        if of_mean and fit >= _SEVERAL and fit != limit:
            return _filled(lengths[0], len(lengths), ranks, budget)
        return _alike(lengths[0], len(lengths), ranks, fit)
    placed = assign(lengths, ranks=ranks, token_budget=budget, sequence_limit=limit)
    return [RankWork(tuple(tuple(lengths[i] for i in micro) for micro in of_rank)) for of_rank in placed]


_SEVERAL, _FULL = 4, 0.98
"""Sequences of a micro-batch, and what those of different lengths fill of it."""


def _filled(length: int, count: int, ranks: int, budget: int) -> list[RankWork]:
    """What ``assign`` does with ``count`` sequences of this mean: as few micro-batches as hold the tokens, which share
    them evenly."""
    shares = _split(count, ranks)
    bins = max(1, math.ceil(shares[0] * length / (_FULL * budget)))
    return [
        RankWork(tuple((round(share * length / bins / size),) * size for size in _split(share, bins) if size))
        for share in shares
    ]


def _alike(length: int, count: int, ranks: int, most: int) -> list[RankWork]:
    """What ``assign`` does with ``count`` sequences of one length, of which ``most`` fit into a micro-batch: all share
    as evenly as they can. It would take seconds for thousands of them."""
    shares = _split(count, ranks)
    bins = max(1, -(-shares[0] // most))
    return [RankWork(tuple((length,) * size for size in _split(share, bins))) for share in shares]


def _worst(cfg: Config, lengths: Lengths, share: int, ranks: int, sequences: int) -> int:
    """Tokens of the largest micro-batch that this config can make of an update."""
    limit = cfg.train.sequences_per_microbatch or sequences
    budget = min(cfg.train.tokens_per_microbatch, limit * lengths.longest)
    of_rank = -(-sequences // ranks) * lengths.longest
    return max(lengths.longest, min(budget, of_rank)) if of_rank else share


def _rates(cfg: Config, steps: int | None, updates: int) -> tuple[tuple[int, float], ...]:
    """Learning rates of the first optimizer step, the first after warm-up, and the last."""
    if steps is None:
        return ()
    total, optim = max(1, steps - cfg.critic.warmup_steps) * updates, cfg.train.optim
    warmup = round(optim.warmup_ratio * total) if optim.warmup_steps is None else optim.warmup_steps
    shown = dict.fromkeys((1, min(warmup + 1, total), total))
    return tuple((step, learning_rate(optim, step - 1, total)) for step in shown)

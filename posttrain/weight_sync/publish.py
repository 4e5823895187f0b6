"""Weight updates of all engines: send the trainer's weights, and check on every engine that they arrived."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from posttrain.core.errors import PosttrainError, WeightSyncError, diverged
from posttrain.core.sizes import SYNC_CHECK_SEQUENCES, SYNC_CHECK_TOKENS
from posttrain.core.types import Ids
from posttrain.models.logprobs import likelier_half
from posttrain.weight_sync.endpoints import R, Receivers, WeightSource
from posttrain.weight_sync.transfers import TransferChooser, WeightTransfer


def check_sequences(sequences: Sequence[Ids]) -> list[Ids]:
    """Return the starts of the first few sequences, which are enough for a weight-sync check."""
    return [ids[:SYNC_CHECK_TOKENS] for ids in sequences[:SYNC_CHECK_SEQUENCES]]


async def publish(
    source: WeightSource,
    receivers: Sequence[R],
    transfers: TransferChooser,
    *,
    version: int,
    check: Sequence[Ids],
    tolerance: float,
    free_gpus: Callable[[], Awaitable[None]] | None = None,
    replace: Callable[[R, PosttrainError], Awaitable[Any]] | None = None,
    frozen: bool = True,
) -> dict[str, float]:
    """Send the trainer's weights to every engine as ``version``, and check them.

    The weight-sync check: every engine scores the ``check`` sequences, and its log-probabilities must match the
    trainer's over the likelier half of the tokens (``likelier_half``).

    Args:
        tolerance: largest mean absolute difference of an engine's log-probabilities from the trainer's.
        free_gpus: frees memory of trainers on the GPUs, before engines fill them.
        replace: replaces a dead engine by a new one that has these weights; None: its death is raised.
        frozen: False: every engine has what training leaves as it is, a frozen vision tower, and it is not sent.

    Returns:
        ``sync/check_gap``, the largest mean absolute difference of any engine; on GPUs ``sync/gpu_used_gib``, what
        all processes used of the fullest GPU during the update; ``perf/sync_send_s`` and ``perf/sync_check_s``, the
        seconds of sending the weights and of the check.

    Raises:
        RunError: the trainer's weights, or its log-probabilities of the ``check`` sequences, are not finite.
        WeightSyncError: an engine's mean difference is above ``tolerance``; the message names it.
    """
    await source.check_finite(f"weight version {version} is not sent to the samplers")
    targets = Receivers(receivers)
    scores: dict[str, list[list[float]]] = {}

    async def finish(receiver: R) -> None:
        scores[receiver.name] = await receiver.finish_update(version, check)

    begun = time.perf_counter()
    if any(receiver.trainers for receiver in receivers):  # the engines' KV caches take the memory that trainers need
        expected, _ = await asyncio.gather(source.score(check), targets.each(lambda receiver: receiver.wake()))
        scored = time.perf_counter()
        used = await _send(source, targets, transfers, frozen)
        sent = time.perf_counter()
        if free_gpus is not None:
            await free_gpus()
        await targets.each(finish)
    else:  # they have GPUs of their own, and score at the same time
        await targets.each(lambda receiver: receiver.wake())
        scored = time.perf_counter()
        used = await _send(source, targets, transfers, frozen)
        sent = time.perf_counter()
        expected, _ = await asyncio.gather(source.score(check), targets.each(finish))
        if free_gpus is not None:
            await free_gpus()
    seconds = {"perf/sync_send_s": sent - scored, "perf/sync_check_s": time.perf_counter() - sent + scored - begun}
    if not expected.isfinite().all():
        raise diverged(
            f"the {source.role} gives log-probabilities that are not finite", f"weight version {version} is of no use"
        )
    ranked = expected.clone()
    ranked[[0, *itertools.accumulate(len(ids) for ids in check[:-1])]] = -torch.inf  # first tokens, which have none
    counted = likelier_half(ranked)
    gap = _largest_gap(scores, expected, counted, version, tolerance)
    for receiver, error in targets.lost:
        if replace is None:
            raise error
        await replace(receiver, error)
    return {"sync/check_gap": gap, **seconds} | ({"sync/gpu_used_gib": used} if used else {})


def _largest_gap(
    scores: dict[str, list[list[float]]], expected: Tensor, counted: Tensor, version: int, tolerance: float
) -> float:
    """Return the largest mean absolute difference of an engine's scores from ``expected`` [T], over the tokens
    ``counted``. Raises ``WeightSyncError`` for one above ``tolerance``."""
    gaps = [0.0]
    for name, of_sequences in scores.items():
        difference = torch.tensor([x for s in of_sequences for x in s]) - expected
        gap = float(difference.abs()[counted].mean())
        if not gap <= tolerance:
            raise WeightSyncError(
                f"{name} does not hold weight version {version}: in the weight-sync check its log-probabilities "
                f"differ from the trainer's by {gap:.4g} on average (tolerance {tolerance:g})",
                hint="if the engines' numerics really differ this much, raise cluster.sync_tolerance",
            )
        gaps.append(gap)
    return max(gaps)


async def _send(source: WeightSource, targets: Receivers[R], transfers: TransferChooser, frozen: bool) -> float:
    """Send the weights to all engines that live. Returns the GiB that the fullest GPU had in use at the end.

    Raises:
        WeightSyncError: every try has lost an engine.
    """
    # A broadcast that lost a rank begins again without its engine, and may lose another that is not known yet.
    why: str | None = None
    for _ in range(1 + len(targets.living)):
        if not targets.living:
            return 0.0
        transfer = transfers.choose(source, targets.living)
        used = await _stream(transfer, targets, frozen)
        if (why := transfer.broken) is None:
            return used
    raise WeightSyncError(f"samplers failed in every try to send them new weights, the last time: {why}")


async def _stream(transfer: WeightTransfer, targets: Receivers[R], frozen: bool) -> float:
    """Transfer all weights, bucket by bucket: trainers gather the next one while engines read the last. Returns as
    ``_send``."""
    source = transfer.source
    deliveries: list[asyncio.Task[None] | None] = [None, None]
    await source.open_sender(transfer.transports(), transfer.bucket_bytes, frozen)
    try:
        for slot in itertools.cycle((0, 1)):
            if (delivery := deliveries[slot]) is not None:
                await delivery
            buckets = None if transfer.broken else await source.next_bucket(slot)
            if buckets is None:
                break
            deliveries[slot] = asyncio.create_task(transfer.deliver(slot, buckets, targets))
        await asyncio.gather(*(delivery for delivery in deliveries if delivery is not None))
    except BaseException:
        for delivery in deliveries:
            if delivery is not None:
                delivery.cancel()
        with contextlib.suppress(PosttrainError):  # the first failure is the one to report
            await source.close_sender()
        raise
    return await source.close_sender()

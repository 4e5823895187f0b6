"""Sizes of memory that the runtime allocates, and that a plan predicts."""

from __future__ import annotations

GIB = 2**30

LOGITS_BYTES = 970 << 20
"""Most bytes of float32 logits at once in the output head (``models.logprobs``)."""
DEVICE_BUCKET_BYTES = 2 << 30
"""Most bytes of a bucket of weights that engines read on the trainers' GPUs."""
HOST_BUCKET_BYTES = 512 << 20
"""Most bytes of a bucket that engines read in host memory."""
SENT_BUCKET_BYTES = 2 << 30
"""Most bytes of a bucket that is broadcast to engines."""
GATHER_BYTES = 256 << 20
"""Bytes of sharded weights that one collective gathers (``models.gather``)."""
SYNC_CHECK_SEQUENCES = 4
"""Trajectories of the step that every engine scores in the weight-sync check."""
SYNC_CHECK_TOKENS = 256
"""The first tokens of each, which are scored: engines and trainer wait for the scores."""


def logits_rows(count: int, vocabulary: int, buffer: int = LOGITS_BYTES) -> int:
    """Return how many of ``count`` rows of logits are in the buffer at once, so that there are as few chunks as it
    allows, all of one size. That is a multiple of 128 rows, for which matrix products are fast."""
    fits = buffer // (vocabulary * 4)
    most = max(1, fits // 128 * 128 or fits)
    size = -(-count // max(1, -(-count // most)))
    return min(most, -(-size // 128) * 128)


def bucket_bytes(whole: int, most: int) -> int:
    """Return the size of a bucket for weights of ``whole`` bytes: at most half of them, so that two buckets are
    in use."""
    return min(most, -(-whole // 2))

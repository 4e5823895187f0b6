"""Sizes that a run allocates by and that are known beforehand. Who allocates reads them here, and so does a plan."""

from __future__ import annotations

GIB = 2**30

LOGITS_BYTES = 970 << 20
"""Room for float32 logits in the output head (``models.logprobs``)."""
DEVICE_BUCKET_BYTES = 2 << 30
"""Most of a bucket of weights that engines read on the trainers' GPUs."""
HOST_BUCKET_BYTES = 512 << 20
"""Most of one that they read in host memory."""
SENT_BUCKET_BYTES = 2 << 30
"""Most of one that is sent to them."""
GATHER_BYTES = 256 << 20
"""Bytes of sharded weights that one collective gathers for a bucket (``models.gather``)."""
CANARIES = 4
"""Trajectories of the step that every sampler scores after a weight update."""
CANARY_TOKENS = 256
"""Tokens of each that are scored, its first ones: engines and trainer wait for the scores."""


def logits_rows(count: int, vocabulary: int, buffer: int = LOGITS_BYTES) -> int:
    """Rows of logits, of ``count``, that are in the buffer at once: as few chunks as it allows, of equal size: a
    multiple of 128 rows, which matrix products like."""
    fits = buffer // (vocabulary * 4)
    most = max(1, fits // 128 * 128 or fits)
    size = -(-count // max(1, -(-count // most)))
    return min(most, -(-size // 128) * 128)


def bucket_bytes(whole: int, most: int) -> int:
    """Return the size of a bucket for weights of ``whole`` bytes: half of a small model, so that two are in use."""
    return min(most, -(-whole // 2))

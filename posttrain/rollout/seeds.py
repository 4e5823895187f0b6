"""Seeds of requests, so that what is sampled depends on nothing but what is asked for."""

from __future__ import annotations

from hashlib import blake2b


def seed_of(*parts: int) -> int:
    """Return a seed in [0, 2^31), which every engine takes, spread evenly whatever the parts are.

    An episode's is that of (run.seed, row of the prompt, number of the sample), a request's that of (the episode's,
    tokens before it): turns of an episode differ, and a turn that is sampled again is the same.
    """
    digest = blake2b(" ".join(map(str, parts)).encode(), digest_size=4).digest()
    return int.from_bytes(digest, "big") >> 1

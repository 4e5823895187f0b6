"""The contracts of a sampler and of the engine behind it: tokens in and tokens out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from posttrain.core.types import Ids, Sample, SamplingParams
from posttrain.models.load import ModelSource
from posttrain.weight_sync.buckets import Bucket


@dataclass(frozen=True)
class EngineSpec:
    """What an engine is made of."""

    source: ModelSource
    device: str
    dtype: str
    seed: int
    kv_tokens: int
    """Of the KV cache on a CPU."""
    max_concurrent: int
    memory_fraction: float
    """Of the GPU, for weights and KV cache."""
    stop_token_ids: list[int]
    threads: int = 0
    replica: int = 0
    """Which of several engines: each samples with a seed of its own."""
    engine: str = "hf"
    max_tokens: int = 4096
    """Of prompt and continuation together."""
    tensor_parallel: int = 1
    truncates: bool = False
    """Whether any request will come with top-p or top-k."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """More arguments of the engine's own."""
    sleeps: bool = False
    """Whether it will be asked to sleep."""
    batch_invariant: bool = False
    """Whether a sequence's result must not depend on the batch (`rollout.batch_invariant`)."""


class Generator(Protocol):
    """What an episode needs of a sampler."""

    async def generate(self, prompt_ids: Ids, params: SamplingParams) -> Sample:
        """Continue ``prompt_ids``. Cancelling the coroutine aborts the request.

        A sample that ends with ``abort`` was cut off by new weights: ask for the rest, which they will sample.
        """
        ...


class Sampler(Generator, Protocol):
    """One engine replica as the driver sees it. All methods are coroutines of one event loop."""

    async def score(self, sequences: Sequence[Ids]) -> list[list[float]]:
        """Log-probability at temperature 1 of each token given those before it (0 for the first) under the current
        weights."""
        ...

    async def close(self) -> None: ...


class Engine(Sampler, Protocol):
    """A sampler in the process that holds its weights."""

    async def sleep(self) -> None:
        """Give back the memory of weights and KV cache. Requests that run come back with ``abort``, or there may be
        none; new ones wait for ``finish_update``, before which all weights have to come anew."""
        ...

    async def wake(self) -> None:
        """Make room for weights, if it sleeps."""
        ...

    async def load_bucket(self, bucket: Bucket) -> None:
        """Overwrite the parameters that lie in a bucket, and have done so when this returns. Requests that run come
        back with ``abort``, or there may be none; new ones wait until ``finish_update``."""
        ...

    async def finish_update(self, version: int, canary: Sequence[Ids] = ()) -> list[list[float]]:
        """All parameters have been loaded: make room for the KV cache, drop what was computed with the old ones, and
        count as ``version`` from now on.

        Returns:
            Scores of the canary under the new weights, as ``score``'s; before any request comes in again.

        Raises:
            WeightSyncError: a parameter of the engine has not been loaded since the last call.
        """
        ...

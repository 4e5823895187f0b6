"""The contracts of samplers and engines: token ids in, token ids out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from posttrain.config import RolloutConfig
from posttrain.core.types import Ids, Sample, SamplingParams
from posttrain.data.images import PlacedImage
from posttrain.models.load import ModelSource
from posttrain.weight_sync.buckets import Bucket


@dataclass(frozen=True)
class EngineSpec:
    """What an engine process needs to start: the model, the resolved device and type, and `[rollout]`."""

    source: ModelSource
    device: str
    dtype: str
    seed: int
    rollout: RolloutConfig
    stop_token_ids: list[int]
    threads: int = 0
    """CPU threads of the process; 0: the default of torch."""
    replica: int = 0
    """Index of the engine: each samples with a seed of its own."""
    shares_gpu: bool = False
    """Other engines are on its GPUs: what is free there when it starts says nothing of what it may take."""
    truncates: bool = False
    """Requests may ask for top-p or top-k."""
    episodes: int = 0
    """Episodes of a training step on this engine; 0: any number."""
    weights_follow: bool = False
    """An update brings the weights before the engine is asked for anything: it need not have the model's own first."""
    frozen_tower: bool = False
    """Training leaves the vision tower as it is: updates may leave it out."""
    steps_before: int = 0
    """Steps that engines of this run have sampled with the same weights: what they had drawn is not drawn again."""

    @property
    def stream(self) -> int:
        """Seed of its stream of random numbers."""
        return (self.seed * 1009 + self.replica + self.steps_before * 1_000_003) % 2**31

    @property
    def max_tokens(self) -> int:
        """Most tokens of a prompt and its continuation together."""
        return self.rollout.max_prompt_tokens + self.rollout.max_response_tokens

    @property
    def torch_dtype(self) -> torch.dtype:
        found: torch.dtype = getattr(torch, self.dtype)
        return found


class Generator(Protocol):
    """The part of a sampler that an episode uses."""

    async def generate(self, prompt_ids: Ids, params: SamplingParams, images: Sequence[PlacedImage] = ()) -> Sample:
        """Continue ``prompt_ids``, which hold the tokens of ``images``. Cancelling the coroutine aborts the request.

        A sample that ends with ``abort`` was cut off by a weight update. The caller asks for the rest, which the new
        weights sample. With `rollout.keep_kv` updates cut nothing off: the sample goes on, and says which they were.
        """
        ...


class Sampler(Generator, Protocol):
    """One engine replica as the driver sees it. All methods are coroutines of one event loop."""

    async def score(self, sequences: Sequence[Ids]) -> list[list[float]]:
        """Return the log-probability at temperature 1 of each token given those before it (0 for the first) under the
        current weights."""
        ...

    async def close(self) -> None: ...


class Engine(Sampler, Protocol):
    """A sampler in the process that holds its weights."""

    max_concurrent: int
    """Most requests that it runs at once. More wait in it."""

    async def sleep(self) -> None:
        """Free the memory of weights and KV cache. Requests that run return with ``abort``. New requests wait for
        ``finish_update``, before which all weights must be loaded again."""
        ...

    async def wake(self) -> None:
        """Allocate memory for weights, if the engine sleeps."""
        ...

    async def load_bucket(self, bucket: Bucket) -> None:
        """Overwrite the parameters that lie in a bucket before returning. Requests that run return with ``abort``, or
        with `rollout.keep_kv` are held up; new requests wait for ``finish_update``."""
        ...

    async def finish_update(self, version: int, check: Sequence[Ids] = ()) -> list[list[float]]:
        """Finish an update after all parameters were loaded: allocate the KV cache, drop what was computed with the old
        parameters but for what requests keep, and count as ``version`` from now on.

        Returns:
            Scores of the ``check`` sequences under the new weights, as by ``score``, before requests are admitted.

        Raises:
            WeightSyncError: a parameter of the engine has not been loaded since the last call.
        """
        ...

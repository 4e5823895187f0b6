"""The contracts of a sampler and of the engine behind it: tokens in and tokens out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Protocol

from posttrain.types import Ids, Sample, SamplingParams

if TYPE_CHECKING:
    from torch import Tensor


class Generator(Protocol):
    """What an episode needs of a sampler."""

    async def generate(self, prompt_ids: Ids, params: SamplingParams) -> Sample:
        """Continue ``prompt_ids``. Cancelling the coroutine aborts the request."""
        ...


class Sampler(Generator, Protocol):
    """One engine replica as the driver sees it. All methods are coroutines of one event loop."""

    async def score(self, sequences: Sequence[Ids], temperature: float) -> list[list[float]]:
        """Log-probability of each token given those before it (0 for the first) under the current weights."""
        ...

    async def close(self) -> None: ...


class Engine(Sampler, Protocol):
    """A sampler in the process that holds its weights."""

    async def load_weights(self, weights: Mapping[str, Tensor]) -> None:
        """Overwrite these parameters. Nothing may be generating."""
        ...

    async def finish_update(self, version: int) -> None:
        """All parameters have been loaded: drop caches made with the old ones and count as ``version`` from now on.

        Raises:
            WeightSyncError: a parameter of the engine has not been loaded since the last call.
        """
        ...

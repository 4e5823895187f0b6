"""Sampling by the embedded engine for requests with a seed.

The library draws for all requests of a batch from one stream of random numbers, so that a request's tokens depend on
the other requests. Here every token of the vocabulary has, at every position of a request, a random number of its own:
a hash of the request's seed, the position and the token. It depends on nothing else that the engine does or has done.

Rounding remains: the last digits of the probabilities differ with the batch. The sampled token is therefore argmax of
p / E with exponential E (the Gumbel trick, as in ``torch.multinomial``): it changes with about the probability by which
the distributions differ. A look-up in the cumulative distribution would multiply that by the number of tokens, because
a change of one probability moves every boundary after it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_CHUNK = 1 << 22
"""About how many random numbers are in memory at once."""


def keys_of(seeds: Sequence[int], positions: Sequence[int]) -> npt.NDArray[np.int32]:
    """Return [B, 2], a hash of 64 bits for each seed and position (SplitMix64, Steele et al. 2014)."""
    with np.errstate(over="ignore"):
        x = np.array(seeds, np.uint64) * np.uint64(0xD1342543DE82EF95) + np.array(positions, np.uint64) * _GOLDEN
        for _ in range(2):
            x = x + _GOLDEN
            x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
            x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
            x = x ^ (x >> np.uint64(31))
    return x.view(np.int32).reshape(-1, 2)


def pick(probabilities: Tensor, keys: Tensor) -> Tensor:
    """Sample a token of each row with these probabilities, as a function of the row's key.

    Args:
        probabilities: [B, V] float32.
        keys: [B, 2] int32.

    Returns:
        [B, 1] int64. A token of probability 0 is never sampled.
    """
    rows = max(1, _CHUNK // probabilities.shape[1])
    parts = zip(probabilities.split(rows), keys.split(rows), strict=True)
    return torch.cat([(p / exponentials(k, p.shape[1])).argmax(-1, keepdim=True) for p, k in parts])


def exponentials(keys: Tensor, count: int) -> Tensor:
    """Return [B, count] float32 from the exponential distribution with mean 1, each a hash of a key and an index."""
    x = torch.arange(count, dtype=torch.int32, device=keys.device) * -1640531527  # 2^32 / golden ratio
    x = _mix(_mix(x ^ keys[:, :1]) ^ keys[:, 1:])
    share = (x.long() & 0xFFFFFFFF).float() * 2.0**-32 + 2.0**-33  # in (0, 1], exact where it is small
    return -torch.log1p(-share)


def _mix(x: Tensor) -> Tensor:
    """Mix the bits of int32 numbers (lowbias32, Wellons 2018). Products wrap around, and masks remove the sign that
    shifts copy."""
    x = x ^ ((x >> 16) & 0xFFFF)
    x = x * 0x7FEB352D
    x = x ^ ((x >> 15) & 0x1FFFF)
    x = x * (0x846CA68B - 2**32)
    return x ^ ((x >> 16) & 0xFFFF)


class SeededSampling:
    """Samples requests of transformers' continuous batching by their own seeds."""

    def __init__(self) -> None:
        self.seeds: dict[str, int] = {}
        """Seeds of the running requests that have one, by request id."""

    def attach(self, manager: Any) -> None:
        """Sample for this manager, before it starts: its own thread creates the object that samples."""
        create = manager._create_batch_processor

        def create_with_seeds() -> Any:
            processor = create()
            runner = processor.model_runner
            draw = runner._sample

            def sample(scores: Tensor, output_ids: Tensor) -> None:
                if self.seeds:
                    self._sample(runner, scores, output_ids)
                else:
                    draw(scores, output_ids)

            runner._sample = sample
            return processor

        manager._create_batch_processor = create_with_seeds

    def _sample(self, runner: Any, scores: Tensor, output_ids: Tensor) -> None:
        """Write sampled tokens into row 0 of ``output_ids`` [2, B] and the bits of their log-probabilities into row 1,
        as the library's own method does.

        Args:
            scores: [1, B or more, V] float32; further rows belong to prompts whose prefill has not ended.
        """
        states = [future.state for future in runner.inputs_and_outputs.requests_in_batch if future.has_new_token]
        count = len(states)
        probabilities = torch.nn.functional.softmax(scores[0, :count], dim=-1)
        # A full cache moves what a request has sampled to its prompt: the sum of both does not change.
        positions = [len(state.initial_tokens) + len(state.generated_tokens) for state in states]
        seeds = [self.seeds.get(state.request_id) for state in states]
        keys = torch.from_numpy(keys_of([seed or 0 for seed in seeds], positions)).to(probabilities.device)
        tokens = pick(probabilities, keys)
        if None in seeds:
            unseeded = torch.tensor([seed is None for seed in seeds], device=tokens.device)
            tokens[unseeded] = torch.multinomial(probabilities[unseeded], num_samples=1)
        output_ids[0, :count].copy_(tokens[:, 0])
        output_ids[1, :count].copy_(probabilities.gather(1, tokens)[:, 0].log().view(torch.int32))

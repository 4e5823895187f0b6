"""How the embedded engine draws the tokens of requests that come with a seed.

The library draws for all requests of a batch from one stream of random numbers, so that what a request gets depends on
its company. Here every token of the vocabulary has, at every place of a request, a random number of its own, a hash of
the request's seed, the place and the token: nothing else that the engine does, or has done before, makes a difference.

What stays is rounding: the probabilities differ in their last digits with the company in the batch. So the token is the
winner of a race (argmax of p / E with exponential E, as Gumbel's trick and ``torch.multinomial`` have it): it changes
with about the chance by which the distributions differ. Looking a number up in the cumulative distribution would
multiply that by the number of tokens, since a change of one probability moves every boundary after it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_AT_ONCE = 1 << 22
"""Random numbers in memory at once, about."""


def keys_of(seeds: Sequence[int], places: Sequence[int]) -> npt.NDArray[np.int32]:
    """[B, 2] 64 bits for each seed and place: a hash (SplitMix64, Steele et al. 2014)."""
    with np.errstate(over="ignore"):
        x = np.array(seeds, np.uint64) * np.uint64(0xD1342543DE82EF95) + np.array(places, np.uint64) * _GOLDEN
        for _ in range(2):
            x = x + _GOLDEN
            x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
            x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
            x = x ^ (x >> np.uint64(31))
    return x.view(np.int32).reshape(-1, 2)


def pick(probabilities: Tensor, keys: Tensor) -> Tensor:
    """A token of each row, with these probabilities, chosen by the row's key alone.

    Args:
        probabilities: [B, V] float32.
        keys: [B, 2] int32.

    Returns:
        [B, 1] int64. A token without probability is never among them.
    """
    rows = max(1, _AT_ONCE // probabilities.shape[1])
    parts = zip(probabilities.split(rows), keys.split(rows), strict=True)
    return torch.cat([(p / exponentials(k, p.shape[1])).argmax(-1, keepdim=True) for p, k in parts])


def exponentials(keys: Tensor, count: int) -> Tensor:
    """[B, count] float32 of the exponential distribution with mean 1, each a hash of a key and a number."""
    x = torch.arange(count, dtype=torch.int32, device=keys.device) * -1640531527  # 2^32 / golden ratio
    x = _mixed(_mixed(x ^ keys[:, :1]) ^ keys[:, 1:])
    share = (x.long() & 0xFFFFFFFF).float() * 2.0**-32 + 2.0**-33  # in (0, 1], exact where it is small
    return -torch.log1p(-share)


def _mixed(x: Tensor) -> Tensor:
    """Bits of int32 mixed (lowbias32, Wellons 2018). Products wrap around; shifts would bring in the sign."""
    x = x ^ ((x >> 16) & 0xFFFF)
    x = x * 0x7FEB352D
    x = x ^ ((x >> 15) & 0x1FFFF)
    x = x * (0x846CA68B - 2**32)
    return x ^ ((x >> 16) & 0xFFFF)


class SeededSampling:
    """Gives requests of transformers' continuous batching their own random numbers."""

    def __init__(self) -> None:
        self.seeds: dict[str, int] = {}
        """By the id of each request that has one and is under way."""

    def attach(self, manager: Any) -> None:
        """Draw for this manager, which has not been started. It makes the object that samples in its own thread."""
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
        """As the library's own: tokens into row 0 of ``output_ids`` [2, B], bits of their log-probabilities into row 1.

        Args:
            scores: [1, B or more, V] float32; what is more belongs to prompts that have not been read to their end.
        """
        states = [future.state for future in runner.inputs_and_outputs.requests_in_batch if future.has_new_token]
        count = len(states)
        probabilities = torch.nn.functional.softmax(scores[0, :count], dim=-1)
        # What a request has sampled may have moved to its prompt, when the cache was full: the sum stays.
        places = [len(state.initial_tokens) + len(state.generated_tokens) for state in states]
        seeds = [self.seeds.get(state.request_id) for state in states]
        keys = torch.from_numpy(keys_of([seed or 0 for seed in seeds], places)).to(probabilities.device)
        tokens = pick(probabilities, keys)
        if None in seeds:
            unseeded = torch.tensor([seed is None for seed in seeds], device=tokens.device)
            tokens[unseeded] = torch.multinomial(probabilities[unseeded], num_samples=1)
        output_ids[0, :count].copy_(tokens[:, 0])
        output_ids[1, :count].copy_(probabilities.gather(1, tokens)[:, 0].log().view(torch.int32))

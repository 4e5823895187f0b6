"""How the embedded engine draws the tokens of requests that come with a seed.

The library draws for all requests of a batch from one stream of random numbers, so that what a request gets depends on
its company. Here each token of a request has a random number of its own, a hash of the seed and of the token's place in
the sequence: nothing else that the engine does, or has done before, makes a difference. What stays is rounding: the
probabilities themselves differ in their last digits with the company in the batch (docs/evaluate.md).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)


def uniforms(seeds: Sequence[int], places: Sequence[int]) -> npt.NDArray[np.float64]:
    """[B] numbers in [0, 1), each a hash of a seed and a place (SplitMix64, Steele et al. 2014)."""
    with np.errstate(over="ignore"):
        x = np.array(seeds, np.uint64) * np.uint64(0xD1342543DE82EF95) + np.array(places, np.uint64) * _GOLDEN
        for _ in range(2):
            x = x + _GOLDEN
            x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
            x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
            x = x ^ (x >> np.uint64(31))
    # 48 bits: a product with a sum of probabilities does not round up to the sum.
    return (x >> np.uint64(16)).astype(np.float64) * 2.0**-48


def pick(probabilities: Tensor, numbers: Tensor) -> Tensor:
    """The token at which the cumulative distribution passes each number.

    Args:
        probabilities: [B, V], any float.
        numbers: [B] float64 in [0, 1).

    Returns:
        [B, 1] int64. A token without probability is never among them.
    """
    cumulative = probabilities.double().cumsum(-1)
    return torch.searchsorted(cumulative, numbers[:, None] * cumulative[:, -1:], right=True)


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
        numbers = torch.from_numpy(uniforms([seed or 0 for seed in seeds], places)).to(probabilities.device)
        tokens = pick(probabilities, numbers)
        if None in seeds:
            unseeded = torch.tensor([seed is None for seed in seeds], device=tokens.device)
            tokens[unseeded] = torch.multinomial(probabilities[unseeded], num_samples=1)
        output_ids[0, :count].copy_(tokens[:, 0])
        output_ids[1, :count].copy_(probabilities.gather(1, tokens)[:, 0].log().view(torch.int32))

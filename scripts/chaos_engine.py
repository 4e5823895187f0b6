"""Plugin of chaos.py: the embedded engine samples one request at a time, each from a seed of its own.

The seed depends on the weight version, the tokens, and how many others of the step asked for the same ones before. So a
run that loses its engine in the middle of a step samples what it would have sampled otherwise.
"""

import asyncio
import zlib
from collections import Counter
from dataclasses import replace

import numpy as np
import torch

from posttrain.engines.hf import HFSampler
from posttrain.rollout.batches import TrainingBatches
from posttrain.rollout.pool import StickySession

_next, _ask, _generate = TrainingBatches.next, StickySession.generate, HFSampler.generate
_asked: Counter[bytes] = Counter()
_turn = asyncio.Lock()


async def next_step(self):
    _asked.clear()
    return await _next(self)


async def ask(self, prompt_ids, params, *images):
    """In the driver: give the request its number, which stays when it is asked again of another engine. It travels as
    ``top_k``, which training does not use."""
    key = np.asarray(prompt_ids, np.int32).tobytes()
    _asked[key] += 1
    return await _ask(self, prompt_ids, replace(params, top_k=_asked[key]), *images)


async def generate(self, prompt_ids, params, *images):
    async with _turn:
        ids = zlib.crc32(np.asarray(prompt_ids, np.int32).tobytes())
        torch.manual_seed(zlib.crc32(f"{self.spec.seed} {self.guard.version} {ids} {params.top_k}".encode()))
        return await _generate(self, prompt_ids, replace(params, top_k=0), *images)


TrainingBatches.next, StickySession.generate, HFSampler.generate = next_step, ask, generate

"""The weight-sync check of ``publish``, with a trainer and an engine whose log-probabilities are given."""

import asyncio

import pytest
import torch

from posttrain.core.errors import WeightSyncError
from posttrain.weight_sync import publish as module
from posttrain.weight_sync.publish import publish

CHECK = [[5, 6, 7, 8], [5, 9, 4, 3]]
TRAINER = [0.0, -0.1, -9.0, -0.3, 0.0, -8.0, -0.2, -0.4]
"""Four likely tokens, two unlikely ones, and the first tokens of the two sequences, which have no log-probability."""


class Trainer:
    role = "actor"

    async def check_finite(self, consequence):
        pass

    async def score(self, sequences):
        return torch.tensor(TRAINER)


class Engine:
    name, trainers = "sampler 0", ()

    def __init__(self, errors):
        flat = [value + error for value, error in zip(TRAINER, errors, strict=True)]
        self.scores = [flat[:4], flat[4:]]

    async def wake(self):
        pass

    async def finish_update(self, version, check):
        return self.scores


@pytest.fixture(autouse=True)
def _nothing_to_send(monkeypatch):
    async def sent(*_):
        return 0.0

    monkeypatch.setattr(module, "_send", sent)


async def gap(errors):
    metrics = await publish(Trainer(), [Engine(errors)], None, version=3, check=CHECK, tolerance=0.1)
    return metrics["sync/check_gap"]


async def test_what_rounding_does_to_unlikely_tokens_is_not_counted():
    assert await gap([0.0, 0.03, 0.9, -0.06, 0.0, -0.9, 0.01, 0.02]) == pytest.approx(0.03, abs=1e-6)


@pytest.mark.parametrize("errors", [[0.0, -0.5, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0], [0.0] * 7 + [float("nan")]])
async def test_other_weights_are_found_by_the_likely_tokens(errors):
    with pytest.raises(WeightSyncError, match="sampler 0 does not hold weight version 3"):
        await gap(errors)


async def test_sending_and_checking_are_timed(monkeypatch):
    async def sent(*_):
        await asyncio.sleep(0.05)
        return 0.0

    monkeypatch.setattr(module, "_send", sent)
    metrics = await publish(Trainer(), [Engine([0.0] * 8)], None, version=3, check=CHECK, tolerance=0.1)
    assert metrics["perf/sync_send_s"] >= 0.05
    assert metrics["perf/sync_check_s"] >= 0.0

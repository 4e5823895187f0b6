"""Experts that the embedded engine recorded, and what replaying them does to the gap between engine and trainer."""

import asyncio

import numpy as np
import pytest
import torch

from posttrain.config import RolloutConfig
from posttrain.core.errors import RunError
from posttrain.core.types import Sample, SamplingParams
from posttrain.data.pack import PackedBatch
from posttrain.data.record import Record
from posttrain.engines.base import EngineSpec
from posttrain.engines.external import stored_routing
from posttrain.engines.hf import HFSampler
from posttrain.engines.sglang import _experts
from posttrain.models.experts import RoutingFormat
from tests.helpers.mixtures import STOP, batch_of, engine_logprobs, gap, mixture, prompts_of, trainer


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    return mixture(tmp_path_factory.mktemp("mixture") / "model")


@pytest.fixture
def worker(source):
    with trainer(source, "float32") as made:
        yield made


def sampled(source, dtype, prompts, tokens, **rollout):
    async def main():
        cfg = RolloutConfig(**{"kv_tokens": 4096, "max_concurrent": 16, "router_replay": "R3"} | rollout)
        engine = HFSampler(EngineSpec(source, "cpu", dtype, 0, cfg, [STOP], threads=1))
        try:
            return await asyncio.gather(*(engine.generate(p, SamplingParams(tokens)) for p in prompts))
        finally:
            await engine.close()

    return asyncio.run(main())


@pytest.mark.parametrize("kv_tokens", [4096, 384])
def test_the_engine_returns_the_experts_that_the_trainer_chooses(source, worker, kv_tokens):
    """In float32, of every token but the last, also of requests that lost their place in a small KV cache."""
    prompts = prompts_of((3, 40, 17, 64, 9))
    samples = sampled(source, "float32", [*prompts, prompts[1]], 40, kv_tokens=kv_tokens)
    batch = batch_of([*prompts, prompts[1]], samples)
    assert batch.routing.shape[1] == 4 * 4
    worker.mixture.record()
    worker.logprobs([PackedBatch(**{**vars(batch), "routing": None})])
    own = torch.from_numpy(worker.mixture.recorded())
    last = torch.zeros(batch.num_tokens, dtype=torch.bool)
    last[batch.cu_seqlens[1:].long() - 1] = True
    assert not batch.routing[last].any()
    chosen = [rows.reshape(-1, 4).sort(-1).values for rows in (batch.routing[~last], own[~last])]
    assert float((chosen[0] == chosen[1]).double().mean()) > 0.999  # a tie in the last bit may be broken otherwise


@pytest.fixture(scope="module")
def half_precision(source):
    """What an engine in bfloat16 sampled, in batches of its own: (batch, its log-probabilities)"""
    prompts = prompts_of((12,) * 12)
    samples = sampled(source, "bfloat16", prompts, 48)
    return batch_of(prompts, samples), engine_logprobs(prompts, samples)


@pytest.mark.parametrize(("dtype", "share"), [("float32", 1 / 3), ("bfloat16", 1 / 2)])
def test_replay_takes_away_most_of_the_gap_to_an_engine(source, half_precision, dtype, share):
    """In float32, and in bfloat16 with the whole batch in one row, where the engine went token by token. Measured:
    0.013 of 0.096, and 0.009 of 0.032."""
    batch, engine = half_precision
    with trainer(source, dtype) as worker:
        replayed, left = gap(worker, batch, engine, replay=True)
        free, drift = gap(worker, batch, engine, replay=False)
    assert 0 < replayed <= free * share
    assert left < 5e-4 < drift


def test_a_reference_and_a_run_without_replay_choose_by_themselves(source, worker):
    batch = PackedBatch.from_sequences([list(range(10, 30))], [[True] * 20])
    [own] = worker.logprobs([batch])
    batch.routing = torch.ones(20, 16, dtype=torch.uint8).cumsum(1).to(torch.uint8)
    assert not torch.equal(worker.logprobs([batch])[0], own)
    micro = worker._micro_batch(batch, replay=False)
    assert micro.routed.replayed is None


def test_later_requests_do_not_change_where_sampled_tokens_went():
    """A second turn computes the first one again, and adds what it had not seen: the last token of the first turn."""
    record = Record([1, 2])
    first = np.array([[1, 1], [2, 2], [3, 3]], np.uint8)
    record.sampled(Sample([5, 6], [-1.0, -1.0], "stop", 0, first))
    record.given([8])
    second = np.array([[9, 9], [9, 9], [9, 9], [4, 4], [5, 5], [6, 6]], np.uint8)
    record.sampled(Sample([7, 7], [-1.0, -1.0], "stop", 1, second))
    columns = record.columns()
    expected = [[1, 1], [2, 2], [3, 3], [4, 4], [5, 5], [6, 6], [0, 0]]
    assert columns["routing"].reshape(7, 2).tolist() == expected
    again = Record.of(columns)
    assert np.array_equal(again.columns()["routing"], columns["routing"])
    assert not len(Record([1, 2]).columns()["routing"])


FORM = RoutingFormat((1,), 2, 2, 8)


def test_experts_of_other_engines_are_stored_alike():
    """Of all decoder layers or of those with experts, with the last token or without."""
    found = np.array([[[0, 0], [3, 1]], [[0, 0], [7, 2]]])
    assert stored_routing(found, FORM, 3).tolist() == [[4, 2], [8, 3]]
    assert stored_routing(found[:, 1:], FORM, 2).tolist() == [[4, 2], [8, 3]]
    with pytest.raises(RunError, match=r"experts of shape \(2, 2, 2\) for 9 tokens") as error:
        stored_routing(found, FORM, 9)
    assert error.value.hint == "--set rollout.router_replay=off"


@pytest.mark.parametrize("wrong", [[0, 0], [3, 8], [-1, 3]])
def test_experts_that_no_router_chose_are_refused(wrong):
    """Kernels that choose experts by themselves leave zeros where the engine looks for them."""
    found = np.array([[[0, 0], [3, 1]], [[0, 0], wrong]])
    with pytest.raises(RunError, match="experts that are no choice of 2 among 8"):
        stored_routing(found, FORM, 3)


def test_numbers_of_256_experts_do_not_overflow():
    """vLLM returns them in one byte, and they are stored counted from 1, in two."""
    form = RoutingFormat((0,), 1, 2, 256)
    found = np.array([[[255, 0]]], np.uint8)
    assert stored_routing(found, form, 1).view(np.uint16).tolist() == [[256, 1]]


def test_sglangs_answer_is_read_in_both_of_its_forms():
    import base64

    found = np.arange(8, dtype=np.int32).reshape(2, 2, 2)
    text = base64.b64encode(found.tobytes()).decode()
    assert np.array_equal(_experts({"routed_experts": text}, FORM), found)
    narrow = base64.b64encode(found.astype(np.uint8).tobytes()).decode()
    assert np.array_equal(_experts({"routed_experts": narrow, "routed_experts_dtype": "uint8"}, FORM), found)
    assert np.array_equal(_experts({"routed_experts": torch.from_numpy(found)}, FORM), found)
    with pytest.raises(RunError, match="SGLang gave no experts"):
        _experts({}, FORM)

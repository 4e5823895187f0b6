"""What SGLang is asked, and how its answers are read. An engine that does with requests what SGLang 0.5.16 does stands
in for it."""

import asyncio
import sys
from types import ModuleType, SimpleNamespace

import pytest
from transformers import Qwen2Config

from posttrain.config import RolloutConfig
from posttrain.core.errors import RunError
from posttrain.core.types import SamplingParams
from posttrain.engines import sglang
from posttrain.engines.base import EngineSpec
from posttrain.engines.external import context_length
from posttrain.models.load import ModelSource
from tests.helpers.seeing import rendered, text_source

POSITIONS = 64


class Engine:
    """Requests of ids that begin with 7 run until they are aborted; others sample zeros up to their limit."""

    def __init__(self, **arguments):
        self.context = arguments["context_length"]
        self.running = {}
        self.tokenizer_manager = SimpleNamespace(abort_request=self.abort)
        self.begun = asyncio.Semaphore(0)

    async def async_generate(self, input_ids, sampling_params, rid, return_logprob, **more):
        if len(input_ids) >= self.context - 6:
            raise ValueError(f"Input length ({len(input_ids)} tokens) exceeds the maximum allowed length")
        if input_ids[0] == 7:
            self.running[rid] = answer = asyncio.get_running_loop().create_future()
            self.begun.release()
            return await answer
        tokens = min(sampling_params["max_new_tokens"], self.context - 2 - len(input_ids))
        scores = [(None, token) if token == 0 else (-1.0, token) for token in range(len(input_ids))]
        return {
            "output_ids": [0] * tokens,
            "meta_info": {
                "finish_reason": {"type": "length"},
                "prompt_tokens": len(input_ids) - ("image_data" in more),
                "output_token_logprobs": [(-1.0, 0)] * tokens,
                "input_token_logprobs": scores,
            },
        }

    def abort(self, rid="", abort_all=False):
        """As the scheduler does it in its waiting queue, whose answers tell nothing of the prompt."""
        for name, answer in self.running.items():
            if not answer.done() and (abort_all or name.startswith(rid)):
                answer.set_result({"output_ids": [], "meta_info": {"finish_reason": {"type": "abort"}}})


@pytest.fixture
def engine_of(monkeypatch):
    for name in ("sglang", "sglang.srt", "sglang.srt.entrypoints", "sglang.srt.entrypoints.engine"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setattr(sys.modules["sglang.srt.entrypoints.engine"], "Engine", Engine, raising=False)
    return sglang.SGLangEngine


def spec_of(source, *, prompt=16, response=16, kv_tokens=4096):
    rollout = RolloutConfig(
        engine="sglang", max_prompt_tokens=prompt, max_response_tokens=response, kv_tokens=kv_tokens
    )
    return EngineSpec(source, "cpu", "float32", 0, rollout, [1])


@pytest.fixture
def source(tmp_path):
    Qwen2Config(
        hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=2,
        vocab_size=64, max_position_embeddings=POSITIONS, architectures=["Qwen2ForCausalLM"],
    ).save_pretrained(tmp_path)  # fmt: skip
    return ModelSource(str(tmp_path))


async def test_a_cancelled_request_aborts_no_other(engine_of, source):
    """SGLang aborts all whose ids begin with the id that it is given: with r1 also r10 and r11."""
    engine = engine_of(spec_of(source))
    asked = [asyncio.ensure_future(engine.generate([7, 2], SamplingParams(4))) for _ in range(12)]
    for _ in asked:
        await engine.engine.begun.acquire()
    asked[1].cancel()
    with pytest.raises(asyncio.CancelledError):
        await asked[1]
    assert [answer.done() for answer in engine.engine.running.values()] == [False, True, *[False] * 10]
    await engine._abort_all()
    cut = await asyncio.gather(*(asked[:1] + asked[2:]))
    assert [sample.finish_reason for sample in cut] == ["abort"] * 11


@pytest.mark.parametrize("left", range(1, 8))
async def test_a_request_may_fill_all_the_tokens_that_the_config_allows(engine_of, source, left):
    engine = engine_of(spec_of(source))
    sample = await engine.generate([2] * (32 - left), SamplingParams(left))
    assert (len(sample.ids), sample.finish_reason) == (left, "length")
    assert await engine.score([[2] * 32]) == [[0.0] + [-1.0] * 31]  # as the weight-sync check does


def test_an_engines_context_is_within_the_model_and_the_cache(source):
    assert context_length(spec_of(source), spare=8) == 40
    assert context_length(spec_of(source, response=44), spare=8) == POSITIONS
    assert context_length(spec_of(source, response=48), spare=8) == POSITIONS
    assert context_length(spec_of(source, response=50), spare=8) == 66  # the engine says that it is too long
    assert context_length(spec_of(source, kv_tokens=32), spare=8) == 32


async def test_a_request_with_images_that_is_aborted_while_it_waits_is_asked_again(engine_of, tmp_path):
    source = text_source("qwen2_5_vl", tmp_path)
    engine = engine_of(spec_of(source, prompt=400))
    row = next(row for row in rendered(source) if row.images)
    ids = [7, *row.ids.tolist()]  # the stand-in reads no images, and their places do not matter to it
    asked = asyncio.ensure_future(engine.generate(ids, SamplingParams(4), row.images))
    await engine.engine.begun.acquire()
    await engine._abort_all()
    sample = await asked
    assert (sample.ids, sample.finish_reason) == ([], "abort")
    with pytest.raises(RunError, match=r"SGLang read .* tokens of a prompt with images"):
        await engine.generate(row.ids, SamplingParams(4), row.images)

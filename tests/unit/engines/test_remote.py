"""Continuations by somebody else's server: what it is asked, what is made of its answers, and what it gets wrong."""

import copy
import json
import math

import pyarrow.parquet as pq
import pytest

from posttrain.config import ServerConfig
from posttrain.config.presets import resolve
from posttrain.core.errors import ConfigError, RunError
from posttrain.core.types import SamplingParams
from posttrain.engines.remote import open_server
from posttrain.generation import command as generate
from posttrain.models.builtin import builtin_tokenizer
from posttrain.prep import command as prep
from tests.helpers.chat_endpoint import local_and_quick, serving

TOKENIZER = builtin_tokenizer("tiny")
EOS = TOKENIZER.eos_token_id
STOPS = [3, EOS]
"""Ascending, as commands give them"""
PARAMS = SamplingParams(8)
MODELS = json.dumps({"data": [{"id": "tiny"}]})


@pytest.fixture(autouse=True)
def _local_and_quick(monkeypatch):
    local_and_quick(monkeypatch)


def choice(text, finish_reason="stop", **more):
    return 200, {}, json.dumps({"choices": [{"text": text, "finish_reason": finish_reason, **more}]})


def encode(text):
    return TOKENIZER(text, add_special_tokens=False)["input_ids"]


async def ask(endpoint, params=PARAMS, ids=(5, 6, 7), tokenizer=TOKENIZER, **values):
    values = {"url": endpoint.url, "retries": 0, **values}
    sampler = await open_server(ServerConfig.model_validate(values), tokenizer, STOPS)
    try:
        return await sampler.generate(ids, params)
    finally:
        await sampler.close()


async def test_the_request_is_what_servers_understand(monkeypatch):
    monkeypatch.setenv("SERVER_KEY", "sk-0123")
    with serving(lambda *_: choice("x", token_ids=[9, EOS]), read=lambda body: None, get=MODELS) as endpoint:
        sample = await ask(endpoint, SamplingParams(8, 0.5, 0.9, 40), api_key_env="SERVER_KEY")
    assert (sample.ids, sample.finish_reason, sample.version) == ([9, EOS], "stop", 0)
    assert all(math.isnan(x) for x in sample.logprobs)
    path, headers, body = endpoint.requests[0]
    assert path == "/v1/completions"
    assert headers["Authorization"] == "Bearer sk-0123"
    assert body == {
        "model": "tiny", "prompt": [5, 6, 7], "max_tokens": 8, "temperature": 0.5, "top_p": 0.9, "top_k": 40,
        "stop_token_ids": STOPS, "skip_special_tokens": False, "return_token_ids": True,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        (choice("Yes. 7", token_ids=[9, 8]), [9, 8, EOS]),  # the server keeps the stop token to itself
        (choice("Yes. 7", token_ids=[9, 8], stop_reason=3), [9, 8, 3]),
        (choice("Yes. 7", "length", token_ids=[9, 8]), [9, 8]),
        (choice("Yes. 7"), [*encode("Yes. 7"), EOS]),  # it knows nothing of ids
        (choice("Yes. 7", "length"), encode("Yes. 7")),
        (choice(""), [EOS]),
    ],
)
async def test_ids_are_those_of_the_server_or_of_its_text(answer, expected):
    with serving(lambda *_: answer, read=lambda body: None, get=MODELS) as endpoint:
        sample = await ask(endpoint)
    assert sample.ids == expected
    assert sample.finish_reason == ("length" if "length" in answer[2] else "stop")


async def test_a_base_models_turn_ends_as_its_chat_template_ends_turns():
    base = copy.deepcopy(TOKENIZER)
    base.eos_token = "<|endoftext|>"
    with serving(lambda *_: choice("Yes"), read=lambda body: None, get=MODELS) as endpoint:
        assert (await ask(endpoint, tokenizer=base)).ids == [*encode("Yes"), EOS]


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        ((400, {}, "the prompt is too long"), "HTTP 400: the prompt is too long"),
        ((200, {}, "hello"), "not a completion: hello"),
        ((200, {}, '{"choices": []}'), "not a completion"),
        ((200, {}, '{"choices": [{"text": "x"}]}'), "not a completion"),
        (choice("Yes", "abort", token_ids=[9]), "ended a request with finish_reason = 'abort'"),
        (choice("Yes", None, token_ids=[9]), "ended a request with finish_reason = None"),
        (choice(None), "not a completion"),
        (choice("Yes", token_ids=[9.5]), "not a completion"),
        (choice("Yes", token_ids=[9, 10**30]), f"gave token {10**30}, and the last one of the tokenizer of model.path"),
        (choice("Yes", token_ids=[9, -1]), "gave token -1"),
        (choice("Yes", token_ids=[9, 151_645]), "is model.path the model that is served?"),
        ((200, {}, "[" * 100_000), "not a completion: [[["),
        ((200, {"Content-Encoding": "gzip"}, "no gzip"), "/v1/completions: DecodingError"),
    ],
)
async def test_an_answer_that_is_none_fails_that_request(answer, message):
    with serving(lambda *_: answer, read=lambda body: None, get=MODELS) as endpoint, pytest.raises(RunError) as error:
        await ask(endpoint)
    assert message in error.value.message


@pytest.mark.parametrize(
    ("get", "values", "message"),
    [
        ("no", {}, "/v1/models gives no list of models"),
        ('{"data": [{"id": "a"}, {"id": "b"}]}', {}, "model = '' is not served"),
        (MODELS, {"model": "larger"}, "model = 'larger' is not served"),
        (MODELS, {"url": "tcp://here"}, "is not an http or https URL"),
        (MODELS, {"url": "http://127.0.0.1:9/v1"}, "gives no list of models"),
        (MODELS, {"api_key_env": "NO_SUCH_KEY"}, "$NO_SUCH_KEY is not set"),
    ],
)
async def test_a_server_that_cannot_serve_is_named(get, values, message):
    with serving(lambda *_: choice("x"), get=get) as endpoint, pytest.raises(ConfigError) as error:
        await ask(endpoint, **values)
    assert message in error.value.message
    assert error.value.exit_code == 2
    if values.get("model") == "larger":
        assert error.value.hint == "--set generate.endpoint.model=NAME, one of: tiny"


def test_generate_plays_whole_episodes_there(tmp_path):
    """With tool calls, the tokens of which are ours, and without Ray."""
    data = tmp_path / "data"
    prep.run("arith", out=str(data), seed=0, limit=3)
    call = '<tool_call>\n{"name": "calc_gsm8k_reward", "arguments": {"answer": "7"}}\n</tool_call>'

    def reply(nth, prompt):
        told = TOKENIZER.decode(prompt)
        return choice("It is #### 7" if "<tool_response>" in told else call)

    with serving(reply, read=lambda body: body["prompt"], get=MODELS) as endpoint:
        flags = {
            "model.path": "builtin:tiny",
            "generate.data": str(data / "test.parquet"),
            "generate.out": str(tmp_path / "out.parquet"),
            "generate.limit": 2,
            "generate.endpoint.url": endpoint.url,
            "rollout.n": 3,
        }
        file = generate.run(resolve("generate", "tiny-arith-generate", flags=flags))
    rows = pq.read_table(file).to_pylist()
    assert len(rows) == 2
    for row in rows:
        assert row["stop_reasons"] == ["stop"] * 3
        assert row["errors"] == [None] * 3
        assert row["num_turns"] == [2] * 3
        for text, ids, mask in zip(row["responses"], row["response_ids"], row["response_masks"], strict=True):
            assert text.endswith("It is #### 7")
            sampled = [i for i, m in zip(ids, mask, strict=True) if m]
            assert sampled == [*encode(call), EOS, *encode("It is #### 7"), EOS]

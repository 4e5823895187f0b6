"""The token contract through HTTP: random conversations of the real clients, over call formats and chat templates."""

import asyncio
import itertools
import json

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from posttrain.config import RolloutConfig
from posttrain.core.types import ON_POLICY, Sample
from posttrain.envs.endpoint import AgentEndpoint
from posttrain.envs.sampling import AgentSession
from posttrain.envs.session import TokenRenderer, TokenSession
from posttrain.tools.formats import PARSERS, ParsedCall, ParsedTurn

anthropic = pytest.importorskip("anthropic")
openai = pytest.importorskip("openai")

LIMITS = RolloutConfig(max_turns=1000, max_prompt_tokens=100_000, max_response_tokens=100_000)
SCHEMA = {"type": "object", "properties": {"text": {"type": "string"}}, "required": ["text"]}
SAY = {"name": "say", "description": "Say it."}


class Chat:
    """Chat completions. Conversations are lists of messages."""

    tools = ({"type": "function", "function": {**SAY, "parameters": SCHEMA}},)

    def __init__(self):
        self.client = openai.AsyncOpenAI(api_key="unused", max_retries=0)

    def at(self, url):
        return self.client.with_options(base_url=f"{url}/v1").chat.completions

    def said(self, role, text):
        return {"role": role, "content": text}

    async def ask(self, url, items, streamed):
        given = {"model": "policy", "messages": items, "tools": self.tools}
        if streamed:
            async with self.at(url).stream(**given) as events:
                completion = await events.get_final_completion()
        else:
            completion = await self.at(url).create(**given)
        message = completion.choices[0].message
        calls = [(made.id, json.loads(made.function.arguments)["text"]) for made in message.tool_calls or ()]
        return [message.model_dump(exclude_none=True, exclude={"parsed"})], calls

    def results(self, calls):
        return [{"role": "tool", "tool_call_id": name, "content": text} for name, text in calls]


class Responses(Chat):
    """Responses. Conversations are lists of items."""

    tools = ({"type": "function", **SAY, "parameters": SCHEMA, "strict": False},)

    def at(self, url):
        return self.client.with_options(base_url=f"{url}/v1").responses

    async def ask(self, url, items, streamed):
        given = {"model": "policy", "input": items, "tools": self.tools}
        if streamed:
            async with self.at(url).stream(**given) as events:
                response = await events.get_final_response()
        else:
            response = await self.at(url).create(**given)
        calls = [i for i in response.output if i.type == "function_call"]
        output = [item.model_dump(exclude_none=True, exclude={"parsed_arguments"}) for item in response.output]
        return output, [(made.call_id, json.loads(made.arguments)["text"]) for made in calls]

    def results(self, calls):
        return [{"type": "function_call_output", "call_id": name, "output": text} for name, text in calls]


class Messages(Chat):
    """Anthropic's messages. A system prompt stands beside them."""

    tools = ({**SAY, "input_schema": SCHEMA},)

    def __init__(self):
        self.client = anthropic.AsyncAnthropic(api_key="unused", max_retries=0)

    async def ask(self, url, items, streamed):
        system = [item["content"] for item in items if item["role"] == "system"]
        messages = [item for item in items if item["role"] != "system"]
        given = {"model": "policy", "max_tokens": 10_000, "tools": self.tools, "messages": messages}
        given |= {"system": system[0]} if system else {}
        client = self.client.with_options(base_url=url)
        if streamed:
            async with client.messages.stream(**given) as events:
                message = await events.get_final_message()
        else:
            message = await client.messages.create(**given)
        calls = [(part.id, part.input["text"]) for part in message.content if part.type == "tool_use"]
        return [{"role": "assistant", "content": [part.model_dump() for part in message.content]}], calls

    def results(self, calls):
        parts = [{"type": "tool_result", "tool_use_id": name, "content": text} for name, text in calls]
        return [{"role": "user", "content": parts}]


class Writes:
    """A sampler that writes what it is told to. The weight version of a turn is its number."""

    def __init__(self):
        self.next, self.seen = [], []

    async def generate(self, prompt_ids, params, images=()):
        ids, version = self.next, len(self.seen)
        logprobs = [-(version + 1) - place / 1024 for place in range(len(ids))]
        self.seen.append((list(prompt_ids), ids, logprobs))
        return Sample(ids, logprobs, "stop", version)


@pytest.fixture(scope="module", params=[Chat, Responses, Messages])
def served(request):
    """An event loop with a running endpoint, and a client."""
    with asyncio.Runner() as runner:
        endpoint = AgentEndpoint()
        runner.run(endpoint.__aenter__())
        wire = request.param()
        yield runner, endpoint, wire
        runner.run(wire.client.close())
        runner.run(endpoint.__aexit__(None, None, None))


WORDS = st.sampled_from(
    ["\n", " ", "7", "é", "漢", "The answer", "<tool_response>", "{", "}", '"', "\\n", "🙂", "user"]
)
TEXTS = st.lists(WORDS, min_size=1, max_size=4).map("".join)
CALLS = st.lists(TEXTS.map(lambda text: ParsedCall("say", {"text": text})), max_size=3)
TURNS = st.builds(ParsedTurn, TEXTS.map(str.strip), CALLS, st.sampled_from(["", "", "let me see"]))
DOES = st.sampled_from(["go on", "go on", "go on", "again", "edit", "compact", "sub-agent", "from earlier"])
ACTIONS = st.lists(st.tuples(DOES, TURNS, TEXTS, st.booleans()), min_size=3, max_size=7)
TEMPLATES = (
    "llamacpp_Qwen-QwQ-32B", "llamacpp_Qwen-Qwen2.5-7B-Instruct", "llamacpp_Qwen-Qwen3-0.6B", "qwen2_5",
    "qwen2_5_training", "qwen3", "qwen3_instruct_2507", "qwen3_instruct_2507_training", "qwen3_training", "qwen3_vl",
)  # fmt: skip
"""Those of the data folder that show tools."""


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    actions=ACTIONS,
    template=st.sampled_from(TEMPLATES),
    parser=st.sampled_from(PARSERS.names()),
    cuts=st.lists(st.integers(1, 40), max_size=5),
)
def test_what_trains_is_what_was_sampled_whatever_clients_do(served, qwen, actions, template, parser, cuts):
    runner, endpoint, wire = served
    tokenizer = qwen(template)
    sampler = Writes()
    renderer = TokenRenderer(tokenizer, PARSERS.get(parser), frozenset({tokenizer.eos_token_id}))
    agent = AgentSession(TokenSession(renderer), sampler, LIMITS, ON_POLICY)
    token = endpoint.open(agent)
    runner.run(converse(wire, endpoint.url(token), agent, actions, PARSERS.get(parser), tokenizer, cuts))
    endpoint.close(token)
    assert agent.failure is None
    check_trained(agent.session, sampler.seen)


async def converse(wire, url, agent, actions, parser, tokenizer, cuts):
    """Play the actions. What goes on from a sampled turn must have that turn's tokens as they were sampled."""
    sampler, session = agent.sampler, agent.session
    history, after, earlier = [wire.said("user", "Say something.")], None, []
    for number, (action, wrote, text, streamed) in enumerate(actions):
        items, parent = history, after
        if action == "edit":
            items, parent = [wire.said("user", f"Now: {text}"), *history[1:]], None
        elif action == "compact":
            items, parent = [wire.said("user", f"So far: {text}")], None
        elif action == "sub-agent":
            items, parent = [wire.said("system", "Help."), wire.said("user", text)], None
        elif action == "from earlier" and earlier:
            items, parent = earlier[number % len(earlier)]
        sampler.next = written(parser.render(wrote), tokenizer, cuts)
        unmatched = session.unmatched
        turn, calls = await wire.ask(url, items, streamed)
        if parent is not None:
            prompt, ids, _ = sampler.seen[parent]
            assert sampler.seen[-1][0][: len(prompt) + len(ids)] == [*prompt, *ids]
        if action not in ("edit", "from earlier"):  # an edited history has turns that were sampled for another one
            assert session.unmatched == unmatched
        earlier.append((items, parent))
        if action != "again":
            history = [*items, *turn, *(wire.results(calls) if calls else [wire.said("user", text)])]
            after = number


def written(text, tokenizer, cuts):
    """Return ids of a turn, cut so that they are not those that the tokenizer would give for the whole of it."""
    places = sorted({min(cut, len(text)) for cut in cuts} | {0, len(text)})
    pieces = [text[a:b] for a, b in itertools.pairwise(places)]
    ids = [i for piece in pieces for i in tokenizer(piece, add_special_tokens=False)["input_ids"]]
    return [*ids, tokenizer.eos_token_id]


def check_trained(session, seen):
    """Each turn is trained on once, behind the prompt that the engine saw, with its tokens and log-probabilities."""
    trained = []
    for branch in session.branches:
        columns = branch.record.columns()
        versions = columns["weight_version"]
        for version in sorted(set(versions[columns["loss_mask"]].tolist())):
            (places,) = np.nonzero(versions == version)
            prompt, ids, logprobs = seen[version]
            assert columns["tokens"][: places[-1] + 1].tolist() == [*prompt, *ids]
            assert columns["loss_mask"][places].all()
            assert np.allclose(columns["logprobs"][places], logprobs)
            trained.append(version)
    assert sorted(trained) == list(range(len(seen)))

"""The endpoint through real HTTP: wire formats, faults, unmodified clients."""

import asyncio
import contextlib
import json
import socket
from dataclasses import replace

import httpx
import numpy as np
import pytest

from posttrain.config import RolloutConfig
from posttrain.core.errors import RunError, WorkerError
from posttrain.core.types import ON_POLICY
from posttrain.envs import endpoint as serving_module
from posttrain.envs.endpoint import AgentEndpoint
from posttrain.envs.sampling import AgentSession
from posttrain.envs.session import TokenRenderer, TokenSession
from posttrain.rollout.pool import SamplerPool
from posttrain.tools.formats import PARSERS
from tests.helpers.agents import RENDERER
from tests.helpers.scripted import EOS, TOKENIZER, ScriptedSampler, tokens

FUNCTION = {
    "name": "say",
    "description": "Say it.",
    "parameters": {"type": "object", "properties": {"text": {"type": "string"}}, "required": ["text"]},
}
TOOL = {"type": "function", "function": FUNCTION}


def call(text):
    return f'<tool_call>\n{{"name": "say", "arguments": {{"text": "{text}"}}}}\n</tool_call>'


def hi(**more):
    return {"model": "policy", "messages": [{"role": "user", "content": "hi"}], **more}


class Served:
    """A session behind a running endpoint, and a client for it."""

    def __init__(self, endpoint, sampler, **cfg):
        limits = {"max_turns": 100, "max_prompt_tokens": 1000, "max_response_tokens": 400} | cfg
        self.sampler, self.endpoint = sampler, endpoint
        self.agent = AgentSession(TokenSession(RENDERER), sampler, RolloutConfig(**limits), ON_POLICY)
        self.token = endpoint.open(self.agent)
        self.url = endpoint.url(self.token)
        self.client = httpx.AsyncClient(base_url=self.url, timeout=20)

    @property
    def branches(self):
        return [branch.record.columns() for branch in self.agent.session.branches]

    async def chat(self, **body):
        return await self.client.post("/v1/chat/completions", json=hi(**body))


@contextlib.asynccontextmanager
async def serving(*turns, **cfg):
    async with AgentEndpoint() as endpoint:
        served = Served(endpoint, ScriptedSampler(*turns), **cfg)
        async with served.client:
            yield served


def trained(columns):
    return columns["tokens"][columns["loss_mask"]].tolist()


def sampled(*texts):
    return [i for text in texts for i in [*tokens(text), EOS]]


# ---------------------------------------------------------------------- wire formats


async def test_a_chat_completion_has_the_text_its_tokens_and_their_log_probabilities():
    async with serving("seven") as served:
        answer = (await served.chat(logprobs=True, return_token_ids=True)).json()
        [choice] = answer["choices"]
        assert choice["message"] == {"role": "assistant", "content": "seven"}
        assert choice["finish_reason"] == "stop"
        assert choice["token_ids"] == sampled("seven") == trained(served.branches[0])
        assert answer["prompt_token_ids"] == served.sampler.prompts[0]
        listed = choice["logprobs"]["content"]
        assert [one["logprob"] for one in listed] == [-(i + 1) / 8 for i in range(len(listed))]
        assert "".join(one["token"] for one in listed[:-1]) == "seven"
        usage = {"prompt_tokens": len(served.sampler.prompts[0]), "completion_tokens": len(listed)}
        assert answer["usage"] == usage | {"total_tokens": sum(usage.values())}


async def test_a_stop_text_ends_a_turn_and_what_comes_after_it_is_not_trained_on():
    async with serving("one two three", "four") as served:
        answer = (await served.chat(stop=["two"])).json()["choices"][0]
        assert (answer["message"]["content"], answer["finish_reason"]) == ("one ", "stop")
        ids = trained(served.branches[0])
        assert sampled("one two three")[: len(ids)] == ids
        assert TOKENIZER.decode(ids) == "one two"
        # The conversation goes on from what was sampled.
        more = [*hi()["messages"], answer["message"], {"role": "user", "content": "more"}]
        await served.chat(messages=more)
        assert len(served.branches) == 1


async def test_experts_of_what_a_stop_text_cut_off_are_those_of_no_other_token():
    class Routed(ScriptedSampler):
        """Names in each row of experts the request that it comes from."""

        async def generate(self, prompt_ids, params, images=()):
            sample = await super().generate(prompt_ids, params, images)
            tokens_read = len(prompt_ids) + len(sample.ids) - 1
            return replace(sample, routing=np.full((tokens_read, 1), len(self.prompts), np.uint8))

    async with serving() as served:
        served.agent.sampler = Routed("one two " + "three " * 40, "four")
        answer = (await served.chat(stop=["two"])).json()["choices"][0]
        until = len(served.branches[0]["tokens"])
        await served.chat(messages=[*hi()["messages"], answer["message"], {"role": "user", "content": "more"}])
    [columns] = served.branches
    later = len(columns["tokens"]) - until
    assert columns["routing"].tolist() == [1] * until + [2] * (later - 1) + [0]


async def test_a_turn_without_words_is_an_empty_text():
    async with serving("", call("so")) as served:
        said = [(await served.chat(tools=[TOOL])).json()["choices"][0]["message"]["content"] for _ in range(2)]
    assert said == ["", None]  # None beside calls alone, as OpenAI has it


@pytest.mark.parametrize("name", ["reasoning_content", "reasoning"])
async def test_of_turns_with_the_same_words_the_one_whose_thoughts_are_sent_back_goes_on(name):
    turns = [f"<think>\n{thoughts}\n</think>\n\nfine" for thoughts in ("one", "two")]
    async with serving(*turns, "more", "less") as served:
        served.agent.session.renderer = TokenRenderer(TOKENIZER, PARSERS.get("qwen3_coder"), frozenset({EOS}))
        first = (await served.chat(tools=[TOOL])).json()["choices"][0]["message"]
        await served.chat(tools=[TOOL])
        said = {"role": "assistant", "content": "fine", name: first["reasoning_content"]}
        history = [*hi()["messages"], said, {"role": "user", "content": "?"}]
        await served.chat(tools=[TOOL], messages=history)
        assert [trained(columns) for columns in served.branches] == [sampled(turns[0], "more"), sampled(turns[1])]


async def test_max_tokens_cuts_a_turn():
    async with serving("one two three") as served:
        answer = (await served.chat(max_tokens=2)).json()["choices"][0]
        assert (answer["finish_reason"], trained(served.branches[0])) == ("length", tokens("one two three")[:2])


async def test_choices_are_branches():
    async with serving("one", "two") as served:
        answer = (await served.chat(n=2)).json()
        assert [choice["message"]["content"] for choice in answer["choices"]] == ["one", "two"]
        assert [trained(columns) for columns in served.branches] == [sampled("one"), sampled("two")]


@pytest.mark.parametrize(
    ("body", "status", "said"),
    [
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, 400, "the model reads text alone"),
        ({"messages": []}, 400, "no turn to answer"),
        ({"messages": None}, 400, "another shape"),
        ({"tools": [{"type": "web_search"}]}, 400, "functions alone"),
        ({"response_format": {"type": "json_object"}}, 400, "response_format"),
        ({"n": 1000}, 400, "n: Input should be less than or equal to 64"),
        ({"logprobs": True, "top_logprobs": 3}, 400, "top_logprobs"),
        ({"messages": [{"role": "user", "content": "word " * 3000}]}, 400, "rollout.max_prompt_tokens = 1000"),
    ],
)
async def test_a_request_that_cannot_be_served_is_refused_and_the_episode_goes_on(body, status, said):
    async with serving("fine") as served:
        answer = await served.chat(**body)
        assert (answer.status_code, said in answer.json()["error"]["message"]) == (status, True), answer.text
        assert (await served.chat()).status_code == 200
        assert served.agent.failure is None
        assert len(served.branches) == 1


@pytest.mark.parametrize(("path", "stream"), [("chat/completions", True), ("responses", False), ("messages", False)])
async def test_an_error_of_our_own_is_told_to_the_client_and_fails_the_episode(path, stream):
    class Broken(ScriptedSampler):
        async def generate(self, prompt_ids, params, images=()):
            raise ZeroDivisionError("by zero")

    async with AgentEndpoint() as endpoint:
        served = Served(endpoint, Broken())
        async with served.client:
            answer = await served.client.post(f"/v1/{path}", json=hi(input="hi", stream=stream))
    assert (answer.status_code, answer.headers["x-should-retry"]) == (500, "false")
    assert "ZeroDivisionError: by zero" in answer.json()["error"]["message"]
    assert "ZeroDivisionError: by zero" in served.agent.failure


async def test_turns_beyond_max_turns_are_refused():
    async with serving("one", max_turns=1) as served:
        assert (await served.chat()).status_code == 200
        refused = await served.chat()
        assert (refused.status_code, "rollout.max_turns" in refused.text) == (400, True)


async def test_a_bearer_token_is_as_good_as_one_in_the_url():
    async with serving("one") as served, httpx.AsyncClient() as client:
        url = f"http://127.0.0.1:{served.endpoint.port}/v1/chat/completions"
        answer = await client.post(url, json=hi(), headers={"Authorization": f"Bearer {served.token}"})
        assert answer.status_code == 200
        assert (await client.post(url, json=hi())).status_code == 404


async def test_a_reward_is_posted():
    async with serving() as served:
        assert (await served.client.post("/reward", json={"reward": 0.5})).status_code == 200
        assert served.agent.reward == 0.5
        for wrong in ({"reward": "1"}, {"reward": True}, {"reward": 10**400}, {}):
            assert (await served.client.post("/reward", json=wrong)).status_code == 400
        assert served.agent.reward == 0.5


# ---------------------------------------------------------------------- faults


async def test_the_server_listens_on_loopback_alone():
    async with AgentEndpoint() as endpoint:
        names = {info[4][0] for info in socket.getaddrinfo(socket.gethostname(), None, socket.AF_INET)}
        for address in names - {"127.0.0.1", "127.0.1.1"}:
            with pytest.raises(OSError, match="refused"):
                socket.create_connection((address, endpoint.port), timeout=5)
        socket.create_connection(("127.0.0.1", endpoint.port), timeout=5).close()
        [listener] = endpoint._server.servers[0].sockets
        assert listener.getsockname() == ("127.0.0.1", endpoint.port)
        assert listener.proto == socket.IPPROTO_TCP  # else answers wait 40 ms for an acknowledgement


async def test_a_forged_session_is_not_found_and_touches_no_other():
    async with serving("one") as served, httpx.AsyncClient() as client:
        for token in ("x", served.token[:-1], served.token + "x", "..", "%00"):
            url = f"{served.endpoint.url(token)}/v1/chat/completions"
            assert (await client.post(url, json=hi())).status_code == 404
        assert served.agent.failure is None
        assert (await served.chat()).status_code == 200


async def test_malformed_json_fails_the_episode_and_no_other():
    async with serving("one") as served:
        other = Served(served.endpoint, ScriptedSampler("two"))
        for content in (b"{", b"\xff\xfe", b"[]", b"[" * 100_000):
            answer = await served.client.post("/v1/chat/completions", content=content)
            assert (answer.status_code, "request that is no" in answer.json()["error"]["message"]) == (400, True)
        assert "request that is no" in served.agent.failure
        assert served.agent.failed.is_set()
        async with other.client:
            assert (await other.chat()).status_code == 200
        assert other.agent.failure is None


async def test_a_message_of_50_mb_fails_the_episode_and_no_other():
    async with serving("one") as served:
        other = Served(served.endpoint, ScriptedSampler("two"))
        answer = await served.client.post("/v1/chat/completions", content=b"x" * 50_000_000)
        assert answer.status_code == 413
        assert "50,000,000 bytes" in served.agent.failure
        async with other.client:
            assert (await other.chat()).status_code == 200
        assert other.agent.failure is None


async def test_a_client_that_disconnects_aborts_its_request_and_fails_the_episode():
    stopped = asyncio.Event()

    class Slow(ScriptedSampler):
        async def generate(self, prompt_ids, params, images=()):
            self.prompts.append(prompt_ids)
            try:
                await asyncio.sleep(60)
            finally:
                stopped.set()

    async with AgentEndpoint() as endpoint:
        served = Served(endpoint, Slow())
        async with served.client:
            task = asyncio.create_task(served.chat())
            while not served.sampler.prompts:
                await asyncio.sleep(0.01)
            task.cancel()
            await asyncio.wait_for(stopped.wait(), 10)
            await asyncio.wait_for(served.agent.failed.wait(), 10)
        assert served.agent.failure == "the client disconnected amid a request"
        assert served.branches == []


async def test_a_body_that_never_ends_is_cut_off_when_the_episode_ends():
    async with serving("one") as served:
        reader, writer = await asyncio.open_connection("127.0.0.1", served.endpoint.port)
        head = f"POST /{served.token}/v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 1000\r\n\r\n{{"
        writer.write(head.encode())
        while not served.agent._working:
            await asyncio.sleep(0.01)
        assert (await served.chat()).status_code == 200  # others are served meanwhile
        served.endpoint.close(served.token)
        answer = await asyncio.wait_for(reader.read(4096), 10)
        assert b"404" in answer.splitlines()[0]
        writer.close()
        assert (await served.chat()).status_code == 404


async def test_a_flood_of_requests_fails_the_episode_and_no_other(monkeypatch):
    monkeypatch.setattr(serving_module, "MOST_REQUESTS", 4)
    release = asyncio.Event()

    class Waits(ScriptedSampler):
        async def generate(self, prompt_ids, params, images=()):
            await release.wait()
            return await super().generate(prompt_ids, params, images)

    async with AgentEndpoint() as endpoint:
        served, other = Served(endpoint, Waits(*["a"] * 20)), Served(endpoint, ScriptedSampler("b"))
        async with served.client, other.client:
            flood = [asyncio.create_task(served.chat()) for _ in range(8)]
            await asyncio.wait_for(served.agent.failed.wait(), 10)
            assert served.agent.failure == "more than 4 requests at once"
            assert (await other.chat()).status_code == 200
            release.set()
            statuses = sorted([(await task).status_code for task in flood])
        assert statuses == [200] * 4 + [429] * 4
        assert other.agent.failure is None


async def test_an_engine_that_fails_fails_the_episode_with_its_reason():
    async with serving(RunError("the KV cache is too small")) as served:
        answer = await served.chat()
        assert (answer.status_code, answer.headers["x-should-retry"]) == (500, "false")
        assert served.agent.failure == "RunError: the KV cache is too small"


async def test_an_engine_that_is_replaced_amid_a_stream_samples_the_turn_again():
    dead = ScriptedSampler(WorkerError("sampler 0 died"))
    fresh = ScriptedSampler("again")

    async def restart(index):
        return fresh

    pool = SamplerPool([dead], restart, 1)
    async with AgentEndpoint() as endpoint:
        with pool.session() as sampler:
            served = Served(endpoint, sampler)
            async with served.client:
                answer = await served.chat(stream=True)
        assert "again" in answer.text
        assert answer.text.endswith("data: [DONE]\n\n")
        assert (served.agent.failure, trained(served.branches[0])) == (None, sampled("again"))
        assert dead.prompts == fresh.prompts


# ---------------------------------------------------------------------- unmodified clients


async def test_the_openai_client_plays_a_conversation_with_tools_as_one_branch():
    openai = pytest.importorskip("openai")
    async with serving("I say " + call("é\\n"), call("b") + call("c"), "done") as served:
        client = openai.AsyncOpenAI(base_url=f"{served.url}/v1", api_key="unused")
        messages = [{"role": "user", "content": "hi"}]
        for stream in (False, True):
            if stream:
                async with client.chat.completions.stream(model="policy", messages=messages, tools=[TOOL]) as events:
                    async for _ in events:
                        pass
                    completion = await events.get_final_completion()
            else:
                completion = await client.chat.completions.create(model="policy", messages=messages, tools=[TOOL])
            [choice] = completion.choices
            assert choice.finish_reason == "tool_calls"
            messages.append(choice.message.model_dump(exclude_none=True, exclude={"parsed"}))
            for made in choice.message.tool_calls:
                text = json.loads(made.function.arguments)["text"]
                messages.append({"role": "tool", "tool_call_id": made.id, "content": text})
        completion = await client.chat.completions.create(model="policy", messages=messages, tools=[TOOL])
        assert completion.choices[0].message.content == "done"
        await client.close()
        assert (len(served.branches), served.agent.session.unmatched) == (1, 0)
        assert trained(served.branches[0]) == sampled("I say " + call("é\\n"), call("b") + call("c"), "done")


async def test_the_openai_client_plays_responses_as_one_branch():
    openai = pytest.importorskip("openai")
    flat = {"type": "function", **FUNCTION, "strict": False}
    async with serving("first " + call("a"), call("b") + call("c"), "done") as served:
        client = openai.AsyncOpenAI(base_url=f"{served.url}/v1", api_key="unused")
        items = [{"role": "user", "content": "hi"}]
        for stream in (False, True):
            given = {"model": "policy", "input": items, "tools": [flat], "instructions": "Be kind."}
            if stream:
                async with client.responses.stream(**given) as events:
                    async for _ in events:
                        pass
                    response = await events.get_final_response()
            else:
                response = await client.responses.create(**given)
            for item in response.output:
                items.append(item.model_dump(exclude_none=True, exclude={"parsed_arguments"}))
                if item.type == "function_call":  # the result behind its call, and not behind all calls of the turn
                    items.append({"type": "function_call_output", "call_id": item.call_id, "output": "said"})
        response = await client.responses.create(**given | {"input": items})
        assert response.output_text == "done"
        await client.close()
        assert (len(served.branches), served.agent.session.unmatched) == (1, 0)
        assert trained(served.branches[0]) == sampled("first " + call("a"), call("b") + call("c"), "done")


async def test_the_anthropic_client_plays_a_conversation_with_tools_as_one_branch():
    anthropic = pytest.importorskip("anthropic")
    tool = {"name": "say", "description": "Say it.", "input_schema": FUNCTION["parameters"]}
    async with serving("I say " + call("a"), call("b") + call("c"), "done") as served:
        client = anthropic.AsyncAnthropic(base_url=served.url, api_key="unused")
        given = {"model": "policy", "max_tokens": 200, "system": "Be kind.", "tools": [tool]}
        messages = [{"role": "user", "content": "hi"}]
        for stream in (False, True):
            if stream:
                async with client.messages.stream(**given, messages=messages) as events:
                    message = await events.get_final_message()
            else:
                message = await client.messages.create(**given, messages=messages)
            assert message.stop_reason == "tool_use"
            messages.append({"role": "assistant", "content": [part.model_dump() for part in message.content]})
            results = [
                {"type": "tool_result", "tool_use_id": part.id, "content": [{"type": "text", "text": "said"}]}
                for part in message.content
                if part.type == "tool_use"
            ]
            messages.append({"role": "user", "content": results})
        message = await client.messages.create(**given, messages=messages)
        assert (message.content[0].text, message.stop_reason) == ("done", "end_turn")
        await client.close()
        assert (len(served.branches), served.agent.session.unmatched) == (1, 0)
        assert trained(served.branches[0]) == sampled("I say " + call("a"), call("b") + call("c"), "done")

"""Requests that the wire formats refuse, and one that they take, through real HTTP."""

import pytest

from tests.unit.envs.test_endpoint import FUNCTION, hi, serving

WRONG = ("5", 1.5, -1, True, [1], {"a": 1})
"""Values of types that a field may not have, but for those that it may."""


@pytest.mark.parametrize(
    ("path", "field", "fine"),
    [
        ("chat/completions", "max_tokens", ()),
        ("chat/completions", "max_completion_tokens", ()),
        ("chat/completions", "n", ()),
        ("chat/completions", "stop", ("5",)),
        ("chat/completions", "logprobs", (True,)),
        ("chat/completions", "return_token_ids", (True,)),
        ("chat/completions", "stream", (True,)),
        ("chat/completions", "stream_options", ({"a": 1},)),
        ("chat/completions", "response_format", ({"a": 1},)),
        ("chat/completions", "tools", ()),
        ("chat/completions", "messages", ()),
        ("responses", "max_output_tokens", ()),
        ("responses", "instructions", ("5",)),
        ("responses", "include", ()),
        ("responses", "tools", ()),
        ("responses", "input", ("5",)),
        ("responses", "text", ({"a": 1},)),
        ("messages", "max_tokens", ()),
        ("messages", "stop_sequences", ()),
        ("messages", "system", ("5",)),
        ("messages", "tools", ()),
        ("messages", "tool_choice", ({"a": 1},)),
        ("messages", "messages", ()),
    ],
)
async def test_fields_of_wrong_types_are_refused_before_anything_is_sampled(path, field, fine):
    async with serving(*["fine"] * len(fine)) as served:
        for value in WRONG:
            body = hi(input="hi") | {field: value}
            answer = await served.client.post(f"/v1/{path}", json=body)
            right = any(value == one and type(value) is type(one) for one in fine)
            assert answer.status_code == (200 if right else 400), (value, answer.text)
        assert (len(served.sampler.prompts), served.agent.failure) == (len(fine), None)


@pytest.mark.parametrize(
    ("path", "turns"),
    [
        ("chat/completions", [{"role": 5}]),
        ("chat/completions", [{"role": "user", "content": 5}]),
        ("chat/completions", [{"role": "user", "name": [1]}]),
        ("chat/completions", [{"role": "assistant", "tool_calls": [{"id": [1], "function": {"name": "f"}}]}]),
        ("chat/completions", [{"role": "assistant", "tool_calls": [{"id": "1", "function": {"name": 5}}]}]),
        ("chat/completions", [{"role": "assistant", "reasoning_content": [1]}]),
        ("chat/completions", [{"role": "tool", "tool_call_id": [1], "content": "x"}]),
        ("responses", [{"role": "user", "content": 5}]),
        ("responses", [{"type": "function_call", "name": 5, "arguments": "{}", "call_id": "1"}]),
        ("responses", [{"type": "function_call", "name": "f", "arguments": {}, "call_id": "1"}]),
        ("responses", [{"type": "function_call_output", "call_id": [1], "output": "x"}]),
        ("messages", [{"role": "user", "content": 5}]),
        ("messages", [{"role": "assistant", "content": [{"type": "tool_use", "id": [1], "name": "f", "input": {}}]}]),
        ("messages", [{"role": "user", "content": [{"type": "tool_result", "tool_use_id": [1], "content": "x"}]}]),
        ("messages", [{"role": "user", "content": [{"type": [1]}]}]),
    ],
)
async def test_messages_of_wrong_types_are_refused(path, turns):
    async with serving() as served:
        messages = [*turns, {"role": "user", "content": "hi"}]
        answer = await served.client.post(f"/v1/{path}", json={"messages": messages, "input": messages})
        assert (answer.status_code, served.agent.failure) == (400, None), answer.text


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("chat/completions", {"messages": [{"role": "wizard", "content": "hi"}]}),
        ("chat/completions", {"messages": [{"role": "function", "name": "f", "content": "hi"}]}),
        ("chat/completions", hi(functions=[FUNCTION])),
        ("chat/completions", hi(function_call={"name": "say"})),
        (
            "chat/completions",
            {"messages": [{"role": "assistant", "function_call": {"name": "f", "arguments": "{}"}}, *hi()["messages"]]},
        ),
        ("responses", {"input": [{"role": "wizard", "content": "hi"}]}),
        ("messages", {"messages": [{"role": "tool", "content": "hi"}]}),
    ],
)
async def test_what_would_not_be_shown_to_the_model_is_refused(path, body):
    async with serving() as served:
        answer = await served.client.post(f"/v1/{path}", json=body)
        assert (answer.status_code, served.agent.failure) == (400, None), answer.text
        assert "role" in answer.text or "tool_calls" in answer.text


@pytest.mark.parametrize("more", [{}, {"parameters": None}])
async def test_a_function_without_parameters_is_one_that_takes_none(more):
    flat = {"type": "function", "name": "roll", "description": "Roll a die.", **more}
    empty = {"parameters": {"type": "object", "properties": {}}}
    async with serving("one", "one", "one", "one") as served:
        for function in (flat, flat | empty):
            of_chat = {"type": "function", "function": {key: v for key, v in function.items() if key != "type"}}
            for path, tool in (("chat/completions", of_chat), ("responses", function)):
                answer = await served.client.post(f"/v1/{path}", json=hi(input="hi", tools=[tool]))
                assert answer.status_code == 200, answer.text
        assert served.sampler.prompts[:2] == served.sampler.prompts[2:]


async def test_log_probabilities_of_responses_are_refused():
    async with serving() as served:
        for more in ({"top_logprobs": 2}, {"include": ["message.output_text.logprobs"]}):
            answer = await served.client.post("/v1/responses", json={"input": "hi"} | more)
            assert (answer.status_code, "chat completions give them" in answer.text) == (400, True)

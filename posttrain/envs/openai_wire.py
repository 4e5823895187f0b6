"""The wire formats of OpenAI's clients: chat completions and responses."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Iterator, Mapping
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, PositiveInt

from posttrain.core.types import Message
from posttrain.envs.wire import Answers, Choice, Refused, Request, Shape, event, read_json, shaped, texts
from posttrain.tools.base import with_parameters

_TEXT = ("text", "input_text", "output_text", "refusal")
_MOST_CHOICES = 64
_Role = Literal["system", "developer", "user", "assistant", "tool"]


class _Call(Shape):
    id: str | None = None
    function: dict[str, Any] | None = None


class _Message(Shape):
    role: _Role
    name: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    tool_calls: list[_Call] | None = None
    tool_call_id: str | None = None


class _Chat(Shape):
    messages: list[_Message]
    tools: list[dict[str, Any]] | None = None
    n: Annotated[int, Field(ge=1, le=_MOST_CHOICES)] | None = None
    max_tokens: PositiveInt | None = None
    max_completion_tokens: PositiveInt | None = None
    stop: Annotated[list[str] | None, BeforeValidator(lambda stop: [stop] if isinstance(stop, str) else stop)] = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    response_format: dict[str, Any] | None = None
    return_token_ids: bool | None = None
    stream: bool | None = None
    stream_options: dict[str, Any] | None = None


class _Item(Shape):
    role: _Role | None = None
    name: str | None = None
    arguments: str | None = None
    call_id: str | None = None


class _Responses(Shape):
    input: Annotated[list[_Item], BeforeValidator(lambda given: [] if isinstance(given, str) else given)]
    instructions: str | None = None
    include: list[str] | None = None
    tools: list[dict[str, Any]] | None = None
    max_output_tokens: PositiveInt | None = None
    top_logprobs: int | None = None
    text: dict[str, Any] | None = None
    stream: bool | None = None


class _Function(Shape):
    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None


def _tools(listed: list[dict[str, Any]] | None) -> list[dict[str, Any]]:
    """Return function schemas, of chat completions or (flat) of responses."""
    tools = []
    for tool in listed or ():
        if tool.get("type", "function") != "function":
            raise Refused(400, f"a tool of type {tool['type']!r}: functions alone can be called")
        function = tool.get("function") or {k: tool[k] for k in ("name", "description", "parameters") if k in tool}
        shaped(_Function, function)
        tools.append(with_parameters({"type": "function", "function": function}))
    return tools


def _calls(message: Message) -> list[dict[str, Any]]:
    """Return the calls of a turn with arguments as JSON text."""
    return [
        {
            "id": call["id"],
            "type": "function",
            "function": {
                "name": call["function"]["name"],
                "arguments": json.dumps(call["function"]["arguments"], ensure_ascii=False),
            },
        }
        for call in message.get("tool_calls", ())
    ]


def _turn_of(messages: list[dict[str, Any]], call_id: str) -> dict[str, Any] | None:
    """Return the last turn if a call is of it though results stand between: clients that go through the calls of a turn
    one by one put each result behind its call. Ids of calls say which turn they are of (``TokenSession.sampled``)."""
    of_turn = re.match(r"call_\d+_(?=\d+$)", call_id)
    turn = next((message for message in reversed(messages) if message["role"] != "tool"), None)
    if of_turn is None or turn is None or not (calls := turn.get("tool_calls")):
        return None
    return turn if str(calls[-1]["id"]).startswith(of_turn[0]) else None


def _error(refused: Refused) -> dict[str, Any]:
    return {"error": {"message": refused.message, "type": refused.code, "param": None, "code": refused.code}}


class ChatWire:
    """Chat completions."""

    def request(self, body: Mapping[str, Any]) -> Request:
        asked = shaped(_Chat, body)
        if (asked.response_format or {}).get("type", "text") != "text":
            raise Refused(400, "response_format: the model is sampled as it is, and writes no format that is asked for")
        if asked.top_logprobs:
            raise Refused(400, "top_logprobs: engines give the log-probability of the sampled token alone")
        if any(one.get("functions") or one.get("function_call") for one in (body, *body["messages"])):
            raise Refused(400, "functions and function_call: send tools and tool_calls, which took their place")
        return Request(
            [self._message(message) for message in body["messages"]],
            [] if body.get("tool_choice") == "none" else _tools(asked.tools),
            asked.n or 1,
            asked.max_completion_tokens or asked.max_tokens,
            tuple(asked.stop or ()),
            bool(asked.logprobs),
        )

    def _message(self, message: Mapping[str, Any]) -> dict[str, Any]:
        shown = {k: v for k, v in message.items() if k in ("role", "name", "tool_calls", "tool_call_id") and v}
        if shown["role"] == "developer":
            shown["role"] = "system"
        if shown["role"] == "assistant" and (thoughts := message.get("reasoning_content") or message.get("reasoning")):
            shown["reasoning_content"] = thoughts
        return shown | {"content": texts(message.get("content"), _TEXT)}

    def response(self, body: Mapping[str, Any], answers: Answers, name: str) -> dict[str, Any]:
        choices = []
        for index, answer in enumerate(answers.choices):
            message: dict[str, Any] = {"role": "assistant", "content": answer.message["content"]}
            if answer.message.get("reasoning_content"):
                message["reasoning_content"] = answer.message["reasoning_content"]
            if calls := _calls(answer.message):
                message["tool_calls"] = calls
                message["content"] = message["content"] or None  # as OpenAI has it; without calls it is a text
            choice = {"index": index, "message": message, "finish_reason": answer.finish}
            choices.append(choice | self._details(body, answer))
        return self._head(body, name, "chat.completion") | {
            "choices": choices, "usage": self._usage(answers), **self._prompt(body, answers),
        }  # fmt: skip

    def events(self, body: Mapping[str, Any], answers: Answers, name: str) -> Iterator[str]:
        head = self._head(body, name, "chat.completion.chunk")
        for index, answer in enumerate(answers.choices):

            def chunk(delta: dict[str, Any], finish: str | None = None, index: int = index, **more: Any) -> str:
                return event(head | {"choices": [{"index": index, "delta": delta, "finish_reason": finish, **more}]})

            yield chunk({"role": "assistant", "content": ""})
            if thoughts := answer.message.get("reasoning_content"):
                yield chunk({"reasoning_content": thoughts})
            yield chunk({"content": answer.message["content"]}, **self._details(body, answer))
            for number, call in enumerate(_calls(answer.message)):
                yield chunk({"tool_calls": [{"index": number, **call}]})
            yield chunk({}, answer.finish)
        if (body.get("stream_options") or {}).get("include_usage"):
            yield event(head | {"choices": [], "usage": self._usage(answers), **self._prompt(body, answers)})
        yield "data: [DONE]\n\n"

    def error(self, refused: Refused) -> dict[str, Any]:
        return _error(refused)

    @staticmethod
    def _head(body: Mapping[str, Any], name: str, kind: str) -> dict[str, Any]:
        model = str(body.get("model", "policy"))
        return {"id": f"chatcmpl-{name}", "object": kind, "created": int(time.time()), "model": model}

    @staticmethod
    def _details(body: Mapping[str, Any], answer: Choice) -> dict[str, Any]:
        found: dict[str, Any] = {"logprobs": None}
        if body.get("logprobs"):
            columns = zip(answer.tokens, answer.logprobs, strict=True)
            found["logprobs"] = {
                "content": [
                    {"token": token, "logprob": logprob, "bytes": list(token.encode()), "top_logprobs": []}
                    for token, logprob in columns
                ]
            }
        if body.get("return_token_ids"):
            found["token_ids"] = answer.ids
        return found

    @staticmethod
    def _prompt(body: Mapping[str, Any], answers: Answers) -> dict[str, Any]:
        return {"prompt_token_ids": answers.prompt_ids} if body.get("return_token_ids") else {}

    @staticmethod
    def _usage(answers: Answers) -> dict[str, int]:
        prompt, completion = len(answers.prompt_ids), answers.completion_tokens
        return {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion}


class ResponsesWire:
    """Responses. Each request carries the whole conversation: nothing is stored under an id."""

    def request(self, body: Mapping[str, Any]) -> Request:
        asked = shaped(_Responses, body)
        if body.get("previous_response_id") or body.get("conversation"):
            raise Refused(400, "previous_response_id: no response is stored; send the whole conversation as input")
        if ((asked.text or {}).get("format") or {}).get("type", "text") != "text":
            raise Refused(400, "text.format: the model is sampled as it is, and writes no format that is asked for")
        if asked.top_logprobs or "message.output_text.logprobs" in (asked.include or ()):
            raise Refused(400, "log-probabilities of responses: chat completions give them")
        messages: list[dict[str, Any]] = []
        if asked.instructions:
            messages.append({"role": "system", "content": asked.instructions})
        given = body["input"]
        for item in [{"role": "user", "content": given}] if isinstance(given, str) else given:
            self._add(messages, item)
        tools = [] if body.get("tool_choice") == "none" else _tools(asked.tools)
        return Request(messages, tools, max_tokens=asked.max_output_tokens)

    def _add(self, messages: list[dict[str, Any]], item: Mapping[str, Any]) -> None:
        """Add an item of the input. The words and calls of one turn are items of their own, and one message here."""
        kind = item.get("type", "message")
        goes_on = bool(messages) and messages[-1]["role"] == "assistant"
        if kind == "message":
            role = "system" if item["role"] == "developer" else item["role"]
            messages.append({"role": role, "content": texts(item["content"], _TEXT)})
        elif kind == "function_call":
            function = {"name": item["name"], "arguments": read_json(item["arguments"], "arguments")}
            turn = messages[-1] if goes_on else _turn_of(messages, item["call_id"])
            if turn is None:
                turn = {"role": "assistant", "content": ""}
                messages.append(turn)
            calls = turn.setdefault("tool_calls", [])
            calls.append({"id": item["call_id"], "type": "function", "function": function})
        elif kind == "function_call_output":
            content = texts(item["output"], _TEXT)
            messages.append({"role": "tool", "tool_call_id": item["call_id"], "content": content})
        elif kind != "reasoning":  # the engine has its tokens
            raise Refused(400, f"an item of the input has type {kind!r}: messages and function calls are read")

    def response(self, body: Mapping[str, Any], answers: Answers, name: str) -> dict[str, Any]:
        return self._head(body, answers, name, "completed", self._items(answers.choices[0], name))

    def events(self, body: Mapping[str, Any], answers: Answers, name: str) -> Iterator[str]:
        number = iter(range(1 << 30))

        def told(kind: str, **data: Any) -> str:
            return event({"type": kind, "sequence_number": next(number), **data}, kind)

        items = self._items(answers.choices[0], name)
        yield told("response.created", response=self._head(body, answers, name, "in_progress", []))
        for place, item in enumerate(items):
            at = {"output_index": place, "item_id": item["id"]}
            if item["type"] == "message":
                part = item["content"][0]
                empty = part | {"text": ""}
                yield told("response.output_item.added", output_index=place, item={**item, "content": []})
                yield told("response.content_part.added", **at, content_index=0, part=empty)
                yield told("response.output_text.delta", **at, content_index=0, delta=part["text"], logprobs=[])
                yield told("response.output_text.done", **at, content_index=0, text=part["text"], logprobs=[])
                yield told("response.content_part.done", **at, content_index=0, part=part)
            else:
                arguments = item["arguments"]
                yield told("response.output_item.added", output_index=place, item={**item, "arguments": ""})
                yield told("response.function_call_arguments.delta", **at, delta=arguments)
                yield told("response.function_call_arguments.done", **at, arguments=arguments, name=item["name"])
            yield told("response.output_item.done", output_index=place, item=item)
        yield told("response.completed", response=self._head(body, answers, name, "completed", items))

    def error(self, refused: Refused) -> dict[str, Any]:
        return _error(refused)

    @staticmethod
    def _items(answer: Choice, name: str) -> list[dict[str, Any]]:
        items: list[dict[str, Any]] = []
        if answer.message["content"] or not answer.message.get("tool_calls"):
            part = {"type": "output_text", "text": answer.message["content"], "annotations": [], "logprobs": []}
            items.append(
                {"id": f"msg_{name}", "type": "message", "role": "assistant", "status": "completed", "content": [part]}
            )
        for call in _calls(answer.message):
            named = {"id": f"fc_{call['id']}", "call_id": call["id"], "type": "function_call", "status": "completed"}
            items.append(named | call["function"])
        return items

    @staticmethod
    def _head(
        body: Mapping[str, Any], answers: Answers, name: str, status: str, items: list[dict[str, Any]]
    ) -> dict[str, Any]:
        cut = answers.choices[0].finish == "length" and status == "completed"
        prompt, output = len(answers.prompt_ids), answers.completion_tokens
        return {
            "id": f"resp_{name}", "object": "response", "created_at": int(time.time()), "error": None,
            "status": "incomplete" if cut else status, "model": str(body.get("model", "policy")), "output": items,
            "incomplete_details": {"reason": "max_output_tokens"} if cut else None,
            "instructions": body.get("instructions"), "metadata": {}, "parallel_tool_calls": True,
            "temperature": None, "top_p": None, "tool_choice": body.get("tool_choice", "auto"),
            "tools": body.get("tools") or [],
            "usage": {
                "input_tokens": prompt, "input_tokens_details": {"cached_tokens": 0}, "output_tokens": output,
                "output_tokens_details": {"reasoning_tokens": 0}, "total_tokens": prompt + output,
            },
        }  # fmt: skip

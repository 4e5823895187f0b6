"""The wire format of Anthropic's client: messages."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, PositiveInt

from posttrain.envs.wire import Answers, Refused, Request, Shape, event, shaped, texts

_FINISH = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}


class _Part(Shape):
    type: str
    id: str | None = None
    tool_use_id: str | None = None


class _Message(Shape):
    role: Literal["system", "user", "assistant"]
    content: Annotated[list[_Part], BeforeValidator(lambda content: [] if isinstance(content, str) else content)]


class _Tool(Shape):
    name: str
    description: str | None = None
    input_schema: dict[str, Any]


class _Messages(Shape):
    messages: list[_Message]
    tools: list[dict[str, Any]] | None = None
    tool_choice: dict[str, Any] | None = None
    max_tokens: PositiveInt | None = None
    stop_sequences: list[str] | None = None
    stream: bool | None = None


class MessagesWire:
    """Messages."""

    def request(self, body: Mapping[str, Any]) -> Request:
        asked = shaped(_Messages, body)
        messages: list[dict[str, Any]] = []
        if body.get("system"):
            messages.append({"role": "system", "content": texts(body["system"], ("text",))})
        for message in body["messages"]:
            messages += self._messages(message)
        tools = []
        for tool in asked.tools or ():
            if "input_schema" not in tool:
                raise Refused(400, f"a tool of type {tool.get('type')!r}: tools of the client alone can be called")
            given = shaped(_Tool, tool)
            function = {"name": given.name, "description": given.description or "", "parameters": given.input_schema}
            tools.append({"type": "function", "function": function})
        if (asked.tool_choice or {}).get("type") == "none":
            tools = []
        return Request(messages, tools, max_tokens=asked.max_tokens, stop=tuple(asked.stop_sequences or ()))

    def _messages(self, message: Mapping[str, Any]) -> list[dict[str, Any]]:
        """Return the messages that one of Anthropic's holds: results of tools are messages of their own."""
        role, content = message["role"], message["content"]
        if isinstance(content, str):
            return [{"role": role, "content": content}]
        results = [
            {"role": "tool", "tool_call_id": part["tool_use_id"], "content": texts(part.get("content"), ("text",))}
            for part in content
            if part["type"] == "tool_result"
        ]
        calls = [
            {"id": part["id"], "type": "function", "function": {"name": part["name"], "arguments": part["input"]}}
            for part in content
            if part["type"] == "tool_use"
        ]
        kinds = ("tool_result", "tool_use", "thinking", "redacted_thinking")  # the engine has the thoughts' tokens
        rest = [part for part in content if part["type"] not in kinds]
        said: dict[str, Any] = {"role": role, "content": texts(rest, ("text",))}
        if calls:
            said["tool_calls"] = calls
        return [*results, said] if rest or calls or not results else results

    def response(self, body: Mapping[str, Any], answers: Answers, name: str) -> dict[str, Any]:
        answer = answers.choices[0]
        reason = "stop_sequence" if answer.stopped_by else _FINISH[answer.finish]
        return {
            "id": f"msg_{name}", "type": "message", "role": "assistant", "model": str(body.get("model", "policy")),
            "content": self._blocks(answers), "stop_reason": reason, "stop_sequence": answer.stopped_by,
            "usage": {"input_tokens": len(answers.prompt_ids), "output_tokens": answers.completion_tokens},
        }  # fmt: skip

    def events(self, body: Mapping[str, Any], answers: Answers, name: str) -> Iterator[str]:
        whole = self.response(body, answers, name)
        begun = whole | {"content": [], "stop_reason": None, "stop_sequence": None}

        def told(kind: str, **data: Any) -> str:
            return event({"type": kind, **data}, kind)

        yield told("message_start", message=begun)
        for index, block in enumerate(whole["content"]):
            if block["type"] == "text":
                empty, delta = {"type": "text", "text": ""}, {"type": "text_delta", "text": block["text"]}
            else:
                empty = block | {"input": {}}
                delta = {"type": "input_json_delta", "partial_json": json.dumps(block["input"], ensure_ascii=False)}
            yield told("content_block_start", index=index, content_block=empty)
            yield told("content_block_delta", index=index, delta=delta)
            yield told("content_block_stop", index=index)
        ended = {"stop_reason": whole["stop_reason"], "stop_sequence": whole["stop_sequence"]}
        yield told("message_delta", delta=ended, usage={"output_tokens": answers.completion_tokens})
        yield told("message_stop")

    def error(self, refused: Refused) -> dict[str, Any]:
        return {"type": "error", "error": {"type": refused.code, "message": refused.message}}

    @staticmethod
    def _blocks(answers: Answers) -> list[dict[str, Any]]:
        message = answers.choices[0].message
        blocks: list[dict[str, Any]] = []
        if message["content"] or not message.get("tool_calls"):
            blocks.append({"type": "text", "text": message["content"]})
        for call in message.get("tool_calls", ()):
            function = call["function"]
            blocks.append(
                {"type": "tool_use", "id": call["id"], "name": function["name"], "input": function["arguments"]}
            )
        return blocks

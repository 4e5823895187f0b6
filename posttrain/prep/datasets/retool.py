"""ReTool's cold start (Feng et al. 2025, arXiv:2504.11536): 2,000 solutions that run Python between their thoughts."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import ClassVar

from posttrain.core.errors import DataError
from posttrain.core.types import Message, ToolCall
from posttrain.data.parquet import Conversation
from posttrain.prep.datasets.base import RawRow
from posttrain.prep.datasets.conversations import Messages, json_list
from posttrain.tools import code

_QUESTION = "*user question:*"
_STEP = re.compile(r"<code>(.*?)</code>\s*<interpreter>(.*?)</interpreter>", re.DOTALL)
_FENCE = re.compile(r"```(?:python|py)?[ \t]*\n(.*?)```", re.DOTALL)
_LEFTOVER = re.compile(r"</?(?:code|interpreter)>")


class ReTool(Messages):
    """Raw rows ``{"messages": [user, assistant]}``. The user's text has the question after ``*user question:*``; the
    assistant's has programs in ``<code>``, each followed by its output in ``<interpreter>``, and ends with
    ``<answer>``. Each program becomes a call of ``code_interpreter``, and its output a tool message."""

    name = "retool-sft"
    licence = "Apache-2.0"
    hub_id: str | None = "JoeYing/ReTool-SFT"
    size: Mapping[str, int] = {"train": 2000}
    patterns: ClassVar[Mapping[str, tuple[str, ...]]] = {
        "train": ("retool*", "ReTool*", "train", "train-*", "data/train-*")
    }

    def conversation(self, row: RawRow) -> Conversation:
        texts = {}
        for message in json_list(row.get("messages")):
            if isinstance(message, Mapping):
                texts[str(message.get("role"))] = message.get("content")
        asked, worked = texts.get("user"), texts.get("assistant")
        if not isinstance(asked, str) or not isinstance(worked, str):
            raise DataError("there is no user or no assistant message", hint=f"there are {sorted(texts)}")
        question = asked.rpartition(_QUESTION)[2].replace("<answer>", "").replace("</answer>", "").strip()
        return Conversation([{"role": "user", "content": question}, *_turns(worked)], [code.SCHEMA])


def _turns(worked: str) -> list[Message]:
    messages: list[Message] = []
    end = 0
    for step in _STEP.finditer(worked):
        messages += _call(worked[end : step.start()], step[1], step[2])
        end = step.end()
    rest = worked[end:].strip()
    if not rest:
        raise DataError("the solution ends with a program", hint="an answer has to follow the last output")
    messages.append({"role": "assistant", "content": rest})
    for message in messages:
        if _LEFTOVER.search(message["content"]) and message["role"] == "assistant":
            raise DataError("a program without its output, or the other way round", hint=message["content"][:80])
    return messages


def _call(thought: str, block: str, output: str) -> list[Message]:
    fence = _FENCE.search(block)
    source = (fence[1] if fence else block).strip()
    call: ToolCall = {"type": "function", "function": {"name": code.FUNCTION, "arguments": {"code": source}}}
    return [
        {
            "role": "assistant",
            "content": thought.strip(),
            "tool_calls": [call],
        },
        {"role": "tool", "name": code.FUNCTION, "content": output.strip()},
    ]

"""Graded conversations as text, for people who want to see what is rewarded."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from posttrain.core.types import Message, Trajectory

_WIDTH = 2000
"""Characters of one message; a longer one is cut in the middle."""


def examine(groups: Sequence[Sequence[Trajectory]], count: int) -> Iterator[str]:
    """Yield the first ``count`` episodes as text, each of another prompt while there are more prompts."""
    most = max((len(group) for group in groups), default=0)
    turns = [group[i] for i in range(most) for group in groups if i < len(group)]
    for episode in turns[:count]:
        metadata = {
            "reward": episode.reward,
            **episode.reward_parts,
            "correct": episode.correct,
            "stop_reason": episode.stop_reason,
            "error": episode.error,
        }
        yield conversation(episode.messages, episode.prompt.data_source, episode.prompt.ground_truth, metadata)


def spoken(messages: Sequence[Message]) -> Iterator[str]:
    """Yield the lines of messages."""
    for message in messages:
        yield f"[{message['role']}] {_cut(message.get('content') or '')}"
        for call in message.get("tool_calls") or []:  # parquet gives null to messages without
            yield f"  calls {json.dumps(call['function'], ensure_ascii=False)}"


def conversation(messages: Sequence[Message], data_source: str, ground_truth: Any, metadata: Mapping[str, Any]) -> str:
    """Return one conversation as text, with what was expected and its ``metadata``."""
    lines = [f"---- {data_source}", *spoken(messages)]
    lines.append(f"[expected] {_cut(str(ground_truth))}")
    shown = (
        f"{name} {value:.4g}" if isinstance(value, float) else f"{name} {value}" for name, value in metadata.items()
    )
    lines.append(f"[graded] {', '.join(shown)}")
    return "\n".join(lines)


def _cut(text: str) -> str:
    return text if len(text) <= _WIDTH else f"{text[: _WIDTH // 2]} ... {text[-_WIDTH // 2 :]}"

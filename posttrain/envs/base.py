"""The Environment protocol and the registry of environments."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from numbers import Integral
from typing import Any, Literal, Protocol

from posttrain.core.errors import CodeError
from posttrain.core.plugins import definition_of, with_place
from posttrain.core.registry import Registry
from posttrain.core.types import Message, Prompt, ToolSchema

Split = Literal["train", "val"]
_MOST_INDEX = 2**31 - 1
"""Rollout files have it as 32 bits."""


@dataclass(frozen=True)
class Step:
    """What an environment does after an assistant's turn."""

    messages: list[Message] = field(default_factory=list)
    """What the model reads next: messages of the roles `user` and `tool`. Unused where the episode is over."""
    reward: float = 0.0
    """For this turn. The rewards of an episode's turns add up."""
    done: bool = False
    """The episode is over."""


class Environment(Protocol):
    """The world of one episode: each episode has an object of its own.

    Its options, `rollout.env_options`, are the keyword arguments of its constructor, which opens nothing: posttrain
    makes one more object before the run, to ask for ``tools`` and ``tasks``. A class derived from this one inherits
    tasks of none, a ``reset`` to the messages of the task, and a ``close`` that does nothing.
    """

    tools: Sequence[ToolSchema] = ()
    """What the model may call. The calls of a turn come to ``step`` as `tool_calls` of the message."""

    def tasks(self, split: Split) -> Sequence[Prompt]:
        """Return the tasks to train or to validate on, for a config without `data.train`, `data.val` or
        `generate.data`. They are the same each time, and ``Prompt.index`` gives each its seed."""
        return []

    async def reset(self, task: Prompt, seed: int) -> list[Message]:
        """Begin an episode, and return the messages that the model reads first.

        Args:
            task: the row of the data, or one of ``tasks``.
            seed: in [0, 2^31); the same for all episodes of one task, which are compared with each other.
        """
        return task.messages

    async def step(self, message: Message) -> Step:
        """Answer an assistant's turn.

        Args:
            message: `content`; with ``tools`` also `reasoning_content` and `tool_calls`, where the turn has them. A
                turn with a call that cannot be read has none, and its whole text as content.
        """
        ...

    async def close(self) -> None:
        """Free what the episode has taken. Called exactly once, also after errors."""
        return


def seeded_tasks(split: Split, count: int, question: str, source: str) -> list[Prompt]:
    """Return ``count`` tasks to train on that differ by their seeds alone; to validate on, an eighth as many others."""
    places = range(count) if split == "train" else range(count, count + max(1, count // 8))
    return [Prompt(i, [{"role": "user", "content": question}], source, "") for i in places]


def checked_tasks(tasks: Sequence[Any], name: str, of: Any) -> list[Prompt]:
    """Return the tasks that ``name`` brings.

    Args:
        of: the method that gave them.

    Raises:
        CodeError: one is no ``Prompt`` with an index and a data source, or two have one index.
    """
    places: dict[int, int] = {}
    for place, prompt in enumerate(tasks):
        wrong, hint = "", "give objects of posttrain.core.types.Prompt"
        if not isinstance(prompt, Prompt):
            wrong = f"its task {place} is {type(prompt).__name__}, not Prompt"
        elif not isinstance(prompt.index, Integral) or abs(prompt.index) > _MOST_INDEX:
            wrong, hint = f"its task {place} has the index {prompt.index!r}", "give a whole number below 2^31"
        elif not isinstance(prompt.data_source, str):
            wrong, hint = f"its task {place} has the data source {prompt.data_source!r}", "give a text"
        elif (first := places.setdefault(prompt.index, place)) != place:
            wrong = f"its tasks {first} and {place} have the index {prompt.index}"
            hint = "give each Prompt an index of its own: it is the seed of its episodes"
        if wrong:
            raise CodeError(with_place(f"{name}: {wrong}", definition_of(of)), hint=hint)
    return list(tasks)


def asked(messages: Sequence[Message], observation: str) -> list[Message]:
    """Return the messages with an observation behind the last one, or as the only one."""
    if not messages:
        return [{"role": "user", "content": observation}]
    *before, last = messages
    return [*before, {**last, "content": f"{last['content']}\n\n{observation}"}]


ENVIRONMENTS: Registry[Callable[..., Environment]] = Registry("environment")
"""Environments that plugins register, by name."""

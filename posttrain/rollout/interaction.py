"""Simulated users: who answers when the assistant has said something and called no tool."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from posttrain.core.errors import CodeError, ConfigError
from posttrain.core.plugins import definition_of, user_code, with_place
from posttrain.core.registry import Registry
from posttrain.core.types import Message, Prompt
from posttrain.tools.options import check_options


@dataclass(frozen=True)
class UserTurn:
    """What a simulated user does after an assistant's turn."""

    text: str | None
    """What the user says; None: nothing more, and the episode ends."""
    reward: float | None = None
    """For the assistant's turn; the last one that is not None becomes the reward part `user`."""


class Interaction(Protocol):
    """A simulated user, shared by all episodes of a process; whatever belongs to one episode lives in its state.

    Its options, `rollout.interaction_options`, are the keyword arguments of its constructor. A class derived from this
    one inherits a ``release`` that does nothing.
    """

    async def create(self, prompt: Prompt) -> Any:
        """Return the state for one episode. ``prompt.extra_info["interaction_kwargs"]`` are the row's own arguments."""

    async def respond(self, state: Any, messages: Sequence[Message]) -> UserTurn:
        """Return the user's turn after ``messages``, of which the last is the assistant's. Also asked after the
        assistant's last turn, for its reward; the text is then not used."""
        ...

    async def release(self, state: Any) -> None:
        """Free what ``create`` took. Called exactly once per state, also after errors."""


_MEMBERS = ("create", "respond", "release")

INTERACTIONS: Registry[type[Interaction]] = Registry(
    "interaction", {"retry": "posttrain.rollout.interaction:RetryInteraction"}
)


def open_interaction(name: str, options: Mapping[str, Any]) -> Interaction:
    """Return the interaction of `rollout.interaction`. Raises ``ConfigError`` for an unknown one, or options it has
    not; as ``CodeError`` for one that cannot be made, or is none."""
    kind = INTERACTIONS.get(name)
    with user_code(f"interaction {name!r} cannot be made", kind):
        made = kind(**check_options(kind, options, "rollout.interaction_options"))
    if missing := [member for member in _MEMBERS if not hasattr(made, member)]:
        raise CodeError(
            with_place(f"interaction {name!r}: {type(made).__name__} has no {missing[0]!r}", definition_of(type(made))),
            hint="derive from posttrain.rollout.interaction.Interaction, and write create and respond",
        )
    return made


class RetryInteraction(Interaction):
    """Grades each answer with the row's grader, and asks for another until one is right.

    Args:
        message: what the user says after a wrong answer.
    """

    def __init__(self, message: str = "That is not right. Check your work and try again.") -> None:
        self.message = message

    async def create(self, prompt: Prompt) -> Prompt:
        """Raises ``ConfigError`` where the row's grader is not cheap: it could hang the run."""
        from posttrain.rewards import is_cheap

        if not is_cheap(prompt.data_source):
            raise ConfigError(
                f"interaction 'retry' grades in process, which the grader of {prompt.data_source} cannot",
                hint="write an interaction of your own for this data",
            )
        return prompt

    async def respond(self, state: Prompt, messages: Sequence[Message]) -> UserTurn:
        from posttrain.rewards import compute_score

        answer = messages[-1].get("content", "")
        score = compute_score(state.data_source, answer, state.ground_truth, state.extra_info)
        if score.error is not None:
            raise RuntimeError(f"the grader failed: {score.error}")
        return UserTurn(None if score.correct else self.message, score.score)

"""The tokens of an agent's session: exact, whatever requests the agent makes.

The token contract: a request whose messages continue a sampled turn gets that turn's tokens as they were sampled, and
the rendered delta of what is new. A request with another history (an edited message, a compaction, a sub-agent, one
more sample of the same messages) begins a branch. Nothing sampled is tokenized again in a branch that goes on, and
every sampled token is trained on in exactly one branch: to those that fork off later it is given.
"""

from __future__ import annotations

import json
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from posttrain.core.errors import DataError
from posttrain.core.types import Message, Sample, ToolSchema
from posttrain.data.chat import ChatDeltas, decode, render_prompt
from posttrain.data.messages import AnyMessage, normalize_messages
from posttrain.data.record import Record
from posttrain.envs.turns import structured
from posttrain.tools.formats import ToolParser

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_JSON = json.JSONEncoder(sort_keys=True).encode
_TOOL_LISTS = 256
"""Most lists of tools whose deltas are kept."""
_PROMPTS = 1024
"""Most prompts whose ids are kept. The episodes of a group begin with the same one."""


class TokenRenderer:
    """Messages to tokens and back, for all sessions of a run.

    Args:
        template_kwargs: arguments of the chat template, such as ``enable_thinking``.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        parser: ToolParser,
        stop_token_ids: frozenset[int],
        template_kwargs: Mapping[str, Any] | None = None,
    ) -> None:
        self.tokenizer, self.parser, self.stop_token_ids = tokenizer, parser, stop_token_ids
        self._kwargs = dict(template_kwargs or {})
        self._deltas: OrderedDict[str, ChatDeltas] = OrderedDict()
        self._plain = ChatDeltas(tokenizer, None, **self._kwargs)
        self._prompts: OrderedDict[bytes, list[int]] = OrderedDict()

    def prompt(
        self, messages: Sequence[Message], tools: Sequence[ToolSchema], digest: bytes | None = None
    ) -> list[int]:
        """Return ids of a whole conversation, up to where the assistant writes.

        Args:
            digest: of the tools and messages, where it stands for all of them: the ids are kept by it.

        Raises:
            DataError: the chat template cannot show the messages.
        """
        if digest is None or digest not in self._prompts:
            ids = render_prompt(self._harmless(messages), self.tokenizer, list(tools) or None, **self._kwargs)
            if digest is None:
                return ids
            self._prompts[digest] = ids
            if len(self._prompts) > _PROMPTS:
                self._prompts.popitem(last=False)
        return self._prompts[digest]

    def delta(self, messages: Sequence[Message], tools: Sequence[ToolSchema], tools_key: str) -> list[int]:
        """Return ids of what follows a turn whose end-of-turn token was sampled. Raises ``DataError``."""
        replies = self._harmless(messages)
        for reply in replies:
            reply.pop("tool_call_id", None)  # its place says which call it answers
        if tools_key not in self._deltas:
            self._deltas[tools_key] = ChatDeltas(self.tokenizer, list(tools) or None, **self._kwargs)
            if len(self._deltas) > _TOOL_LISTS:
                self._deltas.popitem(last=False)
        return self._deltas[tools_key].ids(replies)

    def text(self, ids: Sequence[int]) -> str:
        """Return the text of a turn, without its end-of-turn token."""
        return decode(self.tokenizer, ids[:-1] if self.ended(ids) else ids)

    def word(self, token: int) -> str:
        """Return the text of one token."""
        return decode(self.tokenizer, [token])

    @property
    def end_id(self) -> int:
        """The token with which the template ends a turn."""
        return self._plain.end_id

    def ended(self, ids: Sequence[int]) -> bool:
        """Return true if the turn ends with an end-of-turn token."""
        return bool(ids) and ids[-1] in self.stop_token_ids

    def _harmless(self, messages: Sequence[Message]) -> list[Message]:
        """Return the messages with control tokens made harmless, but for the assistant's."""
        shown = [message.copy() for message in messages]
        for message in shown:
            if message["role"] != "assistant":
                message["content"] = self._plain.without_control_tokens(message["content"])
        return shown


@dataclass
class Branch:
    """One line of a session's tokens: a trajectory."""

    record: Record
    prompt_length: int
    """Tokens before the first that is trained on here."""
    given: int
    """Messages before that token."""
    messages: list[Message]
    turns: int = 0
    tool_calls: int = 0


@dataclass(frozen=True)
class _Turn:
    """A sampled turn: where its branch stood after it."""

    branch: Branch
    end: int
    """Tokens of the branch, the turn's included."""
    ended: bool
    """Its end-of-turn token was sampled."""
    calls: tuple[str, ...]
    """Ids of its calls."""
    thoughts: str | None
    """Its thoughts, which a client may leave out when it sends the turn back."""


@dataclass(frozen=True)
class Asked:
    """A request, ready to be sampled from."""

    ids: npt.NDArray[np.int32]
    """[T] what the engine continues."""
    messages: list[Message]
    tools: Sequence[ToolSchema]
    digest: bytes
    """What stands for the tools and messages."""
    parent: _Turn | None
    """The sampled turn that it continues."""
    delta: list[int] = field(default_factory=list)
    """The last of ``ids``, those after the parent's."""


class TokenSession:
    """The sampled turns of one episode of an agent, as a tree."""

    def __init__(self, renderer: TokenRenderer) -> None:
        self.renderer = renderer
        self.branches: list[Branch] = []
        self.unmatched = 0
        """Requests with turns of the assistant that no sampled turn begins: their histories were rendered anew."""
        self.turns = 0
        self.last: Branch | None = None
        """The branch that was sampled from last."""
        self._turns: dict[bytes, list[_Turn]] = {}
        """By digest of the tools and all messages, the turn's own included."""

    def asked(self, messages: Sequence[AnyMessage], tools: Sequence[ToolSchema] = ()) -> Asked:
        """Return what a request is to be sampled from.

        Raises:
            DataError: the messages are none that the chat template can show, hold images, or end with the assistant's.
        """
        conversation = _checked(messages)
        shown = _renamed(conversation)
        tools_key = _JSON(list(tools))
        digests = _digests(tools_key, shown)
        last = max((i for i, m in enumerate(conversation) if m["role"] == "assistant"), default=-1)
        parent = self._find(conversation[last], digests[last + 1]) if last >= 0 else None
        if parent is not None:
            try:
                delta = self.renderer.delta(shown[last + 1 :], tools, tools_key)
            except DataError:  # the template has no delta for such messages; a whole conversation may be possible
                parent = None
        if parent is not None:
            if not parent.ended:
                delta = [self.renderer.end_id, *delta]
            before = parent.branch.record.ids[: parent.end]
            ids = np.concatenate([before, np.asarray(delta, np.int32)])
            return Asked(ids, conversation, tools, digests[-1], parent, delta)
        # The digest of a turn of the assistant leaves out white space and thoughts.
        ids = np.asarray(self.renderer.prompt(shown, tools, digests[-1] if last < 0 else None), np.int32)
        self.unmatched += bool(self._turns) and last >= 0
        return Asked(ids, conversation, tools, digests[-1], None)

    def sampled(self, asked: Asked, samples: Sequence[Sample], text: str | None = None) -> Message:
        """Add a turn, and return it as a message.

        Args:
            samples: of ``asked.ids`` and of each other; several where weight updates cut the turn off.
            text: what the client is shown of the turn; None: all of it.

        Raises:
            CodeError: a plugin's format of calls raises.
        """
        ids = [i for sample in samples for i in sample.ids]
        text = self.renderer.text(ids) if text is None else text
        message = structured(text, self.renderer.parser, asked.tools, f"call_{self.turns}")
        branch = self._branch_of(asked)
        for sample in samples:
            branch.record.sampled(sample)
        branch.messages = [*asked.messages, message]
        branch.turns += 1
        calls = tuple(call["id"] for call in message.get("tool_calls", ()))
        branch.tool_calls += len(calls)
        self.turns += 1
        self.last = branch
        turn = _Turn(branch, len(branch.record), self.renderer.ended(ids), calls, message.get("reasoning_content"))
        self._turns.setdefault(_next(asked.digest, message), []).append(turn)
        return message

    def _branch_of(self, asked: Asked) -> Branch:
        """Return the branch that a request continues, or a new one where another turn has gone on from there."""
        parent = asked.parent
        if parent is not None and len(parent.branch.record) == parent.end:
            parent.branch.record.given(asked.delta)
            return parent.branch
        branch = Branch(Record(asked.ids.tolist()), len(asked.ids), len(asked.messages), asked.messages)
        self.branches.append(branch)
        return branch

    def _find(self, message: Message, digest: bytes) -> _Turn | None:
        """Return the sampled turn that a message shows: of several that read alike those with its calls' ids, of these
        those with its thoughts, and of these the last."""
        turns = self._turns.get(digest, ())
        ids = tuple(call.get("id", "") for call in message.get("tool_calls", ()))
        alike = [turn for turn in turns if turn.calls == ids] or turns
        # Agents may send a turn back without its thoughts.
        thoughts = message.get("reasoning_content")
        same = [turn for turn in alike if thoughts and turn.thoughts == thoughts]
        return next(reversed(same or alike), None)


def _checked(messages: Sequence[AnyMessage]) -> list[Message]:
    conversation: list[Any] = normalize_messages(messages)
    for i, message in enumerate(conversation):
        if not isinstance(message["content"], str):
            raise DataError(f"message {i} holds an image or a video", hint="send text: the model reads nothing else")
    if not conversation or conversation[-1]["role"] == "assistant":
        raise DataError("the messages end with no turn to answer", hint="end with a user's message or a tool's")
    return conversation


def _renamed(conversation: Sequence[Message]) -> list[Message]:
    """Return the conversation with ids of calls that depend on their places alone, in the length that some templates
    demand, and with the names of the tools that answer."""
    renamed: list[Message] = []
    known: dict[str, tuple[str, str]] = {}
    for message in conversation:
        message = message.copy()
        if calls := message.get("tool_calls"):
            message["tool_calls"] = []
            for call in calls:
                name = call["function"]["name"]
                place = f"call{len(known):05d}"
                known[call.get("id", place)] = (place, name)
                message["tool_calls"].append({**call, "id": place})
        elif message.get("tool_call_id") in known:
            message["tool_call_id"], message["name"] = known[message["tool_call_id"]]
        renamed.append(message)
    return renamed


def _digests(tools_key: str, messages: Sequence[Message]) -> list[bytes]:
    """Return the digest of the tools and the first k messages for each k from 0 on."""
    digests = [_digest(b"", tools_key)]
    for message in messages:
        digests.append(_next(digests[-1], message))
    return digests


def _next(digest: bytes, message: Message) -> bytes:
    return _digest(digest, _identity(message))


def _digest(before: bytes, text: str) -> bytes:
    return blake2b(before + text.encode("utf-8", "surrogatepass"), digest_size=16).digest()


def _identity(message: Message) -> str:
    """Return what tells a message from others. Clients send an assistant's turn back without its thoughts, some with
    other white space around its words."""
    role, content, calls = message["role"], message["content"], message.get("tool_calls", ())
    if role == "assistant":
        content = content.strip()
        return _JSON([content, [call["function"] for call in calls]]) if calls else f"assistant\0{content}"
    return _JSON(message) if len(message) > 2 else f"{role}\0{content}"

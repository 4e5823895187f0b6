"""The data types that all packages share: messages, prompts, samples, scores, trajectories.

Everything here is plain Python and numpy, cheap to send between processes. Tensors start at ``posttrain.data.pack``.

Shape legend: T tokens of one episode (prompt and all turns).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, TypedDict

import numpy as np
import numpy.typing as npt

Role = Literal["system", "user", "assistant", "tool"]


class FunctionCall(TypedDict):
    name: str
    arguments: dict[str, Any]


class ToolCall(TypedDict, total=False):
    """A call in the OpenAI shape: ``{"type": "function", "function": {"name", "arguments"}}``."""

    id: str
    type: str
    function: FunctionCall


class Message(TypedDict, total=False):
    """One chat message. ``train`` (assistant only, default true) says whether its tokens carry loss in SFT."""

    role: Role
    content: str
    reasoning_content: str
    tool_calls: list[ToolCall]
    tool_call_id: str
    name: str
    train: bool


ToolSchema = dict[str, Any]
"""An OpenAI function schema: ``{"type": "function", "function": {"name", "description", "parameters"}}``."""


class ImageFile(TypedDict, total=False):
    """An image as rows have it: the bytes of its file, or where the file lies."""

    bytes: bytes
    path: str


@dataclass(frozen=True)
class Prompt:
    """One row of RLHF parquet, typed."""

    index: int
    """Row number in its file: the identity the loader and the logs use."""
    messages: list[Message]
    data_source: str
    ground_truth: Any
    extra_info: dict[str, Any] = field(default_factory=dict)
    images: list[dict[str, Any]] = field(default_factory=list)
    """``{"bytes": ...}`` or ``{"path": ...}`` for each ``<image>`` in the messages."""

    @property
    def tools_kwargs(self) -> dict[str, Any]:
        """Return the row's arguments for tools, by tool name: ``{"create_kwargs": {...}, ...}``."""
        return self.extra_info.get("tools_kwargs") or {}

    def copied(self) -> Prompt:
        """Return a copy for a user's code, which may change whatever is in its dicts and lists: all episodes of the
        prompt share these."""
        own = {name: _copied(getattr(self, name)) for name in ("messages", "ground_truth", "extra_info", "images")}
        return replace(self, **own)


def _copied(value: Any) -> Any:
    """Return a copy of a dict or list and of those in it, down to what is neither."""
    if isinstance(value, dict):
        return {key: _copied(item) for key, item in value.items()}
    return [_copied(item) for item in value] if isinstance(value, list) else value


Ids = Sequence[int] | npt.NDArray[np.int32]
"""[T] token ids."""


@dataclass(frozen=True)
class SamplingParams:
    """How one continuation is sampled. The log-probabilities an engine returns are of the distribution that it samples
    from: after temperature, as the trainer recomputes them, and after top-p and top-k, which training refuses."""

    max_new_tokens: int
    temperature: float = 1.0
    """0: greedy."""
    top_p: float = 1.0
    top_k: int = 0
    """0: no limit."""
    seed: int | None = None
    """Seed in [0, 2^31) of this request alone, for engines that support it (docs/evaluate.md); None: the engine's own
    stream of random numbers."""

    @property
    def truncated(self) -> bool:
        """Return true if some tokens are never sampled."""
        return self.top_p < 1.0 or self.top_k > 0


@dataclass(frozen=True)
class Sampling:
    """How the tokens of episodes are sampled, as in ``SamplingParams``."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0

    def params(self, max_new_tokens: int, seed: int | None = None) -> SamplingParams:
        """Return the parameters of one continuation."""
        return SamplingParams(max_new_tokens, self.temperature, self.top_p, self.top_k, seed)


ON_POLICY = Sampling()
"""From the model's own distribution."""
GREEDY = Sampling(temperature=0.0)


FinishReason = Literal["stop", "length", "abort"]


@dataclass(frozen=True)
class Sample:
    """What an engine returns for one request: token ids in, token ids out."""

    ids: list[int]
    """Sampled ids, the end-of-turn token included when it was sampled."""
    logprobs: list[float]
    finish_reason: FinishReason
    version: int
    """Version of the weights that sampled these tokens, up to the first of ``updates``."""
    routing: npt.NDArray[np.uint8] | None = None
    """[up to T, bytes of a token] the experts that the first tokens of prompt and sample went to; None: not asked
    for."""
    updates: tuple[tuple[int, int], ...] = ()
    """(tokens sampled before it, its version) of each weight update amid these tokens (`rollout.keep_kv`), in order."""

    @property
    def versions(self) -> list[int]:
        """Return the version of the weights that sampled each token."""
        found = [self.version] * len(self.ids)
        for start, version in self.updates:
            found[start:] = [version] * len(found[start:])
        return found


@dataclass(frozen=True)
class Score:
    """A grader's verdict on one response. ``error`` set means that the grader failed: ``score`` is then meaningless
    and ``reward.on_error`` decides what happens; it is never silently a 0."""

    score: float
    correct: bool
    extracted: str | None = None
    parts: dict[str, float] = field(default_factory=dict)
    error: str | None = None
    unfinished: bool = False
    """With ``error``: this response took the grader more time or memory than it may have, or ended it. Evaluations
    count it as wrong, so that no answer is better off for that."""


ENV_PART = "env"
"""The part of the reward that an environment or an agent gives. Where an episode has it, it is the verdict in place of
a grader's, unless `reward.function` is set."""


StopReason = Literal["stop", "length", "max_turns", "max_user_turns", "prompt_too_long", "deadline", "error"]
"""Why an episode ended: the assistant (or the simulated user) was done, a limit of `rollout`, or a failure."""


Failure = Literal["episode", "grader", "tool", "engine", "validation"]
"""What may fail while episodes are played, without an end to the run."""


def stored(*, required: bool = True) -> dict[str, bool]:
    """Return the metadata that makes a field of ``Trajectory`` a column of rollout files.

    This is the column's only declaration: ``posttrain.rollout.files`` writes and reads it, and reports show it. Its
    Arrow type follows from the type of the field (``posttrain.rollout.files.Column``).

    Args:
        required: False: files may lack the column, as those do that are older than the field; trajectories that are
            read from them have the field's default.
    """
    return {"stored": True, "required": required}


@dataclass(kw_only=True)
class Trajectory:
    """One episode as the engine saw it. A failed episode is data (``error`` set), not a crash.

    The order of the stored fields is the order of the columns of rollout files.
    """

    prompt: Prompt
    tokens: npt.NDArray[np.int32] = field(metadata=stored())
    """[T] the prompt and every turn, exactly as fed to and sampled by the engine."""
    loss_mask: npt.NDArray[np.bool_] = field(metadata=stored())
    """[T] true where the policy sampled the token."""
    logprobs: npt.NDArray[np.float32] = field(metadata=stored())
    """[T] the engine's log-probability of each sampled token; 0 elsewhere."""
    weight_version: npt.NDArray[np.int32] = field(metadata=stored())
    """[T] version of the weights that sampled each token: the RL steps they had seen; -1 elsewhere."""
    prompt_length: int = field(metadata=stored())
    """Tokens of the first rendered prompt."""
    messages: list[Message] = field(metadata=stored())
    """The whole conversation by turn as decoded text, the prompt's messages included."""
    turns: int = field(metadata=stored())
    """Assistant turns."""
    user_turns: int = field(default=0, metadata=stored())
    """Turns of the simulated user."""
    tool_calls: int = field(metadata=stored())
    """Calls of tools, those that failed included."""
    stop_reason: StopReason = field(metadata=stored())
    """Why the episode ended."""
    seconds: float = field(metadata=stored())
    """Wall time of the episode."""
    tool_seconds: float = field(default=0.0, metadata=stored())
    """The part of `seconds` in which the episode waited for tools and the simulated user."""
    reward: float = field(default=0.0, metadata=stored())
    """The weighted sum that it was trained with."""
    correct: bool = field(default=False, metadata=stored())
    """The grader's verdict."""
    extracted: str | None = field(default=None, metadata=stored())
    """The answer that the grader found; null where it found none."""
    reward_parts: dict[str, float] = field(default_factory=dict, metadata=stored())
    """The parts of the reward by name, with a weight or without."""
    error: str | None = field(default=None, metadata=stored())
    """Why the episode cannot be trained on; null where it can."""
    branch: int = field(default=0, metadata=stored(required=False))
    """Number of the branch in the episode of an agent; 0: the one that was sampled from last. The rows of an episode
    lie together, this one first."""
    turn_rewards: npt.NDArray[np.float32] = field(
        default_factory=lambda: np.empty(0, np.float32), metadata=stored(required=False)
    )
    """What the environment gave for each assistant turn that it answered; empty without an environment."""
    tool_images: list[ImageFile] = field(default_factory=list, metadata=stored(required=False))
    """Images after the prompt that the model read, as tools gave them, in the order of `<image>` in the messages. A
    last result that did not fit has none here."""
    routing: npt.NDArray[np.uint8] = field(
        default_factory=lambda: np.empty(0, np.uint8), metadata=stored(required=False)
    )
    """With `rollout.router_replay`: the experts that each token went to in the engine, token by token, in each by
    layer; 1 + the expert in one byte, or in two where a layer has more than 255. 0: not known, as of the last token,
    which an engine never reads. Empty without it."""
    unfinished: bool = False
    """Its grader did not finish (``Score.unfinished``): validation counts it as wrong, whatever ``error`` says."""
    tool_errors: list[str] = field(default_factory=list, metadata=stored(required=False))
    """What was answered to each tool call that failed; the messages have it too."""
    branches: list[Trajectory] = field(default_factory=list)
    """Further trajectories of the same episode of an agent, which are trained on beside it."""
    unmatched: int = 0
    """Requests of an agent whose history was not that of a sampled turn."""
    advantages: npt.NDArray[np.float32] | None = None
    """[T] what each sampled token was trained with, 0 elsewhere; None: it was not trained on (yet). They are stored in
    a file of their own (``posttrain.rollout.advantage_files``)."""

    @property
    def trainable(self) -> bool:
        """Return true if the episode did not fail and has a token that the policy sampled."""
        return self.error is None and bool(self.loss_mask.any())

    @property
    def response_length(self) -> int:
        """Return the number of tokens after the prompt, tool results included."""
        return len(self.tokens) - self.prompt_length

    @property
    def response_text(self) -> str:
        """Return what graders see: the assistant's own words of every turn, never a tool's."""
        own = self.messages[len(self.prompt.messages) :]
        return "\n".join(m.get("content", "") for m in own if m["role"] == "assistant")

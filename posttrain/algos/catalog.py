"""The registries of advantage estimators, policy losses and bundles, and the decorators that fill them.

An algorithm's file, or a user's plugin, declares a function once, with what a run must provide for it::

    @policy_loss("mine", formula="-r A", prepare=my_column)
    def mine(logprobs, tokens, *, clip_low: float, sharpness: float = 2.0): ...

A keyword-only parameter with the name of a key of `[algo]` (`clip_low`) gets the value of that key. Any other is an
option of the function, which `[algo.loss_kwargs]`, or `[algo.advantage_kwargs]`, sets by its name. Imports no torch.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

from posttrain.core.errors import CodeError
from posttrain.core.plugins import definition_of, described, place_of, with_place
from posttrain.core.registry import Registry

if TYPE_CHECKING:
    from torch import Tensor

    from posttrain.algos.episodes import Advantages, Episodes
    from posttrain.algos.tokens import Columns, TokenInputs, UpdateTokens

F = TypeVar("F", bound=Callable[..., Any])


@dataclass(frozen=True)
class AdvantageEstimator:
    """An advantage estimator: ``function(episodes, **options) -> Advantages``, of an ``Episodes``."""

    name: str
    function: Callable[..., Advantages]
    formula: str = ""
    source: str = ""
    """Where it was published."""
    group: bool = False
    """It compares the episodes of a prompt, and needs two or more."""
    critic: bool = False
    """It reads the values of tokens that a critic gives."""
    greedy: bool = False
    """It reads the reward of one greedy episode per prompt."""
    parts: bool = False
    """It reads the rewards by part. A KL penalty in the reward belongs to no part, and is refused."""
    teacher: bool = False
    """It reads the log-probabilities of a teacher, and no rewards."""
    by_token: bool = False
    """Tokens of one episode have different advantages."""
    to_come: bool = False
    """It adds up the rewards of tokens that are still to come: a discount, or a KL in the reward, makes the advantages
    of one episode different."""

    def __call__(self, episodes: Episodes, values: Mapping[str, Any]) -> Advantages:
        """Return the advantages of the episodes' tokens.

        Args:
            values: by name, of options of the function and of anything else.

        Raises:
            CodeError: a user's function raised, or returned something else.
        """
        what = f"advantage estimator {self.name!r}"
        result = _call(what, self.function, episodes, values=values)
        if not hasattr(result, "advantages"):
            message = with_place(f"{what} returned {type(result).__name__}", definition_of(self.function))
            raise CodeError(message, hint="return episodes.advantages(...) or episodes.token_advantages(...)")
        _same_length(what, self.function, {"advantages": result.advantages}, episodes.mask)
        return result  # type: ignore[no-any-return]

    @property
    def options(self) -> Mapping[str, inspect.Parameter]:
        """Return the options of the function: its keyword-only parameters."""
        return _options(self.function)

    @property
    def needs(self) -> str:
        """Return what a run must provide, in words."""
        words = {
            "n >= 2": self.group,
            "a critic": self.critic,
            "a greedy episode a prompt": self.greedy,
            "parts of the reward": self.parts,
            "a teacher": self.teacher,
        }
        return ", ".join(text for text, needed in words.items() if needed)


@dataclass(frozen=True)
class PolicyLoss:
    """A policy loss: ``function(logprobs, tokens, **options) -> (losses, metrics)``, of a ``TokenInputs``; see
    ``algos.tokens``."""

    name: str
    function: Callable[..., tuple[Tensor, Columns]]
    formula: str = ""
    source: str = ""
    """Where it was published."""
    aggregation: str = "token-mean"
    """The aggregation that the paper uses; the loss is defined with any."""
    prepare: Callable[..., Tensor] | None = None
    """``prepare(update, **options)`` of an ``UpdateTokens`` returns the column [T] that the loss reads as
    ``tokens.prepared``: what depends on whole sequences or on the whole batch of an update."""
    prepared_on_policy: float | None = None
    """What ``prepare`` returns for every token where all ratios are 1. It is then not called, which saves a forward
    pass. None: ``prepare`` is always called."""
    by_sequence: bool = False
    """It has one ratio per sequence, and wants one advantage per sequence."""
    nothing_without_advantage: bool = False
    """An episode whose advantages are all 0 gets no gradient from it, and has no part in those of others, by
    ``prepare`` neither: an update may leave it out (`train.skip_zero_advantages`)."""

    def __call__(self, logprobs: Tensor, tokens: TokenInputs, values: Mapping[str, Any]) -> tuple[Tensor, Columns]:
        """Return the loss [N] of each token, and metrics [N] without gradient.

        Args:
            logprobs: [N] under the policy, with gradient.
            values: by name, of options of the function and of anything else.

        Raises:
            CodeError: a user's function raised, or returned something else than such columns.
        """
        what = f"policy loss {self.name!r}"
        losses, metrics = _call(what, self.function, logprobs, tokens, values=values)
        _same_length(what, self.function, {"the loss": losses, **metrics}, logprobs)
        return losses, metrics

    def column(self, update: UpdateTokens, values: Mapping[str, Any]) -> Tensor:
        """Return the column [T] that ``prepare`` computes. Raises ``CodeError`` as a call does."""
        assert self.prepare is not None
        what = f"policy loss {self.name!r}, prepare"
        column = _call(what, self.prepare, update, values=values)
        _same_length(what, self.prepare, {"the column": column}, update.mask)
        return column  # type: ignore[no-any-return]

    @property
    def reads_current(self) -> bool:
        """Return True if it reads log-probabilities under the policy before each update, whatever the ratios are."""
        return self.prepare is not None and self.prepared_on_policy is None

    @property
    def options(self) -> Mapping[str, inspect.Parameter]:
        """Return the options of both functions: their keyword-only parameters."""
        return {**(_options(self.prepare) if self.prepare else {}), **_options(self.function)}


ADVANTAGES: Registry[AdvantageEstimator] = Registry("advantage estimator")
POLICY_LOSSES: Registry[PolicyLoss] = Registry("policy loss")
BUNDLES: Registry[Mapping[str, Any]] = Registry("algo")
"""Name -> the values by dotted key that `--algo NAME` sets."""


def advantage_estimator(name: str, **declared: Any) -> Callable[[F], F]:
    """Register the decorated function as ``algo.advantage = NAME``.

    Args:
        declared: the other fields of ``AdvantageEstimator``.

    Raises:
        ConfigError: the name is taken.
    """

    def add(function: F) -> F:
        ADVANTAGES.register(name)(AdvantageEstimator(name, function, **declared))
        return function

    return add


def policy_loss(name: str, **declared: Any) -> Callable[[F], F]:
    """Register the decorated function as ``algo.policy_loss = NAME``.

    Args:
        declared: the other fields of ``PolicyLoss``.

    Raises:
        ConfigError: the name is taken.
    """

    def add(function: F) -> F:
        POLICY_LOSSES.register(name)(PolicyLoss(name, function, **declared))
        return function

    return add


def bundle(name: str, **values: Any) -> None:
    """Register what `--algo NAME` sets.

    KL, entropy and corrections are the preset's choice, and belong to no bundle.

    Args:
        values: by key of `[algo]`, or by the dotted key of another section.

    Raises:
        ConfigError: the name is taken.
    """
    BUNDLES.register(name)({key if "." in key else f"algo.{key}": value for key, value in values.items()})


def _call(what: str, function: Callable[..., Any], *inputs: Any, values: Mapping[str, Any]) -> Any:
    """Call a function with its inputs and with those of the values that are options of it.

    Raises:
        CodeError: a line of a user's file raised.
    """
    options = {name: values[name] for name in _options(function) if name in values}
    try:
        return function(*inputs, **options)
    except Exception as error:
        if place_of(error) is None:
            raise
        raise CodeError(f"{what} failed: {described(error)}", hint="correct that code") from error


def _same_length(what: str, function: Callable[..., Any], columns: Mapping[str, Any], like: Tensor) -> None:
    """Raise ``CodeError`` unless every column is a tensor [N] beside ``like`` [N]: another shape would broadcast, and
    train on another loss than the one that was written."""
    for name, column in columns.items():
        shape = getattr(column, "shape", None)
        if shape != like.shape:
            found = type(column).__name__ if shape is None else f"a tensor of shape {list(shape)}"
            message = f"{what}: {name} is {found}, and not one number per token, {list(like.shape)}"
            raise CodeError(with_place(message, definition_of(function)), hint="weights and sums are taken later")


@functools.cache
def _options(function: Callable[..., Any]) -> dict[str, inspect.Parameter]:
    """Return the keyword-only parameters by name."""
    parameters = inspect.signature(function).parameters
    return {name: p for name, p in parameters.items() if p.kind is inspect.Parameter.KEYWORD_ONLY}

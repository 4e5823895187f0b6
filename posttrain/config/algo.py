"""Sections of the RL algorithm and the critic, and the bundles that `--algo` names."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from inspect import Parameter
from typing import Annotated, Any, Literal

from pydantic import Field, ValidationInfo, field_validator, model_validator
from pydantic_core import PydanticKnownError

from posttrain.algos import ADVANTAGES, BUNDLES, POLICY_LOSSES
from posttrain.config.base import (
    Factor,
    Fraction,
    NaturalInt,
    PositiveFactor,
    PositiveInt,
    Section,
    SignedFactor,
)
from posttrain.config.train import OptimConfig
from posttrain.core.registry import Registry, unknown

Aggregation = Literal["token-mean", "seq-mean-token-mean", "seq-mean-token-sum", "seq-mean-token-sum-norm"]


class CorrectionConfig(Section):
    """Importance corrections for the gap between trainer and engine (algorithms.md). One of sequences, or of several
    updates a step, takes one more forward pass per step, for the trainer's own log-probabilities before the update."""

    weight: Literal["auto", "none", "token", "sequence"] = "auto"
    """Factor of a token's loss: its ratio trainer / engine (token, truncated importance sampling), or the product of
    the ratios of its sequence (sequence); none: 1. auto: token with `rollout.staleness`,
    `rollout.quantization` or `rollout.kv_cache_dtype`, else none."""
    upper: PositiveFactor = 2.0
    """Upper bound of the factor. A larger one is cut to the bound, or is 0 if `lower` is given."""
    lower: PositiveFactor | None = None
    """Lower bound of the factor. A smaller one, or one above `upper`, is 0 (IcePop); none: no lower bound."""
    reject: Literal["none", "geometric_mean", "max_token"] = "none"
    """Sequences to leave out: those whose geometric mean of ratios (geometric_mean), or the ratio of any token
    (max_token), lies outside [1 / reject_above, reject_above]."""
    reject_above: Annotated[PositiveFactor, Field(ge=1.0)] = 1.01
    """Bound of the ratios for `reject`."""

    @property
    def active(self) -> bool:
        """Return whether anything is corrected."""
        return self.weight not in ("auto", "none") or self.reject != "none"

    @property
    def of_tokens(self) -> bool:
        """Return whether each token's factor depends on that token alone, so that an update can compute it as it
        goes."""
        return self.weight == "token" and self.reject == "none"

    @model_validator(mode="after")
    def _no_setting_without_effect(self) -> CorrectionConfig:
        given = self.changed
        if self.reject == "none" and "reject_above" in given:
            raise ValueError("algo.correction.reject_above has no effect without algo.correction.reject")
        if self.lower is not None and self.lower > self.upper:
            raise ValueError("algo.correction.lower is above algo.correction.upper")
        return self


class CriticConfig(Section):
    """The critic of `algo.advantage = "gae"`: a causal LM with one value per token. All of its weights are trained."""

    path: str = ""
    """Model of the critic, in the form of `model.path`; empty: the same model."""
    value_clip: PositiveFactor = 0.5
    """Clip range of a value around its value before the first update of the step."""
    warmup_steps: NaturalInt = 0
    """Initial RL steps in which only the critic is trained."""
    optim: OptimConfig = OptimConfig()

    @model_validator(mode="after")
    def _coherent(self) -> CriticConfig:
        self.optim.check("critic.optim")
        return self


class AlgoConfig(Section):
    """The RL algorithm. `--algo NAME` sets a coherent bundle; `--set` changes single fields of it."""

    name: str = "grpo"
    """Bundle that gives the other fields their values."""
    advantage: str = "grpo"
    """Advantage estimator, from rewards of episodes to advantages of tokens: one of algorithms.md, or of a plugin."""
    policy_loss: str = "clipped"
    """Policy loss, from advantages and log-probabilities to losses of tokens: one of algorithms.md, or of a plugin."""
    advantage_kwargs: dict[str, Any] = {}
    """Options of a plugin's advantage estimator, by name; see algorithms.md."""
    loss_kwargs: dict[str, Any] = {}
    """Options of a plugin's policy loss, by name; see algorithms.md."""
    normalize_by_std: bool = True
    """Divide group-relative rewards by their standard deviation (GRPO); false: do not (Dr. GRPO)."""
    gamma: Annotated[float, Field(gt=0.0, le=1.0)] = 1.0
    """Discount factor of rewards per policy token (`gae`, `reinforce_plus_plus`)."""
    lam: Fraction = 1.0
    """Lambda of `gae`: 0 uses the critic only, 1 the returns only."""
    clip_low: Annotated[float, Field(gt=0.0, le=1.0)] = 0.2
    """Lower clip range: the ratio to the old policy is clipped at 1 - clip_low; in `gmpo` the log-ratio at
    -clip_low."""
    clip_high: PositiveFactor = 0.2
    """Upper clip range: the ratio to the old policy is clipped at 1 + clip_high; in `gmpo` the log-ratio at
    clip_high."""
    dual_clip: Annotated[PositiveFactor, Field(gt=1.0)] | None = None
    """`clipped`: lower bound c of the objective for negative advantages (dual-clip PPO); none: off."""
    tau_positive: PositiveFactor = 1.0
    """`sapo`: temperature of the sigmoid for positive advantages; a larger one is steeper."""
    tau_negative: PositiveFactor = 1.05
    """`sapo`: temperature of the sigmoid for other advantages."""
    clip_cov_share: Annotated[float, Field(gt=0.0, lt=1.0)] = 0.0002
    """`clip_cov`: share of an update's tokens to leave out of the loss."""
    clip_cov_low: SignedFactor = 1.0
    """`clip_cov`: lower bound of the covariance of log-probability and advantage of these tokens."""
    clip_cov_high: SignedFactor = 5.0
    """`clip_cov`: upper bound of the covariance of these tokens."""
    kl_cov_share: Annotated[float, Field(gt=0.0, lt=1.0)] = 0.002
    """`kl_cov`: share of the tokens with a KL penalty, those of the largest covariance."""
    kl_cov_coef: Factor = 1.0
    """`kl_cov`: coefficient of the KL penalty."""
    loss_agg: Aggregation = "token-mean"
    """Aggregation of token losses into one number; see algorithms.md."""
    norm_length: PositiveInt | None = None
    """`seq-mean-token-sum-norm`: divisor of a sequence's sum; none: `rollout.max_response_tokens`."""
    entropy_coef: SignedFactor = 0.0
    """Coefficient of the policy's entropy, which is weighted like the loss and subtracted from it."""
    kl_coef: Factor = 0.0
    """Coefficient of the KL to the reference model; 0: no reference model. With LoRA the reference is the model without
    its adapter, and no further model is loaded."""
    kl_in: Literal["loss", "reward"] = "loss"
    """Use of the KL: add it to the loss, or subtract it from the rewards of tokens."""
    kl_estimator: Literal["k1", "k2", "k3", "low_var_kl", "abs", "k1+", "k2+", "k3+"] = "low_var_kl"
    """Estimator of the KL from the sampled tokens (Schulman 2020); low_var_kl is k3. Estimators with `+` use the
    gradient of k2, for a KL in the loss."""
    kl_target: PositiveFactor | None = None
    """KL in the reward: target of the mean KL per token, to which the coefficient adapts, starting from `kl_coef`;
    none: constant coefficient."""
    kl_horizon: PositiveInt = 10_000
    """Number of episodes in which a KL far above its target raises the coefficient by 20 %; it must be above a fifth of
    the episodes of a step."""
    updates_per_step: PositiveInt = 1
    """Optimizer steps per batch of trajectories; above 1 the clip range applies to stale log-probabilities."""
    teacher: str = ""
    """`distill`: teacher model, in the form of `model.path`; it must have the same vocabulary."""
    correction: CorrectionConfig = CorrectionConfig()

    @field_validator("advantage", "policy_loss")
    @classmethod
    def _registered(cls, name: str, info: ValidationInfo) -> str:
        registry = _REGISTRIES[str(info.field_name)]
        if name not in registry:
            known = ", ".join(repr(other) for other in registry.names())
            raise PydanticKnownError("literal_error", {"expected": f"{known}, or a name that a plugin registers"})
        return name

    @property
    def advantage_values(self) -> dict[str, Any]:
        """Return the values that the options of an advantage estimator have, by name."""
        return self._values | self.advantage_kwargs

    @property
    def loss_values(self) -> dict[str, Any]:
        """Return the values that the options of a policy loss have, by name."""
        return self._values | self.loss_kwargs

    @property
    def _values(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in type(self).model_fields}

    @model_validator(mode="after")
    def _kwargs_are_options(self) -> AlgoConfig:
        estimator, loss = ADVANTAGES.get(self.advantage), POLICY_LOSSES.get(self.policy_loss)
        keys = type(self).model_fields
        for what, options, table in (
            (f"algo.advantage = {self.advantage!r}", estimator.options, "advantage_kwargs"),
            (f"algo.policy_loss = {self.policy_loss!r}", loss.options, "loss_kwargs"),
        ):
            own = {name: option for name, option in options.items() if name not in keys}
            _check_kwargs(what, own, f"algo.{table}", getattr(self, table))
        return self

    @model_validator(mode="after")
    def _no_setting_without_effect(self) -> AlgoConfig:
        given, estimator, loss = self.changed, ADVANTAGES.get(self.advantage), POLICY_LOSSES.get(self.policy_loss)
        if "norm_length" in given and self.loss_agg != "seq-mean-token-sum-norm":
            raise self._no_effect("norm_length", "loss_agg", ["seq-mean-token-sum-norm"])
        if self.kl_in != "reward" and (of_reward := given & {"kl_target", "kl_horizon"}):
            raise self._no_effect(min(of_reward), "kl_in", ["reward"])
        if "kl_horizon" in given and self.kl_target is None:
            raise ValueError("algo.kl_horizon has no effect without algo.kl_target")
        if self.teacher and not estimator.teacher:
            raise self._no_effect("teacher", "advantage", [n for n in ADVANTAGES.names() if ADVANTAGES.get(n).teacher])
        for name in sorted(given - _FOR_ANY - estimator.options.keys() - loss.options.keys()):
            for key, registry in _REGISTRIES.items():
                if readers := [other for other in registry.names() if name in registry.get(other).options]:
                    raise self._no_effect(name, key, readers)
        if self.kl_in == "reward" and not self.kl_coef:
            raise ValueError("algo.kl_in = 'reward' has no effect with algo.kl_coef = 0")
        if "kl_estimator" in given and not self.kl_coef:
            raise ValueError(f"algo.kl_estimator = {self.kl_estimator!r} has no effect with algo.kl_coef = 0")
        if self.clip_cov_low >= self.clip_cov_high:
            raise ValueError("algo.clip_cov_low is not below algo.clip_cov_high")
        return self

    def _no_effect(self, name: str, key: str, values: Sequence[str]) -> ValueError:
        """Return the error for a key that is read only where another one has one of these values."""
        wanted = " or ".join(repr(value) for value in values)
        return ValueError(f"algo.{name} has no effect with algo.{key} = {getattr(self, key)!r}: it is of {wanted}")

    @model_validator(mode="after")
    def _coherent(self) -> AlgoConfig:
        advantage, loss = ADVANTAGES.get(self.advantage), POLICY_LOSSES.get(self.policy_loss)
        if advantage.teacher and not self.teacher:
            raise ValueError(f"algo.advantage = {self.advantage!r} needs algo.teacher")
        discounted = "gamma" in advantage.options and self.gamma < 1
        by_token = advantage.by_token or (advantage.to_come and (discounted or self.kl_in == "reward"))
        if loss.by_sequence and by_token:
            why = "" if advantage.by_token else " by algo.gamma below 1" if discounted else " by the KL in the reward"
            raise ValueError(
                f"algo.policy_loss = {self.policy_loss!r} has one ratio a sequence, and algo.advantage = "
                f"{self.advantage!r} has an advantage for each token{why}"
            )
        if self.kl_in == "reward":
            if advantage.parts or advantage.teacher:
                raise ValueError(
                    f"algo.kl_in = 'reward' and algo.advantage = {self.advantage!r}: the advantage has no place for it"
                )
            if self.kl_estimator.endswith("+"):
                raise ValueError(
                    f"algo.kl_estimator = {self.kl_estimator!r} differs from {self.kl_estimator[:-1]!r} in its "
                    "gradient only, and a KL in the reward has none"
                )
        return self


_REGISTRIES: Mapping[str, Registry[Any]] = {"advantage": ADVANTAGES, "policy_loss": POLICY_LOSSES}
_OF_NO_BUNDLE = frozenset(
    {"name", "kl_coef", "kl_in", "kl_estimator", "kl_target", "kl_horizon", "entropy_coef", "updates_per_step"}
    | {"teacher", "correction"}
)
"""Keys that `--algo NAME` leaves as they are."""
_FOR_ANY = _OF_NO_BUNDLE | {"advantage", "policy_loss", "loss_agg", "norm_length", "advantage_kwargs", "loss_kwargs"}
_FOR_ANY |= {"clip_low", "clip_high", "normalize_by_std"}
"""Keys that more than an estimator and a loss read; and the last three, which a preset may give whatever the algorithm
is, so that `--set algo.policy_loss=...` alone changes it."""

_KINDS: Mapping[str, tuple[type, ...]] = {"bool": (bool,), "int": (int,), "float": (int, float), "str": (str,)}


def _check_kwargs(what: str, options: Mapping[str, Parameter], table: str, given: Mapping[str, Any]) -> None:
    """Raise ``ValueError`` unless the values given are options of a plugin's function, of the annotated types, and no
    option without a default is left out."""
    for name, value in given.items():
        if name not in options:
            known = unknown(name, options) if options else "it has none of its own"
            raise ValueError(f"{table}.{name} is no option of {what}: {known}")
        kind = options[name].annotation
        kind = kind if isinstance(kind, str) else getattr(kind, "__name__", "")
        wanted = _KINDS.get(kind, (bool, int, float, str))
        fits = isinstance(value, wanted) and (not isinstance(value, bool) or bool in wanted)
        if not fits or (isinstance(value, float) and not math.isfinite(value)):
            words = kind if kind in _KINDS else "number, truth value or text"
            raise ValueError(f"{table}.{name} = {value!r}: {what} takes a finite {words}")
    for name, option in options.items():
        if name not in given and option.default is Parameter.empty:
            raise ValueError(f"{what} needs {table}.{name}")


def algo_bundle(name: str) -> dict[str, Any]:
    """Return the values by dotted key that `--algo NAME` sets: those of the bundle, and defaults for what else makes up
    an algorithm, so that nothing of another one in a preset stays. KL, entropy, corrections and updates are not of
    them.

    Raises:
        ConfigError: unknown name.
    """
    fields = AlgoConfig.model_fields.items()
    defaults = {f"algo.{key}": field.default for key, field in fields if key not in _OF_NO_BUNDLE}
    return {**defaults, **BUNDLES.get(name)}

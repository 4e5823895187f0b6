"""Preference training."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator

from posttrain.config.base import Factor, PositiveFactor, Section

_OF_METHOD = {
    "beta": "dpo", "loss": "dpo", "nll_coef": "dpo", "length_normalized": "dpo", "center_coef": "reward_model",
}  # fmt: skip
"""The method that reads a field, where only one does."""


class PreferConfig(Section):
    """`posttrain prefer`: what is learnt from pairs of answers; see preference.md."""

    method: Literal["dpo", "reward_model"] = "dpo"
    """dpo: a policy that prefers as the pairs do (arXiv:2305.18290). reward_model: a model that scores conversations
    (arXiv:2203.02155), for `reward.model.path`."""
    loss: Literal["sigmoid", "ipo"] = "sigmoid"
    """DPO: of the margin between the two answers. ipo pulls it to a fixed value (arXiv:2310.12036)."""
    beta: PositiveFactor = 0.1
    """DPO: how strongly the policy is held to the reference. A smaller one lets it go further."""
    label_smoothing: Annotated[float, Field(ge=0.0, lt=0.5)] = 0.0
    """Share of the pairs that may be labelled the wrong way round (conservative DPO)."""
    nll_coef: Factor = 0.0
    """DPO: factor of the chosen answer's mean negative log-likelihood, added to the loss (arXiv:2404.19733)."""
    length_normalized: bool = False
    """DPO: log-ratios are means over an answer's tokens, not sums. `beta` then wants to be larger."""
    center_coef: Factor = 0.0
    """Reward model: factor of the squared sum of a pair's scores, which keeps scores around 0 (arXiv:2312.09244)."""

    @model_validator(mode="after")
    def _no_setting_without_effect(self) -> PreferConfig:
        for name in sorted(self.changed & _OF_METHOD.keys()):
            if _OF_METHOD[name] != self.method:
                raise ValueError(f"prefer.{name} has no effect with prefer.method = {self.method!r}")
        if self.loss == "ipo" and self.label_smoothing:
            raise ValueError("prefer.label_smoothing has no effect with prefer.loss = 'ipo'")
        return self

"""Section of preference training."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator

from posttrain.config.base import Factor, PositiveFactor, Section

_OF_METHOD = {
    "beta": "dpo", "loss": "dpo", "nll_coef": "dpo", "length_normalized": "dpo", "center_coef": "reward_model",
}  # fmt: skip
"""The method that reads a field, for fields that only one method reads."""


class PreferConfig(Section):
    """Training on pairs of answers with `posttrain prefer`; see preference.md."""

    method: Literal["dpo", "reward_model"] = "dpo"
    """dpo: train a policy on the preferences directly (arXiv:2305.18290). reward_model: train a model that scores
    conversations (arXiv:2203.02155), for `reward.model.path`."""
    loss: Literal["sigmoid", "ipo"] = "sigmoid"
    """DPO: loss on the margin between the two answers. ipo regresses the margin to a fixed value (arXiv:2310.12036)."""
    beta: PositiveFactor = 0.1
    """DPO: strength of the constraint to the reference model. Smaller values let the policy move further away."""
    label_smoothing: Annotated[float, Field(ge=0.0, lt=0.5)] = 0.0
    """Assumed share of pairs with swapped labels (conservative DPO)."""
    nll_coef: Factor = 0.0
    """DPO: coefficient of the chosen answer's mean negative log-likelihood, which is added to the loss
    (arXiv:2404.19733)."""
    length_normalized: bool = False
    """DPO: average log-ratios over an answer's tokens instead of summing them. Use a larger `beta` with it."""
    center_coef: Factor = 0.0
    """Reward model: coefficient of the squared sum of a pair's scores, which keeps scores around 0
    (arXiv:2312.09244)."""

    @model_validator(mode="after")
    def _no_setting_without_effect(self) -> PreferConfig:
        for name in sorted(self.changed & _OF_METHOD.keys()):
            if _OF_METHOD[name] != self.method:
                raise ValueError(f"prefer.{name} has no effect with prefer.method = {self.method!r}")
        if self.loss == "ipo" and self.label_smoothing:
            raise ValueError("prefer.label_smoothing has no effect with prefer.loss = 'ipo'")
        return self

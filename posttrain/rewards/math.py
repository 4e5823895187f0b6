r"""MATH's grader (Hendrycks et al. 2021, arXiv:2103.03874): the last ``\boxed`` answer, compared as normalised text."""

from __future__ import annotations

from typing import Any

from posttrain.core.types import Score
from posttrain.rewards import cheap
from posttrain.rewards.boxed import last_boxed, truth_text
from posttrain.rewards.normal_form import same_answer


@cheap
def grade(response: str, ground_truth: Any, extra_info: dict[str, Any]) -> Score:
    r"""1.0 if the last ``\boxed`` of the response has the ground truth's normal form, else 0.0.

    ``ground_truth`` is the answer, or a solution whose last ``\boxed`` is the answer. Nothing is computed:
    ``\frac{2}{4}`` is not ``\frac{1}{2}``, and a factored polynomial is not its expansion. ``extra_info`` is not used.

    Raises:
        ValueError: the ground truth is empty, or not text.
    """
    truth = truth_text(ground_truth)
    boxed_truth = last_boxed(truth)
    gold = truth if boxed_truth is None else boxed_truth
    if not gold:
        raise ValueError(f"ground truth {ground_truth!r} has an empty box")
    found = last_boxed(response) or None
    correct = found is not None and same_answer(found, gold)
    return Score(score=float(correct), correct=correct, extracted=found)

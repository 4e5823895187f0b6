"""Knights and Knaves (Xie et al. 2024, arXiv:2410.23123): who is a knight and who is a knave, all of them right.

The form of the answer is Logic-RL's (arXiv:2502.14768): ``<answer>(1) Zoey is a knight (2) ...</answer>``.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from posttrain.core.types import Score
from posttrain.rewards import cheap
from posttrain.rewards.boxed import after

_ROLE = re.compile(
    r"(?<![\w'])([^\W\d_][\w'-]{0,40})\**+\s?(?:(is|:|=|-|\u2013)\s?(not\s)?|(isn't)\s)\**+\s?(?:an?\s)?\**+(knight|knave)(?![a-z])"
    r"(?:[*\s,(]{0,4}(?:/|or(?![a-z]))[*\s]{0,3}(?:[a-z]{1,8}\s)?(?:an?\s)?\**+(knight|knave)(?![a-z]))?",
    re.IGNORECASE,
)
"""Name, negation, role, and a second role ("is a knight or a knave")."""
_CONCLUSION = re.compile(r"conclusion\s?:?|in conclusion,?", re.IGNORECASE)
_OTHER = {"knight": "knave", "knave": "knight"}


@cheap
def grade(response: str, ground_truth: Any, extra_info: dict[str, Any]) -> Score:
    """1.0 if the conclusion gives every person the right role and no one two roles, else 0.0.

    The conclusion is the last ``<answer>`` block, else what follows the last "conclusion", else the last paragraph.
    "Ann is not a knight" makes her a knave, and "a knight or a knave" is two roles. ``parts["people"]`` is the share of
    people with the right role.

    ``ground_truth``: the parquet's ``reward_model["ground_truth"]`` (a dict with ``solution_text_format``), or that
    text, one "(1) Zoey is a knight" a person. ``extra_info`` is not used.

    Raises:
        ValueError: the ground truth names no one, or someone with two roles.
    """
    gold = truth_roles(ground_truth)
    text = _conclusion(response)
    found = _roles(text)
    right = sum(found.get(name) == {role} for name, role in gold.items())
    correct = right == len(gold)
    named = [f"{name}: {'/'.join(sorted(found[name]))}" for name in gold if name in found]
    return Score(
        score=float(correct),
        correct=correct,
        extracted=", ".join(named) or None,
        parts={"people": right / len(gold)},
    )


def truth_roles(ground_truth: Any) -> dict[str, str]:
    """Name in lower case -> "knight" or "knave". Raises ``ValueError`` if a ground truth does not say so."""
    text = ground_truth.get("solution_text_format") if isinstance(ground_truth, Mapping) else ground_truth
    roles = _roles(text) if isinstance(text, str) else {}
    if not roles or any(len(role) > 1 for role in roles.values()):
        raise ValueError(f"ground truth {ground_truth!r} does not say who is a knight and who is a knave")
    return {name: next(iter(role)) for name, role in roles.items()}


def _roles(text: str) -> dict[str, set[str]]:
    """All roles that a text gives each name."""
    roles: dict[str, set[str]] = {}
    for name, _, negated, contracted, *said in _ROLE.findall(text.replace("\u2019", "'").lower()):
        given = {_OTHER[role] if negated or contracted else role for role in said if role}
        roles.setdefault(name, set()).update(given)
    return roles


def _conclusion(response: str) -> str:
    answer = after(response, "<answer>")
    if answer is not None:
        return answer.partition("</answer>")[0]
    marks = list(_CONCLUSION.finditer(response))
    return response[marks[-1].end() :] if marks else response.strip().rpartition("\n\n")[2]

"""verl's names of our keys, by the rules of ``import-verl``."""

from __future__ import annotations

from posttrain.config.verl.keys_rl import RL
from posttrain.config.verl.keys_sft import SFT

_ONE_TO_ONE = [rule for rule in (*RL, *SFT) if len(rule.theirs) == len(rule.ours) == 1]


def ours_of(theirs: str) -> str | None:
    """Our key that a key of verl becomes; None: it becomes none or several, or is not known."""
    return next((rule.ours[0] for rule in _ONE_TO_ONE if theirs in rule.theirs), None)


def theirs_of(ours: str) -> list[str]:
    """verl's keys that become one of ours."""
    return list(dict.fromkeys(rule.theirs[0] for rule in _ONE_TO_ONE if ours in rule.ours))

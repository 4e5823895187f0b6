"""verl's names of our keys, by the rules of ``import-verl``."""

from __future__ import annotations

from posttrain.verl.keys_rl import RL
from posttrain.verl.keys_sft import SFT


def ours_of(theirs: str) -> str | None:
    """Our key that a key of verl sets first; None: it sets none, or is not known."""
    rules = (rule for rule in (*RL, *SFT) if rule.ours and theirs in rule.theirs)
    return next((rule.ours[0] for rule in rules), None)


def theirs_of(ours: str) -> list[str]:
    """verl's keys that set one of ours."""
    return list(dict.fromkeys(key for rule in (*RL, *SFT) if ours in rule.ours for key in rule.theirs))

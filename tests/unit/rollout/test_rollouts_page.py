"""What docs/rollouts.md shows is true: its preset resolves, and its simulated user works."""

import asyncio
import re
from pathlib import Path
from typing import get_args

from posttrain.config import Config, RolloutConfig
from posttrain.config.presets import resolve
from posttrain.core.registry import load_plugins
from posttrain.core.types import Prompt, StopReason
from posttrain.rollout.interaction import open_interaction

PAGE = (Path(__file__).resolve().parents[3] / "docs" / "rollouts.md").read_text(encoding="utf-8")


def block(language):
    (text,) = re.findall(rf"^```{language}\n(.*?)^```", PAGE, flags=re.S | re.M)
    return text


def test_the_preset(tmp_path):
    preset = tmp_path / "preset.toml"
    preset.write_text('command = "rl"\n' + block("toml"))
    cfg = resolve("rl", str(preset)).config
    user = open_interaction(cfg.rollout.interaction, cfg.rollout.interaction_options)
    state = asyncio.run(user.create(Prompt(0, [], "openai/gsm8k", "8")))
    said = [asyncio.run(user.respond(state, [{"role": "assistant", "content": f"#### {n}"}])) for n in (7, 8)]
    assert [(turn.text, turn.reward) for turn in said] == [("That is not right. Try again.", 0.0), (None, 1.0)]


def test_the_user_of_ones_own(tmp_path):
    plugin = tmp_path / "polite.py"
    plugin.write_text(block("python"))
    load_plugins([str(plugin)])
    user = open_interaction("polite", {"limit": 3})
    state = asyncio.run(user.create(Prompt(0, [], "s", "t")))
    said = [asyncio.run(user.respond(state, [{"role": "assistant", "content": c}])) for c in ("7", "7, please")]
    assert [(turn.text, turn.reward) for turn in said] == [("Say please.", 0.0), (None, 1.0)]


def test_every_stop_reason_and_key_is_there():
    assert {reason for reason in get_args(StopReason) if f"`{reason}`" not in PAGE} == set()
    known = {f"{name}.{key}" for name, section in Config.model_fields.items() for key in _keys(section.annotation)}
    for key in re.findall(r"`((?:rollout|cluster|data|reward)\.[a-z_]+)`", PAGE):
        assert key in known, key
    assert {f"rollout.{key}" for key in RolloutConfig.model_fields} >= set(re.findall(r"`(rollout\.[a-z_]+)`", PAGE))


def _keys(section):
    return getattr(section, "model_fields", {})

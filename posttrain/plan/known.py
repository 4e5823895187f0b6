"""The sizes of public models, for plans where the hub cannot be reached: what their config.json says of shapes."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

FILE = Path(__file__).with_name("models.json")
"""Hub id, or the folder that a preset names, -> sizes. Every model of a shipped preset is in it."""


@cache
def known_models() -> dict[str, dict[str, Any]]:
    """The sizes of each model of ``FILE``, by hub id or folder. Do not change them."""
    models: dict[str, dict[str, Any]] = json.loads(FILE.read_text(encoding="utf-8"))
    return models

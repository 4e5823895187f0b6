"""Describe config keys: type and bounds, default, meaning, and the commands that read them."""

from __future__ import annotations

import ast
import inspect
import itertools
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, get_args

from pydantic import BaseModel

from posttrain.config.tree import Command, Config

COMMANDS: tuple[str, ...] = get_args(Command)
_TRAINING, _RL, _SAMPLING = ("sft", "prefer", "rl"), ("rl",), ("rl", "generate")
_RUNS = (*_TRAINING, "generate")

READ_BY: Mapping[str, tuple[str, ...]] = {
    "command": COMMANDS, "description": COMMANDS, "plugins": COMMANDS,
    "run": _RUNS, "run.seed": COMMANDS, "run.dir": (*_RUNS, "eval"), "run.console": (*_RUNS, "eval"),
    "run.overwrite": (*_RUNS, "eval"),
    "run.resume": _TRAINING, "run.restarts": _TRAINING, "run.report": _TRAINING, "run.profile": _TRAINING,
    "run.rollouts": _RL, "run.rollouts_every": _RL,
    "model": _RUNS,
    "data": _TRAINING, "data.keep": _RL, "data.enable_thinking": _RUNS, "data.template_kwargs": _RUNS,
    "data.max_length": ("sft", "prefer"), "data.stream_above": ("sft", "prefer"),
    "data.shuffle_rows": ("sft", "prefer"),
    "data.workers": ("sft", "prefer"), "data.prefetch": ("sft", "prefer"), "data.deadline_s": ("sft", "prefer"),
    "train": _TRAINING, "train.dtype": _RUNS, "train.offload": _RL, "train.skip_zero_advantages": _RL,
    "train.early_stop": ("sft", "prefer"),
    "prefer": ("prefer",), "algo": _RL, "critic": _RL, "val": _RL,
    "rollout": _SAMPLING, "rollout.over_sample_rate": _RL, "rollout.partial_rollouts": _RL,
    "rollout.filter_groups": _RL, "rollout.filter_max_batches": _RL, "rollout.sleep": _RL, "rollout.staleness": _RL,
    "rollout.window": _RL, "rollout.pacing": _RL, "rollout.in_flight_updates": _RL, "rollout.keep_kv": _RL,
    "rollout.replay": _RL, "rollout.only": _RL, "rollout.record_schedule": _RL, "rollout.replay_schedule": _RL,
    "tools": _SAMPLING, "reward": ("rl", "eval"), "reward.weights": _RL, "reward.on_error": _RL,
    "reward.overlong": _RL, "reward.model": _RL, "reward.judge": _RL, "sandbox": (*_SAMPLING, "eval"),
    "cluster": _RUNS, "cluster.workers": _TRAINING, "cluster.placement": _RL, "cluster.sampler_restarts": _SAMPLING,
    "cluster.weight_transfer": _RL, "cluster.sync_tolerance": _RL,
    "checkpoint": _TRAINING, "generate": ("generate",), "eval": ("eval",),
}  # fmt: skip
"""The commands that read a section, or a key where they are others than of its section. An `eval` that samples first
reads what `generate` reads."""


@dataclass(frozen=True)
class Described:
    """Description of one key."""

    key: str
    type: str
    """Type in words, with bounds"""
    default: str
    about: str

    @property
    def read_by(self) -> tuple[str, ...]:
        """Return the commands that read the key."""
        return readers_of(self.key)


def readers_of(key: str) -> tuple[str, ...]:
    """Return the commands that read a key, or an entry of a table such as `tools`."""
    parts = key.split(".")
    names = (".".join(parts[:count]) for count in range(len(parts), 0, -1))
    return next(READ_BY[name] for name in names if name in READ_BY)


def described(section: type[BaseModel] = Config, prefix: str = "") -> Iterator[Described]:
    """Yield every key of a section and of the sections below it."""
    yield from own_keys(section, prefix)
    for name, inner in sections(section, prefix):
        yield from own_keys(inner, f"{name}.")


def own_keys(section: type[BaseModel], prefix: str) -> Iterator[Described]:
    """Yield the keys of a section itself."""
    about = docstrings(section)
    for name, schema in section.model_json_schema()["properties"].items():
        if "$ref" not in schema:
            text = " ".join(about.get(name, "").split())
            yield Described(prefix + name, type_words(schema), default_text(schema), text)


def sections(section: type[BaseModel] = Config, prefix: str = "") -> Iterator[tuple[str, type[BaseModel]]]:
    """Yield (dotted name, class) of each section below ``section``."""
    for name, field in section.model_fields.items():
        if isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel):
            yield f"{prefix}{name}", field.annotation
            yield from sections(field.annotation, f"{prefix}{name}.")


def type_words(schema: Mapping[str, Any]) -> str:
    """Return a JSON schema in a few words."""
    if "anyOf" in schema:
        return " or ".join(type_words(option) for option in schema["anyOf"])
    if "enum" in schema:
        return ", ".join(f"`{value}`" for value in schema["enum"])
    if "const" in schema:
        return f"`{schema['const']}`"
    kind = schema["type"]
    if kind == "array":
        items = schema.get("prefixItems") or [schema["items"]]
        return ("two " if len(items) == 2 else "list of ") + plural(type_words(items[0]))
    if kind not in ("integer", "number"):
        return {"string": "text", "boolean": "true or false", "null": "none", "object": "table"}[kind]
    signs = {"minimum": "≥", "exclusiveMinimum": ">", "maximum": "≤", "exclusiveMaximum": "<"}
    bounds = [f"{sign} {schema[key]:g}" for key, sign in signs.items() if key in schema]
    return " ".join([kind, ", ".join(bounds)]).strip()


def plural(text: str) -> str:
    """Return the plural of words from ``type_words``."""
    first, _, rest = text.partition(" ")
    return text if first.startswith("`") or first == "text" else f"{first}s {rest}".strip()


def default_text(schema: Mapping[str, Any]) -> str:
    """Return the default that a JSON schema states."""
    if "default" not in schema:
        return "(required)"
    value = schema["default"]
    return "none" if value is None else f"`{json.dumps(value)}`"


def docstrings(model: type) -> dict[str, str]:
    """Return the docstrings below the fields of a class by field. Pydantic can read them too, but does so at each start
    of the program."""
    (definition,) = ast.parse(inspect.getsource(model)).body
    assert isinstance(definition, ast.ClassDef)
    texts = {}
    for field, text in itertools.pairwise(definition.body):
        if isinstance(field, ast.AnnAssign) and isinstance(text, ast.Expr) and isinstance(text.value, ast.Constant):
            texts[ast.unparse(field.target)] = str(text.value.value)
    return texts

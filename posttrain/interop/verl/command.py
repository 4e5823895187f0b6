"""`posttrain import-verl`: a launch script of verl as a preset, with a list of what found no place in it."""

from __future__ import annotations

import json
import shlex
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import tomli_w

from posttrain.config.presets import resolve
from posttrain.config.verl.rules import KeyFinding, Outcome
from posttrain.core.errors import ConfigError
from posttrain.core.files import check_new, write_text
from posttrain.core.text import redacted
from posttrain.interop.verl.convert import Converted, convert
from posttrain.interop.verl.defaults import VERSION
from posttrain.runs.preflight import check_supported

_SECTIONS = (
    "run", "model", "data", "train", "train.optim", "train.lora", "algo", "algo.correction", "critic", "critic.optim",
    "rollout",
    "val", "reward", "reward.overlong", "reward.model", "sandbox", "cluster", "checkpoint",
)  # fmt: skip
"""Sections in the order in which they are written; keys of others come after them."""


def run(
    script: str,
    arguments: Sequence[str] = (),
    *,
    out: str | None = None,
    variables: Mapping[str, str] | None = None,
    root: str | None = None,
    overwrite: bool = False,
) -> Converted:
    """Read a script, and write its preset to ``out`` if given.

    Raises:
        DataError: the script cannot be read, or starts no trainer that is known.
        ConfigError: ``out`` exists, or cannot be written (``files.replacing``).
    """
    if out is not None:
        check_new(Path(out), "--out", overwrite=overwrite)
    if out is not None and not out.endswith(".toml"):
        raise ConfigError(
            f"--out {out}: the name of a preset ends with .toml", hint=f"--out {shlex.quote(Path(out).stem)}.toml"
        )
    converted = convert(Path(script), arguments, variables, Path(root) if root else None)
    if out is not None:
        write_text(Path(out), preset_text(converted, out), hint="choose another --out")
    return converted


def check(converted: Converted, out: str | None = None) -> None:
    """The preset resolves. Raises ``ConfigError`` with what contradicts; the file stays, to be put right."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "imported.toml"
        path.write_text(preset_text(converted), encoding="utf-8")
        try:
            check_supported(resolve(converted.command, str(path)).config)
        except ConfigError as error:
            message = error.message.replace(str(path), "the preset").replace("preset imported", "the preset")
            raise ConfigError(
                f"the script's values do not go together here: {message}",
                hint=f"put it right in {out}" if out else error.hint,
            ) from error


def preset_text(converted: Converted, name: str = "THIS_FILE") -> str:
    """The preset as TOML: behind each value the keys of verl it came from, at the end the keys that have no place. URLs
    are without the users and passwords that the script has."""
    draft = converted.draft
    lines = [
        f"# From {converted.name}, which starts {converted.module}. Made by `posttrain import-verl`.",
        f"# Where the script says nothing, verl's own defaults are written out if ours differ (verl {VERSION}).",
        f"# Run it:  {command_line(converted, name)}",
        f'command = "{converted.command}"',
        f'description = "From verl: {converted.name}"',
    ]
    top = {key: value for key, value in draft.values.items() if "." not in key}
    lines += [f"{key} = {_inline(value)}  # {draft.comments[key]}" for key, value in top.items()]
    sections: dict[str, list[str]] = {}
    for key in draft.values:
        if key not in top:
            section, _, name = key.rpartition(".")
            sections.setdefault(section, []).append(name)
    order = [*(name for name in _SECTIONS if name in sections), *(name for name in sections if name not in _SECTIONS)]
    for section in order:
        lines += ["", f"[{section}]"]
        for name in sections[section]:
            key = f"{section}.{name}"
            lines.append(f"{name} = {_inline(draft.values[key])}  # {draft.comments[key]}")
    lines += ["", *_commented("Not mapped", (f for f in converted.findings if f.outcome is Outcome.NOT_MAPPED))]
    lines += _commented("To look at", [KeyFinding("", Outcome.NOT_MAPPED, note) for note in converted.notes])
    return redacted("\n".join(lines).rstrip() + "\n")


def command_line(converted: Converted, preset: str) -> str:
    """What runs the preset."""
    variables = " ".join(f"{name}={shlex.quote(value)}" for name, value in converted.draft.environment.items())
    return f"{variables} posttrain {converted.command} --preset {shlex.quote(preset)}".strip()


def report(converted: Converted, *, every: bool = False) -> list[str]:
    """Lines for a person: counts, what was not mapped, and with ``every`` the rest too."""
    counts = converted.counted()
    total = sum(counts.values())
    share = 100 * (total - counts[Outcome.NOT_MAPPED]) / total if total else 100.0
    lines = [
        f"{total} keys: {counts[Outcome.MAPPED]} mapped, {counts[Outcome.NO_NEED]} need not be said here, "
        f"{counts[Outcome.NOT_MAPPED]} not mapped ({share:.0f} % accounted for)"
    ]
    for outcome in Outcome:
        if every or outcome is Outcome.NOT_MAPPED:
            lines += [f"{outcome.value}: {f.key}: {f.detail}" for f in converted.findings if f.outcome is outcome]
    return lines + [f"note: {note}" for note in converted.notes]


def as_json(converted: Converted) -> str:
    """One line of JSON: counts, findings, notes, values."""
    return json.dumps(
        {
            "command": converted.command,
            "module": converted.module,
            "counts": {outcome.value: count for outcome, count in converted.counted().items()},
            "keys": [{"key": f.key, "outcome": f.outcome.value, "detail": f.detail} for f in converted.findings],
            "notes": converted.notes,
            "values": converted.draft.values,
            "environment": converted.draft.environment,
        }
    )


def _commented(title: str, findings: Iterable[KeyFinding]) -> list[str]:
    lines = [f"#   {f.key + ': ' if f.key else ''}{' '.join(f.detail.split())}" for f in findings]
    return [f"# {title}:", *lines] if lines else []


def _inline(value: Any) -> str:
    """A TOML value on one line."""
    if isinstance(value, dict):
        return "{" + ", ".join(f"{_key(k)} = {_inline(v)}" for k, v in value.items() if v is not None) + "}"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(map(_inline, value)) + "]"
    return tomli_w.dumps({"v": value}).removeprefix("v = ").strip()


def _key(name: str) -> str:
    return tomli_w.dumps({name: 0}).removesuffix(" = 0\n")

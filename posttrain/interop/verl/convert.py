"""From a launch script of verl to the values of a preset."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from posttrain.config.verl.keys_rl import RL
from posttrain.config.verl.keys_sft import SFT, SFT_ENGINE
from posttrain.config.verl.rules import Draft, KeyFinding, Outcome, Rule, ScriptValues, run_rules
from posttrain.core.errors import ConfigError, DataError
from posttrain.interop.verl import defaults
from posttrain.interop.verl.expand import Text
from posttrain.interop.verl.hydra import Override, flat, parse_value, read_overrides
from posttrain.interop.verl.shell import Launch, read_script, trainer_of


@dataclass
class Converted:
    """A launch script in our terms."""

    name: str
    command: Literal["sft", "rl"]
    module: str
    """Module of verl."""
    draft: Draft
    findings: list[KeyFinding] = field(default_factory=list)
    """One for each key of the script, in its order and by its names."""
    notes: list[str] = field(default_factory=list)

    def counted(self) -> dict[Outcome, int]:
        return {outcome: sum(f.outcome is outcome for f in self.findings) for outcome in Outcome}


def convert(
    script: Path, arguments: Sequence[str] = (), variables: Mapping[str, str] | None = None, root: Path | None = None
) -> Converted:
    """Read a script and say what its keys mean here.

    Args:
        arguments: of the script, ``$1`` first.
        variables: of its environment; HOME and PWD are wanted by most.
        root: the folder that it is started in, where files that it names are looked for.

    Raises:
        DataError: the script cannot be read, or starts no trainer that is known.
    """
    try:
        text = script.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(
            f"{script} cannot be read: {error}", hint="give the path of a shell script that starts verl"
        ) from error
    root = root or Path()
    seen = {"PWD": str(root.resolve()), **(variables or {})}
    try:
        found = read_script(text, seen, arguments, str(script))
        launch, command = trainer_of(found)
    except DataError as error:
        raise DataError(f"{script}: {error.message}", hint=error.hint) from error
    rules, known = _of_module(launch.module)
    overrides = read_overrides(launch)
    notes = [*found.notes, *overrides.problems]
    layer, more = _config_file(overrides.config_path, overrides.config_name, [root, *script.resolve().parents])
    notes += more
    given = [*_launcher(launch)] * (command == "sft") + list(overrides.given)
    view = ScriptValues(
        {**layer, **{defaults.canonical(o.key): o.value for o in given if not o.problem}},
        known,
        {defaults.canonical(o.key): o.problem for o in given if o.problem},
        seen.get("HOME", "~"),
    )
    for key in view.unknown:
        view.given.pop(key, None)
    draft = run_rules(rules, view)
    findings = [KeyFinding(o.key, *_of(draft, o.key)) for o in given]
    converted = Converted(script.name, command, launch.module, draft, findings, notes + draft.notes)
    _look_into_tools(converted, [root, *script.resolve().parents])
    return converted


def _of(draft: Draft, key: str) -> tuple[Outcome, str]:
    finding = draft.findings[defaults.canonical(key)]
    return finding.outcome, finding.detail


def _of_module(module: str) -> tuple[tuple[Rule, ...], Mapping[str, Any]]:
    last = module.rpartition(".")[2]
    if last == "fsdp_sft_trainer":
        return SFT, defaults.SFT
    if last == "sft_trainer":
        return SFT_ENGINE, defaults.SFT_ENGINE
    return RL, defaults.RL


def _launcher(launch: Launch) -> list[Override]:
    """torchrun's processes and nodes, as overrides of our making. Its other options say how they find each other."""
    found: list[Override] = []
    words = list(launch.launcher)
    for index, word in enumerate(words):
        name, equals, _ = word.start.partition("=")
        option = name.lstrip("-").replace("-", "_")
        if option not in ("nproc_per_node", "nnodes") or not name.startswith("--"):
            continue
        value = word.since(len(name) + 1) if equals else words[index + 1] if index + 1 < len(words) else Text()
        key = f"launcher.{option}"
        if value.known is None:
            found.append(Override(key, None, "; ".join(value.reasons)))
        elif value.known.isdigit():
            found.append(Override(key, parse_value(value.known)))
        else:
            found.append(Override(key, None, f"{value.known!r} is no number"))
    return found


def _config_file(path: str, name: str, folders: Sequence[Path]) -> tuple[dict[str, Any], list[str]]:
    """The values of the file that ``--config-path`` and ``--config-name`` name, without those that it takes over from
    verl's own, whose values are the defaults."""
    if not name or name.removesuffix(".yaml") in ("ppo_trainer", "ppo_megatron_trainer", "sft_trainer", "dapo_trainer"):
        return {}, []
    file = Path(path) / f"{name.removesuffix('.yaml')}.yaml"
    places = [folder / file for folder in folders]
    place = next((place for place in places if place.is_file()), None)
    if place is None:
        return {}, [f"the config {file} was not found: give the folder that the script is started in with --root"]
    import yaml

    try:
        content = yaml.safe_load(place.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        return {}, [f"{place} cannot be read: {error}"]
    if not isinstance(content, dict):
        return {}, [f"{place} cannot be read: it is no mapping of keys"]
    values = flat({key: value for key, value in content.items() if key not in ("hydra", "defaults")})
    plain = {key: value for key, value in values.items() if not (isinstance(value, str) and "${" in value)}
    return {defaults.canonical(key): value for key, value in plain.items()}, [f"values of {place} were read as well"]


def _look_into_tools(converted: Converted, folders: Sequence[Path]) -> None:
    """A tool file says where programs run, which is the sandbox's to say here."""
    from posttrain.config import SandboxConfig
    from posttrain.tools.verl import load_tool_file, read_tool_file

    for name in converted.draft.values.get("rollout.tools", []):
        place = next((folder / name for folder in folders if (folder / name).is_file()), None)
        if place is None:
            converted.notes.append(f"the tool file {name} was not found, so it was not looked into")
            continue
        try:
            sandbox = _sandbox_of(load_tool_file(str(place)))
            for key, value in sandbox.items():
                converted.draft.set(f"sandbox.{key}", value, name)
            # Their values are validated with the preset.
            read_tool_file(str(place), SandboxConfig.model_construct(**sandbox))
        except ConfigError as error:
            converted.notes.append(f"{error.message}" + (f" ({error.hint})" if error.hint else ""))


def _sandbox_of(entries: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Where the code tools of a file run their programs, as keys of ``sandbox``."""
    found: dict[str, Any] = {}
    for entry in entries:
        config = entry.get("config")
        if not isinstance(config, dict):
            continue
        if url := config.get("sandbox_fusion_url"):
            found |= {"mode": "remote", "url": str(url).removesuffix("/run_code")}
        if isinstance(memory := config.get("memory_limit_mb"), int):
            found["memory_mb"] = memory
    return found

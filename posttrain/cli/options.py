"""Options that set keys of the config. Their names and types come from the config tree."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import UnionType
from typing import TYPE_CHECKING, Annotated, Any, Union, get_args, get_origin

import typer

from posttrain.algos import BUNDLES
from posttrain.cli.console import echo
from posttrain.config import Command, Config
from posttrain.config.keys import flag_name, leaves_of
from posttrain.core.errors import ConfigError

if TYPE_CHECKING:
    from posttrain.config.presets import Resolved


@dataclass(frozen=True)
class Flag:
    """What the option of a key adds to the key."""

    help: str
    metavar: str | None = None
    short: str = ""
    minimum: int | None = None
    """Smallest value, where the option itself refuses a smaller one"""
    separated: bool = False
    """The values of a list are separated by commas; else the option is repeated."""


_FLAGS: Mapping[str, Flag] = {
    "algo.name": Flag(f"RL algorithm, a bundle of algo.* values: {', '.join(BUNDLES.names())}."),
    "cluster.workers": Flag("Training workers (cluster.workers)."),
    "generate.data": Flag("Parquet of prompts (generate.data)."),
    "generate.endpoint.url": Flag("OpenAI-compatible server to sample from (generate.endpoint.url)."),
    "generate.limit": Flag("Maximum number of prompts (generate.limit)."),
    "generate.out": Flag("Responses parquet (generate.out)."),
    "model.path": Flag("Folder, hub id, builtin:tiny or run:NAME."),
    "plugins": Flag("Import your own data sets, tools, graders and algorithms; repeatable (plugins).", metavar="FILE"),
    "prefer.method": Flag("Train a policy or a reward model (prefer.method)."),
    "reward.examine": Flag("Number of graded conversations to print (reward.examine).", minimum=0),
    "rollout.agent": Flag("Agent that plays the episodes (rollout.agent).", metavar="NAME|FILE.py:NAME"),
    "rollout.env": Flag("Environment that plays with the model (rollout.env).", metavar="NAME|FILE.py:NAME"),
    "rollout.n": Flag("Responses per prompt (rollout.n).", short="-n"),
    "rollout.only": Flag("Sample, grade and write rollout files, without training (rollout.only)."),
    "rollout.replay": Flag(
        "Train from rollout files (file, folder, glob), without sampling (rollout.replay).", metavar="FILE"
    ),
    "rollout.replay_schedule": Flag(
        "Repeat a run with rollout.record_schedule to the bit (rollout.replay_schedule).", metavar="RUN"
    ),
    "rollout.temperature": Flag("Sampling temperature (rollout.temperature)."),
    "rollout.tools": Flag("Tools, separated by commas; none: no tools (rollout.tools).", separated=True),
    "run.console": Flag("Console output during the run (run.console)."),
    "run.name": Flag("Name of the run (run.name)."),
    "run.overwrite": Flag("Replace existing output."),
    "run.profile": Flag("Profile the updates of these steps (run.profile).", metavar="FIRST:LAST"),
    "run.resume": Flag(
        "Resume an unfinished run, refuse to, or start from a checkpoint (run.resume).", "auto|never|PATH"
    ),
    "run.seed": Flag("Random seed (run.seed)."),
    "train.steps": Flag("Training steps (train.steps)."),
}
"""The options of several commands by key."""

OverwriteOption = Annotated[bool, typer.Option("--overwrite", help=_FLAGS["run.overwrite"].help)]
PluginOption = Annotated[list[str] | None, typer.Option("--plugin", metavar="FILE", help=_FLAGS["plugins"].help)]
DryRunOption = Annotated[
    bool, typer.Option("--dry-run", help="Check everything, print the plan, and stop. Nothing is written.")
]

PRESET = ("--preset", "--set")
"""The options that every command with a config has."""
TRAINING = ("run.name", "model.path", "data.train", "train.steps", "cluster.workers")
"""Keys of commands that train."""
STARTING = ("run.seed", "run.overwrite", "run.resume", "run.profile", "plugins", "run.console")
"""Keys of commands that train, on how a run starts."""
SAMPLING = (
    *("rollout.n", "rollout.temperature", "generate.limit", "generate.endpoint.url", "rollout.tools"),
    *("rollout.env", "rollout.agent"),
)
"""Keys of commands that sample."""


@dataclass(frozen=True)
class Settings:
    """What a command line says about the config."""

    preset: str | None
    sets: tuple[str, ...]
    """``KEY=VALUE`` of each `--set`"""
    flags: Mapping[str, Any]
    """Dotted key -> value of each option that was given"""

    def resolve(
        self, command: Command, more: Mapping[str, Any] | None = None, readers: Sequence[Command] = ()
    ) -> Resolved:
        """Return the config of a command. Without a preset, a line on stderr names the command's default one, if any.

        Args:
            more: further flags by dotted key; None: one that was not given.
            readers: the commands whose keys the command line may set, if they are others than ``command``.

        Raises:
            ConfigError: unknown preset, key or algo, a wrong value, a combination that makes no sense, or a key on the
                command line that no reader reads. A preset may have such keys: it may serve several commands.
        """
        from posttrain.config.preset_files import CPU_PRESETS, default_preset
        from posttrain.config.presets import resolve

        preset = self.preset
        if preset is None and command in CPU_PRESETS:
            preset, line = default_preset(command)
            echo(line, err=True)
        resolved = resolve(command, preset, self.sets, {**self.flags, **(more or {})})
        _check_read(resolved.provenance, readers or (command,))
        return resolved


def _check_read(provenance: Mapping[str, str], commands: Sequence[Command]) -> None:
    """Check that one of the commands reads every key that the command line sets. Raises ``ConfigError``."""
    from posttrain.config.describe import readers_of

    for key, origin in provenance.items():
        if not origin.startswith(("--", "flag --")) or set(commands) & set(readers := readers_of(key)):
            continue
        hint = f"it is read by {', '.join(readers)}"
        if "eval" in commands and "generate" in readers:
            hint += ", and by an eval that samples: give --model, --data or --preset"
        raise ConfigError(
            f"{key} is set by {origin.removeprefix('flag ')}, and {commands[0]} does not read it", hint=hint
        )


def with_settings(*keys: str, about: Mapping[str, str] | None = None) -> Callable[[Callable[..., None]], Any]:
    """Replace the parameter ``settings`` of a command by one option for each key, and pass what they say in it.

    Args:
        keys: dotted keys, and those of ``PRESET``, in the order of the help.
        about: help by key, where it is another than usual.
    """

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        options = {_parameter_name(key): key for key in keys}
        own = inspect.signature(command, eval_str=True).parameters.values()
        parameters = [
            parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY)
            for one in own
            for parameter in ([_option(key, about or {}) for key in keys] if one.name == "settings" else [one])
        ]

        @functools.wraps(command)
        def wrapper(**given: Any) -> None:
            values = {key: given.pop(name) for name, key in options.items()}
            preset, sets = values.pop("--preset"), values.pop("--set")
            flags = {
                key: _value(key, value) for key, value in values.items() if value is not None and value is not False
            }
            command(settings=Settings(preset, tuple(sets or ()), flags), **given)

        wrapper.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        wrapper.__annotations__ = {one.name: one.annotation for one in parameters}
        return wrapper

    return decorate


def _option(key: str, about: Mapping[str, str]) -> inspect.Parameter:
    """Return the parameter of one option."""
    kind: Any
    if key == "--preset":
        kind, option = str, typer.Option(key, "-p", help="A preset's name, or the path of a .toml.")
    elif key == "--set":
        kind, option = list[str], typer.Option(key, metavar="KEY=VALUE", help="Set one key; repeatable.")
    else:
        flag = _FLAGS.get(key, Flag(about.get(key, "")))
        kind = str if flag.separated else _value_type(_kinds()[key])
        names = [flag_name(key), *filter(None, [flag.short])]
        option = typer.Option(*names, metavar=flag.metavar, min=flag.minimum, help=about.get(key, flag.help))
    default, kind = (False, bool) if kind is bool else (None, kind | None)
    return inspect.Parameter(
        _parameter_name(key), inspect.Parameter.KEYWORD_ONLY, default=default, annotation=Annotated[kind, option]
    )


def _parameter_name(key: str) -> str:
    name = (key if key in PRESET else flag_name(key)).strip("-").replace("-", "_")
    return f"{name}_" if name == "set" else name


@functools.cache
def _kinds() -> dict[str, Any]:
    return dict(leaves_of(Config))


def _value_type(kind: Any) -> Any:
    """Return the type that an option parses, of a field's type: without bounds, None and the further ones of a union.
    The config checks the bounds."""
    if get_origin(kind) in (Union, UnionType, Annotated):
        return _value_type(get_args(kind)[0])
    return kind


def _value(key: str, value: Any) -> Any:
    return names_in(value) if _FLAGS.get(key, Flag("")).separated else value


def names_in(text: str) -> list[str]:
    """Return the names in a list separated by commas; `none` has none."""
    return [name.strip() for name in text.split(",") if name.strip()] if text.strip() != "none" else []

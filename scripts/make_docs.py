#!/usr/bin/env python
"""Make ``docs/config.md`` from the config tree, ``docs/cli.md`` from the command line, and the tables of
``docs/data.md`` and ``docs/rollout-files.md`` from the row schemas and the data sets, ``docs/tools.md`` from the tools,
those of ``docs/algorithms.md`` from the catalog of algorithms, those of ``docs/from-verl.md`` from the rules of
``import-verl``, and those of ``docs/models.md`` from ``docs/models.json``, which ``scripts/check_models.py`` records.

python scripts/make_docs.py            # writes them
python scripts/make_docs.py --check    # exit code 1 if one is out of date
"""

from __future__ import annotations

import argparse
import inspect
import json
import re
import sys
import types
import typing
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

import typer
from pydantic import BaseModel, TypeAdapter
from typing_extensions import is_typeddict

from posttrain.algos import ADVANTAGES, BUNDLES, POLICY_LOSSES
from posttrain.cli import app
from posttrain.config import Config
from posttrain.config.describe import default_text, docstrings, own_keys, plural, sections, type_words
from posttrain.config.verl.keys_rl import RL
from posttrain.config.verl.keys_sft import SFT
from posttrain.config.verl.rules import Outcome, Rule
from posttrain.core.types import Trajectory
from posttrain.data.preferences import PreferenceRow
from posttrain.data.schema import ImageField, MessageField, RlhfRow, SftRow, ToolField
from posttrain.engines.classes import has_class, recorded
from posttrain.prep.card import Card
from posttrain.prep.command import LISTED, listing
from posttrain.rollout.files import COLUMNS, Column, RowHead
from posttrain.tools.base import TOOLS, docstring_parts
from posttrain.tools.options import REQUIRED, options_of
from posttrain.tools.verl import REPLACEMENTS

DOCS = Path(__file__).resolve().parent.parent / "docs"
MADE = "<!-- Made by scripts/make_docs.py; do not edit. -->\n"

CONFIG_HEAD = f"""{MADE}
# Configuration

One tree for all commands. A preset (TOML) fills it; `--set section.key=value` and the named flags of a command change
single values. The later layer wins: defaults, the bundle of the algo, the preset (the presets it extends first),
`--algo`, `--set`, named flags. An unknown key is an error, and so is a key on the command line that the command does
not read (a preset may have such keys, for other commands). `posttrain presets show NAME --provenance` prints the
resolved tree with the origin of each value, and every run stores it as `config.toml` and `provenance.json`.

TOML has no null: `--set train.steps=none` resets a value that may be none. Where a value is a table of free names, one
entry may be set alone: `--set tools.search.url=http://localhost:8000`, `--set reward.weights.format=0.5`.

A key that was renamed is read by its earlier name too, in presets, in `--set` and in the config of an existing run,
with a warning that names the current one. `posttrain presets migrate FILE` rewrites a preset: names change, comments
and layout stay.
"""

CLI_HEAD = f"""{MADE}
# Command line

Data goes to stdout, everything else to stderr. Exit codes: 0 (also after SIGTERM, once the run has saved); 1 when a run
failed; 2 for bad input; 130 after Ctrl-C (the run is saved and the same command goes on from there). `--debug` anywhere
on the line shows the traceback of an error. `--help` works everywhere.
"""


# ---------------------------------------------------------------------- docs/config.md


def config_page() -> str:
    parts = [CONFIG_HEAD, _section("Top level", "", Config)]
    parts += [_section(f"`[{name}]`", f"{name}.", section) for name, section in sections(Config)]
    return "\n".join(parts) + "\n"


# ---------------------------------------------------------------------- docs/algorithms.md


def algorithms_page() -> str:
    bundles = [
        (f"`{name}`", ", ".join(f"`{key} = {json.dumps(value)}`" for key, value in values.items()))
        for name, values in ((name, BUNDLES.get(name)) for name in BUNDLES.names())
    ]
    advantages = [
        (f"`{estimator.name}`", estimator.formula, estimator.needs, estimator.source, _code(estimator.function))
        for estimator in map(ADVANTAGES.get, ADVANTAGES.names())
    ]
    losses = [
        (f"`{loss.name}`", loss.formula, f"`{loss.aggregation}`", loss.source, _code(loss.function))
        for loss in map(POLICY_LOSSES.get, POLICY_LOSSES.names())
    ]
    parts = {
        "bundles": _table(("name", "sets"), bundles),
        "advantages": _table(("`algo.advantage`", "advantage", "needs", "from", "code"), advantages),
        "losses": _table(("`algo.policy_loss`", "loss of a token", "aggregated in the paper", "from", "code"), losses),
    }
    return _with_parts("algorithms.md", parts)


def _code(function: Callable[..., Any]) -> str:
    module = str(function.__module__).removeprefix("posttrain.").replace(".", "/")
    return f"`{function.__name__}` in `{module}.py`"


def _section(title: str, prefix: str, section: type[BaseModel]) -> str:
    rows = [(f"`{key.key}`", key.type, key.default, key.about) for key in own_keys(section, prefix)]
    return f"## {title}\n\n{section.__doc__}\n\n" + _table(("key", "type", "default", "what it does"), rows)


# ---------------------------------------------------------------------- docs/cli.md


def cli_page() -> str:
    group: Any = typer.main.get_command(app)
    return "\n".join([CLI_HEAD, *(_command(path, command) for path, command in commands(group))]) + "\n"


def commands(group: Any, path: str = "posttrain") -> Iterator[tuple[str, Any]]:
    """(words to type, command) of each command, those of sub-groups after the group itself."""
    for name, command in group.commands.items():
        yield f"{path} {name}", command
        if hasattr(command, "commands"):
            yield from commands(command, f"{path} {name}")


def _command(path: str, command: Any) -> str:
    hints = typing.get_type_hints(command.callback) if command.callback else {}  # a group that only has commands
    arguments = [p for p in command.params if p.param_type_name == "argument"]
    words = [p.name.upper() if p.required else f"[{p.name.upper()}]" for p in arguments]
    rows = [(_usage(p, hints[p.name]), _help(p)) for p in command.params]
    usage = " ".join([path, *words, *(["[OPTIONS]"] if len(rows) > len(words) else [])])
    example = f"\n{command.epilog.replace(': ', ': `')}`\n" if command.epilog else ""
    text = f"## {path}\n\n{command.help}\n\n    {usage}\n{example}"
    return f"{text}\n{_table(('option', 'what it does'), rows)}" if rows else text


def _usage(param: Any, hint: Any) -> str:
    if param.param_type_name == "argument":
        return f"`{param.name.upper()}`"
    names = ", ".join(f"`{name}`" for name in [*param.opts, *param.secondary_opts])
    if param.is_flag:
        return names
    literals = [a for a in (hint, *get_args(hint)) if get_origin(a) is Literal]
    choices = " or ".join(f"`{value}`" for literal in literals for value in get_args(literal))
    return f"{names} {choices or '`' + (param.metavar or param.name.strip('_').upper()) + '`'}"


def _help(param: Any) -> str:
    if param.required:
        return f"{param.help} Required."
    # An option may say its default itself, where "not given" means something else than the default.
    default = param.show_default if isinstance(getattr(param, "show_default", None), str) else param.default
    known = default is not None and default is not False and not callable(default)
    return f"{param.help} Default: `{default}`." if known else param.help


# ---------------------------------------------------------------------- docs/data.md, docs/rollout-files.md


def data_page() -> str:
    tables = {
        "rlhf": fields_table(RlhfRow, ("prompt", "tools", "images")),
        "sft": fields_table(SftRow, ("messages", "tools", "images")),
        "preference": fields_table(PreferenceRow, ("prompt", "chosen", "rejected", "tools", "images")),
        "message": fields_table(MessageField),
        "tool": fields_table(ToolField),
        "image": fields_table(ImageField),
        "card": fields_table(Card),
        "sets": _table(LISTED, [(f"`{name}`", *rest) for name, *rest in listing()]),
    }
    return _with_parts("data.md", tables)


def rollout_files_page() -> str:
    about = docstrings(RowHead) | docstrings(Trajectory)

    def meaning(column: Column) -> str:
        text = " ".join(about[column.name].split())
        return text if column.json is None else f"JSON text: {text[:1].lower()}{text[1:]}"

    rows = [(f"`{c.name}`", f"`{c.type}`".replace("item: ", ""), meaning(c)) for c in COLUMNS.values()]
    return _with_parts("rollout-files.md", {"columns": _table(("column", "type", "what it is"), rows)})


def _with_parts(page: str, parts: dict[str, str]) -> str:
    """A page as it is, with the parts between ``<!-- made: NAME -->`` and ``<!-- end -->`` made again."""
    text = (DOCS / page).read_text(encoding="utf-8")
    for name, part in parts.items():
        text, count = re.subn(
            rf"(<!-- made: {name} -->\n\n).*?(\n<!-- end -->)",
            lambda found, part=part: found[1] + part + found[2],
            text,
            flags=re.S,
        )
        assert count == 1, f"docs/{page} has no place for {name!r}"
    return text


def fields_table(model: type, elsewhere: Iterable[str] = ()) -> str:
    """The fields of a row type, with the fields of its structs except of those described ``elsewhere``."""
    return _table(("field", "type", "what it is"), _fields(model, "", frozenset(elsewhere)))


def _fields(model: type, prefix: str, elsewhere: frozenset[str]) -> Iterator[tuple[str, str, str]]:
    own = model.__annotations__
    parts = [part for part in reversed(model.__mro__) if part.__module__.startswith("posttrain.")]
    described = {name: text for part in parts for name, text in docstrings(part).items()}
    hints = typing.get_type_hints(model)
    optional = _optional(model)
    for name in sorted(described, key=lambda name: name not in own):  # what all rows share comes last
        words = _words(hints[name]) + (", optional" if name in optional else "")
        yield f"`{prefix}{name}`", words, " ".join(described[name].split())
        inner = _struct(hints[name])
        if inner is not None and name not in elsewhere:
            yield from _fields(inner, f"{prefix}{name}.", elsewhere)


def _optional(model: type) -> set[str]:
    """The fields of a model or a TypedDict that may be left out."""
    if issubclass(model, BaseModel):
        return {name for name, field in model.model_fields.items() if not field.is_required()}
    hints = typing.get_type_hints(model, include_extras=True)
    return {name for name, hint in hints.items() if get_origin(hint) is typing.NotRequired}


def _struct(hint: Any) -> type | None:
    """The struct in a type hint, perhaps in a list."""
    if isinstance(hint, type) and (issubclass(hint, BaseModel) or is_typeddict(hint)):
        return hint
    return next(filter(None, map(_struct, get_args(hint))), None)


_WORDS = {str: "text", bytes: "bytes", bool: "true or false", int: "integer", float: "number", Any: "anything"}


def _words(hint: Any) -> str:
    """A type hint in a few words."""
    if hint in _WORDS:
        return _WORDS[hint]
    origin, args = get_origin(hint), get_args(hint)
    if origin is Literal:
        return ", ".join(f"`{value}`" for value in args)
    if origin in (typing.Union, types.UnionType):
        return " or ".join(_words(arg) for arg in args if arg is not type(None))
    if origin is list:
        named = {MessageField: "messages", ImageField: "images"}.get(args[0])
        return f"list of {named or plural(_words(args[0]))}"
    if origin is tuple:
        return "pair of integers"
    return "struct"


# ---------------------------------------------------------------------- docs/tools.md


def tools_page() -> str:
    """The page as it is, with the tools' options and the classes of verl made again."""
    tools = "\n".join(_tool(name) for name in TOOLS.names())
    return _with_parts("tools.md", {"tools": tools, "verl": _replacements()})


def _tool(name: str) -> str:
    factory = TOOLS.get(name)
    about = docstring_parts(inspect.getdoc(factory) or "")[0].replace("``", "`")
    rows = [
        (
            f"`{option.name}`",
            type_words(TypeAdapter(option.hint).json_schema()),
            "(required)" if option.default is REQUIRED else default_text({"default": option.default}),
            option.description[:1].upper() + option.description[1:],
        )
        for option in options_of(factory).values()
    ]
    return f"### {name}\n\n{about}\n" + (
        f"\n{_table(('option', 'type', 'default', 'what it does'), rows)}" if rows else ""
    )


def _replacements() -> str:
    rows = []
    for name, replacement in REPLACEMENTS.items():
        keys = [f"`{theirs}` is `{ours}`" for theirs, ours in replacement.options.items() if ours]
        unused = [f"`{theirs}`" for theirs, ours in replacement.options.items() if ours is None]
        rows.append((f"`{name}`", f"`{replacement.type}`", ", ".join(keys), ", ".join(unused)))
    return _table(("class of verl", "tool", "keys of its config", "keys without a meaning here"), rows)


# ---------------------------------------------------------------------- docs/from-verl.md


def from_verl_page() -> str:
    """The page as it is, with the tables of keys made again from the rules of `import-verl`."""
    return _with_parts("from-verl.md", {"rl": _rules(RL), "sft": _rules(SFT)})


def _rules(rules: Iterable[Rule]) -> str:
    kinds = {Outcome.NO_NEED: "no need", Outcome.NOT_MAPPED: "**none**", Outcome.MAPPED: "no need"}
    rows = [
        (
            ", ".join(f"`{key}`" for key in rule.theirs),
            ", ".join(f"`{key}`" for key in rule.ours) or kinds[rule.kind],
            rule.about,
        )
        for rule in rules
    ]
    return _table(("verl", "here", "how, or why not"), rows)


# ---------------------------------------------------------------------- docs/models.md


def models_page() -> str:
    """The page as it is, with its tables made again from docs/models.json, which tests hold against the models."""
    stored = json.loads((DOCS / "models.json").read_text(encoding="utf-8"))
    features, rows = stored["features"], stored["architectures"]
    checked = [(heading, about[:1].upper() + about[1:]) for heading, about in features.values()]
    table = [
        (f"{name}<br>`{r['class']}`", r["about"], *(_cell(feature, r) for feature in features))
        for name, r in rows.items()
    ]
    engines = [(name, found["version"], found["source"]) for name, found in recorded().items()]
    parts = {
        "features": _table(("column", "a cell is `yes` where"), checked),
        "table": _table(("architecture", "in it", *(heading for heading, _ in features.values())), table),
        "refused": _table(("architecture", "refused", "message"), _refused(features, rows)),
        "engines": _table(("engine", "release", "list"), engines),
    }
    return _with_parts("models.md", parts)


def _cell(feature: str, row: dict[str, Any]) -> str:
    if row["cells"][feature]["result"] == "refused":
        return "no"
    if feature in ("vllm", "sglang") and not has_class(row["class"], feature):
        return "yes, by transformers' code"
    return f"yes, `{row['tools']}`" if feature == "tools" and row["tools"] else "yes"


def _refused(features: dict[str, Any], rows: dict[str, Any]) -> Iterator[tuple[str, str, str]]:
    for name, row in rows.items():
        reasons: dict[str, list[str]] = {}
        for feature, cell in row["cells"].items():
            if cell["result"] == "refused":
                reasons.setdefault(cell["reason"], []).append(features[feature][0])
        for reason, refused in reasons.items():
            yield name, "all" if len(refused) == len(features) else ", ".join(refused), reason


# ---------------------------------------------------------------------- all


def _table(head: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    columns = list(head)
    lines = [columns, ["---"] * len(columns), *(list(row) for row in rows)]
    return "".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |\n" for line in lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing; exit code 1 if a page is out of date")
    check = parser.parse_args().check
    stale = 0
    pages = {
        "algorithms": algorithms_page, "config": config_page, "cli": cli_page, "data": data_page, "tools": tools_page,
        "rollout-files": rollout_files_page, "from-verl": from_verl_page, "models": models_page,
    }  # fmt: skip
    for name, text in ((f"{page}.md", make()) for page, make in pages.items()):
        file = DOCS / name
        if file.is_file() and file.read_text(encoding="utf-8") == text:
            continue
        stale += 1
        print(f"{file.name} is out of date" if check else f"wrote {file.name}")
        if not check:
            DOCS.mkdir(exist_ok=True)
            file.write_text(text, encoding="utf-8")
    return 1 if check and stale else 0


if __name__ == "__main__":
    sys.exit(main())

"""The command line: parse, resolve the config, call one ``run``. Imports nothing heavy; commands import what they need.

Data goes to stdout, everything else to stderr. Exit codes: 0 (also after SIGTERM or SIGHUP, when the run has saved), 1
for a failed run, 2 for bad input, 130 for Ctrl-C, 143 and 129 for SIGTERM and SIGHUP where there was nothing to save.
"""

from __future__ import annotations

import atexit
import gc
import sys
from collections.abc import Callable
from typing import Annotated

import typer

from posttrain.cli import data, explaining, importing, looking, merging, planning, scoring, training
from posttrain.cli.guard import guarded, show_tracebacks
from posttrain.cli.naming import Commands, OneCommand
from posttrain.core.cycles import rare_cycle_search

app = typer.Typer(
    name="posttrain",
    cls=Commands,
    help="From raw data to a better language model: prep, sft, prefer, rl, generate, eval, merge-ckpt.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
presets_app = typer.Typer(
    help="List the shipped presets, show one, or rename earlier keys in a file of yours.",
    invoke_without_command=True,
    cls=Commands,
)
config_app = typer.Typer(help="Explain a key of the config.", no_args_is_help=True, cls=Commands)

COMMANDS: dict[str, tuple[Callable[..., None], str]] = {
    "prep": (data.prep, "posttrain prep gsm8k --out data/gsm8k"),
    "plan": (planning.plan, "posttrain plan --preset qwen2.5-0.5b-gsm8k --gpu h200"),
    "sft": (training.sft, "posttrain sft --preset tiny-arith-sft --steps 100 --name first"),
    "prefer": (
        training.prefer,
        "posttrain prefer --preset tiny-prefer --data data/arith-preferences/prefer_train.parquet",
    ),
    "rl": (training.rl, "posttrain rl --preset tiny-arith --algo dapo --set train.optim.lr=1e-4"),
    "generate": (scoring.generate, "posttrain generate --model run:latest --data data/gsm8k/test.parquet -n 4"),
    "eval": (scoring.evaluate, "posttrain eval runs/tiny-generate/responses.parquet --pass-at 1,5"),
    "merge-ckpt": (merging.merge_ckpt, "posttrain merge-ckpt tiny-arith --out merged --check"),
    "import-verl": (importing.import_verl, "posttrain import-verl run_grpo.sh --out mine.toml"),
    "quickstart": (training.quickstart, "posttrain quickstart --out runs/quickstart"),
    "doctor": (looking.doctor, "posttrain doctor --quick"),
    "report": (looking.report, "posttrain report tiny-arith tiny-code --out compared.html"),
    "version": (looking.version, "posttrain version --json"),
}
"""Commands with an example each, in the order of ``--help``."""


def _add(group: typer.Typer, name: str, command: Callable[..., None], example: str) -> None:
    group.command(name, cls=OneCommand, epilog=f"Example: {example}")(guarded(command))


for name, (command, example) in COMMANDS.items():
    _add(app, name, command, example)
app.add_typer(presets_app, name="presets", epilog="Example: posttrain presets")
presets_app.callback()(guarded(looking.presets_list))
_add(presets_app, "show", looking.presets_show, "posttrain presets show tiny-gsm8k --provenance")
_add(presets_app, "migrate", looking.presets_migrate, "posttrain presets migrate mine.toml")
app.add_typer(config_app, name="config", epilog="Example: posttrain config explain train.optim.lr")
_add(config_app, "explain", explaining.explain, "posttrain config explain train.optim.lr --preset tiny-gsm8k")


@app.callback()
def _main(debug: Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")] = False) -> None:
    show_tracebacks(debug)


def main() -> None:
    """Entry point of the console script. ``--debug`` may stand anywhere on the line."""
    # At its end Python searches the objects of all libraries for cycles: 0.1 s and more. Nothing of ours needs that.
    atexit.register(gc.freeze)
    args = [arg for arg in sys.argv[1:] if arg != "--debug"]
    with rare_cycle_search():
        app(args=["--debug", *args] if len(args) < len(sys.argv) - 1 else args)

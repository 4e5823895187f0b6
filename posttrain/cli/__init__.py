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

from posttrain.cli import data, importing, looking, merging, planning, scoring, training
from posttrain.cli.guard import guarded, show_tracebacks

app = typer.Typer(
    name="posttrain",
    help="From raw data to a better language model: prep, sft, prefer, rl, generate, eval, merge-ckpt.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
presets_app = typer.Typer(help="List the shipped presets, or show one.", invoke_without_command=True)

COMMANDS: dict[str, Callable[..., None]] = {
    "prep": data.prep,
    "plan": planning.plan,
    "sft": training.sft,
    "prefer": training.prefer,
    "rl": training.rl,
    "generate": scoring.generate,
    "eval": scoring.evaluate,
    "merge-ckpt": merging.merge_ckpt,
    "import-verl": importing.import_verl,
    "quickstart": training.quickstart,
    "doctor": looking.doctor,
    "report": looking.report,
    "version": looking.version,
}
"""In the order of ``--help``."""

for name, command in COMMANDS.items():
    app.command(name)(guarded(command))
app.add_typer(presets_app, name="presets")
presets_app.callback()(guarded(looking.presets_list))
presets_app.command("show")(guarded(looking.presets_show))


@app.callback()
def _main(debug: Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")] = False) -> None:
    show_tracebacks(debug)


def main() -> None:
    """Entry point of the console script. ``--debug`` may stand anywhere on the line."""
    # At its end Python searches the objects of all libraries for cycles: 0.1 s and more. Nothing of ours needs that.
    atexit.register(gc.freeze)
    args = [arg for arg in sys.argv[1:] if arg != "--debug"]
    app(args=["--debug", *args] if len(args) < len(sys.argv) - 1 else args)

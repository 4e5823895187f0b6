"""Wrap commands: an error is one message on stderr instead of a traceback, and an exit code."""

from __future__ import annotations

import functools
import os
import sys
import traceback
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, ParamSpec

import typer

from posttrain.cli.console import echo
from posttrain.config.keys import RenamedKeyWarning
from posttrain.core.errors import Interrupted, presented
from posttrain.core.quiet import quiet_libraries
from posttrain.core.signals import Terminated, ignored_again, termination_raises

P = ParamSpec("P")

_debug = False


def show_tracebacks(wanted: bool) -> None:
    """Set whether the traceback of an error is printed before its message (``--debug``)."""
    global _debug
    _debug = wanted


def guarded(command: Callable[P, None]) -> Callable[P, None]:
    """Turn an exception of a command into one message on stderr and an exit code."""

    @functools.wraps(command)
    def wrapper(*args: P.args, **kwargs: P.kwargs) -> None:
        quiet_libraries()
        try:
            with termination_raises(), ignored_again(), _renamed_keys_shown():
                command(*args, **kwargs)
        except (typer.Exit, typer.Abort):
            raise
        except Interrupted as stopped:
            _fail(f"{stopped}; the same command goes on from there", None, stopped.exit_code)
        except Terminated as stopped:
            _fail(str(stopped), None, stopped.exit_code)
        except KeyboardInterrupt:
            _fail("interrupted", None, 130)
        except BrokenPipeError:
            # The reader (`| head`) has gone. Point stdout elsewhere, or Python complains again at exit.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            raise typer.Exit(1) from None
        except Exception as error:
            told = presented(error)
            _fail(f"error: {told.message}", told.hint, told.exit_code)

    return wrapper


@contextmanager
def _renamed_keys_shown() -> Iterator[None]:
    """Print each warning of renamed keys once, as one line."""
    seen: set[str] = set()
    with warnings.catch_warnings():
        others = warnings.showwarning

        def show(message: Warning | str, category: type[Warning], *where: Any, **line: Any) -> None:
            if not issubclass(category, RenamedKeyWarning):
                others(message, category, *where, **line)
            elif str(message) not in seen:
                seen.add(str(message))
                echo(f"warning: {message}", err=True)

        warnings.showwarning = show
        yield


def _fail(message: str, hint: str | None, code: int) -> None:
    if _debug:
        echo(traceback.format_exc(), err=True, nl=False)
    echo(message, err=True)
    if hint is not None:
        echo(f"hint: {hint}", err=True)
    raise typer.Exit(code) from None

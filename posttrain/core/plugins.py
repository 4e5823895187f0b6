"""Calls of a user's own code: plugins, data sets, graders, reward functions, tools, interactions.

Such code may raise anything, call ``sys.exit``, or break its contract. Here that becomes one ``CodeError`` that names
the user's file and line. Errors that have a message of ours already, Ctrl-C and cancellation pass as they are.
"""

from __future__ import annotations

import functools
import inspect
import math
import os
import sysconfig
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

from posttrain.core.errors import CodeError, PosttrainError

T = TypeVar("T")

_OURS = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep
_PATHS = sysconfig.get_paths()
_LIBRARIES = tuple({_PATHS[name] + os.sep for name in ("stdlib", "platstdlib", "purelib", "platlib")})


@dataclass(frozen=True)
class SourceLine:
    """A line of a user's file."""

    file: str
    line: int

    def __str__(self) -> str:
        """The file relative to the working folder where it lies in it."""
        here = os.getcwd() + os.sep
        return f"{self.file.removeprefix(here)}, line {self.line}"

    @property
    def short(self) -> str:
        """Without the folder: the same on every machine."""
        return f"{os.path.basename(self.file)}, line {self.line}"


def place_of(error: BaseException) -> SourceLine | None:
    """Return the innermost line of a user's file that ``error`` came through, or None if it came through none.

    A syntax error is at the line that cannot be read. Installed packages are not the user's.
    """
    if isinstance(error, SyntaxError) and error.filename and error.lineno and os.path.isfile(error.filename):
        return SourceLine(os.path.abspath(error.filename), error.lineno)
    frames = [(frame.f_code.co_filename, line) for frame, line in traceback.walk_tb(error.__traceback__)]
    own = [(file, line) for file, line in frames if _is_own(file)]
    if own:
        return SourceLine(os.path.abspath(own[-1][0]), own[-1][1])
    return None if error.__cause__ is None else place_of(error.__cause__)


def innermost_is_in_a_file(error: BaseException) -> bool:
    """Return whether an error was raised by a line of a file, and not by code that was made meanwhile (``eval``)."""
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    return bool(frames) and os.path.isfile(frames[-1].f_code.co_filename)


def _is_own(file: str) -> bool:
    return os.path.isfile(file) and not file.startswith((_OURS, *_LIBRARIES))


def definition_of(thing: Any) -> SourceLine | None:
    """Return where a function, a class or the class of an object is defined; None for what is ours, or in no file."""
    thing = inspect.unwrap(thing.func if isinstance(thing, functools.partial) else thing)
    if not (inspect.isroutine(thing) or inspect.isclass(thing)):
        thing = type(thing)
    try:
        file, line = inspect.getsourcefile(thing), inspect.getsourcelines(thing)[1]
    except (OSError, TypeError):
        return None
    return None if file is None or file.startswith(_OURS) else SourceLine(os.path.abspath(file), line)


def described(error: BaseException, of: Any = None) -> str:
    """Return what happened and where: ``KeyError: 'x' (my_task.py, line 12)``.

    Args:
        error: what a user's code raised.
        of: the function or object that was called. Its definition is named where the error came through no line of a
            user's file, as that of a call with arguments that the function does not take.
    """
    place = place_of(error) or (None if of is None else definition_of(of))
    return with_place(_said(error), place)


def with_place(message: str, place: SourceLine | None) -> str:
    """Return a message with the place behind it, where that is known."""
    return f"{message} ({place})" if place else message


def described_briefly(error: BaseException) -> str:
    """Return ``described`` without folders, for a model to read: the text is the same on every machine."""
    place = place_of(error)
    return f"{_said(error)} ({place.short})" if place else _said(error)


@contextmanager
def user_code(what: str, of: Any = None) -> Iterator[None]:
    """Run a user's code in the body.

    Args:
        what: whose code runs, and what it does: the beginning of the message.
        of: as in ``described``.

    Raises:
        CodeError: for whatever the body raises, unless that is a ``PosttrainError``, Ctrl-C or a cancellation.
    """
    try:
        yield
    except PosttrainError:
        raise
    except (SystemExit, Exception) as error:
        raise CodeError(f"{what}: {described(error, of)}", hint=_hint(error)) from error


def expect(result: Any, kind: type[T], what: str, of: Any) -> T:
    """Return ``result``, which a user's code gave, if it is a ``kind``.

    Raises:
        CodeError: it is something else. The message names where ``of`` is defined.
    """
    if isinstance(result, kind):
        return result
    message = f"{what} returned {type(result).__name__}, not {kind.__name__}"
    raise CodeError(with_place(message, definition_of(of)), hint=f"return a {kind.__name__}")


def number_of(value: Any) -> float | None:
    """Return a number that a user's code gave, of Python, numpy or torch, as a float: an infinite one where it is too
    large. None: it is no number."""
    if isinstance(value, str | bytes):
        return None
    try:
        return float(value)
    except OverflowError:
        return math.inf
    except (TypeError, ValueError, RuntimeError):  # the last is torch's, of several numbers
        return None


def _said(error: BaseException) -> str:
    """Return the type and message of an error."""
    if isinstance(error, SystemExit):
        return f"SystemExit: it called sys.exit({'' if error.code is None else repr(error.code)})"
    if isinstance(error, SyntaxError):
        return f"{type(error).__name__}: {error.msg}"
    text = str(error)
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def _hint(error: BaseException) -> str:
    """Return what to do about an error of a user's code."""
    if isinstance(error, SystemExit):
        return "take the call out, or put it under `if __name__ == '__main__':`"
    if isinstance(error, ModuleNotFoundError):
        return "install the module in the environment of posttrain, or correct its name"
    return "correct that code; --debug shows the traceback"

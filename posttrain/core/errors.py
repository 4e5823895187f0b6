"""The errors a person sees: one message, an optional hint, and the exit code the CLI ends with.

``UserError`` (exit 2) is bad input: a file, a key, a value. ``RunError`` (exit 1) is a run that failed for
another reason: a worker died, a deadline passed, weights did not match. A traceback is shown only with ``--debug``.
``Interrupted`` is no error: the user asked for it.
"""

from __future__ import annotations

import errno
import os
import re
import traceback


class PosttrainError(Exception):
    """Base of every error with a message meant for people.

    Args:
        who: the process that failed, as people know it (`actor worker 1`); None: the driver.
    """

    exit_code = 1

    def __init__(self, message: str, *, hint: str | None = None, who: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint
        self.who = who

    def __str__(self) -> str:
        return self.message if self.hint is None else f"{self.message}\nhint: {self.hint}"

    def __reduce__(self) -> tuple[object, ...]:
        # The default reduction would lose `hint`, and these errors cross process boundaries.
        return (_rebuild, (type(self), self.message, self.hint, self.who), {"__notes__": self._notes()})

    def _notes(self) -> list[str]:
        """Return the notes that go to another process: tracebacks cannot, but ``--debug`` shows notes."""
        notes = list(getattr(self, "__notes__", ()))
        if self.__traceback__ is not None:
            notes.append("in another process:\n" + "".join(traceback.format_exception(self)))
        return notes


def _rebuild(cls: type[PosttrainError], message: str, hint: str | None, who: str | None) -> PosttrainError:
    return cls(message, hint=hint, who=who)


class UserError(PosttrainError):
    """Bad input: the user can fix it without reading our code."""

    exit_code = 2


class ConfigError(UserError):
    """A configuration key, value or combination is wrong."""


class CodeError(ConfigError):
    """A user's own code (a plugin, a data set, a reward function, a tool ...) raised, or breaks its contract; see
    ``posttrain.core.plugins``."""


class DataError(UserError):
    """A data file is missing, unreadable, of the wrong schema, or a row in it is."""


class ModelError(UserError):
    """A model or tokenizer cannot be found or loaded."""


class RunError(PosttrainError):
    """A run failed."""


class WorkerError(RunError):
    """A worker process died or raised; the message names it."""


class DeadlineError(RunError):
    """A wait ended without an answer; the message says who did not answer, and for how long."""


class WeightSyncError(RunError):
    """An engine's log-probabilities do not match the trainer's after a weight update."""


PROCESS_FAILURES = (WorkerError, DeadlineError)
"""What a call to a process raises when that has died or does not answer. Other errors are about the request."""


def diverged(what: str, consequence: str) -> RunError:
    """Return the error of weights that training has destroyed.

    Args:
        what: is not finite, as a sentence.
        consequence: what is not done.
    """
    return RunError(
        f"{what}; {consequence}",
        hint="training has diverged: lower train.optim.lr, and begin again from a sound checkpoint with "
        "--resume FOLDER --name NAME",
    )


class Interrupted(Exception):
    """Somebody asked to stop, and the run saved itself: the same command goes on from there.

    Args:
        exit_code: 130 after Ctrl-C; 0 after SIGTERM or SIGHUP, by which a scheduler that will start the job again ends
            it.
    """

    def __init__(self, message: str, *, exit_code: int = 130) -> None:
        super().__init__(message)
        self.exit_code = exit_code


# ---------------------------------------------------------------------- errors of the system

_AGAIN = "then run the same command again"
_FAILED: dict[int, tuple[str, str]] = {
    errno.ENOSPC: ("no room is left on its disk", f"free some room there, {_AGAIN}"),
    errno.EDQUOT: ("the disk quota is used up", f"free some room, {_AGAIN}"),
    errno.EFBIG: ("the file would be larger than is allowed", f"raise the limit (`ulimit -f`), {_AGAIN}"),
    errno.EIO: ("the disk reports an input/output error", f"look at the disk (`dmesg`), {_AGAIN}"),
    errno.ESTALE: ("the network file system has lost the file", f"look at the file system, {_AGAIN}"),
    errno.EMFILE: ("too many files are open", f"raise the limit (`ulimit -n`), {_AGAIN}"),
    errno.ENFILE: ("too many files are open on this machine", f"raise its limit, {_AGAIN}"),
}
"""What ends a run that was right, and what mends it: (reason, hint)."""
_REFUSED: dict[int, tuple[str, str]] = {
    errno.EROFS: ("its file system is read-only", "choose another place"),
    errno.EACCES: ("permission denied", "look at its permissions, or choose another place"),
    errno.EPERM: ("the operation is not permitted there", "look at its permissions, or choose another place"),
    errno.ENAMETOOLONG: ("the name is too long for its file system", "choose a shorter name"),
    errno.ENOTDIR: ("a part of the path is not a folder", "choose another place"),
    errno.EISDIR: ("it is a folder", "choose another name"),
    errno.ENOENT: ("no such file or folder", "check the path"),
    errno.EEXIST: ("a file is in the way", "choose another name"),
    errno.ENOTEMPTY: ("the folder is not empty", "choose another name"),
}
"""What is wrong with a path that somebody gave, likewise."""
_RUST = re.compile(r"\(os error (\d+)\)")
"""How libraries in Rust (tokenizers, safetensors) write the number of an error of the system."""


def first_line(error: BaseException) -> str:
    """Return the first line of an error's message; of one without a message its type."""
    return (str(error).strip() or type(error).__name__).splitlines()[0]


def error_number(error: BaseException | None) -> int | None:
    """Return the system's number of what went wrong with a file, also where a library wrapped it; None: it is something
    else."""
    if error is None or isinstance(error, PosttrainError):
        return None
    if isinstance(error, OSError) and error.errno is not None:
        return error.errno
    if (found := _RUST.search(str(error))) is not None:
        return int(found[1])
    behind = error_number(error.__cause__ or error.__context__)  # torch raises RuntimeError over a full disk
    return behind if behind in _FAILED else None


def explained(
    error: BaseException, target: str | os.PathLike[str] | None = None, *, hint: str | None = None
) -> PosttrainError | None:
    """Return what a person is told of an error of the system: a ``RunError`` where the run was right and the disk was
    not, else a ``ConfigError`` for the path; None: it is no such error.

    Args:
        target: what could not be written; None: the file that the error names, if it names one.
        hint: replaces the hint of a ``ConfigError``, which is about the choice of the path.
    """
    number = error_number(error)
    if number not in _FAILED and number not in _REFUSED:
        return None
    assert number is not None
    reason, mend = _FAILED.get(number) or _REFUSED[number]
    named = getattr(error, "filename", None)
    if target is not None:
        message = f"cannot write {os.fspath(target)}: {reason}"
    else:
        message = f"{os.fsdecode(named)}: {reason}" if isinstance(named, str | bytes) else reason
    return RunError(message, hint=mend) if number in _FAILED else ConfigError(message, hint=hint or mend)


def presented(error: BaseException) -> PosttrainError:
    """Return any exception as the message that a person sees of it."""
    if isinstance(error, PosttrainError):
        return error
    found = explained(error)
    return found or RunError(f"{type(error).__name__}: {error}", hint="run with --debug for the traceback")

"""The errors a person sees: one message, an optional hint, and the exit code the CLI ends with.

``UserError`` (exit 2) is bad input: a file, a key, a value. ``RunError`` (exit 1) is a run that failed for
another reason: a worker died, a deadline passed, weights did not match. A traceback is shown only with ``--debug``.
``Interrupted`` is no error: the user asked for it.
"""

from __future__ import annotations

import traceback


class PosttrainError(Exception):
    """Base of every error with a message meant for people."""

    exit_code = 1

    def __init__(self, message: str, *, hint: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint

    def __str__(self) -> str:
        return self.message if self.hint is None else f"{self.message}\nhint: {self.hint}"

    def __reduce__(self) -> tuple[object, ...]:
        # The default reduction would lose `hint`, and these errors cross process boundaries.
        return (_rebuild, (type(self), self.message, self.hint), {"__notes__": self._notes()})

    def _notes(self) -> list[str]:
        """Return the notes that go to another process: tracebacks cannot, but ``--debug`` shows notes."""
        notes = list(getattr(self, "__notes__", ()))
        if self.__traceback__ is not None:
            notes.append("in another process:\n" + "".join(traceback.format_exception(self)))
        return notes


def _rebuild(cls: type[PosttrainError], message: str, hint: str | None) -> PosttrainError:
    return cls(message, hint=hint)


class UserError(PosttrainError):
    """Bad input: the user can fix it without reading our code."""

    exit_code = 2


class ConfigError(UserError):
    """A configuration key, value or combination is wrong."""


class CodeError(ConfigError):
    """A user's own code (a plugin, a data set, a reward function, a tool ...) raised, or breaks its contract; see
    ``posttrain.usercode``."""


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


class Interrupted(Exception):
    """Somebody asked to stop, and the run saved itself: the same command goes on from there.

    Args:
        exit_code: 130 after Ctrl-C; 0 after SIGTERM, by which a scheduler that will start the job again ends it.
    """

    def __init__(self, message: str, *, exit_code: int = 130) -> None:
        super().__init__(message)
        self.exit_code = exit_code

"""Rows rendered ahead of the trainer, in processes of their own, with the same result however many there are."""

from __future__ import annotations

import contextlib
import os
import pickle
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any, Generic, TypeVar

import numpy as np
import numpy.typing as npt

from posttrain.core.child_process import ChildProcess
from posttrain.core.errors import DeadlineError, PosttrainError, WorkerError
from posttrain.data.images import PlacedImage

IN_FLIGHT = 2
"""Tasks that a worker has at once: one at hand, one waiting."""


@dataclass(frozen=True)
class Row:
    """A row as it lies in its file."""

    file: str
    index: int
    """Its number in the file."""
    columns: dict[str, Any]


@dataclass(frozen=True)
class Rendered:
    """What became of a row. One with no tokens left is left out."""

    ids: npt.NDArray[np.int32]
    """[T]"""
    mask: npt.NDArray[np.bool_]
    """[T] true where the token carries loss"""
    too_long: int = 0
    """Its tokens, where they were more than allowed: it is cut, or left out. Else 0."""
    nothing_to_learn: bool = False
    """It is left out because not one token carries loss, before or after a cut, or its two conversations have the same
    tokens."""
    straddling: int = 0
    """Tokens without loss because they are only in part the assistant's (see ``RenderedChat``)."""
    second: int = 0
    """Index of the first token of the second conversation of a row of two; 0 in a row of one."""
    images: tuple[PlacedImage, ...] = ()
    """Not yet decoded: their pixels take many times the memory of their files."""

    @property
    def left_out(self) -> bool:
        return len(self.ids) == 0

    @staticmethod
    def nothing(*, too_long: int = 0, nothing_to_learn: bool = False) -> Rendered:
        """Return a row that is left out."""
        return Rendered(np.empty(0, np.int32), np.empty(0, np.bool_), too_long, nothing_to_learn)


Render = Callable[[Sequence[Row]], list[Rendered]]
"""Pure, and picklable where it goes to other processes. Raises ``DataError`` for a row that it refuses."""


class Renderer:
    """Renders tasks (a few rows each) in ``workers`` spawned processes; 0: where it is called. Tasks come back in the
    order in which they were given, whichever process is faster.

    ``start`` and ``close`` are the owner's; ``submit`` and ``collect`` belong to one thread, which may be another.
    Waits here have no deadline of their own: ``waiting_for`` says whom they wait for, and ``close`` ends them.
    """

    def __init__(self, render: Render, workers: int) -> None:
        self.waiting_for = ""
        self._render = render
        self._workers = [_Worker(number) for number in range(workers)]
        self._tasks: deque[tuple[_Worker | None, Sequence[Row]]] = deque()
        self._done: deque[list[Rendered]] = deque()
        self._given = 0

    @property
    def full(self) -> bool:
        """Return true if a task has to be collected before the next is given."""
        return len(self._tasks) >= max(1, IN_FLIGHT * len(self._workers))

    def start(self) -> None:
        """Start the processes; they import what they need while the caller goes on."""
        for worker in self._workers:
            worker.start()

    def submit(self, rows: Sequence[Row]) -> None:
        if not self._workers:
            self.waiting_for = _where("the driver", rows)
            self._tasks.append((None, rows))
            self._done.append(self._render(rows))
            return
        worker = self._workers[self._given % len(self._workers)]
        self.waiting_for = _where(f"{worker.name} to take a task", rows)
        if not worker.ready:
            worker.send(self._told())
            worker.ready = True
        worker.send(rows)
        self._given += 1
        self._tasks.append((worker, rows))

    def _told(self) -> bytes:
        """Return the pickled way to render, for a process."""
        try:
            return pickle.dumps(self._render)
        except Exception as error:  # pickle raises whatever the object's own methods do
            raise WorkerError(
                f"the tokenizer cannot be sent to other processes: {type(error).__name__}: {error}",
                hint="set data.workers = 0: then the driver renders",
            ) from error

    def collect(self) -> list[Rendered]:
        """Return the oldest task's rows.

        Raises:
            DataError: a row of it is refused.
            WorkerError: its process died, or raised something else.
        """
        worker, rows = self._tasks.popleft()
        if worker is None:
            return self._done.popleft()
        self.waiting_for = _where(worker.name, rows)
        return worker.receive(rows)

    def close(self) -> None:
        """End all processes, also those at work."""
        for worker in self._workers:
            worker.kill()


class _Worker:
    """The driver's end of one process."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.ready = False
        self._process: ChildProcess | None = None

    @property
    def name(self) -> str:
        pid = self._process.pid if self._process else None
        return f"tokenizer worker {self.number} (process {pid})"

    def start(self) -> None:
        self._process = ChildProcess(_serve, name=f"tokenize-{self.number}")

    def send(self, message: Any) -> None:
        assert self._process is not None, "start() comes first"
        # A process that is dead is reported where its oldest answer is missing, after all that came before.
        with contextlib.suppress(OSError):
            self._process.pipe.send(message)

    def receive(self, rows: Sequence[Row]) -> list[Rendered]:
        assert self._process is not None, "start() comes first"
        try:
            answer = self._process.receive()
        except (EOFError, OSError) as error:
            raise WorkerError(
                f"{_where(self.name, rows)} died (exit code {self._process.exit_code()})",
                hint="was it killed, or out of memory? data.workers = 0 renders in the driver",
            ) from error
        if isinstance(answer, PosttrainError):
            raise answer
        if isinstance(answer, str):
            raise WorkerError(f"{_where(self.name, rows)} failed: {answer}")
        rendered: list[Rendered] = answer
        return rendered

    def kill(self) -> None:
        if self._process is not None:
            self._process.kill()


T = TypeVar("T")


class Ahead(Generic[T]):
    """An endless iterator that a thread follows, ``depth`` items ahead. What it raises comes in its place."""

    def __init__(self, items: Iterator[T], depth: int) -> None:
        self._items = items
        self._queue: queue.Queue[T | BaseException] = queue.Queue(depth)
        self._failure: BaseException | None = None
        self._closed = False
        self._thread = threading.Thread(target=self._follow, name="data", daemon=True)
        self._thread.start()

    def next(self, deadline_s: float, waiting_for: Callable[[], str]) -> T:
        """Return the next item.

        Raises:
            DeadlineError: there was none within ``deadline_s`` seconds; the message says who was being waited for.
        """
        if self._failure is not None:
            raise self._failure
        try:
            item = self._queue.get(timeout=deadline_s)
        except queue.Empty:
            raise DeadlineError(
                f"no training data within data.deadline_s = {deadline_s:g} s: waiting for {waiting_for()}",
                hint="is the file system slow, or the machine out of memory? else raise data.deadline_s",
            ) from None
        if isinstance(item, BaseException):
            self._failure = item
            raise item
        return item

    def close(self, deadline_s: float = 2.0) -> None:
        """End the thread. One that hangs (in a file system, say) is left behind; it ends with the process."""
        self._closed = True
        end = time.monotonic() + deadline_s
        while self._thread.is_alive() and time.monotonic() < end:
            with contextlib.suppress(queue.Empty):  # it may be waiting to put an item
                self._queue.get_nowait()
            self._thread.join(0.02)

    def _follow(self) -> None:
        try:
            for item in self._items:
                self._queue.put(item)
                if self._closed:
                    return
        except Exception as error:
            self._queue.put(error)


def _where(who: str, rows: Sequence[Row]) -> str:
    first = rows[0]
    more = f" and {len(rows) - 1} more" if len(rows) > 1 else ""
    return f"{who}, at {first.file}, row {first.index}{more}"


def _serve(pipe: Connection) -> None:
    """Body of a process: first how to render, then tasks, until the driver closes the pipe."""
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # one core each: their number says how many are used
    messages: queue.SimpleQueue[Any] = queue.SimpleQueue()
    threading.Thread(target=_listen, args=(pipe, messages), daemon=True).start()
    try:
        render: Render = pickle.loads(messages.get())
    except Exception as error:
        pipe.send(f"it cannot be told how to render: {type(error).__name__}: {error}")
        return
    while True:
        rows = messages.get()
        try:
            answer: Any = render(rows)
        except PosttrainError as error:
            answer = error
        except Exception as error:
            answer = f"{type(error).__name__}: {error}"
        pipe.send(answer)


def _listen(pipe: Connection, messages: queue.SimpleQueue[Any]) -> None:
    """Take messages off the pipe at once, so that the driver never waits to send while this process waits to send.
    The end of the pipe is the end of the driver: nobody wants the work any more."""
    while True:
        try:
            messages.put(pipe.recv())
        except (EOFError, OSError):
            os._exit(0)

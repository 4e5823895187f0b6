"""Grading a batch in worker processes, with a deadline for each item.

Cheap graders run in process. The others, and a user's ``reward.function``, run in spawned processes, one item after
the other in each, so that a grader that hangs, dies or takes too much memory costs its own item only: its process is
killed, and another is started when the next item needs it.
"""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import queue
import resource
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from typing import Any

import psutil

from posttrain.config import RewardConfig, SandboxConfig
from posttrain.core.child_process import ChildProcess
from posttrain.core.registry import load_plugins
from posttrain.core.types import Score
from posttrain.rewards import compute_score, failed, is_cheap, raised, set_item_deadline
from posttrain.rewards.custom import RewardFunction, call_function, load_function
from posttrain.sandbox import configure

START_DEADLINE_S = 60.0
"""Longest wait for a grader process to import the plugins. It does not count against the first item."""


_CHUNK = 32
"""Most items that are sent to a grader process at once."""
_LOOK_S = 0.1
"""Between two looks at the memory of a grader process."""
_BEYOND = 1.5
"""Where the kernel refuses allocations, as a multiple of `reward.memory_mb`: libraries take a ``MemoryError`` for an
answer that they cannot read, so a process that grows until it meets one has to have passed its limit before."""


@dataclass(frozen=True)
class GradeItem:
    """The arguments of one ``compute_score`` call."""

    data_source: str
    response: str
    ground_truth: Any
    extra_info: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class GraderSpec:
    """What a grader process needs to know."""

    deadline_s: float
    memory_mb: int
    plugins: tuple[str, ...] = ()
    sandbox: SandboxConfig = field(default_factory=SandboxConfig)
    function: str = ""
    function_kwargs: dict[str, Any] = field(default_factory=dict)


class GraderPool:
    """Grades items over ``reward.workers`` processes, started on demand. Use ``close()`` at the end, or ``with``."""

    def __init__(
        self, reward: RewardConfig | None = None, sandbox: SandboxConfig | None = None, plugins: Sequence[str] = ()
    ) -> None:
        reward = reward or RewardConfig()
        spec = GraderSpec(
            reward.deadline_s,
            reward.memory_mb,
            tuple(plugins),
            sandbox or SandboxConfig(),
            reward.function,
            reward.function_kwargs,
        )
        self.deadline_s = reward.deadline_s
        self._by_table = not reward.function
        self._closed = False
        self._slots: queue.SimpleQueue[_Grader] = queue.SimpleQueue()
        self._graders = [_Grader(spec) for _ in range(reward.workers)]
        for grader in self._graders:
            self._slots.put(grader)
        self._threads = ThreadPoolExecutor(len(self._graders), thread_name_prefix="grade")

    async def grade(self, items: Sequence[GradeItem], *, graded: Callable[[int], None] | None = None) -> list[Score]:
        """The verdicts, in the order of the items. A grader that fails, hangs or dies gives ``Score(error=...)``.

        Args:
            graded: is called with the number of items that are done since the call before.

        Raises:
            ConfigError: no grader is known for an item's data source.
        """
        if self._closed:
            raise RuntimeError("this GraderPool is closed")
        # Looked up for all items first: an unknown data source fails before any work is done.
        sources = {item.data_source for item in items}
        cheap = {source for source in sources if is_cheap(source)} if self._by_table else set()
        away = [i for i, item in enumerate(items) if item.data_source not in cheap]
        verdicts: dict[int, Score] = {}
        if away:
            # Small enough that no worker is left with much to do when the others are done.
            size = max(1, min(_CHUNK, len(away) // (4 * len(self._graders))))
            chunks = [away[i : i + size] for i in range(0, len(away), size)]
            loop = asyncio.get_running_loop()
            work = [[items[i] for i in chunk] for chunk in chunks]

            async def in_worker(chunk: Sequence[GradeItem]) -> list[Score]:
                scores = await loop.run_in_executor(self._threads, self._in_worker, chunk)
                if graded is not None:
                    graded(len(chunk))
                return scores

            found = await asyncio.gather(*map(in_worker, work))
            for chunk, scores in zip(chunks, found, strict=True):
                verdicts |= dict(zip(chunk, scores, strict=True))
        scores = [verdicts[i] if i in verdicts else _by_table(item) for i, item in enumerate(items)]
        if graded is not None:
            graded(len(items) - len(away))
        return scores

    def close(self) -> None:
        """End all grader processes, also those at work."""
        self._closed = True
        for grader in self._graders:
            grader.kill()
        self._threads.shutdown(wait=True, cancel_futures=True)
        # A thread that was about to start a process has done so by now.
        for grader in self._graders:
            grader.kill()

    def __enter__(self) -> GraderPool:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _in_worker(self, items: Sequence[GradeItem]) -> list[Score]:
        grader = self._slots.get()
        verdicts: list[Score] = []
        try:
            while len(verdicts) < len(items):
                if self._closed:
                    return verdicts + [failed("the grader pool was closed")] * (len(items) - len(verdicts))
                verdicts += grader.ask(items[len(verdicts) :], self.deadline_s)
            return verdicts
        finally:
            self._slots.put(grader)


def _by_table(item: GradeItem) -> Score:
    return compute_score(item.data_source, item.response, item.ground_truth, item.extra_info)


class _Grader:
    """One grader process, (re)started when an item needs it."""

    def __init__(self, spec: GraderSpec) -> None:
        self._spec = spec
        self._process: ChildProcess | None = None

    def ask(self, items: Sequence[GradeItem], deadline_s: float) -> list[Score]:
        """The verdicts on the first items: on all, or up to one that ended the process. At least one.

        Items are sent together, and each is given its own deadline: a message there and back costs more than many a
        verdict.
        """
        verdicts: list[Score] = []
        try:
            process = self._process or self._start()
            process.pipe.send(list(items))
            for _ in items:
                verdict = self._wait_verdict(process, deadline_s)
                if isinstance(verdict, str):
                    self.kill()
                    return [*verdicts, failed(verdict, unfinished=True)]
                verdicts.append(
                    verdict if isinstance(verdict, Score) else failed(f"the grader sent {type(verdict).__name__}")
                )
        except (EOFError, OSError):
            code = process.exit_code()
            self.kill()
            return [*verdicts, failed(f"the grader process died (exit code {code})", unfinished=True)]
        except Exception as error:  # an item that cannot be pickled, a process that does not come up
            self.kill()
            if len(items) > 1 and not verdicts:
                return self.ask(items[:1], deadline_s)  # so that it is said of that item only
            return [*verdicts, failed(f"the grader could not be asked: {type(error).__name__}: {error}")]
        return verdicts

    def _wait_verdict(self, process: ChildProcess, deadline_s: float) -> object:
        """Return the verdict; or, as a string, why the process has to be replaced instead.

        Raises:
            EOFError, OSError: the process has died.
        """
        end = time.monotonic() + deadline_s
        while not process.pipe.poll(max(0.0, min(_LOOK_S, end - time.monotonic()))):
            # With a verdict there by now, the process may have been seen at work on the next item.
            if _resident(process) > self._spec.memory_mb << 20 and not process.pipe.poll():
                return _too_much(self._spec)
            if time.monotonic() >= end:
                return f"timed out after {deadline_s:g} s"
        return process.receive()

    def kill(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            process.pipe.close()

    def _start(self) -> ChildProcess:
        """Start a process, and wait until it is ready. What fails is not the doing of the first item.

        Raises:
            RuntimeError: it does not come up.
        """
        try:
            process = self._process = ChildProcess(_serve, self._spec)
            ready = process.receive(START_DEADLINE_S)
        except EOFError:
            raise RuntimeError(f"the grader process died as it started (exit code {process.exit_code()})") from None
        except OSError as error:  # a TimeoutError is one
            raise RuntimeError(f"the grader process did not start: {error}") from error
        if isinstance(ready, str):
            raise RuntimeError(ready)
        return process


def _resident(process: ChildProcess) -> int:
    """Return the bytes of the process's resident set; 0 where it has ended."""
    try:
        return int(psutil.Process(process.pid).memory_info().rss)
    except psutil.NoSuchProcess:
        return 0


def _serve(pipe: Connection, spec: GraderSpec) -> None:
    """Body of a grader process: items in, verdicts out, until the pool closes the pipe."""
    threading.Thread(target=_die_with_parent, daemon=True).start()
    function: RewardFunction | None = None
    try:
        load_plugins(spec.plugins)
        configure(spec.sandbox)
        set_item_deadline(spec.deadline_s)
        function = load_function(spec.function) if spec.function else None
    except Exception as error:
        pipe.send(f"{type(error).__name__}: {error}")
        return
    most = spec.memory_mb << 20
    if _own_memory("VmHWM") > most:
        pipe.send(f"its process {_too_much(spec)} as it started")
        return
    _limit_data(_own_memory("VmData") + int(_BEYOND * most))
    pipe.send(True)
    while True:
        try:
            items = pipe.recv()
        except EOFError:
            return
        for item in items:
            verdict = _verdict(item, function, spec)
            # Seen here and not by the driver, whose looks miss what comes and goes between two of them. A process
            # whose peak passes the limit ends, so the peak is of this item.
            if _own_memory("VmHWM") > most:
                pipe.send(_too_much(spec))
                return
            try:
                pipe.send(verdict)
            except Exception as error:  # parts of a Score that cannot be pickled
                pipe.send(failed(f"the verdict cannot be sent: {type(error).__name__}: {error}"))


def _verdict(item: GradeItem, function: RewardFunction | None, spec: GraderSpec) -> Score:
    try:
        if function is None:
            return _by_table(item)
        row = (item.data_source, item.response, item.ground_truth, item.extra_info)
        return call_function(function, spec.function_kwargs, *row)
    except Exception as error:
        return raised("the grader", error)


def _too_much(spec: GraderSpec) -> str:
    return f"took more memory than reward.memory_mb = {spec.memory_mb}"


def _own_memory(field: str) -> int:
    """Return a size in bytes of /proc/self/status: "VmHWM", the peak of this process's resident set, or "VmData", what
    counts against its ``RLIMIT_DATA``.

    ``ru_maxrss`` is not the peak: a process inherits it from the one that started it.
    """
    with open("/proc/self/status", encoding="utf-8") as file:
        return next(int(line.split()[1]) << 10 for line in file if line.startswith(f"{field}:"))


def _limit_data(most: int) -> None:
    """Let this process have ``most`` bytes of data, after which allocations raise ``MemoryError`` or end it: for what
    grows from one look of the driver to the next, and for one allocation that is too large.

    Not the address space, which has the mapped files of every library and what a GPU's driver reserves. The hard limit
    stays, since programs that are started from here (the sandbox) have limits of their own.
    """
    hard = resource.getrlimit(resource.RLIMIT_DATA)[1]
    soft = most if hard == resource.RLIM_INFINITY else min(most, hard)
    resource.setrlimit(resource.RLIMIT_DATA, (soft, hard))


def _die_with_parent() -> None:
    """A driver that was killed outright closes nothing, and a hanging grader would stay for ever."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)

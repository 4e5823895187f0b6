"""The processes that others wait for: where each one runs, and what can be found out about one that does not answer."""

from __future__ import annotations

import asyncio
import faulthandler
import math
import os
import re
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

import psutil
import ray
import ray.util
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from posttrain.core.errors import RunError
from posttrain.core.quiet import quiet_libraries
from posttrain.core.registry import load_plugins
from posttrain.tracking.log import shorten, take_over, worker_log

T = TypeVar("T")

PULSE = "pulse"
"""Ray's concurrency group, a thread of its own, in which a process answers while it computes in another."""
_PULSE_S = 5.0
"""Who is waited for is asked for its pulse so often."""
_LOOK_S = 8.0
"""Longest look at a process on another node, where a task of Ray has to start for it."""
_STACK_S = 1.0
"""How long a process has to write its stack, and to use the CPU if it works."""
_WORKS = 0.1
"""Share of one CPU that a process uses which works."""
_LOG_LINES = 15
_LOG_BYTES = 16384
_FRAMES = 10
"""Calls that are shown of a thread, besides our own."""
_THREADS = 3


@dataclass(frozen=True)
class Process:
    """A process, as it tells of itself."""

    node: str
    pid: int
    created: float
    """Seconds since 1970. Another process with its number has another."""
    log: str | None
    """The file that its stderr goes to."""
    stacks: int
    """Number of the open file into which it writes where its threads are, at SIGUSR1."""
    oom_kills: int
    """How many processes the kernel there had ended for lack of memory until now."""

    @classmethod
    def current(cls, stacks: int) -> Process:
        """This one."""
        stderr = os.readlink("/proc/self/fd/2")
        return cls(
            str(ray.get_runtime_context().get_node_id()),
            os.getpid(),
            psutil.Process().create_time(),
            stderr if os.path.isfile(stderr) else None,
            stacks,
            _oom_kills(),
        )

    def find(self) -> psutil.Process | None:
        """Where it runs: the process; None when it has ended."""
        try:
            found = psutil.Process(self.pid)
            return found if found.create_time() == self.created else None
        except psutil.NoSuchProcess:
            return None


@dataclass(frozen=True)
class Look:
    """What was found where a process runs."""

    ended: bool = False
    stopped: bool = False
    """By SIGSTOP or a debugger."""
    works: bool = False
    """It uses a CPU."""
    stack: tuple[str, ...] = ()
    """Where its threads are, innermost call first."""
    log: tuple[str, ...] = ()
    """The end of its log."""
    oom_kills: int = 0
    """How many processes the kernel there has ended for lack of memory since this one began."""


@dataclass(frozen=True)
class Home:
    """What our actors share with the driver."""

    folder: str
    """Where it was started: relative paths mean the same everywhere. A worker of a Ray cluster that was there already
    would look for them where Ray was started."""
    plugins: list[str]
    logs: str | None = None
    """The folder that gets their logs; None: Ray keeps them."""
    log: str | None = None
    """The log of this actor."""

    @classmethod
    def of_driver(cls, plugins: list[str], logs: Path | None = None) -> Home:
        """That of this process."""
        return cls(os.getcwd(), plugins, None if logs is None else str(logs))

    def of(self, name: str) -> Home:
        """That of the actor of this name, with a log of its own."""
        return self if self.logs is None else replace(self, log=str(worker_log(Path(self.logs), name)))

    def enter(self) -> None:
        """Go there, take over the log, and import the plugins. Raises ``RunError`` where this node has no such
        folder."""
        quiet_libraries()
        try:
            os.chdir(self.folder)
        except OSError as error:
            raise RunError(
                f"node {ray.util.get_node_ip_address()} has no folder {self.folder}, where the command was started",
                hint="start it in a folder that all nodes share: relative paths are meant from there",
            ) from error
        if self.log is not None:
            take_over(Path(self.log))
        load_plugins(self.plugins)


class Supervised:
    """Base of our actors: a process that answers while it works, and shows where it hangs."""

    def __init__(self, home: Home | None = None) -> None:
        if home is not None:
            home.enter()
        # Written by a handler in C, which waits for nothing that Python may be stuck in. Ray leaves the signal alone.
        stacks = os.memfd_create("stacks")
        faulthandler.register(signal.SIGUSR1, stacks, all_threads=True)
        self._process = Process.current(stacks)

    @ray.method(concurrency_group=PULSE)
    def pulse(self) -> Process:
        """Says at once that this process lives."""
        if self._process.log is not None:
            shorten(Path(self._process.log))
        return self._process


def actor_class(cls: type[Supervised]) -> Any:
    """``cls`` as a class of Ray. All calls but ``pulse`` run in one thread, always the same, which is not the main one;
    those of an async actor on its event loop."""
    return ray.remote(concurrency_groups={PULSE: 1})(cls)  # type: ignore[call-overload]


class Peer:
    """One that is waited for.

    Args:
        name: as people know it.
        actor: its handle, of a ``Supervised`` actor; None: it is none, a placement group for example.
        silence_s: how long it may say nothing.
    """

    def __init__(self, name: str, actor: Any = None, silence_s: float = math.inf) -> None:
        self.name = name
        self.actor = actor
        self.silence_s = silence_s
        self.process: Process | None = None
        """Known once it has been met."""
        self.missed = False
        """Somebody has waited for it in vain. It may not hear either that it is to end."""

    async def silence(self) -> Look | None:
        """Waits until it has given no pulse for ``silence_s`` seconds, and does not work either (a long call into C
        may keep Python from answering). Returns what was found out, as ``look`` does."""
        assert self.process is not None
        every = min(_PULSE_S, self.silence_s / 4)
        look_s = min(_LOOK_S, self.silence_s / 2)
        heard, pulse = time.monotonic(), None
        while True:
            await asyncio.sleep(every)
            if pulse is None or pulse.done():  # with its death, maybe, of which those hear who wait for an answer
                heard, pulse = time.monotonic(), self.actor.pulse.remote().future()
            elif time.monotonic() - heard > self.silence_s - look_s:
                found = await self.look(within_s=look_s)
                await asyncio.sleep(max(0.0, heard + self.silence_s - time.monotonic()))
                if found is not None and found.works:
                    heard = time.monotonic()
                elif not pulse.done():
                    return found

    async def look(self, *, ask: bool = True, within_s: float = _LOOK_S) -> Look | None:
        """Look at its process where it runs; None: not known where, or its node does not answer.

        Args:
            ask: have it show its stack, and see whether it works. That takes a second.
        """
        if self.process is None:
            return None
        return await there(self.process.node, examine, self.process, ask, within_s=within_s)

    async def end(self) -> None:
        """End its process and those that it started. One that is stopped or stuck in the kernel does not hear Ray."""
        if self.process is not None:
            await there(self.process.node, _kill, self.process)
        ray.kill(self.actor)


async def there(node: str, function: Callable[..., T], *args: Any, within_s: float = _LOOK_S) -> T | None:
    """What a function returns on a node, this one or another; None: that node does not answer."""
    if node == _here():
        return await asyncio.to_thread(function, *args)
    strategy = NodeAffinitySchedulingStrategy(node, soft=False)
    task = ray.remote(function).options(num_cpus=0, max_retries=0, scheduling_strategy=strategy)
    try:
        async with asyncio.timeout(within_s):
            result: T = await asyncio.wrap_future(task.remote(*args).future())
            return result
    except (ray.exceptions.RayError, TimeoutError):
        return None


def _here() -> str:
    return str(ray.get_runtime_context().get_node_id())


def _kill(process: Process) -> None:
    if (found := process.find()) is None:
        return
    try:
        family = [found, *found.children(recursive=True)]
    except psutil.NoSuchProcess:  # it has ended meanwhile
        return
    for one in family:
        _signal(one, signal.SIGKILL)


def _signal(process: psutil.Process, number: signal.Signals) -> None:
    """To a process that may have ended."""
    if process.is_running():
        try:
            process.send_signal(number)
        except psutil.NoSuchProcess:
            return


def examine(process: Process, ask: bool) -> Look:
    """``Peer.look``, on the node of the process."""
    log = Path(process.log) if process.log else None
    tail = tail_of(log) if log else ()
    memory = max(0, _oom_kills() - process.oom_kills)
    ended = Look(ended=True, log=tail, oom_kills=memory)
    found = process.find()
    if found is None:
        return ended
    stacks = Path(f"/proc/{process.pid}/fd/{process.stacks}")
    try:  # it may end at any moment
        if found.status() in (psutil.STATUS_STOPPED, psutil.STATUS_TRACING_STOP):
            return Look(stopped=True, log=tail, oom_kills=memory)
        if not ask:
            return Look(log=tail, oom_kills=memory)
        before, size = sum(found.cpu_times()[:2]), stacks.stat().st_size
        _signal(found, signal.SIGUSR1)
        time.sleep(_STACK_S)
        works = sum(found.cpu_times()[:2]) - before > _WORKS * _STACK_S
        stack = stack_in(_from(stacks, size))
    except (psutil.NoSuchProcess, FileNotFoundError):
        return ended
    return Look(works=works, stack=stack, log=tail, oom_kills=memory)


def _from(path: Path, start: int) -> str:
    """The text of a file from a byte on."""
    with path.open("rb") as file:
        file.seek(start)
        return file.read().decode(errors="replace")


def tail_of(path: Path) -> tuple[str, ...]:
    """The last lines of a worker's log, without the marks that Ray writes into it."""
    if not path.is_file():
        return ()
    lines = _from(path, max(0, path.stat().st_size - _LOG_BYTES)).splitlines()
    marks = (":job_id:", ":actor_name:", ":task_name:")
    return tuple(line[:200] for line in lines if line.strip() and not line.startswith(marks))[-_LOG_LINES:]


_FRAME = re.compile(r'  File "(.*)", line (\d+) in (.*)')
_IDLE = re.compile(r"(^|/)(ray|threading\.py|concurrent|asyncio|selectors\.py|queue\.py|tqdm/_monitor\.py)(/|$)")
"""Files of threads that wait for work."""


def stack_in(dump: str) -> tuple[str, ...]:
    """What faulthandler wrote, made short: threads that do something, without Ray's part in them."""
    threads = []
    for block in dump.split("\n\n"):
        frames = [match.groups() for line in block.splitlines() if (match := _FRAME.fullmatch(line))]
        paths = [path.rpartition("site-packages/")[2] for path, _, _ in frames]
        if all(_IDLE.search(path) for path in paths):
            continue
        calls = zip(paths, frames, strict=True)
        shown = [f"{path}:{line} in {name}" for path, (_, line, name) in calls if not path.startswith("ray/")]
        threads.append(shown[:_FRAMES] + [call for call in shown[_FRAMES:] if "posttrain/" in call])
    threads.sort(key=lambda calls: not any("posttrain/" in call for call in calls))
    return tuple("\n\n".join("\n".join(calls) for calls in threads[:_THREADS]).splitlines())


def _oom_kills() -> int:
    """How often the kernel has ended a process for lack of memory since it started."""
    counters = Path("/proc/vmstat")
    found = re.search(r"^oom_kill (\d+)$", counters.read_text(), re.MULTILINE) if counters.is_file() else None
    return int(found[1]) if found else 0

"""Actors and the driver's handles on them: heartbeats, and the diagnosis of a process that does not answer."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
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
from posttrain.core.stacks import stacks_file, write_stacks_at_signal
from posttrain.tracking.log import shorten, take_over, worker_log

T = TypeVar("T")

HEARTBEAT = "heartbeat"
"""Ray's concurrency group, a thread of its own, in which a process answers while it computes in another."""
_HEARTBEAT_S = 5.0
"""Heartbeat interval for actors with a pending call."""
_DIAGNOSIS_S = 8.0
"""Longest diagnosis of a process on another node, where a task of Ray has to start for it."""
_STACK_S = 1.0
"""How long a process has to write its stack, and is looked at to see whether it works."""
_WORKS = 0.1
"""Share of one CPU above which a process counts as working."""
_LOOKS = 10
"""Looks at a process in that time. One with a thread that is ready to run in most of them works as well, though others
leave it no CPU."""
_LOG_LINES = 15
_LOG_BYTES = 16384
_FRAMES = 10
"""Most calls that are shown of a thread, besides those of posttrain."""
_THREADS = 3


@dataclass(frozen=True)
class Process:
    """A process, as it describes itself."""

    node: str
    """Ray's id of its node."""
    pid: int
    created: float
    """Seconds since 1970, which tell it from another process of the same number."""
    log: str | None
    """The file that its stderr goes to."""
    oom_kills: int
    """Processes that the kernel of its node had ended for lack of memory when this one started."""
    address: str
    """Its node's, by which people know that node."""

    @classmethod
    def current(cls) -> Process:
        """Return this process."""
        return cls(
            str(ray.get_runtime_context().get_node_id()),
            os.getpid(),
            psutil.Process().create_time(),
            _stderr(),
            _oom_kills(),
            ray.util.get_node_ip_address(),
        )

    def find(self) -> psutil.Process | None:
        """Return the process, on its node; None when it has ended."""
        try:
            found = psutil.Process(self.pid)
            return found if found.create_time() == self.created else None
        except psutil.NoSuchProcess:
            return None


@dataclass(frozen=True)
class Diagnosis:
    """The state of a process, as seen on its node."""

    ended: bool = False
    stopped: bool = False
    """Stopped by SIGSTOP or a debugger."""
    works: bool = False
    """It uses CPU time, or waits for nothing else."""
    stack: tuple[str, ...] = ()
    """Stacks of its threads, innermost call first, and then those of an engine's own processes."""
    log: tuple[str, ...] = ()
    """The end of its log."""
    oom_kills: int = 0
    """Processes that the kernel of its node has ended for lack of memory since this one started."""


@dataclass(frozen=True)
class ActorContext:
    """The surroundings that an actor takes over from the driver."""

    folder: str
    """The driver's working directory, so that relative paths mean the same everywhere. A worker of an existing Ray
    cluster starts in the directory in which Ray was started."""
    plugins: list[str]
    logs: str | None = None
    """The folder for the actors' logs; None: Ray keeps them."""
    log: str | None = None
    """The log of this actor."""

    @classmethod
    def of_driver(cls, plugins: list[str], logs: Path | None = None) -> ActorContext:
        """Return the context of this process."""
        return cls(os.getcwd(), plugins, None if logs is None else str(logs))

    def of_actor(self, name: str) -> ActorContext:
        """Return the context of the actor ``name``, which has a log of its own."""
        return self if self.logs is None else replace(self, log=str(worker_log(Path(self.logs), name)))

    def enter(self) -> None:
        """Change to the folder, redirect output to the log, and import the plugins. Raises ``RunError`` where this node
        has no such folder."""
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
    """Base of all actors: answers heartbeats while it works, and writes the stacks of its threads at SIGUSR1."""

    def __init__(self, context: ActorContext | None = None) -> None:
        if context is not None:
            context.enter()
        write_stacks_at_signal()
        self._process = Process.current()

    @ray.method(concurrency_group=HEARTBEAT)
    def heartbeat(self) -> Process:
        """Return this process at once, and keep its log short."""
        if self._process.log is not None:
            shorten(Path(self._process.log))
        return self._process

    def write_to(self, log: str) -> Process:
        """Redirect output to a log of the run, whose folder may not have been there when this process started."""
        take_over(Path(log))
        self._process = replace(self._process, log=_stderr())
        return self._process


def _stderr() -> str | None:
    """Return the file that the stderr of this process goes to, if it is one."""
    file = os.readlink("/proc/self/fd/2")
    return file if os.path.isfile(file) else None


def actor_class(cls: type[Supervised]) -> Any:
    """Return ``cls`` as a class of Ray. All calls but ``heartbeat`` run in one thread, always the same, which is not
    the main thread; those of an async actor run on its event loop."""
    # Ray's stubs lack this keyword.
    return ray.remote(concurrency_groups={HEARTBEAT: 1})(cls)  # type: ignore[call-overload]


class ActorHandle:
    """The driver's handle on an actor.

    Args:
        name: in messages.
        actor: Ray's handle of a ``Supervised`` actor; None: something else, for example a placement group.
        silence_s: longest time without a heartbeat.
    """

    def __init__(self, name: str, actor: Any = None, silence_s: float = math.inf) -> None:
        self.name = name
        self.actor = actor
        self.silence_s = silence_s
        self.process: Process | None = None
        """Known once the actor is up."""
        self.unresponsive = False
        """A wait for it has failed. It may not hear Ray's request to end either."""

    async def wait_for_silence(self) -> Diagnosis | None:
        """Return when it has sent no heartbeat for ``silence_s`` seconds, and does not work either (a long call into
        C may keep Python from answering). Returns as ``diagnose``."""
        assert self.process is not None
        every = min(_HEARTBEAT_S, self.silence_s / 4)
        diagnosis_s = min(_DIAGNOSIS_S, self.silence_s / 2)
        heard, heartbeat = time.monotonic(), None
        while True:
            await asyncio.sleep(every)
            if heartbeat is None or heartbeat.done():  # also after its death, which whoever waits for an answer sees
                heard, heartbeat = time.monotonic(), self.actor.heartbeat.remote().future()
            elif time.monotonic() - heard > self.silence_s - diagnosis_s:
                found = await self.diagnose(within_s=diagnosis_s)
                await asyncio.sleep(max(0.0, heard + self.silence_s - time.monotonic()))
                if found is not None and found.works:
                    heard = time.monotonic()
                elif not heartbeat.done():
                    return found

    async def diagnose(self, *, stacks: bool = True, within_s: float = _DIAGNOSIS_S) -> Diagnosis | None:
        """Return the state of its process, seen on its node; None where the node is unknown or does not answer.

        Args:
            stacks: have it write its stacks, and see whether it works. That takes a second.
        """
        if self.process is None:
            return None
        return await run_on_node(self.process.node, diagnose_process, self.process, stacks, within_s=within_s)

    async def kill(self) -> None:
        """Kill its process and those that it started. One that is stopped or stuck in the kernel does not hear Ray."""
        if self.process is not None:
            await run_on_node(self.process.node, _kill, self.process)
        ray.kill(self.actor)


async def run_on_node(node: str, function: Callable[..., T], *args: Any, within_s: float = _DIAGNOSIS_S) -> T | None:
    """Run a function on a node, this one or another, and return its result; None: that node does not answer."""
    if node == str(ray.get_runtime_context().get_node_id()):
        return await asyncio.to_thread(function, *args)
    strategy = NodeAffinitySchedulingStrategy(node, soft=False)
    task = ray.remote(function).options(num_cpus=0, max_retries=0, scheduling_strategy=strategy)
    try:
        async with asyncio.timeout(within_s):
            result: T = await asyncio.wrap_future(task.remote(*args).future())
            return result
    except (ray.exceptions.RayError, TimeoutError):
        return None


def _kill(process: Process) -> None:
    if (found := process.find()) is None:
        return
    try:
        family = [found, *found.children(recursive=True)]
    except psutil.NoSuchProcess:  # it has ended meanwhile
        return
    for member in family:
        _signal(member, signal.SIGKILL)


def _signal(process: psutil.Process, number: signal.Signals) -> None:
    """Send a signal to a process that may have ended."""
    if process.is_running():
        try:
            process.send_signal(number)
        except psutil.NoSuchProcess:
            return


def diagnose_process(process: Process, ask_stacks: bool) -> Diagnosis:
    """Return ``ActorHandle.diagnose``; runs on the node of the process."""
    log = Path(process.log) if process.log else None
    tail = tail_of(log) if log else ()
    memory = max(0, _oom_kills() - process.oom_kills)
    ended = Diagnosis(ended=True, log=tail, oom_kills=memory)
    found = process.find()
    if found is None:
        return ended
    try:  # it may end at any moment
        if found.status() in (psutil.STATUS_STOPPED, psutil.STATUS_TRACING_STOP):
            return Diagnosis(stopped=True, log=tail, oom_kills=memory)
        if not ask_stacks:
            return Diagnosis(log=tail, oom_kills=memory)
        asked = _ask_for_stacks(found)
        others = []
        for child in found.children(recursive=True):
            with contextlib.suppress(psutil.NoSuchProcess):
                others.append((child.name(), _ask_for_stacks(child)))
        works = _works(found)
    except psutil.NoSuchProcess:
        return ended
    stack = _stacks_from(asked)
    if stack is None:
        return ended
    shown = set()
    for name, asked_too in others:
        lines = _stacks_from(asked_too)
        if lines and lines not in shown:  # workers of an engine hang in the same place together
            shown.add(lines)
            stack += (f"in {name}, which it has started:", *lines)
    return Diagnosis(works=works, stack=stack, log=tail, oom_kills=memory)


def _ask_for_stacks(process: psutil.Process) -> tuple[Path, int] | None:
    """Ask a process for its stacks. Returns the file that it writes them into, and from which byte on; None where it
    writes none, or has ended."""
    file = stacks_file(process.pid)
    if file is None:
        return None
    try:
        size = file.stat().st_size
    except FileNotFoundError:
        return None
    _signal(process, signal.SIGUSR1)
    return file, size


def _stacks_from(asked: tuple[Path, int] | None) -> tuple[str, ...] | None:
    """Return what a process that was asked has written, in short; None where it has ended."""
    try:
        return None if asked is None else stack_in(_from(*asked))
    except FileNotFoundError:
        return None


def _works(process: psutil.Process) -> bool:
    """Look at a process for ``_STACK_S`` seconds and return whether it works. Raises ``psutil.NoSuchProcess``."""
    before, ready = sum(process.cpu_times()[:2]), 0
    for _ in range(_LOOKS):
        time.sleep(_STACK_S / _LOOKS)
        ready += any(_is_ready(thread.id) for thread in process.threads())
    return sum(process.cpu_times()[:2]) - before > _WORKS * _STACK_S or ready > 0.8 * _LOOKS


def _is_ready(thread: int) -> bool:
    """Return whether a thread runs, or could."""
    try:
        state = Path(f"/proc/{thread}/stat").read_text(encoding="utf-8", errors="replace").rpartition(") ")[2]
    except (FileNotFoundError, ProcessLookupError):  # it has ended
        return False
    return state.startswith("R")


def _from(path: Path, start: int) -> str:
    """Return the text of a file from byte ``start`` on."""
    with path.open("rb") as file:
        file.seek(start)
        return file.read().decode(errors="replace")


def tail_of(path: Path) -> tuple[str, ...]:
    """Return the last lines of a worker's log, without the marks that Ray writes into it."""
    if not path.is_file():
        return ()
    lines = _from(path, max(0, path.stat().st_size - _LOG_BYTES)).splitlines()
    marks = (":job_id:", ":actor_name:", ":task_name:")
    return tuple(line[:200] for line in lines if line.strip() and not line.startswith(marks))[-_LOG_LINES:]


_FRAME = re.compile(r'  File "(.*)", line (\d+) in (.*)')
_FORK = "posttrain/cluster/forkserver.py"
"""A forked worker's calls from here on are those of the process that it was forked from."""
_IDLE = re.compile(
    r"(^|/)(ray|<frozen runpy>|threading\.py|concurrent|asyncio|selectors\.py|queue\.py|tqdm/_monitor\.py)(/|$)"
)
"""Paths in the stacks of threads that wait for work."""


def stack_in(dump: str) -> tuple[str, ...]:
    """Return the stacks of faulthandler's ``dump`` in short: busy threads only, without Ray's calls."""
    threads = []
    for block in reversed(dump.split("\n\n")):  # the main thread is the last one
        frames = [match.groups() for line in block.splitlines() if (match := _FRAME.fullmatch(line))]
        frames = list(itertools.takewhile(lambda frame: not frame[0].endswith(_FORK), frames))
        paths = [path.rpartition("site-packages/")[2] for path, _, _ in frames]
        if all(_IDLE.search(path) for path in paths):
            continue
        calls = zip(paths, frames, strict=True)
        shown = [f"{path}:{line} in {name}" for path, (_, line, name) in calls if not path.startswith("ray/")]
        threads.append(shown[:_FRAMES] + [call for call in shown[_FRAMES:] if "posttrain/" in call])
    threads.sort(key=lambda calls: not any("posttrain/" in call for call in calls))
    return tuple("\n\n".join("\n".join(calls) for calls in threads[:_THREADS]).splitlines())


def _oom_kills() -> int:
    """Return how many processes the kernel has ended for lack of memory since it booted."""
    counters = Path("/proc/vmstat")
    found = re.search(r"^oom_kill (\d+)$", counters.read_text(), re.MULTILINE) if counters.is_file() else None
    return int(found[1]) if found else 0

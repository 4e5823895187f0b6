"""Processes of ``multiprocessing``, by its method ``spawn``, that have imported before anybody starts them.

An engine starts processes of its own, and some of these others: each is a new Python, which imports torch and the
engine for as long as the one before it has. One that began ahead has imported them by then, and becomes what
``multiprocessing`` would have started: it gets the target with its arguments, the environment and the open files over a
socket, as a process of the method ``forkserver`` does. Unlike those it is not forked, so a library may ask a GPU's
driver for something when it is imported.
"""

from __future__ import annotations

import contextlib
import importlib
import io
import json
import os
import pickle
import signal
import socket
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from multiprocessing import (
    context,
    forkserver,
    popen_fork,
    popen_forkserver,
    popen_spawn_posix,
    reduction,
    resource_tracker,
    spawn,
    util,
)
from multiprocessing.process import BaseProcess

from posttrain.core.cycles import rare_cycle_search

_START = "import json, sys; sys.path[:] = json.loads(sys.argv[1]); from posttrain.core.spawn_ahead import main; main()"
_STREAMS = (1, 2)
_ACCEPTED = b"\x01"
_MOST_FILES = 64
_HANDED_OVER_S = 300.0
"""Longest wait for a process that imports still. Then another is started in its place."""
_READ_AT_START = ("LD_", "PYTHON", "OMP_", "KMP_", "GOMP_", "MKL_", "CUDA_", "TORCH", "PYTORCH_")
"""What variables begin with that a new process, torch or a GPU's driver reads once."""
_READ_LATER = frozenset({"PYTHONBREAKPOINT"})


@dataclass(frozen=True)
class AheadProcess:
    """A process that begins ahead of its need.

    Args:
        target_module: the module of the function that it will run, by which it is recognized.
        imports: modules that it imports meanwhile.
        environment: variables that whoever starts it will have set by then.
        fixed: what else variables begin with that are read once, when those modules are imported.
        free: variables that may differ all the same.
        children: processes that it begins ahead itself.
    """

    target_module: str
    imports: tuple[str, ...]
    environment: Mapping[str, str] = field(default_factory=dict)
    fixed: tuple[str, ...] = ()
    free: tuple[str, ...] = ()
    children: tuple[AheadProcess, ...] = ()


@dataclass(frozen=True)
class _Waiting:
    target_module: str
    described: str
    executable: str | bytes | None
    pid: int
    socket: socket.socket


_waiting: list[_Waiting] = []


def spawn_ahead(processes: Sequence[AheadProcess]) -> None:
    """Begin processes, but those that wait already. From then on ``Process.start`` of the method ``spawn`` takes one of
    them where its target is of that module, or a new one where that began otherwise than a new one would.

    Call it in the thread that lives longest: engines have Linux end their processes with the thread that began them.
    """
    path = json.dumps([os.path.abspath(folder) for folder in sys.path])
    # Private names of multiprocessing, here and below: it has no other way to take part in how it starts processes.
    there = [waiting.described for waiting in _waiting]
    for process in processes:
        described = json.dumps(asdict(process))
        if described in there:
            there.remove(described)
            continue
        tracker = resource_tracker.getfd()
        assert tracker is not None
        ours, theirs = socket.socketpair()
        executable, flags = spawn.get_executable(), util._args_from_interpreter_flags()  # type: ignore[attr-defined]
        own = [described, str(theirs.fileno()), str(tracker)]
        with theirs:
            pid = util.spawnv_passfds(
                os.fsencode(executable), [executable, *flags, "-c", _START, path, *own], [theirs.fileno(), tracker]
            )
        _waiting.append(_Waiting(process.target_module, described, executable, pid, ours))
    context.SpawnProcess._Popen = staticmethod(_start)  # type: ignore[assignment, method-assign]


def end_unused() -> None:
    """End the processes that nobody has taken."""
    while _waiting:
        _end(_waiting.pop())


def _end(waiting: _Waiting) -> None:
    waiting.socket.close()
    with contextlib.suppress(ProcessLookupError, ChildProcessError):  # where the kernel buries the dead by itself
        os.kill(waiting.pid, signal.SIGKILL)
        os.waitpid(waiting.pid, 0)


def _start(process: BaseProcess) -> popen_fork.Popen:
    """Do what ``Process.start`` does, with a process that waits where there is one."""
    module = getattr(getattr(process, "_target", None), "__module__", None)
    for waiting in _waiting:
        if waiting.target_module == module and waiting.executable == spawn.get_executable():
            _waiting.remove(waiting)
            try:
                return _Popen(process, waiting)
            except (OSError, _Refused) as error:
                print(f"{process.name} starts anew: {error}", file=sys.stderr, flush=True)
                _end(waiting)
                break
    return popen_spawn_posix.Popen(process)


class _Refused(Exception):
    """A process that waited is not what a new one would be."""


class _Popen(popen_forkserver.Popen):
    """What ``multiprocessing`` holds of a process that waited. It is a child of this one, as of the method ``spawn``;
    files are passed to it as to one of the method ``forkserver``."""

    method = "spawn"
    _fds: list[int]
    poll = popen_fork.Popen.poll

    def __init__(self, process: BaseProcess, waiting: _Waiting) -> None:
        self._taken = waiting
        super().__init__(process)

    def _launch(self, process: BaseProcess) -> None:
        work = io.BytesIO()
        context.set_spawning_popen(self)
        try:
            reduction.dump(spawn.get_preparation_data(process.name), work)
            reduction.dump(process, work)
        finally:
            context.set_spawning_popen(None)
        connection = self._taken.socket
        connection.settimeout(_HANDED_OVER_S)
        socket.send_fds(connection, [b"\n"], [*_STREAMS, *self._fds])
        connection.sendall(pickle.dumps(dict(os.environ)))
        if (answer := connection.recv(4096)) != _ACCEPTED:
            raise _Refused(answer.decode() or f"process {self._taken.pid} has ended")
        connection.sendall(work.getbuffer())
        connection.settimeout(None)
        self.pid = self._taken.pid
        # The other end is closed when the process ends, and this one tells it that its parent has.
        self.sentinel = connection.fileno()
        self.finalizer = util.Finalize(self, connection.close)


def differing(
    own: Mapping[str, str], wanted: Mapping[str, str], fixed: Sequence[str] = (), free: Sequence[str] = ()
) -> list[str]:
    """Return the variables in which a process that has imported, with the environment ``own``, differs from one that
    would begin with the environment ``wanted``; ``fixed`` and ``free`` as of ``AheadProcess``."""
    once = _READ_AT_START + tuple(fixed)
    names = {name for name in {*own, *wanted} if name.startswith(once)} - _READ_LATER - set(free)
    return sorted(name for name in names if own.get(name) != wanted.get(name))


def main() -> None:
    """Be a process that waits: import, and become the one that is asked for. Ends when nobody asks any more."""
    described, descriptor, tracker = json.loads(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4])
    process = AheadProcess(**described)
    connection = socket.socket(fileno=descriptor)
    os.environ.update(process.environment)
    resource_tracker._resource_tracker._fd = tracker  # type: ignore[attr-defined]
    spawn_ahead([AheadProcess(**child) for child in described["children"]])
    with rare_cycle_search():
        for module in process.imports:
            importlib.import_module(module)
    asked, files, _, _ = socket.recv_fds(connection, 1, _MOST_FILES)
    if not asked:
        return
    with connection.makefile("rb") as given:  # nothing follows before the answer, so that it cannot read too much
        environment: dict[str, str] = pickle.load(given)
    if others := differing(os.environ, environment, process.fixed, process.free):
        connection.sendall(f"others would have set {', '.join(others)}".encode()[:4096])
        return
    connection.sendall(_ACCEPTED)
    os.environ.clear()
    os.environ.update(environment)
    for number, file in zip(_STREAMS, files, strict=False):
        os.dup2(file, number)
        os.close(file)
    forkserver._forkserver._inherited_fds = files[len(_STREAMS) :]  # type: ignore[attr-defined]
    sys.exit(spawn._main(os.dup(descriptor), descriptor))

"""The process inside the sandbox that starts programs: one a slot, started once, so that a run costs less than a fork.

Run by its path with the Python that programs get; stdlib only. ``posttrain.sandbox.local`` holds the other end of the
socket that is its stdin.

    launcher      enters the namespaces, and waits
      zygote      process 1 inside: builds the root, imports common modules, forks each program ahead of time
        program   without privileges, behind the filter of system calls, waits for its job

The zygote is this file once more, executed inside: the kernel ties a process's memory to the user namespace in which it
was executed, and lets nobody of another read how much of it there is.

A job's source, input and output are files in memory whose descriptors pass through the zygote, which never reads them:
a program's memory holds nothing of an earlier program, nor of its own input before it reads it.
"""

from __future__ import annotations

import contextlib
import gc
import json
import os
import resource
import select
import shutil
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Iterator
from typing import Any, NoReturn

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
import cells  # type: ignore[import-not-found]  # found by its path
import harness  # type: ignore[import-not-found]
import isolate  # type: ignore[import-not-found]
import processes  # type: ignore[import-not-found]
import program  # type: ignore[import-not-found]
import syscalls  # type: ignore[import-not-found]

sys.path.pop(0)

_LOOK_S = 0.05
"""Between two looks at the memory of all processes."""
_REST_LOOK_S = 1.0
"""Between two looks at a session that waits for its next cell, whether all its processes are stopped still."""
_STOP_LOOK_S = 0.005
"""Between two looks at processes that are about to stop."""
_STOP_S = 10.0
"""How long processes may take to stop."""
_INTERRUPT_S = 1.0
"""How long a session has to end a cell that was interrupted."""
_PRELOADED = (
    "abc array bisect cmath collections collections.abc copy ctypes dataclasses datetime decimal enum fractions "
    "functools heapq itertools json linecache math operator queue random re string textwrap tokenize typing"
)
_REHEARSAL = """
import io, json, math, re, sys
def f(*args, **kwargs):
    try:
        return [str(a) for a in sorted(args)] + [x for x in kwargs.items()]
    except ValueError as error:
        return {"error": f"{error!r:>10}"}
class C:
    def __init__(self): self.x = {1: 2.5, "a": (None, True)}
out = io.StringIO()
print(f(3, 1, 2, k=C().x), math.sqrt(2), re.match("a+", "aa"), json.dumps([1]), file=out)
"""
_INSIDE = "inside"
"""Second argument of the zygote, which is executed in the namespaces."""
_ENVIRONMENT = {
    "HOME": isolate.WORK,
    "LANG": "C.UTF-8",
    "PATH": "/usr/bin:/bin",
    "TMPDIR": isolate.WORK,
    **dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1"),
}
"""All that a program finds in its environment: no secret of ours is ever in this process."""


_Job = tuple[bytes, list[int], dict[str, Any]]
"""What the driver sends: a message, the descriptors with it, and the message decoded."""


class _Slot:
    """What the zygote knows.

    Args:
        folders: that programs write to; None where nothing is isolated.
        proc: descriptor of the /proc of this process namespace; None where it cannot be read.
    """

    def __init__(
        self, spec: dict[str, Any], folders: isolate.PrivateFolders | None = None, proc: int | None = None
    ) -> None:
        self.work: str = isolate.WORK if folders is not None else spec["work"]
        self.limits: dict[str, int] = spec["limits"]
        self.folders = folders
        self.processes = None if proc is None else processes.Processes(proc)
        self.filter = syscalls.SyscallFilter.find() if folders is not None else None

    @property
    def isolated(self) -> bool:
        return self.folders is not None

    def clean(self) -> None:
        """Remove the state that the next program must not see. No program is alive."""
        if self.folders is None:
            _empty_folder(self.work)
            return
        self.folders.renew()
        if self.filter is None:  # which lets nobody make queues or segments
            isolate.new_ipc()

    def signal_all(self, number: signal.Signals) -> None:
        """Send a signal to every process that the program started; where not isolated, to those that are our own
        children."""
        for pid in [-1] if self.isolated else _children():  # -1: all of this namespace but its first, at one stroke
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)

    def kill_all(self) -> None:
        """End and reap every process that the program started."""
        while True:
            self.signal_all(signal.SIGKILL)  # again where not isolated: children of the dead become ours
            try:
                os.waitpid(-1, 0)
            except ChildProcessError:
                return

    def stop_all(self) -> bool:
        """Stop every process that the program started; whether that is done (``stopped``)."""
        self.signal_all(signal.SIGSTOP)
        return self.stopped()

    def stopped(self) -> bool:
        """Return whether all have stopped and none of them can wake another; where that cannot be read, yes."""
        return self.processes is None or bool(self.processes.stopped())

    def over_memory(self) -> bool:
        """Return whether the programs, with their files, hold more memory than they may."""
        if self.processes is None or self.folders is None:
            return False
        over: bool = self.processes.hold_more_than(self.limits["memory"] - self.folders.used())
        return over


def main() -> None:
    text, *inside = sys.argv[1:]
    spec = json.loads(text)
    control = socket.socket(fileno=os.dup(0))
    if inside:
        slot = _Slot(spec, *_build(control, spec["limits"]["disk"]))
    elif spec["isolated"]:
        _enter(control, text)
    else:
        isolate.adopt_orphans()
        slot = _Slot(spec)
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # process 1 is immune to signals that it does not handle
    _preload()
    _send(control, {"filter": slot.filter is not None, "total_memory": slot.processes is not None})
    _serve(slot, control)


def _enter(control: socket.socket, spec: str) -> NoReturn:
    """Start the zygote as process 1 of new namespaces. The launcher stays outside of the last of them and waits."""
    with _refusal_told(control):
        isolate.leave_keyrings()
        isolate.unshare()
        _send(control, {"map": os.getpid()})
        control.recv(1)  # the driver wrote the id maps
        child = os.fork()
        if child:
            control.close()
            os.close(0)
            _, status = os.waitpid(child, 0)
            os._exit(os.waitstatus_to_exitcode(status) & 0xFF)
        isolate.die_with_parent()
        isolate.keep_capabilities()
        os.execv(sys.executable, [sys.executable, "-I", __file__, spec, _INSIDE])


def _build(control: socket.socket, disk_bytes: int) -> tuple[isolate.PrivateFolders, int | None]:
    with _refusal_told(control):
        below, proc = isolate.build_root()
        return isolate.PrivateFolders(disk_bytes, below), proc


@contextlib.contextmanager
def _refusal_told(control: socket.socket) -> Iterator[None]:
    """Tell the driver which step of the isolation the kernel refused, and end."""
    try:
        yield
    except OSError as error:
        _send(control, {"refused": error.strerror or str(error)})
        os._exit(3)


def _preload() -> None:
    for name in _PRELOADED.split():
        __import__(name)
    os.environ.clear()
    os.environ.update(_ENVIRONMENT)
    gc.collect()
    gc.freeze()  # programs share these pages until they write to them: a collection must not


def _serve(slot: _Slot, control: socket.socket) -> NoReturn:
    """One job after the other, each in a process that was forked before the job came in."""
    while True:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        pid = os.fork()
        if pid == 0:
            ours.close()
            _run_program(slot, theirs)
        theirs.close()
        header, fds, job = _next_job(slot, control)
        with ours:
            if job["kind"] == "cell":
                answer = _serve_session(slot, control, pid, ours, (header, fds, job))
            else:
                started = time.monotonic()
                _pass_on(ours, header, fds)
                event = _watch(slot, control, pid, started + job["deadline_s"])
                answer = _verdict(pid, event, started)
        slot.kill_all()
        _send(control, answer)
        slot.clean()


def _serve_session(slot: _Slot, control: socket.socket, pid: int, cell: socket.socket, job: _Job) -> dict[str, Any]:
    """Pass cells to a process until the driver closes the session or the process ends; the last answer.

    Between cells everything is stopped: what a cell left running costs nothing while the model writes the next one.
    """
    cell.setblocking(False)  # one that takes no cells must not hold us up
    while True:
        header, fds, body = job
        if body["kind"] == "close":
            return {"status": "ok", "exit_code": 0, "seconds": 0.0}
        started = time.monotonic()
        slot.signal_all(signal.SIGCONT)
        try:
            _pass_on(cell, header, fds)
        except OSError:
            return _verdict(pid, "broken", started) | {"session_ended": True}
        event = _watch(slot, control, pid, started + body["deadline_s"], cell)
        interrupted = event == "timeout"
        if interrupted:
            slot.signal_all(signal.SIGINT)
            event = _watch(slot, control, pid, time.monotonic() + _INTERRUPT_S, cell)
        if event != "answered":
            return _verdict(pid, "timeout" if interrupted else event, started) | {"session_ended": True}
        slot.signal_all(signal.SIGSTOP)
        code = cell.recv(1)[0]
        status = "timeout" if interrupted else "error" if code else "ok"
        seconds = time.monotonic() - started
        _send(control, {"status": status, "exit_code": None if interrupted else code, "seconds": seconds})
        _rest(slot, control)
        job = _next_job(slot, control)


def _rest(slot: _Slot, control: socket.socket) -> None:
    """Wait for the driver, with everything stopped. Ends a session that does not stop, or that wakes."""
    poll = select.poll()
    poll.register(control, select.POLLIN)
    end = time.monotonic() + _STOP_S
    while not slot.stop_all():
        if poll.poll(1000 * _STOP_LOOK_S):
            return
        if time.monotonic() > end:
            slot.kill_all()
    while not poll.poll(1000 * _REST_LOOK_S):
        if not slot.stopped():
            slot.kill_all()


def _next_job(slot: _Slot, control: socket.socket) -> _Job:
    """Wait for what the driver wants next."""
    while True:
        header, fds, _, _ = socket.recv_fds(control, 4096, 4)
        if not header:
            slot.kill_all()
            os._exit(0)  # the driver is gone, and with this process goes everything in the namespace
        job = json.loads(header)
        if job["kind"] != "abort":  # that came too late: what it was for has ended
            return header, fds, job


def _pass_on(to: socket.socket, header: bytes, fds: list[int]) -> None:
    """Hand a job to the process that runs it, and keep nothing of it."""
    try:
        socket.send_fds(to, [header], fds)
    finally:
        for fd in fds:
            os.close(fd)


def _watch(slot: _Slot, control: socket.socket, pid: int, deadline: float, cell: socket.socket | None = None) -> str:
    """What comes first: the process ended or answered, a limit (its name), or the driver's wish to abort."""
    ended = os.pidfd_open(pid)
    try:
        poll = select.poll()
        poll.register(ended, select.POLLIN)
        poll.register(control, select.POLLIN)
        if cell is not None:
            poll.register(cell, select.POLLIN)
        while (left := deadline - time.monotonic()) > 0:
            ready = [fd for fd, _ in poll.poll(1000 * min(left, _LOOK_S))]
            if control.fileno() in ready:
                if not control.recv(4096):
                    slot.kill_all()
                    os._exit(0)  # the driver went away: nobody waits for this program
                return "aborted"
            if ended in ready:
                return "ended"
            if cell is not None and cell.fileno() in ready:
                if _says_something(cell):
                    return "answered"
                poll.unregister(cell)  # it closed its end, and is about to end itself
            if slot.over_memory():
                return "memory"
        return "timeout"
    finally:
        os.close(ended)


def _says_something(cell: socket.socket) -> bool:
    try:
        return bool(cell.recv(1, socket.MSG_PEEK))
    except OSError:
        return False


def _verdict(pid: int, event: str, started: float) -> dict[str, Any]:
    """The answer about a process that has ended, or that ``event`` ends."""
    status, code = event, None
    if event == "ended":
        code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        status = "ok" if code == 0 else "error"
    elif event == "broken":  # a session's process that reads no more cells
        status = "error"
    return {"status": status, "exit_code": code, "seconds": time.monotonic() - started}


def _run_program(slot: _Slot, jobs: socket.socket) -> None:
    """The program's own process, from its first instruction to its last: does not return."""
    code = 1
    try:
        _give_up_everything(slot, jobs)
        _touch()
        header, fds, _, _ = socket.recv_fds(jobs, 4096, 4)
        job = json.loads(header)
        if job["kind"] == "cell":
            cells.serve(jobs, fds, slot.work)
            os._exit(0)
        jobs.close()
        for target, fd in enumerate(fds[1:]):
            os.dup2(fd, target)
        source = _read_file(fds[0])
        os.closerange(3, 64)
        _limit(resource.RLIMIT_CPU, int(job["deadline_s"]) + 1)
        harness.open_streams()
        if job["kind"] == "harness":
            harness.main()
            code = 0
        else:
            name = f"{slot.work}/main.py"
            with open(name, "wb") as file:  # processes that the program spawns run it again
                file.write(source)
            text = source.decode("utf-8", "surrogateescape")
            code = program.execute(text, program.new_main(name), name, echo=job["echo"])
    except BaseException:
        traceback.print_exc()
    finally:
        program.finish(code)


def _give_up_everything(slot: _Slot, jobs: socket.socket) -> None:
    os.setsid()
    os.dup2(jobs.fileno(), 3)
    jobs.detach()
    os.closerange(4, 1024)
    jobs.__init__(fileno=3)  # type: ignore[misc]  # the same object, on the only descriptor that is left
    os.chdir(slot.work)
    limits = slot.limits
    for kind, value in (
        (resource.RLIMIT_AS, limits["memory"]),
        (resource.RLIMIT_DATA, limits["memory"]),  # whoever opened the sandbox may have one of its own
        (resource.RLIMIT_FSIZE, limits["file"]),
        (resource.RLIMIT_NPROC, limits["processes"]),
        (resource.RLIMIT_NOFILE, 256),
        (resource.RLIMIT_CORE, 0),
    ):
        _limit(kind, value)
    isolate.drop_privileges(isolated=slot.isolated)
    if slot.filter is not None:
        slot.filter.install()
    if not slot.isolated:
        os.environ.update(HOME=slot.work, TMPDIR=slot.work)
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)  # a file that is too large is an OSError that a program can read
    signal.signal(signal.SIGINT, signal.default_int_handler)
    sys.path.insert(0, slot.work)


def _touch() -> None:
    """Do once what every program does: the pages that this copies are not copied when a job is waiting."""
    harness.open_streams()
    program.execute(_REHEARSAL, program.new_main("main.py"), "main.py", echo=True)
    sys.stdin, sys.stdout, sys.stderr = sys.__stdin__, sys.__stdout__, sys.__stderr__
    del sys.modules["__main__"]
    sys.modules["random"].seed()


def _limit(kind: int, value: int) -> None:
    hard = resource.getrlimit(kind)[1]
    value = value if hard == resource.RLIM_INFINITY else min(value, hard)
    resource.setrlimit(kind, (value, value))


def _read_file(fd: int) -> bytes:
    return os.pread(fd, os.fstat(fd).st_size, 0)


def _children() -> list[int]:
    with open(f"/proc/self/task/{threading.get_native_id()}/children") as file:
        return [int(pid) for pid in file.read().split()]


def _empty_folder(folder: str) -> None:
    for entry in os.scandir(folder):
        if entry.is_dir(follow_symlinks=False):
            shutil.rmtree(entry.path, ignore_errors=True)
        else:
            os.unlink(entry.path)


def _send(control: socket.socket, message: dict[str, Any]) -> None:
    try:
        control.send(json.dumps(message).encode())
    except OSError:
        os._exit(0)  # the driver is gone


if __name__ == "__main__":
    main()

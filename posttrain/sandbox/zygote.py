"""The process inside the sandbox that starts programs: one a slot, started once, so that a run costs less than a fork.

Run by its path with the Python that programs get; stdlib only. ``posttrain.sandbox.local`` holds the other end of the
socket that is its stdin.

    launcher      enters the namespaces, and waits
      zygote      process 1 inside: builds the root, imports common modules, forks each program ahead of time
        program   without privileges, waits for its job

A job's source, input and output are files in memory whose descriptors pass through the zygote, which never reads them:
a program's memory holds nothing of an earlier program, nor of its own input before it reads it.
"""

from __future__ import annotations

import atexit
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
import types
from typing import Any, NoReturn

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
import harness  # type: ignore[import-not-found]  # found by its path
import isolate  # type: ignore[import-not-found]

sys.path.pop(0)

_LOOK_S = 0.05
"""Between two looks at the memory of all processes."""
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
_ENVIRONMENT = {
    "HOME": isolate.WORK,
    "LANG": "C.UTF-8",
    "PATH": "/usr/bin:/bin",
    "TMPDIR": isolate.WORK,
    **dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1"),
}
"""All that a program finds in its environment: no secret of ours is ever in this process."""


class _Slot:
    """What the zygote knows."""

    def __init__(self, spec: dict[str, Any], proc: int | None) -> None:
        self.isolated: bool = spec["isolated"]
        self.work: str = isolate.WORK if self.isolated else spec["work"]
        self.limits: dict[str, int] = spec["limits"]
        self.proc = proc

    def clean(self) -> None:
        """Remove the state that the next program must not see. No program is alive."""
        if not self.isolated:
            _empty_folder(self.work)
            return
        if os.listdir(self.work):
            isolate.drop_work()
            isolate.fresh_work(self.limits["disk"])
        isolate.new_ipc()

    def kill_all(self) -> None:
        """End and reap every process that the program started."""
        if self.isolated:
            with contextlib.suppress(ProcessLookupError):
                os.kill(-1, signal.SIGKILL)  # all of this process namespace but its first, at one stroke
        while True:
            if not self.isolated:
                for child in _children():
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(child, signal.SIGKILL)
            try:
                os.waitpid(-1, 0)
            except ChildProcessError:
                return

    def memory(self) -> int:
        """Resident bytes of all programs, 0 where they cannot be read."""
        if self.proc is None:
            return 0
        pages = 0
        for name in os.listdir(self.proc):
            if name.isdigit() and name != "1":
                with contextlib.suppress(OSError):
                    fd = os.open(f"{name}/statm", os.O_RDONLY, dir_fd=self.proc)
                    try:
                        pages += int(os.read(fd, 256).split()[1])
                    finally:
                        os.close(fd)
        return pages * resource.getpagesize()


def main() -> None:
    spec = json.loads(sys.argv[1])
    control = socket.socket(fileno=os.dup(0))
    proc = None
    if spec["isolated"]:
        proc = _enter(control, spec["limits"]["disk"])
    else:
        isolate.adopt_orphans()
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # process 1 is immune to signals that it does not handle
    _preload()
    slot = _Slot(spec, proc)
    _send(control, {"ready": True, "total_memory": proc is not None})
    _serve(slot, control)


def _enter(control: socket.socket, disk_bytes: int) -> int | None:
    """Become process 1 of new namespaces; the launcher stays outside of the process namespace and waits."""
    try:
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
        proc: int | None = isolate.build_root(disk_bytes)
        return proc
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
        header, fds, _, _ = socket.recv_fds(control, 4096, 4)
        if not header:
            os._exit(0)  # the driver is gone, and with this process goes everything in the namespace
        started = time.monotonic()
        socket.send_fds(ours, [header], fds)
        ours.close()
        for fd in fds:
            os.close(fd)
        job = json.loads(header)
        status = _watch(slot, control, pid, started + job["deadline_s"])
        code = None
        if status is None:
            code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
            status = "ok" if code == 0 else "error"
        slot.kill_all()
        _send(control, {"status": status, "exit_code": code, "seconds": time.monotonic() - started})
        slot.clean()


def _watch(slot: _Slot, control: socket.socket, pid: int, deadline: float) -> str | None:
    """Wait until the program ends (None) or breaks a limit (its name)."""
    ended = os.pidfd_open(pid)
    try:
        poll = select.poll()
        poll.register(ended, select.POLLIN)
        poll.register(control, select.POLLIN)
        while (left := deadline - time.monotonic()) > 0:
            for fd, _ in poll.poll(1000 * min(left, _LOOK_S)):
                if fd == ended:
                    return None
                slot.kill_all()
                os._exit(0)  # the driver went away: nobody waits for this program
            if slot.memory() > slot.limits["memory"]:
                return "memory"
        return "timeout"
    finally:
        os.close(ended)


def _run_program(slot: _Slot, jobs: socket.socket) -> NoReturn:
    """The program's own process, from its first instruction to its last."""
    code = 1
    try:
        _give_up_everything(slot, jobs)
        _touch()
        header, fds, _, _ = socket.recv_fds(jobs, 4096, 4)
        jobs.close()
        job = json.loads(header)
        for target, fd in enumerate(fds[1:]):
            os.dup2(fd, target)
        source = _read_file(fds[0])
        os.closerange(3, 64)
        _limit(resource.RLIMIT_CPU, int(job["deadline_s"]) + 1)
        harness.open_streams()
        if job["harness"]:
            harness.main()
            code = 0
        else:
            code = _execute(source.decode("utf-8", "surrogateescape"), slot.work)
    except BaseException:
        traceback.print_exc()
    finally:
        _finish(code)


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
        (resource.RLIMIT_FSIZE, limits["file"]),
        (resource.RLIMIT_NPROC, limits["processes"]),
        (resource.RLIMIT_NOFILE, 256),
        (resource.RLIMIT_CORE, 0),
    ):
        _limit(kind, value)
    isolate.drop_privileges(isolated=slot.isolated)
    if not slot.isolated:
        os.environ.update(HOME=slot.work, TMPDIR=slot.work)
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)  # a file that is too large is an OSError that a program can read
    signal.signal(signal.SIGINT, signal.default_int_handler)
    sys.path.insert(0, slot.work)


def _touch() -> None:
    """Do once what every program does: the pages that this copies are not copied when a job is waiting."""
    harness.open_streams()
    _execute(_REHEARSAL, ".")
    sys.stdin, sys.stdout, sys.stderr = sys.__stdin__, sys.__stdout__, sys.__stderr__
    del sys.modules["__main__"]
    sys.modules["random"].seed()


def _limit(kind: int, value: int) -> None:
    hard = resource.getrlimit(kind)[1]
    value = value if hard == resource.RLIM_INFINITY else min(value, hard)
    resource.setrlimit(kind, (value, value))


def _read_file(fd: int) -> bytes:
    return os.pread(fd, os.fstat(fd).st_size, 0)


def _execute(source: str, folder: str) -> int:
    """Run a program as ``__main__``; its exit code."""
    name = f"{folder}/main.py"
    main_module = types.ModuleType("__main__")
    main_module.__dict__.update(__builtins__=__builtins__, __file__=name)
    sys.modules["__main__"] = main_module
    sys.argv = [name]
    lines = sys.modules["linecache"]
    lines.cache[name] = (len(source), None, source.splitlines(keepends=True), name)
    try:
        exec(compile(source, name, "exec", dont_inherit=True), main_module.__dict__)
    except SystemExit as stop:
        if stop.code is None or isinstance(stop.code, int):
            return stop.code or 0
        print(stop.code, file=sys.stderr)
        return 1
    except BaseException as error:
        shown = error.__traceback__.tb_next if error.__traceback__ else None  # from the program's own first line
        traceback.print_exception(type(error), error, shown)
        return 1
    return 0


def _finish(code: int) -> NoReturn:
    """End as the interpreter would (threads, exit functions, buffers), without the milliseconds of taking it apart."""
    try:
        threading._shutdown()  # type: ignore[attr-defined]  # waits for threads, as the interpreter's own end does
        atexit._run_exitfuncs()
    except BaseException:
        traceback.print_exc()
        code = code or 1
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except (OSError, ValueError, AttributeError):
            code = code or 1
    os._exit(code & 0xFF)


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

"""A sandbox on this machine: the driver's side of one slot (``zygote.py`` is the other)."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from posttrain.config import SandboxConfig
from posttrain.sandbox import isolate
from posttrain.sandbox.base import RunResult, SandboxError, SandboxUnavailable, Session

_ZYGOTE = Path(__file__).with_name("zygote.py")
_START_S = 30.0
"""Longest wait for a slot to come up."""
_SLACK_S = 10.0
"""How much longer than its deadline a program's verdict may take: killing many processes takes a while."""
_MB = 1 << 20
_GAPS = {
    "filter": "no filter of system calls: the kernel or this architecture has no seccomp",
    "total_memory": "memory is limited by process and not in sum: /proc is masked",
}
"""What the lack of each part means, which a slot says that it has."""
_HINT = (
    "use a machine with user namespaces (in a container: its seccomp profile decides), a SandboxFusion service (--set "
    "sandbox.mode=remote --set sandbox.url=URL), or, for code that you trust, --set sandbox.allow_unisolated=true"
)


class LocalSandbox:
    """One warm slot. Starting it takes some 100 ms, and each run about a millisecond.

    Raises:
        SandboxUnavailable: the kernel isolates nothing, and ``sandbox.allow_unisolated`` is false.
    """

    def __init__(self, cfg: SandboxConfig) -> None:
        self.cfg = cfg
        self.isolated = True
        self.gaps: tuple[str, ...] = ()
        self._process: subprocess.Popen[bytes] | None = None
        self._control: socket.socket | None = None
        self._work: str | None = None
        try:
            self._start()
        except SandboxUnavailable:
            if not cfg.allow_unisolated:
                raise
            self.isolated = False
            self._start()

    def run(
        self,
        code: str,
        stdin: str = "",
        *,
        deadline_s: float | None = None,
        echo: bool = False,
        answer_s: float | None = None,
    ) -> RunResult:
        job = {"kind": "program", "echo": echo, "deadline_s": deadline_s or self.cfg.deadline_s}
        return self._run(job, code, stdin.encode("utf-8", "surrogateescape"), answer_s)

    def run_harness(self, frames: bytes, *, deadline_s: float, answer_s: float | None = None) -> RunResult:
        return self._run({"kind": "harness", "deadline_s": deadline_s}, "", frames, answer_s)

    def session(self) -> Session:
        return LocalSession(self)

    def abort(self) -> None:
        control = self._control
        if control is not None:
            with contextlib.suppress(OSError):  # it is closed at this moment: then nothing runs any more
                control.send(_message({"kind": "abort"}))

    def close(self) -> None:
        control, self._control = self._control, None
        if control is not None:
            control.close()  # the slot ends by itself, with all that runs in it
        process, self._process = self._process, None
        if process is not None:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(5.0)
            process.kill()
            process.wait()
            assert process.stderr is not None
            process.stderr.close()
        work, self._work = self._work, None
        if work is not None:
            shutil.rmtree(work, ignore_errors=True)

    def run_cell(self, code: str, deadline_s: float) -> RunResult:
        """Run a cell of the session that has this slot; the first one starts it. For ``LocalSession``."""
        job = {"kind": "cell", "deadline_s": deadline_s}
        try:
            return self._exchange(job, [_source(code), *_outputs()])
        except (OSError, EOFError):
            return self._died()

    def end_session(self) -> None:
        """Free the slot of its session. For ``LocalSession``."""
        if self._control is None:
            return
        try:
            self._exchange({"kind": "close", "deadline_s": 0.0}, [])
        except (OSError, EOFError, SandboxError):
            self.close()  # with the slot goes all that is in it, and the next run starts another

    def _run(self, job: dict[str, Any], code: str, stdin: bytes, answer_s: float | None) -> RunResult:
        for _ in range(2):
            try:
                return self._exchange(job, [_source(code), _memory_file("stdin", stdin), *_outputs()], answer_s)
            except (OSError, EOFError):
                self.close()
        return self._died()

    def _died(self) -> RunResult:
        self.close()
        if self.isolated:  # out of a program's reach: the machine is out of memory, or somebody kills our processes
            raise SandboxError("the sandbox died while it ran a program", hint="is the machine out of memory?")
        return RunResult("error", None, "", "the program ended the sandbox that ran it", 0.0, session_ended=True)

    def _exchange(self, job: dict[str, Any], files: list[int], answer_s: float | None = None) -> RunResult:
        """Send a job with its files, and wait for what became of it. The last two files are stdout and stderr.

        Raises:
            SandboxError: no answer in time.
            OSError, EOFError: the slot died.
        """
        seconds = job["deadline_s"] + _SLACK_S if answer_s is None else answer_s
        deadline = time.monotonic() + seconds
        try:
            if self._control is None:
                self._start()
            assert self._control is not None
            self._control.settimeout(max(0.001, deadline - time.monotonic()))
            socket.send_fds(self._control, [_message(job)], files)
            return self._result(self._receive(deadline), files[-2:])
        except TimeoutError as error:
            self.close()
            late = f"the sandbox did not answer within {seconds:.3g} s"
            raise SandboxError(late, hint="is the machine overloaded?") from error
        finally:
            for fd in files:
                _empty_for_good(fd)
                os.close(fd)

    def _result(self, answer: dict[str, Any], outputs: list[int]) -> RunResult:
        limit = self.cfg.output_kb * 1024
        sizes = [os.fstat(fd).st_size for fd in outputs]
        out, err = (os.pread(fd, limit, 0).decode("utf-8", "replace") for fd in outputs) if outputs else ("", "")
        status, code = answer["status"], answer["exit_code"]
        if status in ("ok", "error") and max(sizes, default=0) > limit:
            status, code = "output", None
        return RunResult(status, code, out, err, answer["seconds"], answer.get("session_ended", False))

    def _start(self) -> None:
        if not sys.platform.startswith("linux"):
            raise SandboxUnavailable(f"the local sandbox needs Linux, this is {sys.platform}", hint=_HINT)
        cfg = self.cfg
        if not self.isolated:
            self._work = tempfile.mkdtemp(prefix="posttrain-sandbox-")
        limits = {
            "memory": cfg.memory_mb * _MB,
            "file": max(cfg.file_mb * _MB, 2 * cfg.output_kb * 1024),  # stdout is a file too
            "processes": cfg.processes,
            "disk": cfg.disk_mb * _MB,
        }
        spec = {"isolated": self.isolated, "work": self._work, "limits": limits}
        self._control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        # No secret of ours; and threads share their heap: with 64 MB of addresses for each, `memory` is soon used up.
        environment = {"MALLOC_ARENA_MAX": "1"}
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-I", str(_ZYGOTE), json.dumps(spec)],
                stdin=theirs.fileno(),
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                env=environment,
                start_new_session=True,
            )
        try:
            self._greet(time.monotonic() + _START_S)
        except (OSError, EOFError) as error:
            said = self._last_words()
            self.close()
            raise SandboxError(f"the sandbox did not start: {said or error}") from error
        except BaseException:
            self.close()
            raise

    def _greet(self, deadline: float) -> None:
        message = self._receive(deadline)
        if "map" in message:
            try:
                isolate.map_ids(message["map"])
            except isolate.IsolationError as error:
                raise SandboxUnavailable(f"no program can be isolated here: {error.strerror}", hint=_HINT) from error
            assert self._control is not None
            self._control.send(b"\0")
            message = self._receive(deadline)
        if "refused" in message:
            raise SandboxUnavailable(f"no program can be isolated here: {message['refused']}", hint=_HINT)
        self.gaps = tuple(text for name, text in _GAPS.items() if not message[name])

    def _receive(self, deadline: float) -> dict[str, Any]:
        assert self._control is not None
        self._control.settimeout(max(0.001, deadline - time.monotonic()))
        data = self._control.recv(4096)
        if not data:
            raise EOFError("it ended")
        message: dict[str, Any] = json.loads(data)
        return message

    def _last_words(self) -> str:
        assert self._process is not None
        assert self._process.stderr is not None
        self._process.kill()
        return self._process.stderr.read().decode("utf-8", "replace")[-2000:]


class LocalSession:
    """Cells in one process of a slot."""

    def __init__(self, sandbox: LocalSandbox) -> None:
        self._sandbox = sandbox
        self._alive = False

    def run(self, code: str, *, deadline_s: float | None = None) -> RunResult:
        try:
            result = self._sandbox.run_cell(code, deadline_s or self._sandbox.cfg.deadline_s)
        except BaseException:
            self._alive = False
            self._sandbox.close()  # nobody knows what is left of the session: the slot's next user must not meet it
            raise
        self._alive = not result.session_ended
        return result

    def close(self) -> None:
        if self._alive:
            self._alive = False
            self._sandbox.end_session()


def _message(job: dict[str, Any]) -> bytes:
    return json.dumps(job).encode()


def _source(code: str) -> int:
    # Python says itself what is wrong with a program that is not UTF-8.
    return _memory_file("source", code.encode("utf-8", "surrogatepass"))


def _outputs() -> list[int]:
    return [_memory_file("out"), _memory_file("err")]


def _empty_for_good(fd: int) -> None:
    """Give back the memory of a file that a session's process may keep open."""
    with contextlib.suppress(PermissionError):  # where nothing filters it, a program can seal a file as it is
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_GROW)
        os.ftruncate(fd, 0)


def _memory_file(name: str, data: bytes = b"") -> int:
    fd = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    view = memoryview(data)
    while view:
        view = view[os.write(fd, view) :]
    os.lseek(fd, 0, os.SEEK_SET)
    return fd

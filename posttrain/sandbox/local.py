"""A sandbox on this machine: the driver's side of one slot (``zygote.py`` is the other)."""

from __future__ import annotations

import contextlib
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
from posttrain.sandbox.base import RunResult, SandboxError, SandboxUnavailable

_ZYGOTE = Path(__file__).with_name("zygote.py")
_START_S = 30.0
"""Longest wait for a slot to come up."""
_SLACK_S = 10.0
"""How much longer than its deadline a program's verdict may take: killing many processes takes a while."""
_MB = 1 << 20
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

    def run(self, code: str, stdin: str = "", *, deadline_s: float | None = None) -> RunResult:
        return self._run(code, stdin.encode("utf-8", "surrogateescape"), deadline_s or self.cfg.deadline_s)

    def run_harness(self, frames: bytes, *, deadline_s: float) -> RunResult:
        return self._run(None, frames, deadline_s)

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

    def _run(self, code: str | None, stdin: bytes, deadline_s: float) -> RunResult:
        header = json.dumps({"deadline_s": deadline_s, "harness": code is None}).encode()
        source = (code or "").encode("utf-8", "surrogateescape")
        for _ in range(2):
            if self._control is None:
                self._start()
            files = [_memory_file("source", source), _memory_file("stdin", stdin), *map(_memory_file, ("out", "err"))]
            try:
                return self._exchange(header, files, time.monotonic() + deadline_s + _SLACK_S)
            except TimeoutError as error:
                self.close()
                late = f"the sandbox did not answer {_SLACK_S:g} s after a program's deadline"
                raise SandboxError(late, hint="is the machine overloaded?") from error
            except (OSError, EOFError):
                self.close()
            finally:
                for fd in files:
                    os.close(fd)
        if self.isolated:  # out of a program's reach: the machine is out of memory, or somebody kills our processes
            raise SandboxError("the sandbox died twice while it ran a program", hint="is the machine out of memory?")
        return RunResult("error", None, "", "the program ended the sandbox that ran it", 0.0)

    def _exchange(self, header: bytes, files: list[int], deadline: float) -> RunResult:
        assert self._control is not None
        self._control.settimeout(deadline - time.monotonic())
        socket.send_fds(self._control, [header], files)
        answer = self._receive(deadline)
        limit = self.cfg.output_kb * 1024
        sizes = [os.fstat(fd).st_size for fd in files[2:]]
        out, err = (os.pread(fd, limit, 0).decode("utf-8", "replace") for fd in files[2:])
        status, code = answer["status"], answer["exit_code"]
        if status in ("ok", "error") and max(sizes) > limit:
            status, code = "output", None
        return RunResult(status, code, out, err, answer["seconds"])

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
        nothing: dict[str, str] = {}  # an environment without any secret of ours
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-I", str(_ZYGOTE), json.dumps(spec)],
                stdin=theirs.fileno(),
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                env=nothing,
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


def _memory_file(name: str, data: bytes = b"") -> int:
    fd = os.memfd_create(name)
    view = memoryview(data)
    while view:
        view = view[os.write(fd, view) :]
    os.lseek(fd, 0, os.SEEK_SET)
    return fd

"""Tests a solution without trusting it: the tests run in one process, the solution in another.

Runs inside a sandbox, as the program; stdlib only. docs/sandbox.md has the argument why no solution can forge a
verdict:

    the tests' process      this file; ``reading`` and ``effects`` say what a test means, ``proxy`` asks the solution
      fork server           ``serving``; forked before the tests are read
        solution            ``serving``; runs the solution, and is started again when it has ended

Where nothing is started again, the process that is forked before the tests are read is the solution's.

``wire`` is what passes between the first and the last: plain data.

Stdin holds two frames (a line with the number of bytes, then the bytes) of JSON: the solution, ``prelude`` and
``source``, which run one after the other in one namespace, and ``once``, whether the first process of it that ends ends
the tests; and, read by the tests' process alone,

    secret      comes back with the verdict
    setup       source run before each test
    tested      the only name in tests that is the solution's; null: those that neither a test nor the library defines
    tests       sources, or calls: objects with ``entry``, ``args``, ``expected`` and ``wrapped`` (whether a list of one
                stands for its item too)
    deadline_s  for one test
    budget_s    for all of them; when it is used up, the tests that are left are timeouts
    stop        whether the first test that does not pass ends it

Stdout is one JSON object: ``secret``, and ``results``, an object for each test that ran with ``status`` (passed,
failed, error, timeout) and ``detail``; or ``refused``, why nothing could be run.
"""

from __future__ import annotations

import ast
import builtins
import ctypes
import functools
import io
import json
import os
import reprlib
import signal
import socket
import struct
import sys
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from posttrain.sandbox import effects, proxy, reading, same, serving
    from posttrain.sandbox.wire import SolutionEnded, SolutionTimeout
else:
    import effects
    import proxy
    import reading
    import same
    import serving
    from wire import SolutionEnded, SolutionTimeout

for _part in ("effects", "proxy", "reading", "same", "serving", "wire"):
    sys.modules.pop(_part, None)  # a program that has a module of such a name must find its own

_libc = ctypes.CDLL(None)
_PR_SET_DUMPABLE = 4
_FIRST_START_S = 5.0
"""How long the first process may take to be forked, where a test's deadline is shorter."""
_DETAILS = 50
"""Tests whose failure is described: more would not fit into what a program may write."""


def main() -> None:
    _libc.prctl(_PR_SET_DUMPABLE, 0, 0, 0, 0)  # the solution has our user id: it must not attach to us
    solution = json.loads(_read_stdin_frame())
    ours, theirs = socket.socketpair()
    try:
        pid = os.fork()
        refused = ""
    except OSError as error:
        pid, refused = -1, f"no process for the solution: {error.strerror}"
    if pid == 0:
        ours.close()
        _leave_input_and_output()
        if solution["once"]:
            serving.serve(theirs, open_streams)
        serving.fork_solutions(theirs, open_streams)
    theirs.close()
    job = json.loads(_read_stdin_frame())
    verdict = _shut_off()
    answer: dict[str, Any] = {"refused": refused}
    if not refused:
        try:
            first = proxy.Solution(ours, pid) if solution["once"] else None
            answer = {"results": _Tests(ours, solution, job, first).run()}
        except _Refused as error:
            answer = {"refused": str(error)}
    data = memoryview(json.dumps({"secret": job["secret"], **answer}).encode())
    while data:
        data = data[os.write(verdict, data) :]
    os._exit(0)


def _read_stdin_frame() -> bytes:
    """Read exactly one frame: what follows must stay in the pipe."""
    head = b""
    while not head.endswith(b"\n"):
        head += _read_some(1)
    data = bytearray()
    while len(data) < int(head):
        data += _read_some(int(head) - len(data))
    return bytes(data)


def _read_some(most: int) -> bytes:
    chunk = os.read(0, most)
    if not chunk:
        raise EOFError("a frame is cut off")
    return chunk


def _leave_input_and_output() -> None:
    """The input still to come is the tests, and the output is the verdict."""
    null = os.open(os.devnull, os.O_RDWR)
    for fd in (0, 1, 2):
        os.dup2(null, fd)


def _shut_off() -> int:
    """Let this process use nothing that the solution can write to: no module from its folder, no file by a relative
    name, no interrupt. Returns the descriptor for the verdict: what tests print goes nowhere."""
    verdict = os.dup(1)
    _leave_input_and_output()
    own = tuple(
        f"{prefix.rstrip('/')}/" for prefix in {sys.prefix, sys.exec_prefix, sys.base_prefix, sys.base_exec_prefix}
    )
    here = os.getcwd()
    sys.path[:] = [path for path in sys.path if path.startswith(own) and path != here]
    # What is known of Python's own folders stays: to forget it takes longer than the rest of this.
    for path in [path for path in sys.path_importer_cache if not path.startswith(own) or path == here]:
        del sys.path_importer_cache[path]
    sys.dont_write_bytecode = True
    os.environ["HOME"] = "/"
    os.chdir("/")
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    return verdict


def open_streams() -> None:
    """Text streams of this process's own on 0, 1 and 2: a fork inherits buffers that are another's."""
    sys.stdin = sys.__stdin__ = _stream(0, "r")  # type: ignore[misc]  # the names are final for type checkers only
    sys.stdout = sys.__stdout__ = _stream(1, "w")  # type: ignore[misc]
    sys.stderr = sys.__stderr__ = _stream(2, "w")  # type: ignore[misc]
    if not os.path.exists("/dev/stdin"):  # it is a link into /proc, which programs do not have
        io.open = builtins.open = _open


def _stream(fd: int, mode: str) -> io.TextIOWrapper:
    errors = "backslashreplace" if fd == 2 else "surrogateescape"
    return io.TextIOWrapper(_OPEN(fd, f"{mode}b", closefd=False), encoding="utf-8", errors=errors)


_OPEN = open
_STREAMS = {"/dev/stdin": 0, "/dev/stdout": 1, "/dev/stderr": 2}


def _open(file: Any, *args: Any, **kwargs: Any) -> Any:
    """``open``, which also knows the names of the standard streams."""
    path = os.fspath(file) if isinstance(file, str | os.PathLike) else None
    return _OPEN(file if path not in _STREAMS else os.dup(_STREAMS[str(path)]), *args, **kwargs)


class _Refused(Exception):
    """Nothing can be run, before anything of the solution was: that is not its doing."""


class _Tests:
    """Runs tests against solutions that it starts as it needs them.

    ``only``: the one solution, where no other is started.
    """

    def __init__(
        self, control: socket.socket, source: Mapping[str, str], job: Mapping[str, Any], only: proxy.Solution | None
    ) -> None:
        self.control, self.source, self.job, self.only = control, source, job, only
        self.end = time.monotonic() + job["budget_s"]
        self.solution: proxy.Solution | None = None
        self.started = False
        self.load_error: Exception | None = None

    def run(self) -> list[dict[str, str]]:
        results: list[dict[str, str]] = []
        for number, test in enumerate(self.job["tests"]):
            status, detail = self._one(test)
            results.append({"status": status, "detail": detail[:500] if number < _DETAILS else ""})
            if status != "passed" and self.job["stop"]:
                break
        return results

    def _one(self, test: str | dict[str, Any]) -> tuple[str, str]:
        deadline = min(self.end, time.monotonic() + self.job["deadline_s"])
        if time.monotonic() >= self.end:
            return "timeout", f"the {self.job['budget_s']:g} s for all tests are over"
        failure: BaseException | None = None
        try:
            solution = self._ready(deadline)
            if isinstance(test, str):
                self._run_source(test, solution)
            else:
                _run_call(test, solution)
        except _Refused:
            raise
        except BaseException as error:
            failure = error
        return self._verdict(failure)

    def _verdict(self, failure: BaseException | None) -> tuple[str, str]:
        """The status of the test that has ended, and why. Whatever the test made of it, a solution that died or came
        too late fails it, and so does an assertion that failed while the solution was calling a function of the
        test."""
        solution = self.solution
        if solution is not None:
            failure = solution.failure or solution.broken_promise or failure
            solution.broken_promise = None
            if solution.failure is not None:
                solution.kill()
                self.solution = None
        if failure is None:
            return "passed", ""
        if isinstance(failure, SolutionTimeout):
            return "timeout", f"no answer within {self.job['deadline_s']:g} s"
        if isinstance(failure, SolutionEnded):
            return "error", f"the solution's process ended: {failure}"
        try:
            text = str(failure)
        except BaseException as error:  # it may ask the solution for the text of an object
            text = f"it cannot be shown: {type(error).__name__}"
        return (
            ("failed", text) if isinstance(failure, AssertionError) else ("error", f"{type(failure).__name__}: {text}")
        )

    def _ready(self, deadline: float) -> proxy.Solution:
        """Return a live solution that has run its source.

        Raises:
            _Refused: none could be started, and none was before.
            Exception: whatever the source raises. SolutionEnded, SolutionTimeout.
        """
        if self.load_error is not None:
            raise self.load_error
        if self.solution is not None:
            self.solution.deadline = deadline
            return self.solution
        self.solution = self.only or self._start(deadline)
        self.solution.deadline = deadline
        try:
            self.solution.load(self.source["prelude"], self.source["source"])
        except Exception as error:
            self.load_error = error
            raise
        return self.solution

    def _start(self, deadline: float) -> proxy.Solution:
        problem = "what starts it is gone"
        longest = deadline - time.monotonic() if self.started else max(_FIRST_START_S, deadline - time.monotonic())
        try:
            ours, theirs = socket.socketpair()
            with theirs:
                self.control.settimeout(max(0.001, longest))
                socket.send_fds(self.control, [b"+"], [theirs.fileno()])
            (pid,) = struct.unpack("<i", self.control.recv(4))
            if pid > 0:
                self.started = True
                return proxy.Solution(ours, pid)
            problem = f"no process for it: {os.strerror(-pid)}"
        except (OSError, struct.error) as error:
            self.control.close()  # it may be stopped, and answer when something else is asked
            problem = f"{problem}: {error}"
        if not self.started:
            raise _Refused(problem)
        raise SolutionEnded(problem)

    def _run_source(self, test: str, solution: proxy.Solution) -> None:
        names = self._names
        space = {
            "__name__": "tests",
            "__builtins__": builtins,
            effects.CALLED: proxy.with_effects,
            **names.of_library,
            **solution.names(sorted(names.of_solution)),
        }
        missing = [name for name in names.of_solution if name not in space and hasattr(builtins, name)]
        if missing:
            raise NameError(f"the solution does not define {missing[0]}")
        exec(self._setup, space)
        exec(effects.compiled(test, "test.py", names.of_tests), space)

    @functools.cached_property
    def _setup(self) -> Any:
        return compile(self.job["setup"], "setup.py", "exec", dont_inherit=True)

    @functools.cached_property
    def _names(self) -> reading.Names:
        trees = [tree for test in self.job["tests"] if isinstance(test, str) and (tree := _parsed(test)) is not None]
        return reading.Names(ast.parse(self.job["setup"]), trees, self.job["tested"])


def _parsed(test: str) -> ast.Module | None:
    try:
        return ast.parse(test)
    except SyntaxError:  # an error of this test, when it runs
        return None


def _run_call(test: Mapping[str, Any], solution: proxy.Solution) -> None:
    result, expected = solution.entry(test["entry"])(*test["args"]), test["expected"]
    if same.same_result(result, expected):
        return
    wrapped = test["wrapped"] and isinstance(expected, list) and len(expected) == 1
    if not (wrapped and same.same_result(result, expected[0])):
        raise AssertionError(f"expected {reprlib.repr(expected)}, got {reprlib.repr(result)}")

"""Tests a solution without trusting it: the tests run in one process, the solution in another.

Runs inside a sandbox, as the program; stdlib only. Only plain values come back from the solution (numbers, text,
containers), encoded as JSON, and they are compared where the tests are. So a solution cannot report success: ending
the process, patching ``assert``, ``__eq__``, ``sys.modules`` or this file changes its own process only. Nor can it read
the tests: its process is forked before they are.

One file, though it has two sides and a wire between them: a remote service gets it as one program.

Stdin holds two frames (a line with the number of bytes, then the bytes): the solution's source, and a JSON object

    setup       source run before the tests, with the solution's names in scope
    tests       sources; each runs in a copy of the namespace that ``setup`` left
    deadline_s  for one test
    budget_s    for all of them; when it is used up, the tests that are left are timeouts
    stop        whether the first test that does not pass ends it

Stdout is one JSON list with an object for each test that ran: ``status`` (passed, failed, error, timeout) and
``detail``. A solution that dies or hangs is started again for the next test.
"""

from __future__ import annotations

import builtins
import ctypes
import importlib
import io
import json
import os
import signal
import socket
import struct
import sys
import time
import types
from collections.abc import Iterator
from decimal import Decimal
from fractions import Fraction
from typing import Any, NoReturn

_MAX_FRAME = 64 << 20
_PR_SET_DUMPABLE = 4


class SolutionEnded(BaseException):
    """The solution's process ended or broke the protocol. Not an ``Exception``: tests must not catch it."""


class SolutionTimeout(BaseException):
    """The solution did not answer within the test's deadline."""


class SolutionError(Exception):
    """The solution raised an exception of its own class."""


def main() -> None:
    ctypes.CDLL(None).prctl(_PR_SET_DUMPABLE, 0, 0, 0, 0)  # the solution has our user id: it must not attach to us
    sys.set_int_max_str_digits(0)
    source = _read_stdin_frame()
    ours, theirs = socket.socketpair()
    pid = os.fork()
    if pid == 0:
        ours.close()
        _serve_solutions(theirs, source.decode("utf-8", "surrogateescape"))
    theirs.close()
    job = json.loads(_read_stdin_frame())
    results = _Tests(ours, job).run()
    data = memoryview(json.dumps(results).encode())
    while data:
        data = data[os.write(1, data) :]
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


def open_streams() -> None:
    """Text streams of this process's own on 0, 1 and 2: a fork inherits buffers that are another's."""
    sys.stdin = sys.__stdin__ = _stream(0, "r")  # type: ignore[misc]  # the names are final for type checkers only
    sys.stdout = sys.__stdout__ = _stream(1, "w")  # type: ignore[misc]
    sys.stderr = sys.__stderr__ = _stream(2, "w")  # type: ignore[misc]


def _stream(fd: int, mode: str) -> io.TextIOWrapper:
    errors = "backslashreplace" if fd == 2 else "surrogateescape"
    return io.TextIOWrapper(open(fd, f"{mode}b", closefd=False), encoding="utf-8", errors=errors)


# ------------------------------------------------------------------------------------------------ the tests' side


class _Tests:
    """Runs tests against solutions that it starts as it needs them."""

    def __init__(self, control: socket.socket, job: dict[str, Any]) -> None:
        self.control, self.job = control, job
        self.solution: _Solution | None = None
        self.base: dict[str, Any] = {}
        self.end = time.monotonic() + job["budget_s"]

    def run(self) -> list[dict[str, str]]:
        results: list[dict[str, str]] = []
        for test in self.job["tests"]:
            status, detail = self._one(test)
            results.append({"status": status, "detail": detail[:500]})
            if status != "passed" and self.job["stop"]:
                break
        return results

    def _one(self, test: str) -> tuple[str, str]:
        deadline = min(self.end, time.monotonic() + self.job["deadline_s"])
        if time.monotonic() >= self.end:
            return "timeout", f"the {self.job['budget_s']:g} s for all tests are over"
        try:
            self._prepare(deadline)
            exec(compile(test, "test.py", "exec", dont_inherit=True), dict(self.base))
        except SolutionEnded as error:
            self._drop()
            return "error", f"the solution's process ended: {error}"
        except SolutionTimeout:
            self._drop()
            return "timeout", f"no answer within {self.job['deadline_s']:g} s"
        except AssertionError as error:
            return "failed", str(error)
        except BaseException as error:
            return "error", f"{type(error).__name__}: {error}"
        return "passed", ""

    def _prepare(self, deadline: float) -> None:
        """A live solution, and its names and the setup's in ``base``."""
        if self.solution is not None:
            self.solution.deadline = deadline
            return
        ours, theirs = socket.socketpair()
        with theirs:
            socket.send_fds(self.control, [b"+"], [theirs.fileno()])
        pid = struct.unpack("<i", self.control.recv(4))[0]
        self.solution = solution = _Solution(ours, pid, deadline)
        self.base = {"__name__": "tests", "__builtins__": builtins} | solution.names()
        exec(compile(self.job["setup"], "setup.py", "exec", dont_inherit=True), self.base)

    def _drop(self) -> None:
        if self.solution is not None:
            self.solution.kill()
            self.solution = None


class _Solution:
    """A connection to one process that runs the solution."""

    def __init__(self, connection: socket.socket, pid: int, deadline: float) -> None:
        self.connection, self.pid, self.deadline = connection, pid, deadline

    def names(self) -> dict[str, Any]:
        """What the solution defines, without what would hide a builtin: tests rely on those being themselves."""
        found: dict[str, Any] = {}
        for name, kind, value in self._ask(["load"]):
            if not isinstance(name, str) or hasattr(builtins, name):
                continue
            if kind == "module":
                module = _stdlib_module(value)
                if module is not None:
                    found[name] = module
            else:
                found[name] = self._decode(value)
        return found

    def call(self, path: list[Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        answer = self._ask(["call", path, [_encode(a) for a in args], {k: _encode(v) for k, v in kwargs.items()}])
        result, changed = answer
        for index, value in changed:
            _replace(args[index], self._decode(value))
        return self._decode(result)

    def attribute(self, handle: int, name: str) -> Any:
        return self._decode(self._ask(["get", handle, name]))

    def set_attribute(self, handle: int, name: str, value: Any) -> None:
        self._ask(["set", handle, name, _encode(value)])

    def next(self, handle: int) -> tuple[bool, Any]:
        more, value = self._ask(["next", handle])
        return bool(more), self._decode(value)

    def kill(self) -> None:
        self.connection.close()
        try:
            os.kill(self.pid, signal.SIGKILL)
        except OSError:  # it is gone already, or never was ours
            return

    def _ask(self, request: list[Any]) -> Any:
        _send(self.connection, request, self.deadline)
        answer = _receive(self.connection, self.deadline)
        try:
            kind, value = answer
            if kind == "ok":
                return value
            name, text = str(value[0]), str(value[1])
        except (TypeError, ValueError, IndexError, KeyError) as error:
            raise SolutionEnded("it broke the protocol") from error
        raised = getattr(builtins, name, None)
        if isinstance(raised, type) and issubclass(raised, Exception) and raised is not AssertionError:
            try:
                failure = raised(text)
            except Exception:  # UnicodeDecodeError and others that want more arguments
                raise SolutionError(f"{name}: {text}") from None
            raise failure
        raise SolutionError(f"{name}: {text}")

    def _decode(self, value: Any) -> Any:
        try:
            return _decode(value, self)
        except (TypeError, ValueError, LookupError, AttributeError, ArithmeticError, RecursionError) as error:
            raise SolutionEnded("it broke the protocol") from error


class _Remote:
    """Stands for an object of the solution that is not plain: a function, a class, an instance, an iterator.

    It can be called, its attributes read and set, iterated over, and passed back. It cannot be compared: what decides a
    test would then run in the solution's process.
    """

    _solution: _Solution
    _handle: int

    def __init__(self, solution: _Solution, handle: int) -> None:
        self.__dict__.update(_solution=solution, _handle=handle)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._solution.call([self._handle], args, kwargs)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return self._solution.attribute(self._handle, name)

    def __setattr__(self, name: str, value: Any) -> None:
        self._solution.set_attribute(self._handle, name, value)

    def __iter__(self) -> Iterator[Any]:
        iterator = self._solution.call([self._handle, "__iter__"], (), {})
        if not isinstance(iterator, _Remote):
            return iter(iterator)
        return iterator._items()

    def _items(self) -> Iterator[Any]:
        while True:
            more, value = self._solution.next(self._handle)
            if not more:
                return
            yield value

    def __eq__(self, other: object) -> bool:
        raise TypeError("an object of the solution's own class cannot be compared")

    __ne__ = __eq__
    __hash__ = None  # type: ignore[assignment]  # as Python itself does beside an __eq__; it says so here

    def __bool__(self) -> bool:
        raise TypeError("an object of the solution's own class has no truth value here")


def _stdlib_module(name: Any) -> types.ModuleType | None:
    """A module that the solution imported, for tests that use it without importing it."""
    if not isinstance(name, str) or name.split(".")[0] not in sys.stdlib_module_names:
        return None
    try:
        return importlib.import_module(name)
    except ImportError:
        return None


def _replace(target: Any, value: Any) -> None:
    """Repeat on our argument what the solution did to its copy."""
    if isinstance(target, list | bytearray):
        target[:] = value
    elif isinstance(target, dict | set):
        target.clear()
        target.update(value)


# --------------------------------------------------------------------------------------------- the solution's side


def _serve_solutions(control: socket.socket, source: str) -> NoReturn:
    """Fork a fresh process of the solution for every socket that comes in."""
    null = os.open(os.devnull, os.O_RDWR)
    for fd in (0, 1, 2):
        os.dup2(null, fd)  # the input still to come is the tests, and the output is the verdict
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    while True:
        message, fds, _, _ = socket.recv_fds(control, 1, 1)
        if not message:
            os._exit(0)
        pid = os.fork()
        if pid == 0:
            control.close()
            _serve_solution(socket.socket(fileno=fds[0]), source)
        os.close(fds[0])
        control.sendall(struct.pack("<i", pid))


def _serve_solution(connection: socket.socket, source: str) -> NoReturn:
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    open_streams()
    module = types.ModuleType("__main__")
    sys.modules["__main__"] = module
    server = _Server(module, source)
    while True:
        try:
            request = _receive(connection, None)
        except SolutionEnded:
            os._exit(0)
        try:
            answer = ["ok", server.answer(request)]
            text = json.dumps(answer)
        except Exception as error:
            text = json.dumps(["raised", [type(error).__name__, _text(error)]])
        _send_text(connection, text, None)


def _text(error: Exception) -> str:
    try:
        return str(error)[:1000]
    except Exception:
        return "it cannot be shown"


class _Server:
    """Answers questions about one namespace. Whatever it says is only believed as a value."""

    def __init__(self, module: types.ModuleType, source: str) -> None:
        self.module, self.source = module, source
        self.objects: list[Any] = []

    def answer(self, request: list[Any]) -> Any:
        return getattr(self, f"_{request[0]}")(*request[1:])

    def _load(self) -> list[Any]:
        try:
            exec(compile(self.source, "solution.py", "exec", dont_inherit=True), self.module.__dict__)
        except SystemExit:  # a script that ends itself has still defined its functions
            sys.exc_info()
        found: list[Any] = []
        for name, value in list(self.module.__dict__.items()):
            if name.startswith("__"):
                continue
            if isinstance(value, types.ModuleType):
                found.append([name, "module", value.__name__])
            else:
                found.append([name, "value", self._encoded(value)])
        return found

    def _call(self, path: list[Any], args: list[Any], kwargs: dict[str, Any]) -> list[Any]:
        function = self.objects[path[0]]
        for name in path[1:]:
            function = getattr(function, name)
        values = [_decode(a, self) for a in args]
        try:
            result = function(*values, **{k: _decode(v, self) for k, v in kwargs.items()})
        except (SystemExit, KeyboardInterrupt) as error:
            raise RuntimeError(f"the solution ended itself: {type(error).__name__}") from None
        changed = []
        for index, (before, value) in enumerate(zip(args, values, strict=True)):
            if isinstance(value, list | dict | set | bytearray) and (after := self._encoded(value)) != before:
                changed.append([index, after])
        return [self._encoded(result), changed]

    def _get(self, handle: int, name: str) -> Any:
        return self._encoded(getattr(self.objects[handle], name))

    def _set(self, handle: int, name: str, value: Any) -> None:
        setattr(self.objects[handle], name, _decode(value, self))

    def _next(self, handle: int) -> list[Any]:
        try:
            return [True, self._encoded(next(self.objects[handle]))]
        except StopIteration:
            return [False, None]

    def _encoded(self, value: Any) -> Any:
        return _encode(value, self.objects)


# ------------------------------------------------------------------------------------------------------ the wire


def _encode(value: Any, objects: list[Any] | None = None) -> Any:
    """A value as JSON: scalars as they are, containers tagged, the rest as an index into ``objects``."""
    if value is None or isinstance(value, bool | int | float | str):
        return value  # JSON drops the class of a subclass, and with it whatever comparison it brought
    if isinstance(value, _Remote):
        return {"o": value._handle}
    for tag, kinds in (("l", list), ("t", tuple), ("s", set), ("z", frozenset)):
        if isinstance(value, kinds):
            return {tag: [_encode(item, objects) for item in value]}
    if isinstance(value, dict):
        return {"d": [[_encode(k, objects), _encode(v, objects)] for k, v in value.items()]}
    if isinstance(value, bytes | bytearray):
        return {"b" if isinstance(value, bytes) else "y": bytes(value).hex()}
    if isinstance(value, complex):
        return {"c": [value.real, value.imag]}
    if isinstance(value, Decimal):
        return {"D": str(value)}
    if isinstance(value, Fraction):
        return {"F": [value.numerator, value.denominator]}
    if isinstance(value, range):
        return {"r": [value.start, value.stop, value.step]}
    if type(value).__module__ == "numpy" and hasattr(value, "tolist"):
        return _encode(value.tolist(), objects)
    if type(value).__module__ == "collections" and type(value).__name__ == "deque":
        return {"l": [_encode(item, objects) for item in value]}
    name = getattr(value, "__name__", None)
    if isinstance(name, str) and getattr(builtins, name, None) is value:
        return {"B": name}
    if objects is None:
        raise TypeError(f"an argument of type {type(value).__name__} cannot be passed to the solution")
    objects.append(value)
    return {"o": len(objects) - 1}


def _decode(value: Any, owner: Any) -> Any:
    if value is None or isinstance(value, bool | int | float | str):
        return value
    ((tag, body),) = value.items()
    if tag == "o":
        return _Remote(owner, int(body)) if isinstance(owner, _Solution) else owner.objects[body]
    if tag == "d":
        return {_decode(k, owner): _decode(v, owner) for k, v in body}
    if tag in ("l", "t", "s", "z"):
        items = [_decode(item, owner) for item in body]
        return {"l": list, "t": tuple, "s": set, "z": frozenset}[tag](items)
    if tag in ("b", "y"):
        return bytes.fromhex(body) if tag == "b" else bytearray.fromhex(body)
    if tag == "c":
        return complex(*body)
    if tag == "D":
        return Decimal(body)
    if tag == "F":
        return Fraction(*body)
    if tag == "r":
        return range(*body)
    if tag == "B":
        return getattr(builtins, body)
    raise ValueError(f"unknown tag {tag!r}")


def _send(connection: socket.socket, value: Any, deadline: float | None) -> None:
    _send_text(connection, json.dumps(value), deadline)


def _send_text(connection: socket.socket, text: str, deadline: float | None) -> None:
    data = text.encode("utf-8", "surrogatepass")
    try:
        connection.settimeout(_left(deadline))
        connection.sendall(struct.pack("<I", len(data)) + data)
    except TimeoutError:
        raise SolutionTimeout from None
    except OSError as error:
        raise SolutionEnded(str(error)) from error


def _receive(connection: socket.socket, deadline: float | None) -> Any:
    size = struct.unpack("<I", _receive_exactly(connection, 4, deadline))[0]
    if size > _MAX_FRAME:
        raise SolutionEnded(f"it sent {size} bytes")
    try:
        return json.loads(_receive_exactly(connection, size, deadline))
    except (ValueError, RecursionError) as error:
        raise SolutionEnded("it broke the protocol") from error


def _receive_exactly(connection: socket.socket, count: int, deadline: float | None) -> bytes:
    data = io.BytesIO()
    while (left := count - data.tell()) > 0:
        try:
            connection.settimeout(_left(deadline))
            chunk = connection.recv(min(left, 1 << 20))
        except TimeoutError:
            raise SolutionTimeout from None
        except OSError as error:
            raise SolutionEnded(str(error)) from error
        if not chunk:
            raise SolutionEnded("no answer")
        data.write(chunk)
    return data.getvalue()


def _left(deadline: float | None) -> float | None:
    if deadline is None:
        return None
    left = deadline - time.monotonic()
    if left <= 0:
        raise TimeoutError
    return left


if __name__ == "__main__":  # sent to a remote service as a program of its own
    main()

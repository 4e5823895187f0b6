"""The solution's end of the wire: forks processes that run the solution, and answers for its functions and objects.

Runs inside a sandbox, in the solution's processes; stdlib only, found by its path. The solution can do to all of this
whatever it likes: the tests' process believes an answer as a value, and as nothing else.
"""

from __future__ import annotations

import builtins
import copy
import importlib
import math
import operator
import os
import signal
import socket
import struct
import sys
import threading
import types
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NoReturn

if TYPE_CHECKING:
    from posttrain.sandbox import wire
    from posttrain.sandbox.wire import SolutionEnded
else:
    import wire
    from wire import SolutionEnded


def fork_solutions(control: socket.socket, prepare: Callable[[], None]) -> NoReturn:
    """Fork a process of the solution for every socket that comes over ``control``, and answer with its pid, or minus
    the error's number. ``prepare`` runs first in each."""
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    while True:
        message, fds, _, _ = socket.recv_fds(control, 1, 1)
        if not message:
            os._exit(0)
        try:
            pid = os.fork()
        except OSError as error:
            pid = -(error.errno or 1)
        if pid == 0:
            control.close()
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            serve(socket.socket(fileno=fds[0]), prepare)
        os.close(fds[0])
        control.sendall(struct.pack("<i", pid))


def serve(connection: socket.socket, prepare: Callable[[], None]) -> NoReturn:
    """Be the process of a solution, whose questions come over ``connection``. ``prepare`` runs first."""
    prepare()
    server = _Server(connection)
    while True:
        try:
            request = wire.receive(connection)
        except SolutionEnded:
            os._exit(0)
        server.answer(request)


class _Server:
    """Answers questions about one namespace. Its name is not ``__main__``: what the solution does as a program (read
    its input, run examples) is not asked for."""

    def __init__(self, connection: socket.socket) -> None:
        self.connection = connection
        self.module = types.ModuleType("solution")
        sys.modules.update(__main__=self.module, solution=self.module)
        self.objects: list[Any] = []
        self.handles: dict[int, int] = {}
        self.asking = threading.RLock()

    def answer(self, request: list[Any]) -> None:
        try:
            self._send(["=", getattr(self, f"_{request[1]}")(*request[2:])])
        except SolutionEnded:
            os._exit(0)
        except BaseException as error:
            self._send(["!", self._raised(error)])

    def _send(self, message: list[Any]) -> None:
        wire.send(self.connection, message)

    def _raised(self, error: BaseException) -> list[Any]:
        if not isinstance(error, Exception):
            error = RuntimeError(f"the solution ended itself: {type(error).__name__}")
        names = [kind.__name__ for kind in type(error).__mro__]
        try:
            args = self._encode(list(error.args))
            if len(repr(args)) < 10_000:
                return [names, args]
        except Exception as unknown:
            return [names, [f"it cannot be shown: {type(unknown).__name__}"]]
        return [names, [str(error)[:1000]]]

    def _load(self, *sources: str) -> None:
        try:
            for source in sources:
                exec(compile(source, "solution.py", "exec", dont_inherit=True), self.module.__dict__)
        except SystemExit:  # a script that ends itself has still defined its functions
            sys.exc_info()

    def _names(self, names: list[str]) -> dict[str, Any]:
        defined = self.module.__dict__
        return {name: self._named(defined[name]) for name in names if name in defined}

    def _named(self, value: Any) -> Any:
        return self._handle(value) if callable(value) else self._encode(value)

    def _entry(self, name: str) -> Any:
        kind = self.module.__dict__.get("Solution")
        if kind is not None and hasattr(kind, name):
            return self._handle(getattr(kind(), name))
        if name not in self.module.__dict__:
            raise NameError(f"name {name!r} is not defined")
        return self._handle(self.module.__dict__[name])

    def _call(self, handle: int, args: list[Any], kwargs: dict[str, Any], shown: list[int | str]) -> list[Any]:
        values, named = [self._decode(a) for a in args], {key: self._decode(v) for key, v in kwargs.items()}
        given: dict[Any, Any] = {**dict(enumerate(values)), **named}
        result = self.objects[handle](*values, **named)
        return [self._encode(result), [self._encode(given[key]) for key in shown]]

    def _operate(self, operation: str, operands: list[Any]) -> Any:
        return self._encode(_OPERATIONS[operation](*[self._decode(operand) for operand in operands]))

    def _call_back(self, handle: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call a function of the test, and meanwhile answer what it asks."""
        with self.asking:
            self._send(["?", handle, self._encode(list(args)), self._encode(kwargs)])
            while True:
                message = wire.receive(self.connection)
                if message[0] == "?":
                    self.answer(message)
                elif message[0] == "=":
                    return self._decode(message[1])
                else:
                    (name,), arguments = message[1]
                    kind = getattr(builtins, name, Exception)
                    raise kind(*arguments)

    def _handle(self, value: Any) -> dict[str, int]:
        """An object's number: the same as long as it lives, and it lives as long as this process."""
        handle = self.handles.setdefault(id(value), len(self.objects))
        if handle == len(self.objects):
            self.objects.append(value)
        return {"object": handle}

    def _encode(self, value: Any) -> Any:
        return wire.encode(value, self._encode_special)

    def _encode_special(self, value: Any) -> Any:
        if isinstance(value, _Function) and value.server is self:
            return {"function": value.handle}
        if isinstance(value, type) and value.__name__ in _TYPES and value.__module__ == "builtins":
            return {"type": value.__name__}
        return self._handle(value)

    def _decode(self, value: Any) -> Any:
        return wire.decode(value, self._decode_special)

    def _decode_special(self, tag: str, body: Any) -> Any:
        if tag == "object":
            return self.objects[body]
        if tag == "function":
            return _Function(self, body)
        if tag == "import":
            return getattr(importlib.import_module(body[0]), body[1])
        raise ValueError(f"unknown tag {tag!r}")


class _Function:
    """Stands for a function of the test."""

    def __init__(self, server: _Server, handle: int) -> None:
        self.server, self.handle = server, handle

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.server._call_back(self.handle, args, kwargs)


_TYPES = {
    kind.__name__
    for kind in (bool, bytearray, bytes, complex, dict, float, frozenset, int, list, range, set, str, tuple, type(None))
}
"""Types that cross as values."""


def _next(iterator: Any) -> list[Any]:
    try:
        return [next(iterator)]
    except StopIteration:
        return []


def _enter(manager: Any) -> Any:
    return type(manager).__enter__(manager)


def _exit(manager: Any) -> Any:
    return type(manager).__exit__(manager, None, None, None)


_BUILTINS: tuple[Callable[..., Any], ...] = (
    *(len, bool, str, repr, int, float, complex, abs, round, reversed, hash, iter),
    *(getattr, setattr, delattr, isinstance, math.trunc, math.floor, math.ceil, copy.copy, copy.deepcopy),
)
_OPERATORS: tuple[Callable[..., Any], ...] = (
    *(operator.index, operator.neg, operator.pos, operator.invert, operator.eq, operator.ne),
    *(operator.lt, operator.le, operator.gt, operator.ge, operator.getitem, operator.setitem, operator.delitem),
    *(operator.add, operator.sub, operator.mul, operator.truediv, operator.floordiv, operator.mod, operator.pow),
    *(operator.matmul, operator.and_, operator.or_, operator.xor, operator.lshift, operator.rshift),
)
_OPERATIONS: dict[str, Callable[..., Any]] = {
    **{function.__name__.strip("_"): function for function in (*_BUILTINS, *_OPERATORS)},
    "next": _next,
    "enter": _enter,
    "exit": _exit,
}
"""What the tests ask of the solution's objects."""

"""The tests' end of the wire: calls of the solution, and what stands for its objects.

Runs inside a sandbox, in the tests' process; stdlib only, found by its path.

The solution is only asked what tells it nothing of what its answer is compared with. It is given the arguments of calls
and the indices of items, and asked for the length, the text, the truth, the items, the number of an object of its own.
It is not asked to compare such an object, or to calculate with it, but with another of its own: a plain value is never
equal to one.
"""

from __future__ import annotations

import builtins
import os
import signal
import socket
import sys
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from posttrain.sandbox import wire
    from posttrain.sandbox.wire import SolutionEnded
else:
    import wire
    from wire import SolutionEnded

_NOT_PLAIN = (TypeError, ValueError, LookupError, AttributeError, ArithmeticError, RecursionError, MemoryError)
_UNSAFE = {"StopIteration", "StopAsyncIteration"}
"""Exceptions that would end a loop of the tests early, and not the test."""
_EXCEPTIONS = {
    name: value
    for name, value in vars(builtins).items()
    if isinstance(value, type) and issubclass(value, Exception) and name not in _UNSAFE
}
"""What the solution can raise in tests. Its own exceptions are the first of these that they derive from."""
_TYPES = {
    value.__name__: value
    for value in (
        bool,
        bytearray,
        bytes,
        complex,
        dict,
        float,
        frozenset,
        int,
        list,
        range,
        set,
        str,
        tuple,
        type(None),
    )
}
"""Types that can be results, as ``type(x)`` is."""


class Solution:
    """A connection to one process that runs the solution."""

    def __init__(self, connection: socket.socket, pid: int, deadline: float) -> None:
        self.connection, self.pid, self.deadline = connection, pid, deadline
        self.failure: BaseException | None = None
        """Why it answers no more. A test in which that happens does not pass, whatever the test makes of it."""
        self.broken_promise: BaseException | None = None
        """The first assertion that failed in a function that a test passed: the solution may have caught it."""
        self._functions: list[Callable[..., Any]] = []
        self._remotes: dict[int, Remote] = {}

    def load(self, prelude: str, source: str) -> None:
        """Run the solution's source.

        Raises:
            Exception: whatever it raises. SolutionEnded, SolutionTimeout.
        """
        self._ask("load", prelude, source)

    def names(self, names: list[str]) -> dict[str, Any]:
        """Return what the solution defines under these names: of what is plain a copy."""
        found = self._ask("names", names)
        if not isinstance(found, dict):
            raise self._broken()
        return {name: self._decode(found[name]) for name in names if name in found}

    def entry(self, name: str) -> Any:
        """Return the method of a new ``Solution()``, as LeetCode has it, or else the function of this name."""
        return self._decode(self._ask("entry", name))

    def ask(self, operation: str, *operands: Any) -> Any:
        """Return the solution's answer to an operation on an object of its own, the first operand."""
        return self._decode(self._ask("operate", operation, [self._encode(operand) for operand in operands]))

    def call(
        self, function: Remote, args: tuple[Any, ...], kwargs: dict[str, Any], shown: tuple[int | str, ...] = ()
    ) -> Any:
        """Call a function. What it did to the arguments ``shown`` (positions and keywords) is repeated on ours."""
        given = [self._encode(value) for value in args], {key: self._encode(value) for key, value in kwargs.items()}
        answer = self._ask("call", function._handle, *given, shown)
        if not (
            isinstance(answer, list)
            and len(answer) == 2
            and isinstance(answer[1], list)
            and len(answer[1]) == len(shown)
        ):
            raise self._broken()
        result = self._decode(answer[0])
        for key, changed in zip(shown, answer[1], strict=True):
            _replace(args[key] if isinstance(key, int) else kwargs[key], self._decode(changed))
        return result

    def kill(self) -> None:
        self.connection.close()
        try:
            os.kill(self.pid, signal.SIGKILL)
        except OSError:  # it is gone already
            return

    def _ask(self, *request: Any) -> Any:
        if self.failure is not None:
            raise self.failure
        try:
            wire.send(self.connection, ["?", *request], self.deadline)
            while True:
                kind, *body = self._message()
                if kind == "=":
                    return body[0]
                if kind == "!":
                    break
                wire.send(self.connection, self._called_back(body), self.deadline)
        except BaseException as error:  # whatever it is, question and answer no longer belong together
            self.failure = self.failure or error
            raise
        raise self._exception(body[0])

    def _message(self) -> list[Any]:
        message = wire.receive(self.connection, self.deadline)
        if (
            isinstance(message, list)
            and len(message) == (4 if message[:1] == ["?"] else 2)
            and message[0] in ("?", "=", "!")
        ):
            return message
        raise SolutionEnded("it broke the protocol")

    def _called_back(self, body: list[Any]) -> list[Any]:
        """Call a function that the test passed to the solution, which hears what came of it."""
        handle, args, kwargs = body
        function = self._function(handle)
        given, named = self._decode(args), self._decode(kwargs)
        if not (isinstance(given, list) and isinstance(named, dict)):
            raise self._broken()
        try:
            return ["=", self._encode(function(*given, **named))]
        except AssertionError as error:
            self.broken_promise = self.broken_promise or error
            return ["!", [["AssertionError"], []]]
        except Exception as error:
            return ["!", [[type(error).__name__], [str(error)[:1000]]]]

    def _exception(self, body: Any) -> Exception:
        try:
            names, args = body
            kind = next((_EXCEPTIONS[name] for name in names if name in _EXCEPTIONS), Exception)
            values = self._decode(args)
            try:
                return kind(*values)
            except _NOT_PLAIN:  # UnicodeDecodeError and others that want certain arguments
                return Exception(f"{kind.__name__}: {values}"[:1000])
        except _NOT_PLAIN:
            raise self._broken() from None

    def _broken(self) -> SolutionEnded:
        self.failure = self.failure or SolutionEnded("it broke the protocol")
        return SolutionEnded("it broke the protocol")

    def _function(self, handle: Any) -> Callable[..., Any]:
        if type(handle) is int and 0 <= handle < len(self._functions):
            return self._functions[handle]
        raise self._broken()

    def _encode(self, value: Any) -> Any:
        return wire.encode(value, self._encode_special)

    def _encode_special(self, value: Any) -> Any:
        if isinstance(value, Remote) and value._solution is self:
            return {"object": value._handle}
        if not callable(value):
            raise TypeError(f"an argument of type {type(value).__name__} cannot be passed to the solution")
        module, name = getattr(value, "__module__", None), getattr(value, "__qualname__", None)
        shared = isinstance(module, str) and module.split(".")[0] in sys.stdlib_module_names | {"numpy"}
        if shared and getattr(sys.modules.get(module or ""), str(name), None) is value:
            return {"import": [module, name]}  # the solution's process has its own
        self._functions.append(value)
        return {"function": len(self._functions) - 1}

    def _decode(self, value: Any) -> Any:
        try:
            return wire.decode(value, self._decode_special)
        except _NOT_PLAIN:
            raise self._broken() from None

    def _decode_special(self, tag: str, body: Any) -> Any:
        if tag == "object" and type(body) is int:
            return self._remotes.setdefault(body, Remote(self, body))
        if tag == "function":
            return self._function(body)
        if tag == "type":
            return _TYPES[body]
        raise ValueError(f"unknown tag {tag!r}")


class Remote:
    """Stands for an object of the solution that is not plain: a function, a class, an instance, an iterator."""

    _solution: Solution
    _handle: int

    def __init__(self, solution: Solution, handle: int) -> None:
        self.__dict__.update(_solution=solution, _handle=handle)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._solution.call(self, args, kwargs)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return self._solution.ask("getattr", self, name)

    def __setattr__(self, name: str, value: Any) -> None:
        self._solution.ask("setattr", self, name, value)

    def __delattr__(self, name: str) -> None:
        self._solution.ask("delattr", self, name)

    def __iter__(self) -> Iterator[Any]:
        iterator = self._solution.ask("iter", self)
        return iterator if isinstance(iterator, Remote) else iter(iterator)

    def __next__(self) -> Any:
        item = self._solution.ask("next", self)
        if not isinstance(item, list) or len(item) > 1:
            raise self._solution._broken()
        if not item:
            raise StopIteration
        return item[0]

    def __contains__(self, item: object) -> bool:
        """Return whether one of the items is equal to ``item``, which the solution does not hear of."""
        return any(own is item or own == item for own in self)

    def __exit__(self, *_: object) -> None:
        """Leave a context. What the solution thinks of an exception does not end that: it may be a failed assert."""
        self._solution.ask("exit", self)

    def __instancecheck__(self, instance: object) -> bool:
        return isinstance(instance, Remote) and bool(self._solution.ask("isinstance", instance, self))

    def __eq__(self, other: object) -> Any:
        return self is other or self._compare("eq", other)

    def __ne__(self, other: object) -> Any:
        return self is not other and self._compare("ne", other)

    def __deepcopy__(self, memo: object) -> Any:
        return self._solution.ask("deepcopy", self)

    def __hash__(self) -> int:
        value = self._solution.ask("hash", self)
        return value if isinstance(value, int) else self._handle

    def _compare(self, operation: str, other: object) -> Any:
        return self._solution.ask(operation, self, other) if isinstance(other, Remote) else NotImplemented


def with_effects(function: Any, shown: tuple[int | str, ...]) -> Any:
    """Return ``function``, or if it is the solution's, what calls it and repeats what it does to the arguments
    ``shown``."""
    if not isinstance(function, Remote):
        return function
    return lambda *args, **kwargs: function._solution.call(function, args, kwargs, shown)


def _replace(target: Any, value: Any) -> None:
    """Repeat on our argument what the solution did to its copy."""
    if isinstance(target, list | bytearray):
        target[:] = value
    elif isinstance(target, dict | set):
        target.clear()
        target.update(value)


def _asked(operation: str) -> Callable[..., Any]:
    return lambda self, *operands: self._solution.ask(operation, self, *operands)


def _compared(operation: str) -> Callable[..., Any]:
    return lambda self, other: self._compare(operation, other)


_UNARY = (
    *("len", "bool", "str", "repr", "int", "float", "complex", "index", "abs", "neg", "pos", "invert", "round"),
    *("trunc", "floor", "ceil", "reversed", "copy", "enter", "getitem", "setitem", "delitem"),
)
"""Operations that tell the solution nothing, or which item of it is wanted."""
_BINARY = (
    *("lt", "le", "gt", "ge", "add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "matmul"),
    *("and", "or", "xor", "lshift", "rshift"),
)
for _name in _UNARY:
    setattr(Remote, f"__{_name}__", _asked(_name))
for _name in _BINARY:
    setattr(Remote, f"__{_name}__", _compared(_name))

"""Plain data between the tests of a solution and the solution: values as JSON, in frames, over a socket.

Runs inside a sandbox; stdlib only, found by its path. ``harness.py`` has the two processes that speak it.

A value crosses as a copy of its content: numbers, text, containers, and what is plain in ``collections``, ``datetime``,
``decimal``, ``fractions`` and numpy. Scalars and lists are themselves in JSON; everything else is an object with one
key, its tag. What is not plain is for the side that sends or receives it to say: nothing here imports a name,
unpickles, or calls what the other side chose.
"""

from __future__ import annotations

import datetime
import io
import json
import re
import socket
import struct
import sys
import time
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable
from decimal import Decimal
from fractions import Fraction
from typing import Any

MAX_FRAME = 16 << 20
"""Bytes of one message."""
_MAX_DEPTH = 200
"""Containers within each other."""
_SMALL = 1 << 63
_DTYPE = re.compile(r"[<>|=]?[?biufc]\d{0,2}")


class SolutionEnded(BaseException):
    """The solution's process ended or broke the protocol. Not an ``Exception``: tests must not catch it."""


class SolutionTimeout(BaseException):
    """The solution did not answer within the test's deadline."""


class Named(tuple):  # type: ignore[type-arg]  # of anything
    """A named tuple of the other side: a tuple whose items have names."""

    _fields: tuple[str, ...] = ()

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_") or name not in self._fields:  # numpy reads memory where `__array_interface__` says so
            raise AttributeError(name)
        return self[self._fields.index(name)]


def encode(value: Any, special: Callable[[Any], Any], depth: int = 0) -> Any:
    """Return ``value`` as what JSON holds; ``special`` encodes what is not plain.

    Raises:
        RecursionError: containers lie too deep in each other.
    """
    kind = type(value)
    if kind is str or kind is float or kind is bool or value is None:
        return value
    if kind is int:
        return value if -_SMALL < value < _SMALL else {"i": [hex(value)]}
    if depth >= _MAX_DEPTH:
        raise RecursionError(f"more than {_MAX_DEPTH} containers within each other")
    if isinstance(value, list):
        return [encode(item, special, depth + 1) for item in value]
    for tag, plain, parts in _PARTS:
        if isinstance(value, plain):
            if isinstance(value, tuple) and hasattr(value, "_fields"):
                tag, content = "named", [list(value._fields), *value]
            else:
                content = parts(value)
            return {tag: [encode(part, special, depth + 1) for part in content]}
    for scalar, bare in _BARE:
        if isinstance(value, scalar):
            return encode(bare(value), special, depth)
    if kind.__module__ == "numpy" and hasattr(value, "dtype") and hasattr(value, "tolist"):
        return {"numpy": [str(value.dtype.str), encode(value.tolist(), special, depth + 1)]}
    return special(value)


def decode(value: Any, special: Callable[[str, Any], Any]) -> Any:
    """Return the value that ``encode`` made ``value`` from; ``special`` decodes tags that are not of plain data.

    Raises:
        TypeError, ValueError, LookupError, AttributeError, ArithmeticError, RecursionError: it is not such a value.
    """
    if isinstance(value, list):
        return [decode(item, special) for item in value]
    if not isinstance(value, dict):
        return value
    ((tag, content),) = value.items()
    build = _BUILD.get(tag)
    if build is None:
        return special(tag, content)
    return build(*[decode(part, special) for part in content])


def _pairs(value: Any) -> list[Any]:
    return [part for item in dict.items(value) for part in item]


def _offset(value: Any) -> Any:
    offset = value.utcoffset()
    return None if offset is None else offset.total_seconds()


def _moment(value: datetime.time | datetime.datetime) -> list[Any]:
    return [value.hour, value.minute, value.second, value.microsecond, _offset(value), value.fold]


_PARTS: tuple[tuple[str, type, Callable[[Any], list[Any]]], ...] = (
    ("t", tuple, list),
    ("s", set, list),
    ("z", frozenset, list),
    ("counter", Counter, _pairs),
    ("ordered", OrderedDict, _pairs),
    ("default", defaultdict, lambda value: [value.default_factory, *_pairs(value)]),
    ("d", dict, _pairs),
    ("q", deque, lambda value: [value.maxlen, *value]),
    ("b", bytes, lambda value: [value.hex()]),
    ("y", bytearray, lambda value: [value.hex()]),
    ("c", complex, lambda value: [value.real, value.imag]),
    ("D", Decimal, lambda value: [str(value)]),
    ("F", Fraction, lambda value: [value.numerator, value.denominator]),
    ("r", range, lambda value: [value.start, value.stop, value.step]),
    ("slice", slice, lambda value: [value.start, value.stop, value.step]),
    ("datetime", datetime.datetime, lambda value: [value.year, value.month, value.day, *_moment(value)]),
    ("date", datetime.date, lambda value: [value.year, value.month, value.day]),
    ("time", datetime.time, _moment),
    ("delta", datetime.timedelta, lambda value: [value.days, value.seconds, value.microseconds]),
)
"""Tag, class and content of plain values. The order counts: a subclass stands before its class."""

_BARE: tuple[tuple[type, Callable[[Any], Any]], ...] = (
    (str, str.__str__),
    (int, int.__int__),
    (float, float.__float__),
)
"""What a scalar of a subclass is without its class, and without the comparisons that the class may bring."""


def _dict(*parts: Any) -> dict[Any, Any]:
    return dict(zip(parts[::2], parts[1::2], strict=True))


def _deque(maxlen: int | None, *items: Any) -> deque[Any]:
    return deque(items, maxlen)


def _named(fields: list[str], *items: Any) -> Named:
    value = Named(items)
    value._fields = tuple(fields)
    return value


def _fraction(numerator: int, denominator: int) -> Fraction:
    return Fraction(numerator, denominator)  # one argument may be text, whose exponent has no limit


def _date(year: int, month: int, day: int) -> datetime.date:
    return datetime.date(year, month, day)  # one argument may be a pickled state, which is not checked


def _zone(offset: float | None) -> datetime.timezone | None:
    return None if offset is None else datetime.timezone(datetime.timedelta(seconds=offset))


def _time(hour: int, minute: int, second: int, micro: int, offset: float | None, fold: int) -> datetime.time:
    return datetime.time(hour, minute, second, micro, _zone(offset), fold=fold)


def _datetime(year: int, month: int, day: int, *moment: Any) -> datetime.datetime:
    return datetime.datetime.combine(_date(year, month, day), _time(*moment))


def _numpy(dtype: str, content: Any) -> Any:
    """An array or a scalar where this process uses numpy, else lists and numbers: tests that know nothing of arrays
    compare with lists, and do not pay for an import."""
    numpy = sys.modules.get("numpy")
    if numpy is None or not _DTYPE.fullmatch(dtype):
        return content
    array = numpy.array(content, dtype=dtype)
    return array[()] if array.ndim == 0 else array


_BUILD: dict[str, Callable[..., Any]] = {
    "i": lambda text: int(text, 16),
    "t": lambda *items: items,
    "s": lambda *items: set(items),
    "z": lambda *items: frozenset(items),
    "counter": lambda *parts: Counter(_dict(*parts)),
    "ordered": lambda *parts: OrderedDict(_dict(*parts)),
    "default": lambda factory, *parts: defaultdict(factory, _dict(*parts)),
    "d": _dict,
    "q": _deque,
    "b": bytes.fromhex,
    "y": bytearray.fromhex,
    "c": complex,
    "D": Decimal,
    "F": _fraction,
    "r": range,
    "slice": slice,
    "datetime": _datetime,
    "date": _date,
    "time": _time,
    "delta": datetime.timedelta,
    "named": _named,
    "numpy": _numpy,
}


def send(connection: socket.socket, message: Any, deadline: float | None = None) -> None:
    """Send one message, by ``deadline`` on the monotonic clock.

    Raises:
        SolutionTimeout, SolutionEnded: it could not be sent.
        ValueError: it is too large. Nothing was sent.
    """
    data = json.dumps(message).encode()
    if len(data) > MAX_FRAME:
        raise ValueError(f"a value of {len(data)} bytes is too large to be passed")
    try:
        connection.settimeout(_left(deadline))
        connection.sendall(struct.pack("<I", len(data)) + data)
    except TimeoutError:
        raise SolutionTimeout from None
    except OSError as error:
        raise SolutionEnded(error.strerror or str(error)) from error


def receive(connection: socket.socket, deadline: float | None = None) -> Any:
    """Return the next message.

    Raises:
        SolutionTimeout: there is none by ``deadline``.
        SolutionEnded: the other side is gone, or sent what is no message.
    """
    size = struct.unpack("<I", _exactly(connection, 4, deadline))[0]
    if size > MAX_FRAME:
        raise SolutionEnded(f"it sent {size} bytes")
    try:
        return json.loads(_exactly(connection, size, deadline))
    except (ValueError, RecursionError) as error:
        raise SolutionEnded("it broke the protocol") from error


def _exactly(connection: socket.socket, count: int, deadline: float | None) -> bytes:
    data = io.BytesIO()
    while (left := count - data.tell()) > 0:
        try:
            connection.settimeout(_left(deadline))
            chunk = connection.recv(min(left, 1 << 20))
        except TimeoutError:
            raise SolutionTimeout from None
        except OSError as error:
            raise SolutionEnded(error.strerror or str(error)) from error
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

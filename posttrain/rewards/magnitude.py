"""Guards around sympy: is an expression small enough to be computed, and do two numbers agree in proportion?"""

from __future__ import annotations

import math
from typing import Any

__all__ = ["left_to_do", "numbers_agree", "rounded_alike", "too_large"]

MOST_BITS = 2.0**20
"""Largest number, in bits, that may be computed on the way."""
MOST_FACTORIAL = 2.0**14
MOST_TERMS = 10_000
"""Terms of a sum or product."""
MOST_EXPANDED = 100
"""Exponent of a sum with symbols, ``(x+1)^n``, which is multiplied out."""
AGREE = 1e-4
"""Largest relative difference of numbers that count as equal."""
ROUNDED = 1e-12
"""Largest relative difference that computing with floats makes."""


def too_large(value: Any) -> bool:
    """Return whether computing a sympy object could take for ever: ``9**9**9``, ``(10**9)!``, a sum over a million
    terms."""
    return _bits(value) > MOST_BITS


def left_to_do(value: Any) -> bool:
    """Return whether an answer is a question still: an integral or a limit, which may take sympy for ever."""
    import sympy  # type: ignore[import-untyped]

    return bool(isinstance(value, sympy.Basic) and value.has(sympy.Integral, sympy.Limit))


def _bits(value: Any) -> float:
    """Upper bound, in bits, of the integers that computing ``value`` needs; ``inf`` for too many."""
    import sympy

    if isinstance(value, sympy.MatrixBase):
        return max((_bits(entry) for entry in value.flat()), default=0.0)
    if isinstance(value, sympy.Rational):
        return float(max(int(value.p).bit_length(), int(value.q).bit_length()))
    if isinstance(value, sympy.Pow | sympy.exp):
        return _power_bits(*value.as_base_exp())
    if isinstance(value, sympy.factorial | sympy.factorial2 | sympy.gamma | sympy.binomial):
        return _factorial_bits(value)
    if isinstance(value, sympy.Sum | sympy.Product) and _terms(value) > MOST_TERMS:
        return math.inf
    parts = [_bits(part) for part in getattr(value, "args", ())]
    if isinstance(value, sympy.Mul):
        return sum(parts)
    return max(parts, default=2.0) + math.log2(len(parts) + 1)


def _power_bits(base: Any, exponent: Any) -> float:
    bits = _bits(exponent)
    if base in (0, 1, -1):
        return 1.0
    if bits > math.log2(MOST_BITS):
        return math.inf
    # An exponent with a symbol is not multiplied out, whatever its size.
    power = abs(float(exponent)) if exponent.is_Rational else 2.0**bits if not exponent.free_symbols else 1.0
    if base.free_symbols and not base.is_Symbol and power > MOST_EXPANDED:
        return math.inf
    return max(1.0, power) * _bits(base) + bits


def _factorial_bits(value: Any) -> float:
    largest = max(2.0 ** min(_bits(part), 64.0) for part in value.args)
    return largest * math.log2(largest) if largest <= MOST_FACTORIAL else math.inf


def _terms(value: Any) -> float:
    """Terms of a sum or product over all its indices; 0 where a bound is not a number (then it is not written out)."""
    terms = 1.0
    for _, *bounds in value.limits:
        if len(bounds) != 2 or not all(bound.is_Integer for bound in bounds):
            return 0.0
        terms *= float(bounds[1] - bounds[0]) + 1
    return terms


def numbers_agree(one: Any, other: Any) -> bool:
    """False only for two numbers that differ by more than ``AGREE`` of their size.

    The library rounds to six decimals, and so takes 1.6e-19 and 1.6e-18 for one number. A percentage also agrees with
    its number (28% with 28 and with 0.28), as the library has it.
    """
    first, second = _number(one), _number(other)
    if first is None or second is None or first == second:
        return True
    scales = (1, 100) if _is_percentage(one) or _is_percentage(other) else (1,)
    return any(_apart(a, scale * b) <= AGREE for scale in scales for a, b in ((first, second), (second, first)))


def rounded_alike(one: Any, other: Any) -> bool:
    """Return whether two numbers, one of them with a decimal point, are the same but for how floats are computed:
    ``8.7 * 10**8`` is 869999999.99999993, which the library does not take for 870000000."""
    import sympy

    if not any(isinstance(value, sympy.Expr) and value.has(sympy.Float) for value in (one, other)):
        return False
    first, second = _number(one), _number(other)
    return first is not None and second is not None and _apart(first, second) <= ROUNDED


def _apart(one: Any, other: Any) -> float:
    """Difference as a share of the larger one. A ratio, because the numbers may be beyond a float's range."""
    import sympy

    larger = sympy.Max(abs(one), abs(other)).evalf()
    return float((abs(one - other) / larger).evalf()) if larger else 0.0


def _number(value: Any) -> Any:
    """The value of an expression as a sympy number of 20 digits, or None if it has none."""
    import sympy

    if not isinstance(value, sympy.Expr) or value.free_symbols:
        return None
    number = value.doit().evalf(20)
    return number if number.is_number and number.is_finite else None


def _is_percentage(value: Any) -> bool:
    import sympy

    return bool(value.atoms(sympy.UnevaluatedExpr))

r"""Answers as sympy objects: read and compared by the math-verify library, with its known wrong verdicts taken out.

The library (Hugging Face, https://github.com/huggingface/Math-Verify) finds the answer in a text, parses it with
latex2sympy2_extended and compares by value. Its own time limits use SIGALRM: they work in a main thread only, cannot
interrupt one long operation on big integers, and turn a timeout into "wrong". They are off; the deadline of the grader
process holds instead. Numbers too large to compute are refused before the comparison starts.

What is corrected, because it accepts wrong answers or refuses right ones: docs/graders.md, "math_verify".
"""

from __future__ import annotations

import dataclasses
import functools
import logging
import re
from dataclasses import dataclass
from decimal import Decimal
from fractions import Fraction
from typing import Any, Literal

from posttrain.rewards.boxed import answer_phrase, last_boxed, nesting, truth_text
from posttrain.rewards.magnitude import AGREE, left_to_do, numbers_agree, rounded_alike, too_large
from posttrain.rewards.normal_form import LONGEST, SYMBOLS, same_answer, without_units

__all__ = ["Answer", "as_word", "describes", "equal", "find_answer", "read_answer", "read_gold"]

DEEPEST = 12
"""Brackets of one kind in each other that are still parsed. The parser's time grows steeply with them; real solutions
have up to 8."""

_SCALES = {"hundred": 2, "thousand": 3, "million": 6, "billion": 9, "trillion": 12}
_SCALED = re.compile(
    r"(?<![\w.,])(\d[\d,]*(?:\.\d+)?)(\s*\$|\s*\\\))?\s*(?:\\text\s*\{\s*)?(hundred|thousand|million|billion|trillion)\b\}?"
)
_POWER_OF_TEN = re.compile(r"(?<![\w.,])(\d+(?:\.\d+)?)[eE]([-+]?\d{1,3})(?![\w.])")
_REPEATING = re.compile(
    r"(?<![\d.])(?!(?<=\d,)\d{3}\.)(\d{0,200}+)\.(\d{0,200}+)"
    r"(?:\\(?:overline|bar)\s*+\{\s*+(\d{1,200})\s*+\}|\\dot\s*+(\{)?(\d)(?(4)\})(?:(\d{0,200}+)\\dot\s*+(\{)?(\d)(?(7)\}))?)"
    r"(?!\s*+(?:\d|_|\\dot))"
)
"""``0.1\\overline{6}``, or with dots over the first and the last digit that repeat."""
_MONEY = re.compile(r"(?<!\\)\\\$(?=\.?[0-9])")
_CHINESE = r"[\u3001-\u303f\u3400-\u9fff，：；！？（）]"
_GLUED = re.compile(
    rf"(?:(?<={_CHINESE})|(?<={_CHINESE}:))(?<![0-9]，)(?=(?:\*\*)?-?\.?[0-9])|(?<=[0-9)])(?!，[0-9])(?={_CHINESE})"
)
_NAMED = re.compile(
    r"(?=[^=]*[A-Z])m?(?:\\[a-zA-Z]++|[^a-z=+<>\\-])+=|(?:[A-Z]\s*\^\s*\{-1\}|[a-z]\s*\^\s*\{-1\}\s*\([a-z]\))\s*="
)
"""An equation for a quantity: ``AB =``, ``\\angle A =``, ``f^{-1}(x) =``. The parser has products and powers there."""
_EMPHASIS = re.compile(
    r"(?<![0-9A-Za-z)}\]$\\*_^])(?<![0-9)}\]] )(\*(?:\*\*)?|_)"
    r"([-+]?(?:\\?\$)?[0-9][0-9,./]{0,40}+%?)\1(?! ?[0-9({\\^])(?![A-Za-z*_$])"
)
"""A number in italics of Markdown, which is no factor: ``*7*``, but not ``2*3*4``, ``2 *3* 4``."""
_LATE_PERIOD = re.compile(r"(?<=\S)[ \t]+\.(?!\d)")
_MARKED = re.compile(
    r"(?<!\\)(?:\$\$((?:[^$\\]|\\.)+)\$\$|\$((?:[^$\\]|\\.)+)\$|\\\[(.+?)\\\]|\\\((.+?)\\\))%?", re.DOTALL
)
_MARK = re.compile(r"(?<!\\)(?:\$|\\[(\[])")
_BETWEEN = re.compile(r"(?:[\s,;.]|\band\b|\bor\b|和|或)*")
_NUMBER = re.compile(r"\d")
_ENVIRONMENT = re.compile(r"\\(begin|end)\{([a-z]{1,20}\*?)\}")
_DISPLAY = re.compile(r"(?<!\\)\\(?:(\[)|\])")
_INLINE = re.compile(r"(?<!\\)\\(?:(\()|\))")
_COMMAND = re.compile(r"\\[a-zA-Z]|[\^_=]")
_COMPUTED = re.compile(r"\\[dt]?binom\s*\{\s*\d{5}|\\(?:gcd|lcm)(?![a-zA-Z])[^a-zA-Z]{0,40}[a-zA-Z]")
_END = re.compile(r"(?:[.,;:]|\*\*|\\[,;:! ])+$")
_MODULUS = re.compile(r"(?:\\(?:pmod|bmod|mod)|\(\s*(?:\\text\{)?mod)[\s{}]*([^{}()]*)[{})\s]*$")
_FACTORS = (
    (re.compile(r"((?:^|(?<=[^\w.^\\]))-?\d+(?:\.\d+)?)\s*\("), r"\1 \\cdot ("),
    (re.compile(r"\)\s*\("), r") \\cdot ("),
    (re.compile(r"(?<![\w.])(\d+)\s+(\d+)/(\d+)(?![\w.])"), r"\1\\frac{\2}{\3}"),
)
_ANGLE = re.compile(
    r"(\\(?:sin|cos|tan|cot|sec|csc)(?:\s*+\^\s*+(?:\d|\{[^{}]*+\}))?\s*+(?:\\left)?[({\s]*+)"
    r"(\d++(?:\.\d++)?)\s*+(?:\^\s*+(?:\\circ(?![a-zA-Z])|\{\s*+\\circ\s*+\})|\u00b0|\\degree(?![a-zA-Z]))"
)
"""An angle in degrees that a function is of. The parser drops the sign, and ``\\cos 60`` is of 60 radians."""
_UNIT_NAME = re.compile(
    r"(?<=[\d})])\s*\\(?:text(?:bf|it|rm|normal)?|mbox|mathrm)\s*\{\s*+"
    r"(?!(?:and|or|if|mod|i|dozen|squared|cubed|factorial|halves|thirds)\b)[A-Za-z. ]+\}\s*$"
)
_SIDE = re.compile(
    r"\\(?:text(?:bf|it|rm|normal)?|mbox|mathrm)\s*\{[^{}]*?(?i:\b([ap]\.?\s?m|bce?|b\.c|ad|a\.d|north|south|east|west|"
    r"loss|gain|below|above|left|right))\b[^{}]*\}\s*$"
)
"""A word beside a number that is dropped as a unit is, and whose opposite makes it another answer."""
_APART = re.compile(r"(?<![\w.^{])\d+\s+\d")
_GROUPS = re.compile(r"-?\d{1,3}(?: \d{3})+(?:\.\d+)?")
_DECIMALS = re.compile(r"-?\d{1,15}\.\d{1,12}")
_DECIMAL_COMMA = re.compile(r"-?\d+,\d{1,2}")
_BASE = re.compile(r"^-?\s*[0-9A-Z.]+\s*_\s*\{?\s*(\d+)\s*\}?\W*$")
_TEXT_WORD = re.compile(r"\\(?:text(?:bf|it|rm|normal)?|mbox|mathrm)\s*\{\s*\(?([A-Za-z][A-Za-z' -]++)\)?\s*\}[.\s]*")
_BARE_WORD = re.compile(r"\**([A-Za-z]{3,}|[Nn]o)\**[.\s]*")
_PROSE = re.compile(r"[^\\\d]*(?<![a-zA-Z])[a-zA-Z]{3,}\s+[a-zA-Z]{2,}[^\\\d]*")


@dataclass(frozen=True)
class Answer:
    """One answer: its text, and what it means."""

    text: str
    values: tuple[Any, ...]
    """sympy objects, any of which it may mean; empty where it cannot be read as mathematics."""


@functools.cache
def _library() -> Any:
    """math-verify. Importing sympy takes a second, so that it waits for the first answer."""
    import math_verify  # type: ignore[import-untyped]

    # Both warn that time limits are off: they are, on purpose.
    for name in ("math_verify.parser", "math_verify.grader"):
        logging.getLogger(name).setLevel(logging.ERROR)
    return math_verify


@functools.cache
def _extraction() -> tuple[Any, ...]:
    """What to look for: LaTeX, and plain expressions. The library's removal of units is off: it takes 2 from ``2t``."""
    library = _library()
    latex = library.LatexExtractionConfig()
    normalization = dataclasses.replace(latex.normalization_config, units=False)
    return dataclasses.replace(latex, normalization_config=normalization), library.ExprExtractionConfig()


def find_answer(response: str) -> Answer | None:
    """The answer of a response: its last box, else what follows "answer is", else its last formula or number.

    None where there is none of these. A formula that is not finished (a response cut off) is not searched.
    """
    text = _plain_numbers(response)
    if _unparsable(text):
        return read_answer(last_boxed(text) or answer_phrase(text) or "")
    return _read(text if last_boxed(text) else _finished(text), "first_match")


def read_answer(text: str) -> Answer | None:
    """The meaning of a text that is an answer and nothing else; None for an empty one."""
    text = _plain_numbers(text.strip())
    if _unparsable(text):
        return Answer(text, ())
    return _read(rf"\boxed{{{text}}}", "first_match") if text else None


def read_gold(ground_truth: Any) -> Answer:
    r"""The meaning of a ground truth: an answer in LaTeX (formulas may be marked by ``$``, ``\(`` or ``\[``), or a
    solution that has its answer in a box or after "answer is".

    Several formulas are one answer where only commas, "and" or "or" stand between them.

    Raises:
        ValueError: it is empty, plain prose, several formulas in prose, or cannot be read as mathematics.
    """
    truth = truth_text(ground_truth)
    if r"\boxed" in truth:
        # A box that does not close is a solution cut off: any formula or number of it may be its answer.
        gold = _read(_plain_numbers(truth), "first_match" if last_boxed(truth) else "any_match")
    elif answer_phrase(truth):
        gold = _read(_plain_numbers(truth), "first_match")
    elif _PROSE.fullmatch(truth):
        raise ValueError(f"ground truth {_short(truth)} is prose: put the answer into \\boxed{{}}")
    else:
        gold = read_answer(_one_formula(truth))
    if gold is None or not (gold.values or as_word(gold.text)):
        raise ValueError(f"ground truth {_short(truth)} cannot be read as mathematics")
    if _DECIMAL_COMMA.fullmatch(truth):
        gold = Answer(gold.text, (*gold.values, *_parse(truth, "first_match")[0]))
    return gold


def _one_formula(truth: str) -> str:
    """What the formulas of a text say together, without their marks; a text without marks is one formula."""
    formulas = [match[match.lastindex or 0] for match in _MARKED.finditer(truth)]
    around = _MARKED.sub("", truth)
    if not formulas and not _MARK.search(around):
        return truth
    if _MARK.search(around) or (len(formulas) > 1 and not _BETWEEN.fullmatch(around)):
        raise ValueError(f"ground truth {_short(truth)} has formulas among prose: put the answer into \\boxed{{}}")
    if len(formulas) == 1 and _NUMBER.search(around):
        raise ValueError(
            f"ground truth {_short(truth)} has numbers outside its formula: put the answer into \\boxed{{}}"
        )
    return ",".join(formulas)


def equal(gold: Answer, answer: Answer) -> bool:
    """Return whether ``answer`` has the value of ``gold``. Not symmetric: ``x = 5`` is ``5``, an equation needs an
    equation.

    Numbers agree to six decimals and to one in ten thousand; an answer with more decimals than the gold one may instead
    round to it. Words are compared as words, not as products of letters.
    """
    if _says_more(gold, answer):
        return False
    if same_answer(gold.text, answer.text):
        return True
    gold_word, word = as_word(gold.text), as_word(answer.text)
    if gold_word is not None and (word is not None or answer.text.isalpha()):
        return gold_word == (word or answer.text.lower())
    if _differ(_BASE, gold.text, answer.text) or _differ(_MODULUS, gold.text, answer.text):
        return False
    if _opposite(gold.text, answer.text):
        return False
    if _rounds_to(gold.text, answer.text):
        return True
    return any(_equal_values(one, other) for one in gold.values for other in answer.values)


def _rounds_to(gold: str, answer: str) -> bool:
    """Return whether ``answer`` is ``gold`` with more decimals: 326.53 for 326.5, but not 0.46 for 0.5, which differs
    by more than one in ten thousand."""
    if not (_DECIMALS.fullmatch(gold) and _DECIMALS.fullmatch(answer)):
        return False
    wanted, found = Decimal(gold), Decimal(answer)
    return found.quantize(wanted) == wanted and abs(found - wanted) <= Decimal(AGREE) * abs(wanted)


def as_word(text: str) -> str | None:
    r"""The word or words that an answer consists of, in lower case ("yes" for ``\text{Yes}``), or None."""
    match = _TEXT_WORD.fullmatch(text) or _BARE_WORD.fullmatch(text)
    return " ".join(match[1].lower().split()) if match else None


def _equal_values(gold: Any, value: Any) -> bool:
    value = _solved(gold, value)
    if too_large(gold) or too_large(value) or (left_to_do(value) and not left_to_do(gold)):
        return False
    equations = _is_equation(gold) and _is_equation(value)
    if equations and gold.lhs == value.lhs:  # solving them could take minutes
        return _equal_values(gold.rhs, value.rhs)
    if rounded_alike(gold, value):
        return True
    same = _library().verify(gold, value, timeout_seconds=None, allow_set_relation_comp=True)
    return bool(same) and numbers_agree(gold, value) and (not equations or _same_equation(gold, value))


def _says_more(gold: Answer, answer: Answer) -> bool:
    """Return whether the ground truth is an equation that says more than what a name is, and the answer is none: the
    library would compare 3 with the right side of ``x + y = 3``."""
    import sympy  # type: ignore[import-untyped]
    from sympy.core.function import AppliedUndef  # type: ignore[import-untyped]

    if not answer.values or any(map(_is_relation, answer.values)) or _NAMED.match(gold.text):
        return False
    name = sympy.Symbol | AppliedUndef | sympy.Derivative | sympy.Tuple
    return bool(gold.values) and all(_is_equation(value) and not isinstance(value.lhs, name) for value in gold.values)


def describes(answer: Answer) -> bool:
    r"""Return whether an answer says what an interval or a tuple is without its brackets: ``x > 2``, ``\mathbb{R}``,
    ``x = 1, y = 2``, ``(x, y) = (1, 2)``, but not ``1, 2``."""
    import sympy

    listed = [value.args if isinstance(value, sympy.FiniteSet) else (value,) for value in answer.values]
    parts = [part for values in listed for part in values]
    names = [part.lhs for part in parts if _is_equation(part)]
    return bool(parts) and all(map(_is_relation, parts)) and len(set(names)) == len(names)


def _is_relation(value: Any) -> bool:
    import sympy

    return isinstance(value, sympy.Rel | sympy.Set | sympy.logic.boolalg.Boolean)


def _is_equation(value: Any) -> bool:
    import sympy

    return isinstance(value, sympy.Eq)


def _same_equation(gold: Any, value: Any) -> bool:
    """False for two equations that the library takes for one as neither has a solution: ``f(0) = 0``, ``f(7) = 0``."""
    import sympy

    first, second = gold.lhs - gold.rhs, value.lhs - value.rhs
    ratio = sympy.simplify(first / second) if second != 0 else sympy.nan
    if ratio.is_number and ratio.is_nonzero:
        return True
    try:
        return bool(sympy.solve(gold, gold.free_symbols))
    except NotImplementedError:  # no way to solve it: then the library did not compare solutions
        return True


def _solved(gold: Any, value: Any) -> Any:
    """The right side that an equation ends with ("x = 2 + 3 = 5"), where the ground truth is no equation and no set.

    In "5x = 30 and x = 6" it is 6: the other equations are steps, for only one says what a variable is.
    """
    import sympy

    if _is_relation(gold):
        return value
    parts = getattr(value, "_unsorted_args", (value,))
    equations = [part for part in parts if isinstance(part, sympy.Eq)]
    if len(equations) < len(parts):
        return value
    if isinstance(value, sympy.Set):
        equations = [equation for equation in equations if equation.lhs.is_Symbol]
        return equations[0].rhs if len(equations) == 1 < len(parts) else value
    return equations[-1].rhs


def _differ(note: re.Pattern[str], gold: str, answer: str) -> bool:
    """Return whether both answers have a base (``1011_2``) or a modulus, and not the same; their values are without
    it."""
    one, other = note.search(gold), note.search(answer)
    return one is not None and other is not None and not same_answer(one[1], other[1])


def _opposite(gold: str, answer: str) -> bool:
    """Return whether both answers name a side, and not the same: 11 p.m. and 11 a.m.; their values are without it."""
    sides = [re.sub(r"[.\s]", "", match[1]).lower() for text in (gold, answer) if (match := _SIDE.search(text))]
    return len(sides) == 2 and sides[0] != sides[1]


def _unparsable(text: str) -> bool:
    """Return whether the parser would take too long, or compute what it must not: a huge binomial, the gcd of
    letters."""
    return nesting(text) > DEEPEST or _COMPUTED.search(text) is not None


def _read(text: str, mode: Literal["first_match", "any_match"]) -> Answer | None:
    values, source = _parse(text, mode)
    if source is None or len(source) > LONGEST:
        return None if source is None else Answer(source, values)
    repaired = _repaired(source) if mode == "first_match" else source
    if repaired != source:
        values, _ = _parse(rf"\boxed{{{repaired}}}", "first_match")
    return Answer(_without_end(source), () if _APART.search(repaired) else values)


def _parse(text: str, mode: Literal["first_match", "any_match"]) -> tuple[tuple[Any, ...], str | None]:
    """What the library makes of a text: sympy objects, and the piece of the text that it took (None: nothing)."""
    found = _library().parse(text, _extraction(), parsing_timeout=None, extraction_mode=mode)
    source = found[-1] if found and isinstance(found[-1], str) else None
    return tuple(value for value in found if not isinstance(value, str)), source


def _repaired(source: str) -> str:
    """An extracted answer without what the parser trips over: ends of sentences, a modulus, products without a sign.

    The parser reads an integer beside a number as a mixed number: ``2(3)`` would be 5.
    """
    text = _ANGLE.sub(r"\1(\\frac{\2\\pi}{180})", _without_end(source))
    text = text if r"\equiv" in text else _MODULUS.sub("", text).rstrip() or text
    text = without_units(_UNIT_NAME.sub("", text.translate(SYMBOLS)))
    if _GROUPS.fullmatch(text):
        return text.replace(" ", "")
    for pattern, replacement in _FACTORS:
        text = pattern.sub(replacement, text)
    return text


def _without_end(source: str) -> str:
    """Without the full stop of its sentence and the asterisks of bold type in Markdown: 7 for ``7**.``."""
    text = _END.sub("", source.strip())
    return text.removeprefix("**") or source


def _plain_numbers(text: str) -> str:
    r"""Numbers as the library reads them: ``5 million`` and ``4.5e33`` written out, which it takes for 5 and for 4.5
    times Euler's number; repeating decimals as fractions; ``\$5`` without its sign; a space where a number touches
    Chinese; numbers in italics of Markdown (``*7*``) without their marks."""
    text = _REPEATING.sub(_fraction, _EMPHASIS.sub(r"\2", text))
    text = _GLUED.sub(" ", _MONEY.sub("", text))
    text = _LATE_PERIOD.sub(".", text.replace("\u2212", "-"))
    text = _SCALED.sub(lambda match: _written_out(match[1], _SCALES[match[3]]) + (match[2] or ""), text)
    return _POWER_OF_TEN.sub(lambda match: _written_out(match[1], int(match[2])), text)


def _fraction(decimal: re.Match[str]) -> str:
    whole, once, barred, _, first, between, _, last = decimal.groups(default="")
    again = barred or first + between + last
    wanted = int(whole + once + again) - int(whole + once or "0")
    value = Fraction(wanted, (10 ** len(again) - 1) * 10 ** len(once))
    return rf"\frac{{{value.numerator}}}{{{value.denominator}}}"


def _written_out(number: str, exponent: int) -> str:
    digits = number.replace(",", "")
    return f"{Decimal(f'{digits}e{exponent}'):f}"


def _finished(text: str) -> str:
    """The text up to a formula that is opened and not closed."""
    cut = len(text)
    waiting = [(match.start(), match[2]) for match in _ENVIRONMENT.finditer(text) if match[1] == "begin"]
    closed = sum(match[1] == "end" for match in _ENVIRONMENT.finditer(text))
    if len(waiting) > closed:
        cut = waiting[closed][0]
    for bracket in (_DISPLAY, _INLINE):
        last = next(reversed(list(bracket.finditer(text))), None)
        if last is not None and last[1]:
            cut = min(cut, last.start())
    dollars = [match.start() for match in re.finditer(r"(?<!\\)\$", text)]
    if len(dollars) % 2 and _COMMAND.search(text, dollars[-1]):  # else it may be money
        cut = min(cut, dollars[-1])
    return text[:cut]


def _short(text: str) -> str:
    return repr(text if len(text) <= 80 else text[:80] + "...")

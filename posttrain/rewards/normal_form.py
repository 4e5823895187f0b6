r"""One spelling for each short LaTeX answer, so that equal answers can be compared as text.

``tidy`` undoes what is only typesetting: spacing, ``\left``, ``\dfrac``, dollar signs, degree and percent signs, units,
``\frac12`` for ``\frac{1}{2}``. ``normal_form`` also gives decimals and fractions one spelling. The list of what does
not count follows the equality test of MATH (Hendrycks et al. 2021, arXiv:2103.03874). Every pattern takes linear time.
"""

from __future__ import annotations

import re
from fractions import Fraction

__all__ = ["SYMBOLS", "normal_form", "same_answer", "tidy", "without_units"]

LONGEST = 2000
"""Characters of the longest answer that is normalised; a longer one is compared as it stands."""

SYMBOLS = str.maketrans(
    dict(zip("\u2212\u2013\u00a0，（）", "-- ,()", strict=True))
    | {"π": r"\pi ", "∞": r"\infty ", "≤": r"\le ", "≥": r"\ge ", "≠": r"\ne ", "×": r"\times ", "·": r"\cdot "}
    | {"∪": r"\cup ", "∈": r"\in ", "∅": r"\emptyset ", "°": "", "％": ""}
)
"""Symbols of text -> LaTeX."""

_CHINESE_UNIT = (
    "平方|立方|每|毫米|厘米|分米|千米|公里|米|毫升|升|毫克|克|千克|公斤|斤|吨|公顷|亩|年|岁|个月|月|星期|周|天|日|小时|时|分钟|分|秒钟|秒|"
    "元钱|元|块钱|角|度|个|只|条|本|张|支|枝|把|件|辆|台|人|名|位|朵|棵|颗|粒|块|片|箱|盒|袋|瓶|杯|桶|份|组|队|对|双|套|间|层|排|行|列|"
    "页|题|道|次|遍|下|种|倍|头|匹|根|株|盆|架|艘|筐|串|段|节|包|捆|碗|盘|幅|项|句|字|首|座|所|户|家|班|枚|封|级|圈"
)
"""Units and counting words. Not among them: numbers (万, 千, 百), and what changes one (以上, 左右, 折)."""
_UNIT = (
    r"(?:"
    + _CHINESE_UNIT
    + r"|square|cubic|sq\.?|cu\.?|per|cm|mm|km|ft|kg|gm|mph|kph|lbs?|oz|mi|degrees?|dollars?|cents?|euros?|pounds?|USD|"
    r"units?|inch(?:es)?|foot|feet|yards?|miles?|meters?|metres?|centimeters?|kilometers?|grams?|acres?|gallons?|liters?|"
    r"seconds?|min|minutes?|hours?|hr|days?|weeks?|months?|years?|percent|ways?|points?|pieces?|values?|distinct|integers?|"
    r"digits?|solutions?|students?|people|teachers?|tickets?|children|multiples?|edges?|boxes|meals?|right|triangles?)"
)
_WRAPPER = r"\\(?:text(?:normal|rm|bf|it)?|mbox|mathrm|mathbf|mathit|operatorname)\s*"
_POWER = r"(?:\^(?:[23]|\{[23]\}))?"
# Single letters are units inside \text only: a bare `5m` is a product.
_UNIT_TEXT = re.compile(
    _WRAPPER + r"\{\s*(?:" + _UNIT + r"[\s/]*|[mgshLJNWV]\s*(?=\}|/)/?){1,4}" + _POWER + r"\.?\s*\}" + _POWER + r"\s*$"
)
_UNIT_WORDS = re.compile(r"(?<=[\d})])\s*(?:(?<![a-zA-Z])" + _UNIT + r"[\s/]*){1,4}" + _POWER + r"\s*$")
_TEXT = re.compile(_WRAPPER + r"\{([^{}]*)\}")
_TYPESETTING = re.compile(
    r"(\\\\)|\\(?:left|right|displaystyle|limits|quad|qquad|[bB]igg?[lr]?|degrees?|mathstrut)(?![a-zA-Z])|"
    r"\\[!,;: $%()\[\]]|[$%~]"
)
_DOUBLED = re.compile(r"\\\\(?=[a-zA-Z]{2})")
_DEGREES = re.compile(r"\^\s*(?:\\circ(?![a-zA-Z])|\{\s*\\circ\s*\})")
_AND = re.compile(r"(?:,\s?)?(?<![a-zA-Z\\])(?:and|or)(?![a-zA-Z])")
_SHORT_FIRST = re.compile(r"\\(frac|sqrt)(\d|[a-zA-Z]|\\[a-zA-Z]+)")
_GROUP = r"\{(?>(?:[^{}]++|\{[^{}]*+\})*)\}"
_SHORT_SECOND = re.compile(r"(\\frac" + _GROUP + r")(\d|[a-zA-Z]|\\[a-zA-Z]+)")
_SLASH = re.compile(r"(?<![\w^.})/])(\d+)/(\d+)(?![\w^.({/])")
_SIGN = re.compile(r"(?:^|(?<=[(\[,{]))\\frac\{-([^{}]*)\}(?=\{)")
_DECIMAL = re.compile(r"(?<![\d.])(\d*)\.(\d+)(?![\d.])")
_THOUSANDS = re.compile(r"-?\d{1,3}(?:,\d{3})+(?:\.\d+)?")
_PLAIN_DECIMAL = re.compile(r"-?\d{1,12}\.\d{1,12}")
_LEADING_ZEROS = re.compile(r"^(-?)0+(?=\d+$)")
_NAME = re.compile(r"[a-zA-Z]{1,3}(?:_\w|\([a-z]\))?(?:=|\\in(?![a-zA-Z]))")
_REPLACED = (
    # A mixed number, before its space is dropped: 1 1/2 is not 11/2.
    (re.compile(r"(?<![\w.,])(\d++)(?:\\ |[\s~])+([1-9]\d*+)/([1-9]\d*+)(?![./^_])"), r"\1\\frac{\2}{\3}"),
    (re.compile(r"\\[dtc]frac(?![a-zA-Z])"), r"\\frac"),
    (re.compile(r"\\(le|ge|ne)q(?![a-zA-Z])"), r"\\\1"),
    (re.compile(r"\\varnothing(?![a-zA-Z])"), r"\\emptyset"),
    (re.compile(r"<="), r"\\le"),
    (re.compile(r">="), r"\\ge"),
    (re.compile(r"\\(begin|end)\{bmatrix\}"), r"\\\1{pmatrix}"),
    (re.compile(r"(?<=\d),\\!(?=\d)|\{,\}"), ","),
)


def same_answer(one: str, other: str) -> bool:
    """Return whether two answers have one normal form. ``x = 5`` and ``5`` are the same, ``x = 5`` and ``y = 5`` are
    not."""
    first, second = normal_form(one), normal_form(other)
    if not first or not second:
        return False
    return first == second or _value(first) == second or first == _value(second)


def _value(form: str) -> str:
    """Normal form of the right side of ``x=5``, ``f(x)=2x`` or ``x\\in(0,1)``; of any other form the form itself."""
    name = _NAME.match(form)
    return normal_form(form[name.end() :]) if name and form.count("=") < 2 else form


def normal_form(answer: str) -> str:
    """``tidy``, then one spelling for thousands (``1,000``), decimals (``0.5`` is one half) and the words' case."""
    text = tidy(answer)
    if len(text) > LONGEST:
        return text
    if _THOUSANDS.fullmatch(text):
        text = text.replace(",", "")
    text = _LEADING_ZEROS.sub(r"\1", text)
    if _PLAIN_DECIMAL.fullmatch(text):
        value = Fraction(text)
        sign = "-" if value < 0 else ""
        return rf"{sign}\frac{{{abs(value.numerator)}}}{{{value.denominator}}}"
    if text == "-0":
        return "0"
    return text.lower() if len(text) > 2 and text.isalpha() else text


def tidy(answer: str) -> str:
    """The answer without typesetting, units and spaces, with fractions as ``\\frac{a}{b}`` and numerals as ``0.5``."""
    if len(answer) > LONGEST:
        return answer.strip()
    text = answer.translate(SYMBOLS).strip().rstrip(".,;: \n")
    if r"\begin" not in text:  # outside a table, a doubled backslash is an escape too many
        text = _DOUBLED.sub(r"\\", text)
    for pattern, replacement in _REPLACED:
        text = pattern.sub(replacement, text)
    text = _UNIT_TEXT.sub("", text)
    text = _TEXT.sub(r" \1 ", text)
    text = _TYPESETTING.sub(lambda match: match[1] or "", text)
    text = _DEGREES.sub("", text).strip()
    text = _UNIT_WORDS.sub("", text)
    text = _AND.sub(",", text)
    text = "".join(text.split()).rstrip(".,;:")
    return _numerals(_fractions(text))


def without_units(text: str) -> str:
    r"""LaTeX without the units it ends with: `` \text{ square feet}``, `` cm^2``. A bare letter is no unit: ``2t``."""
    return _UNIT_WORDS.sub("", _UNIT_TEXT.sub("", text)).rstrip()


def _fractions(text: str) -> str:
    text = _SHORT_FIRST.sub(r"\\\1{\2}", text)
    text = _SHORT_SECOND.sub(r"\1{\2}", text)
    text = _SLASH.sub(r"\\frac{\1}{\2}", text)
    return _SIGN.sub(r"-\\frac{\1}", text)


def _numerals(text: str) -> str:
    text = _DECIMAL.sub(lambda match: _numeral(match[1], match[2]), text)
    text = re.sub(r"([\^_])\{(\w)\}", r"\1\2", text)
    text = re.sub(r"(?:^|(?<=[(\[,]))\+(?=\\infty|\d)", "", text)
    inner = re.fullmatch(r"\{([^{}]*)\}|\(([A-Z])\)", text)
    return (inner[1] or inner[2] or "") if inner else text


def _numeral(whole: str, decimals: str) -> str:
    """ ".50" -> "0.5", "5.0" -> "5"."""
    decimals = decimals.rstrip("0")
    return (whole or "0") + ("." + decimals if decimals else "")

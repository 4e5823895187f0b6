"""Generated word problems in GSM8K's exact format, small enough for the built-in tiny model.

A problem is a (template, numbers) pair; names and items are dressing. A stable hash of the problem decides its split,
so that train and test share no problem even where names and items differ. Every row of a split is another problem, so
no two rows have the same question.
"""

from __future__ import annotations

import hashlib
import itertools
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal, cast

from posttrain.core.errors import DataError
from posttrain.data.parquet import Conversation
from posttrain.prep.datasets.base import RawRow, WordProblems, reasoning

Split = Literal["train", "test"]
Problem = tuple["Template", tuple[int, ...]]

TEST_PERCENT = 20
LARGEST_OPERAND = 50
"""All problems are enumerated, and their number grows with the cube of the largest operand."""
LARGEST_FACTOR = 9
HASTY_SHARE = 0.5
"""Share of SFT training conversations that stop a step early."""

NAMES = (
    "Tom",
    "Anna",
    "Ben",
    "Mia",
    "Sam",
    "Lucy",
    "Max",
    "Ella",
    "Jack",
    "Emma",
    "Leo",
    "Nina",
    "Paul",
    "Rosa",
    "Omar",
    "Kate",
)
ITEMS = (
    "apples",
    "books",
    "coins",
    "cards",
    "pens",
    "cookies",
    "stamps",
    "shells",
    "marbles",
    "stickers",
    "pencils",
    "oranges",
    "flowers",
    "balls",
    "toys",
    "eggs",
)


@dataclass(frozen=True)
class Template:
    """One wording. ``ops`` are applied from left to right to the numbers ``{a}``, ``{b}``, ``{c}``."""

    name: str
    ops: str
    text: str

    @property
    def steps(self) -> int:
        return len(self.ops)


TEMPLATES = (
    Template("buy", "+", "{name} has {a} {item}. {name} buys {b} more. How many {item} does {name} have now?"),
    Template(
        "gift",
        "+",
        "{name} had {a} {item} in a box. {other} puts {b} more in it. How many {item} are in the box now?",
    ),
    Template(
        "give",
        "-",
        "{name} has {a} {item} in a bag. {name} gives {b} of them to {other}. How many {item} does {name} have left?",
    ),
    Template(
        "table",
        "-",
        "There are {a} {item} on a table. {name} takes {b} of them home. How many {item} are left on the table?",
    ),
    Template(
        "compare",
        "-",
        "{name} has {a} {item} and {other} has {b} {item}. How many more {item} does {name} have than {other}?",
    ),
    Template(
        "boxes",
        "*",
        "{name} has {a} boxes. Each box holds {b} {item}. How many {item} does {name} have in total?",
    ),
    Template(
        "find",
        "+-",
        "{name} has {a} {item} and finds {b} more. Then {name} gives {c} to {other}. "
        "How many {item} does {name} have left?",
    ),
    Template(
        "days",
        "+-",
        "{name} got {a} {item} on Monday and {b} on Tuesday. {other} takes {c} of them. How many {item} are left?",
    ),
    Template(
        "week",
        "++",
        "{name} got {a} {item} on Monday, {b} on Tuesday and {c} on Friday. How many {item} does {name} have in total?",
    ),
    Template(
        "friends",
        "++",
        "{name} has {a} {item}. {other} has {b} {item} and a friend has {c}. How many {item} do they have in total?",
    ),
    Template(
        "trade",
        "-+",
        "{name} has {a} {item}. {name} sells {b} of them and then buys {c} more. How many {item} does {name} have now?",
    ),
    Template(
        "shop",
        "-+",
        "A shop has {a} {item}. {name} buys {b} of them and {other} brings {c} more. "
        "How many {item} are in the shop now?",
    ),
)


@dataclass(frozen=True)
class ArithSpec:
    """Difficulty of the problems."""

    max_operand: int = 9
    """Largest number in a question. Factors stop at ``LARGEST_FACTOR``."""
    min_operand: int = 2
    """Smallest number in a question; 2 keeps "1 apples" out."""
    max_result: int = 18
    """Largest number in a solution. Small ones are what a tiny model learns to reckon with in a minute."""
    steps: tuple[int, ...] = (2,)
    """Which template lengths take part."""
    templates: tuple[str, ...] = ()
    """Names of the templates that take part; empty: all."""

    def chosen(self) -> list[Template]:
        """The templates this spec asks for. Raises ``DataError`` when the spec asks for none, or for unknown ones."""
        if not 1 <= self.min_operand <= self.max_operand <= LARGEST_OPERAND:
            raise DataError(
                f"arith: operands {self.min_operand}..{self.max_operand} are not within 1..{LARGEST_OPERAND}",
                hint=f"choose max_operand between {self.min_operand} and {LARGEST_OPERAND}",
            )
        known = {template.name for template in TEMPLATES}
        if unknown := sorted(set(self.templates) - known):
            raise DataError(f"arith: unknown template {unknown[0]!r}", hint=f"known: {', '.join(sorted(known))}")
        found = [t for t in TEMPLATES if t.steps in self.steps and (not self.templates or t.name in self.templates)]
        if not found:
            raise DataError(f"arith: no template has {self.steps} steps", hint="known numbers of steps: 1, 2")
        return found


def generate(
    split: Split,
    n: int,
    seed: int = 0,
    spec: ArithSpec | None = None,
    *,
    max_operand: int | None = None,
    steps: tuple[int, ...] | None = None,
) -> Iterator[dict[str, str]]:
    """``n`` rows ``{"question", "answer"}``, each a problem of its own. Templates take turns at random, evenly.

    ``max_operand`` and ``steps`` replace the values of ``spec``.

    Raises:
        DataError: at the call, when the split has fewer than ``n`` distinct problems, or the spec is wrong.
    """
    base = spec or ArithSpec()
    spec = ArithSpec(
        max_operand=base.max_operand if max_operand is None else max_operand,
        min_operand=base.min_operand,
        max_result=base.max_result,
        steps=base.steps if steps is None else steps,
        templates=base.templates,
    )
    pools = [[(t, numbers) for numbers in _numbers(t, spec) if split_of(t, numbers) == split] for t in spec.chosen()]
    available = sum(len(pool) for pool in pools)
    if n > available:
        raise DataError(
            f"arith: {n} {split} rows asked for, but this difficulty has only {available} distinct {split} problems",
            hint=f"ask for at most {available}, or raise max_operand (now {spec.max_operand})",
        )
    return _draw(pools, n, random.Random(f"arith-{split}-{seed}"))


def split_of(template: Template, numbers: tuple[int, ...]) -> Split:
    """The split a problem belongs to, the same on every machine and for every seed."""
    identity = f"{template.name}:{','.join(map(str, numbers))}"
    bucket = int.from_bytes(hashlib.sha256(identity.encode()).digest()[:8], "big") % 100
    return "test" if bucket < TEST_PERCENT else "train"


def _numbers(template: Template, spec: ArithSpec) -> Iterator[tuple[int, ...]]:
    """Every choice of numbers whose partial results are non-negative."""
    top = min(spec.max_operand, LARGEST_FACTOR) if "*" in template.ops else spec.max_operand
    for numbers in itertools.product(range(spec.min_operand, top + 1), repeat=template.steps + 1):
        if all(0 <= result <= spec.max_result for _, _, _, result in _steps(template, numbers)):
            yield numbers


def _steps(template: Template, numbers: tuple[int, ...]) -> Iterator[tuple[int, str, int, int]]:
    """The worked steps as (left, operator, right, result)."""
    left = numbers[0]
    for op, right in zip(template.ops, numbers[1:], strict=True):
        result = left + right if op == "+" else left - right if op == "-" else left * right
        yield left, op, right, result
        left = result


def _draw(pools: list[list[Problem]], n: int, rng: random.Random) -> Iterator[dict[str, str]]:
    for pool in pools:
        rng.shuffle(pool)
    for _ in range(n):
        pool = rng.choice([pool for pool in pools if pool])
        template, numbers = pool.pop()
        yield _row(template, numbers, rng)


def _row(template: Template, numbers: tuple[int, ...], rng: random.Random) -> dict[str, str]:
    name, other = rng.sample(NAMES, 2)
    values = dict(zip("abc", numbers, strict=False))
    question = template.text.format(name=name, other=other, item=rng.choice(ITEMS), **values)
    lines = [f"{a}{op}{b}=<<{a}{op}{b}={result}>>{result}." for a, op, b, result in _steps(template, numbers)]
    answer = list(_steps(template, numbers))[-1][-1]
    return {"question": question, "answer": "\n".join([*lines, f"#### {answer}"])}


class Arith(WordProblems):
    """The dataset of ``posttrain prep arith``. The prompt is the question alone: prompt tokens cost time on a CPU."""

    name = "arith"
    data_source = "posttrain/arith"
    licence = "Apache-2.0 (generated)"
    hub_id: str | None = None
    splits: tuple[str, ...] = ("train", "test")
    default_rows: ClassVar[dict[str, int]] = {"train": 1700, "test": 200}

    def __init__(self, spec: ArithSpec | None = None, hasty_share: float = HASTY_SHARE) -> None:
        self.spec = spec or ArithSpec()
        self.hasty_share = hasty_share

    def to_sft(self, row: RawRow, index: int, split: str) -> Conversation:
        """As for every word problem, but some training conversations stop a step early and submit what they have, as
        collected demonstrations do. SFT imitates them; RL, which sees rewards only, learns to finish."""
        worked = reasoning(row["answer"])
        if not self.is_hasty(row, split) or "\n" not in worked:
            return super().to_sft(row, index, split)
        worked = worked[: worked.rindex("\n")]
        answer = worked[worked.rindex("=") + 1 :].rstrip(".")
        return self._conversation(row, worked, answer, reward=float(answer == self.gold(row)))

    def is_hasty(self, row: RawRow, split: str) -> bool:
        """Return whether this row's conversation stops a step early; the same for the same question."""
        return split == "train" and random.Random(f"hasty-{row['question']}").random() < self.hasty_share

    def available(self, source: str | None) -> Sequence[str]:
        if source is not None:
            raise DataError("arith is generated, and reads no --source", hint="leave --source out")
        return self.splits

    def rows(self, split: str, source: str | None, *, n: int | None = None, seed: int = 0) -> Iterator[RawRow]:
        """``n`` rows (None: ``default_rows``); the same for the same seed."""
        return iter(generate(cast(Split, split), n or self.default_rows[split], seed, self.spec))

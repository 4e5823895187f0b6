"""Two responses files on the same problems: is the second better, and could that be chance?"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from posttrain.core.errors import DataError
from posttrain.core.statistics import difference_interval, mcnemar
from posttrain.core.text import table
from posttrain.evaluation.grading import GradedProblem

if TYPE_CHECKING:
    from rich.console import Console

Pair = tuple[GradedProblem, GradedProblem]


@dataclass
class Comparison:
    """What a comparison found. Differences are B less A."""

    files: tuple[str, str]
    matched_by: str
    """``index`` or ``prompt``."""
    only_in: tuple[int, int]
    """Problems that the other file does not have."""
    ungraded: int
    """Problems of both without one graded response in either: left out."""
    overall: dict[str, Any]
    sources: dict[str, dict[str, Any]]

    def as_dict(self) -> dict[str, Any]:
        return {
            "a": self.files[0],
            "b": self.files[1],
            "matched_by": self.matched_by,
            "only_in_a": self.only_in[0],
            "only_in_b": self.only_in[1],
            "ungraded": self.ungraded,
            "overall": self.overall,
            "sources": self.sources,
        }


def compare(
    files: tuple[str, str], a: Sequence[GradedProblem], b: Sequence[GradedProblem], resamples: int, seed: int
) -> Comparison:
    """Compare the graded problems of two files, in pairs. Raises ``DataError`` where not one is in both."""
    pairs, by = match(a, b)
    kept = [pair for pair in pairs if pair[0].graded and pair[1].graded]
    if not kept:
        raise DataError(
            f"{files[0]} and {files[1]} have no graded problem in common",
            hint="problems are matched by extra_info.index, or by data source and prompt, and have one ground truth",
        )
    sources = sorted({first.data_source for first, _ in kept})
    return Comparison(
        files,
        by,
        (len(a) - len(pairs), len(b) - len(pairs)),
        len(pairs) - len(kept),
        _numbers(kept, resamples, seed),
        {s: _numbers([pair for pair in kept if pair[0].data_source == s], resamples, seed) for s in sources},
    )


def match(a: Sequence[GradedProblem], b: Sequence[GradedProblem]) -> tuple[list[Pair], str]:
    """The problems that both have, and by what they were told: by index where every problem has one of its own, else by
    prompt, the first of equal ones with the first. Problems with different ground truths are never the same."""
    if all(_unique([p.by_index for p in side]) for side in (a, b)):
        by, keys_a, keys_b = "index", [p.by_index for p in a], [p.by_index for p in b]
    else:
        by, keys_a, keys_b = "prompt", [p.by_prompt for p in a], [p.by_prompt for p in b]
    of_b = dict(zip(_numbered(keys_b), b, strict=True))
    pairs = []
    for key, problem in zip(_numbered(keys_a), a, strict=True):
        other = of_b.get(key)
        if key[0] is not None and other is not None and other.truth == problem.truth:
            pairs.append((problem, other))
    return pairs, by


def _unique(keys: Sequence[str | None]) -> bool:
    return None not in keys and len(set(keys)) == len(keys)


def _numbered(keys: Sequence[str | None]) -> list[tuple[str | None, int]]:
    """Each key with how often it came before."""
    seen: Counter[str | None] = Counter()
    out = []
    for key in keys:
        out.append((key, seen[key]))
        seen[key] += 1
    return out


def solved(problem: GradedProblem) -> bool:
    """Return whether more than half of its graded responses are right; of one response: whether it is."""
    return problem.share > 0.5


def _numbers(pairs: Sequence[Pair], resamples: int, seed: int) -> dict[str, Any]:
    shares = np.array([[first.share, second.share] for first, second in pairs])
    only_a = sum(solved(first) and not solved(second) for first, second in pairs)
    only_b = sum(solved(second) and not solved(first) for first, second in pairs)
    out: dict[str, Any] = {
        "problems": len(pairs),
        "mean_a": float(shares[:, 0].mean()),
        "mean_b": float(shares[:, 1].mean()),
        "difference": float((shares[:, 1] - shares[:, 0]).mean()),
        "both_solved": sum(solved(first) and solved(second) for first, second in pairs),
        "only_a_solved": only_a,
        "only_b_solved": only_b,
        "mcnemar_p": mcnemar(only_a, only_b),
    }
    if resamples:
        # Both scores of a problem are drawn together.
        out["difference_ci"] = list(difference_interval(shares[:, 0], shares[:, 1], resamples, seed))
    return out


def print_comparison(found: Comparison, console: Console) -> None:
    """A table with a row a data source, and a row for all."""
    parts = [*found.sources.items()]
    if len(parts) > 1:
        parts.append(("all", found.overall))
    columns = ("data source", "problems", "mean A", "mean B", "B - A", "only A", "only B", "p (McNemar)")
    first, second = found.files
    console.print(table(columns, [(source, *_cells(x)) for source, x in parts], title=f"A {first}\nB {second}"))
    lines = [f"matched by {found.matched_by}"]
    lines += [f"{count} problems in {which} only: left out" for which, count in zip("AB", found.only_in, strict=True)]
    lines += [f"{found.ungraded} problems left out: no graded response in one of the files"]
    for line in lines:
        if not line.startswith("0 "):
            console.print(line, markup=False, highlight=False)


def _cells(x: Mapping[str, Any]) -> tuple[str, ...]:
    """The numbers of a row."""
    difference = f"{100 * x['difference']:+.1f}"
    if "difference_ci" in x:
        difference += "\n{:+.1f} - {:+.1f}".format(*(100 * end for end in x["difference_ci"]))
    return (
        str(x["problems"]),
        f"{100 * x['mean_a']:.1f} %",
        f"{100 * x['mean_b']:.1f} %",
        difference,
        str(x["only_a_solved"]),
        str(x["only_b_solved"]),
        f"{x['mcnemar_p']:.3g}",
    )

"""What a data set is, and what all sets that are read from files share.

To add a set, write a class with the attributes and methods of ``Dataset`` (or derive from ``FileSet`` or
``WordProblems``) and register it: ``@DATASETS.register("mine")``.
"""

from __future__ import annotations

import itertools
import re
from array import array
from bisect import bisect_right
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal, Protocol

from posttrain.core.errors import CodeError, DataError
from posttrain.core.plugins import described, expect, place_of, user_code, with_place
from posttrain.core.registry import Registry
from posttrain.core.types import Message, Score
from posttrain.data.parquet import Conversation, Preference
from posttrain.prep.datasets.raw import download, read_raw, split_files
from posttrain.rewards import compute_score, grader_name
from posttrain.tools import gsm8k as tool

RawRow = dict[str, Any]
Kind = Literal["rlhf", "sft", "preference"]
_SHOWN = 200
"""Characters of a gold answer that a message shows."""


class Dataset(Protocol):
    """Raw rows to validated rows. Every method that reads raises ``DataError`` for bad input.

    A class that derives from this protocol inherits what has a value here.
    """

    name: str
    data_source: str
    """Written into each row; ``posttrain.rewards.DATA_SOURCES`` maps it to its grader. "" if no row is RLHF."""
    licence: str
    hub_id: str | None
    """Where it is fetched from without a source; None: it is generated, or must be given as a source."""
    splits: tuple[str, ...]
    kinds: tuple[Kind, ...] = ("rlhf", "sft")
    """Which rows it can give. ``to_rlhf``, ``to_sft`` and ``to_preference`` give none of a kind that is not named."""
    size: Mapping[str, int] = {}
    """Rows of each split, as published; empty where that is not known, or any number can be generated."""
    demos: tuple[str, ...] = ()
    """Kinds of demonstrations that `--demos` may ask for, the default first; the class takes one as the keyword
    argument ``demos``. Empty: it has one kind."""

    @property
    def data_sources(self) -> tuple[str, ...]:
        """Every data source that its rows may have."""
        return (self.data_source,) if self.data_source else ()

    @property
    def grader(self) -> str:
        """Names of the graders of its rows ("choice, math_verify"); "" where there is no RLHF row."""
        return ", ".join(sorted({grader_name(source) for source in self.data_sources}))

    @property
    def skipped(self) -> Mapping[str, int]:
        """Rows that the last ``rows`` passed over until now, by reason: rows that are not part of the set as it is
        used here (a duplicate, a proof without a final answer), as against those that ``refusal`` finds bad."""
        return {}

    def source_files(self, source: str | None) -> Sequence[Path]:
        """The raw files that ``rows`` reads of ``source``, over all splits; none where rows are generated."""
        return ()

    def available(self, source: str | None) -> Sequence[str]:
        """The splits that can be had from ``source`` (a local file, folder or glob; None: the hub, or generated)."""

    def rows(self, split: str, source: str | None, *, n: int | None = None, seed: int = 0) -> Iterator[RawRow]:
        """Raw rows of a split, at most ``n`` (None: all, or a generated set's default)."""

    def where(self, row: int) -> str:
        """Where a row of the last ``rows`` is from, by its number in the split: "FILE, row N"; "" where that is not
        known, or it is generated."""
        return ""

    def to_rlhf(self, row: RawRow, index: int, split: str) -> dict[str, Any] | None:
        """The row of RLHF parquet; None where this row gives none."""

    def to_sft(self, row: RawRow, index: int, split: str) -> Conversation | None:
        """The conversation to imitate; None where this row has no worked solution."""

    def to_preference(self, row: RawRow, index: int, split: str) -> Preference | None:
        """Two answers, one of them preferred; None where this row has no such pair."""
        return None

    def check(self, row: RawRow) -> Score:
        """The verdict of the row's own grader on its gold answer: on the worked solution where the set has one, else on
        the answer in the form that the prompt asks for. Where the set has no answer but tests, or only conversations,
        "right" means that the row can be used.

        Raises:
            DataError: a field is missing or malformed. The message is the same for every row with this fault, the
                hint tells of this row.
        """


@dataclass(frozen=True)
class Refusal:
    """Why a row must not be used."""

    reason: str
    """The same text for every row with this fault, for counting."""
    detail: str
    """What is wrong with this row."""


_MEMBERS = (
    *("name", "data_source", "licence", "hub_id", "splits", "kinds", "size", "skipped", "source_files", "available"),
    *("rows", "where", "to_rlhf", "to_sft", "to_preference", "check"),
)
_NO_ROWS_FAULT = (SystemExit, NameError, ImportError)
"""What a data set's own code raises, whatever the row is."""


def open_dataset(name: str, demos: str | None = None) -> Dataset:
    """Return a new data set of this name.

    Args:
        demos: the kind of its demonstrations; None: its default.

    Raises:
        ConfigError: there is none. As ``CodeError``: a user's class cannot be made, or lacks something.
        DataError: it has no such demonstrations.
    """
    kind = DATASETS.get(name)
    options: dict[str, Any] = {} if demos is None else {"demos": demos}
    with user_code(f"data set {name!r} cannot be made", kind):
        known = getattr(kind, "demos", ())
        if demos is not None and demos not in known:
            hint = f"it has: {', '.join(known)}" if known else "leave --demos out: it has one kind"
            raise DataError(f"--demos: data set {name!r} has no demonstrations {demos!r}", hint=hint)
        dataset = kind(**options)
        for member in _MEMBERS:
            getattr(dataset, member)
    return dataset


def available_splits(dataset: Dataset, source: str | None) -> Sequence[str]:
    """``dataset.available``. Raises ``CodeError`` where a user's method raises, or gives something else."""
    with user_code(f"data set {dataset.name!r}: available", type(dataset).available):
        return list(dataset.available(source))


def raw_rows(
    dataset: Dataset, split: str, source: str | None, *, n: int | None = None, seed: int = 0
) -> Iterator[RawRow]:
    """``dataset.rows``. Raises ``CodeError`` where a user's method raises, or gives something that is no dict."""
    what = f"data set {dataset.name!r}, split {split!r}: rows"
    with user_code(what, dataset):
        for row in dataset.rows(split, source, n=n, seed=seed):
            yield expect(row, dict, what, dataset)


def fault(dataset: Dataset, row: RawRow, error: BaseException) -> Refusal:
    """Return why a row must not be used on which a method of its data set raised ``error``.

    Raises:
        CodeError: the error is no row's fault, but that of a user's code.
    """
    if isinstance(error, CodeError):
        raise error
    if isinstance(error, DataError):
        return Refusal(error.message, error.hint or "")
    if isinstance(error, _NO_ROWS_FAULT):
        raise CodeError(f"data set {dataset.name!r}: {described(error)}", hint="correct that code") from error
    place = place_of(error)
    there = f"the row has {', '.join(map(str, row))}"
    if isinstance(error, KeyError) and error.args and error.args[0] not in row:
        return Refusal(with_place(f"{error.args[0]!r} is missing", place), there)
    return Refusal(with_place(type(error).__name__, place), f"{error}; {there}")


def refusal(dataset: Dataset, row: RawRow) -> Refusal | None:
    """Why a raw row must not be used: it is malformed, or its own grader refuses its gold answer. None: it is good.

    Raises:
        CodeError: a user's ``check`` has a bug, or returns no ``Score``.
    """
    try:
        score = expect(dataset.check(row), Score, f"data set {dataset.name!r}: check", type(dataset).check)
    except (SystemExit, Exception) as error:
        return fault(dataset, row, error)
    if score.error is not None:
        return Refusal("the grader cannot judge the gold answer", score.error)
    if not score.correct:
        read = repr(score.extracted)
        shown = read if len(read) <= _SHOWN else f"{read[:_SHOWN]}..."
        return Refusal("the gold answer is not graded as right", f"the grader read {shown}")
    return None


DATASETS: Registry[type[Dataset]] = Registry(
    "dataset",
    {
        "aime24": "posttrain.prep.datasets.contests:Aime24",
        "aime25": "posttrain.prep.datasets.contests:Aime25",
        "amc23": "posttrain.prep.datasets.contests:Amc23",
        "arith": "posttrain.prep.datasets.arith:Arith",
        "arith-code": "posttrain.prep.datasets.arith_code:ArithCode",
        "arith-preferences": "posttrain.prep.datasets.arith_preferences:ArithPreferences",
        "cmath": "posttrain.prep.datasets.cmath:Cmath",
        "code": "posttrain.prep.datasets.competition:Code",
        "dapo-math-17k": "posttrain.prep.datasets.dapo:DapoMath",
        "deepmath": "posttrain.prep.datasets.deepmath:DeepMath",
        "gaokao": "posttrain.prep.datasets.gaokao:Gaokao",
        "geometry3k": "posttrain.prep.datasets.geometry3k:Geometry3k",
        "glaive-toolcall": "posttrain.prep.datasets.conversations:GlaiveToolcall",
        "gsm8k": "posttrain.prep.datasets.gsm8k:Gsm8k",
        "humaneval": "posttrain.prep.datasets.programs:HumanEval",
        "kk": "posttrain.prep.datasets.kk:KnightsAndKnaves",
        "math": "posttrain.prep.datasets.math:Math",
        "math500": "posttrain.prep.datasets.math:Math500",
        "mbpp": "posttrain.prep.datasets.programs:Mbpp",
        "messages": "posttrain.prep.datasets.conversations:Messages",
        "minerva": "posttrain.prep.datasets.minerva:Minerva",
        "numina": "posttrain.prep.datasets.numina:Numina",
        "olympiadbench": "posttrain.prep.datasets.olympiadbench:OlympiadBench",
        "preferences": "posttrain.prep.datasets.preferences:Preferences",
        "retool-sft": "posttrain.prep.datasets.retool:ReTool",
        "shapes": "posttrain.prep.datasets.shapes:Shapes",
        "shapes-zoom": "posttrain.prep.datasets.shapes_zoom:ShapesZoom",
    },
)

_ANNOTATION = re.compile(r"<<[^<>]*>>")


def list_of(row: Mapping[str, Any], name: str) -> list[Any]:
    """Return the list in a column, empty where there is none. Raises ``DataError`` for anything else."""
    value = row.get(name)
    if value is not None and not isinstance(value, list | tuple):
        raise DataError(f"`{name}` is no list", hint=f"it is {type(value).__name__}; the row has {', '.join(row)}")
    return list(value or ())


class FileSet(Dataset):
    """A set read from raw files: of a source, else of the hub."""

    patterns: ClassVar[Mapping[str, Sequence[str]]] = {
        "train": ("train", "train-*", "data/train-*"),
        "test": ("test", "test-*", "data/test-*"),
    }
    """Where the files of each split lie, without format; see ``posttrain.prep.datasets.raw.split_files``."""
    hub_files: ClassVar[Sequence[str]] = ("*.parquet", "*.jsonl", "*.json")
    """Globs of the files that are fetched from the hub."""

    def __init__(self) -> None:
        self._files: dict[str | None, dict[str, list[Path]]] = {}
        self._skipped: Counter[str] = Counter()
        self._numbers = array("q")
        """Number in its file of each row that was given."""
        self._begun: list[tuple[int, Path]] = []
        """Where among the rows each file begins."""

    @property
    def skipped(self) -> Mapping[str, int]:
        return self._skipped

    def source_files(self, source: str | None) -> Sequence[Path]:
        return list(dict.fromkeys(file for files in self._find(source).values() for file in files))

    def available(self, source: str | None) -> Sequence[str]:
        return [split for split in self.splits if split in self._find(source)]

    def rows(self, split: str, source: str | None, *, n: int | None = None, seed: int = 0) -> Iterator[RawRow]:
        """Rows in the files' order. Raises ``DataError`` for a seed: nothing here depends on one."""
        if seed:
            raise DataError(f"{self.name} is read from files, and reads no --seed", hint="leave --seed out")
        self._skipped, self._numbers, self._begun = Counter(), array("q"), []
        files = self._find(source).get(split)
        if files is None:
            raise DataError(
                f"{source or self.hub_id}: has no split {split!r}", hint=f"it has {', '.join(self._find(source))}"
            )
        return itertools.islice(self._kept(files, split), n)

    def belongs(self, row: RawRow, split: str) -> bool:
        """Return whether a row is of this split, where one file holds several."""
        return True

    def skip(self, row: RawRow) -> str | None:
        """Why a row is no part of the set as it is used here; None: it is. Called once a row, in order."""
        return None

    def complete(self, row: RawRow, file: Path) -> RawRow:
        """The row with what lies beside its file (images)."""
        return row

    def where(self, row: int) -> str:
        at = bisect_right(self._begun, row, key=lambda begun: begun[0]) - 1
        return f"{self._begun[at][1]}, row {self._numbers[row]}" if at >= 0 and row < len(self._numbers) else ""

    def _kept(self, files: Sequence[Path], split: str) -> Iterator[RawRow]:
        for file in files:
            self._begun.append((len(self._numbers), file))
            for number, row in enumerate(read_raw([file])):
                if not self.belongs(row, split):
                    continue
                reason = self.skip(row)
                if reason is None:
                    self._numbers.append(number)
                    yield self.complete(row, file)
                else:
                    self._skipped[reason] += 1

    def _find(self, source: str | None) -> dict[str, list[Path]]:
        if source not in self._files:
            if source is None and self.hub_id is None:
                raise DataError(f"{self.name} is on no hub", hint="give its files with --source")
            folder = download(self.hub_id or "", self.hub_files) if source is None else source
            self._files[source] = split_files(folder, self.patterns)
        return self._files[source]


class WordProblems(Dataset):
    """Rows ``{"question", "answer"}`` whose answer ends with a line ``#### <number>``."""

    system: str | None = None
    """System message of the prompt; None: the question alone."""
    answer_tool: bool = True
    """True where an episode may hand its answer to the tool that knows the right one (``posttrain.tools.gsm8k``)."""

    def to_rlhf(self, row: RawRow, index: int, split: str) -> dict[str, Any]:
        gold = self.gold(row)
        kwargs = {tool.FUNCTION: {"create_kwargs": {"ground_truth": gold}}}
        return {
            "data_source": self.data_source,
            "prompt": self._prompt(row),
            "ability": "math",
            "reward_model": {"style": "rule", "ground_truth": gold},
            "extra_info": {
                "split": split,
                "index": index,
                "answer": row["answer"],
                "question": row["question"],
                **({"need_tools_kwargs": True, "tools_kwargs": kwargs} if self.answer_tool else {}),
            },
        }

    def to_sft(self, row: RawRow, index: int, split: str) -> Conversation:
        """The assistant reasons, hands its answer to the tool, reads the result and closes."""
        gold = self.gold(row)
        return self._conversation(row, reasoning(row["answer"]), gold, reward=1.0)

    def _conversation(self, row: RawRow, worked: str, answer: str, reward: float) -> Conversation:
        call: Message = {
            "role": "assistant",
            "content": worked,
            "tool_calls": [{"type": "function", "function": {"name": tool.FUNCTION, "arguments": {"answer": answer}}}],
        }
        result: Message = {"role": "tool", "name": tool.FUNCTION, "content": tool.result_text(answer, reward)}
        close: Message = {"role": "assistant", "content": f"#### {answer}"}
        return Conversation([*self._prompt(row), call, result, close], [tool.SCHEMA])

    def check(self, row: RawRow) -> Score:
        gold = self.gold(row)
        return compute_score(self.data_source, row["answer"], gold)

    def gold(self, row: RawRow) -> str:
        """The gold answer as text without separators: "1,000" becomes "1000". Raises ``DataError`` if there is none."""
        text_field(row, "question")
        answer = row.get("answer")
        if not isinstance(answer, str) or "####" not in answer:
            raise DataError("`answer` has no last line `#### <number>`", hint=f"the row has {', '.join(row)}")
        return answer.rpartition("####")[2].strip().replace(",", "")

    def _prompt(self, row: RawRow) -> list[Message]:
        question: Message = {"role": "user", "content": row["question"]}
        return [question] if self.system is None else [{"role": "system", "content": self.system}, question]


def reasoning(answer: str) -> str:
    """A worked answer without its calculator annotations ``<<...>>`` and its last line ``#### ...``."""
    return without_annotations(answer.rpartition("####")[0]).strip()


def without_annotations(text: str) -> str:
    """Return a worked answer, or a part of one, without its calculator annotations ``<<...>>``."""
    return _ANNOTATION.sub("", text)


def text_field(row: RawRow, name: str) -> str:
    """Return the text of a field. Raises ``DataError`` if it is missing or empty."""
    text = row.get(name)
    if not isinstance(text, str) or not text.strip():
        raise DataError(f"`{name}` is missing or empty", hint=f"the row has {', '.join(row)}")
    return text

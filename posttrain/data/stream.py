"""Training samples out of parquet: drawn in a seeded order, rendered ahead, and resumed at exactly the same place.

Data of few rows is rendered whole before training. More is streamed: a thread of the driver follows ``WindowOrder``
through the files and hands rows to processes that render them. Both give the same samples in the same order, which
depends on the data, the seed and ``data.shuffle_rows`` only: not on the number of processes, nor on the world size.

In memory while streaming: ``data.shuffle_rows`` rows as they lie in the file, decoders of ``INTERLEAVE + 1`` row
groups, ``IN_FLIGHT`` tasks of ``TASK_ROWS`` rows a process, ``data.prefetch`` batches of tokens. Besides these only the
list of row groups grows with the data.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from functools import partial, reduce
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

import numpy as np
import numpy.typing as npt

from posttrain.core.errors import DataError
from posttrain.data.images import PlacedImage
from posttrain.data.loader import INTERLEAVE, Order, RowWindow, WindowOrder
from posttrain.data.prefetch import Ahead, Render, Rendered, Renderer, Row
from posttrain.data.shards import ShardReader, Shards

if TYPE_CHECKING:
    import pyarrow as pa

    from posttrain.config import DataConfig

TASK_ROWS = 16
"""Rows of one task of a process."""
CHECK_ROWS = 256
"""Rows of streamed data that are rendered before anything starts, to see whether they can be."""


@dataclass(frozen=True)
class TokenRow:
    """A row in tokens."""

    row: int
    """Its number, counted over all shards."""
    ids: npt.NDArray[np.int32]
    """[T]"""
    mask: npt.NDArray[np.bool_]
    """[T] true where the token carries loss"""
    second: int = 0
    """Index of the first token of the second conversation of a row of two; 0 in a row of one."""
    images: tuple[PlacedImage, ...] = ()


@dataclass(frozen=True)
class Counts:
    """What became of the rows that were drawn, over all epochs."""

    drawn: int = 0
    too_long: int = 0
    """Cut or left out."""
    nothing_to_learn: int = 0
    """Left out."""
    straddling: int = 0
    """Tokens, not rows."""
    longest: int = 0
    """Tokens of the longest row that is too long; 0: none is."""

    def add(self, row: Rendered) -> Counts:
        return Counts(
            self.drawn + 1,
            self.too_long + (row.too_long > 0),
            self.nothing_to_learn + row.nothing_to_learn,
            self.straddling + row.straddling,
            max(self.longest, row.too_long),
        )

    @staticmethod
    def of(rows: Iterable[Rendered]) -> Counts:
        return reduce(Counts.add, rows, Counts())


@dataclass(frozen=True)
class Batch:
    """The samples of one step, and where the stream stands after them."""

    samples: list[TokenRow]
    position: int
    counts: Counts


class SampleStream:
    """An endless stream of batches. Use as ``with SampleStream(...) as stream``: leaving it ends its processes.

    Args:
        shards: where the rows are.
        render: rows to samples; picklable where it goes to processes.
        cfg: its ``shuffle``, ``shuffle_rows``, ``stream_above``, ``workers``, ``prefetch`` and ``deadline_s``.
        batch_size: samples of a batch. The next row makes up for one that is left out.
        seed: of the order.
        one: name of a sample in messages.

    Raises:
        DataError: a row that is rendered beforehand is refused (all are, or the first ``CHECK_ROWS`` where they are
            streamed), or none of the data is left.
    """

    def __init__(
        self,
        shards: Shards,
        render: Render,
        cfg: DataConfig,
        *,
        batch_size: int,
        seed: int,
        one: str = "conversation",
    ) -> None:
        self.shards = shards
        self._one = one
        self.cfg = cfg
        self.batch_size = batch_size
        self.seed = seed
        self.position = 0
        """Rows drawn so far, over all epochs, those that were left out too."""
        self.counts = Counts()
        self.rendered: list[Rendered] | None = None
        """Every row, where the data is not streamed."""
        self._order = self._make_order(cfg.shuffle_rows)
        self._ahead: Ahead[Batch] | None = None
        streamed = shards.rows > cfg.stream_above
        self._new_renderer = partial(Renderer, render, cfg.workers if streamed else 0)
        self._renderer = self._new_renderer()
        if streamed:
            render_all(shards, render, CHECK_ROWS)
        else:
            self.rendered = render_all(shards, render)
            if not self.usable_rows:
                raise nothing_left(shards.name, self._one, Counts.of(self.rendered))
            self._batches = self._assemble(self._renderer)

    @property
    def usable_rows(self) -> int:
        """Return rows that give a sample, where that is known; else all rows."""
        return self.shards.rows if self.rendered is None else sum(not row.left_out for row in self.rendered)

    def next(self) -> Batch:
        """Return the next batch.

        Raises:
            DataError: a row of it is refused, a file is damaged, or a whole epoch gave no sample.
            WorkerError: a process that renders died or failed.
            DeadlineError: it was not there within ``data.deadline_s``; the message says who did not answer.
        """
        if self.rendered is not None:
            batch = next(self._batches)
        else:
            if self._ahead is None:
                self._ahead = Ahead(self._assemble(self._renderer), self.cfg.prefetch)
            batch = self._ahead.next(self.cfg.deadline_s, lambda: self._renderer.waiting_for)
        self.position, self.counts = batch.position, batch.counts
        return batch

    def state(self) -> dict[str, Any]:
        """Return where the stream stands after the last batch that ``next`` gave, as JSON."""
        return {
            "position": self.position,
            "rows": self.shards.rows,
            "shards": self.shards.fingerprint(),
            "seed": self.seed,
            "shuffle_rows": self._order.window,
            "counts": asdict(self.counts),
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continue where ``state`` was taken.

        Raises:
            DataError: the data is not what it was then.
        """
        hint = "put the data back as it was, or start again with --overwrite"
        if state["rows"] != self.shards.rows:
            raise DataError(
                f"the checkpoint was made with {state['rows']} rows of training data; now there are {self.shards.rows}",
                hint=hint,
            )
        if state["shards"] != self.shards.fingerprint():
            raise DataError("the checkpoint was made with other files of training data, or other row groups", hint=hint)
        self._order = self._make_order(state["shuffle_rows"])
        self.position = state["position"]
        self.counts = Counts(**state["counts"])
        if self._ahead is not None:
            self._renderer.close()
            self._ahead.close()
            self._ahead = None
            self._renderer = self._new_renderer()  # a thread that is left behind keeps the old one
            self._renderer.start()
        if self.rendered is not None:
            self._batches = self._assemble(self._renderer)

    def __enter__(self) -> Self:
        self._renderer.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._renderer.close()
        if self._ahead is not None:
            self._ahead.close()

    def _make_order(self, window: int) -> WindowOrder:
        return WindowOrder([group.rows for group in self.shards.groups], window, self.seed, self.cfg.shuffle)

    def _assemble(self, renderer: Renderer) -> Iterator[Batch]:
        """Yield the batches from the current position on."""
        position, counts = self.position, self.counts
        samples: list[TokenRow] = []
        left_out = 0
        rows = self._in_memory(position) if self.rendered is not None else self._streamed(position, renderer)
        for row, rendered in rows:
            position += 1
            counts = counts.add(rendered)
            left_out = left_out + 1 if rendered.left_out else 0
            if position % self.shards.rows == 0 and left_out >= self.shards.rows:  # all of an epoch
                raise nothing_left(self.shards.name, self._one, counts)
            if not rendered.left_out:
                samples.append(TokenRow(row, rendered.ids, rendered.mask, rendered.second, rendered.images))
            if len(samples) == self.batch_size:
                yield Batch(samples, position, counts)
                samples = []

    def _in_memory(self, position: int) -> Iterator[tuple[int, Rendered]]:
        assert self.rendered is not None
        for window, skip in self._order.windows(position):
            for row in self._numbers(window)[skip:].tolist():
                yield row, self.rendered[row]

    def _streamed(self, position: int, renderer: Renderer) -> Iterator[tuple[int, Rendered]]:
        """Yield (row, what became of it), rendered by the processes while the thread reads on."""
        given: deque[list[int]] = deque()
        tasks = self._tasks(position, renderer)
        while True:
            try:
                numbers, rows = next(tasks)
            except DataError:  # it comes after the rows that were read before it, however many are under way
                while given:
                    yield from zip(given.popleft(), renderer.collect(), strict=True)
                raise
            renderer.submit(rows)
            given.append(numbers)
            while renderer.full:
                yield from zip(given.popleft(), renderer.collect(), strict=True)

    def _tasks(self, position: int, renderer: Renderer) -> Iterator[tuple[list[int], list[Row]]]:
        """Yield (row numbers, rows) of each task from a position on."""
        reader = ShardReader(self.shards, INTERLEAVE + 1)
        for window, skip in self._order.windows(position):
            content = self._read(reader, window, renderer)
            numbers = self._numbers(window)
            for start in range(skip, len(numbers), TASK_ROWS):
                chosen = slice(start, start + TASK_ROWS)
                some = numbers[chosen].tolist()
                yield (
                    some,
                    [
                        content.row(place, self.shards.locate(n))
                        for place, n in zip(window.order[chosen].tolist(), some, strict=True)
                    ],
                )
            del content  # before the next window is read

    def _read(self, reader: ShardReader, window: RowWindow, renderer: Renderer) -> _Content:
        content = _Content()
        for piece in window.pieces:
            renderer.waiting_for = f"{self.shards.groups[piece.group].path} to be read"
            for batch in reader.read(piece.group, piece.start, piece.stop):
                content.append(batch)
        return content

    def _numbers(self, window: RowWindow) -> Order:
        """Return the [rows] numbers of a window's rows over all shards, in the order in which they are handed out."""
        firsts = [self.shards.groups[piece.group].first for piece in window.pieces]
        laid = [np.arange(first + p.start, first + p.stop) for first, p in zip(firsts, window.pieces, strict=True)]
        return np.concatenate(laid)[window.order]


class _Content:
    """The rows of a window, as decoded."""

    def __init__(self) -> None:
        self._batches: list[pa.RecordBatch] = []
        self._starts: list[int] = []
        self._rows = 0

    def append(self, batch: pa.RecordBatch) -> None:
        self._batches.append(batch)
        self._starts.append(self._rows)
        self._rows += batch.num_rows

    def row(self, place: int, where: tuple[str, int]) -> Row:
        at = bisect_right(self._starts, place) - 1
        return _to_row(self._batches[at], place - self._starts[at], where)


def _to_row(batch: pa.RecordBatch, at: int, where: tuple[str, int]) -> Row:
    try:
        columns: dict[str, Any] = batch.slice(at, 1).to_pylist()[0]
    except UnicodeDecodeError as error:
        raise DataError(f"{where[0]}: row {where[1]}: text that is not UTF-8: {error}") from error
    return Row(*where, columns)


def render_all(shards: Shards, render: Render, limit: int | None = None) -> list[Rendered]:
    """Return the first ``limit`` rows (None: all) of the shards, in the order of the files.

    Raises:
        DataError: the first row that is refused, or a damaged file.
    """
    reader = ShardReader(shards, 1)
    rendered: list[Rendered] = []
    left = shards.rows if limit is None else limit
    for number, group in enumerate(shards.groups):
        for batch in reader.read(number, 0, min(left, group.rows)):
            first = len(rendered)
            rendered += render([_to_row(batch, i, shards.locate(first + i)) for i in range(batch.num_rows)])
        left -= min(left, group.rows)
        if left == 0:
            break
    return rendered


def nothing_left(name: str, one: str, counts: Counts) -> DataError:
    """Return the error of data of which every row was left out."""
    hint = "raise data.max_length"
    if counts.too_long < counts.drawn:
        rows = "the rows that are not longer" if counts.too_long else "the rows"
        hint = f"{hint}; " if counts.too_long else ""
        hint += f'in {rows}, all assistant messages have "train": false or are empty, and carry no loss'
        if one == "pair":
            hint += ", or both answers have the same tokens"
    return DataError(f"{name}: no {one} with assistant tokens is left", hint=hint)

"""The order of the data: which rows make up which batch. The driver owns it, so a run resumes at any world size."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

import numpy as np

from posttrain.core.errors import DataError

Order = np.ndarray[Any, np.dtype[np.int64]]
"""[rows] each row's index once."""


@dataclass
class BatchOrder:
    """An endless sequence of batches of row indices: epoch after epoch, each in an order of its own.

    Batches run across the end of an epoch, so that no row is left out and every batch has the same size.
    """

    rows: int
    batch_size: int
    seed: int
    shuffle: bool = True
    position: int = 0
    """Rows handed out so far, over all epochs."""
    _epoch_order: tuple[int, Order] | None = field(default=None, init=False, repr=False, compare=False)
    """The epoch last asked for, and its order."""

    def next(self) -> list[int]:
        """Return row indices of the next batch."""
        return self.take(self.batch_size)

    def take(self, count: int) -> list[int]:
        """Return the next ``count`` row indices."""
        indices = [self._row(self.position + i) for i in range(count)]
        self.position += count
        return indices

    def _row(self, position: int) -> int:
        epoch, offset = divmod(position, self.rows)
        return int(self._epoch(epoch)[offset])

    def _epoch(self, epoch: int) -> Order:
        if self._epoch_order is None or self._epoch_order[0] != epoch:
            order = np.arange(self.rows)
            if self.shuffle:
                np.random.default_rng((self.seed, epoch)).shuffle(order)
            self._epoch_order = (epoch, order)
        return self._epoch_order[1]

    def state(self) -> dict[str, int]:
        return {"position": self.position, "rows": self.rows, "seed": self.seed}

    def restore(self, state: dict[str, int]) -> None:
        """Continue where ``state`` was taken. Raises ``DataError`` when the data has another number of rows since."""
        if state["rows"] != self.rows:
            raise DataError(
                f"the checkpoint was made with {state['rows']} rows of training data; now there are {self.rows}",
                hint="put the data file back, or start again with --overwrite",
            )
        self.position = state["position"]


INTERLEAVE = 8
"""Row groups that a shuffled window is drawn from at once, where it cannot hold whole ones: rows that lie side by side
in a large file are often of one kind."""


@dataclass(frozen=True)
class Piece:
    """Rows ``start:stop`` of a row group."""

    group: int
    start: int
    stop: int


@dataclass(frozen=True)
class RowWindow:
    """Rows that are in memory together."""

    pieces: list[Piece]
    order: Order
    """[rows] in which order they are handed out, as places in the pieces laid end to end."""


class WindowOrder:
    """An endless order over row groups that can be followed with ``window`` rows in memory, and entered anywhere.

    An epoch visits the row groups in a random order, ``INTERLEAVE`` of them in turns, lays their rows end to end, and
    shuffles each run of ``window`` rows. Data of at most ``window`` rows is shuffled as a whole. All of it is a pure
    function of the arguments, so a position is all the state there is. (A permutation of all rows would mix better and
    decode a row group for each row.)

    Args:
        sizes: rows of each row group, all positive.
        window: most rows in memory.
        seed: each epoch has an order of its own under it.
        shuffle: off: rows come as they lie in the files.
    """

    def __init__(self, sizes: Sequence[int], window: int, seed: int, shuffle: bool = True) -> None:
        self.sizes = list(sizes)
        self.rows = sum(sizes)
        self.window = window
        self.seed = seed
        self.shuffle = shuffle

    def windows(self, position: int) -> Iterator[tuple[RowWindow, int]]:
        """Yield the windows from the one that holds ``position`` (rows handed out so far, over all epochs) on, each
        with the number of its rows that are to be passed over. Never ends."""
        epoch, offset = divmod(position, self.rows)
        while True:
            first, skip = divmod(offset, self.window)
            for number, pieces in enumerate(_cut(self._pieces(epoch), self.window)):
                if number >= first:
                    yield RowWindow(pieces, self._order(epoch, number, pieces)), skip
                    skip = 0
            epoch, offset = epoch + 1, 0

    def _pieces(self, epoch: int) -> Iterator[Piece]:
        whole = [Piece(group, 0, size) for group, size in enumerate(self.sizes)]
        if not self.shuffle or self.rows <= self.window:
            yield from whole
            return
        waiting = iter(np.random.default_rng((self.seed, epoch, 0)).permutation(len(whole)).tolist())
        turn = max(1, self.window // INTERLEAVE)
        taking = deque(whole[group] for group in islice(waiting, INTERLEAVE))
        while taking:
            piece = taking.popleft()
            stop = min(piece.stop, piece.start + turn)
            yield Piece(piece.group, piece.start, stop)
            if stop < piece.stop:
                taking.append(Piece(piece.group, stop, piece.stop))
            elif (group := next(waiting, None)) is not None:
                taking.append(whole[group])

    def _order(self, epoch: int, number: int, pieces: Iterable[Piece]) -> Order:
        order = np.arange(sum(piece.stop - piece.start for piece in pieces))
        if self.shuffle:
            # Data that fits into one window has the order that ``BatchOrder`` gives it.
            key = (self.seed, epoch) if self.rows <= self.window else (self.seed, epoch, 1 + number)
            np.random.default_rng(key).shuffle(order)
        return order


def _cut(pieces: Iterable[Piece], window: int) -> Iterator[list[Piece]]:
    """Lay pieces end to end and cut after every ``window`` rows."""
    current: list[Piece] = []
    left = window
    for piece in pieces:
        start = piece.start
        while start < piece.stop:
            stop = min(piece.stop, start + left)
            current.append(Piece(piece.group, start, stop))
            left -= stop - start
            start = stop
            if left == 0:
                yield current
                current, left = [], window
    if current:
        yield current


def check_batch(rows: int, batch_size: int) -> str | None:
    """Return a warning where a batch is larger than the data, or None."""
    if batch_size <= rows:
        return None
    return (
        f"warning: data.batch_size = {batch_size:,}, and there are {rows:,} rows: a step has a row up to "
        f"{-(-batch_size // rows):,} times; lower data.batch_size, or give more data"
    )


def total_steps(rows: int, batch_size: int, epochs: int, steps: int | None) -> int:
    """Return the optimizer steps of a run: ``steps``, or as many as ``epochs`` passes give (the last rounded to a whole
    batch)."""
    return steps if steps is not None else max(1, round(rows * epochs / batch_size))

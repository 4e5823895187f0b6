"""The order of the data: which rows make up which batch. The driver owns it, so a run resumes at any world size."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np

from posttrain.errors import DataError

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
        """Row indices of the next batch."""
        indices = [self._row(self.position + i) for i in range(self.batch_size)]
        self.position += self.batch_size
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
        """Go on where ``state`` was taken. Raises ``DataError`` when the data has another number of rows since."""
        if state["rows"] != self.rows:
            raise DataError(
                f"the checkpoint was made with {state['rows']} rows of training data; now there are {self.rows}",
                hint="put the data file back, or start again with --overwrite",
            )
        self.position = state["position"]


def total_steps(rows: int, batch_size: int, epochs: int, steps: int | None) -> int:
    """Optimizer steps of a run: ``steps``, or as many as ``epochs`` passes give (the last rounded to a whole batch)."""
    return steps if steps is not None else max(1, round(rows * epochs / batch_size))

"""The generated word problems of ``arith`` as pairs of answers: a whole solution, and one that stops a step early."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import ClassVar

from posttrain.core.types import Score
from posttrain.data.parquet import Preference
from posttrain.prep.datasets.arith import Arith
from posttrain.prep.datasets.base import Dataset, Kind, RawRow


class ArithPreferences(Dataset):
    """The dataset of ``posttrain prep arith-preferences``. Of the SFT conversations of ``arith`` half stop early; its
    pairs tell the model that has learnt from these that it should not."""

    name = "arith-preferences"
    data_source = ""
    licence = "Apache-2.0 (generated)"
    hub_id: str | None = None
    splits: tuple[str, ...] = ("train", "test")
    kinds: tuple[Kind, ...] = ("preference",)
    default_rows: ClassVar[dict[str, int]] = {"train": 800, "test": 100}

    def __init__(self) -> None:
        self._whole, self._hasty = Arith(hasty_share=0.0), Arith(hasty_share=1.0)

    def available(self, source: str | None) -> Sequence[str]:
        return self._whole.available(source)

    def rows(self, split: str, source: str | None, *, n: int | None = None, seed: int = 0) -> Iterator[RawRow]:
        """``n`` rows (None: ``default_rows``); the same for the same seed."""
        return self._whole.rows(split, source, n=n or self.default_rows[split], seed=seed)

    def to_rlhf(self, row: RawRow, index: int, split: str) -> None:
        """See ``arith``."""

    def to_sft(self, row: RawRow, index: int, split: str) -> None:
        """See ``arith``."""

    def to_preference(self, row: RawRow, index: int, split: str) -> Preference:
        whole, hasty = (arith.to_sft(row, index, "train") for arith in (self._whole, self._hasty))
        (question, *chosen), (_, *rejected) = whole.messages, hasty.messages
        return Preference([question], chosen, rejected, whole.tools)

    def check(self, row: RawRow) -> Score:
        return self._whole.check(row)

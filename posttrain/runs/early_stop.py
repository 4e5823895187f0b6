"""The decision to end a run whose validation loss has stopped falling."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass
class EarlyStop:
    """Decides when a run ends because its validation loss stops improving."""

    patience: int | None
    """Validations in a row without a better loss after which the run ends; None: never."""
    min_delta: float
    """Smallest decrease that counts as a better loss."""
    best: float = math.inf
    best_step: int = 0
    without_better: int = 0
    """Validations since ``best_step``."""

    @property
    def reached(self) -> bool:
        return self.patience is not None and self.without_better >= self.patience

    def validated(self, step: int, loss: float) -> None:
        """Record a validation. A loss that is not finite counts as no better."""
        if loss < self.best - self.min_delta:
            self.best, self.best_step, self.without_better = loss, step, 0
        else:
            self.without_better += 1

    def state(self) -> dict[str, float | None]:
        """Return what a checkpoint keeps, as JSON."""
        best = self.best if math.isfinite(self.best) else None  # JSON has no infinity
        return {"best": best, "best_step": self.best_step, "without_better": self.without_better}

    def restore(self, state: Mapping[str, Any]) -> None:
        self.best = math.inf if state["best"] is None else float(state["best"])
        self.best_step, self.without_better = int(state["best_step"]), int(state["without_better"])

"""What scores whole episodes, as the composition of a reward sees it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from posttrain.core.types import Score, Trajectory


class EpisodeScorer(Protocol):
    """Scores whole episodes: a reward model, a judge. Its opinion is one part of a reward."""

    name: str
    """The part's name in `reward.weights`: "model" or "judge"."""

    async def score(self, episodes: Sequence[Trajectory]) -> list[Score]:
        """One score an episode, in order; ``Score.error`` where one could not be scored.

        ``Score.correct`` is always false: a scorer has an opinion, and the data source's grader the verdict.

        Raises:
            RunError: the scorer itself is broken (its process died), so that no episode can be scored.
        """
        ...

    async def close(self) -> None:
        """Free what it holds. It scores nothing afterwards."""
        ...

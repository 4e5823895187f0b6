"""The schedule of a run: when its groups were drawn, ended and trained, and which weights sampled which tokens.

Timing decides these things, and with them what a run learns. With `rollout.record_schedule` a run writes them to
``schedule.jsonl``, an event a line, and `rl --replay-schedule` makes another run take the same turns: a request is
sampled by the weights that sampled it, and cut where an update cut it; groups end in the recorded order; an update
waits until all that older weights sampled has been sampled again (``rollout.schedule_replay``). What is left to the
engine depends on nothing but the tokens, the weights and the seed of a request, in its batch-invariant mode.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from posttrain.core.errors import ConfigError

if TYPE_CHECKING:
    from posttrain.core.types import Prompt, Trajectory
    from posttrain.engines.base import Generator

FILE = "schedule.jsonl"
"""Name of the file in the folder of a run."""
FORMAT = 1


class Schedule:
    """What ``TrainingBatches`` and the engines tell, and ask, about the order of things. This one leaves it to them."""

    seed: int | None = None
    """The run's seed, where episodes are to be sampled with seeds of their own."""
    repeats = False
    """Another run has decided when groups are started."""

    def drawn(self, number: int, row: int) -> None:
        """Take that the group of a draw may be played from now on."""

    def sampler(self, number: int, episode: int, sampler: Generator) -> Generator:
        """Return what samples an episode of a draw, by way of ``sampler``."""
        return sampler

    async def ended(self, number: int, episodes: Sequence[Trajectory]) -> None:
        """Take a group that is played and graded. Returns when it may count as ended."""

    def batch(self, ready: Sequence[int] | None) -> Sequence[int] | None:
        """Return the draws that the step trains; None: it has to wait.

        Args:
            ready: those that it would train by itself.
        """
        return ready

    def trained(self, numbers: Sequence[int]) -> None:
        """Take that the batch of a step is made of these draws."""

    async def before_update(self, version: int) -> None:
        """Return when engines may take the weights of ``version``."""

    def updated(self, version: int) -> None:
        """Take that all engines have the weights of ``version``."""

    def state(self) -> Any:
        """Return the position in the schedule, as JSON."""
        return None

    def resume(self, state: Any) -> None:
        """Go on at a position of ``state``; None: begin."""


class ScheduleLog(Schedule):
    """Writes the schedule of a run.

    Args:
        path: of the file.
        header: its first line, which says of what run it is.
        seed: of the run.
    """

    def __init__(self, path: Path, header: Mapping[str, Any], seed: int) -> None:
        self.path, self.header, self.seed = path, dict(header), seed
        self._version = 0

    def drawn(self, number: int, row: int) -> None:
        self._write({"drawn": number, "row": row})

    async def ended(self, number: int, episodes: Sequence[Trajectory]) -> None:
        self._write({"ended": number, "episodes": [played(episode) for episode in episodes]})

    def trained(self, numbers: Sequence[int]) -> None:
        self._write({"trained": list(numbers), "step": self._version + 1})

    def updated(self, version: int) -> None:
        self._version = version
        self._write({"weights": version})

    def state(self) -> int:
        """Return the length of the file."""
        return self.path.stat().st_size

    def resume(self, state: Any) -> None:
        """Cut off what comes after a position. Raises ``ConfigError`` where the file does not reach so far."""
        if state is None:
            self.path.write_text(json.dumps(self.header) + "\n", encoding="utf-8")
            return
        if not self.path.is_file() or self.path.stat().st_size < state:
            raise ConfigError(
                f"rollout.record_schedule: {self.path} lacks what the run did before this start",
                hint="leave the key out, or start the run anew with --overwrite or another --name",
            )
        os.truncate(self.path, state)

    def _write(self, event: Mapping[str, Any]) -> None:
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(event) + "\n")


def played(episode: Trajectory) -> dict[str, Any]:
    """Return what the schedule keeps of an episode: a digest of its tokens, its reward, and [version, tokens] of the
    parts that one version of the weights sampled, -1 for what was not sampled."""
    parts = itertools.groupby(episode.weight_version.tolist())
    return {
        "tokens": hashlib.blake2b(episode.tokens.astype("<i4").tobytes(), digest_size=8).hexdigest(),
        "reward": episode.reward,
        "versions": [[version, sum(1 for _ in part)] for version, part in parts],
        "error": episode.error,
    }


def header(config: Mapping[str, Any], prompts: Sequence[Prompt]) -> dict[str, Any]:
    """Return the first line of the schedule of a run with this config, by dotted key, on these prompts."""
    return {"schedule": FORMAT, "prompts": prompts_digest(prompts), "config": dict(config)}


def prompts_digest(prompts: Sequence[Prompt]) -> str:
    """Return a hash of all that prompts hold. Of values that JSON has not it tells the type alone: their text may
    differ from process to process."""
    data = hashlib.sha256()
    for prompt in prompts:
        told = [prompt.messages, prompt.data_source, prompt.ground_truth, prompt.extra_info]
        text = json.dumps(told, default=lambda value: type(value).__name__)
        data.update(text.encode("utf-8", "backslashreplace"))
        for image in prompt.images:
            data.update(image.get("bytes") or str(image.get("path")).encode())
    return data.hexdigest()

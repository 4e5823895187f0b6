"""What the `sft` and `rl` loops share: how a run opens, saves, resumes and ends."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from posttrain.config import Config
from posttrain.errors import Interrupted
from posttrain.models.export import save_text_side, save_whole
from posttrain.models.load import ModelSource
from posttrain.runs import RunDir, StopSignal
from posttrain.track.metrics import truncate_metrics
from posttrain.train import checkpoint

if TYPE_CHECKING:
    from posttrain.cluster.trainers import TrainerGroup
    from posttrain.track.tracker import Tracker


@dataclass
class TrainingRun:
    """One training run on disk. ``step`` counts finished steps; the loop is ``for step in run.steps()``."""

    cfg: Config
    folder: RunDir
    source: ModelSource
    tracker: Tracker
    stop: StopSignal
    total_steps: int
    step: int = 0
    saved_step: int = 0

    async def resume(self, actor: TrainerGroup) -> dict[str, Any] | None:
        """Load the newest sound checkpoint of a reopened run; its loader state, or None when there is none."""
        if not self.folder.resumed:
            return None
        found, problems = checkpoint.newest(self.folder.checkpoints)
        for problem in problems:
            self.tracker.note(f"warning: {problem}")
        self.step = self.saved_step = found.step if found else 0
        truncate_metrics(self.folder.path / "metrics.jsonl", self.step + 1)
        if found is None:
            self.tracker.note("resuming from the start: no checkpoint yet")
            return None
        await actor.load(str(found.path / "actor"))
        self.tracker.note(f"resuming after step {found.step} from {found.path}")
        return found.read("loader.json")

    def steps(self) -> Iterator[int]:
        """Numbers of the steps still to do, from 1. Ends early, after a finished step, when the user asks to stop."""
        while self.step < self.total_steps and not self.stop.requested:
            yield self.step + 1
            self.step += 1

    def due(self, every: int | None, step: int) -> bool:
        """Whether something that happens every so many steps, and after the last one, happens after this step."""
        return step == self.total_steps or (every is not None and step % every == 0)

    async def save(self, step: int, actor: TrainerGroup, loader: Mapping[str, Any]) -> None:
        """Write the checkpoint of a finished step."""
        if step == self.saved_step:
            return
        with self.tracker.phase("save"):
            folder = checkpoint.begin(self.folder.checkpoints, step)
            await actor.save(str(folder / "actor"))
            save_text_side(self.source, folder / "actor" / "huggingface")
            if self.cfg.checkpoint.save_hf:
                shards = ModelSource(str(folder / "actor" / "huggingface"), shards=str(folder / "actor" / "model"))
                save_whole(shards, folder / "actor" / "huggingface")
            meta = {"step": step, "config": self.cfg.model_dump(mode="json"), "world_size": len(actor.actors)}
            states = {"loader.json": loader, "meta.json": meta}
            checkpoint.commit(folder, step, states, self.cfg.checkpoint.keep)
        self.saved_step = step

    def raise_if_interrupted(self) -> None:
        if self.step < self.total_steps:
            raise Interrupted(f"stopped after step {self.step} of {self.total_steps}")


@contextmanager
def recorded(folder: RunDir) -> Iterator[None]:
    """Write how the run ended into its folder, whatever happens."""
    try:
        yield
    except (KeyboardInterrupt, Interrupted):
        folder.finish("interrupted")
        raise
    except BaseException:
        folder.finish("failed")
        raise
    folder.finish("finished")

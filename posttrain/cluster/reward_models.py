"""A reward model in a Ray actor, and the driver's handle on it, which is an ``EpisodeScorer``."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import ray
import torch

from posttrain.cluster.actors import ActorContext, ActorHandle, Supervised
from posttrain.cluster.calls import answer, wait_until_up
from posttrain.core.types import Message, Score, Trajectory
from posttrain.models.reward import RewardModel


@dataclass(frozen=True)
class RewardModelSpec:
    """What a reward model's process needs to start."""

    path: str
    device: str
    """cpu or cuda"""
    dtype: str
    """float32 or bfloat16"""
    max_length: int
    tokens_per_batch: int
    trust_remote_code: bool
    threads: int = 0
    """CPU threads of the process; 0: torch's default."""


class RewardActor(Supervised):
    """A process with one ``RewardModel``. ``Cluster`` makes it a Ray actor."""

    def __init__(self, spec: RewardModelSpec, context: ActorContext) -> None:
        super().__init__(context)
        if spec.threads:
            torch.set_num_threads(spec.threads)
        self.spec = spec

    def start(self) -> None:
        """Load the model. Raises ``ModelError`` or ``ConfigError``."""
        spec = self.spec
        self.model = RewardModel(
            spec.path,
            spec.device,
            getattr(torch, spec.dtype),
            max_length=spec.max_length,
            tokens_per_batch=spec.tokens_per_batch,
            trust_remote_code=spec.trust_remote_code,
        )

    def score(self, conversations: Sequence[Sequence[Message]]) -> list[Score]:
        scores = self.model.score(conversations)
        if self.model.device.type == "cuda":
            torch.cuda.empty_cache()  # trainers and engines share the GPU
        return scores


class RemoteRewardModel:
    """The driver's handle on one ``RewardActor``: an ``EpisodeScorer`` (part ``model``)."""

    name = "model"

    def __init__(self, handle: ActorHandle, deadline_s: float) -> None:
        self.handle = handle
        self.actor = handle.actor
        self.deadline_s = deadline_s

    async def start(self, deadline_s: float) -> None:
        """Load the model. Raises ``ModelError``, ``ConfigError``, ``WorkerError`` or ``DeadlineError``."""
        await wait_until_up([self.handle], deadline_s)
        await answer(self.actor.start.remote(), self.handle, "start", deadline_s)

    async def score(self, episodes: Sequence[Trajectory]) -> list[Score]:
        """Return the model's score of each episode's conversation, in order; ``Score.error`` where there is none.

        Raises:
            WorkerError: the process died or failed, for a reason that lies in no episode.
            DeadlineError: the process did not answer within `cluster.step_deadline_s`.
        """
        if not episodes:
            return []
        ref = self.actor.score.remote([e.messages for e in episodes])
        scores: list[Score] = await answer(ref, self.handle, "score", self.deadline_s)
        return scores

    async def close(self) -> None:
        """End the process, which frees its memory."""
        ray.kill(self.actor)

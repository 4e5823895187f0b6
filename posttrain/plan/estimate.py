"""A plan: everything that is reckoned about one run."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from functools import cached_property

from posttrain.config import Config
from posttrain.core.machines import Machine
from posttrain.plan import calibration as known
from posttrain.plan import speed
from posttrain.plan.batch import Lengths, StepBatch, batch_of
from posttrain.plan.layout import Kernels, Layout, Moment, Shapes, lay_out, moments, scoring
from posttrain.plan.memory import Terms
from posttrain.plan.pacing import Pace, Waits, paced
from posttrain.plan.speed import Seconds

_ROUNDS = 3


@dataclass(frozen=True)
class Question:
    """What a plan is about."""

    cfg: Config
    shapes: Shapes
    machine: Machine
    kernels: Kernels
    lengths: Lengths
    steps: int | None = None
    """Steps of the run; None: not known, because the data is not there"""
    of_step: tuple[int, ...] | None = None
    """Tokens of each sequence of a step, where they are known"""
    typical: bool = False
    """Memory is that of the micro-batches to be expected, and not of the largest that there may be"""
    notes: tuple[str, ...] = field(default=())
    """What had to be assumed"""
    waits: Waits = field(default_factory=Waits)
    """For tools; known of a run that was made"""
    computed: float = 1.0
    """Share of a step's tokens that the actor's updates compute (`train.skip_zero_advantages`); known of a run that was
    made"""


@dataclass(frozen=True)
class Plan:
    """The answer, but for what is wrong with it (``problems``)."""

    question: Question

    @cached_property
    def batch(self) -> StepBatch:
        q = self.question
        batch = batch_of(q.cfg, q.lengths, q.steps, q.of_step)
        return replace(batch, worst=batch.largest) if q.typical else batch

    @cached_property
    def _computed(self) -> StepBatch:
        """The part of the batch that the actor's updates compute."""
        q = self.question
        if q.computed == 1.0:
            return self.batch
        count = max(1, round(q.computed * self.batch.sequences))
        return batch_of(q.cfg, q.lengths, q.steps, [round(q.lengths.mean)] * count)

    @cached_property
    def layout(self) -> Layout:
        q = self.question
        return lay_out(q.cfg, q.shapes, q.machine, q.kernels, self.batch, q.lengths)

    @cached_property
    def moments(self) -> list[Moment]:
        """Empty without a GPU: what a CPU's processes hold is not predicted."""
        return moments(self.layout) if self.question.machine.gpu is not None else []

    @property
    def worst(self) -> Moment | None:
        """The moment at which a GPU holds most."""
        return max(self.moments, key=lambda moment: moment.total, default=None)

    @property
    def fits(self) -> bool:
        """Return whether every moment does, as far as the GPU is known."""
        memory = self.question.machine.memory
        return not memory or all(moment.total <= memory for moment in self.moments)

    def moment(self, name: str) -> Moment:
        """By its name."""
        return next(moment for moment in self.moments if moment.name == name)

    @cached_property
    def host(self) -> Terms:
        """Bytes of host memory of one training worker of each group, added up."""
        cfg, terms = self.question.cfg, dict[str, float]()
        for trainer in self.layout.trainers:
            of = trainer.host(background_saves=cfg.checkpoint.background, offload=cfg.train.offload)
            for name, size in of.items():
                terms[name] = terms.get(name, 0.0) + size
        return terms

    @cached_property
    def phases(self) -> dict[str, Seconds]:
        """Return the seconds of one step, by the names of `timing_s/`; empty where the GPU's speed is not known."""
        machine, layout, cfg = self.question.machine, self.layout, self.question.cfg
        if machine.gpu is None or not machine.gpu.flops:
            return {}
        found: dict[str, Seconds] = {}
        if layout.engine is not None:
            waits = 0.0 if cfg.rollout.staleness else self.question.waits.longest
            found["gen"] = _added(self._generation(), Seconds(fixed=waits))
        fixed = Seconds(fixed=known.CALL_S)
        for trainer, name in scoring(cfg, layout.trainers) if layout.trainers else ():
            less = name == "old_log_prob" and not cfg.advantages_read_policy
            work = self._computed.work if less else self.batch.work
            step = replace(work, micro_batches=work.micro_batches * self.batch.updates)
            found[name] = _added(speed.forward_seconds(trainer, machine, step), fixed)
        for trainer in layout.trainers:
            if trainer.trainable:
                work = self._computed.work if trainer is layout.actor else self.batch.work
                one = speed.update_seconds(trainer, machine, work)
                name = "update" if cfg.command != "rl" else f"update_{trainer.role}"
                found[name] = _added(_times(one, self.batch.updates), fixed)
        if layout.engine is not None and layout.trainers:
            engine = layout.engine
            found["sync"] = speed.sync_seconds(layout.actor, machine, layout.transfer, engine.name, engine.in_fp8)
        return found

    def _generation(self, groups: int | None = None) -> Seconds:
        """Sampling of so many groups; None: those of a step."""
        cfg, lengths, engine = self.question.cfg, self.question.lengths, self.layout.engine
        assert engine is not None
        started = cfg.data.batch_size * (1.0 + cfg.rollout.over_sample_rate) if groups is None else groups
        found = speed.generation_seconds(
            engine,
            self.question.machine,
            episodes=max(1, round(started * cfg.rollout.n / cfg.rollout.replicas)),
            prompt=lengths.prompt,
            response=lengths.mean - lengths.prompt,
            longest=min(float(cfg.rollout.max_response_tokens), 1.0 * lengths.longest),
            turns=lengths.turns,
            images=lengths.images,
        )
        # Engines of one GPU take turns on it: each waits for what the others compute.
        return replace(found, fixed=found.fixed + (self.layout.engines_per_gpu - 1) * found.gpu)

    @property
    def save_seconds(self) -> float:
        """That training waits for a save."""
        rate = known.SNAPSHOT if self.question.cfg.checkpoint.background else known.DISK
        return sum(t.state() for t in self.layout.trainers if t.trainable) / rate

    @property
    def ahead(self) -> bool:
        """Return whether engines sample while trainers work, and the seconds of both are known."""
        return bool(self.question.cfg.rollout.staleness) and "gen" in self.phases and "sync" in self.phases

    @property
    def _training(self) -> list[Seconds]:
        """What trainers do between two updates of weights."""
        return [phase for name, phase in self.phases.items() if name not in ("gen", "sync")]

    @property
    def overlap(self) -> float:
        """Return the seconds of a step in which engines sample while trainers work, or wait: all of sampling with
        `rollout.staleness`, where a step has the time of trainers alone."""
        return self.phases["gen"].total if self.ahead else 0.0

    @cached_property
    def _pace(self) -> Pace:
        """Engines take the longer for a group the more of them they sample side by side: found in a few rounds.
        On a GPU that they share they stand still while the trainer's kernels run: with half of that GSM8K's steps of
        7.6 and 5.3 s (`rollout.staleness` 1 and 4) come out as 6.0 and 4.2, with all of it as 6.4 and 5.4."""
        cfg, waits = self.question.cfg, self.question.waits
        size, busy = cfg.data.batch_size, self.phases["sync"].total + sum(phase.total for phase in self._training)
        beside = sum(phase.gpu for phase in self._training) if self.layout.colocated else 0.0
        found = Pace(0.0, float(size))
        for _ in range(_ROUNDS):
            alone = self._generation(max(1, round(found.sampled))).total
            sampling = alone + min(alone, beside)
            window = math.floor(cfg.rollout.overtaking * size)
            found = paced(cfg.rollout.staleness, window, size, busy, sampling, waits, pacing=cfg.rollout.pacing)
        return found

    @property
    def late(self) -> float:
        """Return the seconds of a step that trainers lose to sampling with `rollout.staleness`: they wait for groups
        that are not ready, or share a GPU with the engines.

        On a shared GPU what it has to do for both adds up. While the host of one launches, its driver packs, or it
        waits for tools, the GPU is the other's.
        """
        if not self.ahead:
            return 0.0
        late = self._pace.waiting
        if self.layout.colocated:
            both = self.phases["gen"].gpu + sum(phase.gpu for phase in self._training)
            late = max(late, both - sum(phase.total for phase in self._training))
        return late

    @property
    def step_seconds(self) -> float | None:
        """Return the seconds of a step without validation and saving; None: not known."""
        return sum(phase.total for phase in self.phases.values()) - self.overlap + self.late if self.phases else None

    @property
    def waiting(self) -> dict[str, float]:
        """Return the shares of a step by the names of `wait/`; empty where sampling and training take turns, or the
        GPU's speed is not known. Engines are taken to sample the groups that a step starts side by side, and to have no
        request in the rest of it; where waits for tools spread requests out, that is too much."""
        if not self.ahead or not self.step_seconds:
            return {}
        step, sync = self.step_seconds, self.phases["sync"].total
        left = max(0.0, step - sync - self.phases["gen"].total)
        return {"wait/trainers": self._pace.waiting / step, "wait/engines": left / step, "wait/updates": sync / step}

    @property
    def mfu(self) -> float | None:
        """Return the model FLOPs utilization of the updates, as a run reports it."""
        gpu = self.question.machine.gpu
        update = next((self.phases[name] for name in ("update", "update_actor") if name in self.phases), None)
        if update is None or gpu is None:
            return None
        train = self.question.cfg.train
        actor, work = self.layout.actor, self._computed.work
        flops = actor.shape.flops(train.lora).training(work.lengths)
        flops += (3 if actor.trains_tower else 1) * speed.tower_flops(actor.shape, work)
        return flops * self.batch.updates / train.sequence_parallel / update.total / gpu.flops


def _added(one: Seconds, other: Seconds) -> Seconds:
    return Seconds(
        one.compute + other.compute,
        one.memory + other.memory,
        one.communication + other.communication,
        one.host + other.host,
        one.fixed + other.fixed,
    )


def _times(one: Seconds, count: int) -> Seconds:
    return Seconds(
        one.compute * count, one.memory * count, one.communication * count, one.host * count, one.fixed * count
    )

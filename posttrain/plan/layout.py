"""Which processes a run has, what shares a GPU, and what the fullest GPU holds at each moment of a step."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from posttrain.algos import ADVANTAGES
from posttrain.config import Config, TrainConfig
from posttrain.core.machines import Machine
from posttrain.core.sizes import GIB, SENT_BUCKET_BYTES, bucket_bytes
from posttrain.engines.choice import EngineChoice
from posttrain.plan.batch import Lengths, StepBatch, patches_at_most
from posttrain.plan.calibration import CONTEXT_BYTES, FRAGMENTATION
from posttrain.plan.memory import EngineMemory, Terms, Trainer, total
from posttrain.plan.shape import ModelShape

CHECKED_AT_START = ("start", "first sync", "free", "load", "sample")
"""Moments whose memory does not depend on the data."""


@dataclass(frozen=True)
class Shapes:
    """The models of a run; None: there is none, or (critic) it has the actor's shape."""

    actor: ModelShape
    critic: ModelShape | None = None
    teacher: ModelShape | None = None
    reward: ModelShape | None = None


@dataclass(frozen=True)
class Kernels:
    """What depends on the machine that will run it."""

    compiled: bool
    itemsize: int
    repeats_heads: bool
    auto_engine: EngineChoice
    """What `rollout.engine = "auto"` stands for there"""


@dataclass(frozen=True)
class Layout:
    """The processes of a run."""

    cfg: Config
    machine: Machine
    trainers: tuple[Trainer, ...]
    """One worker of each group, the actor first; empty where nothing is trained"""
    engine: EngineMemory | None
    engines_per_gpu: int
    """On a GPU that has trainers, if they are colocated; else on one without"""
    colocated: bool
    reward: ModelShape | None
    itemsize: int

    @property
    def actor(self) -> Trainer:
        return self.trainers[0]

    @property
    def gpus_needed(self) -> int:
        if not self.trainers:
            return self.cfg.rollout.gpus_alone(self.machine.total)
        workers = self.cfg.cluster.workers
        if self.engine is None:
            return workers
        engines = self.cfg.rollout.replicas * self.cfg.rollout.tensor_parallel
        return workers if self.colocated else workers + engines

    @property
    def transfer(self) -> str:
        """How weights come to engines on GPUs."""
        chosen = self.cfg.cluster.weight_transfer
        if chosen != "auto":
            return chosen
        return "device" if self.colocated else "broadcast"


def lay_out(
    cfg: Config, shapes: Shapes, machine: Machine, kernels: Kernels, batch: StepBatch, lengths: Lengths
) -> Layout:
    """The processes that `sft`, `prefer` or `rl` start with this config."""
    trainers = tuple(_trainers(cfg, shapes, kernels, batch, lengths)) if cfg.trains else ()
    colocated = cfg.cluster.placement == "colocated"
    gpus = cfg.cluster.workers if cfg.trains else cfg.rollout.gpus_alone(machine.total)
    shared = -(-cfg.rollout.replicas * cfg.rollout.tensor_parallel // gpus) if colocated or not cfg.trains else 1
    engine = None
    if cfg.samples:
        counted = machine.memory
        name = kernels.auto_engine.name if cfg.rollout.engine == "auto" else cfg.rollout.engine
        if name == "sglang" and colocated and shared == 1 and counted:  # a share of what is free when it starts
            counted -= sum(total(trainer.fresh()) + trainer.beside() for trainer in trainers)
        engine = EngineMemory(
            shapes.actor,
            cfg.rollout,
            kernels.itemsize,
            counted,
            name,
            on_gpu=shared,
            step_tokens=_step_tokens(cfg, machine) if name == "vllm" else 0,
            episodes=cfg.episodes_of_engine,
        )
    return Layout(
        cfg,
        machine,
        trainers,
        engine,
        shared,
        colocated and cfg.trains,
        shapes.reward,
        kernels.itemsize,
    )


def _step_tokens(cfg: Config, machine: Machine) -> int:
    """Return the most tokens of a step of vLLM: what it takes itself for work in bulk, or what the user gives."""
    if isinstance(given := cfg.rollout.engine_options.get("max_num_batched_tokens"), int):
        return given
    if machine.gpu is None:
        return 0
    return 16384 if machine.memory >= 70 * GIB and "A100" not in machine.gpu.match else 8192


def _trainers(cfg: Config, shapes: Shapes, kernels: Kernels, batch: StepBatch, lengths: Lengths) -> Iterable[Trainer]:
    """As ``Learner.open`` and ``prefer`` start them."""

    def trainer(role: str, shape: ModelShape, *, trainable: bool = True, train: TrainConfig | None = None) -> Trainer:
        return Trainer(
            role,
            shape,
            train or cfg.train,
            world=cfg.cluster.workers,
            itemsize=kernels.itemsize,
            trainable=trainable,
            compiled=kernels.compiled,
            repeats_heads=kernels.repeats_heads,
            tokens=batch.worst,
            micro_batches=batch.micro_batches,
            patches=0 if shape.tower is None else patches_at_most(cfg, lengths, batch.worst, shape.tower.merge**2),
        )

    scores = cfg.trains_reward_model
    yield trainer("actor", shapes.actor.as_values() if scores else shapes.actor)
    adapted = cfg.train.lora.rank is not None
    if cfg.command == "prefer" and not scores and not adapted:
        yield trainer("reference", shapes.actor, trainable=False)
    if cfg.command != "rl":
        return
    advantage = ADVANTAGES.get(cfg.algo.advantage)
    if advantage.critic:
        yield trainer("critic", (shapes.critic or shapes.actor).as_values(), train=cfg.critic_train)
    if cfg.algo.kl_coef > 0 and not adapted:
        yield trainer("reference", shapes.actor, trainable=False)
    if advantage.teacher:
        yield trainer("teacher", shapes.teacher or shapes.actor, trainable=False)


# ---------------------------------------------------------------------- moments


@dataclass(frozen=True)
class Moment:
    """What the fullest GPU of a kind holds at one time."""

    name: str
    gpu: str
    """`trainers`, `engines`, or `all`: both on one"""
    terms: Terms
    """Memory of all its processes"""
    allocated: float = 0.0
    """Memory of the training process that works, by torch's count (`perf/memory_gib`)"""

    @property
    def total(self) -> float:
        return total(self.terms)


def moments(layout: Layout) -> list[Moment]:
    """Return the moments in the order in which a run comes to them."""
    found = list(_of_trainers(layout)) if layout.trainers else []
    if layout.engine is not None and not layout.colocated:
        terms = _times(layout.engine.awake(), layout.engines_per_gpu)
        if layout.trainers and layout.transfer == "broadcast":
            whole = layout.itemsize * layout.engine.shape.parameters
            terms |= {"buckets": float(bucket_bytes(whole, SENT_BUCKET_BYTES))}
        found.append(Moment("sample", "engines", terms))
    return found


def _of_trainers(layout: Layout) -> Iterable[Moment]:
    cfg, trainers = layout.cfg, layout.trainers
    gpu = "all" if layout.colocated and layout.engine else "trainers"
    idle = _sum(t.idle() for t in trainers)
    beside = {"CUDA context": sum(t.beside() for t in trainers) + (CONTEXT_BYTES if layout.reward else 0.0)}
    if layout.reward is not None and layout.colocated:
        beside["reward model"] = layout.itemsize * float(layout.reward.parameters)
    engine = layout.engine if layout.colocated else None
    count = layout.engines_per_gpu
    awake = _times(engine.awake(), count) if engine else {}
    resting = awake
    if engine and cfg.rollout.sleep:
        resting = _times(engine.asleep(), count)

    def moment(name: str, trained: Terms, sampled: Terms, working: Terms | None = None) -> Moment:
        slack = {"fragmentation": FRAGMENTATION * total(trained)}
        return Moment(name, gpu, _sum([trained, slack, beside, sampled]), total(working or {}))

    def working(trainer: Trainer, terms: Terms) -> Terms:
        """All idle but one."""
        return _sum([terms, *(t.idle() for t in trainers if t is not trainer)])

    yield moment("start", _sum(t.fresh() for t in trainers), awake)
    if layout.engine is not None:
        out = layout.actor.handing_out(layout.transfer, layout.engine.in_fp8)
        yield moment("first sync", working(layout.actor, out), awake, out)
        if engine:
            yield moment("sample", {} if cfg.train.offload else idle, awake)
            yield moment("free", idle, resting)
    for trainer, name in scoring(cfg, trainers):
        terms = trainer.forward()
        yield moment(name, working(trainer, terms), resting, terms)
    for trainer in trainers:
        if trainer.trainable:
            name = "update" if cfg.command != "rl" else f"update_{trainer.role}"
            terms = trainer.update()
            yield moment(name, working(trainer, terms), resting, terms)
    if layout.engine is not None:
        out = layout.actor.handing_out(layout.transfer, layout.engine.in_fp8)
        loading = _times(engine.loading(), count) if engine and cfg.rollout.sleep else awake
        yield moment("load", working(layout.actor, out), loading, out)
    yield moment("save", idle, resting)


def scoring(cfg: Config, trainers: Iterable[Trainer]) -> Iterable[tuple[Trainer, str]]:
    """Passes without gradients of a step, with the names of their phases."""
    by_role = {t.role: t for t in trainers}
    actor = by_role["actor"]
    if cfg.command == "prefer":
        yield actor, "values" if cfg.trains_reward_model else "log_prob"
        if not cfg.trains_reward_model:
            yield by_role.get("reference", actor), "ref"
        return
    if cfg.command != "rl":
        return
    algo = cfg.algo
    if cfg.scores_before_updates:
        yield actor, "old_log_prob"
    if algo.kl_coef > 0:
        yield by_role.get("reference", actor), "ref"
    if "critic" in by_role:
        yield by_role["critic"], "values"
    if "teacher" in by_role:
        yield by_role["teacher"], "teacher"


def sync_budget(layout: Layout) -> float | None:
    """Bytes of the trainers' fullest GPU amid a weight update; None: not on GPUs that are known, or no engine shares
    them, so that trainers keep what they had before."""
    if not layout.trainers or layout.engine is None or not layout.colocated or not layout.machine.memory:
        return None
    return next(m.total for m in moments(layout) if m.name == "load")


def _sum(parts: Iterable[Terms]) -> Terms:
    terms: Terms = {}
    for part in parts:
        for name, size in part.items():
            terms[name] = terms.get(name, 0.0) + size
    return terms


def _times(terms: Terms, count: int) -> Terms:
    return {name: size * count for name, size in terms.items()}

"""Settings that may put a plan right, those that cost least first. Whether they do is found out in ``advice``."""

from __future__ import annotations

import math
from collections.abc import Iterator

from posttrain.config import Config
from posttrain.plan.advice import Settings
from posttrain.plan.batch import longest_of
from posttrain.plan.estimate import Plan

_LEAST_FRACTION = 0.1
"""Smallest `rollout.memory_fraction` that is worth naming."""
_DOUBLINGS = 3
"""How often more training workers are tried."""


def memory(plan: Plan, over: float) -> tuple[Settings, ...]:
    """Settings that take less memory: each alone, then more and more of them together.

    Args:
        over: bytes that a GPU lacks.
    """
    single = list(_less_memory(plan, over))
    together: list[Settings] = []
    for settings in single:
        together.append({**(together[-1] if together else {}), **settings})
    more = list(_more_workers(plan))
    everything = together[-1] if together else {}
    return (*single, *more, *together[1:], *({**everything, **workers} for workers in more if everything))


def _less_memory(plan: Plan, over: float) -> Iterator[Settings]:
    cfg = plan.question.cfg
    train, rollout, shared = cfg.train, cfg.rollout, plan.layout.engine is not None and plan.layout.colocated
    if shared and not rollout.sleep:
        yield {"rollout.sleep": True}
    if shared and not train.offload and not train.cpu_offload:
        yield {"train.offload": True}
        if not rollout.sleep:
            yield {"rollout.sleep": True, "train.offload": True}
    if shared and plan.layout.engine is not None:
        given_back = 1.1 * over / max(1.0, plan.layout.engine.gpu_bytes) / plan.layout.engines_per_gpu
        fraction = math.floor(100 * (rollout.memory_fraction - given_back)) / 100
        if fraction >= _LEAST_FRACTION:
            yield {"rollout.memory_fraction": fraction}
    if not plan.layout.trainers:
        return
    if train.gather_weights == "step":
        yield {"train.gather_weights": "pass"}
    if train.reduce_gradients == "step":
        yield {"train.reduce_gradients": "microbatch"}
    longest, budget = longest_of(cfg), train.tokens_per_microbatch
    for fewer in dict.fromkeys((max(longest, budget // 2), longest)):
        if fewer < budget:
            yield {"train.tokens_per_microbatch": fewer}
    if train.activation_checkpointing == "none":
        yield {"train.activation_checkpointing": "selective"}
    if train.activation_checkpointing != "full":
        yield {"train.activation_checkpointing": "full"}
    if train.optim.name == "adamw":
        yield {"train.optim.name": "adamw_8bit"}
    if train.param_dtype == "float32":
        yield {"train.param_dtype": "bfloat16"}
    if not train.cpu_offload:
        yield {"train.offload": False, "train.cpu_offload": True} if shared else {"train.cpu_offload": True}


def _more_workers(plan: Plan) -> Iterator[Settings]:
    if plan.layout.trainers:
        for doubled in range(1, _DOUBLINGS + 1):
            yield {"cluster.workers": plan.question.cfg.cluster.workers << doubled}


def fewer_gpus(plan: Plan) -> Iterator[Settings]:
    """Layouts of the run on the GPUs that there are, of most of them first."""
    cfg, total = plan.question.cfg, plan.question.machine.total
    parallel = cfg.rollout.tensor_parallel
    if not cfg.trains:
        yield {"rollout.replicas": max(1, total // parallel)}
        return
    if plan.layout.engine is not None and not plan.layout.colocated:
        for replicas in range(min(cfg.rollout.replicas, (total - 1) // parallel), 0, -1):
            for workers in range(min(cfg.cluster.workers, total - replicas * parallel), 0, -1):
                yield _differing(cfg, {"cluster.workers": workers, "rollout.replicas": replicas})
        for workers in range(min(cfg.cluster.workers, total), 0, -1):
            yield {"cluster.placement": "colocated", **_on_workers(plan, workers)}
        return
    for workers in range(min(cfg.cluster.workers, total), 0, -1):
        yield _on_workers(plan, workers)


def more_gpus(plan: Plan) -> Iterator[Settings]:
    """Layouts that use GPUs which the run leaves idle, most of them first."""
    cfg, total = plan.question.cfg, plan.question.machine.total
    if plan.layout.engine is not None and not plan.layout.colocated:
        most = (total - (cfg.cluster.workers if cfg.trains else 0)) // cfg.rollout.tensor_parallel
        yield from ({"rollout.replicas": count} for count in range(most, cfg.rollout.replicas, -1))
        return
    for workers in range(total, cfg.cluster.workers, -1):
        engines = workers // cfg.rollout.tensor_parallel
        if plan.layout.engine is not None and engines > cfg.rollout.replicas:
            yield {"cluster.workers": workers, "rollout.replicas": engines}
        yield {"cluster.workers": workers}


def _on_workers(plan: Plan, workers: int) -> Settings:
    """What a run with so many training workers must also change."""
    cfg = plan.question.cfg
    wanted: dict[str, object] = {"cluster.workers": workers}
    if workers % cfg.train.sequence_parallel:
        wanted["train.sequence_parallel"] = math.gcd(workers, cfg.train.sequence_parallel)
    if cfg.train.shard_size is not None and workers % cfg.train.shard_size:
        wanted["train.shard_size"] = None
    if plan.layout.engine is not None:
        parallel = next(n for n in range(min(cfg.rollout.tensor_parallel, workers), 0, -1) if shareable(plan, n))
        wanted["rollout.tensor_parallel"] = parallel
        wanted["rollout.replicas"] = max(1, min(cfg.rollout.replicas, workers // parallel))
    return _differing(cfg, wanted)


def _differing(cfg: Config, wanted: Settings) -> Settings:
    """Those that the config does not have already."""
    tree = cfg.model_dump()
    return {key: value for key, value in wanted.items() if tree[key.split(".")[0]][key.split(".")[1]] != value}


def shareable(plan: Plan, size: int) -> bool:
    """Return whether so many GPUs can share the actor's heads, as ``models.ulysses.check_heads``."""
    shape = plan.question.shapes.actor
    return shape.heads % size == 0 and (shape.kv_heads % size == 0 or size % shape.kv_heads == 0)


def shares(plan: Plan, wanted: int, most: int) -> list[int]:
    """Numbers of GPUs that can share the actor's heads, up to ``most``, those nearest to ``wanted`` first."""
    good = [size for size in range(1, most + 1) if size != wanted and shareable(plan, size)]
    return sorted(good, key=lambda size: (abs(size - wanted), size))


def sequence_shares(plan: Plan) -> Iterator[Settings]:
    """Numbers of workers that can share a sequence, and of workers that can be divided by them."""
    cfg = plan.question.cfg
    for size in shares(plan, cfg.train.sequence_parallel, cfg.cluster.workers):
        for workers in range(cfg.cluster.workers, 0, -1):
            if workers % size == 0:
                yield _differing(cfg, {"train.sequence_parallel": size, "cluster.workers": workers})


def cache(plan: Plan, tokens: int) -> Iterator[Settings]:
    """Settings that leave an engine a KV cache of so many tokens."""
    engine, cfg = plan.layout.engine, plan.question.cfg
    assert engine is not None
    wanted = engine.beside_cache + tokens * engine.of_token
    fraction = math.ceil(100 * wanted / max(1.0, engine.gpu_bytes) + 1) / 100
    if fraction * plan.layout.engines_per_gpu < 1.0:
        yield {"rollout.memory_fraction": fraction}
        if plan.layout.colocated and not cfg.train.cpu_offload:
            turns = {"rollout.sleep": True, "train.offload": True}
            yield _differing(cfg, {"rollout.memory_fraction": fraction, **turns})
    if engine.name != "hf":
        most = plan.question.machine.gpus
        larger = [
            size for size in shares(plan, cfg.rollout.tensor_parallel, most) if size > cfg.rollout.tensor_parallel
        ]
        yield from ({"rollout.tensor_parallel": size} for size in larger)
    most_engines = cfg.cluster.workers // cfg.rollout.tensor_parallel
    if plan.layout.colocated and most_engines > cfg.rollout.replicas:
        yield {"rollout.replicas": most_engines}

"""What is wrong with a plan, and the setting that would put it right."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

from posttrain.config import Config
from posttrain.planning.batch import longest_of
from posttrain.planning.estimate import Plan, Question
from posttrain.planning.layout import CHECKED_AT_START
from posttrain.planning.sizes import GIB

Level = Literal["error", "warning", "note"]


@dataclass(frozen=True)
class Problem:
    """One thing to know before the run."""

    level: Level
    """error: the run cannot go on so; warning: it goes on, but not as one would want; note: what was assumed"""
    message: str
    fix: str = ""
    """A setting, as `--set` takes it; empty: there is none"""


def problems(plan: Plan) -> list[Problem]:
    """Everything found, errors first."""
    found = [*_room(plan), *_memory(plan), *_heads(plan), *_cache(plan), *_batches(plan), *_speed(plan), *_notes(plan)]
    order = ("error", "warning", "note")
    return sorted(found, key=lambda problem: order.index(problem.level))


# ---------------------------------------------------------------------- GPUs and their memory


def _room(plan: Plan) -> Iterator[Problem]:
    machine, needed = plan.question.machine, plan.layout.gpus_needed
    if machine.total and needed > machine.total:
        fix = f"cluster.workers={machine.total}"
        if plan.layout.engine is not None and not plan.layout.colocated:
            fix = "cluster.placement=colocated, or fewer cluster.workers or rollout.replicas"
        yield Problem("error", f"the run needs {needed} GPUs, and there are {machine.total}", fix)
    elif machine.total and needed < machine.total:
        fix = f"cluster.workers={machine.total}" if plan.layout.colocated or plan.layout.engine is None else ""
        yield Problem("note", f"the run uses {needed} of {machine.total} GPUs", fix)


def _memory(plan: Plan) -> Iterator[Problem]:
    worst, memory = plan.worst, plan.question.machine.memory
    if worst is None or not memory:
        return
    if worst.total > memory:
        names = ", ".join(m.name for m in plan.moments if m.total > memory)
        fixes = [text for text, sections in _remedies(plan) if Plan(plan.question.with_config(sections)).fits]
        over = (worst.total - memory) / GIB
        fix = " or ".join(
            fixes[:3]
        ) or "more GPUs (cluster.workers), or several of these settings together: " + ", ".join(
            text for text, _ in list(_remedies(plan))[:3]
        )
        yield Problem("error", f"does not fit by {over:.1f} GiB, at: {names}", fix)
    elif worst.total > 0.95 * memory:
        left = (memory - worst.total) / GIB
        yield Problem("warning", f"only {left:.1f} GiB of a GPU are left at: {worst.name}", _first(_remedies(plan)))


Remedy = tuple[str, dict[str, dict[str, Any]]]
"""A setting in words, and as sections of the config."""


def _remedies(plan: Plan) -> Iterator[Remedy]:
    """Settings that take less memory, those that cost least time first."""
    cfg = plan.question.cfg
    train, rollout, samples = cfg.train, cfg.rollout, plan.layout.engine is not None and plan.layout.colocated
    if samples and not rollout.sleep:
        yield "rollout.sleep=true", {"rollout": {"sleep": True}}
    if samples and not train.offload and not train.cpu_offload:
        yield "train.offload=true", {"train": {"offload": True}}
        if not rollout.sleep:
            both: dict[str, dict[str, Any]] = {"rollout": {"sleep": True}, "train": {"offload": True}}
            yield "rollout.sleep=true with train.offload=true", both
    if samples and rollout.memory_fraction > 0.3:
        yield "rollout.memory_fraction=0.3", {"rollout": {"memory_fraction": 0.3}}
    if not plan.layout.trainers:
        return
    if train.gather_weights == "step":
        yield "train.gather_weights=pass", {"train": {"gather_weights": "pass"}}
    if train.reduce_gradients == "step":
        yield "train.reduce_gradients=microbatch", {"train": {"reduce_gradients": "microbatch"}}
    longest = longest_of(cfg)
    half = max(longest, train.tokens_per_microbatch // 2)
    if half < train.tokens_per_microbatch:
        yield f"train.tokens_per_microbatch={half}", {"train": {"tokens_per_microbatch": half}}
    if train.activation_checkpointing == "none":
        kind = {"activation_checkpointing": "selective"}
        yield "train.activation_checkpointing=selective", {"train": kind}
    if train.activation_checkpointing != "full":
        yield "train.activation_checkpointing=full", {"train": {"activation_checkpointing": "full"}}
    if train.optim.name == "adamw":
        eight = {"optim": train.optim.model_copy(update={"name": "adamw_8bit"})}
        yield "train.optim.name=adamw_8bit", {"train": eight}
    if train.param_dtype == "float32":
        yield "train.param_dtype=bfloat16", {"train": {"param_dtype": "bfloat16"}}
    if not train.cpu_offload and not train.offload:
        yield "train.cpu_offload=true", {"train": {"cpu_offload": True}}
    machine, workers = plan.question.machine, cfg.cluster.workers
    if machine.total > workers and plan.layout.colocated is (plan.layout.engine is not None):
        yield f"cluster.workers={machine.total}", {"cluster": {"workers": machine.total}}


def _first(remedies: Iterator[Remedy]) -> str:
    return next((text for text, _ in remedies), "")


# ---------------------------------------------------------------------- the rest


def _heads(plan: Plan) -> Iterator[Problem]:
    cfg, shape = plan.question.cfg, plan.question.shapes.actor
    share, parallel = cfg.train.sequence_parallel, cfg.rollout.tensor_parallel
    heads = f"the model has {shape.heads} query heads and {shape.kv_heads} key heads"
    if plan.layout.trainers and not _shareable(shape.heads, shape.kv_heads, share):
        yield Problem(
            "error", f"train.sequence_parallel = {share}: {heads}", _divisors("train.sequence_parallel", plan)
        )
    if plan.layout.engine is not None and not _shareable(shape.heads, shape.kv_heads, parallel):
        yield Problem(
            "error", f"rollout.tensor_parallel = {parallel}: {heads}", _divisors("rollout.tensor_parallel", plan)
        )
    if plan.layout.engine is not None and parallel > plan.question.machine.gpus and plan.question.machine.total:
        yield Problem(
            "error",
            f"rollout.tensor_parallel = {parallel}, and a node has {plan.question.machine.gpus} GPUs",
            f"rollout.tensor_parallel={plan.question.machine.gpus}",
        )


def _shareable(heads: int, kv_heads: int, size: int) -> bool:
    """As ``models.ulysses.check_heads``."""
    return heads % size == 0 and (kv_heads % size == 0 or size % kv_heads == 0)


def _divisors(key: str, plan: Plan) -> str:
    shape = plan.question.shapes.actor
    good = [n for n in range(1, 17) if _shareable(shape.heads, shape.kv_heads, n)]
    return f"{key}, one of {', '.join(map(str, good))}"


def _cache(plan: Plan) -> Iterator[Problem]:
    engine, cfg = plan.layout.engine, plan.question.cfg
    if engine is None or not plan.question.machine.memory:
        return
    rollout = cfg.rollout
    share = rollout.memory_fraction * plan.layout.engines_per_gpu
    if share >= 1.0:
        yield Problem(
            "error",
            f"{plan.layout.engines_per_gpu} engines on a GPU, each with rollout.memory_fraction = "
            f"{rollout.memory_fraction:g} of it",
            f"rollout.replicas={max(1, cfg.cluster.workers // rollout.tensor_parallel)}",
        )
    longest = longest_of(cfg)
    if engine.tokens < longest:
        yield Problem(
            "error",
            f"rollout.memory_fraction = {rollout.memory_fraction:g} leaves a KV cache of {engine.tokens:,} tokens, and "
            f"an episode may have {longest:,}",
            _enough(plan, longest),
        )
        return
    episodes = -(-cfg.data.batch_size * rollout.n // rollout.replicas)
    wanted = min(episodes, rollout.max_concurrent)
    fits = int(engine.tokens / max(1.0, plan.question.lengths.mean))
    if fits < wanted:
        yield Problem(
            "warning",
            f"rollout.memory_fraction = {rollout.memory_fraction:g} leaves a KV cache of {engine.tokens:,} tokens: "
            f"about {fits:,} episodes at once, and {wanted:,} could run",
            _enough(plan, int(wanted * plan.question.lengths.mean)),
        )


def _enough(plan: Plan, tokens: int) -> str:
    """A memory fraction that leaves a cache of so many tokens."""
    engine = plan.layout.engine
    assert engine is not None
    fraction = (engine.weights + tokens * engine.of_token) / engine.gpu_bytes
    if fraction < 0.92:
        return f"rollout.memory_fraction={fraction + 0.01:.2f}"
    return "rollout.tensor_parallel, rollout.replicas or shorter episodes"


def _batches(plan: Plan) -> Iterator[Problem]:
    cfg, batch = plan.question.cfg, plan.batch
    if not cfg.trains:
        return
    if batch.groups < batch.updates:
        yield Problem(
            "warning",
            f"{batch.groups} groups for {batch.updates} updates a step: {batch.updates - batch.groups} of them do not "
            "take place, and learning rates follow the number that was planned",
            f"algo.updates_per_step={max(1, batch.groups)}",
        )
    elif len(set(batch.groups_per_update)) > 1:
        yield Problem(
            "warning",
            f"the last update has fewer groups: {', '.join(map(str, batch.groups_per_update))}",
            f"data.batch_size={batch.groups // batch.updates * batch.updates or batch.updates}",
        )
    elif batch.updates > 1 and (cfg.rollout.filter_groups or cfg.rollout.replay):
        what = "rollout.filter_groups" if cfg.rollout.filter_groups else "rollout.replay"
        yield Problem(
            "note",
            f"with {what} a step may have fewer groups than {batch.groups}: updates are then smaller, and with fewer "
            f"than {batch.updates} groups there are fewer of them",
        )
    of_update = min((size for size in batch.groups_per_update if size), default=0)
    members = cfg.rollout.n if cfg.command == "rl" else 1
    if of_update and of_update * members < batch.ranks:
        yield Problem("warning", f"an update has {of_update * members} sequences for {batch.ranks} ranks", _more(cfg))
    longest = longest_of(cfg)
    if longest > cfg.train.tokens_per_microbatch:
        yield Problem(
            "note",
            f"a sequence may have {longest:,} tokens, more than train.tokens_per_microbatch = "
            f"{cfg.train.tokens_per_microbatch:,}: it is then a micro-batch of its own",
            f"train.tokens_per_microbatch={longest}",
        )
    limit = plan.question.shapes.actor.max_length
    if limit is not None and longest > limit:
        key = "rollout.max_response_tokens" if cfg.command == "rl" else "data.max_length"
        fewer = limit - (cfg.rollout.max_prompt_tokens if cfg.command == "rl" else 0)
        yield Problem(
            "warning",
            f"a sequence may have {longest:,} tokens, and the model's positions end at {limit:,}",
            f"{key}={fewer}",
        )
    total = batch.total_updates
    if total is not None and (cfg.train.optim.warmup_steps or 0) >= total:
        yield Problem(
            "warning",
            f"warm-up takes {cfg.train.optim.warmup_steps} optimizer steps, and the run has {total}",
            "train.optim.warmup_ratio=0.1 instead of train.optim.warmup_steps",
        )


def _more(cfg: Config) -> str:
    if cfg.algo.updates_per_step > 1 and cfg.command == "rl":
        return "algo.updates_per_step=1, or a larger data.batch_size"
    return "a larger data.batch_size, or fewer cluster.workers"


def _speed(plan: Plan) -> Iterator[Problem]:
    """Updates in which the GPU waits for the host, though larger micro-batches would fit."""
    phase = next((plan.phases[name] for name in ("update", "update_actor") if name in plan.phases), None)
    if phase is None or phase.bound != "host" or plan.batch.micro_batches < 2:
        return
    train = plan.question.cfg.train
    double = 2 * train.tokens_per_microbatch
    larger = plan.question.with_config({"train": {"tokens_per_microbatch": double}})
    if train.sequences_per_microbatch is None and Plan(larger).fits:
        text = f"the GPU waits for the host in updates: {plan.batch.micro_batches} micro-batches of few tokens"
        yield Problem("note", text, f"train.tokens_per_microbatch={double}")


def _notes(plan: Plan) -> Iterator[Problem]:
    question = plan.question
    for note in question.notes:
        yield Problem("note", note)
    gpu, shape = question.machine.gpu, question.shapes.actor
    if not shape.known:
        yield Problem("note", f"models of type {shape.kind or 'unknown'} are counted as if they were like Llama")
    if shape.experts:
        yield Problem("note", "activations and times of mixtures of experts were never compared with measurements")
    if gpu is None:
        return
    if question.kernels.itemsize == 4:
        yield Problem("note", "times are those of bfloat16, and train.dtype is float32", "train.dtype=bfloat16")
    if not gpu.flops:
        yield Problem("note", f"{gpu.name} is not in the table of GPUs: times are not predicted")
    elif not gpu.measured:
        yield Problem("note", f"times of {gpu.match} are extrapolated from H200 by its datasheet")
    if question.cfg.cluster.workers > 2:
        yield Problem("note", "more than two GPUs were never measured: communication is extrapolated")


def impossible(question: Question) -> Problem | None:
    """What already the weights and caches of a colocated run make impossible, whatever the data."""
    plan = Plan(question)
    memory = question.machine.memory
    if not memory:
        return None
    for moment in plan.moments:
        # Without what the allocator may waste: what is refused could not have run.
        needed = moment.total - moment.terms.get("fragmentation", 0.0)
        if moment.name in CHECKED_AT_START and needed > memory:
            fixes = [text for text, sections in _remedies(plan) if _possible(plan.question.with_config(sections))]
            message = (
                f"no room on a GPU at: {moment.name}: {needed / GIB:.1f} GiB ({_terms(moment.terms)}) of "
                f"{memory / GIB:.1f} GiB"
            )
            return Problem("error", message, " or ".join(fixes[:3]))
    return None


def _possible(question: Question) -> bool:
    memory = question.machine.memory
    return all(
        moment.total - moment.terms.get("fragmentation", 0.0) <= memory
        for moment in Plan(question).moments
        if moment.name in CHECKED_AT_START
    )


def _terms(terms: dict[str, float]) -> str:
    shown = sorted(((size, name) for name, size in terms.items() if size > 0.05 * GIB), reverse=True)
    return ", ".join(f"{name} {size / GIB:.1f}" for size, name in shown)

"""What is wrong with a plan, and settings that may put it right (``advice`` tries them)."""

from __future__ import annotations

from collections.abc import Iterator

from posttrain.config import Config
from posttrain.core.errors import ConfigError
from posttrain.core.sizes import GIB
from posttrain.plan import remedies
from posttrain.plan.advice import MEMORY, Problem, Replan, Settings, advised
from posttrain.plan.batch import longest_of
from posttrain.plan.estimate import Plan
from posttrain.plan.layout import CHECKED_AT_START

_TOO_LARGE = "use more or larger GPUs, or a smaller model"


def problems(plan: Plan, replan: Replan) -> list[Problem]:
    """Everything found, errors first, with the settings that were found to put it right."""
    return advised(plan, found, replan)


def found(plan: Plan) -> list[Problem]:
    """Everything found, with settings that nobody has tried yet."""
    parts = (_gpus, _memory, _heads, _engine, _cache, _batches, _lengths, _warm_up, _speed, _notes)
    return [problem for part in parts for problem in part(plan)]


# ---------------------------------------------------------------------- GPUs and their memory


def _gpus(plan: Plan) -> Iterator[Problem]:
    machine, needed = plan.question.machine, plan.layout.gpus_needed
    if machine.total and needed > machine.total:
        message = f"the run needs {needed} GPUs, and there are {machine.total}"
        settings = tuple(remedies.fewer_gpus(plan))
        yield Problem("gpus", "error", message, settings, needed / machine.total, _TOO_LARGE)
    elif machine.total and needed < machine.total:
        message = f"the run uses {needed} of {machine.total} GPUs"
        yield Problem("gpus", "note", message, tuple(remedies.more_gpus(plan)), machine.total - needed)


def _memory(plan: Plan) -> Iterator[Problem]:
    worst, memory = plan.worst, plan.question.machine.memory
    if worst is None or not memory:
        return
    over = worst.total - memory
    if over > 0:
        names = ", ".join(m.name for m in plan.moments if m.total > memory)
        message = f"does not fit by {over / GIB:.1f} GiB, at: {names}"
        yield Problem(MEMORY, "error", message, remedies.memory(plan, over), worst.total, _TOO_LARGE)
    elif worst.total > 0.95 * memory:
        message = f"only {-over / GIB:.1f} GiB of a GPU are left at: {worst.name}"
        settings = remedies.memory(plan, worst.total - 0.95 * memory)
        yield Problem(MEMORY, "warning", message, settings, worst.total)


# ---------------------------------------------------------------------- engines


def _heads(plan: Plan) -> Iterator[Problem]:
    cfg, shape, machine = plan.question.cfg, plan.question.shapes.actor, plan.question.machine
    share, parallel = cfg.train.sequence_parallel, cfg.rollout.tensor_parallel
    heads = f"the model has {shape.heads} query heads and {shape.kv_heads} key heads"
    if plan.layout.trainers and not remedies.shareable(plan, share):
        settings = tuple(remedies.sequence_shares(plan))
        yield Problem("sequence heads", "error", f"train.sequence_parallel = {share}: {heads}", settings)
    if plan.layout.engine is None:
        return
    # Engines beside trainers use the trainers' GPUs, and the GPUs of one are on one node.
    most = min(machine.gpus, cfg.cluster.workers) if plan.layout.colocated else machine.gpus
    sizes = remedies.shares(plan, parallel, most if machine.total else parallel)
    settings = tuple(_of_engine(cfg, size) for size in sizes)
    if not remedies.shareable(plan, parallel):
        yield Problem("engine heads", "error", f"rollout.tensor_parallel = {parallel}: {heads}", settings)
    if machine.total and parallel > most:
        where = "a node has" if most == machine.gpus else "the run trains on"
        message = f"rollout.tensor_parallel = {parallel}, and {where} {most} GPUs"
        yield Problem("engine size", "error", message, settings)


def _of_engine(cfg: Config, parallel: int) -> Settings:
    """Engines of another number of GPUs, on as many GPUs in all."""
    engines = max(1, cfg.rollout.replicas * cfg.rollout.tensor_parallel // parallel)
    more = {"rollout.replicas": engines} if engines != cfg.rollout.replicas else {}
    return {"rollout.tensor_parallel": parallel, **more}


def _engine(plan: Plan) -> Iterator[Problem]:
    rollout, tower = plan.question.cfg.rollout, plan.question.shapes.actor.tower
    if plan.layout.engine is not None and plan.layout.engine.name != "hf" and tower is not None and tower.tile:
        message = f"the model reads images in tiles, and an engine {plan.layout.engine.name} is not given such images"
        yield Problem("tiles", "error", message, ({"rollout.engine": "hf"},))
    if plan.layout.engine is not None and plan.layout.engine.name == "hf" and rollout.tensor_parallel > 1:
        message = f"rollout.tensor_parallel = {rollout.tensor_parallel}, and an engine hf is of one GPU"
        settings = (_of_engine(plan.question.cfg, 1), {"rollout.engine": "sglang"}, {"rollout.engine": "vllm"})
        yield Problem("embedded engine", "error", message, settings)
    if plan.layout.engine is not None and rollout.quantization == "fp8":
        try:
            plan.question.shapes.actor.fp8(rollout.tensor_parallel)
        except ConfigError as error:
            yield Problem("fp8", "error", error.message, ({"rollout.quantization": "none"},))
        gpu = plan.question.machine.gpu
        if gpu is not None and not gpu.fp8 and plan.layout.engine.name != "hf":
            message = f"rollout.quantization = 'fp8', and {gpu.match} does not multiply in FP8"
            yield Problem("fp8 gpu", "error", message, ({"rollout.quantization": "none"},))


def _cache(plan: Plan) -> Iterator[Problem]:
    engine, cfg = plan.layout.engine, plan.question.cfg
    if engine is None or not plan.question.machine.memory:
        return
    rollout, on_gpu = cfg.rollout, plan.layout.engines_per_gpu
    share = rollout.memory_fraction * on_gpu
    if share >= 1.0:
        message = f"{on_gpu} engines on a GPU, each with rollout.memory_fraction = {rollout.memory_fraction:g} of it"
        fewer = max(1, cfg.cluster.workers // rollout.tensor_parallel)
        settings = ({"rollout.replicas": fewer}, {"rollout.memory_fraction": int(90 / on_gpu) / 100})
        yield Problem("engines of a GPU", "error", message, settings, share)
    longest = longest_of(cfg)
    leaves = f"rollout.memory_fraction = {rollout.memory_fraction:g} leaves a KV cache of {engine.tokens:,} tokens"
    if engine.tokens < longest:
        message = f"{leaves}, and an episode may have {longest:,}"
        shorter = engine.tokens - rollout.max_prompt_tokens
        last = ({"rollout.max_response_tokens": shorter},) if shorter > 0 else ()
        settings = (*remedies.cache(plan, longest), *last)
        yield Problem("cache", "error", message, settings, longest - engine.tokens, _TOO_LARGE)
        return
    episodes = -(-cfg.data.batch_size * rollout.n // rollout.replicas)
    wanted = engine.requests(episodes)
    mean = plan.question.lengths.mean
    fits = int(engine.tokens / max(1.0, mean))
    if fits < wanted:
        message = f"{leaves}: about {fits:,} episodes at once, and {wanted:,} could run"
        yield Problem(
            "cache", "warning", message, tuple(remedies.cache(plan, int(wanted * mean))), wanted / max(1, fits)
        )


# ---------------------------------------------------------------------- batches and lengths


def _batches(plan: Plan) -> Iterator[Problem]:
    cfg, batch = plan.question.cfg, plan.batch
    if not cfg.trains:
        return
    if batch.groups < batch.updates:
        missing = batch.updates - batch.groups
        message = (
            f"{batch.groups} groups for {batch.updates} updates a step: {missing} of them do not take place, and "
            "learning rates follow the number that was planned"
        )
        yield Problem("updates", "warning", message, _fewer_updates(batch.groups, batch.groups), missing)
    elif len(set(batch.groups_per_update)) > 1:
        message = f"the last update has fewer groups: {', '.join(map(str, batch.groups_per_update))}"
        yield Problem("updates", "warning", message, _fewer_updates(batch.groups, batch.updates))
    elif batch.updates > 1 and (cfg.rollout.filter_groups or cfg.rollout.replay):
        what = "rollout.filter_groups" if cfg.rollout.filter_groups else "rollout.replay"
        message = (
            f"with {what} a step may have fewer groups than {batch.groups}: updates are then smaller, and with fewer "
            f"than {batch.updates} groups there are fewer of them"
        )
        yield Problem("updates", "note", message)
    members = cfg.rollout.n if cfg.command == "rl" else 1
    of_update = members * min((size for size in batch.groups_per_update if size), default=0)
    if of_update and of_update < batch.ranks:
        message = f"an update has {of_update} sequences for {batch.ranks} ranks"
        settings: list[Settings] = []
        if cfg.command == "rl":
            settings += _fewer_updates(batch.groups, batch.updates - 1)
        settings.append({"data.batch_size": cfg.data.batch_size * -(-batch.ranks // of_update)})
        share = cfg.train.sequence_parallel
        settings += [{"cluster.workers": ranks * share} for ranks in range(of_update, 0, -1)]
        yield Problem("ranks", "warning", message, tuple(settings), batch.ranks / of_update)


def _fewer_updates(groups: int, most: int) -> tuple[Settings, ...]:
    """Numbers of updates that divide the groups of a step, the largest first."""
    return tuple({"algo.updates_per_step": n} for n in range(most, 0, -1) if groups % n == 0)


def _lengths(plan: Plan) -> Iterator[Problem]:
    cfg, longest = plan.question.cfg, longest_of(plan.question.cfg)
    if not cfg.trains:
        return
    budget, limit = cfg.train.tokens_per_microbatch, plan.question.shapes.actor.max_length
    if longest > budget:
        message = (
            f"a sequence may have {longest:,} tokens, more than train.tokens_per_microbatch = {budget:,}: it is then a "
            "micro-batch of its own"
        )
        yield Problem("micro-batch", "note", message, ({"train.tokens_per_microbatch": longest},), longest / budget)
    if limit is not None and longest > limit:
        message = f"a sequence may have {longest:,} tokens, and the model's positions end at {limit:,}"
        yield Problem("positions", "warning", message, _shorter(cfg, limit), longest / limit)


def _shorter(cfg: Config, limit: int) -> tuple[Settings, ...]:
    """Settings with which no sequence is longer than ``limit`` tokens."""
    if cfg.command != "rl":
        return ({"data.max_length": limit},)
    both = {"rollout.max_prompt_tokens": limit // 2, "rollout.max_response_tokens": limit - limit // 2}
    return ({"rollout.max_response_tokens": limit - cfg.rollout.max_prompt_tokens}, both)


def _warm_up(plan: Plan) -> Iterator[Problem]:
    total, steps = plan.batch.total_updates, plan.question.cfg.train.optim.warmup_steps or 0
    if plan.question.cfg.trains and total is not None and steps >= total:
        message = f"warm-up takes {steps} optimizer steps, and the run has {total}"
        shorter = {"train.optim.warmup_steps": None, "train.optim.warmup_ratio": 0.1}
        yield Problem("warm-up", "warning", message, (shorter,), steps / max(1, total))


# ---------------------------------------------------------------------- speed, and what was assumed


def _speed(plan: Plan) -> Iterator[Problem]:
    """Updates in which the GPU waits for the host."""
    phase = next((plan.phases[name] for name in ("update", "update_actor") if name in plan.phases), None)
    if phase is None or phase.bound != "host" or plan.batch.micro_batches < 2:
        return
    train, count = plan.question.cfg.train, plan.batch.micro_batches
    settings: tuple[Settings, ...] = ()
    if train.sequences_per_microbatch is None:
        settings = ({"train.tokens_per_microbatch": 2 * train.tokens_per_microbatch},)
    message = f"the GPU waits for the host in updates: {count} micro-batches of few tokens"
    yield Problem("host", "note", message, settings, count)


def _notes(plan: Plan) -> Iterator[Problem]:
    question = plan.question
    for note in question.notes:
        yield Problem(note, "note", note)
    gpu, shape = question.machine.gpu, question.shapes.actor
    if shape.sees and shape.tower is None:
        yield _note("vision tower", "a vision tower of this kind is not counted, nor what images take")
    elif shape.tower is not None:
        if not question.lengths.images.source:
            yield _note("images", "images of the data are not known: as many are reckoned with as tokens allow")
        yield _note(
            "vision tower", "a vision tower takes longer than is said here: steps of SFT took 1.2 to 1.5 times as long"
        )
    elif not shape.known:
        yield _note("model type", f"models of type {shape.kind or 'unknown'} are counted as if they were like Llama")
    if shape.experts:
        measured = "on an H100 times of two mixtures were 19 and 24 % too short, memory with adapters 16 % too small"
        yield _note("experts", f"{measured} (docs/experts.md)")
    if gpu is None:
        return
    if question.cfg.samples and question.cfg.rollout.rounds:
        yield _note("fp8", "times of engines in FP8 were never measured: bytes count, and products as in bfloat16")
    if question.kernels.itemsize == 4:
        bfloat16 = ({"train.dtype": "bfloat16"},)
        yield Problem("type", "note", "times are those of bfloat16, and train.dtype is float32", bfloat16)
    if not gpu.flops:
        yield _note("gpu", f"{gpu.name} is not in the table of GPUs: times are not predicted")
    elif not gpu.measured:
        yield _note("gpu", f"times of {gpu.match} are extrapolated from H200 by its datasheet")
    if question.cfg.cluster.workers > 2:
        yield _note("workers", "more than two GPUs were never measured: communication is extrapolated")


def _note(kind: str, message: str) -> Problem:
    return Problem(kind, "note", message)


# ---------------------------------------------------------------------- before a run


def impossible(plan: Plan, replan: Replan) -> Problem | None:
    """What already the weights and caches of a colocated run make impossible, whatever the data."""
    return next(iter(advised(plan, _impossible, replan)), None)


def too_large(plan: Plan, replan: Replan) -> Problem | None:
    """What does not fit where micro-batches are as large as they may be; ``impossible`` leaves their work out."""
    return next(iter(advised(plan, lambda of: [p for p in _memory(of) if p.level == "error"], replan)), None)


def _impossible(plan: Plan) -> list[Problem]:
    memory = plan.question.machine.memory
    # Without what the allocator may waste: what is refused could not have run.
    needed = {m.name: m.total - m.terms.get("fragmentation", 0.0) for m in plan.moments if m.name in CHECKED_AT_START}
    worst = next((m for m in plan.moments if needed.get(m.name, 0.0) > memory), None)
    if not memory or worst is None:
        return []
    size = needed[worst.name]
    message = (
        f"no room on a GPU at: {worst.name}: {size / GIB:.1f} GiB ({_terms(worst.terms)}) of {memory / GIB:.1f} GiB"
    )
    over = max(needed.values()) - memory
    return [Problem(MEMORY, "error", message, remedies.memory(plan, over), max(needed.values()), _TOO_LARGE)]


def _terms(terms: dict[str, float]) -> str:
    shown = sorted(((size, name) for name, size in terms.items() if size > 0.05 * GIB), reverse=True)
    return ", ".join(f"{name} {size / GIB:.1f}" for size, name in shown)

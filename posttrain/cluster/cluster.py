"""Start Ray and the processes of a run on it, and end them all again."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import os
import signal
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

import ray
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from posttrain.cluster.actors import ActorContext, ActorHandle, actor_class
from posttrain.cluster.calls import gather
from posttrain.cluster.forkserver import not_forked
from posttrain.cluster.head import Head
from posttrain.cluster.placement import check_total, device_of, on_one_node, placement_timeout, spread
from posttrain.cluster.reward_models import RemoteRewardModel, RewardActor, RewardModelSpec
from posttrain.cluster.samplers import RemoteSampler, SamplerActor
from posttrain.cluster.start import init_ray, shutdown_ray
from posttrain.cluster.trainers import TrainActor, TrainerGroup
from posttrain.cluster.waiting_worker import GPU_VARIABLES, taking
from posttrain.config import Config, RewardModelConfig, TrainConfig, tolerance
from posttrain.core.errors import ConfigError, DeadlineError, RunError
from posttrain.engines.ahead import processes_ahead
from posttrain.engines.base import EngineSpec
from posttrain.engines.choice import choose_engine
from posttrain.models.load import ModelSource
from posttrain.train.spec import WorkerSpec
from posttrain.weight_sync.transfers import TransferChooser

_JOIN_HINT = (
    "does Ray run there, in the same version? `ray status --address HOST:PORT` tells; "
    "where it asks for a token, set RAY_AUTH_MODE=token"
)
_GPU_SHARE = 0.2
"""A colocated process's share of a GPU: actor, critic (or teacher), reference, sampler and reward model fit on one."""


def try_ray() -> dict[str, float]:
    """Start Ray on this machine, run a task, and end it; returns the resources that Ray sees."""

    def answer() -> bool:
        return True

    init_ray(forks=False)
    try:
        ray.get(ray.remote(num_cpus=0)(answer).remote())
        return {name: float(amount) for name, amount in ray.cluster_resources().items()}
    finally:
        shutdown_ray()


async def join_ray(address: str, deadline_s: float) -> None:
    """Join the Ray cluster at ``address``, which may be dead: Ray then tries for minutes, and cannot be stopped.

    Raises:
        ConfigError: the cluster cannot be joined, or not within ``deadline_s`` seconds.
    """
    joined: concurrent.futures.Future[None] = concurrent.futures.Future()
    joined.set_running_or_notify_cancel()

    def join() -> None:
        try:
            init_ray(address)
        except BaseException as error:
            joined.set_exception(error)
        else:
            joined.set_result(None)

    # A daemon thread, so that neither a deadline nor Ctrl-C waits for it.
    threading.Thread(target=join, name="join-ray", daemon=True).start()
    try:
        async with asyncio.timeout(deadline_s):
            await asyncio.wrap_future(joined)
    except TimeoutError as error:
        late = f"no answer from cluster.address = {address!r} within cluster.start_deadline_s = {deadline_s:g} s"
        raise ConfigError(late, hint=_JOIN_HINT) from error
    except Exception as error:
        raise ConfigError(f"cannot join the Ray cluster at {address!r}: {error}", hint=_JOIN_HINT) from error


async def nodes_at(address: str, deadline_s: float) -> list[dict[str, float]]:
    """Return the resources of each living node of the Ray cluster at ``address``. Raises as ``join_ray``."""
    await join_ray(address, deadline_s)
    try:
        return [dict(node["Resources"]) for node in ray.nodes() if node["Alive"]]
    finally:
        shutdown_ray()


def take_back_sigterm() -> None:
    """Remove Ray's handler of SIGTERM, which prints a stack and sets an alarm that kills the process three seconds
    later, in the middle of its last save."""
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, signal.getsignal(signal.SIGTERM) or signal.SIG_DFL)


@contextlib.contextmanager
def local_ray() -> Iterator[None]:
    """Start one Ray instance for several successive runs, each of which would otherwise start its own."""
    init_ray()
    try:
        yield
    finally:
        shutdown_ray()


class Cluster:
    """The processes of one run. Use as ``async with Cluster(cfg) as cluster``: leaving it ends every worker.

    Args:
        logs: the folder that gets the logs of workers; None: Ray keeps them.
    """

    def __init__(self, cfg: Config, logs: Path | None = None) -> None:
        self.cfg = cfg
        self.handles: list[ActorHandle] = []
        self._samplers: dict[int, RemoteSampler] = {}
        self._prepared: dict[int, RemoteSampler] = {}
        """Processes for engines that have not started."""
        self._starting: asyncio.Task[list[RemoteSampler]] | None = None
        """Engines that start ahead of ``samplers``."""
        self.groups: dict[str, PlacementGroup] = {}
        self._gpus: dict[str, list[tuple[str, str]]] = {}
        self.steps_before = 0
        """Steps that engines had sampled before those that are started from now on (``EngineSpec``)."""
        self.owns_ray = False
        self.context = ActorContext.of_driver(cfg.plugins, logs)
        self._head = Head()

    async def __aenter__(self) -> Cluster:
        if not ray.is_initialized():
            await self._init_ray()
        take_back_sigterm()
        try:
            self.device = device_of(self.cfg)
        except RunError:
            await self.__aexit__(None, None, None)
            raise
        self._head.watch(patient=self.cfg.cluster.address is not None)
        return self

    async def _init_ray(self) -> None:
        if self.cfg.cluster.address is None:
            await asyncio.to_thread(init_ray)
        else:
            await join_ray(self.cfg.cluster.address, self.cfg.cluster.start_deadline_s)
        self.owns_ray = True

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None
    ) -> None:
        self._head.unwatch()
        if self._starting is not None:
            self._starting.cancel()
            await asyncio.gather(self._starting, return_exceptions=True)
        for handle in self.handles:
            with contextlib.suppress(Exception):  # it may be dead already
                ray.kill(handle.actor)
        await asyncio.gather(*(handle.kill() for handle in self.handles if handle.unresponsive), return_exceptions=True)
        for group in self.groups.values():
            remove_placement_group(group)
        if self.owns_ray:
            await asyncio.to_thread(shutdown_ray)
        self._head.raise_if_lost()

    @property
    def dtype(self) -> str:
        if self.cfg.train.dtype != "auto":
            return self.cfg.train.dtype
        return "bfloat16" if self.device == "cuda" else "float32"

    @property
    def sync_tolerance(self) -> float:
        if self.cfg.cluster.sync_tolerance is not None:
            return self.cfg.cluster.sync_tolerance
        return tolerance(self.dtype, fp8=self.cfg.rollout.rounds)

    async def trainer(
        self,
        role: str,
        source: ModelSource,
        *,
        temperature: float = 1.0,
        total_steps: int = 1,
        trainable: bool = True,
        train: TrainConfig | None = None,
        values: bool = False,
    ) -> TrainerGroup:
        """Start a group of ``cluster.workers`` training workers for one model.

        ``train`` is how it is trained, if not as the config says; the others are as in ``WorkerSpec``.
        """
        cfg = self.cfg
        world_size = cfg.cluster.workers
        spec = WorkerSpec(
            source=source,
            device=self.device,
            dtype=self.dtype,
            seed=cfg.run.seed,
            temperature=temperature,
            train=train or cfg.train,
            trainable=trainable,
            values=values,
            total_steps=total_steps,
            threads=_threads(world_size),
            batch_invariant=cfg.rollout.batch_invariant,
            replays_routing=role == "actor" and cfg.rollout.router_replay != "off",
            stored_names=cfg.rollout.engine != "hf",
            fp8=role == "actor" and cfg.rollout.quantization == "fp8",
            engine_gpus=cfg.rollout.tensor_parallel,
        )
        options = [await self._options("trainers", world_size, rank) for rank in range(world_size)]
        remote = actor_class(TrainActor)
        names = [f"{role} worker {rank}" for rank in range(world_size)]
        actors = [
            remote.options(**o).remote(spec, rank, world_size, self.context.of_actor(name))
            for rank, (name, o) in enumerate(zip(names, options, strict=True))
        ]
        group = TrainerGroup(
            role,
            [self._handle(name, actor) for name, actor in zip(names, actors, strict=True)],
            cfg.cluster.step_deadline_s,
            cfg.train.tokens_per_microbatch,
            cfg.train.sequences_per_microbatch,
            cfg.train.patches_per_microbatch,
            cfg.train.sequence_parallel,
            cfg.train.share_prompts,
        )
        await group.start(cfg.cluster.start_deadline_s)
        return group

    @property
    def _colocated(self) -> bool:
        """Return True where engines are on the GPUs of trainers."""
        return self.cfg.cluster.placement == "colocated" and "trainers" in self.groups

    @property
    def _engine_pool(self) -> str:
        return "trainers" if self._colocated else "samplers"

    @property
    def _shares_gpu(self) -> bool:
        """Return True where an engine has a GPU with others; after their GPUs were reserved."""
        engines = self.cfg.rollout.replicas * self.cfg.rollout.tensor_parallel
        return self.device == "cuda" and engines > len(self.groups[self._engine_pool].bundle_specs)

    async def prepare_samplers(self) -> None:
        """Start the processes of the engines that sample for a run, ahead of its trainers where it has any: each
        imports its engine, and ``sampler`` starts it."""
        cfg = self.cfg
        if cfg.trains:
            await self._options("trainers", cfg.cluster.workers, 0)  # reserves their GPUs, on which engines may be put
        for index in range(cfg.rollout.replicas):
            if index not in self._prepared:
                self._prepared[index] = await self._sampler_process(index)

    async def begin_samplers(self, source: ModelSource, stop_token_ids: list[int]) -> None:
        """Begin what ``samplers`` does for a training run, which then waits for it. An engine that takes a share of the
        memory that its trainers have left on a GPU begins then."""
        await self.prepare_samplers()
        if self.device == "cpu" or not self._colocated or self._shares_gpu:
            self._starting = asyncio.create_task(self.samplers(source, stop_token_ids, weights_follow=True))

    async def samplers(
        self, source: ModelSource, stop_token_ids: list[int], *, weights_follow: bool = False
    ) -> list[RemoteSampler]:
        """Start ``rollout.replicas`` engines, each as ``sampler`` does."""
        if self._starting is not None and self._starting is not asyncio.current_task():
            return await self._starting
        engines = range(self.cfg.rollout.replicas)
        return await asyncio.gather(
            *(self.sampler(source, stop_token_ids, index, weights_follow=weights_follow) for index in engines)
        )

    async def sampler(
        self, source: ModelSource, stop_token_ids: list[int], index: int, *, weights_follow: bool = False
    ) -> RemoteSampler:
        """Start engine ``index``, and end the process that it replaces if there is one. It has the model's own weights,
        as version 0, or with ``weights_follow`` perhaps none before the first update."""
        cfg = self.cfg
        count = cfg.rollout.replicas
        if (dead := self._samplers.pop(index, None)) is not None:
            await dead.handle.kill()  # a process that only hangs would hold its memory
        sampler = self._prepared.pop(index, None) or await self._sampler_process(index)
        spec = EngineSpec(
            source=source,
            device=self.device,
            dtype=self.dtype,
            seed=cfg.run.seed,
            rollout=cfg.rollout,
            stop_token_ids=stop_token_ids,
            threads=_threads(count),
            replica=index,
            shares_gpu=self._shares_gpu,
            episodes=cfg.episodes_of_engine,
            weights_follow=weights_follow,
            frozen_tower=cfg.train.vision_tower == "frozen",
            steps_before=self.steps_before,
            truncates=any(part.top_p < 1 or part.top_k > 0 for part in (cfg.rollout, cfg.val)),
        )
        await sampler.start(spec, cfg.cluster.start_deadline_s, self.context.of_actor(sampler.name).log)
        self._samplers[index] = sampler
        return sampler

    async def _sampler_process(self, index: int) -> RemoteSampler:
        """Start the process of engine ``index``."""
        cfg = self.cfg
        options, bundles = await self._engine_options(index)
        name = f"sampler {index}"
        on_gpu = self.device == "cuda"
        engine = choose_engine(cfg.rollout.engine, gpu=on_gpu).name
        if engine != "hf":  # it may want torch imported under variables, and in an order, of its own
            options = not_forked(options)
        ahead = processes_ahead(engine, cfg.rollout, _threads(cfg.rollout.replicas)) if on_gpu else ()
        options = taking(options, engine, ahead)
        actor = actor_class(SamplerActor).options(**options).remote(self.context, engine, ahead)
        return RemoteSampler(
            self._handle(name, actor),
            deadline_s=cfg.cluster.step_deadline_s,
            ranks=cfg.rollout.tensor_parallel,
            trainers=bundles if self._colocated else (),
        )

    async def reward_model(self, cfg: RewardModelConfig) -> RemoteRewardModel:
        """Start a reward model. It shares the last, least loaded GPU of the processes started before it: the
        trainers' where all are colocated, else the samplers'. It gets a GPU of its own only where it is the first."""
        spec = RewardModelSpec(
            path=cfg.path,
            device=self.device,
            dtype=self.dtype,
            max_length=cfg.max_length,
            tokens_per_batch=cfg.tokens_per_batch,
            trust_remote_code=self.cfg.model.trust_remote_code,
            threads=_threads(1),
        )
        shared = ("trainers", "samplers") if self.cfg.cluster.placement == "colocated" else ("samplers",)
        pool = next((name for name in shared if name in self.groups), "rewards")
        options = await self._options(pool, 1, -1)
        name = "reward model"
        actor = actor_class(RewardActor).options(**options).remote(spec, self.context.of_actor(name))
        model = RemoteRewardModel(self._handle(name, actor), self.cfg.cluster.step_deadline_s)
        await model.start(self.cfg.cluster.start_deadline_s)
        return model

    def transfers(self) -> TransferChooser:
        """Return what chooses the transfers of weights between trainers and samplers of this cluster."""
        return TransferChooser(self.cfg.cluster, self.device, ray.util.get_node_ip_address())

    def _handle(self, name: str, actor: Any) -> ActorHandle:
        """Return the handle on an actor, which ends with the cluster."""
        handle = ActorHandle(name, actor, self.cfg.cluster.silence_deadline_s)
        self.handles.append(handle)
        return handle

    async def _engine_options(self, index: int) -> tuple[dict[str, Any], Sequence[int]]:
        """Return Ray's options for an engine, and its bundles in the pool of its GPUs."""
        rollout, pool = self.cfg.rollout, self._engine_pool
        ranks = rollout.tensor_parallel
        if self.device == "cpu":
            return await self._options(pool, rollout.replicas, index), []
        count = rollout.replicas * ranks
        if not self.cfg.trains:
            count = rollout.gpus_alone(int(ray.cluster_resources().get("GPU", 0)))
        options = await self._options(pool, count, index)
        if ranks == 1:
            return options, [index % len(self.groups[pool].bundle_specs)]
        if pool not in self._gpus:
            self._gpus[pool] = await self._find_gpus(pool)
        gpus = self._gpus[pool]
        engines = on_one_node([node for node, _ in gpus], ranks)
        if not engines:
            raise RunError(
                f"rollout.tensor_parallel = {ranks}, and no node has so many of the {len(gpus)} GPUs of {pool}",
                hint="an engine's GPUs must be on one node; with colocated engines cluster.workers counts the GPUs",
            )
        bundles = engines[index % len(engines)]
        options = await self._options(pool, count, bundles[0])
        # Ray would show it only the GPU of its bundle.
        options["runtime_env"]["env_vars"] |= {
            "RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES": "1",
            "CUDA_VISIBLE_DEVICES": ",".join(gpus[bundle][1] for bundle in bundles),
        }
        return options, bundles

    async def _find_gpus(self, pool: str) -> list[tuple[str, str]]:
        """Return (node, GPU on it) of each bundle of a pool."""

        def find() -> tuple[str, str]:
            context = ray.get_runtime_context()
            return str(context.get_node_id()), str(context.get_accelerator_ids()["GPU"][0])

        count = len(self.groups[pool].bundle_specs)
        options = [await self._options(pool, count, bundle) | {"num_gpus": 0.01} for bundle in range(count)]
        for of_bundle in options:
            of_bundle.pop("max_restarts")  # an option of actors only
        refs = [ray.remote(find).options(**of_bundle).remote() for of_bundle in options]
        what = [ActorHandle(f"bundle {bundle} of {pool}") for bundle in range(count)]
        found: list[tuple[str, str]] = await gather(refs, what, "placement", self.cfg.cluster.start_deadline_s)
        return found

    async def _options(self, pool: str, count: int, index: int) -> dict[str, Any]:
        """Return Ray's options that put a process on GPU ``index`` of a pool; on a CPU processes share the nodes."""
        options: dict[str, Any] = {"num_cpus": 0, "max_restarts": 0}
        if self.device == "cpu":
            apart = pool != "trainers" and self.cfg.cluster.placement == "separate"
            return options | await spread(count, index, after=self.cfg.cluster.workers if apart else 0)
        if pool not in self.groups:
            await self._reserve(pool, count)
        group = self.groups[pool]
        bundle = index % len(group.bundle_specs)
        strategy = PlacementGroupSchedulingStrategy(placement_group=group, placement_group_bundle_index=bundle)
        return options | {
            "num_gpus": _GPU_SHARE,
            "scheduling_strategy": strategy,
            "runtime_env": {"env_vars": dict(GPU_VARIABLES)},
        }

    async def _reserve(self, pool: str, count: int) -> None:
        """Reserve one GPU for each of ``count`` processes. Raises ``ConfigError`` or ``DeadlineError``."""
        held = sum(len(group.bundle_specs) for group in self.groups.values())
        check_total(count, pool, held, alone=not self.cfg.trains and pool == "samplers")
        deadline_s = self.cfg.cluster.start_deadline_s
        group = self.groups[pool] = placement_group([{"GPU": 1.0, "CPU": 1.0}] * count)
        try:
            await gather([group.ready()], [ActorHandle(f"{count} GPUs for {pool}")], "placement", deadline_s)
        except DeadlineError:
            raise placement_timeout(count, pool, deadline_s) from None


def _threads(processes: int) -> int:
    """Return the CPU threads of each of several processes that work at the same time: OMP_NUM_THREADS, if it is set,
    else an equal share of the CPUs that this process may use. (The variable may be a list, one number for each level of
    nesting; the first counts.)"""
    asked = os.environ.get("OMP_NUM_THREADS", "").split(",")[0].strip()
    return int(asked) if asked.isdigit() and int(asked) else max(1, len(os.sched_getaffinity(0)) // processes)

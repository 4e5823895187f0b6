"""Where processes go: the device of a run, whether a Ray cluster has enough GPUs and CPUs, and the nodes of processes
without GPUs."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from posttrain.cluster.head import answers
from posttrain.config import Config
from posttrain.core.errors import ConfigError, DeadlineError, RunError


def check_total(wanted: int, what: str, held: int = 0, *, alone: bool = False) -> None:
    """Refuse a request that the cluster can never satisfy.

    Args:
        wanted: bundles of one GPU and one CPU each.
        what: what they are for.
        held: bundles that this run holds already.
        alone: they are for engines, and no trainer wants any.

    Raises:
        ConfigError: the cluster has fewer in all.
    """
    total = ray.cluster_resources()
    if any(total.get(kind, 0.0) < wanted + held for kind in ("GPU", "CPU")):
        besides = f", besides {_bundles(held)} of this run" if held else ""
        fewer = "cluster.workers or rollout.replicas"
        if alone:
            fewer = "rollout.replicas, or rollout.memory_fraction so that engines share GPUs"
        raise ConfigError(
            f"{what} want {_bundles(wanted)}{besides}; the Ray cluster has {_amounts(total)}",
            hint=f"lower {fewer}, or name a larger cluster in cluster.address",
        )


def placement_timeout(wanted: int, what: str, deadline_s: float) -> DeadlineError:
    """Return the error of a wait for bundles that others hold."""
    return DeadlineError(
        f"{what} want {_bundles(wanted)}, and did not get them within {deadline_s:g} s (cluster.start_deadline_s); "
        f"free are {_amounts(ray.available_resources(), ray.cluster_resources())}",
        hint="another run on this Ray cluster holds them: wait for it, lower cluster.workers or rollout.replicas, or "
        "name another cluster in cluster.address",
    )


async def spread(count: int, index: int, after: int = 0) -> dict[str, Any]:
    """Return Ray's options that put process ``index`` of ``count``, which asks for no GPU, on a node of the cluster:
    each node gets as many as any other, neighbours are together, and the driver's node is the first.

    Ray itself would put each on a node at random, and does so with ``soft=True`` for processes that ask for nothing.

    Args:
        after: processes that are spread already, and beside which these are not to be.
    """
    own = str(ray.get_runtime_context().get_node_id())
    known = [node for node in ray.nodes() if node["Alive"] and node["Resources"].get("CPU")]
    if len(known) < 2:
        return {}
    # For some seconds Ray still believes in a node that has died, and would let a process wait there.
    up = await asyncio.gather(*(answers(node["NodeManagerAddress"], node["NodeManagerPort"]) for node in known))
    living = [str(node["NodeID"]) for node, is_up in zip(known, up, strict=True) if is_up]
    if not living:
        return {}
    node = node_of(sorted(living, key=lambda node: (node != own, node)), count, index, after)
    return {"scheduling_strategy": NodeAffinitySchedulingStrategy(node, soft=False)}


def node_of(nodes: Sequence[str], count: int, index: int, after: int = 0) -> str:
    """Return the node of process ``index`` of ``count`` after ``after`` others; as ``spread``."""
    return nodes[(min(after, len(nodes)) + index % count * len(nodes) // count) % len(nodes)]


def on_one_node(nodes: Sequence[str], ranks: int) -> list[list[int]]:
    """Return the bundles of as many engines of ``ranks`` GPUs as fit, each on one node; ``nodes`` are those of the
    bundles."""
    engines = []
    for node in dict.fromkeys(nodes):
        here = [bundle for bundle, other in enumerate(nodes) if other == node]
        engines += [here[i : i + ranks] for i in range(0, len(here) - ranks + 1, ranks)]
    return engines


def device_of(cfg: Config) -> str:
    """Return the device of the run, cpu or cuda. Raises ``RunError`` where the config wants a GPU and Ray has none."""
    gpus = int(ray.cluster_resources().get("GPU", 0))
    if cfg.cluster.device == "cuda" and gpus == 0:
        raise RunError(
            "cluster.device = cuda, but Ray sees no GPU", hint="run `nvidia-smi`, or set cluster.device = 'cpu'"
        )
    if cfg.cluster.device != "auto":
        return cfg.cluster.device
    return "cuda" if gpus else "cpu"


def _bundles(count: int) -> str:
    return f"{count} {'GPU' if count == 1 else 'GPUs'} (with one CPU each)"


def _amounts(some: Mapping[str, float], of: Mapping[str, float] | None = None) -> str:
    return " and ".join(
        f"{some.get(kind, 0.0):g}{'' if of is None else f' of {of.get(kind, 0.0):g}'} {kind}s"
        for kind in ("GPU", "CPU")
    )

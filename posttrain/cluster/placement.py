"""Check that a Ray cluster has enough GPUs and CPUs for a run."""

from __future__ import annotations

from collections.abc import Mapping

import ray

from posttrain.core.errors import ConfigError, DeadlineError


def check_total(wanted: int, what: str, held: int = 0) -> None:
    """Refuse a request that the cluster can never satisfy.

    Args:
        wanted: bundles of one GPU and one CPU each.
        what: what they are for.
        held: bundles that this run holds already.

    Raises:
        ConfigError: the cluster has fewer in all.
    """
    total = ray.cluster_resources()
    if any(total.get(kind, 0.0) < wanted + held for kind in ("GPU", "CPU")):
        besides = f", besides {_bundles(held)} of this run" if held else ""
        raise ConfigError(
            f"{what} want {_bundles(wanted)}{besides}; the Ray cluster has {_amounts(total)}",
            hint="lower cluster.workers or rollout.replicas, or name a larger cluster in cluster.address",
        )


def placement_timeout(wanted: int, what: str, deadline_s: float) -> DeadlineError:
    """Return the error of a wait for bundles that others hold."""
    return DeadlineError(
        f"{what} want {_bundles(wanted)}, and did not get them within {deadline_s:g} s (cluster.start_deadline_s); "
        f"free are {_amounts(ray.available_resources(), ray.cluster_resources())}",
        hint="another run on this Ray cluster holds them: wait for it, lower cluster.workers or rollout.replicas, or "
        "name another cluster in cluster.address",
    )


def _bundles(count: int) -> str:
    return f"{count} {'GPU' if count == 1 else 'GPUs'} (with one CPU each)"


def _amounts(some: Mapping[str, float], of: Mapping[str, float] | None = None) -> str:
    return " and ".join(
        f"{some.get(kind, 0.0):g}{'' if of is None else f' of {of.get(kind, 0.0):g}'} {kind}s"
        for kind in ("GPU", "CPU")
    )

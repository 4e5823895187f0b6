"""Start Ray on this machine, or join a cluster."""

from __future__ import annotations

import contextlib
import logging
import signal
import warnings
from collections.abc import Iterator
from typing import Any

import ray
from ray._private import ray_constants
from ray._private.node import Node


def init_ray(address: str = "local") -> None:
    """Join the Ray cluster at ``address``; without one, start one on this machine."""
    # Ray reports on every start that it authenticates its own processes, which users need not know.
    logging.getLogger("ray").setLevel(logging.ERROR)
    own = _one_machine() if address == "local" else contextlib.nullcontext()
    with warnings.catch_warnings(), _without_sighup(), own:
        warnings.simplefilter("ignore", FutureWarning)
        ray.init(
            address=address,  # None would join whatever cluster somebody left on this machine
            include_dashboard=False,
            log_to_driver=False,
            logging_level=logging.ERROR,
            configure_logging=True,
        )


@contextlib.contextmanager
def _one_machine() -> Iterator[None]:
    """Make a Ray that starts on this machine listen at 127.0.0.1 only, and start what a run needs only.

    Ray listens so on systems on which it supports no clusters; elsewhere it replaces that address by the machine's.
    The autoscaler, the server of the dashboard and the reader of logs are processes that nobody asks here, and cost
    the start of a run more than a second.
    """
    replaced: list[tuple[Any, str, Any]] = [(ray_constants, "ENABLE_RAY_CLUSTER", False)]
    starts = ("start_monitor", "start_api_server", "start_log_monitor")
    replaced += [(Node, start, _nothing) for start in starts if hasattr(Node, start)]
    before = [getattr(owner, name) for owner, name, _ in replaced]
    for owner, name, value in replaced:
        setattr(owner, name, value)
    try:
        yield
    finally:
        for (owner, name, _), value in zip(replaced, before, strict=True):
            setattr(owner, name, value)


def _nothing(node: Node, **options: Any) -> None:
    """Stand for a method that starts a process of Ray."""


@contextlib.contextmanager
def _without_sighup() -> Iterator[None]:
    """Start processes that ignore SIGHUP: when the terminal closes, the run still needs them to save."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGHUP})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)

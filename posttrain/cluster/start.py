"""Start Ray on this machine, or join a cluster."""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import ray
from ray._private import ray_constants
from ray._private.node import Node
from ray._raylet import JobID

from posttrain.cluster.fork_worker import SOCKET
from posttrain.cluster.forkserver import PROGRAM, ForkServer, can_fork, take_server
from posttrain.cluster.handover import SHORTER
from posttrain.cluster.waiting_worker import any_waiting
from posttrain.core.errors import RunError


def init_ray(address: str = "local", *, forks: bool = True) -> None:
    """Join the Ray cluster at ``address``; without one, start one on this machine.

    Args:
        forks: the workers of a Ray on this machine are forked from a process that has imported what training and
            sampling need, where they can be (``forkserver.py``). It pays from the first worker of that kind on.

    Raises:
        RunError: it does not start on this machine.
    """
    # Ray reports on every start that it authenticates its own processes, which users need not know.
    logging.getLogger("ray").setLevel(logging.ERROR)
    own = _one_machine(forks) if address == "local" else contextlib.nullcontext()
    with warnings.catch_warnings(), _without_sighup(), own:
        warnings.simplefilter("ignore", FutureWarning)
        ray.init(
            address=address,  # None would join whatever cluster somebody left on this machine
            include_dashboard=False,
            log_to_driver=False,
            logging_level=logging.ERROR,
            configure_logging=True,
        )


TRY_RAY = "`posttrain doctor` tries it; Ray's logs are in its temporary folder"

_fork_server: ForkServer | None = None
"""Serves the Ray that this process has started."""


def shutdown_ray() -> None:
    """Leave the Ray cluster, or end the Ray that this process has started."""
    ray.shutdown()
    _end_forks()


def _end_forks() -> None:
    global _fork_server
    if _fork_server is not None:
        _fork_server.close()
        _fork_server = None


@contextlib.contextmanager
def _one_machine(forks: bool) -> Iterator[None]:
    """Make a Ray that starts on this machine listen at 127.0.0.1 only, and start what a run needs only.

    Ray listens so on systems on which it supports no clusters; elsewhere it replaces that address by the machine's.
    The autoscaler, the server of the dashboard and the reader of logs are processes that nobody asks here, and cost
    the start of a run more than a second.
    """
    replaced: list[tuple[Any, str, Any]] = [(ray_constants, "ENABLE_RAY_CLUSTER", False)]
    starts = ("start_monitor", "start_api_server", "start_log_monitor")
    replaced += [(Node, start, _nothing) for start in starts if hasattr(Node, start)]
    if (forks and can_fork()) or any_waiting():
        replaced.append((Node, "start_raylet", _start_raylet))
    before = [getattr(owner, name) for owner, name, _ in replaced]
    for owner, name, value in replaced:
        setattr(owner, name, value)
    try:
        yield
    except BaseException as error:
        _end_forks()
        if not isinstance(error, Exception) or isinstance(error, RunError):
            raise
        hint = SHORTER if "AF_UNIX" in str(error) else TRY_RAY
        raise RunError(f"Ray does not start on this machine: {error}", hint=hint) from error
    finally:
        for (owner, name, _), value in zip(replaced, before, strict=True):
            setattr(owner, name, value)


_ray_starts_raylet = Node.start_raylet


def _start_raylet(node: Node, *args: Any, **options: Any) -> None:
    """Start a raylet that has other processes become its workers: one that waits for that, or a fork of a server."""
    global _fork_server
    node._ray_params.setup_worker_path = str(PROGRAM)
    if not can_fork():
        _ray_starts_raylet(node, *args, **options)
        return
    _fork_server = take_server()
    os.environ[SOCKET] = _fork_server.address  # its processes inherit it
    try:
        _ray_starts_raylet(node, *args, **options)
    finally:
        del os.environ[SOCKET]
    [raylet] = node.all_processes[ray_constants.PROCESS_TYPE_RAYLET]
    fixed = {"RAY_JOB_ID": JobID.from_int(1).hex(), "RAY_RAYLET_PID": str(raylet.process.pid)}
    _fork_server.start(fixed, Path(node.get_logs_dir_path()) / "fork_server.err")


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

"""The cluster of a run whose engines start to import while the run is still being checked.

Importing SGLang or vLLM takes longer than all that a run does before its first request: the sooner these processes
are there, the sooner it samples.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from concurrent.futures import Future, wait
from pathlib import Path
from types import TracebackType

import ray

from posttrain.cluster.cluster import Cluster
from posttrain.cluster.placement import device_of
from posttrain.cluster.start import TRY_RAY, init_ray
from posttrain.config import Config
from posttrain.core.errors import DeadlineError


def start_early(cfg: Config, logs: Path) -> contextlib.AbstractContextManager[Cluster | None]:
    """Start Ray and the processes of a run's engines, where these take long to import.

    Args:
        cfg: with the engine that samples.
        logs: the folder that gets the logs of workers, once the run has its folder.

    Returns:
        Gives the cluster, which the run is to enter; None: there is nothing to gain, and the run makes its own.
    """
    slow = cfg.samples and cfg.rollout.engine != "hf"
    own = cfg.cluster.address is None and not ray.is_initialized()
    return EarlyCluster(cfg, logs) if slow and own else contextlib.nullcontext()


class EarlyCluster(Cluster):
    """A cluster on this machine that starts in a thread, with the processes of its engines. Entering it as any other
    waits for that. Where nobody does, because a check of the run fails, leaving the ``with`` ends it."""

    def __init__(self, cfg: Config, logs: Path | None = None) -> None:
        super().__init__(cfg, logs)
        self._started: Future[None] = Future()
        self._entered = False
        self._over = threading.Event()

    def __enter__(self) -> Cluster:
        self._started.set_running_or_notify_cancel()  # Ctrl-C cannot cancel it
        threading.Thread(target=self._start, name="start-cluster", daemon=True).start()
        return self

    def _start(self) -> None:
        try:
            init_ray()
            self.owns_ray = True
            self.device = device_of(self.cfg)
            asyncio.run(self.prepare_samplers())
        except BaseException as error:
            self._started.set_exception(error)
        else:
            self._started.set_result(None)
        self._over.wait()  # Linux ends the processes of Ray with the thread that has started them

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        try:
            if not self._entered:
                wait([self._started], self.cfg.cluster.start_deadline_s)
                asyncio.run(self.__aexit__(None, None, None))
        finally:
            self._over.set()

    async def __aenter__(self) -> Cluster:
        deadline_s = self.cfg.cluster.start_deadline_s
        try:
            async with asyncio.timeout(deadline_s):
                await asyncio.wrap_future(self._started)
        except TimeoutError as error:
            late = f"Ray did not start on this machine within cluster.start_deadline_s = {deadline_s:g} s"
            raise DeadlineError(late, hint=TRY_RAY) from error
        cluster = await super().__aenter__()
        self._entered = True
        return cluster

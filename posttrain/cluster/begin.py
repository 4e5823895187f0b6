"""What a command begins before it imports torch and Ray. Imports neither itself."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext

from posttrain.cluster.forkserver import fork_ahead
from posttrain.cluster.waiting_worker import begin_engines
from posttrain.config import Config


@contextmanager
def begin_processes(cfg: Config) -> Iterator[None]:
    """Begin the processes that become workers of the Ray that a command starts in the body: engines on a GPU, and
    without one the fork server. What nobody has asked for by its end ends with it."""
    starts_ray = not cfg.generate.endpoint.url and cfg.cluster.address is None
    with fork_ahead() if starts_ray else nullcontext(), begin_engines(cfg):
        yield

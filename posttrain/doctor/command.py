"""`posttrain doctor`: is this machine fit for a run, and what is to be done if not."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

from posttrain.config import Config
from posttrain.doctor import machine, services, software
from posttrain.doctor.base import Check, CheckResult, run_checks

_DRIVER = "does `nvidia-smi` answer? a driver that hangs needs a restart of the machine"
_ADDRESS_S = 60.0
"""Longest wait for a Ray cluster. The import of Ray and its connection alone take many seconds on a loaded machine."""


def checks(folder: str | None = None, address: str | None = None, *, quick: bool = False) -> list[Check]:
    """All that is looked at, in the order of the report.

    Args:
        folder: of runs; None: the default of `run.dir`.
        address: of a Ray cluster to be reached; None: none.
        quick: leave out what starts Ray.
    """
    folder = folder or Config(command="rl").run.dir
    found = [
        Check("python", software.python, 20, "is posttrain installed?"),
        Check("packages", software.packages, 30, "is the environment on a slow disk?"),
        Check("cuda", software.cuda, 120, _DRIVER),
        Check("gpus", machine.gpus, 60, _DRIVER),
        Check("attention", software.kernels, 30, _DRIVER),
        Check("engines", software.engines, 30, "is the environment on a slow disk?"),
        Check("host memory", machine.memory, 10, "/proc and /sys must be there"),
        Check("run folder", partial(machine.run_folder, folder), 20, "the file system hangs: is it on a network?"),
        Check("tmp", machine.tmp, 20, "the file system hangs: is it on a network?"),
        Check("shared memory", machine.shared_memory, 10, "is /dev/shm a tmpfs?"),
        Check("limits", machine.limits, 10, ""),
        Check("ports", machine.ports, 20, "the host's name is looked up for long: add it to /etc/hosts"),
        Check("sandbox", services.sandbox, 60, "docs/sandbox.md"),
    ]
    if address is not None:
        found.append(
            Check("cluster", partial(services.address, address, _ADDRESS_S), _ADDRESS_S + 5, "is the network up?")
        )
    if not quick:
        found.append(Check("ray", services.ray, 90, "look into /tmp/ray/session_latest/logs/gcs_server.out"))
    return found


def run(folder: str | None = None, address: str | None = None, *, quick: bool = False) -> Iterator[CheckResult]:
    """The findings, one after the other as they are known."""
    for findings in run_checks(checks(folder, address, quick=quick)):
        yield from findings

"""What has to start here: the sandbox, and Ray."""

from __future__ import annotations

import asyncio
import time

from posttrain.config import SandboxConfig
from posttrain.core.errors import PosttrainError
from posttrain.doctor.base import CheckResult

_CONNECT_S = 10.0
"""Longest wait for a host to take a connection, which does not depend on the load of this machine."""


def sandbox() -> list[CheckResult]:
    """Generated programs can be run, apart from this machine's files and network."""
    from posttrain.sandbox import check_sandbox

    begin = time.monotonic()
    try:
        gaps = check_sandbox(SandboxConfig())
    except PosttrainError as error:
        return [CheckResult("sandbox", "warn", f"{error.message}", error.hint or "docs/sandbox.md")]
    seconds = time.monotonic() - begin
    if gaps:
        return [
            CheckResult("sandbox", "warn", f"programs run in namespaces, with {'; '.join(gaps)}", "docs/sandbox.md")
        ]
    detail = f"programs run in namespaces and behind a filter of system calls, the first after {seconds:.1f} s"
    return [CheckResult("sandbox", "ok", detail)]


def ray() -> list[CheckResult]:
    """Ray starts and sees what is here."""
    from posttrain.cluster.cluster import try_ray

    begin = time.monotonic()
    resources = try_ray()
    seen = f"{resources.get('CPU', 0):g} CPUs, {resources.get('GPU', 0):g} GPUs"
    return [CheckResult("ray", "ok", f"started and answered after {time.monotonic() - begin:.1f} s; it sees {seen}")]


def address(where: str, deadline_s: float) -> list[CheckResult]:
    """A Ray cluster answers at ``cluster.address``, within ``deadline_s`` in all."""
    end = time.monotonic() + deadline_s
    from posttrain.cluster.address import check_address
    from posttrain.cluster.cluster import nodes_at

    try:
        check_address(where, _CONNECT_S)
        nodes = asyncio.run(nodes_at(where, round(end - time.monotonic())))
    except PosttrainError as error:
        return [CheckResult("cluster", "fail", error.message, error.hint or "")]
    seen = ", ".join(f"{sum(node.get(kind, 0.0) for node in nodes):g} {kind}s" for kind in ("CPU", "GPU"))
    return [CheckResult("cluster", "ok", f"Ray answers at {where}: {len(nodes)} nodes, {seen}")]

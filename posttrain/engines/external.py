"""What SGLang and vLLM share: the model in a form that they read, and the weights that they cannot read."""

from __future__ import annotations

import contextlib
import functools
import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from posttrain.core.errors import ConfigError, RunError
from posttrain.core.machines import this_machine
from posttrain.engines.base import Engine, EngineSpec
from posttrain.models import vision
from posttrain.models.experts import RoutingFormat
from posttrain.models.export import save_text_side
from posttrain.models.fp8 import layers_of, quantized_weights
from posttrain.models.fp8_layers import BLOCKS, Fp8Layers
from posttrain.models.load import ModelSource, build, load_config, load_model
from posttrain.models.weights import as_stored, stream
from posttrain.weight_sync.sender import WeightSender


@contextlib.contextmanager
def readable_model(spec: EngineSpec) -> Iterator[tuple[str, str]]:
    """Yield (path, load format) of the model for an engine that reads Hugging Face folders and the hub. Any other model
    is a temporary folder with its config, from which the engine starts with random weights (``load_initial_weights``);
    of one that sees the folder is whole."""
    if _reads_directly(spec):
        yield spec.source.path, "auto"
        return
    with tempfile.TemporaryDirectory(prefix="posttrain-engine-") as folder:
        config = load_config(spec.source)
        if vision.sees(config):
            # It needs the tokenizer, and how images are read. It reads the weights, too: towers of vLLM 0.32 that began
            # with random ones gave other features after an update of all weights than towers that read these.
            model = load_model(spec.source, dtype=spec.torch_dtype, seed=spec.seed)
            model.save_pretrained(folder)
            save_text_side(spec.source, Path(folder))
            yield folder, "auto"
            return
        if (quantized := fp8_of(spec)) is not None:
            config.quantization_config = quantized.engine_config
        config.save_pretrained(folder)
        yield folder, "dummy"


def _reads_directly(spec: EngineSpec) -> bool:
    """Return True where the engine can read the model by itself. Weights in FP8 are quantized here."""
    made = spec.source.builtin or spec.source.shards or spec.source.adapters
    return not (made or spec.rollout.quantization == "fp8")


def fp8_of(spec: EngineSpec) -> Fp8Layers | None:
    """Return which weights the engine gets in FP8; None: it gets all in its compute type. Raises ``ConfigError``."""
    return _fp8_of(spec.source, spec.rollout.tensor_parallel) if spec.rollout.quantization == "fp8" else None


@functools.cache
def _fp8_of(source: ModelSource, tensor_parallel: int) -> Fp8Layers:
    return layers_of(build(source, dtype=torch.bfloat16), stored=True, tensor_parallel=tensor_parallel)


def takes_deep_gemm(quantized: Fp8Layers, capability: tuple[int, ...] | None, *modules: str) -> bool:
    """Return whether DeepGEMM can multiply with weights in FP8 that change. It is the fastest (docs/fp8.md), for blocks
    of 128 on Hopper alone: on Blackwell it lays weights out otherwise, and cannot take new ones. It makes its kernels
    with CUDA's compiler.

    Args:
        capability: of the GPU, major and minor.
        modules: the names that the engine knows it by, of which one must be there.
    """
    if quantized.block != BLOCKS[0] or capability != (9, 0) or not any(map(find_spec, modules)):
        return False
    folders = [os.environ.get("PATH", ""), f"{os.environ.get('CUDA_HOME', '/usr/local/cuda')}/bin"]
    return shutil.which("nvcc", path=os.pathsep.join(folders)) is not None


def routing_format(spec: EngineSpec) -> RoutingFormat | None:
    """Return how the experts of tokens are stored; None: they are not asked for (`rollout.router_replay`). Raises
    ``ConfigError``: the model has no routers of a known kind."""
    if spec.rollout.router_replay == "off":
        return None
    return RoutingFormat.of(build(spec.source, dtype=spec.torch_dtype))


def stored_routing(found: npt.NDArray[Any], form: RoutingFormat, tokens: int) -> npt.NDArray[np.uint8]:
    """Return the experts of a request's tokens as they are stored, [tokens computed, bytes of a token].

    Args:
        found: [tokens computed, layers, k] as the engine gives them: of all decoder layers, or of those with experts.
        tokens: of prompt and sample. The engine has not read the last one, or has.

    Raises:
        RunError: they are not of this shape, or no choices of a router.
    """
    layers = found.shape[1] if found.ndim == 3 else 0
    whole = layers in (len(form.layers), form.decoder_layers)
    if not whole or found.shape[2] != form.top_k or not tokens - 1 <= len(found) <= tokens:
        raise RunError(
            f"the engine gives experts of shape {found.shape} for {tokens} tokens, {len(form.layers)} layers and "
            f"{form.top_k} experts a token",
            hint="--set rollout.router_replay=off",
        )
    chosen = found if layers == len(form.layers) else found[:, list(form.layers)]
    # Kernels that route by themselves record nothing: SGLang and vLLM then give expert 0 over and over.
    twice = form.top_k > 1 and bool((chosen[..., 0] == chosen[..., 1]).any())
    if twice or (chosen.size and not 0 <= int(chosen.min()) <= int(chosen.max()) < form.experts):
        raise RunError(
            f"the engine gives experts that are no choice of {form.top_k} among {form.experts}: the kernel that it "
            "takes for experts does not record them",
            hint="choose another with rollout.engine_options (SGLang: moe_runner_backend, vLLM: moe_backend), or "
            "--set rollout.router_replay=off",
        )
    return form.stored(chosen)


def starts_empty(spec: EngineSpec) -> bool:
    """Return True where the engine starts with random weights and keeps them until the first update."""
    return spec.weights_follow and not _reads_directly(spec)


async def load_initial_weights(engine: Engine, spec: EngineSpec) -> None:
    """Load the weights of a model that the engine cannot read by itself, as version 0. To quantize a large model takes
    a CPU half a minute or more, and trainers quantize on their GPUs: engines of theirs wait for the first update."""
    if _reads_directly(spec) or spec.weights_follow:
        return
    model = build(spec.source, dtype=spec.torch_dtype)
    read = stream(model, spec.source, dtype=spec.torch_dtype, seed=spec.seed)
    weights = as_stored(model, read)
    if (quantized := fp8_of(spec)) is not None:
        weights = quantized_weights(weights, quantized)
    sender = WeightSender(weights, spec.torch_dtype, "host")
    try:
        while (bucket := sender.next(0)) is not None:
            await engine.load_bucket(bucket)
    finally:
        sender.close()
    await engine.finish_update(0)


def arguments(spec: EngineSpec, ours: Mapping[str, Any], defaults: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Return the engine's arguments: ``ours``, those of `rollout.engine_options`, and ``defaults`` for what these do
    not set.

    Raises:
        ConfigError: the user gives an argument that posttrain sets.
    """
    both = sorted(spec.rollout.engine_options.keys() & ours.keys())
    if both:
        raise ConfigError(
            f"rollout.engine_options.{both[0]} is what posttrain sets itself",
            hint="most have a key of their own in [rollout]; see docs/config.md",
        )
    return {**(defaults or {}), **ours, **spec.rollout.engine_options}


def context_length(spec: EngineSpec, *, spare: int) -> int:
    """Return the context to start an engine with: that of the longest request, and ``spare`` tokens without which it
    refuses requests near their end. No longer than the model's own and, on a CPU, than the KV cache, which would keep
    the engine from starting: a config that needs all of these gets no spare tokens."""
    limits = [getattr(load_config(spec.source).get_text_config(), "max_position_embeddings", None) or 0]
    if spec.device == "cpu":
        limits.append(spec.rollout.kv_tokens)
    return max(spec.max_tokens, min(spec.max_tokens + spare, *limits))


def cache_tokens(spec: EngineSpec) -> float:
    """Return about how many tokens the KV cache of one engine holds: `rollout.kv_tokens` on a CPU, else what
    `rollout.memory_fraction` of a GPU of this node leaves beside the weights."""
    if spec.device == "cpu":
        return spec.rollout.kv_tokens
    weights = weight_bytes(spec)
    whole = this_machine().memory * spec.rollout.memory_fraction * spec.rollout.tensor_parallel
    return max(0.0, whole - weights) / cache_bytes_per_token(spec)


def cache_bytes(spec: EngineSpec) -> int:
    """Return the bytes of the KV cache on each GPU of an engine, or on a CPU."""
    return int(cache_tokens(spec) * cache_bytes_per_token(spec) / spec.rollout.tensor_parallel)


def cache_bytes_per_token(spec: EngineSpec) -> int:
    """Return the bytes of a token in the KV cache, over all GPUs of an engine."""
    config = load_config(spec.source).get_text_config()
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    heads = max(heads, spec.rollout.tensor_parallel)  # GPUs beyond the number of key heads hold copies
    width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    itemsize = 1 if spec.rollout.kv_cache_dtype == "fp8" else spec.torch_dtype.itemsize
    return int(2 * config.num_hidden_layers * heads * width * itemsize)


def weight_bytes(spec: EngineSpec) -> int:
    """Return the bytes of all weights of an engine, over all of its GPUs."""
    model = build(spec.source, dtype=spec.torch_dtype)
    whole = sum(parameter.numel() for parameter in model.parameters()) * spec.torch_dtype.itemsize
    quantized = fp8_of(spec)
    return whole - (0 if quantized is None else quantized.saved_bytes(spec.torch_dtype.itemsize))


def shapes(spec: EngineSpec) -> dict[str, tuple[int, ...]]:
    """Return the shapes of all tensors that the trainer sends, by name: parameters, and scales of quantized ones."""
    model = build(spec.source, dtype=spec.torch_dtype)
    whole = {name: tuple(tensor.shape) for name, tensor in as_stored(model, model.named_parameters())}
    quantized = fp8_of(spec)
    return whole if quantized is None else quantized.shapes(whole)


def frozen(spec: EngineSpec) -> set[str]:
    """Return the names, as in ``shapes``, of what training does not change: those of a frozen vision tower."""
    if not spec.frozen_tower:
        return set()
    model = build(spec.source, dtype=spec.torch_dtype)
    tower = ((name, p) for name, p in model.named_parameters() if name.startswith(vision.TOWER))
    return {name for name, _ in as_stored(model, tower)}

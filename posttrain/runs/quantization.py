"""Checks of FP8 rollouts before a run (docs/fp8.md)."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from posttrain.core.errors import ConfigError
from posttrain.core.machines import this_machine
from posttrain.models.fp8 import layers_of
from posttrain.models.load import ModelSource, build, load_config
from posttrain.models.vision import sees
from posttrain.runs.preflight import engine_of, samples_on_gpu

if TYPE_CHECKING:
    from posttrain.config import Config
    from posttrain.models.fp8_layers import Fp8Layers

_OFF = "--set rollout.quantization=none"


def check_quantization(cfg: Config, source: ModelSource) -> list[str]:
    """Check that the engines of a run can do what `rollout.quantization` and `rollout.kv_cache_dtype` ask for.

    Returns:
        Lines that say what becomes of them; none where nothing is asked for.

    Raises:
        ConfigError: they cannot.
    """
    rollout = cfg.rollout
    if not cfg.samples or not rollout.rounds:
        return []
    fp8 = rollout.quantization == "fp8"
    asked = "rollout.quantization = 'fp8'" if fp8 else "rollout.kv_cache_dtype = 'fp8'"
    if cfg.generate.endpoint.url:
        raise ConfigError(f"{asked} has no effect with generate.endpoint, whose weights are its own", hint=_OFF)
    engine, on_gpu = engine_of(cfg).name, samples_on_gpu(cfg)
    if rollout.kv_cache_dtype == "fp8" and (engine == "hf" or not on_gpu):
        raise ConfigError(
            f"rollout.kv_cache_dtype = 'fp8' with rollout.engine = {engine!r} on a {'GPU' if on_gpu else 'CPU'}: its "
            "KV cache has the compute type",
            hint="--set rollout.kv_cache_dtype=auto; sglang and vllm on a GPU have a KV cache in FP8",
        )
    lines = []
    if fp8:
        if sees(load_config(source)):
            raise ConfigError(f"{asked} is not for models that read images", hint=_OFF)
        quantized = layers_of(
            build(source, dtype=torch.float32), stored=engine != "hf", tensor_parallel=rollout.tensor_parallel
        )
        if engine != "hf":
            _check_engine(cfg, engine, on_gpu, quantized)
        lines.append(f"engines compute in FP8: {quantized.describe()}")
    correction = cfg.correction
    if cfg.command != "rl" or rollout.only:
        return lines
    if correction.weight == "none":
        return [*lines, "warning: algo.correction.weight = 'none': nothing corrects the loss for engines in FP8"]
    bounds = f"cut at {correction.upper:g}" if correction.lower is None else f"0 outside {correction.lower:g} to "
    bounds += "" if correction.lower is None else f"{correction.upper:g}"
    return [*lines, f"the loss is corrected for that: algo.correction.weight = {correction.weight!r}, {bounds}"]


def _check_engine(cfg: Config, engine: str, on_gpu: bool, quantized: Fp8Layers) -> None:
    """Check SGLang or vLLM. Raises ``ConfigError``."""
    what = f"rollout.quantization = 'fp8' with rollout.engine = {engine!r}"
    if cfg.rollout.batch_invariant:
        raise ConfigError(
            f"{what} and rollout.batch_invariant: its kernels for FP8 are not batch-invariant",
            hint=f"{_OFF}, or --set rollout.engine=hf, which runs one request at a time then",
        )
    if cfg.train.dtype == "float32" or (cfg.train.dtype == "auto" and not on_gpu):
        raise ConfigError(
            f"{what} and train.dtype float32: such kernels have activations in bfloat16",
            hint="--set train.dtype=bfloat16, or --set rollout.engine=hf",
        )
    if not on_gpu and any(".experts." in name for name in quantized.names):
        raise ConfigError(
            f"{what} on a CPU: it packs experts in FP8, and cannot take new ones", hint="--set rollout.engine=hf"
        )
    gpu = this_machine().gpu if on_gpu and cfg.cluster.address is None else None
    if gpu is not None and not gpu.fp8:
        raise ConfigError(
            f"{what}: {gpu.match} does not multiply in FP8", hint=f"{_OFF}; GPUs from L4, L40S and H100 on do"
        )

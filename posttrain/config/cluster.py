"""Sections of processes, checkpoints, `generate` and `eval`."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator

from posttrain.config.base import NaturalInt, PositiveFactor, PositiveInt, Seconds, Section


def tolerance(dtype: str, *, fp8: bool = False) -> float:
    """Return the largest mean |log-probability difference| accepted between two programs with the same weights, of
    which one or both compute in ``dtype``, or with ``fp8`` one of them in FP8."""
    if fp8:
        return 0.3
    return 1e-3 if dtype == "float32" else 0.1


class ClusterConfig(Section):
    """Processes and their deadlines."""

    workers: PositiveInt = 1
    """Training workers (one GPU each, where there are GPUs)."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Device to compute on. auto: GPUs if Ray reports any, else the CPU."""
    placement: Literal["colocated", "separate"] = "colocated"
    """colocated: trainers and samplers take turns on the same GPUs. separate: each has GPUs of its own."""
    address: str | None = None
    """Address of a running Ray cluster; none: start a local one."""
    start_deadline_s: Seconds = 300.0
    """Longest wait for workers to start."""
    step_deadline_s: Seconds = 1800.0
    """Longest wait for one call to a worker."""
    silence_deadline_s: Annotated[Seconds, Field(ge=10.0)] = 60.0
    """Longest time without a heartbeat from an actor with a pending call; after it the actor counts as dead. Heartbeats
    come every few seconds while it works."""
    sampler_restarts: NaturalInt = 3
    """Maximum sampler restarts per run. A restarted sampler loads the current weights; meanwhile its episodes continue
    on another sampler, or wait."""
    weight_transfer: Literal["auto", "host", "broadcast"] = "auto"
    """Transport of weight updates to the engines. auto: CUDA IPC on shared GPUs, broadcast to separate GPUs, host
    memory on a CPU. host: through host memory. broadcast (with `placement = "separate"`): NCCL from rank 0 to all
    engines, gloo on a CPU."""
    sync_tolerance: PositiveFactor | None = None
    """Largest mean |log-probability difference| between trainer and engine after a weight update, over the likelier
    half of the tokens compared; none: 1e-3 in float32, 0.1 in bfloat16, 0.3 where engines compute in FP8
    (`rollout.quantization`, `rollout.kv_cache_dtype`)."""


class CheckpointConfig(Section):
    """Contents of checkpoints, and how many are kept."""

    keep: PositiveInt = 2
    """Number of newest checkpoints to keep."""
    best: str = ""
    """Metric of the steps, such as `val/loss`: the checkpoint of the step with the best value is kept as well. Empty:
    no such checkpoint."""
    best_mode: Literal["min", "max"] | None = None
    """Best value of the metric `best`: the lowest (min) or the highest (max)."""
    save_hf: bool = False
    """Also write the complete safetensors to `actor/huggingface`."""
    background: bool = True
    """Write checkpoints in the background: training waits only for a copy to host memory. false: training waits for the
    files, and no host memory is needed for the copy."""

    @model_validator(mode="after")
    def _best_has_a_mode(self) -> CheckpointConfig:
        if bool(self.best) != (self.best_mode is not None):
            raise ValueError(
                "checkpoint.best and checkpoint.best_mode go together: best = 'val/loss', best_mode = 'min'"
            )
        return self


class ServerConfig(Section):
    """An OpenAI-compatible server that samples for `generate`, in place of local engines."""

    url: str = ""
    """Base URL, for example `http://127.0.0.1:8000/v1`; empty: none. It must take token ids at `/completions`, as vLLM
    and SGLang do."""
    model: str = ""
    """Name of the model on the server; empty: the only one that it serves. `model.path` gives the tokenizer and chat
    template."""
    api_key_env: str = ""
    """Environment variable that holds the API key; empty: no key is sent."""
    concurrency: PositiveInt = 256
    """Maximum concurrent requests."""
    retries: NaturalInt = 4
    """Maximum retries after a refused connection, a timeout, HTTP 408, 429 or 5xx, with exponential backoff;
    `Retry-After` is respected."""
    deadline_s: Seconds = 600.0
    """Longest wait for one answer."""


class GenerateConfig(Section):
    """Input and output of `posttrain generate`."""

    data: str = ""
    """RLHF parquet file with the prompts; empty: the own tasks of `rollout.env` or `rollout.agent`."""
    out: str = ""
    """Parquet file for the responses; empty: `<run.dir>/<run.name>/responses.parquet`."""
    limit: PositiveInt | None = None
    """Maximum number of prompts, from the start of the file; none: all."""
    endpoint: ServerConfig = ServerConfig()


class EvalConfig(Section):
    """Scores of `posttrain eval`."""

    pass_at: list[PositiveInt] = [1]
    """Values of k for pass@k (unbiased estimator of Chen et al. 2021, arXiv:2107.03374)."""
    resamples: NaturalInt = 1000
    """Bootstrap resamples over problems, which give each score a 95 % interval, seeded by `run.seed`; 0: no
    intervals."""

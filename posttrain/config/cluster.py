"""Processes, checkpoints, and the smaller commands."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator

from posttrain.config.base import NaturalInt, PositiveFactor, PositiveInt, Seconds, Section


def tolerance(dtype: str) -> float:
    """Largest mean |log-probability difference| of two programs with the same weights, of which one or both compute in
    ``dtype``."""
    return 1e-3 if dtype == "float32" else 0.1


class ClusterConfig(Section):
    """Processes and their deadlines."""

    workers: PositiveInt = 1
    """Training workers (one GPU each, where there are GPUs)."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """auto: GPUs where Ray sees any, else the CPU."""
    placement: Literal["colocated", "separate"] = "colocated"
    """colocated: trainers and samplers take turns on the same GPUs. separate: each has its own."""
    address: str | None = None
    """Address of a running Ray cluster; none: start one here."""
    start_deadline_s: Seconds = 300.0
    """Longest wait for workers to come up."""
    step_deadline_s: Seconds = 1800.0
    """Longest wait for one call to a worker."""
    silence_deadline_s: Annotated[Seconds, Field(ge=10.0)] = 60.0
    """A process that is waited for and has said nothing for this long is taken for dead: stopped, or stuck. While it
    works, it says something every few seconds."""
    sampler_restarts: NaturalInt = 3
    """A sampler that dies is started again at the current weights, at most so many times a run; its episodes go on at
    another meanwhile, or wait."""
    weight_transfer: Literal["auto", "host", "broadcast"] = "auto"
    """How new weights come to the engines. auto: on the GPUs that they share with trainers, by broadcast to GPUs of
    their own, through host memory on a CPU. host: through host memory. broadcast (with `placement = "separate"`): NCCL
    from rank 0 to all engines, gloo on a CPU."""
    sync_tolerance: PositiveFactor | None = None
    """Largest mean |log-probability difference| between trainer and engine after a weight update;
    none: 1e-3 in float32, 0.1 in bfloat16."""


class CheckpointConfig(Section):
    """What a checkpoint holds and how many are kept."""

    keep: PositiveInt = 2
    """Newest checkpoints that stay."""
    best: str = ""
    """A metric of the run's steps, as `val/loss`: the checkpoint of the step where it was best also stays. Empty: none
    does."""
    best_mode: Literal["min", "max"] | None = None
    """Whether the lowest or the highest value of `best` is."""
    save_hf: bool = False
    """Also write the full safetensors into `actor/huggingface`."""
    background: bool = True
    """Training waits only for a copy to host memory, and goes on while that is written. false: it waits for the files,
    and host memory is spared."""

    @model_validator(mode="after")
    def _best_has_a_mode(self) -> CheckpointConfig:
        if bool(self.best) != (self.best_mode is not None):
            raise ValueError(
                "checkpoint.best and checkpoint.best_mode go together: best = 'val/loss', best_mode = 'min'"
            )
        return self


class ServerConfig(Section):
    """An OpenAI-compatible server that samples for `generate`, in place of engines started here."""

    url: str = ""
    """Base URL, for example `http://127.0.0.1:8000/v1`; empty: none. It must take token ids at `/completions`, as vLLM
    and SGLang do."""
    model: str = ""
    """Name of the model at the server; empty: the only one there. `model.path` is its tokenizer and chat template."""
    api_key_env: str = ""
    """Environment variable that holds the key; empty: none is sent."""
    concurrency: PositiveInt = 256
    """Most requests at once."""
    retries: NaturalInt = 4
    """After a refused connection, a timeout, HTTP 408, 429 or 5xx: exponential backoff, `Retry-After` respected."""
    deadline_s: Seconds = 600.0
    """Longest wait for one answer."""


class GenerateConfig(Section):
    """`posttrain generate`: where prompts come from and responses go."""

    data: str = ""
    """RLHF parquet with the prompts."""
    out: str = ""
    """Responses parquet; empty: `<run.dir>/<run.name>/responses.parquet`."""
    limit: PositiveInt | None = None
    """Only the first so many prompts."""
    endpoint: ServerConfig = ServerConfig()


class EvalConfig(Section):
    """`posttrain eval`."""

    pass_at: list[PositiveInt] = [1]
    """k of pass@k (unbiased estimator of Chen et al. 2021, arXiv:2107.03374)."""
    resamples: NaturalInt = 1000
    """Of the bootstrap over problems, which gives each score a 95 % interval, from `run.seed`; 0: no intervals."""

"""What the driver tells training workers. Importing it imports nothing that trains."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

    from posttrain.config import AlgoConfig, CorrectionConfig, TrainConfig
    from posttrain.models.load import ModelSource


@dataclass(frozen=True)
class WorkerSpec:
    """What a group of training workers is made of. The same on every rank."""

    source: ModelSource
    device: str
    """cpu or cuda"""
    dtype: str
    """compute type: float32 or bfloat16 (`train.dtype`, resolved)"""
    seed: int
    temperature: float
    """Log-probabilities are of the distribution at this sampling temperature (1 in SFT)."""
    train: TrainConfig
    trainable: bool = True
    """False: a frozen model (a reference)."""
    values: bool = False
    """The model gives values of tokens instead of log-probabilities (a critic)."""
    total_steps: int = 1
    """Optimizer steps of the run, for the schedule."""
    threads: int = 0
    """CPU threads of this process; 0: torch's default."""
    batch_invariant: bool = False
    """A sequence's result does not depend on the batch that it is in (`rollout.batch_invariant`)."""
    replays_routing: bool = False
    """Tokens go to the experts that the engine chose, where a batch has these (`rollout.router_replay`)."""
    stored_names: bool = False
    """Engines get weights as files on the hub have them, experts one by one; else as the model does."""
    fp8: bool = False
    """Engines get weights of linear layers in FP8 (`rollout.quantization`)."""
    engine_gpus: int = 1
    """GPUs that each engine is spread over"""


@dataclass(frozen=True)
class LossSpec:
    """Which loss an update minimises. ``algo`` None: negative log-likelihood; of a model of values their squared error,
    or without returns in the batch the negative weighted sum of the values themselves."""

    algo: AlgoConfig | None = None
    gap: bool = True
    """Sum up how far the log-probabilities that the update computes are from ``rollout_logprobs``, where a batch has
    these (``algos.gap``)."""
    correction: CorrectionConfig | None = None
    """Correct the weights of tokens by their ratios before the update, as the update computes these; see
    ``CorrectionConfig.of_tokens``. None: the batch's weights have it in them."""
    value_clip: float = float("inf")
    """See ``algos.losses.value``."""


@dataclass(frozen=True)
class UpdateMetrics:
    """What a rank measured in an optimizer step, by how the ranks' values are combined."""

    sums: dict[str, float]
    """Parts of the whole batch's value: ``loss``, ``pg_loss``, ``entropy``, ``weight``, ``flops``, ``tokens_run``,
    ``tokens_shared`` (those of them that a shared prompt saved), ..."""
    shared: dict[str, float]
    """The same on every rank: ``grad_norm``, ``skipped``, ``lr``, of mixtures ``moe/...``"""
    maxima: dict[str, float]
    """The largest counts: ``seconds``, ``memory_gib``"""
    logprobs: Sequence[Tensor] = ()
    """Columns as those of ``TrainWorker.logprobs``, of the weights before the update; none without a ``correction``"""


def over_ranks(found: Sequence[UpdateMetrics]) -> dict[str, float]:
    """Return the metrics of an update over all ranks. Not every rank has every sum."""
    sums: dict[str, float] = {}
    for metrics in found:
        for key, value in metrics.sums.items():
            sums[key] = sums[key] + value if key in sums else value
    maxima = {key: max(metrics.maxima[key] for metrics in found) for key in found[0].maxima}
    return sums | found[0].shared | maxima

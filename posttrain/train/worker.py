"""One training process: holds an FSDP2 shard of a model, computes log-probabilities, takes optimizer steps.

Knows nothing of Ray: ``posttrain.cluster`` puts it into an actor, and tests may run it as it is.
"""

from __future__ import annotations

import os
import resource
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from posttrain.algos import losses
from posttrain.algos.gap import gap_sums
from posttrain.config import AlgoConfig, OptimConfig
from posttrain.data.pack import PackedBatch
from posttrain.errors import RunError
from posttrain.models.attention import Ragged, backend
from posttrain.models.load import ModelSource, load_model
from posttrain.train import checkpoint
from posttrain.train.model import PackedLM, parallelize
from posttrain.train.optim import build_optimizer, learning_rate


@dataclass(frozen=True)
class WorkerSpec:
    """What a group of training workers is made of. The same on every rank."""

    source: ModelSource
    device: str
    """cpu or cuda"""
    dtype: str
    """compute type: float32 or bfloat16"""
    seed: int
    gradient_checkpointing: bool
    temperature: float
    """Log-probabilities are of the distribution at this sampling temperature (1 in SFT)."""
    optim: OptimConfig | None = None
    """None: a frozen model (a reference)."""
    total_steps: int = 1
    """Optimizer steps of the run, for the schedule."""
    threads: int = 0
    """CPU threads of this process; 0: torch's default."""


@dataclass(frozen=True)
class LossSpec:
    """Which loss an update minimises. ``algo`` None: negative log-likelihood."""

    algo: AlgoConfig | None = None
    off_policy: bool = False
    """Another policy sampled the batch: ratios are taken to ``rollout_logprobs``, and the gap is the drift from it."""


@dataclass(frozen=True)
class Forward:
    """One micro-batch through the model. N tokens carry loss; all tensors but ``predict`` are on the device."""

    predict: Tensor
    """[N] where they stand in the batch (on the CPU)"""
    logprobs: Tensor
    """[N]"""
    entropies: Tensor
    """[N], without gradient"""
    weights: Tensor
    """[N] loss weights"""


class TrainWorker:
    """Rank ``rank`` of a group of ``world_size`` processes."""

    def __init__(self, spec: WorkerSpec, rank: int, world_size: int) -> None:
        self.spec = spec
        self.rank = rank
        self.world_size = world_size
        self.step = 0
        if spec.threads:
            torch.set_num_threads(spec.threads)

    def setup(self, master_addr: str, master_port: int, timeout_s: float) -> dict[str, Any]:
        """Join the process group, load the model, shard it. Returns facts about the model."""
        os.environ.update(
            MASTER_ADDR=master_addr,
            MASTER_PORT=str(master_port),
            RANK=str(self.rank),
            WORLD_SIZE=str(self.world_size),
        )
        spec = self.spec
        if spec.device == "cuda":
            torch.cuda.set_device(0)  # Ray shows each worker its own GPU only
        self.device = torch.device(spec.device)
        self.dtype = getattr(torch, spec.dtype)
        backend_name = "nccl" if spec.device == "cuda" else "gloo"
        dist.init_process_group(backend_name, timeout=timedelta(seconds=timeout_s))
        torch.manual_seed(spec.seed)
        mesh = init_device_mesh(spec.device, (self.world_size,))
        # Master weights are float32 whatever the compute type is.
        lm = PackedLM(load_model(spec.source, dtype=torch.float32, seed=spec.seed))
        lm.train(spec.optim is not None)
        lm.requires_grad_(spec.optim is not None)
        self.lm = parallelize(
            lm.to(self.device), mesh, dtype=self.dtype, gradient_checkpointing=spec.gradient_checkpointing
        )
        self.optimizer = build_optimizer(self.lm, spec.optim) if spec.optim is not None else None
        self.parameters = dict(self.lm.model.named_parameters())
        return {
            "parameters": sum(p.numel() for p in self.parameters.values()),
            "attention": backend(self.device, self.dtype),
            "pid": os.getpid(),
        }

    # ------------------------------------------------------------------ compute

    def logprobs(self, shard: Sequence[PackedBatch]) -> list[Tensor]:
        """Log-probabilities under the current weights, a [T] column a micro-batch; 0 where no loss is carried."""
        columns = []
        with torch.no_grad():
            for batch in shard:
                out = self._forward(batch)
                column = torch.zeros(batch.num_tokens)
                column[out.predict] = out.logprobs.cpu()
                columns.append(column * batch.loss_mask)
        return columns

    def evaluate(self, shard: Sequence[PackedBatch]) -> dict[str, float]:
        """Sums of the weighted negative log-likelihood over the shard, without a gradient."""
        total = 0.0
        with torch.no_grad():
            for batch in shard:
                out = self._forward(batch)
                total += float(losses.nll(out.logprobs, out.weights)[0])
        return {"loss": total}

    def update(self, shard: Sequence[PackedBatch], loss: LossSpec) -> dict[str, float]:
        """One optimizer step over the shard's micro-batches.

        Returns sums to add up over ranks (``loss``, ``pg_loss``, ..., ``entropy``), ``grad_norm`` (the same on every
        rank) and this rank's ``seconds`` and ``memory_gib``.

        Raises:
            RunError: the gradient is not finite. The weights are then unchanged.
        """
        if self.optimizer is None or self.spec.optim is None:
            raise RunError("a frozen model cannot be updated")
        start = time.perf_counter()
        sums: dict[str, float] = {}
        self.optimizer.zero_grad(set_to_none=True)
        for i, batch in enumerate(shard):
            # Gradients stay on their rank until the last micro-batch: one reduction a step.
            cast(FSDPModule, self.lm).set_requires_gradient_sync(i == len(shard) - 1)
            out = self._forward(batch)
            total, parts = self._loss(batch, out, loss)
            # FSDP averages gradients over ranks, but the weights are already those of the global batch.
            torch.autograd.backward(total * self.world_size)
            parts["entropy"] = (out.weights * out.entropies).sum()
            for key, value in parts.items():
                sums[key] = sums.get(key, 0.0) + float(value)
        grad_norm = _local(torch.nn.utils.clip_grad_norm_(self.lm.parameters(), self.spec.optim.grad_clip))
        if not torch.isfinite(grad_norm):
            self.optimizer.zero_grad(set_to_none=True)
            raise RunError(f"the gradient is not finite at optimizer step {self.step} (norm {grad_norm.item()})")
        rate = learning_rate(self.spec.optim, self.step, self.spec.total_steps)
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        self.optimizer.step()
        self.step += 1
        return sums | {
            "grad_norm": float(grad_norm),
            "lr": rate,
            "seconds": time.perf_counter() - start,
            "memory_gib": self._memory_gib(),
        }

    def _forward(self, batch: PackedBatch) -> Forward:
        predict = batch.loss_mask.nonzero().flatten()
        if len(predict) == 0:
            # Collectives need every rank in every micro-batch: predict something, and let it weigh nothing.
            predict = torch.tensor([batch.num_tokens - 1])
            weights = torch.zeros(1)
        elif batch.loss_weights is None:
            weights = torch.zeros(len(predict))
        else:
            weights = batch.loss_weights[predict]
        values, entropies = self.lm(
            batch.input_ids.to(self.device),
            batch.position_ids.to(self.device),
            predict.to(self.device),
            Ragged.build(batch.cu_seqlens, self.device, self.dtype),
            self.spec.temperature,
        )
        return Forward(predict, values, entropies, weights.to(self.device))

    def _loss(self, batch: PackedBatch, out: Forward, spec: LossSpec) -> tuple[Tensor, losses.Sums]:
        algo = spec.algo
        if algo is None:
            return losses.nll(out.logprobs, out.weights)

        def column(x: Tensor | None) -> Tensor | None:
            return None if x is None else x[out.predict].to(self.device)

        old, advantages = column(batch.old_logprobs), column(batch.advantages)
        rollout, ref = column(batch.rollout_logprobs), column(batch.ref_logprobs)
        if advantages is None:
            raise RunError("a policy update needs advantages")
        if spec.off_policy:
            old = rollout
        # Without a column the policy has not moved since sampling: the ratio is exactly 1, with the right gradient.
        total, sums = losses.clipped_policy(
            out.logprobs,
            out.logprobs.detach() if old is None else old,
            advantages,
            out.weights,
            clip_low=algo.clip_low,
            clip_high=algo.clip_high,
            dual_clip=algo.dual_clip,
        )
        if ref is not None:
            kl, kl_sums = losses.kl(out.logprobs, ref, out.weights, estimator=algo.kl_estimator)
            total = total + algo.kl_coef * kl
            sums |= kl_sums
        if rollout is not None and batch.loss_mask.any():
            sums |= gap_sums(out.logprobs if old is None or spec.off_policy else old, rollout)
        return total, sums

    # ------------------------------------------------------------------ weights

    def weight_buckets(self, bucket_bytes: int) -> Iterator[list[tuple[str, Tensor]]]:
        """Full parameters in the compute type, in buckets of at most ``bucket_bytes`` (or one tensor).

        A collective: every rank must run it to the end, but only rank 0 gets the tensors; others get empty buckets.
        """
        bucket: list[tuple[str, Tensor]] = []
        size = 0
        for name, parameter in self.parameters.items():
            data = parameter.detach()
            full = data.full_tensor() if isinstance(data, DTensor) else data
            nbytes = full.numel() * self.dtype.itemsize
            if bucket and size + nbytes > bucket_bytes:
                yield bucket
                bucket, size = [], 0
            if self.rank == 0:
                bucket.append((name, full.to("cpu", self.dtype)))
                size += nbytes
        yield bucket

    def offload(self) -> None:
        """Move parameters and optimizer state to host memory, freeing the GPU for a sampler."""
        self._move("cpu")

    def onload(self) -> None:
        """Bring them back."""
        self._move(self.spec.device)

    def free_cache(self) -> None:
        """Give memory that torch keeps for later back to the GPU's other processes."""
        if self.spec.device == "cuda":
            torch.cuda.empty_cache()

    def _move(self, device: str) -> None:
        if self.spec.device == "cpu":
            return
        self.lm.to(device)
        if self.optimizer is not None:
            for state in self.optimizer.state.values():
                for key, value in state.items():
                    if isinstance(value, Tensor) and value.ndim:
                        state[key] = value.to(device)
        self.free_cache()

    # ------------------------------------------------------------------ checkpoints

    def save(self, folder: str) -> None:
        """Write this rank's shards of model and optimizer into ``folder/{model,optim}``. A collective."""
        checkpoint.save_shards(Path(folder), self.lm.model, self.optimizer, self.step)

    def load(self, folder: str) -> None:
        """Read model and optimizer from ``folder``, written at any world size. A collective."""
        # After a forward pass without a backward the root still holds whole parameters, and would go on using them.
        cast(FSDPModule, self.lm).reshard()
        self.step = checkpoint.load_shards(Path(folder), self.lm.model, self.optimizer)

    def _memory_gib(self) -> float:
        if self.spec.device == "cuda":
            return torch.cuda.max_memory_allocated() / 2**30
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20


def _local(value: Tensor) -> Tensor:
    return value.full_tensor() if isinstance(value, DTensor) else value

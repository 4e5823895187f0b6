"""One training process: holds an FSDP2 shard of a model, computes log-probabilities, takes optimizer steps.

Knows nothing of Ray: ``posttrain.cluster`` puts it into an actor, and tests may run it as it is.
"""

from __future__ import annotations

import resource
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from datetime import timedelta
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.fsdp import FSDPModule

from posttrain.algos import losses
from posttrain.core import rendezvous
from posttrain.core.cycles import rare_cycle_search
from posttrain.core.errors import RunError
from posttrain.data.pack import PackedBatch
from posttrain.models import attention_kernels, lora, vision
from posttrain.models.batch_invariant import use_invariant_products
from posttrain.models.experts import Mixture, Seen, check_routers, routers
from posttrain.models.fp8 import layers_of
from posttrain.models.load import build, dropout_settings
from posttrain.models.logprobs import TokenLoss
from posttrain.models.processors import load_vision
from posttrain.models.shards import nonfinite
from posttrain.models.support import check_architecture, check_sequence_parallel
from posttrain.models.ulysses import SequenceParallel
from posttrain.models.weights import load_weights, materialize
from posttrain.train import checkpoint, saver
from posttrain.train.expert_parallel import check_expert_parallel, expert_mesh, expert_modules
from posttrain.train.flops import model_flops, peak_flops, sharing_cost, tower_flops
from posttrain.train.loss import token_loss, value_loss
from posttrain.train.microbatch import MicroBatch
from posttrain.train.model import PackedLM, PackedValues
from posttrain.train.offload import CpuOffload
from posttrain.train.optim import (
    build_optimizer,
    clip_gradients,
    seed_rounding,
    take_step,
)
from posttrain.train.parallel import parallelize, reshard, sharding_mesh
from posttrain.train.profile import Profiler
from posttrain.train.schedule import learning_rate
from posttrain.train.spec import LossSpec, UpdateMetrics, WorkerSpec
from posttrain.weight_sync.model_sender import ModelSender


class TrainWorker:
    """Rank ``rank`` of a group of ``world_size`` processes.

    Neighbours share sequences: of ranks r, r + 1, ... each group of `train.sequence_parallel` gets the same batches.
    """

    def __init__(self, spec: WorkerSpec, rank: int, world_size: int) -> None:
        self.spec = spec
        self.rank = rank
        self.world_size = world_size
        self.step = 0
        if spec.threads:
            torch.set_num_threads(spec.threads)

    @rare_cycle_search()
    def setup(self, master_addr: str, master_port: int, timeout_s: float) -> dict[str, Any]:
        """Join the process group, whose rank 0 listens at the address; load the model into this rank's shard. Returns
        metadata of the model."""
        spec = self.spec
        if spec.device == "cuda":
            torch.cuda.set_device(0)  # Ray shows each worker its own GPU only
        if spec.batch_invariant and spec.device == "cuda":
            use_invariant_products()
        backend_name, timeout = "nccl" if spec.device == "cuda" else "gloo", timedelta(seconds=timeout_s)
        open_store = rendezvous.serve if self.rank == 0 else rendezvous.join
        store = open_store(master_addr, master_port, timeout)
        dist.init_process_group(backend_name, store=store, rank=self.rank, world_size=self.world_size, timeout=timeout)
        torch.manual_seed(spec.seed)
        self.device = torch.device(spec.device)
        self.dtype: torch.dtype = getattr(torch, spec.dtype)
        self.lm = self._load()
        self.optimizer = build_optimizer(self.lm, spec.train.optim) if spec.trainable else None
        self.parameters = dict(self.lm.model.named_parameters())
        self.flops, self.tower_flops = model_flops(self.lm.model), tower_flops(self.lm.model)
        self.sender = ModelSender(
            self.lm.model,
            self.dtype,
            self.device,
            stored_names=spec.stored_names,
            fp8=self.fp8,
            tower_frozen=spec.train.vision_tower == "frozen",
        )
        self.profiler = Profiler(self.device)
        self.cpu_offload = CpuOffload()
        self.saver = saver.ShardSaver(timeout_s)
        return {
            "parameters": sum(p.numel() for p in self.parameters.values()),
            "trained": sum(p.numel() for p in self.parameters.values() if p.requires_grad),
            "checkpoint_bytes": saver.checkpoint_bytes(
                self.parameters.values(), spec.train.optim, adapted=self.adapted
            ),
            "device": spec.device,
            "dtype": spec.dtype,
            "attention": self.kernel.title,
            "dropout": dropout_settings(self.lm.model.config),
            "peak_flops": peak_flops(self.device),
            "sharing_cost": sharing_cost(self.lm.model),
        }

    def _load(self) -> PackedLM:
        """The model: first without memory, then shared out among the workers, then its weights are loaded."""
        spec, train = self.spec, self.spec.train
        self.adapted = spec.trainable and train.lora.rank is not None
        self.compiled = train.compile == "on" or (train.compile == "auto" and spec.device == "cuda")
        # What is frozen has no master weights: it is kept in the type that it computes in.
        param_dtype = getattr(torch, train.param_dtype) if spec.trainable else self.dtype
        model = build(spec.source, dtype=self.dtype if self.adapted else param_dtype)
        check_architecture(model)
        self.fp8 = layers_of(model, stored=spec.stored_names, tensor_parallel=spec.engine_gpus) if spec.fp8 else None
        check_sequence_parallel(model, train.sequence_parallel)
        self.kernel = attention_kernels.choose(train.attention, self.device, self.dtype, attention_kernels.needs(model))
        lm = PackedValues(model) if spec.values else PackedLM(model)
        # Trained or not: dropout would make ratios and preferences noisy, and a loss depend on how a batch is cut.
        lm.eval()
        lm.requires_grad_(spec.trainable)
        self.vision = load_vision(spec.source)
        for part in vision.tower(lm.model) if train.vision_tower == "frozen" else ():
            for parameter in part.parameters():  # buffers of its rotary embedding stay in float32
                parameter.requires_grad_(False).data = parameter.data.to(self.dtype)
        if self.adapted:
            lora.inject(lm.model, train.lora, dtype=param_dtype, tower=train.vision_tower == "trained")
        is_actor = spec.trainable and not spec.values
        if is_actor and (train.router_aux_loss_coef or spec.replays_routing):
            check_routers(lm.model.config)
        self.mixture = Mixture(lm.model) if routers(lm.model) else None
        self.parallel = SequenceParallel.among(train.sequence_parallel, self.rank, self.world_size)
        # Alone, and with weights of the type it computes in, a worker has no use for FSDP.
        self.sharded = self.world_size > 1 or param_dtype != self.dtype or train.cpu_offload
        # A critic or a teacher beside a mixture may be dense.
        experts = train.expert_parallel if is_actor or expert_modules(lm.model) else 1
        check_expert_parallel(model.config, experts, self.world_size // experts)
        parallelize(
            lm,
            sharding_mesh(spec.device, self.world_size, train.shard_size) if self.sharded else None,
            dtype=self.dtype,
            activation_checkpointing=train.activation_checkpointing if spec.trainable else "none",
            compiled=self.compiled,
            keep_gathered=train.gather_weights == "step",
            cpu_offload=train.cpu_offload,
            experts=expert_mesh(spec.device, self.world_size, experts),
        )
        materialize(lm, self.device, parameters_on=torch.device("cpu") if train.cpu_offload else None)
        load_weights(
            lm.model, spec.source, spec.seed, leave=frozenset({PackedValues.HEAD}) if spec.values else frozenset()
        )
        if isinstance(lm, PackedValues):
            lm.zero_head()
        return lm

    # ------------------------------------------------------------------ compute

    def logprobs(
        self,
        shard: Sequence[PackedBatch],
        adapter: bool = True,
        temperature: float | None = None,
        compiled: bool = True,
    ) -> list[Tensor]:
        """Log-probabilities under the current weights, or a critic's values, a [T] column a micro-batch; 0 at tokens
        without loss.

        Without ``adapter`` they are of the weights that a LoRA run started from. ``temperature`` stands for that of
        the ``WorkerSpec``. Not ``compiled``: as for a few tokens, which are not worth graphs of their own.
        """
        columns = []
        with (
            self._no_backward(),
            nullcontext() if adapter else lora.switched_off(self.lm.model),
            nullcontext() if compiled else torch.compiler.set_stance("force_eager"),
        ):
            for batch in shard:
                micro = self._micro_batch(batch, replay=adapter)
                columns.append(self._column(batch, micro, self._forward(micro, temperature=temperature)[0]))
        return columns

    def evaluate(self, shard: Sequence[PackedBatch]) -> dict[str, float]:
        """Sums of the weighted negative log-likelihood over the shard, without a gradient."""
        total = 0.0
        with self._no_backward():
            for batch in shard:
                micro = self._micro_batch(batch)
                values, _ = self._forward(micro)
                total += float(losses.nll(values, micro.weights)[0])
        return {"loss": total}

    def update(self, shard: Sequence[PackedBatch], loss: LossSpec) -> UpdateMetrics:
        """Take one optimizer step over the shard's micro-batches.

        With ``skipped`` 1 the gradient was not finite, and the weights are unchanged; see ``nonfinite_gradients``.
        """
        if self.optimizer is None:
            raise RunError("a frozen model cannot be updated")
        start = time.perf_counter()
        # All micro-batches go to the device first: nothing then waits for the host between them.
        micros = [self._micro_batch(batch) for batch in shard]
        pull = self._pull_of_balance(micros) if self.spec.train.router_aux_loss_coef and self.mixture else None
        sums: losses.Sums = {}
        before: list[tuple[PackedBatch, MicroBatch, Tensor]] = []
        seen: Tensor | None = None
        for i, (batch, micro) in enumerate(zip(shard, micros, strict=True)):
            if self.sharded and self.spec.train.reduce_gradients == "step":
                cast(FSDPModule, self.lm).set_requires_gradient_sync(i == len(micros) - 1)
            of_micro, values = self._backward(micro, loss, pull)
            for key, value in of_micro.items():
                sums[key] = sums[key] + value if key in sums else value
            if loss.correction is not None:
                before.append((batch, micro, values))
            if self.mixture is not None:
                rows = self.mixture.seen().rows
                seen = rows if seen is None else seen + rows
        if self.spec.train.gather_weights == "step":
            reshard(self.lm)
        grad_norm = clip_gradients(self.parameters.values(), self.spec.train.optim.grad_clip)
        rate = learning_rate(self.spec.train.optim, self.step, self.spec.total_steps)
        skipped = not torch.isfinite(grad_norm)
        if skipped:
            self.nonfinite = self._name_nonfinite()
        else:
            if self.spec.train.optim.stochastic_rounding:
                seed_rounding(self.spec.seed, self.step, self.rank % (self.spec.train.shard_size or self.world_size))
            take_step(self.optimizer, rate, compiled=self.compiled)
        self.optimizer.zero_grad(set_to_none=True)  # now: a sampler may need the memory
        self.step += 1
        share = self.spec.train.sequence_parallel  # of ranks that count the same tokens
        # What is not computed costs what sequences of those lengths would, and is no padding.
        shared = [batch.shared.tolist() for batch in shard if batch.shared is not None]
        flops = sum(map(self.flops.training, (batch.lengths for batch in shard)))
        flops += sum(self.tower_flops(batch.images.patches) for batch in shard if batch.images is not None)
        tokens_shared = float(sum(map(sum, shared)))
        computed = {
            "flops": (flops - sum(map(self.flops.training, shared))) / share,
            "tokens_run": sum(len(micro.input_ids) for micro in micros) + tokens_shared,
            "tokens_shared": tokens_shared,
        }
        return UpdateMetrics(
            sums={key: float(value) for key, value in sums.items()} | computed,
            shared={"grad_norm": float(grad_norm), "skipped": float(skipped), "lr": rate} | self._routing_metrics(seen),
            maxima={"seconds": time.perf_counter() - start, "memory_gib": self._memory_gib()},
            logprobs=[self._column(*each) for each in before],
        )

    def warm_up(self, scores: bool) -> None:
        """Compile the layers' passes with gradients ahead of the first update, on a few tokens that count for nothing;
        with ``scores`` those without gradients too. Weights and optimizer stay as they are."""
        if not self.compiled or self.optimizer is None:
            return
        # Padded attention has a graph for each number of length groups, and another for a row that is alone: these two
        # are one group.
        batch = PackedBatch.from_sequences([[0] * 9, [0] * 10], [[True] * 9, [True] * 10])
        batch.loss_weights = torch.zeros(batch.num_tokens)
        if scores:
            self.logprobs([batch])
        self._backward(self._micro_batch(batch, replay=False), LossSpec())
        if self.spec.train.gather_weights == "step":
            reshard(self.lm)
        self.optimizer.zero_grad(set_to_none=True)
        self.free_cache()  # engines sample now

    def start_profile(self) -> None:
        """Trace what this worker does from now on."""
        self.profiler.start()

    def stop_profile(self, folder: str, step: int) -> None:
        """Write the trace as ``folder/step_N_rank_R``; see ``Profiler.stop``."""
        self.profiler.stop(Path(folder), f"step_{step}_rank_{self.rank}")

    def nonfinite_gradients(self) -> list[str]:
        """Parameters that had a gradient that was not finite in the last update that was skipped, in this rank's
        shard."""
        return self.nonfinite

    def nonfinite_weights(self) -> list[str]:
        """Trained parameters, and state of the optimizer, that are not finite in this rank's shard."""
        return nonfinite(saver.trained_tensors(self.lm.model, self.optimizer))

    def _name_nonfinite(self) -> list[str]:
        return nonfinite({name: p.grad for name, p in self.parameters.items() if p.grad is not None})

    @contextmanager
    def _no_backward(self) -> Iterator[None]:
        with torch.no_grad():
            yield
        reshard(self.lm)

    def _micro_batch(self, batch: PackedBatch, *, replay: bool = True) -> MicroBatch:
        replay = replay and self.spec.replays_routing
        return MicroBatch.build(
            batch, self.device, self.kernel, self.parallel, self.vision, self.mixture, replay=replay
        )

    def _pull_of_balance(self, micros: Sequence[MicroBatch]) -> Tensor:
        """Return [L, E]: the gradient of the auxiliary loss by a token's probabilities. It follows from the loads of
        the whole batch, for which a forward pass over all of it comes before the first backward pass."""
        assert self.mixture is not None
        with self._no_backward():
            rows = []
            for micro in micros:
                self._forward(micro.one_row())
                rows.append(self.mixture.seen().rows)
        seen = self._over_workers(torch.stack(rows).sum(0))
        # FSDP averages gradients over ranks.
        return seen.pull() * (self.spec.train.router_aux_loss_coef * self.world_size)

    def _over_workers(self, rows: Tensor) -> Seen:
        """Return what the routers of all workers saw. A collective."""
        assert self.mixture is not None
        if self.world_size > 1:
            dist.all_reduce(rows)
        return Seen(rows, self.mixture.top_k)

    def _routing_metrics(self, rows: Tensor | None) -> dict[str, float]:
        return {} if rows is None else self._over_workers(rows).metrics()

    def _forward(
        self,
        micro: MicroBatch,
        loss: TokenLoss | None = None,
        temperature: float | None = None,
        pull: Tensor | None = None,
    ) -> tuple[Tensor, ...]:
        if self.mixture is not None:
            self.mixture.begin(micro.routed, pull)
        result: tuple[Tensor, ...] = self.lm(
            micro.input_ids,
            micro.position_ids,
            micro.rows,
            micro.targets,
            micro.ragged,
            self.spec.temperature if temperature is None else temperature,
            loss,
            micro.images,
        )
        return result

    def _column(self, batch: PackedBatch, micro: MicroBatch, values: Tensor) -> Tensor:
        """Return a [T] column on the CPU of the [N] values of a micro-batch, 0 elsewhere. A collective, where workers
        share sequences."""
        column = torch.zeros(batch.num_tokens, device=self.device)
        if micro.has_loss:
            column[micro.predict.to(self.device)] = values
        if self.parallel is not None:  # each worker has some of the tokens, and 0 elsewhere
            dist.all_reduce(column, group=self.parallel.group)
        return column.cpu()

    def _backward(self, micro: MicroBatch, spec: LossSpec, pull: Tensor | None = None) -> tuple[losses.Sums, Tensor]:
        """Add the gradient of the micro-batch's loss. Returns sums for the metrics, and the values or log-probabilities
        [N] that the loss is of, all on the device. ``pull``: as in ``Mixture.begin``."""
        sums: losses.Sums = {}

        def of_tokens(logprobs: Tensor, entropies: Tensor, part: slice) -> Tensor:
            total, parts = token_loss(micro, logprobs, entropies, part, spec)
            for key, value in parts.items():
                sums[key] = sums[key] + value if key in sums else value
            return total

        if self.spec.values:
            values = self._forward(micro, pull=pull)[0]
            total, sums = value_loss(micro, values, spec)
        else:
            total, values, _ = self._forward(micro, of_tokens, pull=pull)
        # FSDP averages gradients over ranks, but the weights are already those of the global batch.
        torch.autograd.backward(total * self.world_size)
        return sums, values.detach()

    # ------------------------------------------------------------------ memory

    def offload(self) -> None:
        """Move parameters and optimizer state to host memory, freeing the GPU for a sampler."""
        if self.spec.device == "cuda" and not self.spec.train.cpu_offload:
            states = self.optimizer.state.values() if self.optimizer is not None else ()
            moments = [value for state in states for value in state.values() if isinstance(value, Tensor)]
            on_gpu = [t for t in (*self.lm.parameters(), *moments) if t.device.type == "cuda"]
            self.cpu_offload.offload(on_gpu)
            self.free_cache()

    def onload(self) -> None:
        """Bring them back."""
        self.cpu_offload.onload()

    def free_cache(self) -> None:
        """Give memory that torch keeps for later back to the GPU's other processes."""
        if self.spec.device == "cuda":
            torch.cuda.empty_cache()

    # ------------------------------------------------------------------ checkpoints

    def prepare_save(self) -> None:
        """Begin to make host memory for the copy of a save in the background, where that takes long."""
        if self.spec.device == "cuda":
            self.saver.prepare(saver.shards_of(self.lm.model, self.optimizer, self.step))

    def save(self, folder: str, background: bool) -> None:
        """Begin to write this rank's shards of model and optimizer into ``folder/{model,optim}``, and the state of its
        random number generators into ``folder/random``. A collective.

        Of the model what is trained: of a LoRA run the adapter, which also goes into ``folder/adapter``, whole.

        Args:
            background: return as soon as there is a copy in host memory, instead of when all is written.
        """
        place = Path(folder)
        try:
            saver.save_random_state(place / "random", self.rank, self.world_size)
            if self.adapted:
                lora.save(self.lm.model, place / "adapter", self.spec.source, self.spec.seed, write=self.rank == 0)
        except (OSError, RuntimeError) as error:  # torch's over a full disk is a RuntimeError
            raise saver.not_written(place, error) from error
        self.saver.start(place, saver.shards_of(self.lm.model, self.optimizer, self.step), background=background)

    def saved(self) -> dict[str, checkpoint.Digest] | None:
        """The files of the last ``save`` that this rank wrote; None while it still does. Raises ``RunError``."""
        return self.saver.finish()

    def load(self, folder: str) -> None:
        """Read model and optimizer from ``folder``, written at any world size. A collective."""
        self.step = saver.load_shards(Path(folder), self.lm.model, self.optimizer)
        saver.load_random_state(Path(folder) / "random", self.rank, self.world_size)

    def _memory_gib(self) -> float:
        if self.spec.device == "cuda":
            return torch.cuda.max_memory_allocated() / 2**30
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20

"""What a training process and an engine hold on their GPU at each moment, term by term, in bytes."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property

from posttrain.config import EngineName, RolloutConfig, TrainConfig
from posttrain.core.errors import ConfigError
from posttrain.core.sizes import (
    DEVICE_BUCKET_BYTES,
    GATHER_BYTES,
    HOST_BUCKET_BYTES,
    SENT_BUCKET_BYTES,
    SYNC_CHECK_SEQUENCES,
    SYNC_CHECK_TOKENS,
    bucket_bytes,
    logits_rows,
)
from posttrain.engines.choice import concurrent_requests
from posttrain.models.fp8_layers import Fp8Layers
from posttrain.plan import activations
from posttrain.plan.activations import Policy
from posttrain.plan.calibration import CONTEXT_BYTES, ENGINE_BYTES, NCCL_BYTES
from posttrain.plan.shape import ModelShape

Terms = dict[str, float]
"""Bytes by what they are for."""

_FLOAT32 = 4


def total(terms: Terms) -> float:
    """Return the sum of all terms."""
    return sum(terms.values())


@dataclass(frozen=True)
class Trainer:
    """One process of a group of training workers (actor, critic, reference, teacher)."""

    role: str
    shape: ModelShape
    train: TrainConfig
    world: int = 1
    """Workers of the group"""
    itemsize: int = 2
    """Bytes of the compute type"""
    trainable: bool = True
    compiled: bool = True
    repeats_heads: bool = False
    """See ``Policy``"""
    tokens: int = 0
    """Tokens of its largest micro-batch, on all workers that share it"""
    micro_batches: int = 1
    """Micro-batches of an optimizer step"""
    patches: int = 0
    """Patches of images of its largest micro-batch"""

    @property
    def shards(self) -> int:
        return self.train.shard_size or self.world

    @property
    def adapted(self) -> bool:
        return self.trainable and self.train.lora.rank is not None

    @property
    def master(self) -> int:
        """Bytes of an element that the optimizer steps."""
        if not self.trainable:
            return self.itemsize
        return 2 if self.train.param_dtype == "bfloat16" else _FLOAT32

    @property
    def sharded(self) -> bool:
        """Return whether FSDP2 is used."""
        return self.world > 1 or self.master != self.itemsize or self.train.cpu_offload

    @property
    def trained(self) -> int:
        """Parameters that are trained, of the whole model."""
        if not self.trainable:
            return 0
        if self.adapted:
            return self.shape.lora_parameters(self.train.lora, tower=self.trains_tower)
        return self.shape.parameters - self._frozen

    @property
    def trains_tower(self) -> bool:
        return self.trainable and self.train.vision_tower == "trained"

    @property
    def _frozen(self) -> int:
        """Parameters of a vision tower that is not trained, beside a language model that is."""
        return 0 if self.trains_tower else self.shape.of_tower

    @property
    def mine(self) -> int:
        """Tokens of the largest micro-batch that go through this process."""
        return -(-self.tokens // self.train.sequence_parallel)

    @property
    def layer(self) -> float:
        """Parameters of a layer as this process gathers them: of experts that are shared out, its own."""
        others = 1 - 1 / self.train.expert_parallel
        return self.shape.layer_parameters - self.shape.expert_parameters * others

    @property
    def gathered(self) -> float:
        """Parameters of the model as this process gathers them."""
        return self.shape.outside + self.shape.layers * self.layer + self.shape.of_tower

    @property
    def reduced(self) -> float:
        """Parameters whose gradients this process has before they are reduced."""
        if self.adapted or not self.trained:
            return float(self.trained)
        return self.gathered - self._frozen

    @property
    def policy(self) -> Policy:
        # Exchanges of sequence parallelism break the graph, and a checkpoint around them is then not compiled.
        whole = self.train.sequence_parallel == 1 or self.train.activation_checkpointing == "none"
        shared_out = self.train.expert_parallel > 1  # such layers are not compiled
        return Policy(
            self.train.activation_checkpointing,
            self.compiled and whole and not shared_out,
            self.repeats_heads,
            self.itemsize,
            (self.train.lora.rank or 0) if self.adapted else 0,
            shared_out,
        )

    # ------------------------------------------------------------------ terms

    def _parameters(self) -> float:
        """Bytes of all weights."""
        if self.adapted:
            return self.itemsize * self.shape.parameters + self.master * self.trained
        return self.master * (self.shape.parameters - self._frozen) + self.itemsize * self._frozen

    def moments(self) -> float:
        """Bytes of the optimizer's state on this process, wherever it is kept."""
        # 8 bits an element, and a float32 scale for each block of 256 of them
        each = 2 * (1 + _FLOAT32 / 256) if self.train.optim.name == "adamw_8bit" else 2 * self.master
        return each * self.trained / self.shards

    def state(self) -> float:
        """Bytes of weights and optimizer state on this process, wherever they are kept."""
        return self._parameters() / self.shards + self.moments()

    def fresh(self) -> Terms:
        """Loaded, before the first step."""
        if self.train.cpu_offload:
            return {"parameters": 0.0}
        return {"parameters": self._parameters() / self.shards}

    def idle(self) -> Terms:
        """Between steps."""
        if self.train.cpu_offload:
            return {"parameters": 0.0, "optimizer": 0.0}
        return self.fresh() | {"optimizer": self.moments()}

    def _whole(self) -> float:
        """Weights that FSDP2 has gathered during a pass."""
        if not self.sharded:
            return 0.0
        if self.train.gather_weights == "step":
            return self.itemsize * self.gathered
        ahead = 2.0 * self.layer  # one layer ahead
        if (tower := self.shape.tower) is not None:  # it comes before the layers
            ahead = max(ahead, tower.outside + 2.0 * tower.block_parameters)
        return self.itemsize * (self.shape.outside + ahead)

    def _images(self, *, backward: bool) -> float:
        """Bytes of images while the language model works: their pixels, their features, and what the tower keeps."""
        tower, b = self.shape.tower, self.itemsize
        if tower is None:
            return 0.0
        kept = tower.values / tower.frames + tower.features(b)
        if backward and self.trains_tower:
            block = tower.of_block(b, self.train.activation_checkpointing, compiled=self.compiled)
            kept += tower.layers * block + b * tower.values
        return self.patches * kept

    def _seeing(self) -> float:
        """Bytes of the most that the tower's pass forward holds beside that."""
        tower = self.shape.tower
        return 0.0 if tower is None else self.patches * (tower.pixels() + tower.forward_only(self.itemsize))

    def _logits(self, tokens: int) -> float:
        if self.shape.values:
            return 0.0
        return 4.0 * logits_rows(tokens, self.shape.vocabulary) * self.shape.vocabulary

    def forward(self, tokens: int | None = None) -> Terms:
        """The most of a pass without gradients over a micro-batch."""
        mine = self.mine if tokens is None else tokens
        work = mine * activations.forward_only(self.shape, self.policy)
        head = self._logits(mine) + 2.0 * self.itemsize * self.shape.hidden * mine
        terms = self.idle() | {"gathered weights": self._whole(), "activations": max(work, head)}
        if tokens is not None:
            return terms  # of the weight-sync check, which has no images
        return terms | {"images": self._images(backward=False), "activations": max(work, head, self._seeing())}

    def update(self) -> Terms:
        """The most of an optimizer step: in the output head, in the backward pass of the last layer, in the vision
        tower, or at its end."""
        several = self.micro_batches > 1
        keeps = self.mine * (
            self.shape.layers * activations.of_layer(self.shape, self.policy)
            + activations.outside(self.shape, self.policy)
            + 3.0 * self.itemsize * self.shape.hidden  # the last ones, those that predict, and their gradient
        )
        head_gradient = 0.0 if self.adapted else self.itemsize * float(self.shape.head_gradient)
        gathered = self.idle() | {"gathered weights": self._whole(), "images": self._images(backward=True)}
        common = gathered | {"activations": keeps}
        before = self._gradients() if several else 0.0
        # The head adds its gradient up in float32, and rounds it when the logits are gone.
        rounded = head_gradient if self.itemsize < _FLOAT32 else 0.0
        in_head = common | {
            "gradients": before + head_gradient * _FLOAT32 / self.itemsize,
            "logits": max(self._logits(self.mine), rounded),
        }
        in_layer = common | {
            "gradients": before + (head_gradient if self.sharded or not several else 0.0),
            "in flight": self.mine * activations.in_flight(self.shape, self.policy),
        }
        in_tower = gathered | {"gradients": before, "activations": self._seeing()}
        if self.trains_tower and self.shape.tower is not None:
            again = self.shape.tower.in_flight(self.itemsize, self.train.activation_checkpointing)
            in_tower["activations"] = max(self._seeing(), self.patches * again)
        at_end = self.idle() | {
            "gathered weights": self._whole(),
            "gradients": self._gradients() + self._last_reduction(),
        }
        return max((in_head, in_layer, in_tower, at_end), key=total)

    def _gradients(self) -> float:
        """Those of the micro-batches before."""
        if self.sharded and self.train.reduce_gradients == "step":
            return _FLOAT32 * self.reduced
        if self.train.cpu_offload:
            return 0.0
        return self.master * self.trained / self.shards

    def _last_reduction(self) -> float:
        """Gradients of what belongs to no layer, in the compute type, in float32 to be reduced, and reduced."""
        if not self.sharded or self.adapted:
            return 0.0
        return self.shape.outside * (self.itemsize + _FLOAT32 + _FLOAT32 / self.shards)

    def handing_out(self, transfer: str, in_fp8: Fp8Layers | None = None) -> Terms:
        """Return the buckets of weights for engines, and what remains of the forward pass of the weight-sync check.

        Args:
            in_fp8: what of a layer is sent in FP8.
        """
        whole = self.itemsize * self.shape.parameters
        if in_fp8 is not None:
            whole -= self.shape.layers * in_fp8.saved_bytes(self.itemsize)
        most = {"device": DEVICE_BUCKET_BYTES, "broadcast": SENT_BUCKET_BYTES}.get(transfer, HOST_BUCKET_BYTES)
        embedding = self.itemsize * self.shape.embedding
        bucket = max(bucket_bytes(whole, most), embedding)
        buckets = 2.0 * bucket if transfer != "host" else 0.0
        gathered = 0.0
        if self.shards > 1:
            kept = self.itemsize if self.adapted else self.master
            group = GATHER_BYTES * self.itemsize / kept + GATHER_BYTES / self.shards
            if self.adapted:  # beside weights of the base, adapters
                group += min(GATHER_BYTES, self.master * self.trained) * (1.0 + 1.0 / self.shards)
            gathered = max(group, embedding * (1.0 + 1.0 / self.shards))
        # The pass of the weight-sync check ends before, and torch keeps its memory.
        check = self.forward(SYNC_CHECK_SEQUENCES * SYNC_CHECK_TOKENS)
        left = check["gathered weights"] + check["activations"]
        # Of the largest matrix a copy in float32, and the quantized one, on a GPU.
        matrices = (*self.shape.matrices, *self.shape.expert)
        quantizing = 0.0 if in_fp8 is None else 5.0 * max(m.inputs * m.outputs for m in matrices)
        return self.idle() | {
            "buckets": buckets,
            "gathered weights": gathered + quantizing,
            "left of the sync check": left,
        }

    def beside(self) -> float:
        """Bytes beside torch's allocations."""
        return CONTEXT_BYTES + (NCCL_BYTES if self.world > 1 else 0.0)

    def host(self, *, background_saves: bool, offload: bool) -> Terms:
        """Bytes of host memory of this process."""
        state = self.state() if self.trainable else 0.0
        return {
            "process": 3.0 * 2**30,  # torch, CUDA's libraries, compiled kernels: resident size of such a process
            "state kept there": self.state() if self.train.cpu_offload or offload else 0.0,
            "copy for saves": state if background_saves else 0.0,
        }


@dataclass(frozen=True)
class EngineMemory:
    """One GPU of an engine."""

    shape: ModelShape
    rollout: RolloutConfig
    itemsize: int
    gpu_bytes: float
    """That `rollout.memory_fraction` is a share of"""
    name: EngineName
    """The engine that `rollout.engine` stands for"""
    on_gpu: int = 1
    """Engines of its GPU, with this one"""
    step_tokens: int = 0
    """Most tokens of a step of vLLM; 0: another engine, whose steps are not counted"""
    episodes: int = 0
    """Most episodes of a training step on this engine; 0: any number, as in `generate`"""

    def requests(self, episodes: int) -> int:
        """Return the most requests that it would run at once with any memory, where a step gives it so many
        episodes."""
        return min(episodes, concurrent_requests(self.name, self.rollout, math.inf, episodes))

    @cached_property
    def in_fp8(self) -> Fp8Layers | None:
        """Return what of a decoder layer is sent in FP8; None: nothing, or what cannot be quantized."""
        if self.rollout.quantization == "none":
            return None
        try:
            return self.shape.fp8(self.rollout.tensor_parallel)
        except ConfigError:
            return None  # `problems` tells of it

    @property
    def _saved(self) -> float:
        """Bytes of one decoder layer that FP8 saves. The embedded engine has weights in its compute type again."""
        return 0.0 if self.in_fp8 is None or self.name == "hf" else float(self.in_fp8.saved_bytes(self.itemsize))

    @property
    def weights(self) -> float:
        whole = self.itemsize * self.shape.parameters - self.shape.layers * self._saved
        return whole / self.rollout.tensor_parallel

    def read_weights(self, requests: float) -> float:
        """Bytes of weights that a decoding step of so many requests reads: of experts those that some token goes to,
        each being as likely."""
        if not self.shape.experts:
            return self.weights
        idle = (1 - self.shape.experts_per_token / self.shape.experts) ** requests
        experts = self.shape.layers * self.shape.expert_parameters / self.rollout.tensor_parallel
        quantized = self._saved and self.in_fp8 is not None and any(".experts." in n for n in self.in_fp8.names)
        itemsize = 1.0 if quantized else self.itemsize
        return self.weights - itemsize * experts * float(idle)

    @property
    def of_token(self) -> float:
        """Bytes of the KV cache for a token. GPUs beyond the number of key heads hold copies."""
        heads = max(1.0, self.shape.kv_heads / self.rollout.tensor_parallel)
        itemsize = 1 if self.rollout.kv_cache_dtype == "fp8" else self.itemsize
        return 2.0 * self.shape.layers * heads * self.shape.head_dim * itemsize

    @property
    def _unless_steps(self) -> float:
        """Bytes of `rollout.memory_fraction` that the weights leave."""
        return self.rollout.memory_fraction * self.gpu_bytes - self.weights

    @property
    def step(self) -> float:
        """Bytes that a step of vLLM computes with: the most of a layer over its tokens, or of the sampler over its
        requests, which has their logits in the compute type, and in float32 logits, log-probabilities, probabilities
        and random numbers."""
        if not self.step_tokens:
            return 0.0
        b, hidden, tensor_parallel = self.itemsize, self.shape.hidden, self.rollout.tensor_parallel
        fitting = max(0.0, self._unless_steps) / self.of_token
        requests = concurrent_requests(self.name, self.rollout, fitting, self.episodes)
        longest = self.rollout.max_prompt_tokens + self.rollout.max_response_tokens
        tokens = min(self.step_tokens, requests * longest)
        in_layer = activations.forward_only(self.shape, Policy(itemsize=b)) - 2 * b * hidden
        layer = tokens * (2 * b * hidden + in_layer / tensor_parallel)
        sampler = tokens * b * hidden + min(requests, tokens) * self.shape.vocabulary * (b + 4.0 * _FLOAT32)
        return max(layer, sampler)

    @property
    def beside_cache(self) -> float:
        """Bytes of `rollout.memory_fraction` that are not for the KV cache: weights, and what vLLM measures that a
        step takes, unless engines that share a GPU are given the size of their caches."""
        return self.weights + (self.step if self.on_gpu == 1 else 0.0)

    @property
    def cache(self) -> float:
        """Bytes of the KV cache. Less than 0: what is beside it is too large."""
        return self.rollout.memory_fraction * self.gpu_bytes - self.beside_cache

    @property
    def tokens(self) -> int:
        """That fit into the cache."""
        return max(0, int(self.cache / self.of_token))

    def asleep(self) -> Terms:
        """What its processes keep."""
        return {"engine process": CONTEXT_BYTES if self.name == "hf" else ENGINE_BYTES}

    def loading(self) -> Terms:
        """Weights are there, the cache is not yet."""
        return self.asleep() | {"engine weights": self.weights}

    def awake(self) -> Terms:
        """It samples."""
        return self.loading() | {"engine steps": self.step, "KV cache": max(0.0, self.cache)}

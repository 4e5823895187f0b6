"""How long the phases of a step take on a GPU, and what bounds them.

Counted in FLOPs and bytes, each divided by what the hardware gives of it (``calibration``). Work of one kind follows
work of another on a GPU; collectives run beside products and attention, and the host launches ahead of the GPU: of
these only what is longer shows. Shape legend as in ``shape``.
"""

from __future__ import annotations

from dataclasses import dataclass

from posttrain.config import EngineName
from posttrain.core.flops import squares
from posttrain.core.machines import Gpu, Machine
from posttrain.models.fp8_layers import Fp8Layers
from posttrain.plan import calibration as known
from posttrain.plan.images import NO_IMAGES, ImageLoad
from posttrain.plan.memory import EngineMemory, Trainer
from posttrain.plan.shape import ModelShape

_EAGER = 3.0
"""Bytes of elementwise work without compilation by those with it, counted operator by operator."""
_FLOAT32 = 4
_QUANTIZING = 35.0
"""Bytes that ``models.fp8.quantize`` reads and writes for an element of two bytes, operator by operator."""


@dataclass(frozen=True)
class RankWork:
    """What one data-parallel rank does in an optimizer step, or in a pass over as many tokens."""

    micro_batches: tuple[tuple[int, ...], ...]
    """Lengths of the sequences in each"""
    loss_share: float = 1.0
    """Share of the tokens that carry loss"""
    images: float = 0.0
    """The mean of a sequence"""
    patches: float = 0.0
    """The mean of an image"""

    @property
    def lengths(self) -> list[int]:
        return [n for micro in self.micro_batches for n in micro]

    @property
    def tokens(self) -> int:
        return sum(self.lengths)

    @property
    def largest(self) -> int:
        """Tokens of the largest micro-batch."""
        return max((sum(micro) for micro in self.micro_batches), default=0)


@dataclass(frozen=True)
class Seconds:
    """Seconds of a phase, by what takes them."""

    compute: float = 0.0
    """matrix products and attention"""
    memory: float = 0.0
    """passes over tensors at the speed of the GPU's memory"""
    communication: float = 0.0
    """as far as nothing runs beside it"""
    host: float = 0.0
    """of the processor, launching; beside the GPU"""
    fixed: float = 0.0

    @property
    def gpu(self) -> float:
        """What the GPU has to do."""
        return self.compute + self.memory + self.communication

    @property
    def total(self) -> float:
        return max(self.gpu, self.host) + self.fixed

    @property
    def bound(self) -> str:
        """What takes most of them."""
        if self.host > self.gpu:
            return "host"
        parts = {
            "compute": self.compute,
            "memory bandwidth": self.memory,
            "communication": self.communication,
            "fixed": self.fixed,
        }
        return max(parts, key=lambda name: parts[name])


def update_seconds(trainer: Trainer, machine: Machine, work: RankWork) -> Seconds:
    """One optimizer step of one worker; its neighbours take the same."""
    assert machine.gpu is not None
    gpu, shape = machine.gpu, trainer.shape
    share = trainer.train.sequence_parallel
    full = trainer.train.activation_checkpointing == "full"
    again = trainer.train.activation_checkpointing != "none"
    passes = (2.0 if trainer.adapted else 3.0) + full
    compute = _products(shape, gpu, work.tokens / share, passes)
    compute += _head(shape, gpu, work.tokens * work.loss_share / share, 2.0 if trainer.adapted else 3.0)
    compute += _attention(shape, gpu, work, share, forward=1.0 + full, backward=1.0)
    compute += _tower(shape, gpu, tower_flops(shape, work), 3.0 + full if trainer.trains_tower else 1.0)
    memory = _elementwise(trainer, gpu, work.tokens / share, 1.0 + again / 3.0)
    memory += 14.0 * shape.vocabulary * (not shape.values) * work.tokens * work.loss_share / share / _streaming(gpu)
    memory += _over_parameters(trainer, gpu, len(work.micro_batches))
    communication = 0.0
    if trainer.world > 1:
        compute *= known.BESIDE_COLLECTIVES
        link = known.COLLECTIVES * machine.link(trainer.world)
        communication = max(0.0, _collective_bytes(trainer, len(work.micro_batches)) / link - compute)
        communication += _exchanged_bytes(trainer, work.tokens / share, 2.0) / link
        communication += routed_bytes(trainer, work.tokens, 2.0 + again) / link
    host = _host(trainer, len(work.micro_batches), forward=1.0 + again, backward=True)
    return Seconds(compute, memory, communication, host)


def forward_seconds(trainer: Trainer, machine: Machine, work: RankWork) -> Seconds:
    """A pass without gradients: log-probabilities or values."""
    assert machine.gpu is not None
    gpu, shape, share = machine.gpu, trainer.shape, trainer.train.sequence_parallel
    tokens, predicted = work.tokens / share, work.tokens * work.loss_share / share
    compute = _products(shape, gpu, tokens, 1.0) + _head(shape, gpu, predicted, 1.0)
    compute += _attention(shape, gpu, work, share, forward=1.0, backward=0.0)
    compute += _tower(shape, gpu, tower_flops(shape, work), 1.0)
    memory = _elementwise(trainer, gpu, tokens, 1.0 / 3.0)
    memory += 8.0 * shape.vocabulary * (not shape.values) * predicted / _streaming(gpu)
    communication = 0.0
    if trainer.world > 1:
        link = known.COLLECTIVES * machine.link(trainer.world)
        gathered = trainer.itemsize * _from_others(trainer) * len(work.micro_batches)
        exchanged = _exchanged_bytes(trainer, tokens, 1.0) + routed_bytes(trainer, work.tokens, 1.0)
        communication = max(0.0, gathered / link - compute) + exchanged / link
    return Seconds(compute, memory, communication, _host(trainer, len(work.micro_batches), forward=1.0, backward=False))


# ---------------------------------------------------------------------- terms of training


def _efficiency(inner: int) -> float:
    """Share of the peak that products with this inner dimension reach."""
    return known.MATMUL * inner / (inner + known.MATMUL_DEPTH)


def _products(shape: ModelShape, gpu: Gpu, tokens: float, passes: float) -> float:
    """Return the FLOPs' seconds of the linear layers."""
    return passes * 2.0 * shape.layers * shape.multiplied * tokens / (gpu.flops * _efficiency(shape.hidden))


def _head(shape: ModelShape, gpu: Gpu, predicted: float, passes: float) -> float:
    if shape.values:
        return 0.0
    return passes * 2.0 * shape.embedding * predicted / (gpu.flops * _efficiency(shape.hidden))


def _attention(shape: ModelShape, gpu: Gpu, work: RankWork, share: int, *, forward: float, backward: float) -> float:
    flops = 2.0 * shape.layers * shape.q * squares(work.lengths) / share
    times = forward / known.ATTENTION_FORWARD + 2.0 * backward / known.ATTENTION_BACKWARD
    return flops * times / gpu.flops


def tower_flops(shape: ModelShape, work: RankWork) -> float:
    """FLOPs of the vision tower's forward pass over the images of all sequences."""
    if shape.tower is None:
        return 0.0
    return work.images * len(work.lengths) * shape.tower.flops().forward([work.patches])


def _tower(shape: ModelShape, gpu: Gpu, flops: float, passes: float) -> float:
    return 0.0 if shape.tower is None else passes * flops / (gpu.flops * _efficiency(shape.tower.hidden))


def _streaming(gpu: Gpu) -> float:
    return gpu.bandwidth * known.ELEMENTWISE


def _elementwise(trainer: Trainer, gpu: Gpu, tokens: float, passes: float) -> float:
    """SwiGLU (9 i: three tensors forward, six backward), norms and sums (22 h), rotary embeddings (4 (q + kv)),
    attention's own passes (4 q), and rows that are sorted by expert and back (4 k h); ``passes`` 1 is forward and
    backward."""
    shape = trainer.shape
    elements = 9 * shape.intermediate + 22 * shape.hidden + 4 * (shape.q + shape.kv) + 4 * shape.q
    elements += 4 * shape.experts_per_token * shape.hidden
    if trainer.repeats_heads:
        elements += 4 * (shape.q + shape.kv)
    slower = 1.0 if trainer.policy.compiled else _EAGER
    return passes * slower * trainer.itemsize * elements * shape.layers * tokens / _streaming(gpu)


def _over_parameters(trainer: Trainer, gpu: Gpu, micro_batches: int) -> float:
    """AdamW, clipping, sums of gradients, and what FSDP2 casts, unpacks and lays out."""
    mine, master, b = trainer.trained / trainer.shards, trainer.master, trainer.itemsize
    moments = 2.0 if trainer.train.optim.name == "adamw_8bit" else 2.0 * master
    moved = mine * (3 * master + 2 * moments)  # AdamW: read weight, gradient, moments; write all but the gradient
    moved += 3 * master * mine  # the norm, and scaling
    everything, whole = trainer.shape.parameters, trainer.reduced
    if not trainer.sharded:
        moved += 3 * master * mine * (micro_batches - 1)
        return moved / (gpu.bandwidth * known.TENSOR_LISTS)
    gathers = 1 if trainer.train.gather_weights == "step" else 2 * micro_batches
    moved += gathers * ((master + b) * everything / trainer.shards + 2 * b * trainer.gathered)
    reductions = 1 if trainer.train.reduce_gradients == "step" else micro_batches
    moved += reductions * ((b + _FLOAT32) * whole + 3 * _FLOAT32 * mine)
    moved += (micro_batches - reductions) * (b + 2 * _FLOAT32) * whole  # summed where they are, in float32
    return moved / (gpu.bandwidth * known.TENSOR_LISTS)


def _collective_bytes(trainer: Trainer, micro_batches: int) -> float:
    """Sent by a worker in a step: weights gathered, gradients reduced, and summed over replicas."""
    shards, replicas = trainer.shards, trainer.world // trainer.shards
    gathers = 1 if trainer.train.gather_weights == "step" else 2 * micro_batches
    reductions = 1 if trainer.train.reduce_gradients == "step" else micro_batches
    sent = gathers * trainer.itemsize * _from_others(trainer)
    sent += reductions * _FLOAT32 * (trainer.trained * (1 - 1 / shards) if trainer.adapted else _from_others(trainer))
    return sent + reductions * 2 * _FLOAT32 * trainer.trained / shards * (1 - 1 / replicas)


def _from_others(trainer: Trainer) -> float:
    """Parameters that a worker gets from others when all weights are gathered: of experts that are shared out, parts of
    its own."""
    shape, shards, size = trainer.shape, trainer.shards, trainer.train.expert_parallel
    experts = shape.layers * shape.expert_parameters
    return (shape.parameters - experts) * (1 - 1 / shards) + experts / size * (1 - size / shards)


def routed_bytes(trainer: Trainer, tokens: float, passes: float) -> float:
    """Bytes that a worker sends for tokens whose experts are elsewhere, loads being even: there and back a pass.
    ``passes`` 2 is forward and backward, and a checkpointed layer does the first once more."""
    share, shape = trainer.train.expert_parallel, trainer.shape
    rows = shape.layers * shape.experts_per_token * tokens * (1 - 1 / share)
    return passes * 2 * trainer.itemsize * shape.hidden * rows


def _exchanged_bytes(trainer: Trainer, tokens: float, passes: float) -> float:
    """Sent by a worker for attention over shared sequences; ``passes`` 2 is forward and backward."""
    share, shape = trainer.train.sequence_parallel, trainer.shape
    return passes * trainer.itemsize * shape.layers * (2 * shape.q + 2 * shape.kv) * tokens * (1 - 1 / share)


def _host(trainer: Trainer, micro_batches: int, *, forward: float, backward: bool) -> float:
    """Return the host's seconds of so many passes forward, and one backward."""
    each = forward * known.HOST_FORWARD_S + backward * known.HOST_BACKWARD_S
    if trainer.sharded:
        kept = trainer.train.gather_weights == "step"
        gathers = 1.0 / micro_batches if kept and micro_batches else 1.0 + backward
        each += known.HOST_COLLECTIVE_S * (gathers + 2 * backward)
    return each * trainer.shape.layers * micro_batches


# ---------------------------------------------------------------------- sampling and weights


def generation_seconds(
    engine: EngineMemory,
    machine: Machine,
    *,
    episodes: int,
    prompt: float,
    response: float,
    longest: float,
    turns: float = 1.0,
    images: ImageLoad = NO_IMAGES,
) -> Seconds:
    """One engine samples ``episodes`` answers, side by side as far as they fit.

    Args:
        prompt, response, longest: tokens of a prompt, of an answer, and of the longest answer.
        turns: requests of an episode, whose answers are ``response`` together.
        images: of a prompt.
    """
    assert machine.gpu is not None
    gpu, shape, rollout = machine.gpu, engine.shape, engine.rollout
    fits = int(engine.tokens / max(1.0, prompt + response))
    at_once = max(1, min(engine.requests(episodes), fits or 1))
    waves = max(1.0, episodes / at_once)
    steps = longest + (waves - 1.0) * response  # a place that is free is filled at once
    read = engine.read_weights(at_once) + at_once * (prompt + response / 2) * engine.of_token
    memory = steps * read / (gpu.bandwidth * known.DECODE_BANDWIDTH)
    tokens = episodes * (prompt + response) / rollout.tensor_parallel
    compute = _products(shape, gpu, tokens, 1.0)
    if shape.tower is not None:
        seen = images.count * episodes * shape.tower.flops().forward([images.patches])
        compute += _tower(shape, gpu, seen / rollout.tensor_parallel, 1.0)
    # A step of few requests takes as long as launching its layers, one of many as long as its requests' bookkeeping.
    launching = steps * shape.layers * known.HOST_DECODE_S[engine.name]
    host = max(launching, episodes * response * known.HOST_TOKEN_S[engine.name])
    host += episodes * (turns - 1.0) * known.HOST_TURN_S[engine.name]
    return Seconds(compute, memory, 0.0, host)


def sync_seconds(
    trainer: Trainer, machine: Machine, transfer: str, engine: EngineName, in_fp8: Fp8Layers | None = None
) -> Seconds:
    """Return the time of a weight update with its check. ``in_fp8``: what of a layer is sent in FP8."""
    assert machine.gpu is not None
    gathered = wire = trainer.itemsize * float(trainer.shape.parameters)
    passes = 2.0 * gathered
    if in_fp8 is not None:
        wire -= trainer.shape.layers * in_fp8.saved_bytes(trainer.itemsize)
        passes += _QUANTIZING * trainer.shape.layers * in_fp8.elements
    passes += 2.0 * wire
    moved = passes / (machine.gpu.bandwidth * known.TENSOR_LISTS)  # gathered, into a bucket, and out of it
    rate = {"host": known.HOST_COPY, "broadcast": known.BROADCAST * machine.link(machine.total)}.get(transfer)
    sent = 0.0 if rate is None else wire / rate
    if trainer.shards > 1:
        sent += gathered / (known.COLLECTIVES * machine.link(trainer.world))
    return Seconds(0.0, moved, sent, 0.0, known.SYNC_S[engine])

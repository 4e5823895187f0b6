"""Parallelism and memory savers, put on a model from outside, in one order: checkpointing, compilation, FSDP2.

Nothing here changes the names of parameters or what a step computes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.utils.checkpoint import (
    SAC_IGNORED_OPS,
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

from posttrain.core.errors import ModelError
from posttrain.models import vision
from posttrain.train.expert_parallel import expert_modules, share_out

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from posttrain.train.model import PackedLM


def parallelize(
    lm: PackedLM,
    mesh: DeviceMesh | None,
    *,
    dtype: torch.dtype,
    activation_checkpointing: str,
    compiled: bool,
    keep_gathered: bool = False,
    cpu_offload: bool = False,
    experts: DeviceMesh | None = None,
) -> PackedLM:
    """Apply to every decoder layer, to the blocks of a vision tower, then to the rest as one.

    Args:
        mesh: what FSDP2 shards over, in its last dimension, and replicates over, in its first of two. None: the model
            is whole on one device and computes in the type of its parameters.
        dtype: compute type. Parameters keep theirs; gradients are reduced in float32.
        activation_checkpointing: none, selective or full (`train.activation_checkpointing`).
        compiled: whether layers run through ``torch.compile``.
        keep_gathered: leave the weights whole after a pass, for the next one, until ``reshard``.
        cpu_offload: keep parameters, gradients and optimizer state in host memory.
        experts: the grid of ``expert_parallel.expert_mesh``; None: experts are sharded as all else. Layers whose
            experts are shared out are not compiled: how many tokens come and go is known when they run.
    """
    layers = decoder_layers(lm.model)
    seeing = vision.tower(lm.model)
    kept = _EXPENSIVE
    if any(name.endswith("_proj_bias") for name, _ in lm.model.named_parameters()):
        kept -= {"aten._grouped_mm.default"}  # transformers adds the experts' biases to its result in place
    if compiled and activation_checkpointing != "none":
        # Routers keep what they saw in a forward pass, and that computed again in the backward pass is the same.
        torch._dynamo.config.skip_fwd_side_effects_in_bwd_under_checkpoint = True
    if activation_checkpointing == "selective":
        # Hooks of FSDP2 inside of a layer, on experts that are shared out, name what they do for a profiler, and do one
        # thing more when the layer is computed again: selective checkpointing would miss its result.
        marks = torch.ops.profiler
        SAC_IGNORED_OPS.update((marks._record_function_enter_new.default, marks._record_function_exit._RecordFunction))
    for layer in layers:
        forward: Callable[..., Any] = layer.forward
        if activation_checkpointing != "none":
            forward = _checkpointed(forward, activation_checkpointing, kept)
        if compiled and not (experts is not None and expert_modules(layer)):
            # The tokens of a micro-batch, its sequences and the longest of them are new nearly every time. Left to find
            # out, torch compiles for the first numbers, then again, and again in a later step when another one moves.
            forward = torch.compile(forward, dynamic=True)
            if layer is layers[0]:
                forward = partial(_with_gradient_of_input, forward)
        layer.forward = forward
    blocks = list(largest_list(seeing[0])) if seeing else []
    again = activation_checkpointing != "none" and any(p.requires_grad for block in blocks for p in block.parameters())
    for block in blocks:
        if again:
            block.forward = _checkpointed(block.forward, activation_checkpointing, kept)
        elif compiled:  # of a checkpointed one nothing would be: its attention is outside of graphs
            block.forward = torch.compile(block.forward, dynamic=True)
    if mesh is None:
        return lm
    policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32)
    on_gpu = mesh.device_type == "cuda"
    offload: OffloadPolicy = CPUOffloadPolicy(pin_memory=on_gpu) if cpu_offload else OffloadPolicy()
    for layer in layers:
        how: dict[str, Any] = {
            "mp_policy": policy, "offload_policy": offload, "reshard_after_forward": not keep_gathered
        }  # fmt: skip
        if experts is not None:
            for module in expert_modules(layer):
                share_out(module, experts, **how)
        fully_shard(layer, mesh=mesh, **how)
    # Some towers compute rotary embeddings in float32 once, and hand them from block to block as they are.
    as_is = policy if seeing and vision.in_tiles(lm.model.config) else replace(policy, cast_forward_inputs=False)
    for part in [*blocks, *seeing]:
        fully_shard(part, mesh=mesh, mp_policy=as_is, offload_policy=offload, reshard_after_forward=not keep_gathered)
    fully_shard(lm, mesh=mesh, mp_policy=policy, offload_policy=offload).set_reshard_after_backward(not keep_gathered)
    return lm


def reshard(lm: PackedLM) -> None:
    """Give up whole weights. They are in the compute type, the optimizer does not know them, and the next forward pass
    would use them again: so after the last pass before weights change, or are read.

    After a backward pass there are none unless ``keep_gathered``; after a forward pass alone the root module's stay.
    """
    for module in lm.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


def sharding_mesh(device: str, world_size: int, shard_size: int | None) -> DeviceMesh:
    """What ``parallelize`` shards over: all workers, or groups of ``shard_size`` beside each other as replicas."""
    if shard_size is None or shard_size == world_size:
        return init_device_mesh(device, (world_size,))
    return init_device_mesh(device, (world_size // shard_size, shard_size), mesh_dim_names=("replicate", "shard"))


def decoder_layers(model: PreTrainedModel) -> nn.ModuleList:
    """The list of transformer blocks of the language model."""
    return largest_list(vision.language_model(model))


def largest_list(module: nn.Module) -> nn.ModuleList:
    """The largest ``ModuleList`` of a module."""
    lists = [m for m in module.modules() if isinstance(m, nn.ModuleList)]
    if not lists:
        raise ModelError(f"no list of layers found in {type(module).__name__}")
    return max(lists, key=len)


def _with_gradient_of_input(forward: Callable[..., Any], hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
    """``forward`` of the first layer. Above frozen embeddings its input alone has no gradient, for which torch would
    compile it by itself; one that nobody reads takes a fraction of a layer's backward pass."""
    if torch.is_grad_enabled() and not hidden_states.requires_grad:
        hidden_states = hidden_states.detach().requires_grad_()
    return forward(hidden_states, *args, **kwargs)


def _checkpointed(forward: Callable[..., Any], how: str, kept: frozenset[str]) -> Callable[..., Any]:
    """``forward``, whose activations are computed again in the backward pass: all of them, or those that are cheap.
    ``kept``: the operators whose results are kept then."""
    options: dict[str, Any] = {"use_reentrant": False}
    if how == "selective":
        policy = partial(_keep_what_is_expensive, kept)
        options["context_fn"] = partial(create_selective_checkpoint_contexts, policy)
    return partial(checkpoint, forward, **options)


def _keep_what_is_expensive(
    kept: frozenset[str], context: Any, operator: Any, *args: Any, **kwargs: Any
) -> CheckpointPolicy:
    """Matrix products and attention. Norms, activations, rotary embeddings and products with the second factor of an
    adapter take memory and hardly any time."""
    if str(operator) not in kept or (str(operator) == "aten.mm.default" and _is_narrow(args[1])):
        return CheckpointPolicy.PREFER_RECOMPUTE
    return CheckpointPolicy.MUST_SAVE


def _is_narrow(factor: Tensor) -> bool:
    """Return whether a product with ``factor`` [in, out] takes little time for the memory that its result takes: as the
    second factor of an adapter, or of a model's own projection of low rank."""
    return _NARROW * factor.shape[0] <= factor.shape[1]


_NARROW = 16
"""Columns for each row of such a factor, at least. Layers of full rank widen by less."""


_EXPENSIVE = frozenset(
    {
        "aten.mm.default",
        "aten.addmm.default",
        "aten._grouped_mm.default",
        "aten._scaled_dot_product_flash_attention.default",
        "aten._scaled_dot_product_efficient_attention.default",
        "aten._scaled_dot_product_cudnn_attention.default",
        "aten._scaled_dot_product_flash_attention_for_cpu.default",
        "torch_attn._varlen_attn.default",
        "posttrain.flash4.default",
    }
)

"""Expert parallelism: each worker of a group holds some experts of every layer, whole, and tokens go to them.

The workers are a grid: those of a row share out the experts of a layer (the dimension ``expert``), and those of a
column hold the same experts, each a part of every matrix of them (the dimension ``shard``, by FSDP2). All else is
sharded over all workers as ever. A layer sorts its tokens by expert, sends each to the worker that has the expert, and
gets back what came of it: two exchanges forward and two backward. Weights of experts are gathered along columns alone.

Shape legend: S tokens of this worker, k experts a token, R rows that this worker computes for all of its row, D hidden
size, G workers of a row, E experts.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor, Shard

from posttrain.core.errors import ConfigError
from posttrain.models import grouped_experts

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

_EXPERT, _SHARD = "expert", "shard"


def expert_mesh(device: str, world_size: int, size: int) -> DeviceMesh | None:
    """Return the grid of workers, of which ``size`` neighbours share out experts; None: nobody does. A collective."""
    if size == 1:
        return None
    return init_device_mesh(device, (world_size // size, size), mesh_dim_names=(_SHARD, _EXPERT))


def is_expert_mesh(mesh: DeviceMesh) -> bool:
    """Return whether a mesh is that of ``expert_mesh``."""
    return _EXPERT in (mesh.mesh_dim_names or ())


def expert_modules(module: nn.Module) -> list[Any]:
    """Return the modules that hold experts of a layer in parameters whose first dimension is the expert."""
    return [m for m in module.modules() if type(m).__name__.endswith("Experts") and hasattr(m, "num_experts")]


def check_expert_parallel(config: PreTrainedConfig, size: int, shards: int = 1) -> None:
    """Check that the experts of a model can be shared out among ``size`` workers, and those of each among ``shards``.
    Raises ``ConfigError``."""
    if size == 1:
        return
    text: Any = config.get_text_config()
    experts = getattr(text, "num_local_experts", None) or getattr(text, "num_experts", None) or 0
    what = f"train.expert_parallel = {size}"
    if not experts:
        raise ConfigError(f"{what}: models of type {text.model_type} have no experts", hint="leave it out")
    if experts % size:
        raise ConfigError(f"{what} does not divide the {experts} experts of the model", hint="choose a divisor")
    width = getattr(text, "moe_intermediate_size", None) or text.intermediate_size
    if text.hidden_size % shards or (2 * width) % shards:
        raise ConfigError(
            f"{what} leaves {shards} workers for each expert, which cannot share matrices of {text.hidden_size} and "
            f"{2 * width} rows",
            hint="choose a larger train.expert_parallel",
        )


def share_out(experts: Any, mesh: DeviceMesh, **fsdp: Any) -> None:
    """Leave this worker its experts of a module on the meta device, and let tokens go to where theirs are.

    Args:
        fsdp: further arguments of ``fully_shard``.
    """
    along, group = mesh[_EXPERT], mesh.get_group(_EXPERT)
    mine = experts.num_experts // along.size()
    for name, parameter in list(experts.named_parameters(recurse=False)):
        part = DTensor.from_local(parameter.data[:mine].clone(), along, [Shard(0)], run_check=False)
        setattr(experts, name, nn.Parameter(part, requires_grad=parameter.requires_grad))
    experts.num_experts = mine
    experts.forward = partial(_exchanged, partial(_local_forward, experts, experts.forward, mesh.size()), group, mine)
    fully_shard(experts, mesh=mesh[_SHARD], shard_placement_fn=lambda parameter: Shard(1), **fsdp)
    sharded = cast(FSDPModule, experts)
    # The sum over all workers is to be averaged, of which a column adds up a part: `_local_forward` divides.
    sharded.set_gradient_divide_factor(1.0)
    sharded.set_force_sum_reduction_for_comms(True)


def _local_forward(experts: Any, forward: Callable[..., Tensor], workers: int, *args: Tensor) -> Tensor:
    """Return what ``forward`` of a module gives with this worker's part of its parameters as plain tensors, which
    grouped products take. Gradients that reach the parameters are divided by ``workers``."""
    held = dict(experts._parameters)
    local = {name: parameter.to_local() for name, parameter in held.items()}
    for part in local.values():
        if part.requires_grad:
            part.register_hook(lambda grad: grad / workers)
    experts._parameters.update(local)
    try:
        return forward(*args)
    finally:
        experts._parameters.update(held)


def _exchanged(
    forward: Callable[..., Tensor],
    group: dist.ProcessGroup,
    mine: int,
    hidden_states: Tensor,
    top_k_index: Tensor,
    top_k_weights: Tensor,
) -> Tensor:
    """What ``forward`` gives with all experts: hidden states [S, D], experts and weights [S, k] -> [S, D]."""
    size = group.size()
    by_expert = grouped_experts.sort(top_k_index)
    sent = torch.bincount(top_k_index.flatten(), minlength=size * mine).view(size, mine)
    received = torch.empty_like(sent)
    dist.all_to_all_single(received, sent, group=group)
    splits = torch.stack([sent.sum(1), received.sum(1)]).tolist()
    rows = _exchange(grouped_experts.spread(hidden_states, by_expert), splits[0], splits[1], group)
    expert = torch.arange(mine, device=rows.device).repeat(size).repeat_interleave(received.flatten())
    # One row more, of which nothing comes: a worker that gets no tokens still takes part in all that follows.
    rows, expert = torch.cat([rows, rows.new_zeros(1, rows.shape[1])]), torch.cat([expert, expert.new_zeros(1)])
    done = forward(rows, expert[:, None], rows.new_ones(len(rows), 1))[:-1]
    back = _exchange(done, splits[1], splits[0], group)
    weighed = grouped_experts.weigh(back, top_k_weights, by_expert)
    return grouped_experts.mix(weighed, by_expert, top_k_index.shape[1]).to(hidden_states.dtype)


def _exchange(x: Tensor, sent: Sequence[int], received: Sequence[int], group: dist.ProcessGroup) -> Tensor:
    result: Tensor = _Exchange.apply(x, sent, received, group)  # type: ignore[no-untyped-call]
    return result


class _Exchange(torch.autograd.Function):
    """Rows to the other workers, so many to each; gradients the way back."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, sent: Sequence[int], received: Sequence[int], group: dist.ProcessGroup) -> Tensor:
        ctx.sent, ctx.received, ctx.group = sent, received, group
        return _all_to_all(x, sent, received, group)

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor) -> tuple[Tensor, None, None, None]:
        return _all_to_all(upstream[0], ctx.received, ctx.sent, ctx.group), None, None, None


def _all_to_all(x: Tensor, sent: Sequence[int], received: Sequence[int], group: dist.ProcessGroup) -> Tensor:
    out = x.new_empty(sum(received), x.shape[1])
    dist.all_to_all_single(out, x.contiguous(), list(received), list(sent), group=group)
    return out

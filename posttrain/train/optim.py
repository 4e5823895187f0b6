"""AdamW in its variants, gradient clipping."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from contextlib import nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._functorch import config as functorch_config
from torch.distributed.tensor import DTensor

from posttrain.config import OptimConfig
from posttrain.train.expert_parallel import is_expert_mesh


def build_optimizer(model: nn.Module, cfg: OptimConfig) -> torch.optim.Optimizer:
    """AdamW with weight decay on matrices only: not on norms, biases or embeddings.

    Eight-bit moments (arXiv:2110.02861) and stochastic rounding are torchao's.
    """
    embeddings = {p for m in model.modules() if isinstance(m, nn.Embedding) for p in m.parameters(recurse=False)}
    decay: list[nn.Parameter] = []
    plain: list[nn.Parameter] = []
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            # Biases of experts have a row for each.
            matrix = parameter.ndim >= 2 and parameter not in embeddings and not name.endswith("bias")
            (decay if matrix else plain).append(parameter)
    groups = [
        {"params": params, "weight_decay": rate}
        for all_params, rate in ((decay, cfg.weight_decay), (plain, 0.0))
        for params in _by_mesh(all_params)
    ]
    if not cfg.needs_torchao:
        return torch.optim.AdamW(groups, lr=cfg.lr, betas=cfg.betas, eps=cfg.eps, fused=True)
    from torchao import optim as torchao

    variant = torchao.AdamW8bit if cfg.name == "adamw_8bit" else torchao._AdamW
    optimizer: torch.optim.Optimizer = variant(
        groups, lr=cfg.lr, betas=cfg.betas, eps=cfg.eps, bf16_stochastic_round=cfg.stochastic_rounding
    )
    return optimizer


def _by_mesh(parameters: list[nn.Parameter]) -> list[list[nn.Parameter]]:
    """Return the parameters apart that are sharded over different meshes: one kernel cannot update both."""
    found: dict[Any, list[nn.Parameter]] = {}
    for parameter in parameters:
        mesh = parameter.device_mesh if isinstance(parameter, DTensor) else None
        found.setdefault(mesh, []).append(parameter)
    return list(found.values())


def set_learning_rate(optimizer: torch.optim.Optimizer, rate: float) -> None:
    """Set the rate of all parameter groups. torchao keeps the rate in a tensor, which its compiled step reads."""
    for group in optimizer.param_groups:
        if isinstance(group["lr"], Tensor):
            group["lr"].fill_(rate)
        else:
            group["lr"] = rate


def take_step(optimizer: torch.optim.Optimizer, rate: float, *, compiled: bool = True) -> None:
    """One step at a learning rate. ``compiled`` is about optimizers that compile their step by themselves."""
    set_learning_rate(optimizer, rate)
    eager = nullcontext() if compiled else torch.compiler.set_stance("force_eager")
    # torchao compiles its step, and the cache of such compilations, which processes share, does not tell apart shards
    # of one parameter that differ in size.
    with functorch_config.patch(enable_autograd_cache=False), eager:
        optimizer.step()


def seed_rounding(seed: int, step: int, shard: int) -> None:
    """Make the stochastic rounding of the next step depend on these alone, so that a resumed run rounds as one that was
    never stopped. ``shard`` tells parts of the weights from each other; replicas of a part must have the same."""
    digest = hashlib.blake2b(f"{seed} {step} {shard}".encode(), digest_size=8).digest()
    torch.manual_seed(int.from_bytes(digest))


# ---------------------------------------------------------------------- state


def init_state(optimizer: torch.optim.Optimizer) -> None:
    """Give every trained parameter the state that it has before the first step. Gradients are dropped.

    An optimizer makes its state while it steps: here it takes a step that changes nothing, with gradients and a rate of
    zero.
    """
    optimizer.zero_grad(set_to_none=True)
    new = [p for group in optimizer.param_groups for p in group["params"] if not optimizer.state[p]]
    if not new:
        return
    for parameter in new:
        parameter.grad = torch.zeros_like(parameter)
    rate = float(optimizer.param_groups[0]["lr"])
    take_step(optimizer, 0.0, compiled=False)  # to compile takes longer than this one step
    set_learning_rate(optimizer, rate)
    for parameter in new:
        optimizer.state[parameter]["step"].zero_()
    optimizer.zero_grad(set_to_none=True)


def is_quantized(state: Tensor) -> bool:
    """Return whether a tensor of an optimizer's state is in torchao's blocks of 8 bits with a scale each."""
    return hasattr(local(state), "codes")


@torch.no_grad()
def dequantized(state: Tensor) -> Tensor:
    """A quantized tensor in float32, in host memory. ``quantize`` makes the same codes and scales of it again.

    Plain numbers can be saved by one world size and loaded by any other: blocks need not end where shards do.
    """
    part = local(state)
    levels = part.qmap.clone()  # type: ignore[attr-defined]
    if part.signed:  # type: ignore[attr-defined]
        levels[0] = -1.0  # what becomes code 0 may be the largest of its block, which sets the scale
    codes, scale = part.codes, part.scale  # type: ignore[attr-defined]
    values: Tensor = (levels[codes.int()].view(len(scale), -1) * scale[:, None]).view(codes.shape)
    if isinstance(state, DTensor):
        values = DTensor.from_local(
            values,
            state.device_mesh,
            state.placements,
            run_check=False,
            shape=state.shape,
            stride=state.stride(),
        )
    return values.to("cpu")


@torch.no_grad()
def quantize(state: Tensor, values: Tensor) -> None:
    """Write values, sharded as the state is, into a quantized tensor."""
    local(state).copy_(local(values).to(state.device))


# ---------------------------------------------------------------------- gradients


def clip_gradients(parameters: Iterable[nn.Parameter], largest: float) -> Tensor:
    """Scale gradients down so that their global norm is at most ``largest``; a collective where they are sharded.

    Returns:
        [] float32: the L2 norm before that, in float32 whatever the gradients' type. A norm that is not finite leaves
        gradients of no use.
    """
    gradients = [p.grad for p in parameters if p.grad is not None]
    parts = [local(grad) for grad in gradients]
    square = torch.stack([torch.linalg.vector_norm(part, dtype=torch.float32) for part in parts]).square().sum()
    meshes = [grad.device_mesh for grad in gradients if isinstance(grad, DTensor)]
    if meshes:
        # Replicas (hybrid sharding) hold the same gradients: only the last dimension of the mesh shares them out. With
        # expert parallelism all workers share out all gradients, as the mesh of those that are no experts' says.
        mesh = next((mesh for mesh in meshes if not is_expert_mesh(mesh)), meshes[0])
        square = square.to(mesh.device_type)  # offloaded gradients are on the CPU
        dist.all_reduce(square, group=mesh.get_group(-1))
    norm = square.sqrt()
    scale = largest / (float(norm) + 1e-6)
    if scale < 1.0:  # a number, not a tensor: multiplying half-precision lists by a tensor takes five times as long
        torch._foreach_mul_(parts, scale)
    return norm


def local(tensor: Tensor) -> Tensor:
    """This process's part of a tensor that may be sharded."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor

"""AdamW and learning-rate schedules."""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from posttrain.config import OptimConfig


def build_optimizer(model: nn.Module, cfg: OptimConfig) -> torch.optim.AdamW:
    """AdamW with weight decay on matrices only: not on norms, biases or embeddings."""
    embeddings = {p for m in model.modules() if isinstance(m, nn.Embedding) for p in m.parameters(recurse=False)}
    decay: list[nn.Parameter] = []
    plain: list[nn.Parameter] = []
    for parameter in model.parameters():
        if parameter.requires_grad:
            (decay if parameter.ndim >= 2 and parameter not in embeddings else plain).append(parameter)
    groups = [{"params": decay, "weight_decay": cfg.weight_decay}, {"params": plain, "weight_decay": 0.0}]
    return torch.optim.AdamW([g for g in groups if g["params"]], lr=cfg.lr, betas=cfg.betas, eps=cfg.eps, fused=True)


def clip_gradients(parameters: Iterable[nn.Parameter], largest: float) -> Tensor:
    """Scale gradients down so that their global norm is at most ``largest``; a collective where they are sharded.

    Returns:
        [] float32: the L2 norm before that, in float32 whatever the gradients' type. A norm that is not finite leaves
        gradients of no use.
    """
    gradients = [p.grad for p in parameters if p.grad is not None]
    parts = [local(grad) for grad in gradients]
    square = torch.stack([torch.linalg.vector_norm(part, dtype=torch.float32) for part in parts]).square().sum()
    if isinstance(gradients[0], DTensor):
        # Replicas (hybrid sharding) hold the same gradients: only the last dimension of the mesh shares them out.
        square = square.to(gradients[0].device_mesh.device_type)  # offloaded gradients are on the CPU
        dist.all_reduce(square, group=gradients[0].device_mesh.get_group(-1))
    norm = square.sqrt()
    scale = largest / (float(norm) + 1e-6)
    if scale < 1.0:  # a number, not a tensor: multiplying half-precision lists by a tensor takes five times as long
        torch._foreach_mul_(parts, scale)
    return norm


def local(tensor: Tensor) -> Tensor:
    """This process's part of a tensor that may be sharded."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def learning_rate(cfg: OptimConfig, step: int, total_steps: int) -> float:
    """The rate at optimizer step ``step`` (from 0) of ``total_steps``."""
    warmup = round(cfg.warmup_ratio * total_steps)
    if step < warmup:
        return cfg.lr * (step + 1) / warmup
    if cfg.schedule == "constant":
        return cfg.lr
    progress = (step - warmup) / max(1, total_steps - warmup)
    progress = min(1.0, progress)
    shape = 0.5 * (1.0 + math.cos(math.pi * progress)) if cfg.schedule == "cosine" else 1.0 - progress
    return cfg.lr * (cfg.min_lr_ratio + (1.0 - cfg.min_lr_ratio) * shape)

"""AdamW and learning-rate schedules."""

from __future__ import annotations

import math

import torch
from torch import nn

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

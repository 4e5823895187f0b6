"""Learning-rate schedules."""

from __future__ import annotations

import math

from posttrain.config import OptimConfig


def learning_rate(cfg: OptimConfig, step: int, total_steps: int) -> float:
    """The rate at optimizer step ``step`` (from 0) of ``total_steps``."""
    warmup = round(cfg.warmup_ratio * total_steps) if cfg.warmup_steps is None else cfg.warmup_steps
    if step < warmup:
        return cfg.lr * (step + 1) / warmup
    if cfg.schedule == "constant":
        return cfg.lr
    progress = (step - warmup) / max(1, total_steps - warmup)
    progress = min(1.0, progress)
    shape = 0.5 * (1.0 + math.cos(math.pi * progress)) if cfg.schedule == "cosine" else 1.0 - progress
    return cfg.lr * (cfg.min_lr_ratio + (1.0 - cfg.min_lr_ratio) * shape)

"""`posttrain generate`: responses to a parquet of prompts, n of each, multi-turn with tools or single-turn."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from contextlib import AsyncExitStack
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from posttrain.cluster.cluster import Cluster
from posttrain.data.parquet import append_columns, read_prompts
from posttrain.errors import DataError
from posttrain.presets import Resolved
from posttrain.registry import load_plugins
from posttrain.rollout.pool import SamplerPool
from posttrain.rollout.served import open_server
from posttrain.rollout.source import TrajectorySource
from posttrain.startup import build_environment, check_machine, check_prompts, check_supported, open_model, sampling_of
from posttrain.tools.sets import close_tools
from posttrain.track.tracker import Tracker

if TYPE_CHECKING:
    from posttrain.config import Config
    from posttrain.models.load import ModelSource
    from posttrain.rollout.episode import Environment
    from posttrain.types import Prompt, Trajectory

_CHUNK = 64
"""Prompts between two lines of progress."""


def run(resolved: Resolved) -> Path:
    """Sample ``rollout.n`` responses to each prompt of ``generate.data``; returns the parquet written.

    Raises:
        UserError: bad config, data or model, or the output exists, before anything is written.
    """
    cfg = resolved.config
    load_plugins(cfg.plugins)
    if not cfg.generate.data:
        raise DataError("no prompts", hint="give --data FILE.parquet (posttrain prep writes it)")
    out = Path(cfg.generate.out or Path(cfg.run.dir) / cfg.run.name / "responses.parquet")
    if out.exists() and not cfg.run.overwrite:
        raise DataError(f"output file exists: {out}", hint="give another --out, or --overwrite")
    prompts = read_prompts(cfg.generate.data, limit=cfg.generate.limit)
    source, tokenizer = open_model(cfg)
    if not cfg.generate.endpoint.url:
        check_supported(cfg)
        check_machine(cfg)
    env = build_environment(cfg, source, tokenizer)
    check_prompts(prompts, env, cfg.generate.data)
    chunks = [prompts[i : i + _CHUNK] for i in range(0, len(prompts), _CHUNK)]
    with Tracker(None, f"generate {cfg.run.name}", len(chunks), cfg.run.logger, console=cfg.run.console) as tracker:
        tracker.note(
            f"{len(prompts):,} prompts x {cfg.rollout.n} responses with {cfg.generate.endpoint.url or source.path}"
        )
        groups = asyncio.run(_generate(cfg, source, env, chunks, tracker))
        out.parent.mkdir(parents=True, exist_ok=True)
        append_columns(Path(cfg.generate.data), out, response_columns(groups))
        tracker.note(f"wrote {out}")
    return out


async def _generate(
    cfg: Config,
    source: ModelSource,
    env: Environment,
    chunks: Sequence[Sequence[Prompt]],
    tracker: Tracker,
) -> list[list[Trajectory]]:
    async with AsyncExitStack() as closing:
        closing.push_async_callback(close_tools, env.tools, tracker.note)
        with tracker.phase("start"):
            pool = await _open_pool(cfg, source, env, closing)
            trajectories = TrajectorySource(pool, env)  # nothing is graded here: `posttrain eval` does that
            tracker.watch(trajectories.in_flight)
        groups: list[list[Trajectory]] = []
        for step, chunk in enumerate(chunks, start=1):
            with tracker.phase("gen"):
                new = await trajectories.sample(chunk, cfg.rollout.n, sampling_of(cfg.rollout))
            groups += new
            tracker.sampled(new)
            episodes = [t for group in new for t in group]
            sampled = float(sum(t.loss_mask.sum() for t in episodes))
            tracker.log(
                step,
                {
                    "response_length/mean": sum(t.response_length for t in episodes) / len(episodes),
                    "rollout/failed": float(trajectories.stats.failed),
                    "perf/total_num_tokens": sampled,
                },
            )
    return groups


async def _open_pool(cfg: Config, source: ModelSource, env: Environment, closing: AsyncExitStack) -> SamplerPool:
    """Engines started here, or the server of `generate.endpoint`."""
    stops = sorted(env.stop_token_ids)
    if cfg.generate.endpoint.url:
        served = await open_server(cfg.generate.endpoint, env.tokenizer, stops)
        closing.push_async_callback(served.close)
        return SamplerPool([served])
    cluster = await closing.enter_async_context(Cluster(cfg))
    samplers = await cluster.samplers(source, stops)
    pool = SamplerPool(samplers, partial(cluster.sampler, source, stops), cfg.cluster.sampler_restarts)
    closing.push_async_callback(pool.close)
    return pool


def response_columns(groups: Sequence[Sequence[Trajectory]]) -> dict[str, list[Any]]:
    """One entry a prompt: a list with an element for each response."""
    return {
        "responses": [[t.response_text for t in g] for g in groups],
        "response_ids": [[t.tokens[t.prompt_length :].tolist() for t in g] for g in groups],
        "response_masks": [[t.loss_mask[t.prompt_length :].tolist() for t in g] for g in groups],
        "conversations": [[json.dumps(t.messages, ensure_ascii=False) for t in g] for g in groups],
        "stop_reasons": [[t.stop_reason for t in g] for g in groups],
        "num_turns": [[t.turns for t in g] for g in groups],
        "errors": [[t.error for t in g] for g in groups],
    }

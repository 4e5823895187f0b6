"""`posttrain generate`: responses to a parquet of prompts, n of each, multi-turn with tools or single-turn, or
episodes of environments and agents.

Prompts stream in and finished rows go to part files (`generation.output`), so memory does not grow with the number of
prompts, and a run that was ended in any way goes on with the same command. Each request has a seed of its own: rows do
not depend on when and beside what they are sampled, as far as the engine allows (docs/evaluate.md).
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import AsyncExitStack
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

import numpy as np

from posttrain import __version__
from posttrain.cluster.cluster import Cluster
from posttrain.config.presets import Resolved
from posttrain.config.writing import flatten_config
from posttrain.core.errors import ConfigError, DataError, RunError
from posttrain.core.files import refuse_inputs
from posttrain.core.registry import load_plugins
from posttrain.engines.remote import open_server
from posttrain.generation.output import (
    MANIFEST,
    TELLING,
    ResponseParts,
    differences,
    further_columns,
    manifest_in,
    manifest_of,
    parts_folder,
)
from posttrain.generation.tasks import Tasks, own_tasks, rows_of
from posttrain.models.load import mark_of
from posttrain.rollout.pool import SamplerPool
from posttrain.rollout.window import Window
from posttrain.runs.episodes import episode_context
from posttrain.runs.preflight import check_machine, check_supported, engine_note, open_model, sampling_of, with_engine
from posttrain.runs.prompts import check_prompts
from posttrain.runs.quantization import check_quantization
from posttrain.runs.run import StopSignal
from posttrain.tools.base import telling
from posttrain.tools.sets import close_tools
from posttrain.tracking.rules import rules_of
from posttrain.tracking.tracker import Tracker

if TYPE_CHECKING:
    from posttrain.config import Config
    from posttrain.core.types import Prompt, Trajectory
    from posttrain.models.load import ModelSource
    from posttrain.rollout.context import EpisodeContext

_LOOK_S = 0.25
"""Between two looks at whether somebody asks to stop."""
_FLUSH_S = 2.0
"""Rows wait at most so long, and at most a hundredth of the time so far, until they are written: a run of days makes
hundreds of parts."""
_MOST_ROWS, _MOST_TOKENS = 512, 4 << 20
"""Rows, and response tokens of them, that may wait."""
_AHEAD = 1.25
"""Episodes at once, by what the engines run at once: while one waits for a tool, another one samples."""
_MOST_FAILED, _MOST_GROUPS = 100, 4
"""So many episodes that fail in a row, of so many prompts, are no trouble of theirs."""

_SETTINGS = (
    "model.", "rollout.", "tools.", "plugins", "run.seed", "train.dtype",
    "data.enable_thinking", "data.template_kwargs",
)  # fmt: skip
_NO_MATTER = frozenset(
    f"rollout.{name}" for name in ("replicas", "tensor_parallel", "memory_fraction", "kv_tokens", "max_concurrent")
)
"""Beginnings of the keys that rows depend on; those among them that change the speed alone."""


def run(resolved: Resolved, *, reuse: bool = False) -> Path:
    """Sample ``rollout.n`` responses to each prompt of ``generate.data``, or to each task that the environment or the
    agent brings; returns the parquet written.

    Args:
        reuse: a finished file of the same settings, data and seeds is the result.

    Raises:
        UserError: bad config, data or model, the output exists, or its parts are of other settings; before anything is
            sampled.
        RunError: engines or the server failed. Rows that were finished are kept, and the same command goes on.
        Interrupted: somebody asked to stop; likewise.
    """
    cfg = resolved.config
    load_plugins(cfg.plugins)
    resolved = with_engine(resolved)
    cfg = resolved.config
    out, data, limit = output_of(cfg), cfg.generate.data, cfg.generate.limit
    if not data and not cfg.rollout.env and not cfg.rollout.has_agent:
        raise DataError("no prompts", hint="give --data FILE.parquet (posttrain prep writes it)")
    _check_output(out, cfg, reuse)
    tasks = rows_of(data, limit) if data else None
    source, tokenizer = open_model(cfg)
    if not cfg.generate.endpoint.url:
        check_supported(cfg)
        check_machine(cfg)
    in_fp8 = check_quantization(cfg, source)
    env = None
    if tasks is None:
        env = episode_context(cfg, source, tokenizer)
        tasks = own_tasks(env, limit)
    count = tasks.count
    manifest = manifest_of(settings_of(cfg, source), tasks.name, __version__, tasks.sha256)
    if out.exists() and not cfg.run.overwrite and not parts_folder(out).exists():
        return _reused(out, manifest, count)
    env = env or episode_context(cfg, source, tokenizer)
    manifest |= {TELLING: telling(env.tools.values())}
    with (
        StopSignal() as stop,
        Tracker(
            None, f"generate {cfg.run.name}", count, cfg.run.logger, console=cfg.run.console, rules=rules_of(cfg)
        ) as tracker,
    ):
        if cfg.run.overwrite or not (parts_folder(out) / MANIFEST).exists():
            with tracker.phase("start"):
                check_prompts(tasks.prompts(), env, tasks.name)
                if cfg.generate.endpoint.url:
                    asyncio.run(_check_server(cfg, env))
        parts = _open_parts(out, manifest, count, further_columns(env), overwrite=cfg.run.overwrite)
        try:
            for note in filter(None, [tasks.note, *parts.notes]):
                tracker.note(note)
            done = int(parts.done.sum())
            where = cfg.generate.endpoint.url or source.path
            tracker.note(f"{count:,} prompts x {cfg.rollout.n} responses with {where}")
            if not cfg.generate.endpoint.url:
                tracker.note(engine_note(resolved))
            for note in in_fp8:
                tracker.note(note)
            if done:
                tracker.note(f"{done:,} prompts are done already")
            if done < count and out.exists():  # a finished file lies beside complete parts only
                raise DataError(f"output file exists: {out}", hint="give another --out, or --overwrite")
            if done < count:
                asyncio.run(_generate(cfg, source, env, tasks, parts, tracker, stop))
            with tracker.phase("write"):
                parts.finish(tasks.file(parts.folder), out)
        finally:
            parts.close()
        tracker.note(f"wrote {out}")
    return out


def output_of(cfg: Config) -> Path:
    """The file that is written. Raises ``ConfigError`` where neither it nor the run has a name."""
    if not cfg.generate.out and not cfg.run.name:
        raise ConfigError("run.name = '' is not a folder name", hint="give one with --name NAME, or --out FILE")
    return Path(cfg.generate.out or Path(cfg.run.dir) / cfg.run.name / "responses.parquet")


def settings_of(cfg: Config, source: ModelSource) -> dict[str, Any]:
    """What rows depend on, by config key. Of the model: where it was found, and whether its files are the same."""
    flat = {key: value for key, value in flatten_config(cfg).items() if key.startswith(_SETTINGS)}
    flat = {key: value for key, value in flat.items() if key not in _NO_MATTER}
    flat["model.path"] = " + ".join([source.shards or source.path, *source.adapters])
    if (mark := mark_of(source)) is not None and not cfg.generate.endpoint.url:
        flat["model.files"] = mark
    if cfg.generate.endpoint.url:
        flat["generate.endpoint.model"] = cfg.generate.endpoint.model
    return flat


def _check_output(out: Path, cfg: Config, reuse: bool) -> None:
    """A file that exists is the result of a process that was ended before it could clean up, or it stays. It is never
    that of the prompts."""
    if cfg.generate.data:
        refuse_inputs(out, "--out", [cfg.generate.data])
    if out.exists() and not cfg.run.overwrite and not reuse and not parts_folder(out).exists():
        raise DataError(f"output file exists: {out}", hint="give another --out, or --overwrite")


def _reused(out: Path, manifest: dict[str, Any], count: int) -> Path:
    found = manifest_in(out)
    lines = ["it was not written by `posttrain generate`"] if found is None else differences(found, manifest)
    if not lines and (rows := rows_of(str(out), None).count) != count:
        lines = [f"generate.limit: it has {rows} prompts, and {count} are asked for"]
    if lines:
        raise DataError(
            f"{out} was made with other settings:\n  " + "\n  ".join(lines[:5]),
            hint="give another --name or --out, or --overwrite",
        )
    return out


def _open_parts(
    out: Path, manifest: dict[str, Any], count: int, further: Sequence[str], *, overwrite: bool
) -> ResponseParts:
    manifest = manifest | {"overwrite": overwrite}
    if overwrite and not ResponseParts.goes_on(out, manifest):
        if parts_folder(out).exists():
            ResponseParts.discard(out)
        # Now, so that a file beside parts always means that nothing but their removal is left to do.
        out.unlink(missing_ok=True)
    return ResponseParts.open(out, manifest, count, further)


async def _generate(
    cfg: Config,
    source: ModelSource,
    env: EpisodeContext,
    tasks: Tasks,
    parts: ResponseParts,
    tracker: Tracker,
    stop: StopSignal,
) -> None:
    """Sample the rows that are not there yet. Raises ``RunError``, ``Interrupted``."""
    async with AsyncExitStack() as closing:
        closing.push_async_callback(close_tools, env.tools, tracker.note)
        if env.agents is not None:
            await closing.enter_async_context(env.agents.player)
        with tracker.phase("start"):
            pool, capacity = await _open_pool(cfg, source, env, closing)
        recorder = await closing.enter_async_context(Recorder(parts, tracker, tasks))
        window = Window(
            pool, env, sampling_of(cfg.rollout), _missing(tasks, parts),
            n=cfg.rollout.n, most=int(_AHEAD * capacity) + 1, seed=cfg.run.seed,
        )  # fmt: skip
        await closing.enter_async_context(window)
        tracker.watch(window.in_flight)
        with tracker.phase("gen"):
            await _play(window, pool, recorder, stop, begun=bool(parts.done.any()))
    if not parts.done.all():
        raise stop.interrupted(f"{parts.done.sum():,} of {len(parts.done):,} prompts")


async def _play(window: Window, pool: SamplerPool, recorder: Recorder, stop: StopSignal, *, begun: bool = True) -> None:
    """Hand what the window plays to the recorder, until all is done or somebody asks to stop.

    Args:
        begun: there are rows from before.

    Raises:
        RunError: many episodes failed in a row, or all of a run that has not one row.
    """
    held: list[list[Trajectory]] = []  # failed groups, until a success shows that the trouble is theirs
    while not window.over and not stop.requested:
        for group in await window.finished(_LOOK_S):
            failure = next((t.error for t in group if t.error is not None), None)
            if failure is not None and not pool.samplers:
                await pool.settled()
            held.append(group)
            if any(t.error is None for t in group):
                recorder.add(held)
                held, begun = [], True
            elif len(held) >= _MOST_GROUPS and sum(map(len, held)) >= _MOST_FAILED:
                raise RunError(
                    f"the last {sum(map(len, held))} episodes failed, the last with: {failure}",
                    hint="rows before them are kept; when the cause is gone, the same command goes on from there",
                )
        await recorder.write_if_due()
    if stop.requested:
        return
    if held and not begun:
        raise RunError(
            f"all {sum(map(len, held))} episodes failed, the last with: {failure}",
            hint="nothing is written; when the cause is gone, give the same command again",
        )
    recorder.add(held)


def _missing(tasks: Tasks, parts: ResponseParts) -> Iterator[Prompt]:
    """The prompts that have no row yet."""
    missing = ~parts.done
    return (prompt for prompt in tasks.prompts() if missing[tasks.row(prompt)])


async def _check_server(cfg: Config, env: EpisodeContext) -> None:
    """Check that the server answers, before anything is written or replaced. Raises ``ConfigError``."""
    served = await open_server(cfg.generate.endpoint, env.tokenizer, sorted(env.stop_token_ids))
    await served.close()


async def _open_pool(
    cfg: Config, source: ModelSource, env: EpisodeContext, closing: AsyncExitStack
) -> tuple[SamplerPool, int]:
    """Return engines started here, or the server of `generate.endpoint`, and how many requests these run at once."""
    stops = sorted(env.stop_token_ids)
    if cfg.generate.endpoint.url:
        served = await open_server(cfg.generate.endpoint, env.tokenizer, stops)
        closing.push_async_callback(served.close)
        return SamplerPool([served]), cfg.generate.endpoint.concurrency
    cluster = await closing.enter_async_context(Cluster(cfg))
    samplers = await cluster.samplers(source, stops)
    pool = SamplerPool(samplers, partial(cluster.sampler, source, stops), cfg.cluster.sampler_restarts)
    closing.push_async_callback(pool.close)
    return pool, sum(sampler.max_concurrent for sampler in samplers)


class Recorder:
    """Writes finished groups, in a thread and some at a time, and reports them. A context manager: at its end, however
    that comes about, what waits is written."""

    def __init__(self, parts: ResponseParts, tracker: Tracker, tasks: Tasks) -> None:
        self._parts, self._tracker, self._tasks = parts, tracker, tasks
        self._waiting: list[tuple[int, Sequence[Trajectory]]] = []
        self._tokens = 0
        self._writing: asyncio.Task[None] | None = None
        self._began = self._last = time.monotonic()
        self._rate: deque[tuple[float, float]] = deque(maxlen=20)
        """Tokens and seconds of the last parts: rows come in waves."""

    async def __aenter__(self) -> Self:
        self._tracker.log(int(self._parts.done.sum()), {})  # the start is no part of the speed
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None
    ) -> None:
        await self._written()
        if self._waiting:
            self._write()
            await self._written()

    def add(self, groups: Sequence[Sequence[Trajectory]]) -> None:
        self._waiting += [(self._tasks.row(group[0].prompt), group) for group in groups]
        self._tokens += sum(t.response_length for group in groups for t in group)

    async def write_if_due(self) -> None:
        """Begin to write what waits, where it is time. Sampling waits for the disk only where that is far behind."""
        now = time.monotonic()
        full = len(self._waiting) >= _MOST_ROWS or self._tokens >= _MOST_TOKENS
        late = bool(self._waiting) and now - self._last >= max(_FLUSH_S, (now - self._began) / 100)
        if not full and not late:
            return
        if full:
            await self._written()
        if self._writing is None or self._writing.done():
            await self._written()
            self._write()

    def _write(self) -> None:
        rows, self._waiting, self._tokens = self._waiting, [], 0
        now = time.monotonic()
        seconds, self._last = now - self._last, now
        self._writing = asyncio.create_task(self._write_and_report(rows, seconds))

    async def _write_and_report(self, rows: list[tuple[int, Sequence[Trajectory]]], seconds: float) -> None:
        await asyncio.to_thread(self._parts.write, rows)
        episodes = [t for _, group in rows for t in group]
        sampled = float(sum(np.count_nonzero(t.loss_mask) for t in episodes))
        self._rate.append((sampled, seconds))
        self._tracker.sampled([group for _, group in rows])
        failure = next((t.error for t in episodes if t.error is not None), None)
        self._tracker.failed({} if failure is None else {"episode": failure})
        self._tracker.log(
            int(self._parts.done.sum()),
            {
                "response_length/mean": sum(t.response_length for t in episodes) / len(episodes),
                "response_length/clip_ratio": sum(t.stop_reason == "length" for t in episodes) / len(episodes),
                "num_turns/mean": sum(t.turns for t in episodes) / len(episodes),
                "rollout/episodes": float(len(episodes)),
                "rollout/failed": float(sum(t.error is not None for t in episodes)),
                "perf/total_num_tokens": sampled,
                "perf/throughput": sum(tokens for tokens, _ in self._rate) / max(1e-9, sum(s for _, s in self._rate)),
            },
        )

    async def _written(self) -> None:
        """Wait for the part that is being written. Raises what went wrong with it."""
        if self._writing is not None:
            await self._writing
            self._writing = None

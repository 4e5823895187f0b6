"""What an assistant turn with a tool call costs the driver: `python scripts/bench_rollout.py [--tokenizer FOLDER]`.

The sampler answers at once, so that everything measured is ours: tokens, templates, parsing, tools, bookkeeping, and in
the Ray part the way to an engine in another process and back. The process is pinned to one core.

Beside it, in the same run, the usual way: render and tokenize the whole conversation at every turn.
"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import gc
import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

import numpy as np
import psutil
from rich.console import Console
from rich.table import Table

from posttrain.config import RolloutConfig
from posttrain.core.types import Prompt, Sample, SamplingParams
from posttrain.data.chat import ChatDeltas
from posttrain.data.loader import BatchOrder
from posttrain.rollout.batches import TrainingBatches
from posttrain.rollout.context import EpisodeContext
from posttrain.rollout.pool import SamplerPool
from posttrain.rollout.source import TrajectorySource
from posttrain.tools.base import Tool, ToolResult
from posttrain.tools.formats import PARSERS

WORDS = "The price of one apple is 3, so that of 12 apples is 36; I check this with the calculator."
GROUP = 8
"""Episodes of a prompt."""
SCHEMA = {
    "type": "function",
    "function": {
        "name": "calculator",
        "description": "The value of an arithmetic expression.",
        "parameters": {
            "type": "object",
            "properties": {"expression": {"type": "string", "description": "such as 3 * 12"}},
            "required": ["expression"],
        },
    },
}


class Calculator(Tool):
    """Answers at once."""

    name, schema = "calculator", SCHEMA

    async def call(self, state: Any, arguments: dict[str, Any]) -> ToolResult:
        return ToolResult("36")


class Script:
    """An engine that answers at once: a call of the tool for so many turns, then an answer."""

    def __init__(self, tokenizer: Any, turns: int, prompt_tokens: int) -> None:
        call = '<tool_call>\n{"name": "calculator", "arguments": {"expression": "3 * 12"}}\n</tool_call>'
        eos = tokenizer.eos_token_id
        self.call = [*tokenizer(f"{WORDS}\n{call}", add_special_tokens=False)["input_ids"], eos]
        self.last = [*tokenizer("#### 36", add_special_tokens=False)["input_ids"], eos]
        delta = len(ChatDeltas(tokenizer, [SCHEMA]).ids([{"role": "tool", "content": "36"}]))
        self.until = prompt_tokens + turns * (len(self.call) + delta)
        """How long an episode is when it has had all its calls."""
        self.version = 0

    async def generate(
        self, prompt_ids: Sequence[int] | np.ndarray[Any, Any], params: SamplingParams, images: Sequence[Any] = ()
    ) -> Sample:
        ids = self.call if len(prompt_ids) < self.until else self.last
        return Sample(ids, [-0.5] * len(ids), "stop", self.version)

    async def score(self, sequences: Any) -> Any:
        raise NotImplementedError

    async def close(self) -> None: ...


def environment(tokenizer: Any, turns: int) -> EpisodeContext:
    return EpisodeContext(
        tokenizer=tokenizer,
        stop_token_ids=frozenset({tokenizer.eos_token_id}),
        tools={"calculator": Calculator()},
        parser=PARSERS.get("hermes"),
        deltas=ChatDeltas(tokenizer, [SCHEMA]),
        cfg=RolloutConfig(max_turns=turns + 1, max_response_tokens=1_000_000, episode_deadline_s=3600.0),
    )


def prompt() -> Prompt:
    return Prompt(0, [{"role": "user", "content": "Twelve apples at 3 each: what do they cost?"}], "x", "36")


async def ours(env: EpisodeContext, sampler: Any, episodes: int) -> tuple[float, float]:
    """(seconds, bytes of memory an episode at the end, when all are held)."""
    gc.collect()
    process = psutil.Process()
    before, begun = process.memory_info().rss, time.perf_counter()
    source = TrajectorySource(SamplerPool([sampler]), env)
    groups = await source.sample([prompt()] * (episodes // GROUP), GROUP)
    seconds = time.perf_counter() - begun
    memory = (process.memory_info().rss - before) / episodes
    failed = [t.error for group in groups for t in group if t.error or t.turns != env.cfg.max_turns]
    if failed:
        raise SystemExit(f"{len(failed)} episodes did not go as planned, the first: {failed[0]}")
    return seconds, memory


async def usual(env: EpisodeContext, script: Script, episodes: int, turns: int) -> float:
    """Seconds of as many turns when every turn renders and tokenizes the whole conversation."""
    tokenizer = env.tokenizer

    async def play() -> None:
        messages: list[dict[str, Any]] = [dict(m) for m in prompt().messages]
        for turn in range(turns + 1):
            ids = tokenizer.apply_chat_template(
                messages, tools=env.schemas, add_generation_prompt=True, return_dict=False
            )
            sample = await script.generate(ids if turn < turns else [0] * script.until, SamplingParams(1000))
            text = str(tokenizer.decode(sample.ids[:-1]))
            messages.append({"role": "assistant", "content": text})
            for call in env.parser.parse(text).calls:
                result = await env.tools[call.name].call(None, call.arguments)
                messages.append({"role": "tool", "content": result.text})

    begun = time.perf_counter()
    await asyncio.gather(*(play() for _ in range(episodes)))
    return time.perf_counter() - begun


class SlowCalculator(Calculator):
    """Answers after a time of a log-normal distribution: half of the calls take 50 ms, one in a hundred 0.8 s, one in a
    thousand 2 s."""

    def __init__(self) -> None:
        self.random = np.random.default_rng(0)

    async def call(self, state: Any, arguments: dict[str, Any]) -> ToolResult:
        await asyncio.sleep(0.05 * self.random.lognormal(sigma=1.2))
        return await super().call(state, arguments)


async def long_tail(env: EpisodeContext, script: Script, rate: float, steps: int = 12) -> tuple[float, float]:
    """(seconds, cancelled groups) of a step of 64 prompts x 8 episodes whose tool is slow now and then."""
    cfg = env.cfg.model_copy(update={"over_sample_rate": rate, "partial_rollouts": rate > 0})
    env = dataclasses.replace(env, tools={"calculator": SlowCalculator()}, cfg=cfg)
    source = TrajectorySource(SamplerPool([script]), env)
    order = BatchOrder(10_000, 64, seed=0)
    batches = TrainingBatches(source, [prompt()] * 10_000, order, n=8)
    seconds, cancelled = [], 0
    for _ in range(steps):
        begun = time.perf_counter()
        await batches.next()
        seconds.append(time.perf_counter() - begun)
        cancelled += source.stats.cancelled_groups
    await batches.close()
    return float(np.mean(seconds)), cancelled / steps


async def through_ray(env: EpisodeContext, script: Script, episodes: int) -> float:
    """Seconds with the engine in a Ray actor."""
    import ray

    from posttrain.cluster.actors import ActorContext, ActorHandle, actor_class
    from posttrain.cluster.samplers import RemoteSampler, SamplerActor

    class ScriptActor(SamplerActor):
        async def start(self, spec: Any) -> int:
            self.engine = spec
            return 0

    actor = actor_class(ScriptActor).options(num_cpus=0).remote(ActorContext.of_driver([]), "hf")
    sampler = RemoteSampler(ActorHandle("sampler 0", actor, 600.0), deadline_s=600.0)
    await sampler.start(cast(Any, script), 120.0)
    await ours(env, sampler, 64)  # connections, first pickles
    seconds, _ = await ours(env, sampler, episodes)
    ray.kill(actor)
    return seconds


def main() -> None:
    data = Path(os.environ.get("POSTTRAIN_TEST_DATA") or Path(__file__).parents[2] / "shared" / "data")
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--tokenizer", default=str(data / "tokenizer"), help="folder of a tokenizer")
    parser.add_argument("--template", default=str(data / "tokenizer" / "templates" / "qwen2_5.jinja"))
    parser.add_argument("--episodes", type=int, default=2048)
    parser.add_argument("--no-ray", action="store_true")
    args = parser.parse_args()
    tokenizer = load(args.tokenizer, args.template)
    if not args.no_ray:
        from posttrain.cluster.cluster import init_ray

        init_ray()  # before pinning: its processes are free to use the other cores
    os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})
    table = Table("where", "episodes", "tool turns", "turns/s", "µs a turn", "KiB an episode", "usual way / ours")
    for turns, episodes in ((8, 128), (8, args.episodes), (8, 8192), (4, args.episodes), (32, args.episodes // 4)):
        env = environment(tokenizer, turns)
        script = Script(tokenizer, turns, len(env.prompt_ids(prompt())))
        asyncio.run(ours(env, script, 64))
        seconds, memory = asyncio.run(ours(env, script, episodes))
        count = episodes * (turns + 1)
        few = max(16, 1024 // turns)
        slow = asyncio.run(usual(env, script, few, turns)) / (few * (turns + 1))
        table.add_row(
            *row("this process", episodes, turns, count / seconds),
            f"{memory / 1024:.1f}",
            f"{slow / (seconds / count):.1f}",
        )
        if not args.no_ray and episodes == args.episodes:
            seconds = asyncio.run(through_ray(env, script, episodes))
            table.add_row(*row("Ray actor", episodes, turns, count / seconds), "", "")
    Console().print(table)
    env = environment(tokenizer, 4)
    script = Script(tokenizer, 4, len(env.prompt_ids(prompt())))
    waits = Table(
        "over_sample_rate", "s a step", "of that without", "groups cancelled a step", title="long-tailed tool"
    )
    first = None
    for rate in (0.0, 0.1, 0.25):
        seconds, cancelled = asyncio.run(long_tail(env, script, rate))
        first = first or seconds
        waits.add_row(f"{rate:g}", f"{seconds:.2f}", f"{seconds / first:.0%}", f"{cancelled:.1f}")
    Console().print(waits)


def row(where: str, episodes: int, turns: int, rate: float) -> list[str]:
    return [where, f"{episodes:,}", str(turns), f"{rate:,.0f}", f"{1e6 / rate:.0f}"]


def load(folder: str, template: str) -> Any:
    """A tokenizer with a chat template; one with only vocab.json and merges.txt is Qwen's."""
    import shutil
    import tempfile

    from transformers import AutoTokenizer

    source = Path(folder)
    with tempfile.TemporaryDirectory() as copy:
        if not (source / "tokenizer_config.json").exists():
            for name in ("vocab.json", "merges.txt"):
                shutil.copy(source / name, copy)
            shutil.copy(source / "qwen3_tokenizer_config.json", Path(copy) / "tokenizer_config.json")
            source = Path(copy)
        tokenizer = AutoTokenizer.from_pretrained(source)
    tokenizer.chat_template = Path(template).read_text()
    return tokenizer


if __name__ == "__main__":
    main()

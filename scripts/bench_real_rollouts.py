"""Rollouts of real prompts beside the raw engine: `rl`'s own episodes, grading and driver against the API of SGLang or
vLLM.

    python scripts/bench_real_rollouts.py --model models/smollm2-135m-instruct --data data/gsm8k-plain
    python scripts/bench_real_rollouts.py --model ... --data ... --raw default={} --raw 'graphs={"env": {"A": 1}}'
    python scripts/bench_real_rollouts.py --model ... --data ... --turns 10 --agent examples/calculator_agent.py:play

`--data` is what `posttrain prep gsm8k --demos plain` wrote. Each round samples the `--prompts` x `--n` requests of one
step of `rl`, up to `--new` tokens, which end at different times. The engine of a run plays them twice: "ours" by the
episodes of the driver, "raw, same engine" by the engine's own API in its process. They take turns to be first, and each
begins with an empty prefix cache. With `--agent FILE.py:NAME` an agent plays the same prompts at the endpoint, in turns
with the others. Each `--raw NAME=JSON` is an engine of SGLang without us, started with these arguments (`"env"`: its
environment variables). All of them start at the same time; those that do not measure are stopped (SIGSTOP) meanwhile.
Tokens/s are of sampled tokens. Beside them: cores that each process keeps busy, and the share of the time in which the
first GPU of `CUDA_VISIBLE_DEVICES` runs kernels.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import os
import signal
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import AsyncExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

import psutil
import torch
from rich.console import Console
from rich.table import Table

Requests = list[list[int]]


@dataclass
class Usage:
    """CPU time of this process's family and how busy the GPU is, while it is entered."""

    cores: dict[str, float] = field(default_factory=dict)
    """Cores that processes of one name keep busy."""
    gpu: float = 0.0
    """Share of the time in which a kernel ran."""
    seconds: float = 0.0

    def __enter__(self) -> Self:
        self._began, self._before, self._samples = time.perf_counter(), _cpu_seconds(), list[float]()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()
        return self

    def _watch(self) -> None:
        while torch.cuda.is_available() and not self._stop.wait(0.2):
            self._samples.append(torch.cuda.utilization(0) / 100)

    def __exit__(self, *error: object) -> None:
        self.seconds = time.perf_counter() - self._began
        self._stop.set()
        self._thread.join()
        self.gpu = statistics.fmean(self._samples) if self._samples else float("nan")
        for name, seconds in _cpu_seconds().items():
            if (cores := (seconds - self._before.get(name, 0.0)) / self.seconds) >= 0.05:
                self.cores[name] = cores

    def __str__(self) -> str:
        busiest = sorted(self.cores.items(), key=lambda item: -item[1])
        return f"GPU {self.gpu:.0%}; " + ", ".join(f"{name} {cores:.2f}" for name, cores in busiest)


def _cpu_seconds() -> dict[str, float]:
    """Return the CPU seconds of this process and its descendants so far, by name and number."""
    found = {}
    for process in [psutil.Process(), *psutil.Process().children(recursive=True)]:
        with suppress(psutil.NoSuchProcess):
            words = " ".join(process.cmdline()) or process.name()
            name = words.split()[0].rpartition("/")[2]
            if "--child" in words:
                name = "raw"
            found[f"{'driver' if process.pid == os.getpid() else name[:28]} {process.pid}"] = sum(
                process.cpu_times()[:2]
            )
    return found


@contextmanager
def profiled(tag: str) -> Iterator[None]:
    """Mark a time for a profiler in the processes: the file `PT_PROF`/on holds ``tag`` meanwhile."""
    folder = os.environ.get("PT_PROF")
    if not folder or not tag:
        yield
        return
    mark = Path(folder) / "on"
    mark.write_text(tag)
    try:
        yield
    finally:
        mark.unlink()
        time.sleep(0.5)


@dataclass
class Measured:
    """Rounds of one way to sample."""

    tokens: list[int] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    usage: str = ""

    def add(self, tokens: int, usage: Usage) -> None:
        self.tokens.append(tokens)
        self.seconds.append(usage.seconds)
        self.usage = str(usage)

    @property
    def rate(self) -> float:
        """Return tokens/s: the median of the rounds after the first, which warms up. What else runs on the host slows
        some rounds down, and none becomes faster by it."""
        rates = [tokens / seconds for tokens, seconds in zip(self.tokens, self.seconds, strict=True)]
        return statistics.median(rates[1:])

    def row(self) -> tuple[str, str, str]:
        rates = ", ".join(f"{t / s:,.0f}" for t, s in zip(self.tokens, self.seconds, strict=True))
        return f"{self.rate:,.0f}", rates, f"{statistics.fmean(self.tokens):,.0f}"


# ---------------------------------------------------------------------------------------------------- raw engines


async def sample_sglang(engine: Any, requests: Requests, new: int, stop: Sequence[int]) -> list[int]:
    """Sample all requests by the API of an ``sglang.Engine``; returns the lengths."""
    params = {"temperature": 1.0, "max_new_tokens": new, "stop_token_ids": list(stop)}

    async def one(ids: list[int]) -> int:
        output = await engine.async_generate(input_ids=ids, sampling_params=params, return_logprob=True)
        return len(output["output_ids"])

    return list(await asyncio.gather(*(one(ids) for ids in requests)))


async def sample_vllm(llm: Any, requests: Requests, new: int, stop: Sequence[int]) -> list[int]:
    """Sample all requests by the API of an ``AsyncLLM``; returns the lengths."""
    from vllm import SamplingParams, TokensPrompt
    from vllm.sampling_params import RequestOutputKind

    params = SamplingParams(
        temperature=1.0, max_tokens=new, stop_token_ids=list(stop), logprobs=0, flat_logprobs=True, detokenize=False,
        output_kind=RequestOutputKind.FINAL_ONLY,
    )  # fmt: skip

    async def one(number: int, ids: list[int]) -> int:
        prompt = TokensPrompt(prompt_token_ids=ids)
        [output] = [output async for output in llm.generate(prompt, params, f"raw {number}")]
        return len(output.outputs[0].token_ids)

    return list(await asyncio.gather(*(one(number, ids) for number, ids in enumerate(requests))))


RAW: dict[str, tuple[str, Callable[[Any, Requests, int, Sequence[int]], Awaitable[list[int]]]]] = {
    "sglang": ("engine", sample_sglang),
    "vllm": ("llm", sample_vllm),
}
"""Where an engine of ours has the engine itself, and what samples by the API of that."""


def child(spec: dict[str, Any]) -> None:
    """A raw engine: starts, and samples a file of requests for each line that it reads."""
    began = time.perf_counter()
    from sglang.srt.entrypoints.engine import Engine

    engine = Engine(model_path=spec["model"], skip_tokenizer_init=True, log_level="error", **spec["options"])
    print(json.dumps({"started": time.perf_counter() - began}), flush=True)

    async def answer() -> None:
        loop = asyncio.get_running_loop()
        while line := (await loop.run_in_executor(None, sys.stdin.readline)).strip():
            lengths = await sample_sglang(engine, json.loads(Path(line).read_text()), spec["new"], spec["stop"])
            print(json.dumps({"tokens": sum(lengths)}), flush=True)

    engine.loop.run_until_complete(answer())
    engine.shutdown()


class RawEngine:
    """The driver's side of a ``child``."""

    def __init__(self, name: str, options: dict[str, Any], args: argparse.Namespace, stop: Sequence[int]) -> None:
        self.name = name
        env = {name: str(value) for name, value in options.pop("env", {}).items()}
        spec = {"model": str(args.model), "options": options, "new": args.new, "stop": list(stop)}
        command = [sys.executable, __file__, "--child", json.dumps(spec)]
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=dict(os.environ) | env
        )

    def read(self, key: str) -> float:
        """Return a number that the child says; other lines are SGLang's."""
        assert self.process.stdout is not None
        for line in self.process.stdout:
            with suppress(ValueError, TypeError, KeyError):
                return float(json.loads(line)[key])
        raise RuntimeError(f"the raw engine {self.name} has ended")

    def sample(self, file: Path) -> int:
        assert self.process.stdin is not None
        self.process.stdin.write(f"{file}\n")
        self.process.stdin.flush()
        return int(self.read("tokens"))

    def signal(self, number: signal.Signals) -> None:
        """Send a signal to its processes."""
        with suppress(psutil.NoSuchProcess):
            parent = psutil.Process(self.process.pid)
            for process in [*parent.children(recursive=True), parent]:
                process.send_signal(number)


def measure_raw(args: argparse.Namespace, files: Sequence[Path], stop: Sequence[int]) -> dict[str, Measured]:
    """Start all raw engines together, and measure one after the other."""
    given = dict(text.split("=", 1) for text in args.raw)
    engines = [RawEngine(name, json.loads(options), args, stop) for name, options in given.items()]
    found: dict[str, Measured] = {}
    for engine in engines:
        print(f"raw {engine.name}: started in {engine.read('started'):.1f} s", flush=True)
    for engine in engines:
        engine.signal(signal.SIGSTOP)
    for engine in engines:
        engine.signal(signal.SIGCONT)
        measured = found[f"raw: {engine.name}"] = Measured()
        for number, file in enumerate(files[: args.rounds]):
            with profiled(f"raw-{engine.name}" if number == 1 else ""), Usage() as usage:
                tokens = engine.sample(file)
            measured.add(tokens, usage)
        print(f"raw {engine.name}: {measured.row()}", flush=True)
        engine.signal(signal.SIGSTOP)
    for engine in engines:
        engine.signal(signal.SIGKILL)
        engine.process.wait()
    return found


# ------------------------------------------------------------------------------------------------------------ ours


class Watched:
    """A sampler, and when its requests began and ended."""

    def __init__(self, sampler: Any) -> None:
        self._sampler = sampler
        self.requests: list[tuple[float, float, int]] = []
        """Beginning, end and tokens before it, of each."""

    def __getattr__(self, name: str) -> Any:
        return getattr(self._sampler, name)

    async def generate(self, prompt_ids: Any, params: Any, images: Sequence[Any] = ()) -> Any:
        began = time.perf_counter()
        try:
            return await self._sampler.generate(prompt_ids, params, images)
        finally:
            self.requests.append((began, time.perf_counter(), len(prompt_ids)))


def outside(samplers: Sequence[Watched], played: Sequence[Any], began: float) -> str:
    """Say how long episodes were outside of the engine, and when the requests of their first turns came."""
    requests = [request for sampler in samplers for request in sampler.requests]
    for sampler in samplers:
        sampler.requests = []
    inside = sum(end - start for start, end, _ in requests)
    alive = sum(t.seconds for t in played)
    starts = sorted(start - began for start, _, _ in requests)
    ends = sorted(end - began for _, end, _ in requests)
    return (
        f"outside the engine {(alive - inside) / len(requests) * 1e3:.0f} ms a turn, {1 - inside / alive:.1%} of the "
        f"episodes' time; request {len(played)} came after {starts[len(played) - 1]:.2f} s; 90, 99 and 100 % of the "
        f"turns had ended after {', '.join(f'{ends[int((len(ends) - 1) * q)]:.1f}' for q in (0.9, 0.99, 1))} s"
    )


async def measure_ours(
    args: argparse.Namespace, job: Any, agents: Any, batches: Sequence[list[int]]
) -> dict[str, Measured]:
    """Play the episodes of each round on the engine of a run, those of an agent too, and sample the same requests in
    its process."""
    from posttrain.cluster.cluster import Cluster
    from posttrain.core.types import ON_POLICY
    from posttrain.rewards.compose import Rewarder
    from posttrain.rewards.grade import GraderPool
    from posttrain.rollout.pool import SamplerPool
    from posttrain.rollout.source import TrajectorySource

    async def play(source: TrajectorySource, prompts: Sequence[Any], measured: Measured, tag: str) -> None:
        began = time.perf_counter()
        with profiled(tag if number == 1 else ""), Usage() as usage:
            groups = await source.sample(prompts, args.n, ON_POLICY)
        played = [t for group in groups for t in group]
        if source.stats.failed:
            raise RuntimeError(f"{source.stats.failed} episodes failed: {source.stats.first_failure}")
        measured.add(sum(int(t.loss_mask.sum()) for t in played), usage)
        print(f"{tag}: {outside(watched, played, began)}", flush=True)
        if args.turns > 1:
            turns = statistics.fmean(t.turns for t in played)
            right = statistics.fmean(t.reward for t in played)
            print(f"{tag}: {turns:.2f} turns and {right:.3f} reward an episode, {usage.seconds:.1f} s", flush=True)

    async def sample_same(prompts: Sequence[Any]) -> None:
        requests = [job.env.prompt_ids(p) for p in prompts for _ in range(args.n)]
        parts = [requests[i :: len(samplers)] for i in range(len(samplers))]
        with profiled("same" if number == 1 else ""), Usage() as usage:
            counts = await asyncio.gather(
                *(
                    _in_actor(sampler, args.engine, part, args.new, stop)
                    for sampler, part in zip(samplers, parts, strict=True)
                )
            )
        same.add(sum(counts), usage)

    cfg = job.resolved.config
    stop = sorted(job.env.stop_token_ids)
    ours, theirs, same = Measured(), Measured(), Measured()
    began = time.perf_counter()
    with GraderPool(cfg.reward, cfg.sandbox, cfg.plugins) as graders:
        async with Cluster(cfg) as cluster, AsyncExitStack() as stack:
            with profiled("start"):
                samplers = await cluster.samplers(job.source, stop)
            print(f"ours: started in {time.perf_counter() - began:.1f} s", flush=True)
            rewarder = Rewarder(cfg.reward, graders, cfg.rollout.max_response_tokens, [])
            watched = [Watched(sampler) for sampler in samplers]
            source = TrajectorySource(SamplerPool(watched), job.env, rewarder)
            agent = None
            if agents is not None:
                await stack.enter_async_context(agents.env.agents.player)
                agent = TrajectorySource(SamplerPool(watched), agents.env, rewarder)
            gc.freeze()  # as a run does
            for number in range(args.rounds):
                prompts = [job.prompts[i] for i in batches[number]]
                ways = [play(source, prompts, ours, "ours")]
                if agent is not None:
                    ways.append(play(agent, [agents.prompts[i] for i in batches[number]], theirs, "agent"))
                if args.turns == 1 and args.engine in RAW:
                    ways.append(sample_same(prompts))
                for way in ways if number % 2 else reversed(ways):
                    if args.engine != "hf":
                        await asyncio.gather(*(_forget(sampler, args.engine) for sampler in samplers))
                    await way
    found = {"ours": ours} | ({"agent": theirs} if theirs.tokens else {})
    if same.tokens:
        found["raw, same engine"] = same
    return found


async def _forget(sampler: Any, engine: str) -> None:
    """Drop the engine's prefix cache, as the weight update between two steps of a run does. A full one is slow."""

    def run(self: Any) -> None:  # in a thread of its own
        dropped = self.engine.manager.flush_cache() if engine == "sglang" else self.engine.llm.reset_prefix_cache()
        asyncio.run_coroutine_threadsafe(dropped, self.loop).result()

    await sampler.actor.__ray_call__.remote(run)


async def _in_actor(sampler: Any, engine: str, requests: Requests, new: int, stop: Sequence[int]) -> int:
    place, sample = RAW[engine]

    def run(self: Any) -> int:  # in a thread of its own
        sampled: Any = sample(getattr(self.engine, place), requests, new, stop)
        return sum(asyncio.run_coroutine_threadsafe(sampled, self.loop).result())

    tokens: int = await sampler.actor.__ray_call__.remote(run)
    return tokens


def prepared(args: argparse.Namespace, agent: str = "") -> Any:
    """Return the checked run that "ours", or an agent's episodes, measure."""
    from posttrain.config.presets import resolve
    from posttrain.rl import command

    tools = "['calculator']" if args.turns > 1 and not agent else "[]"
    settings = [
        f"model.path={args.model}", f"data.train={args.data}/train.parquet", "data.val=",
        f"data.batch_size={args.prompts}", f"rollout.n={args.n}", f"rollout.max_response_tokens={args.new}",
        f"rollout.tools={tools}", f"rollout.max_turns={args.turns}", "rollout.only=true", "data.keep={}",
        "rollout.replicas=1", "rollout.memory_fraction=0.5",
        f"rollout.engine={args.engine}", f"cluster.device={args.device}",
        *([f"rollout.agent={agent}", f"rollout.agent_processes={args.agent_processes}"] if agent else []), *args.set,
    ]  # fmt: skip
    return command.prepare(resolve("rl", "smollm2-135m-gsm8k", sets=settings))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path)
    parser.add_argument("--data", type=Path)
    parser.add_argument("--engine", choices=("hf", "sglang", "vllm"), default="sglang")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda")
    parser.add_argument("--agent", default="", metavar="FILE.py:NAME", help="plays the same prompts, too")
    parser.add_argument("--agent-processes", default="auto", help="as rollout.agent_processes")
    parser.add_argument("--raw", action="append", default=[], metavar="NAME=JSON")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="of ours")
    parser.add_argument("--prompts", type=int, default=64)
    parser.add_argument("--n", type=int, default=16)
    parser.add_argument("--new", type=int, default=400)
    parser.add_argument("--turns", type=int, default=1, help="more than one: with the calculator, and ours only")
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--child", type=json.loads, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.rounds < 2:
        parser.error("--rounds: at least 2, since the first one warms up")
    if args.child:
        child(args.child)
        return
    import tempfile

    from posttrain.core.cycles import rare_cycle_search
    from posttrain.data.loader import BatchOrder

    job, agents = prepared(args), prepared(args, args.agent) if args.agent else None
    cfg = job.resolved.config
    order = BatchOrder(len(job.prompts), args.prompts, cfg.run.seed, cfg.data.shuffle)
    batches = [order.next() for _ in range(args.rounds)]
    found: dict[str, Measured] = {}
    with tempfile.TemporaryDirectory() as folder:
        files = []
        for number, rows in enumerate(batches):
            files.append(Path(folder) / f"{number}.json")
            files[-1].write_text(json.dumps([job.env.prompt_ids(job.prompts[i]) for i in rows for _ in range(args.n)]))
        if args.raw:
            found |= measure_raw(args, files, sorted(job.env.stop_token_ids))
        with rare_cycle_search():  # as the command line does
            found |= asyncio.run(measure_ours(args, job, agents, batches))
    table = Table(
        "",
        "tokens/s",
        "each round",
        "tokens a round",
        title=torch.cuda.get_device_name() if args.device == "cuda" else "CPU",
    )
    for name, measured in found.items():
        table.add_row(name, *measured.row())
    Console(width=120).print(table)
    for name, measured in found.items():
        print(f"{name}: {measured.usage}")
    best = max((m.rate for name, m in found.items() if name.startswith("raw")), default=0.0)
    if best:
        print(f"ours / best raw: {found['ours'].rate / best:.3f}")
    if "agent" in found:
        print(f"agent / ours: {found['agent'].rate / found['ours'].rate:.3f}")


if __name__ == "__main__":
    main()

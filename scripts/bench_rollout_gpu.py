"""What an engine costs on the trainer's GPU: updates with their proof, sleep and wake, tokens per second beside the raw
engine in the same process.

    python scripts/bench_rollout_gpu.py --engine sglang --shape 0.5b
    python scripts/bench_rollout_gpu.py --engine vllm --shape 7b --models /tmp/posttrain-bench
    python scripts/bench_rollout_gpu.py --engine vllm --shape 7b --tensor-parallel 2       an engine over two GPUs
    python scripts/bench_rollout_gpu.py --engine vllm --shape 7b --placement separate      one GPU trains, one samples
    python scripts/bench_rollout_gpu.py --engine vllm --shape 7b --fp8                     bfloat16, and then FP8
    python scripts/bench_rollout_gpu.py --engine vllm --shape 7b-a1b --router-replay       experts as the engine chose

The model is a random Qwen2.5 shape (`bench_train.py` writes it). "Raw" are the same requests, given to the engine's own
Python API at once, in its process, without our driver: no episodes, no Ray. No prompt comes twice, since its prefix
would be cached. Multi-turn: each turn samples, and then reads a tool's answer; raw, the same tokens without decoding,
parsing and templates. On GPUs of their own, weights are updated while all requests are being sampled, every
`--interval` seconds; each goes on with the new ones, and must come to its end. With `--amid N` others follow those that
have ended until there were N updates.

With `--fp8` the same engine is measured twice in one run, in bfloat16 and with `rollout.quantization = "fp8"`
(`--fp8-kv`: and a KV cache in FP8): tokens per second through our driver for each of `--requests` at once, updates with
quantization and check, the gap of log-probabilities of what it sampled to the trainer's, and the GPU's memory.
`--fp8-options` are engine options of the second alone, such as another kernel.

With `--router-replay` a mixture of experts (`--shape 7b-a1b`) samples, its experts are recorded, and the same samples
are scored by the trainer twice: with the experts that the engine chose and with its own. The gap and the divergence
(k3) of both, and the bytes that experts take.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import statistics
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from bench_train import model_folder
from rich.console import Console
from rich.table import Table

from posttrain.cluster.cluster import Cluster
from posttrain.cluster.samplers import RemoteSampler
from posttrain.cluster.synced_samplers import SyncedSamplers
from posttrain.cluster.trainers import TrainerGroup
from posttrain.config import Config
from posttrain.core.types import Sample, SamplingParams
from posttrain.data.pack import PackedBatch
from posttrain.data.record import Record
from posttrain.models.load import ModelSource

NO_STOP = 151_935
"""A token that random weights hardly ever sample."""


def config(args: argparse.Namespace, *, in_fp8: bool = False) -> Config:
    rollout = {
        "engine": args.engine,
        "memory_fraction": args.memory_fraction,
        "max_prompt_tokens": args.prompt,
        "max_response_tokens": 4096 - args.prompt,
        "max_concurrent": args.requests,
        "sleep": args.placement == "colocated",
        "tensor_parallel": args.tensor_parallel,
        "engine_options": args.options | (args.fp8_options if in_fp8 else {}),
    }
    if args.router_replay:
        rollout |= {"router_replay": "R3"}
    if in_fp8:
        rollout |= {"quantization": "fp8", "kv_cache_dtype": "fp8" if args.fp8_kv else "auto"}
    train = {"param_dtype": "bfloat16"}
    workers = args.tensor_parallel if args.placement == "colocated" else 1
    device = "cuda" if torch.cuda.is_available() else "cpu"
    cluster = {"workers": workers, "device": device, "placement": args.placement, "start_deadline_s": 400.0}
    if in_fp8:  # logits of random weights are wide: at 7B they differ by 0.54 in FP8, and by 1.2 with other weights
        cluster |= {"sync_tolerance": 0.9}
    return Config.model_validate({"command": "rl", "rollout": rollout, "train": train, "cluster": cluster})


def prompts(count: int, length: int) -> list[list[int]]:
    generator = torch.Generator().manual_seed(0)
    return torch.randint(150_000, (count, length), generator=generator).tolist()


def used_gib() -> float:
    """Of the first GPU, by all processes; 0 without one."""
    if not torch.cuda.is_available():
        return 0.0
    free, total = torch.cuda.mem_get_info(0)
    return (total - free) / 2**30


class Clock:
    """Seconds of named things, each time that they happened."""

    def __init__(self) -> None:
        self.seconds: dict[str, list[float]] = {}

    async def __call__(self, name: str, work: Any) -> Any:
        begun = time.perf_counter()
        result = await work
        seconds = time.perf_counter() - begun
        self.seconds.setdefault(name, []).append(seconds)
        print(f"{time.strftime('%X')} {name}: {seconds:.3f} s", file=sys.stderr, flush=True)
        return result

    def median(self, name: str, skip: int = 1) -> float:
        return statistics.median(self.seconds[name][skip:] or self.seconds[name])


async def ours(sampler: Any, asked: list[list[int]], new: int, turns: int, answer: int) -> float:
    """Seconds of all episodes through the driver's handle."""
    params = SamplingParams(new, 1.0)
    told = list(range(1000, 1000 + answer))

    async def episode(ids: list[int]) -> None:
        for _ in range(turns):
            sample = await sampler.generate(ids, params)
            ids = [*ids, *sample.ids, *told]

    begun = time.perf_counter()
    await asyncio.gather(*(episode(ids) for ids in asked))
    return time.perf_counter() - begun


async def raw(sampler: Any, asked: list[list[int]], new: int, turns: int, answer: int) -> float:
    """The same in the engine's process, by its own API."""

    async def work(self: Any, asked: list[list[int]]) -> float:
        import asyncio
        import time

        engine, told = self.engine, list(range(1000, 1000 + answer))

        async def one_vllm(ids: list[int], name: str) -> list[int]:
            from vllm import SamplingParams as Params
            from vllm import TokensPrompt
            from vllm.sampling_params import RequestOutputKind

            params = Params(
                temperature=1.0, max_tokens=new, logprobs=0, detokenize=False, ignore_eos=True,
                output_kind=RequestOutputKind.FINAL_ONLY,
            )  # fmt: skip
            async for output in engine.llm.generate(TokensPrompt(prompt_token_ids=ids), params, name):
                last = output
            return list(last.outputs[0].token_ids)

        async def one_sglang(ids: list[int], name: str) -> list[int]:
            params = {"temperature": 1.0, "max_new_tokens": new, "ignore_eos": True}
            output = await engine.engine.async_generate(input_ids=ids, sampling_params=params, return_logprob=True)
            return list(output["output_ids"])

        one = one_vllm if hasattr(engine, "llm") else one_sglang

        async def episode(ids: list[int], number: int) -> None:
            for turn in range(turns):
                ids = [*ids, *await one(ids, f"raw{time.monotonic_ns()}-{number}-{turn}"), *told]

        begun = time.perf_counter()
        await asyncio.gather(*(episode(ids, n) for n, ids in enumerate(asked)))
        return time.perf_counter() - begun

    def run(self: Any) -> float:  # in a thread of its own
        return asyncio.run_coroutine_threadsafe(work(self, asked), self.loop).result()

    seconds: float = await sampler.actor.__ray_call__.remote(run)
    return seconds


@asynccontextmanager
async def together(
    args: argparse.Namespace, clock: Clock, *, in_fp8: bool = False
) -> AsyncIterator[tuple[TrainerGroup, SyncedSamplers, RemoteSampler]]:
    """A trainer and an engine that gets its weights."""
    source = ModelSource(str(args.model))
    async with Cluster(config(args, in_fp8=in_fp8)) as cluster:
        actor = await clock("start of the trainer", cluster.trainer("actor", source, total_steps=100))
        sync = SyncedSamplers(cluster, actor, [actor])
        await clock("start of the engine", sync.start(source, [NO_STOP]))
        [sampler] = sync.pool.samplers
        yield actor, sync, sampler


async def measure(args: argparse.Namespace) -> list[tuple[str, str]]:
    clock, check = Clock(), prompts(4, 64)
    async with together(args, clock) as (actor, sync, sampler):
        memory, gaps = [], []
        for version in range(1, args.updates + 1):
            metrics = await clock("update with check", sync.publish(version, check))
            gaps.append(metrics["sync/check_gap"])
            await clock("trainer away", actor.offload())
            await ours(sampler, prompts(32, args.prompt), 16, 1, 0)
            memory.append(used_gib())
            await clock("sleep", sampler.sleep())
            await clock("trainer back", actor.onload())
            await clock("wake", sampler.wake())  # room for weights; for the KV cache it is part of the update
            await clock("update with check after it", sync.publish(version, check))
        rows = [(name, f"{clock.median(name):.3f} s") for name in clock.seconds]
        rows.append(("check gap", f"{max(gaps):.4f}"))
        rows.append(("GPU memory after each update", ", ".join(f"{x:.1f}" for x in memory) + " GiB"))
        first = itertools.count(1)
        kinds = {1: ("single-turn", args.new, 1, 0), 5: ("5 turns", args.new // 4, 5, 32)}
        for what, new, turns, answer in (kinds[turns] for turns in args.turns):
            rates: dict[str, list[float]] = {"ours": [], "raw": []}
            for _ in range(4):
                for name, play in (("ours", ours), ("raw", raw)):
                    asked = [[next(first), *ids[1:]] for ids in prompts(args.requests, args.prompt)]
                    seconds = await play(sampler, asked, new, turns, answer)
                    rates[name].append(args.requests * new * turns / seconds)
            best = {name: max(found) for name, found in rates.items()}
            rows.append((f"{what}: tokens/s ours, raw", f"{best['ours']:,.0f}, {best['raw']:,.0f}"))
            rows.append((f"{what}: ours / raw", f"{best['ours'] / best['raw']:.3f}"))
    return rows


async def measure_in_flight(args: argparse.Namespace) -> list[tuple[str, str]]:
    """Updates of an engine on a GPU of its own, at rest and while it samples."""
    clock, check = Clock(), prompts(4, 64)
    async with together(args, clock) as (_, sync, sampler):
        await ours(sampler, prompts(32, args.prompt), 64, 1, 0)
        version, amid, gaps = 0, 0, [0.0]
        episodes: list[tuple[list[int], bool]] = []
        for version in range(1, args.updates + 2):
            await clock("update with check, at rest", sync.publish(version, check))

        async def episode(ids: list[int]) -> tuple[list[int], bool]:
            """The version of each token; whether it came to its end."""
            versions: list[int] = []
            while len(versions) < args.new:
                sample = await sampler.generate(ids, SamplingParams(args.new - len(versions), 1.0))
                ids = [*ids, *sample.ids]
                versions += [sample.version] * len(sample.ids)
                if sample.finish_reason != "abort":
                    break
            return versions, sample.finish_reason in ("stop", "length")

        async def play(ids: list[int]) -> None:
            """One episode, or with ``--amid`` one after the other until so many updates have come."""
            episodes.append(await episode(ids))
            while amid < args.amid:
                episodes.append(await episode(ids))

        begun = time.perf_counter()
        running = [asyncio.create_task(play(ids)) for ids in prompts(args.requests, args.prompt)]
        while (await asyncio.wait(running, timeout=args.interval))[1]:
            if not args.amid or amid < args.amid:
                version += 1
                metrics = await clock("update with check, amid sampling", sync.publish(version, check))
                gaps.append(metrics["sync/check_gap"])
                amid += 1
        await asyncio.gather(*running)
        seconds = time.perf_counter() - begun
        whole = sum(ended and versions == sorted(versions) for versions, ended in episodes)
        rows = [(name, f"{clock.median(name):.3f} s ({len(clock.seconds[name])})") for name in clock.seconds]
        rows.append(("largest check gap amid sampling", f"{max(gaps):.4f}"))
        rows.append(("episodes, come to their end", f"{len(episodes)}, {whole}"))
        rows.append(("of several versions", str(sum(len(set(versions)) > 1 for versions, _ in episodes))))
        sampled = sum(len(versions) for versions, _ in episodes)
        rows.append(("tokens/s amid updates", f"{sampled / seconds:,.0f}"))
    return rows


async def measure_fp8(args: argparse.Namespace) -> list[tuple[str, str]]:
    """The same work in bfloat16 and in FP8, each with an engine of its own."""
    found: dict[bool, dict[str, float]] = {}
    for in_fp8 in (False, True):
        clock, check, first = Clock(), prompts(4, 256), itertools.count(1)
        async with together(args, clock, in_fp8=in_fp8) as (actor, sync, sampler):
            gaps = []
            for version in range(1, args.updates + 1):
                gaps.append((await clock("update with check", sync.publish(version, check)))["sync/check_gap"])
            memory = used_gib()
            scored = await gap_of_samples(actor, sampler, args)
            await actor.offload()
            rates: dict[int, list[float]] = {count: [] for count in args.loads}
            for count, _ in itertools.product(args.loads, range(args.rounds)):
                asked = [[next(first), *ids[1:]] for ids in prompts(count, args.prompt)]
                seconds = await clock(f"{count} requests", ours(sampler, asked, args.new, 1, 0))
                rates[count].append(count * args.new / seconds)
            found[in_fp8] = {
                **{f"tokens/s, {count} requests": statistics.median(of_load[1:]) for count, of_load in rates.items()},
                "update with check, s": clock.median("update with check"),
                "check gap": max(gaps),
                "GPU memory after updates, GiB": memory,
                "start of the engine, s": clock.median("start of the engine", 0),
                **scored,
            }
    plain, quantized = found[False], found[True]
    rows = [("", "bfloat16   FP8   FP8 / bfloat16")]
    for name, x in plain.items():
        ratio = f"{quantized[name] / x:.3f}" if x else ""
        rows.append((name, f"{x:,.4g}   {quantized[name]:,.4g}   {ratio}"))
    return rows


async def gap_of_samples(actor: TrainerGroup, sampler: RemoteSampler, args: argparse.Namespace) -> dict[str, float]:
    """Compare log-probabilities of sampled tokens, as the engine gave them, with the trainer's."""
    asked = prompts(16, args.prompt)
    samples = await gathered(sampler, asked, args.new)
    whole = [[*ids, *sample.ids] for ids, sample in zip(asked, samples, strict=True)]
    trainer = (await actor.score(whole)).split([len(ids) for ids in whole])
    own = torch.cat([part[len(ids) :] for part, ids in zip(trainer, asked, strict=True)])
    given = torch.tensor([x for sample in samples for x in sample.logprobs], dtype=torch.float64)
    return {f"gap: {name}": value for name, value in differences(own, given).items()}


def differences(own: torch.Tensor, given: torch.Tensor) -> dict[str, float]:
    """How far the trainer's log-probabilities are from an engine's."""
    gap = own.double() - given
    ratio = gap.exp()
    return {
        "mean abs": float(gap.abs().mean()),
        "k3": float((ratio - 1 - gap).mean()),
        "outside [0.9, 1.1]": float(((ratio < 0.9) | (ratio > 1.1)).double().mean()),
    }


async def measure_replay(args: argparse.Namespace) -> list[tuple[str, str]]:
    """The gap of what an engine sampled to the trainer, with the experts that the engine chose and with its own."""
    clock = Clock()
    async with together(args, clock) as (actor, sync, sampler):
        metrics = await clock("update with check", sync.publish(1, prompts(4, 64)))
        asked = prompts(args.requests, args.prompt)
        samples = await clock("sampling", gathered(sampler, asked, args.new))
        batch = with_experts(asked, samples)
        given = torch.tensor([x for sample in samples for x in sample.logprobs], dtype=torch.float64)
        rows = [(name, f"{clock.median(name, 0):.3f} s") for name in clock.seconds]
        rows.append(("tokens/s, with experts recorded", f"{len(given) / clock.median('sampling', 0):,.0f}"))
        rows.append(("check gap", f"{metrics['sync/check_gap']:.4f}"))
        assert batch.routing is not None
        rows.append(("bytes of experts a token", f"{batch.routing.shape[1] * batch.routing.element_size()}"))
        for what, routing in (("with replay", batch.routing), ("without", None)):
            own = await clock(f"trainer, {what}", actor.logprobs(replace(batch, routing=routing), temperature=1.0))
            found = differences(own[batch.loss_mask], given)
            rows += [(f"{what}: {name}", f"{value:.3e}") for name, value in found.items()]
    return rows


async def gathered(sampler: RemoteSampler, asked: list[list[int]], new: int) -> list[Sample]:
    return await asyncio.gather(*(sampler.generate(ids, SamplingParams(new, 1.0)) for ids in asked))


def with_experts(asked: list[list[int]], samples: list[Sample]) -> PackedBatch:
    """A batch of the samples, with loss and the experts that the engine chose."""
    records = []
    for ids, sample in zip(asked, samples, strict=True):
        record = Record(ids)
        record.sampled(sample)
        records.append(record)
    whole = [[*ids, *sample.ids] for ids, sample in zip(asked, samples, strict=True)]
    masks = [[False] * len(ids) + [True] * len(s.ids) for ids, s in zip(asked, samples, strict=True)]
    batch = PackedBatch.from_sequences(whole, masks)
    experts = [record.columns()["routing"].reshape(len(record), -1) for record in records]
    batch.routing = torch.cat([torch.from_numpy(rows) for rows in experts])
    return batch


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engine", choices=["hf", "sglang", "vllm"], required=True)
    parser.add_argument("--shape", choices=["0.5b", "7b", "7b-a1b"], default="0.5b")
    parser.add_argument("--models", type=Path, default=Path("/tmp/posttrain-bench"))
    parser.add_argument("--model", type=Path, help="a model's folder, instead of a random one of --shape")
    parser.add_argument("--requests", type=int, nargs="+", default=[256], dest="loads", help="several: with --fp8")
    parser.add_argument("--prompt", type=int, default=128)
    parser.add_argument("--new", type=int, default=512)
    parser.add_argument("--updates", type=int, default=5)
    parser.add_argument("--turns", type=int, nargs="+", choices=[1, 5], default=[1, 5])
    parser.add_argument("--amid", type=int, default=0, help="updates amid sampling; default: until all requests ended")
    parser.add_argument("--interval", type=float, default=4.0, help="seconds between updates amid sampling")
    parser.add_argument("--memory-fraction", type=float, default=0.5)
    parser.add_argument("--tensor-parallel", type=int, default=1)
    parser.add_argument("--placement", choices=["colocated", "separate"], default="colocated")
    parser.add_argument("--options", type=json.loads, default={}, help="JSON: rollout.engine_options")
    parser.add_argument("--fp8", action="store_true", help="bfloat16 and FP8 in one run")
    parser.add_argument("--rounds", type=int, default=6, help="with --fp8: the median of all but the first")
    parser.add_argument("--fp8-kv", action="store_true", help="with --fp8: the KV cache as well")
    parser.add_argument("--fp8-options", type=json.loads, default={}, help="JSON: rollout.engine_options of FP8 alone")
    parser.add_argument("--router-replay", action="store_true", help="a mixture, with the experts that it chose")
    args = parser.parse_args()
    args.requests = max(args.loads)
    args.model = args.model or model_folder(args.models, args.shape)
    torch.cuda.empty_cache()
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU"
    table = Table(f"{args.engine}, {args.model.name}", "measured", title=device)
    kinds = {"colocated": measure, "separate": measure_in_flight}
    work = measure_fp8 if args.fp8 else measure_replay if args.router_replay else kinds[args.placement]
    for row in asyncio.run(work(args)):
        table.add_row(*row)
    Console(width=110).print(table)


if __name__ == "__main__":
    main()

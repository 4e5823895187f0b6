"""SGLang and vLLM on GPUs, in the shape of Qwen2.5-0.5B under the real tokenizer, trained for a minute on GSM8K: GRPO
with a tool in turns with the trainer, an engine that is killed, an engine of two GPUs, and updates amid generation from
GPU to GPU.

    POSTTRAIN_GPU_ENGINE=sglang POSTTRAIN_GPU_TOKENIZER=FOLDER POSTTRAIN_GPU_GSM8K=FOLDER \\
        pytest -m gpu tests/gpu/test_engines_gpu.py -s

The last is what `posttrain prep gsm8k` wrote. `POSTTRAIN_GPU_MODEL` names another model than the one that is trained on
the spot. Each test prints a line for docs/benchmarks.md.
"""

import asyncio
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
import torch

from posttrain.cluster.cluster import Cluster, local_ray
from posttrain.cluster.synced_samplers import SyncedSamplers
from posttrain.config import Config
from posttrain.core.types import SamplingParams
from posttrain.models.load import ModelSource
from posttrain.weight_sync.transfers import BroadcastTransfer, DeviceTransfer

TOKENIZER = os.environ.get("POSTTRAIN_GPU_TOKENIZER", "")
GSM8K = os.environ.get("POSTTRAIN_GPU_GSM8K", "")
ENGINE = os.environ.get("POSTTRAIN_GPU_ENGINE", "")
OPTIONS = os.environ.get("POSTTRAIN_GPU_ENGINE_OPTIONS", "{}")
"""More arguments of the engine, as JSON."""
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(500),
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
    pytest.mark.skipif(
        not (TOKENIZER and GSM8K and ENGINE),
        reason="needs POSTTRAIN_GPU_TOKENIZER, POSTTRAIN_GPU_GSM8K and POSTTRAIN_GPU_ENGINE",
    ),
]
two_gpus = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
NO_STOP = 151_935
"""A token that random weights hardly ever sample."""
CHECK = [list(range(100, 164)), list(range(5000, 5200))]


@pytest.fixture(scope="module")
def model():
    """As sure of its tokens as a real model. The benchmarks take the same one."""
    if given := os.environ.get("POSTTRAIN_GPU_MODEL"):
        return Path(given)
    script = Path(__file__).parents[2] / "scripts" / "gpu_model.py"
    command = [sys.executable, str(script), "--tokenizer", TOKENIZER, "--data", GSM8K]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    return Path(done.stdout.strip())


@pytest.fixture(scope="module")
def ray_here():
    with local_ray():
        yield


def config(workers=1, **sections):
    rollout = {
        "engine": ENGINE, "engine_options": json.loads(OPTIONS), "memory_fraction": 0.3, "max_prompt_tokens": 1024,
        "max_response_tokens": 1024, **sections.pop("rollout", {}),
    }  # fmt: skip
    cluster = {"workers": workers, "device": "cuda", "start_deadline_s": 300.0, "step_deadline_s": 120.0}
    cluster |= sections.pop("cluster", {})
    return Config.model_validate({"command": "rl", "rollout": rollout, "cluster": cluster, **sections})


def prompts(count, length=128):
    return torch.randint(150_000, (count, length), generator=torch.Generator().manual_seed(0)).tolist()


def test_grpo_in_turns_for_twenty_steps(model, tmp_path):
    """Engines sleep while trainers work, trainers are in host memory while engines sample; no memory is lost."""
    settings = {
        "model.path": model, "data.train": Path(GSM8K) / "train.parquet", "data.batch_size": 16, "rollout.n": 8,
        "rollout.max_prompt_tokens": 1024, "rollout.max_response_tokens": 512, "rollout.memory_fraction": 0.3,
        "rollout.tools": "['gsm8k']", "rollout.max_turns": 5, "rollout.engine": ENGINE,
        "rollout.engine_options": OPTIONS_TOML, "rollout.sleep": "true", "train.offload": "true",
        "run.dir": tmp_path, "run.name": "gpu", "train.steps": 20, "train.tokens_per_microbatch": 16384,
        "train.optim.lr": 1e-6, "train.optim.warmup_ratio": 0.0, "cluster.step_deadline_s": 200,
    }  # fmt: skip
    command = [sys.executable, "-m", "posttrain", "rl", "--preset", "tiny-arith"]
    for key, value in settings.items():
        command += ["--set", f"{key}={value}"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=480, check=False)
    assert done.returncode == 0, (done.stdout + done.stderr)[-4000:]
    metrics = [json.loads(line) for line in (tmp_path / "gpu" / "metrics.jsonl").read_text().splitlines()]
    assert len(metrics) == 20
    used = [m["sync/gpu_used_gib"] for m in metrics]
    later = metrics[3:]
    phases = sorted({k for m in later for k in m if k.startswith("timing_s/")} - {"timing_s/step"})
    shown = ", ".join(
        f"{k.removeprefix('timing_s/')} {statistics.median(m.get(k, 0.0) for m in later):.2f}" for k in phases
    )
    gap = {k: statistics.median(m[f"rollout_gap/{k}"] for m in later) for k in ("mean", "sd", "k3", "outside")}
    budget = metrics[-1]["sync/gpu_budget_gib"]
    memory = f"{used[3]:.1f} then {used[-1]:.1f} GiB of {budget:.1f}"
    print(f"\n| {ENGINE}: GRPO, tool, 20 steps | {shown} | {memory} | {gap} |")
    print("".join(f"| {line} |\n" for line in done.stderr.splitlines() if "predicted / measured" in line))
    assert max(used[3:]) - used[2] < 0.5
    assert all(m["rollout/failed"] == 0 for m in metrics)
    assert gap["sd"] < 0.04


OPTIONS_TOML = (
    "{"
    + ", ".join(f"{key} = {json.dumps(value).replace(':', '=')}" for key, value in json.loads(OPTIONS).items())
    + "}"
)


def test_an_engine_that_is_killed_amid_generation_is_replaced(model, ray_here):
    """Its schedulers and its own process die; requests finish at the new one, with the current weights."""

    async def main():
        async with Cluster(config()) as cluster:
            actor = await cluster.trainer("actor", ModelSource(str(model)))
            sync = SyncedSamplers(cluster, actor, [actor])
            pool = await sync.start(ModelSource(str(model)), [NO_STOP])
            await sync.publish(1, CHECK)
            [sampler] = pool.samplers

            async def one(ids):
                with pool.session() as session:
                    return await session.generate(ids, SamplingParams(900, 1.0))

            tasks = [asyncio.create_task(one(ids)) for ids in prompts(32)]
            await asyncio.sleep(2.0)
            doomed = psutil.Process(sampler.handle.process.pid).children(recursive=True)
            assert doomed
            began = time.monotonic()
            for process in doomed:
                process.kill()
            while pool.deaths == 0:
                await asyncio.sleep(0.05)
            noticed = time.monotonic() - began
            samples = await asyncio.gather(*tasks)
            whole = time.monotonic() - began
            assert {s.version for s in samples} == {1}
            assert pool.samplers[0] is not sampler
            print(f"\n| {ENGINE}: kill -9 | noticed after {noticed:.1f} s | all answered after {whole:.1f} s |")
            assert noticed < 60
            await pool.close()

    asyncio.run(main())


@two_gpus
def test_an_engine_of_two_gpus_in_turns(model, ray_here):
    async def main():
        async with Cluster(
            config(2, rollout={"tensor_parallel": 2, "sleep": True}, train={"offload": True})
        ) as cluster:
            actor = await cluster.trainer("actor", ModelSource(str(model)))
            sync = SyncedSamplers(cluster, actor, [actor])
            pool = await sync.start(ModelSource(str(model)), [NO_STOP])
            [sampler] = pool.samplers
            assert list(sampler.trainers) == [0, 1]
            seconds = []
            for version in (1, 2, 3):
                began = time.monotonic()
                metrics = await sync.publish(version, CHECK)
                seconds.append(time.monotonic() - began)
                sample = await sampler.generate(CHECK[0], SamplingParams(64))
                assert sample.version == version
                await sync.to_trainers()
            assert isinstance(sync.transfers.choose(actor, [sampler]), DeviceTransfer)
            print(f"\n| {ENGINE}: tensor parallel 2 | updates {seconds} s | gap {metrics['sync/check_gap']:.4f} |")

    asyncio.run(main())


def test_several_engines_on_a_gpu_hold_the_weights_and_no_more(model, ray_here):
    """Each reads what the trainer sends, and the trainer frees it again."""

    async def main():
        async with Cluster(config(rollout={"replicas": 2, "memory_fraction": 0.2})) as cluster:
            actor = await cluster.trainer("actor", ModelSource(str(model)))
            sync = SyncedSamplers(cluster, actor, [actor])
            pool = await sync.start(ModelSource(str(model)), [NO_STOP])
            assert [list(sampler.trainers) for sampler in pool.samplers] == [[0], [0]]
            used = []
            for version in range(1, 9):
                metrics = await sync.publish(version, CHECK)
                used.append(metrics["sync/gpu_used_gib"])
                for sampler in pool.samplers:
                    assert (await sampler.generate(CHECK[0], SamplingParams(4))).version == version
            print(f"\n| {ENGINE}: two engines on a GPU | GiB in use at each update {used} |")
            assert max(used[2:]) - used[1] < 0.2

    asyncio.run(main())


@two_gpus
def test_updates_amid_generation_from_gpu_to_gpu(model, ray_here):
    """One GPU trains, another samples: turns go on with new weights, and no request is lost."""

    async def main():
        async with Cluster(config(cluster={"placement": "separate"})) as cluster:
            actor = await cluster.trainer("actor", ModelSource(str(model)))
            sync = SyncedSamplers(cluster, actor, [actor])
            pool = await sync.start(ModelSource(str(model)), [NO_STOP])
            await sync.publish(1, CHECK)
            [sampler] = pool.samplers
            assert isinstance(sync.transfers.choose(actor, [sampler]), BroadcastTransfer)

            async def episode(ids):
                versions, left = [], 900
                while left > 0:
                    sample = await sampler.generate(ids, SamplingParams(left))
                    ids, left = [*ids, *sample.ids], left - len(sample.ids)
                    versions += [sample.version] * len(sample.ids)
                    if sample.finish_reason != "abort":
                        break
                assert sample.finish_reason == ("stop" if left else "length")
                return versions

            tasks = [asyncio.create_task(episode(ids)) for ids in prompts(64)]
            seconds = []
            for version in (2, 3, 4):
                await asyncio.sleep(1.0)
                began = time.monotonic()
                metrics = await sync.publish(version, CHECK)
                seconds.append(time.monotonic() - began)
            episodes = await asyncio.gather(*tasks)
            assert all(versions == sorted(versions) for versions in episodes)
            mixed = sum(len(set(versions)) > 1 for versions in episodes)
            assert mixed > 0
            print(
                f"\n| {ENGINE}: NCCL, amid generation | {seconds} s | gap {metrics['sync/check_gap']:.4f} | {mixed} |"
            )

    asyncio.run(main())

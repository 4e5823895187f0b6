"""vLLM as the engine, on the CPU: samples, scores, new weights while it samples, death. See scripts/test_vllm."""

import asyncio
import contextlib
import json
import os
import socket
import subprocess
import sys
import time
import urllib.request
from functools import partial

import psutil
import pyarrow.parquet as pq
import pytest
import torch

from posttrain.cluster.cluster import Cluster, local_ray
from posttrain.config import Config
from posttrain.config.presets import resolve
from posttrain.core.errors import RunError, WeightSyncError
from posttrain.core.types import SamplingParams
from posttrain.generation import command as generate
from posttrain.models.builtin import builtin_tokenizer
from posttrain.models.load import ModelSource, load_model
from posttrain.prep import command as prep
from posttrain.rollout.pool import SamplerPool
from posttrain.weight_sync.buckets import views
from posttrain.weight_sync.publish import publish
from posttrain.weight_sync.sender import WeightSender
from posttrain.weight_sync.transfers import BroadcastTransfer
from tests.helpers.kept_cache import by_hand

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(1200)]
vllm = pytest.importorskip("vllm")

SOURCE = ModelSource("builtin:tiny")
EOS = builtin_tokenizer("tiny").eos_token_id
ROLLOUT = {"engine": "vllm", "kv_tokens": 8192, "max_prompt_tokens": 256, "max_response_tokens": 512}
CONFIG = Config.model_validate({"command": "rl", "run": {"seed": 1}, "rollout": ROLLOUT})
SPREAD = Config.model_validate(
    {
        "command": "rl",
        "run": {"seed": 1},
        "rollout": ROLLOUT | {"tensor_parallel": 2},
        "cluster": {"placement": "separate", "weight_transfer": "broadcast"},
    }
)
"""An engine of two processes, which get weights by gloo as two GPUs would by NCCL."""
KEEPING = Config.model_validate(
    {"command": "rl", "run": {"seed": 1}, "rollout": ROLLOUT | {"staleness": 1, "keep_kv": True}}
)
"""An engine whose requests outlive updates."""


@pytest.fixture(scope="module")
def cluster():
    with local_ray():
        cluster = Cluster(CONFIG)
        asyncio.run(cluster.__aenter__())
        yield cluster
        asyncio.run(cluster.__aexit__(None, None, None))


@pytest.fixture(scope="module")
def spread(cluster):
    """In the same Ray."""
    spread = Cluster(SPREAD)
    asyncio.run(spread.__aenter__())
    yield spread
    asyncio.run(spread.__aexit__(None, None, None))


@pytest.fixture(scope="module")
def sampler(cluster):
    return asyncio.run(cluster.sampler(SOURCE, [EOS], 0))


@pytest.fixture(scope="module")
def spread_sampler(spread):
    return asyncio.run(spread.sampler(SOURCE, [EOS], 0))


@pytest.fixture(scope="module")
def keeping(cluster):
    """In the same Ray."""
    keeping = Cluster(KEEPING)
    asyncio.run(keeping.__aenter__())
    yield asyncio.run(keeping.sampler(SOURCE, [EOS], 0))
    asyncio.run(keeping.__aexit__(None, None, None))


def prompt(length, seed=0):
    return torch.randint(1000, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


def whole_model(seed):
    model = load_model(SOURCE, dtype=torch.float32, seed=seed)
    model.set_attn_implementation("eager")
    return model


MODELS = [whole_model(seed) for seed in (1, 2)]
"""What the engine starts with, and what it gets."""


def logprobs_of(model, ids, temperature=1.0):
    """[T] as the trainer defines them."""
    with torch.no_grad():
        rows = (model(torch.tensor([ids])).logits[0] / temperature).log_softmax(-1)
    return [0.0, *rows[:-1].gather(1, torch.tensor(ids)[1:, None]).flatten().tolist()]


async def send(sampler, version, weights):
    sender = WeightSender(weights.items(), torch.float32, "host", bucket_bytes=1 << 20)
    try:
        while (bucket := sender.next(0)) is not None:
            await sampler.load_bucket(bucket)
    finally:
        sender.close()
    await sampler.finish_update(version)


def weights_of(model):
    return {name: p.data for name, p in model.named_parameters()}


def close(found, expected):
    return found == pytest.approx(expected, abs=1e-4)


async def test_samples_and_scores_are_of_the_models_own_weights(sampler):
    ids = prompt(40)
    for temperature in (1.0, 0.6):
        sample = await sampler.generate(ids, SamplingParams(32, temperature))
        whole = [*ids, *sample.ids]
        assert sample.version == 0
        assert sample.finish_reason == "length" or sample.ids[-1] == EOS
        assert close(sample.logprobs, logprobs_of(MODELS[0], whole, temperature)[40:])
    [scored] = await sampler.score([whole])
    assert close(scored, logprobs_of(MODELS[0], whole))


async def test_steps_are_as_large_as_vllm_takes_for_work_in_bulk(sampler):
    def of_engine_and_in_bulk(self):
        from vllm.engine.arg_utils import AsyncEngineArgs
        from vllm.usage.usage_lib import UsageContext

        defaults, _ = AsyncEngineArgs.get_batch_defaults(1)
        return self.engine.llm.vllm_config.scheduler_config.max_num_batched_tokens, defaults[UsageContext.LLM_CLASS]

    taken, in_bulk = await sampler.actor.__ray_call__.remote(of_engine_and_in_bulk)
    assert taken == in_bulk


async def test_greedy_is_the_most_likely_token(sampler):
    ids = prompt(30, seed=3)
    sample = await sampler.generate(ids, SamplingParams(8, 0.0))
    with torch.no_grad():
        rows = MODELS[0](torch.tensor([[*ids, *sample.ids]])).logits[0, 29:-1]
    assert sample.ids == rows.argmax(-1).tolist()


async def test_processes_that_began_ahead_are_vllms_own(sampler):
    """In the environment that vLLM has given its own: on a CPU it has libraries loaded before all others."""
    ids = prompt(30, seed=3)
    expected = await sampler.generate(ids, SamplingParams(8, 0.0))
    [core] = _started_by(psutil.Process(sampler.handle.process.pid))
    environment = core.environ()
    found = subprocess.run(
        [sys.executable, "-m", "tests.helpers.vllm_ahead", environment["OMP_NUM_THREADS"], json.dumps(ids)],
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert found.returncode == 0, found.stderr[-4000:]
    said = json.loads(found.stdout.splitlines()[-1])
    assert said["ids"] == expected.ids
    assert set(said["waited"]) <= set(said["processes"])
    assert said["left"] == 0
    assert "starts anew" not in found.stderr


async def test_what_hangs_is_shown_in_all_of_its_processes(sampler):
    stack = (await sampler.handle.diagnose()).stack
    assert sum(line.startswith("in ") and line.endswith(", which it has started:") for line in stack) == 2
    assert any(line.endswith("in worker_busy_loop") for line in stack)
    assert any(line.endswith("in run_busy_loop") for line in stack)


async def test_a_request_that_cannot_fit_is_refused_and_names_why(sampler):
    with pytest.raises(RunError, match="vLLM refuses a request of 900 tokens"):
        await sampler.generate(prompt(900), SamplingParams(8, 1.0))


async def test_top_p_and_top_k_are_of_each_request(sampler):
    ids = prompt(30, seed=3)
    wide, *narrow = await asyncio.gather(
        sampler.generate(ids, SamplingParams(24, 1.0)),
        sampler.generate(ids, SamplingParams(24, 1.0, top_k=1)),
        sampler.generate(ids, SamplingParams(24, 1.0, top_p=1e-4)),
        sampler.generate(ids, SamplingParams(24, 0.0)),
    )
    assert narrow[0].ids == narrow[1].ids == narrow[2].ids != wide.ids


async def test_a_request_with_a_seed_is_sampled_alike_in_any_company(sampler):
    ids, params = prompt(200, seed=5), SamplingParams(24, 1.0, seed=7)
    alone = await sampler.generate(ids, params)
    # More prompts than vLLM reads at once.
    others = [sampler.generate(prompt(250, seed=n), SamplingParams(24, 1.0, seed=n)) for n in range(16)]
    *_, again, other = await asyncio.gather(
        *others, sampler.generate(ids, params), sampler.generate(ids, SamplingParams(24, 1.0, seed=8))
    )
    assert again.ids == alone.ids != other.ids


async def test_cancelling_aborts_the_request(sampler):
    task = asyncio.create_task(sampler.generate(prompt(20), SamplingParams(500, 1.0)))
    while not await running(sampler):
        await asyncio.sleep(0.05)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    async with asyncio.timeout(20):
        while await running(sampler):
            await asyncio.sleep(0.05)


async def running(sampler):
    """Requests that vLLM has at work."""
    return await sampler.actor.__ray_call__.remote(lambda self: len(self.engine.guard.running))


async def sampled(sampler):
    """Tokens that vLLM has sampled for the requests that it has at work."""

    def ask(self):
        states = list(self.engine.llm.output_processor.request_states.values())
        return sum(state.detokenizer.num_output_tokens() for state in states)

    return await sampler.actor.__ray_call__.remote(ask)


async def test_an_update_amid_generation(sampler):
    """What was sampled comes back at once, and is of the old weights. What is asked for then is of the new ones."""
    prompts = [prompt(20 + n, seed=n) for n in range(8)]
    tasks = [asyncio.create_task(sampler.generate(ids, SamplingParams(700, 1.0))) for ids in prompts]
    while await sampled(sampler) == 0:
        await asyncio.sleep(0.01)
    update = asyncio.create_task(send(sampler, 5, weights_of(MODELS[1])))
    cut = await asyncio.gather(*tasks)
    rest = [sampler.generate([*ids, *s.ids], SamplingParams(16, 1.0)) for ids, s in zip(prompts, cut, strict=True)]
    new = await asyncio.gather(*rest)
    await update
    assert any(sample.finish_reason == "abort" and sample.ids for sample in cut), [
        (sample.finish_reason, len(sample.ids)) for sample in cut
    ]
    for ids, before, after in zip(prompts, cut, new, strict=True):
        assert (before.version, after.version) == (0, 5)
        whole = [*ids, *before.ids, *after.ids]
        start, end = len(ids), len(ids) + len(before.ids)
        assert close(before.logprobs, logprobs_of(MODELS[0], whole)[start:end])
        assert close(after.logprobs, logprobs_of(MODELS[1], whole)[end:])


async def test_an_engine_that_slept_samples_with_what_came_after(sampler):
    ids = prompt(40, seed=6)
    task = asyncio.create_task(sampler.generate(ids, SamplingParams(300, 1.0)))
    while not await running(sampler):
        await asyncio.sleep(0.02)
    await sampler.sleep()
    before = await task
    assert before.finish_reason == "abort"
    assert await parameters_of(sampler) == 0
    waiting = asyncio.create_task(sampler.generate([*ids, *before.ids], SamplingParams(8, 1.0)))
    await sampler.wake()
    assert await parameters_of(sampler) > 500_000
    await send(sampler, 5, weights_of(MODELS[1]))
    after = await waiting
    assert after.version == 5
    whole = [*ids, *before.ids, *after.ids]
    assert close(after.logprobs, logprobs_of(MODELS[1], whole)[-len(after.ids) :])


async def parameters_of(sampler):
    """How many the engine's worker has room for."""

    def ask(self):  # in a thread of its own
        asked = self.engine.llm.collective_rpc("elements")
        return asyncio.run_coroutine_threadsafe(asked, self.loop).result()[0]

    return await sampler.actor.__ray_call__.remote(ask)


async def test_prefixes_of_old_weights_are_not_served(sampler):
    ids = prompt(120, seed=9)
    await sampler.generate(ids, SamplingParams(1, 1.0))
    await send(sampler, 6, weights_of(MODELS[0]))
    sample = await sampler.generate(ids, SamplingParams(8, 1.0))
    assert close(sample.logprobs, logprobs_of(MODELS[0], [*ids, *sample.ids])[120:])


async def test_weights_that_do_not_fit_or_are_missing_are_refused(sampler):
    weights = weights_of(MODELS[1])
    norm = weights.pop("model.norm.weight")
    with pytest.raises(WeightSyncError, match=r"1 parameters of the engine were not sent, among them model\.norm"):
        await send(sampler, 7, weights)
    with pytest.raises(WeightSyncError, match=r"the trainer sent nobody \(128,\); the engine has None"):
        await send(sampler, 7, {"nobody": norm})
    await send(sampler, 7, weights_of(MODELS[1]))
    [scored] = await sampler.score([prompt(50)])
    assert close(scored, logprobs_of(MODELS[1], prompt(50)))


async def test_the_proof_finds_one_wrong_tensor(sampler, cluster, monkeypatch):
    """The trainer sends all of its weights; one of them gets another sign on its way."""
    actor = await cluster.trainer("actor", SOURCE)
    check = [prompt(24, seed=4), prompt(60, seed=5)]
    args = {"check": check, "tolerance": cluster.sync_tolerance}
    transfers = cluster.transfers()
    assert (await publish(actor, [sampler], transfers, version=8, **args))["sync/check_gap"] < 1e-5
    loaded = sampler.load_bucket

    async def flipped(bucket, data=None):
        tensor = dict(
            views(
                torch.from_file(bucket.path, shared=True, size=os.path.getsize(bucket.path), dtype=torch.uint8),
                bucket.entries,
            )
        )
        if (wrong := tensor.get("model.layers.1.mlp.down_proj.weight")) is not None:
            wrong.neg_()
        await loaded(bucket, data)

    monkeypatch.setattr(sampler, "load_bucket", flipped)
    with pytest.raises(WeightSyncError, match="sampler 0 does not hold weight version 9"):
        await publish(actor, [sampler], transfers, version=9, **args)


async def test_an_engine_of_two_processes(spread, spread_sampler):
    """Tokens, scores, and weights that come to both at once and of which each takes its share."""
    sampler = spread_sampler
    ids = prompt(40)
    sample = await sampler.generate(ids, SamplingParams(32, 1.0))
    assert close(sample.logprobs, logprobs_of(MODELS[0], [*ids, *sample.ids])[40:])
    spread.cfg = SPREAD.model_copy(update={"run": SPREAD.run.model_copy(update={"seed": 2})})
    actor = await spread.trainer("actor", SOURCE)
    transfers = spread.transfers()
    assert isinstance(transfers.choose(actor, [sampler]), BroadcastTransfer)
    check = [prompt(24, seed=4), prompt(60, seed=5)]
    for version in (1, 2):
        metrics = await publish(actor, [sampler], transfers, version=version, check=check, tolerance=1e-4)
        assert metrics["sync/check_gap"] < 1e-5
    [scored] = await sampler.score([ids])
    assert close(scored, logprobs_of(MODELS[1], ids))
    sample = await sampler.generate(ids, SamplingParams(32, 1.0))
    assert sample.version == 2
    assert close(sample.logprobs, logprobs_of(MODELS[1], [*ids, *sample.ids])[40:])


async def test_requests_that_keep_their_kv_cache_go_on_after_an_update(keeping):
    """Each token is of the weights that its version says; requests that begin afterwards take no prefix of older ones,
    neither from those that have ended nor from those that go on."""
    prompts = [prompt(120 + n, seed=n) for n in range(4)]
    await keeping.generate(prompt(200, seed=9), SamplingParams(1, 1.0))
    tasks = [asyncio.create_task(keeping.generate(ids, SamplingParams(400, 1.0, seed=1))) for ids in prompts]
    while await sampled(keeping) == 0:
        await asyncio.sleep(0.01)
    await send(keeping, 1, weights_of(MODELS[1]))
    samples = await asyncio.gather(*tasks)
    for ids, sample in zip(prompts, samples, strict=True):
        assert sample.finish_reason == "length" or sample.ids[-1] == EOS
        cut = sample.versions.count(0)
        assert sample.versions == [0] * cut + [1] * (len(sample.ids) - cut)
        assert close(
            sample.logprobs, by_hand(ids, sample.ids, {0: MODELS[0], cut: MODELS[1]} if cut else {0: MODELS[1]})
        )
    assert any(0 < sample.versions.count(0) < len(sample.ids) for sample in samples)
    for ids in (prompt(200, seed=9), prompts[0], [*prompts[0], *samples[0].ids[:100]]):
        later = await keeping.generate(ids, SamplingParams(8, 1.0))
        assert later.versions == [1] * len(later.ids)
        assert close(later.logprobs, by_hand(ids, later.ids, {0: MODELS[1]}))


def _started_by(process):
    """The processes of vLLM among its children. Titles do not tell: setproctitle sets none where a process has changed
    the first variable of its environment."""
    return [child for child in process.children() if not any("resource_tracker" in word for word in child.cmdline())]


async def replacement(cluster, index):
    """As a run starts it: with no weights of its own, it answers with those that come next."""
    sampler = await cluster.sampler(SOURCE, [EOS], index, weights_follow=True)
    ids = prompt(20, seed=11)
    asked = asyncio.create_task(sampler.generate(ids, SamplingParams(16, 1.0)))
    await send(sampler, 3, weights_of(MODELS[1]))
    answer = await asked
    assert answer.version == 3
    assert close(answer.logprobs, logprobs_of(MODELS[1], [*ids, *answer.ids])[len(ids) :])
    return sampler


@pytest.fixture(params=["scheduler", "models"])
def doomed(request):
    """(cluster, engine, processes of it to kill). No test after these has the engine."""
    of_models = request.param == "models"
    cluster = request.getfixturevalue("spread" if of_models else "cluster")
    sampler = request.getfixturevalue("spread_sampler" if of_models else "sampler")
    [core] = _started_by(psutil.Process(sampler.handle.process.pid))
    return cluster, sampler, _started_by(core) if of_models else [core]


async def test_a_killed_process_of_the_engine_fails_its_requests_and_is_replaced(doomed):
    cluster, sampler, processes = doomed
    assert processes
    pool = SamplerPool([sampler], partial(replacement, cluster), restarts=1)
    pid = sampler.handle.process.pid
    with pool.session() as session:
        long = SamplingParams(300, 1.0)
        task = asyncio.create_task(session.generate(prompt(20), long))
        while not await running(sampler):
            if task.done():  # it ended between two looks
                task = asyncio.create_task(session.generate(prompt(20), long))
            await asyncio.sleep(0.05)
        for process in processes:
            process.kill()
        async with asyncio.timeout(60):
            while pool.deaths == 0:
                if task.done() and task.result():  # it ended before the process did
                    task = asyncio.create_task(session.generate(prompt(20), long))
                await asyncio.sleep(0.1)
        sample = await task
    assert sample.version == 3
    assert (pool.deaths, pool.moved) == (1, 1)
    assert not psutil.pid_exists(pid)
    await pool.close()


def test_generate_by_a_server(tmp_path):
    """vLLM's own server, with the tiny model: greedy episodes are those of the embedded engine."""
    prep.run("arith", out=str(tmp_path / "data"), seed=0)
    model = load_model(SOURCE, dtype=torch.float32, seed=1)
    model.save_pretrained(tmp_path / "model")
    builtin_tokenizer("tiny").save_pretrained(tmp_path / "model")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = ["-m", "vllm.entrypoints.openai.api_server", "--model", str(tmp_path / "model"), "--dtype", "float32"]
    command += ["--served-model-name", "tiny", "--host", "127.0.0.1", "--port", str(port)]
    command += ["--enforce-eager", "--max-model-len", "1024"]
    environment = os.environ | {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
    server = subprocess.Popen([sys.executable, *command], env=environment)
    try:
        deadline = time.monotonic() + 240
        while True:
            with contextlib.suppress(OSError):
                urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=5)
                break
            assert time.monotonic() < deadline
            assert server.poll() is None
            time.sleep(0.5)
        flags = {"model.path": str(tmp_path / "model"), "generate.data": str(tmp_path / "data" / "test.parquet")}
        flags |= {"generate.limit": 6, "rollout.n": 1, "rollout.temperature": 0.0, "rollout.engine": "hf"}
        found = []
        for name, url in (("served", f"http://127.0.0.1:{port}/v1"), ("ours", "")):
            more = {"generate.out": str(tmp_path / name), "generate.endpoint.url": url}
            file = generate.run(resolve("generate", "tiny-arith-generate", flags=flags | more))
            found.append(pq.read_table(file).select(["response_ids", "stop_reasons", "errors"]).to_pylist())
        assert found[0] == found[1]
    finally:
        for process in psutil.Process(server.pid).children(recursive=True):  # they would outlive it
            process.kill()
        server.kill()
        server.wait()

"""`rl` runs in which a sampler dies or hangs, tools misbehave, and groups are cancelled."""

import asyncio
import itertools
import json
import os
import signal
import threading
import time

import psutil
import pytest

from posttrain.cluster import samplers
from posttrain.cluster.cluster import local_ray
from posttrain.config.presets import resolve
from posttrain.core.errors import WorkerError
from posttrain.data.parquet import write_rows
from posttrain.rl import command as rl

PLUGIN = """
import asyncio, os
from concurrent.futures import ThreadPoolExecutor
from posttrain.tools import TOOLS, Tool
from posttrain.rewards import DATA_SOURCES, GRADERS, cheap
from posttrain.rollout.interaction import INTERACTIONS, Interaction, UserTurn
from posttrain.core.types import Score

DATA_SOURCES["test/varied"] = "varied"

@GRADERS.register("varied")
@cheap
def varied(response, ground_truth, extra_info):
    return Score(float(len(response) % 5), False)

@INTERACTIONS.register("slow")
class Slow(Interaction):
    '''Says something, late for some rows.'''

    async def create(self, prompt):
        return prompt.index

    async def respond(self, state, messages):
        await asyncio.sleep(1.0 if state % 3 == 0 else 0.02)
        return UserTurn("Go on.", 0.5)

@INTERACTIONS.register("one-loop")
class OneLoop(Interaction):
    '''Belongs to the event loop that it is first asked in, as what has connections does.'''
    loop = None

    async def create(self, prompt):
        self.loop = self.loop or asyncio.get_running_loop()
        await self.loop.create_task(asyncio.sleep(0))

    async def respond(self, state, messages):
        return UserTurn(None, 0.5)

@TOOLS.register("threads")
class Threads(Tool):
    '''Has threads until it is closed, as the code interpreter has.'''
    name, schema = "threads", {"type": "function", "function": {"name": "threads", "description": ""}}

    def __init__(self):
        self.pool = ThreadPoolExecutor(2)

    async def create(self, prompt):
        return await asyncio.get_running_loop().run_in_executor(self.pool, os.getpid)

    async def close(self):
        self.pool.shutdown()
"""


@pytest.fixture(scope="module", autouse=True)
def ray_here():
    with local_ray():
        yield


@pytest.fixture(scope="module")
def plugin(tmp_path_factory):
    path = tmp_path_factory.mktemp("plugin") / "faults_plugin.py"
    path.write_text(PLUGIN)
    return path


@pytest.fixture
def start(tmp_path, plugin):
    """``start(*sets)``: four steps of `rl` with the untrained tiny model; the metrics of each step."""
    rows = [
        {
            "data_source": "test/varied",
            "prompt": [{"role": "user", "content": f"Say {i}"}],
            "reward_model": {"ground_truth": ""},
        }
        for i in range(12)
    ]
    write_rows(tmp_path / "train.parquet", rows)

    def run(*sets):
        sets = (
            "model.path='builtin:tiny'",
            f"plugins=['{plugin}']",
            "data.batch_size=4",
            "train.steps=4",
            "rollout.n=4",
            "rollout.tools=[]",
            "rollout.max_response_tokens=128",
            *sets,
        )
        flags = {"run.dir": str(tmp_path / "runs"), "run.name": "r", "data.train": str(tmp_path / "train.parquet")}
        folder = rl.run(resolve("rl", "tiny-arith", sets=sets, flags=flags))
        return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]

    run.metrics = tmp_path / "runs" / "r" / "metrics.jsonl"
    return run


def hit_sampler(metrics, how, after_lines=1, actor="SamplerActor"):
    """Send a signal to a sampler, a moment after the file has so many lines: it is at work then."""

    def watch():
        deadline = time.monotonic() + 120
        while time.monotonic() < deadline:
            if metrics.is_file() and metrics.read_text().count("\n") >= after_lines:
                time.sleep(0.15)
                samplers = [p for p in psutil.Process().children(recursive=True) if actor in p.name()]
                os.kill(samplers[0].pid, how)
                return
            time.sleep(0.005)

    threading.Thread(target=watch, daemon=True).start()


@pytest.mark.parametrize("replicas", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_a_sampler_that_is_killed_in_a_step_costs_nothing(start, replicas):
    hit_sampler(start.metrics, signal.SIGKILL)
    steps = start(f"rollout.replicas={replicas}")
    assert [row["step"] for row in steps] == [1, 2, 3, 4]
    assert steps[-1]["rollout/samplers_lost"] == 1
    assert [row["rollout/failed"] for row in steps] == [0, 0, 0, 0]
    # The new one has the current weights, as the weight-sync check and the sampled tokens' probabilities show.
    assert max(row["sync/check_gap"] for row in steps) < 1e-3
    assert max(row["rollout_gap/mean_abs"] for row in steps) < 1e-3


@pytest.mark.slow
def test_a_sampler_that_hangs_is_noticed_and_replaced(start):
    hit_sampler(start.metrics, signal.SIGSTOP)
    began = time.monotonic()
    steps = start("cluster.silence_deadline_s=10", "rollout.replicas=2")
    assert time.monotonic() - began < 120
    assert steps[-1]["rollout/samplers_lost"] == 1
    assert [row["rollout/failed"] for row in steps] == [0, 0, 0, 0]
    assert not [p for p in psutil.Process().children(recursive=True) if p.status() == psutil.STATUS_STOPPED]


@pytest.mark.parametrize("what", ["sleep", "wake"])
def test_an_engine_that_does_not_free_its_memory_or_allocate_it_again_is_replaced(start, monkeypatch, what):
    ask, calls, hung = getattr(samplers.RemoteSampler, what), itertools.count(), []

    def hang(actor):
        setattr(actor.engine, what, asyncio.Event().wait)

    async def ask_once(sampler):
        with monkeypatch.context() as patch:
            if next(calls) == 2:
                hung.append(sampler.handle.process)
                await sampler.actor.__ray_call__.remote(hang)
                patch.setattr(samplers, "_MEMORY_S", 0.5)
            await ask(sampler)

    monkeypatch.setattr(samplers.RemoteSampler, what, ask_once)
    steps = start("rollout.sleep=true")
    assert [row["step"] for row in steps] == [1, 2, 3, 4]
    assert steps[-1]["rollout/samplers_lost"] == 1
    assert [row["rollout/failed"] for row in steps] == [0, 0, 0, 0]
    assert max(row["sync/check_gap"] for row in steps) < 1e-3
    assert [process.find() for process in hung] == [None]


def test_a_run_that_starts_its_workers_again_opens_its_tools_and_user_again(start):
    hit_sampler(start.metrics, signal.SIGKILL, actor="TrainActor")
    play = ("rollout.tools=['threads']", "rollout.interaction='one-loop'", "rollout.max_prompt_tokens=512")
    steps = start("run.restarts=1", "train.save_every=1", *play)
    assert (start.metrics.parent / "logs" / "driver.log").read_text().count("resuming after step") == 1
    assert [row["rollout/failed"] for row in steps] == [0, 0, 0, 0]


def test_a_sampler_that_may_not_be_replaced_ends_the_run_and_is_named(start):
    hit_sampler(start.metrics, signal.SIGKILL)
    with pytest.raises(WorkerError, match="sampler 0 died"):
        start("cluster.sampler_restarts=0")


@pytest.mark.parametrize("carry", ["false", pytest.param("true", marks=pytest.mark.slow)])
def test_over_sampled_steps_train_on_every_prompt(start, carry):
    sets = ("rollout.interaction='slow'", "rollout.max_turns=2", "rollout.max_response_tokens=48")
    steps = start(*sets, "rollout.over_sample_rate=0.5", f"rollout.partial_rollouts={carry}")
    assert sum(row["rollout/cancelled_groups"] for row in steps) > 0
    assert [row["rollout/missing_groups"] for row in steps] == [0, 0, 0, 0]
    assert [row["rollout/failed"] for row in steps] == [0, 0, 0, 0]
    assert all(row["actor/grad_norm"] > 0 for row in steps)
    if carry == "false":
        assert max(row["rollout_gap/mean_abs"] for row in steps) < 1e-3

"""`rl` runs that are recorded, and repeated to the bit though everything takes other times.

POSTTRAIN_REPLAYS=20 records and repeats so many runs, of all of k = 0, 1 and 2.
"""

import json
import os
from pathlib import Path

import pytest
import torch

from posttrain.cluster.cluster import local_ray
from posttrain.config.presets import resolve
from posttrain.data.parquet import write_rows
from posttrain.models.builtin import builtin_tokenizer
from posttrain.models.load import load_model, locate
from posttrain.rl import command as rl
from posttrain.rollout.files import RolloutFiles, fingerprint
from posttrain.train import checkpoint

PLUGIN = """
import asyncio, random

from posttrain.core.types import Score
from posttrain.models.builtin import builtin_tokenizer
from posttrain.rewards import DATA_SOURCES, GRADERS, cheap
from posttrain.tools import TOOLS
from posttrain.tools.base import Tool, ToolResult
from posttrain.tools.formats import PARSERS, ParsedCall, ParsedTurn, ToolParser

DATA_SOURCES["test/any"] = "any_length"


@GRADERS.register("any_length")
@cheap
def grade(response, ground_truth, extra_info):
    return Score(float(len(response) % 5), False)


class Anything(ToolParser):
    '''Takes every turn for a call. An untrained model ends a turn at one of many tokens.'''

    stop_tokens = tuple(t for t in builtin_tokenizer("tiny").get_vocab() if len(t) == 1 and t.isalnum())

    def parse(self, text, tools=None):
        return ParsedTurn(text, [ParsedCall("count", {"text": text})])

    def render(self, turn):
        return turn.content


PARSERS.register("anything")(Anything())


@TOOLS.register("count")
class Count(Tool):
    '''Counts letters, after a time of its own.'''

    name = "count"
    schema = {"type": "function", "function": {"name": "count", "parameters": {"type": "object", "properties": {}}}}

    async def call(self, state, arguments):
        await asyncio.sleep(0.5 * random.random() ** 4)
        return ToolResult(str(len(arguments["text"])))
"""
ROWS, STEPS = 12, 4
TIMES = ("time", "timing_s/", "perf/", "wait/", "tools/seconds")
"""Beginnings of metrics that tell how fast it went."""
MANY = int(os.environ.get("POSTTRAIN_REPLAYS", "0"))


@pytest.fixture(scope="module", autouse=True)
def ray_here():
    with local_ray():
        yield


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """``run(name, *sets)``: the folder of one run of the untrained tiny model with a tool."""
    tmp_path = tmp_path_factory.mktemp("schedules")
    (tmp_path / "plugin.py").write_text(PLUGIN)
    row = {"data_source": "test/any", "reward_model": {"ground_truth": ""}}
    rows = [row | {"prompt": [{"role": "user", "content": f"Say {i}"}]} for i in range(ROWS)]
    write_rows(tmp_path / "train.parquet", rows)

    def start(name, *sets):
        sets = [
            "model.path='builtin:tiny'", f"plugins=['{tmp_path / 'plugin.py'}']", f"run.dir='{tmp_path}'",
            f"run.name='{name}'", f"data.train='{tmp_path / 'train.parquet'}'", "data.batch_size=4",
            f"train.steps={STEPS}", "rollout.n=2", "rollout.tools=['count']", "rollout.tool_format='anything'",
            "rollout.max_turns=3", "rollout.max_response_tokens=48", "run.report=false",
            "rollout.batch_invariant=true", "rollout.record_schedule=true", *sets,
        ]  # fmt: skip
        return rl.run(resolve("rl", "tiny-arith", sets))

    return start


def metrics(folder):
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [{key: value for key, value in row.items() if not key.startswith(TIMES)} for row in rows]


def weights(folder: Path):
    return dict(load_model(locate(str(checkpoint.find(folder).path)), dtype=torch.float32).named_parameters())


def batches(folder):
    """What each step was trained on: (row, tokens, log-probabilities, versions, reward) of every episode."""
    files = RolloutFiles(str(folder / "rollouts"), tokenizer=fingerprint(builtin_tokenizer("tiny")))
    return [
        [(t.prompt.index, *(getattr(t, c).tolist() for c in ("tokens", "logprobs", "weight_version")), t.reward)
         for group in files.read(step) for t in group]
        for step in files.steps
    ]  # fmt: skip


def turns(folder):
    """The order of a run's groups."""
    events = [json.loads(line) for line in (folder / "schedule.jsonl").read_text().splitlines()]
    return [event for event in events if "ended" in event or "trained" in event]


def assert_repeats(again, recorded):
    assert turns(again) == turns(recorded)
    assert batches(again) == batches(recorded)
    assert metrics(again) == metrics(recorded)
    expected = weights(recorded)
    assert all(torch.equal(tensor, expected[name]) for name, tensor in weights(again).items())


@pytest.mark.slow
def test_a_recorded_run_is_repeated_to_the_bit(run):
    """Sampling and training overlap, and the tool answers late, each time after another time."""
    recorded = run("recorded", "rollout.staleness=2")
    found = metrics(recorded)
    assert sum(row["tools/calls_per_episode"] for row in found) > 0
    assert max(row["staleness/max"] for row in found) > 0
    assert_repeats(run("again", "rollout.staleness=2", "rollout.replay_schedule='recorded'"), recorded)


@pytest.mark.skipif(not MANY, reason="POSTTRAIN_REPLAYS says how many")
@pytest.mark.parametrize("seed", range(MANY))
def test_many_recorded_runs_are_repeated_to_the_bit(run, seed):
    sets = [f"rollout.staleness={seed % 3}", f"run.seed={seed}"]
    recorded = run(f"recorded-{seed}", *sets)
    assert_repeats(run(f"again-{seed}", *sets, f"rollout.replay_schedule='recorded-{seed}'"), recorded)

"""`tiny-code` with fewer steps: the tiny model learns to write whole programs, which really run."""

from __future__ import annotations

import itertools
import json
import re
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from posttrain.cluster.cluster import local_ray
from posttrain.config.presets import resolve
from posttrain.evaluation.command import evaluate
from posttrain.generation import command as generate
from posttrain.prep import command as prep
from posttrain.rl import command as rl
from posttrain.sft import command as sft
from tests.unit.sandbox.test_sandbox import REASON

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(1200),
    pytest.mark.skipif(REASON is not None, reason=str(REASON)),
]

CALL = re.compile(r"<tool_call>(.*?)</tool_call>", re.DOTALL)
SUM = re.compile(r"print\(((?:0|[1-9]\d*)(?:[-+](?:0|[1-9]\d*))+)\)")
"""A program that prints a sum of whole numbers and does nothing else."""


def test_rl_with_the_code_interpreter_beats_sft(tmp_path: Path) -> None:
    data = tmp_path / "data"
    prep.run("arith-code", out=str(data), seed=0)

    def common(name: str) -> dict[str, object]:
        return {"run.dir": str(tmp_path), "run.name": name}

    def score(model: str) -> float:
        flags = common(f"generate-{model}") | {
            "model.path": f"run:{model}",
            "generate.data": str(data / "test.parquet"),
            "generate.limit": 100,
            "rollout.n": 3,
        }
        file = generate.run(resolve("generate", "tiny-code-generate", flags=flags))
        check_outputs(file)
        return float(evaluate(file, (1,)).overall["pass@1"] or 0.0)

    with local_ray():
        train = {"data.train": str(data / "sft_train.parquet")}
        sft.run(resolve("sft", "tiny-code-sft", ["train.steps=500"], common("sft") | train))
        before = score("sft")
        flags = common("rl") | {"model.path": "run:sft", "data.train": str(data / "train.parquet")}
        folder = rl.run(resolve("rl", "tiny-code", ["train.steps=16"], flags))
        after = score("rl")
    assert before > 0.2
    assert after - before >= 0.15
    steps = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert all(step["rollout/failed"] == 0 for step in steps)
    assert steps[-1]["tools/calls_per_episode"] > 0.9


def check_outputs(file: Path) -> None:
    """Programs ran: what the model reads is what Python says of its programs."""
    checked = 0
    for group in pq.read_table(file)["conversations"].to_pylist():
        for conversation in map(json.loads, group):
            for call, output in itertools.pairwise(conversation):
                program = only_sum(call["content"])
                if program is not None and output["role"] == "tool":
                    assert output["content"] == str(eval(program)), conversation
                    checked += 1
    assert checked > 100


def only_sum(turn: str) -> str | None:
    """The sum in the only call of a turn; ``None`` where the model wrote anything else, whole or broken."""
    calls = CALL.findall(turn)
    if [len(calls), turn.count("<tool_call>"), turn.count('"name"')] != [1, 1, 1]:
        return None
    try:
        call = json.loads(calls[0])
    except ValueError:
        return None
    code = isinstance(call, dict) and call.get("name") == "code_interpreter" and call.get("arguments")
    if not isinstance(code, dict) or set(code) != {"code"}:
        return None
    found = SUM.fullmatch(str(code["code"]))
    return found[1] if found else None

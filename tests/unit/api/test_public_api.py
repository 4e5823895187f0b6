"""`import posttrain`: what it gives, how options become a config, and how calls behave where an event loop runs."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import threading
from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

import posttrain
from posttrain import api
from posttrain.config.keys import leaf_keys
from posttrain.config.presets import resolve
from posttrain.core.errors import ConfigError, DataError, Interrupted
from posttrain.core.signals import call_in_thread
from posttrain.core.types import Message
from posttrain.data.parquet import write_rows
from posttrain.prep import command as prep
from posttrain.runs.run import StopSignal
from tests.helpers.written_runs import episode, write_run

REPO = Path(__file__).resolve().parents[3]


def test_import_gives_every_public_name_without_torch_ray_or_pandas() -> None:
    code = (
        "import sys, posttrain\n"
        "assert 'posttrain.api' not in sys.modules\n"
        "for name in posttrain.__all__: getattr(posttrain, name)\n"
        "assert set(posttrain.__all__) <= set(dir(posttrain))\n"
        "print([name for name in ('torch', 'ray', 'pandas', 'transformers', 'typer') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=REPO, capture_output=True, text=True, check=False)
    assert (done.stdout.strip(), done.stderr) == ("[]", "")
    with pytest.raises(AttributeError, match="run_nothing"):
        _ = posttrain.run_nothing


# ---------------------------------------------------------------------- presets and options


@pytest.mark.parametrize(
    "declared", [api.PreferenceOptions, api.RlOptions, api.GenerateOptions, api.EvalOptions], ids=lambda d: d.__name__
)
def test_every_option_stands_for_a_key_of_the_config(declared: type[api.RunOptions]) -> None:
    hints = api.get_type_hints(declared, include_extras=True)
    assert {hint.__metadata__[0] for hint in hints.values()} <= set(leaf_keys())


def test_options_of_prep_are_those_of_the_command() -> None:
    assert set(api.PrepOptions.__annotations__) == {field.name for field in fields(prep.Options)}


def test_dict_preset_extends_a_preset_with_nested_and_dotted_keys() -> None:
    tree = {"extends": "tiny-arith", "train": {"steps": 3}, "rollout.n": 4, "algo": {"name": "dapo"}}
    resolved = resolve("rl", tree, flags={"train.steps": 7})
    cfg, dapo = resolved.config, resolve("rl", "tiny-arith", flags={"algo.name": "dapo"}).config
    assert (cfg.run.name, cfg.train.steps, cfg.rollout.n, cfg.model.path) == ("tiny-arith", 7, 4, "run:tiny-arith-sft")
    assert cfg.algo == dapo.algo
    assert resolved.provenance["rollout.n"] == "the preset given in Python"
    assert resolved.provenance["train.steps"] == "flag --steps"


@pytest.mark.parametrize(
    ("tree", "message"),
    [
        ({"extends": "tiny-arith", "train": {"stepz": 3}}, "unknown key `train.stepz` in the preset given in Python"),
        ({"extends": "tiny-arith", "train.steps": "3"}, "train.steps = '3' (the preset given in Python)"),
        ({"extends": 3}, "extends = 3 in the preset given in Python is not text"),
        ({"extends": "tiny-generate"}, "preset tiny-generate is for `posttrain generate`"),
        ({"extends": "tiny-arit"}, "unknown preset 'tiny-arit'"),
        ({3: 4}, "unknown key `3`"),
    ],
)
def test_rejects_wrong_dict_preset_and_names_the_key(tree: Any, message: str) -> None:
    with pytest.raises(ConfigError) as error:
        posttrain.run_rl(tree)
    assert message in error.value.message


def test_rejects_unknown_option_with_the_nearest_one() -> None:
    with pytest.raises(ConfigError, match="unknown option 'step'") as error:
        posttrain.run_sft("tiny-arith-sft", step=3)  # type: ignore[call-arg]
    assert error.value.hint is not None
    assert "'steps'" in error.value.hint


@pytest.mark.parametrize(
    ("options", "message", "hint"),
    [
        ({"train_row": 20}, "unknown option 'train_row'", "did you mean 'train_rows'?"),
        ({"train_rows": "20"}, "train_rows = '20': Input should be a valid integer", "PrepOptions"),
        ({"splits": "train"}, "splits = 'train'", "splits=['train']"),
        ({"tools": "gsm8k"}, "tools = 'gsm8k'", "tools=['gsm8k']"),
        ({"plugins": "mine.py"}, "plugins = 'mine.py'", "plugins=['mine.py']"),
    ],
)
def test_rejects_wrong_options_of_prep(tmp_path: Path, options: Any, message: str, hint: str) -> None:
    with pytest.raises(ConfigError) as error:
        posttrain.run_prep("arith", out=tmp_path / "out", **options)
    assert message in error.value.message
    assert hint in (error.value.hint or "")
    assert not (tmp_path / "out").exists()


def test_rejects_what_is_no_preset_and_no_dtype(tmp_path: Path) -> None:
    wrong: Any = [5, "int8"]
    with pytest.raises(ConfigError, match="preset 5 is no preset"):
        posttrain.run_sft(wrong[0])
    with pytest.raises(ConfigError, match="tools = 'gsm8k'"):
        posttrain.run_rl("tiny-arith", tools="gsm8k")
    with pytest.raises(ConfigError, match="'int8' is not a dtype of merged weights"):
        posttrain.merge_checkpoint("x", tmp_path / "out", dtype=wrong[1])


def test_takes_values_of_numpy() -> None:
    tree = {"extends": "tiny-arith", "train.steps": np.int64(3), "train.optim.betas": np.array([0.5, 0.75])}
    train = resolve("rl", tree, flags={"run.seed": np.int32(4)}).config.train
    assert (train.steps, train.optim.betas) == (3, (0.5, 0.75))


def test_rejects_a_frame_where_a_path_belongs(tmp_path: Path) -> None:
    frame: Any = pd.DataFrame({"messages": [[{"role": "user", "content": "Hi"}]]})
    with pytest.raises(ConfigError, match=r"data\.train \(flag --data\): a DataFrame is no value") as error:
        posttrain.run_sft("tiny-arith-sft", data=frame)
    assert "path" in (error.value.hint or "")
    with pytest.raises(ConfigError, match="file is a DataFrame, and no path"):
        posttrain.run_eval(frame)
    with pytest.raises(ConfigError, match="source is a DataFrame, and no path"):
        posttrain.run_prep("messages", source=frame, out=tmp_path)


def test_rejects_sampling_options_together_with_a_file_of_responses() -> None:
    with pytest.raises(ConfigError, match="model=, n= are options of sampling and cannot go with a file"):
        posttrain.run_eval("responses.parquet", n=2, model="builtin:tiny")
    with pytest.raises(ConfigError, match="name= is an option of sampling and cannot go with a file"):
        posttrain.run_eval("responses.parquet", name="x")


# ---------------------------------------------------------------------- commands that need no Ray


async def test_prep_and_eval_run_under_an_event_loop(tmp_path: Path) -> None:
    report = posttrain.run_prep("arith", out=tmp_path, train_rows=8, test_rows=4)
    assert report.rows["test.parquet"] == 4
    with pytest.raises(DataError, match="exists already"):
        posttrain.run_prep("arith", out=tmp_path, train_rows=8, test_rows=4)

    file = tmp_path / "responses.parquet"
    row = {
        "data_source": "openai/gsm8k",
        "prompt": [{"role": "user", "content": "3 + 4?"}],
        "reward_model": {"style": "rule", "ground_truth": "7"},
        "extra_info": {"index": 0},
    }
    write_rows(file, [{**row, "responses": ["#### 7", "#### 8"], "errors": [None, None]}])
    found = posttrain.run_eval(file, {"eval": {"resamples": 0}}, pass_at=[1, 2], console="quiet")
    assert (found.file, found.scores["pass@1"], found.scores["pass@2"]) == (file, 0.5, 1.0)

    failures = tmp_path / "failures.md"
    failures.write_text("keep")
    with pytest.raises(ConfigError, match=r"failures\.md exists"):
        posttrain.run_eval(file, failures=failures)
    assert failures.read_text() == "keep"
    posttrain.run_eval(file, failures=failures, overwrite=True, console="quiet")
    assert "#### 8" in failures.read_text()


def test_processes_of_a_call_do_not_run_the_script_again(tmp_path: Path) -> None:
    """Graders are other processes, and a script as docs/python-api.md has it guards no call."""
    row = {"data_source": "mine", "prompt": [], "reward_model": {"ground_truth": "7"}, "responses": ["7", "8"]}
    write_rows(tmp_path / "responses.parquet", [row])
    (tmp_path / "reward.py").write_text("def score(data_source, solution_str, ground_truth, extra_info=None):\n"
                                        "    return float(solution_str == ground_truth)\n")  # fmt: skip
    (tmp_path / "script.py").write_text(
        "import posttrain\n"
        "open('started', 'a').write('x')\n"
        "found = posttrain.run_eval('responses.parquet', {'reward.function': 'reward.py:score'}, console='quiet')\n"
        "print(found.scores['pass@1'])\n"
    )
    environment = {**os.environ, "PYTHONPATH": str(REPO)}
    done = subprocess.run(
        [sys.executable, "script.py"], cwd=tmp_path, env=environment, capture_output=True, text=True, check=False
    )
    assert (done.stdout, done.stderr) == ("0.5\n", "")
    assert (tmp_path / "started").read_text() == "x"


# ---------------------------------------------------------------------- load_run


def test_load_run_gives_metrics_and_rollouts_as_frames(tmp_path: Path) -> None:
    steps = [[[episode(0, 1.0), episode(1, 0.0)], [episode(2, 0.5)]], [[episode(3, 0.25, step=2)]]]
    path = write_run(tmp_path, "first", steps)
    run = posttrain.load_run("first", tmp_path)
    assert (run.name, run.path, run.status, run.config["algo.name"]) == ("first", path, "finished", "grpo")
    assert list(run.metrics.index) == [1, 2]
    assert run.metrics["critic/score/mean"].tolist() == [0.5, 0.25]
    assert run.metrics["actor/entropy"].isna().all()
    assert all(dtype == "float64" for dtype in run.metrics.dtypes)
    rollouts = run.rollouts
    assert rollouts[["step", "group", "reward"]].to_numpy().tolist() == [
        [1, 0, 1],
        [1, 0, 0],
        [1, 1, 0.5],
        [2, 0, 0.25],
    ]
    assert rollouts["prompt"][3] == [{"role": "user", "content": "Sam has 3 apples. How many?"}]
    assert rollouts["response"][0].endswith("#### 6")
    assert "answer=6 reward" not in rollouts["response"][0]
    assert rollouts["reward_parts"][1] == {"score": 0.0, "format": 1.0}
    assert posttrain.load_run(path).status == "finished"

    (path / "rollouts" / "step_000002.parquet").write_bytes(b"cut")
    with pytest.raises(DataError, match=r"step_000002.parquet: unreadable"):
        _ = posttrain.load_run(path).rollouts
    with pytest.raises(ConfigError, match="no run 'frst'") as error:
        posttrain.load_run("frst", tmp_path)
    assert error.value.hint is not None
    assert "first" in error.value.hint


def test_load_run_takes_no_answer_of_the_prompt_for_the_models(tmp_path: Path) -> None:
    played = episode(0, 1.0)
    shots: list[Message] = [{"role": "user", "content": "1 + 1?"}, {"role": "assistant", "content": "#### 2"}]
    played.prompt.messages[:0] = shots
    played.messages[:0] = shots
    write_run(tmp_path, "shots", [[[played]]])
    assert "#### 2" not in posttrain.load_run("shots", tmp_path).rollouts["response"][0]


def test_load_run_reads_a_run_that_has_recorded_nothing(tmp_path: Path) -> None:
    write_run(tmp_path, "empty", [])
    run = posttrain.load_run("empty", tmp_path)
    assert run.metrics.empty
    assert run.metrics.index.name == "step"
    assert run.rollouts.empty
    assert "response" in run.rollouts.columns


# ---------------------------------------------------------------------- signals of calls in a thread


def interrupt_after(begun: threading.Event) -> threading.Thread:
    """Start a thread that sends this process Ctrl-C once the call has begun."""

    def send() -> None:
        assert begun.wait(10)
        os.kill(os.getpid(), signal.SIGINT)

    sender = threading.Thread(target=send)
    sender.start()
    return sender


def test_interrupt_reaches_a_run_in_a_thread_as_a_request_to_stop() -> None:
    begun, never = threading.Event(), threading.Event()
    before = signal.getsignal(signal.SIGINT)

    def run() -> None:
        assert threading.current_thread() is not threading.main_thread()
        with StopSignal(grace_s=60) as stop:
            begun.set()
            for _ in range(1000):
                if stop.requested:
                    raise stop.interrupted("step 3")
                never.wait(0.01)

    async def cell() -> None:
        with pytest.raises(Interrupted, match="stopped after step 3"):
            call_in_thread(run)

    sender = interrupt_after(begun)
    asyncio.run(cell())
    sender.join()
    assert signal.getsignal(signal.SIGINT) is before


def test_interrupt_ends_a_call_in_a_thread_that_handles_no_signals() -> None:
    begun, never = threading.Event(), threading.Event()

    def work() -> None:
        begun.set()
        for _ in range(1000):
            never.wait(0.01)

    sender = interrupt_after(begun)
    with pytest.raises(KeyboardInterrupt):
        call_in_thread(work)
    sender.join()

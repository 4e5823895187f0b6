"""Options of commands that stand for keys of the config."""

from typing import Any

import pytest
from typer.testing import CliRunner

from posttrain.cli import app
from posttrain.config.presets import Resolved
from posttrain.evaluation import command as evaluate
from posttrain.generation import command as generate
from posttrain.preference import command as prefer
from posttrain.rl import command as rl
from posttrain.sft import command as sft

COMMON = {
    "--name x": ("run.name", "x"),
    "--model m": ("model.path", "m"),
    "--seed 0": ("run.seed", 0),
    "--overwrite": ("run.overwrite", True),
    "--plugin a.py --plugin b.py": ("plugins", ["a.py", "b.py"]),
    "--console quiet": ("run.console", "quiet"),
}
TRAINING = {
    "--data d": ("data.train", "d"),
    "--steps 3": ("train.steps", 3),
    "--workers 2": ("cluster.workers", 2),
    "--resume never": ("run.resume", "never"),
    "--profile 1:2": ("run.profile", "1:2"),
}
SAMPLING = {
    "--data d": ("generate.data", "d"),
    "-n 2": ("rollout.n", 2),
    "--temperature 0": ("rollout.temperature", 0.0),
    "--limit 4": ("generate.limit", 4),
    "--endpoint http://h/v1": ("generate.endpoint.url", "http://h/v1"),
    "--tools gsm8k,search": ("rollout.tools", ["gsm8k", "search"]),
}
RL = {
    "--algo rloo": ("algo.name", "rloo"),
    "--tools none": ("rollout.tools", []),
    "--examine 2": ("reward.examine", 2),
}
CASES: list[tuple[str, Any, dict[str, tuple[str, Any]]]] = [
    ("sft", sft, COMMON | TRAINING),
    ("prefer", prefer, COMMON | TRAINING | {"--method reward_model": ("prefer.method", "reward_model")}),
    ("rl", rl, COMMON | TRAINING | RL),
    ("rl", rl, {"--rollout-only": ("rollout.only", True)}),
    ("rl", rl, {"--replay a.parquet": ("rollout.replay", "a.parquet")}),
    ("generate", generate, COMMON | SAMPLING | {"--out o.parquet": ("generate.out", "o.parquet")}),
]


def value_of(resolved: Resolved, key: str) -> Any:
    value: Any = resolved.config
    for part in key.split("."):
        value = getattr(value, part)
    return value


@pytest.mark.parametrize(("command", "module", "options"), CASES)
def test_each_option_sets_its_key(
    command: str, module: Any, options: dict[str, tuple[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[Resolved] = []
    monkeypatch.setattr(module, "run", lambda resolved: seen.append(resolved) or "done")
    done = CliRunner().invoke(app, [command, *" ".join(options).split()])
    assert done.exit_code == 0, done.output
    (resolved,) = seen
    assert {key: value_of(resolved, key) for key, _ in options.values()} == dict(options.values())
    for text, (key, value) in options.items():
        option = "--n" if text.startswith("-n ") else text.split()[0]
        assert resolved.provenance[key] == (f"--algo {value}" if key == "algo.name" else f"flag {option}")


def test_options_of_eval_reach_the_run_that_is_sampled(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Resolved] = []
    monkeypatch.setattr(evaluate, "sample", lambda resolved: seen.append(resolved) or "file")
    monkeypatch.setattr(evaluate, "run", lambda *args: None)
    words = ["eval", "--examine", "1", "--set", "eval.pass_at=[1,2]", *" ".join(SAMPLING).split()]
    assert CliRunner().invoke(app, words).exit_code == 0
    assert CliRunner().invoke(app, [*words, "--pass-at", "2"]).exit_code == 0
    by_set, by_flag = seen
    assert {key: value_of(by_set, key) for key, _ in SAMPLING.values()} == dict(SAMPLING.values())
    assert (by_set.config.reward.examine, by_set.config.run.name) == (1, "eval-run-latest-d")
    assert (by_set.config.eval.pass_at, by_flag.config.eval.pass_at) == ([1, 2], [2])

"""The config tree: what it refuses, and that every key says what it is."""

import pytest
from pydantic import ValidationError

from posttrain.config import ALGO_BUNDLES, AlgoConfig, Config, RunConfig, algo_bundle
from posttrain.errors import ConfigError


def test_tree_is_frozen_and_closed() -> None:
    config = Config(command="sft")
    with pytest.raises(ValidationError, match="frozen"):
        config.run.seed = 1
    with pytest.raises(ValidationError, match="Extra inputs"):
        Config.model_validate({"command": "sft", "trian": {}})


@pytest.mark.parametrize(
    ("command", "changes", "message"),
    [
        ("sft", {"cluster": {"workers": 3}, "train": {"sequence_parallel": 2}}, "does not divide"),
        ("sft", {"cluster": {"workers": 4}, "train": {"shard_size": 3}}, "train.shard_size = 3 does not divide"),
        ("sft", {"cluster": {"workers": 3}, "data": {"batch_size": 32}}, "data.batch_size = 32 is not divisible by 3"),
        ("rl", {"rollout": {"n": 1}}, "at least 2"),
        ("rl", {"rollout": {"temperature": 0.0}}, "nothing to learn"),
        ("rl", {"rollout": {"top_p": 0.9}}, "top_p < 1"),
        ("rl", {"algo": {"updates_per_step": 5}, "data": {"batch_size": 8}}, "does not divide"),
        ("rl", {"cluster": {"workers": 5}, "rollout": {"n": 8}, "data": {"batch_size": 8}}, "rollout.n = 64"),
        *(("sft", {"run": {"profile": p}}, "is not FIRST:LAST") for p in ("3", "0:2", "4:3", "a:b", "1:2:3", " 1:2")),
        ("rl", {"run": {"profile": "1:2"}, "rollout": {"only": True}}, "run.profile has no effect"),
        ("sft", {"train": {"early_stop": {"min_delta": 0.1}}}, "min_delta has no effect without"),
        ("sft", {"train": {"early_stop": {"patience": 2}, "val_every": 5}}, "needs data.val"),
        ("sft", {"train": {"early_stop": {"patience": 2}}, "data": {"val": "v.parquet"}}, "needs train.val_every"),
        ("rl", {"train": {"early_stop": {"patience": 2}, "val_every": 5}, "data": {"val": "v"}}, "of sft only"),
    ],
)
def test_combinations_that_make_no_sense_are_refused(command: str, changes: dict[str, object], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        Config.model_validate({"command": command, **changes})


def test_profiled_steps() -> None:
    assert list(RunConfig(profile="10:12").profiled_steps) == [10, 11, 12]
    assert list(RunConfig().profiled_steps) == []


def test_rl_batch_counts_episodes_not_prompts() -> None:
    config = Config.model_validate(
        {"command": "rl", "cluster": {"workers": 2}, "data": {"batch_size": 1}, "rollout": {"n": 2}}
    )
    assert config.data.batch_size == 1


def test_algo_bundles_hold_only_algo_keys() -> None:
    for name, bundle in ALGO_BUNDLES.items():
        AlgoConfig.model_validate({"name": name, **bundle})
    with pytest.raises(ConfigError) as caught:
        algo_bundle("gropo")
    assert caught.value.hint == "did you mean 'grpo'?"

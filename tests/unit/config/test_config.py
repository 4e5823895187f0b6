"""The config tree: what it refuses, and that every key says what it is."""

from typing import get_args

import pytest
from pydantic import ValidationError

from posttrain.algos import BUNDLES
from posttrain.algos.kl import AdaptiveKl
from posttrain.config import AlgoConfig, Config, RunConfig, algo_bundle
from posttrain.config.presets import resolve
from posttrain.core.errors import ConfigError


def test_tree_is_frozen_and_closed() -> None:
    config = Config(command="sft")
    with pytest.raises(ValidationError, match="frozen"):
        config.run.seed = 1
    with pytest.raises(ValidationError, match="Extra inputs"):
        Config.model_validate({"command": "sft", "trian": {}})


ADAPTS = {"algo": {"kl_coef": 0.1, "kl_in": "reward", "kl_target": 0.1, "kl_horizon": 100}}


def test_a_kl_coefficient_that_adapts_stays_above_0():
    sizes = {"data": {"batch_size": 99}, "rollout": {"n": 5}}
    cfg = Config.model_validate({"command": "rl", **ADAPTS, **sizes})
    kl = AdaptiveKl(cfg.algo.kl_coef, cfg.algo.kl_target, cfg.algo.kl_horizon)
    kl.update(0.0, 99 * 5)
    assert kl.value > 0.0


@pytest.mark.parametrize(
    ("command", "changes", "message"),
    [
        ("sft", {"cluster": {"workers": 3}, "train": {"sequence_parallel": 2}}, "does not divide"),
        ("sft", {"cluster": {"workers": 4}, "train": {"shard_size": 3}}, "train.shard_size = 3 does not divide"),
        ("sft", {"cluster": {"workers": 3}, "data": {"batch_size": 32}}, "data.batch_size = 32 is not divisible by 3"),
        ("rl", {"rollout": {"n": 1}}, "at least 2"),
        ("rl", {"rollout": {"temperature": 0.0}}, "nothing to learn"),
        ("rl", {"rollout": {"top_p": 0.9}}, "top_p < 1"),
        *(
            ("rl", {"algo": {"advantage": name}, "rollout": {"n": 1}}, f"at least 2: algo.advantage = '{name}'")
            for name in ("rloo", "opo", "gpg", "grpo_passk", "reinforce_plus_plus_baseline")
        ),
        ("rl", {"algo": {"gamma": 0.9}}, "algo.gamma has no effect with algo.advantage = 'grpo'"),
        ("rl", {"algo": {"lam": 0.9, "advantage": "reinforce_plus_plus"}}, "it is of 'gae'"),
        ("rl", {"algo": {"tau_negative": 2.0}}, "it is of 'sapo'"),
        ("rl", {"algo": {"kl_cov_share": 0.1, "policy_loss": "clip_cov"}}, "it is of 'kl_cov'"),
        ("rl", {"algo": {"dual_clip": 3.0, "policy_loss": "cispo"}}, "it is of 'clipped'"),
        ("rl", {"algo": {"norm_length": 100}}, "it is of 'seq-mean-token-sum-norm'"),
        ("rl", {"algo": {"kl_in": "reward"}}, "no effect with algo.kl_coef = 0"),
        ("rl", {"algo": {"kl_estimator": "k1"}}, "algo.kl_estimator = 'k1' has no effect with algo.kl_coef = 0"),
        ("rl", {"algo": {"kl_coef": 0.1, "kl_target": 0.1}}, "algo.kl_target has no effect with algo.kl_in = 'loss'"),
        ("rl", {"algo": {"kl_coef": 0.1, "kl_in": "reward", "kl_estimator": "k3+"}}, "a KL in the reward has none"),
        ("rl", {"algo": {"kl_coef": 0.1, "kl_in": "reward", "advantage": "gdpo"}}, "has no place for it"),
        ("rl", ADAPTS | {"data": {"batch_size": 100}, "rollout": {"n": 5}}, "raise algo.kl_horizon above 100"),
        ("rl", {"algo": {"advantage": "gae", "policy_loss": "gspo"}}, "has one ratio a sequence"),
        (
            "rl",
            {"algo": {"advantage": "reinforce_plus_plus", "policy_loss": "gmpo", "gamma": 0.9}},
            "an advantage for each token by algo.gamma below 1",
        ),
        (
            "rl",
            {"algo": {"advantage": "remax", "policy_loss": "gspo", "kl_in": "reward", "kl_coef": 0.1}},
            "an advantage for each token by the KL in the reward",
        ),
        ("rl", {"algo": {"kl_coef": 0.1, "kl_in": "reward", "kl_horizon": 5}}, "has no effect without algo.kl_target"),
        ("sft", {"train": {"optim": {"min_lr_ratio": 0.1}}}, "train.optim.min_lr_ratio = 0.1 has no effect with train"),
        (
            "rl",
            {"algo": {"advantage": "gae"}, "critic": {"optim": {"min_lr_ratio": 0.1}}},
            "critic.optim.min_lr_ratio = 0.1 has no effect with critic.optim.schedule = 'constant': set it to 0",
        ),
        (
            "rl",
            {"algo": {"advantage": "gae"}, "critic": {"optim": {"warmup_steps": 5, "warmup_ratio": 0.1}}},
            "critic.optim.warmup_steps and critic.optim.warmup_ratio exclude each other",
        ),
        (
            "rl",
            {"algo": {"advantage": "gae"}, "critic": {"optim": {"stochastic_rounding": True}}},
            "critic.optim.stochastic_rounding rounds weights to bfloat16",
        ),
        (
            "rl",
            {
                "algo": {"advantage": "gae"},
                "critic": {"optim": {"name": "adamw_8bit"}},
                "train": {"expert_parallel": 2},
                "cluster": {"workers": 2},
            },
            "train.expert_parallel with critic.optim.name = 'adamw_8bit' has not been tested",
        ),
        ("rl", {"algo": {"advantage": "distill"}}, "needs algo.teacher"),
        ("rl", {"algo": {"teacher": "builtin:tiny"}}, "it is of 'distill'"),
        ("rl", {"algo": {"clip_cov_low": 9.0, "policy_loss": "clip_cov"}}, "is not below"),
        ("rl", {"algo": {"advantage": "gdpo"}}, "names one: use 'grpo'"),
        ("rl", {"algo": {"advantage": "remax"}, "rollout": {"replay": "x"}}, "which rollout files do not have"),
        ("rl", {"algo": {"correction": {"weight": "token"}}, "rollout": {"replay": "x"}}, "already"),
        ("rl", {"algo": {"correction": {"upper": 3.0}}}, "upper has no effect without"),
        ("rl", {"algo": {"correction": {"reject_above": 3.0}}}, "reject_above has no effect without"),
        ("rl", {"algo": {"correction": {"weight": "token", "lower": 3.0}}}, "is above algo.correction.upper"),
        ("rl", {"rollout": {"staleness": 1, "over_sample_rate": 0.5}}, "rollout.window says how many may overtake"),
        ("rl", {"rollout": {"staleness": 1, "sleep": True}}, "engines sample while trainers work"),
        ("rl", {"rollout": {"staleness": 1}, "train": {"offload": True}}, "trainers work while engines sample"),
        ("rl", {"rollout": {"staleness": 1, "only": True}}, "no effect with rollout.only"),
        ("rl", {"rollout": {"window": 0.5}}, "rollout.window has no effect without rollout.staleness"),
        ("rl", {"rollout": {"pacing": False}}, "rollout.pacing has no effect without rollout.staleness"),
        (
            "rl",
            {"rollout": {"staleness": 1, "pacing": False}},
            "rollout.pacing has no effect with rollout.staleness = 1",
        ),
        ("rl", {"rollout": {"in_flight_updates": False}}, "no effect without rollout.staleness"),
        ("rl", {"rollout": {"keep_kv": True}}, "rollout.keep_kv has no effect without rollout.staleness"),
        (
            "rl",
            {"rollout": {"staleness": 1, "keep_kv": True, "in_flight_updates": False}},
            "rollout.keep_kv has no effect with rollout.in_flight_updates = false",
        ),
        (
            "rl",
            {"rollout": {"staleness": 1, "keep_kv": True, "record_schedule": True, "batch_invariant": True}},
            "a replay computes the KV cache anew",
        ),
        ("rl", {"critic": {"warmup_steps": 3}}, r"\[critic\] has no effect with algo.advantage = 'grpo'"),
        ("rl", {"algo": {"updates_per_step": 5}, "data": {"batch_size": 8}}, "does not divide"),
        ("rl", {"cluster": {"workers": 5}, "rollout": {"n": 8}, "data": {"batch_size": 8}}, "rollout.n = 64"),
        *(("sft", {"run": {"profile": p}}, "is not FIRST:LAST") for p in ("3", "0:2", "4:3", "a:b", "1:2:3", " 1:2")),
        ("rl", {"run": {"profile": "1:2"}, "rollout": {"only": True}}, "run.profile has no effect"),
        ("rl", {"cluster": {"weight_transfer": "broadcast"}}, "needs cluster.placement = 'separate'"),
        ("rl", {"rollout": {"sleep": True}, "cluster": {"placement": "separate"}}, "rollout.sleep has no effect"),
        ("rl", {"train": {"offload": True, "cpu_offload": True}}, "train.offload has no effect with train.cpu_offload"),
        (
            "rl",
            {"rollout": {"engine": "hf", "batch_invariant": True, "max_concurrent": 8}},
            "runs one request at a time",
        ),
        ("rl", {"rollout": {"record_schedule": True}}, "rollout.record_schedule needs rollout.batch_invariant"),
        ("rl", {"rollout": {"replay_schedule": "r"}}, "rollout.replay_schedule without rollout.record_schedule"),
        *(
            (
                "rl",
                {"rollout": {"record_schedule": True, "batch_invariant": True} | more},
                "such runs cannot be repeated",
            )
            for more in ({"over_sample_rate": 0.5}, {"agent": "a.py:play"}, {"only": True}, {"replay": "x"})
        ),
        ("generate", {"rollout": {"engine": "hf", "engine_options": {"seed": 1}}}, "engine_options has no effect with"),
        ("generate", {"rollout": {"engine_options": {"seed": 1}}}, "engine_options are of one engine"),
        ("sft", {"train": {"early_stop": {"min_delta": 0.1}}}, "min_delta has no effect without"),
        ("sft", {"train": {"early_stop": {"patience": 2}, "val_every": 5}}, "needs data.val"),
        ("sft", {"train": {"early_stop": {"patience": 2}}, "data": {"val": "v.parquet"}}, "needs train.val_every"),
        ("rl", {"train": {"early_stop": {"patience": 2}, "val_every": 5}, "data": {"val": "v"}}, "sft and prefer only"),
        ("prefer", {"prefer": {"method": "reward_model", "beta": 0.2}}, "prefer.beta has no effect with prefer.method"),
        ("prefer", {"prefer": {"center_coef": 0.1}}, "prefer.center_coef has no effect with prefer.method = 'dpo'"),
        ("prefer", {"prefer": {"loss": "ipo", "label_smoothing": 0.1}}, "no effect with prefer.loss = 'ipo'"),
        ("prefer", {"prefer": {"method": "reward_model"}, "train": {"lora": {"rank": 4}}}, "train.lora has no effect"),
        (
            "prefer",
            {"prefer": {"method": "reward_model"}, "data": {"enable_thinking": False}},
            "a reward model is used without them",
        ),
        ("prefer", {"cluster": {"workers": 3}, "data": {"batch_size": 4}}, "2 \\* data.batch_size = 8 is not divis"),
        ("prefer", {"train": {"early_stop": {"patience": 2}, "val_every": 5}}, "needs data.val"),
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


@pytest.mark.parametrize("name", BUNDLES.names())
def test_every_algo_makes_a_config(name: str) -> None:
    sets = {"opd": ["algo.teacher=builtin:tiny"], "gdpo": ["reward.weights={score = 1.0, format = 0.5}"]}.get(name, [])
    config = resolve("rl", "tiny-gsm8k", sets, {"algo.name": name}).config
    assert config.algo.name == name
    bundle = BUNDLES.get(name)
    assert config.algo.advantage == bundle["algo.advantage"]
    assert config.algo.loss_agg == bundle["algo.loss_agg"]


def test_an_algo_leaves_nothing_of_another() -> None:
    """But KL, entropy and updates are not what makes it up."""
    preset = "qwen2.5-0.5b-dapo"  # has dual_clip, which gspo does not know
    config = resolve("rl", preset, ["algo.entropy_coef=0.1"], {"algo.name": "gspo"}).config
    assert config.algo.dual_clip is None
    assert (config.algo.updates_per_step, config.algo.entropy_coef) == (4, 0.1)


def test_names_of_the_config_are_those_of_the_algorithms() -> None:
    from posttrain.algos import kl

    def choices(field: str) -> set[str]:
        return set(get_args(AlgoConfig.model_fields[field].annotation))

    assert choices("kl_estimator") == set(kl.ESTIMATORS)


def test_an_unknown_algo() -> None:
    with pytest.raises(ConfigError) as caught:
        algo_bundle("gropo")
    assert caught.value.hint == "did you mean 'grpo'?"

"""Launch scripts of verl as presets. The scripts in verl_scripts/ are ours, with the keys and values of verl's own."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from posttrain.config.presets import resolve
from posttrain.config.verl.keys_rl import RL
from posttrain.config.verl.keys_sft import SFT, SFT_ENGINE
from posttrain.config.verl.rules import Outcome, ours_default
from posttrain.core.errors import ConfigError, DataError
from posttrain.interop.verl import defaults
from posttrain.interop.verl.command import as_json, check, command_line, preset_text, report, run
from posttrain.interop.verl.convert import Converted, convert
from posttrain.interop.verl.expand import Shell, variables_of
from posttrain.interop.verl.hydra import parse_value
from posttrain.interop.verl.shell import read_script

SCRIPTS = Path(__file__).parent / "verl_scripts"


def read(name: str, *arguments: str, **variables: str) -> Converted:
    return convert(SCRIPTS / name, arguments, {"HOME": "/HOME", **variables}, SCRIPTS)


def config_of(converted: Converted, tmp_path: Path) -> Any:
    check(converted)
    file = tmp_path / "p.toml"
    file.write_text(preset_text(converted))
    return resolve(converted.command, str(file)).config


def fate(converted: Converted) -> dict[str, Outcome]:
    return {finding.key: finding.outcome for finding in converted.findings}


# ---------------------------------------------------------------------- scripts


def test_gsm8k_grpo(tmp_path: Path) -> None:
    found = read("gsm8k_grpo.sh")
    cfg = config_of(found, tmp_path)
    assert (cfg.data.batch_size, cfg.algo.updates_per_step, cfg.rollout.n) == (1024, 4, 5)
    assert (cfg.train.sequences_per_microbatch, cfg.train.tokens_per_microbatch) == (40, 40 * (512 + 1024))
    assert (cfg.cluster.workers, cfg.rollout.tensor_parallel, cfg.rollout.replicas) == (8, 2, 4)
    assert (cfg.algo.kl_coef, cfg.algo.kl_in, cfg.algo.kl_estimator) == (0.001, "loss", "low_var_kl")
    assert cfg.data.train == "/HOME/data/gsm8k/train.parquet"
    assert (cfg.data.truncation, cfg.train.activation_checkpointing, cfg.train.offload) == ("drop", "full", False)
    assert (cfg.train.save_every, cfg.train.val_every, cfg.train.epochs) == (20, 5, 15)
    # What verl does where the script says nothing.
    assert (cfg.algo.dual_clip, cfg.train.optim.betas, cfg.val.temperature) == (3.0, (0.9, 0.999), 0.0)
    assert cfg.rollout.sleep is True
    assert command_line(found, "x.toml") == "WANDB_PROJECT=grpo_gsm8k posttrain rl --preset x.toml"
    unplaced = [f.key for f in found.findings if f.outcome is Outcome.NOT_MAPPED]
    assert unplaced == ["actor_rollout_ref.ref.fsdp_config.param_offload"]
    assert read("gsm8k_grpo.sh", MODEL="mine").draft.values["model.path"] == "mine"


@pytest.mark.parametrize(
    "where",
    [
        {"actor_rollout_ref.actor.use_kl_loss": True, "actor_rollout_ref.actor.kl_loss_coef": 0.0,
         "actor_rollout_ref.actor.kl_loss_type": "kl"},
        {"actor_rollout_ref.actor.use_kl_loss": False, "algorithm.use_kl_in_reward": True,
         "algorithm.kl_ctrl.kl_coef": 0.0, "algorithm.kl_penalty": "abs", "algorithm.kl_ctrl.type": "adaptive"},
    ],
)  # fmt: skip
def test_a_kl_with_the_coefficient_0_is_none(where: dict[str, Any], tmp_path: Path) -> None:
    found = read("gsm8k_grpo.sh", *(f"{key}={value}" for key, value in where.items()))
    algo = config_of(found, tmp_path).algo
    assert (algo.kl_coef, algo.kl_in, algo.kl_estimator, algo.kl_target) == (0.0, "loss", "low_var_kl", None)
    assert fate(found)[list(where)[-1]] is Outcome.NO_NEED


@pytest.mark.parametrize(
    ("mode", "ours", "outcome"),
    [("R3", "R3", Outcome.MAPPED), ("R2", "off", Outcome.NOT_MAPPED), ("disabled", "off", Outcome.NO_NEED)],
)
def test_router_replay(tmp_path: Path, mode: str, ours: str, outcome: Outcome) -> None:
    key = "actor_rollout_ref.actor.router_replay.mode"
    recorded = "actor_rollout_ref.rollout.enable_rollout_routing_replay"
    found = read("gsm8k_grpo.sh", f"{key}={mode}", f"{recorded}={mode != 'disabled'}")
    assert config_of(found, tmp_path).rollout.router_replay == ours
    assert fate(found)[key] is fate(found)[recorded] is outcome


@pytest.mark.parametrize(
    ("value", "ours", "outcome"),
    [("fp8", "fp8", Outcome.MAPPED), ("torchao", "none", Outcome.NOT_MAPPED), ("null", "none", Outcome.NO_NEED)],
)
def test_quantization(tmp_path: Path, value: str, ours: str, outcome: Outcome) -> None:
    key = "actor_rollout_ref.rollout.quantization"
    found = read("gsm8k_grpo.sh", f"{key}={value}")
    assert config_of(found, tmp_path).rollout.quantization == ours
    assert fate(found)[key] is outcome


def test_dapo(tmp_path: Path) -> None:
    found = read("dapo.sh")
    cfg = config_of(found, tmp_path)
    assert (cfg.data.batch_size, cfg.algo.updates_per_step, cfg.cluster.workers) == (512, 16, 64)
    assert cfg.train.optim.warmup_steps == 10 * 16  # RL steps in verl, optimizer steps here
    assert cfg.train.tokens_per_microbatch == 4 * 10240
    assert (cfg.train.sequence_parallel, cfg.train.shard_size, cfg.rollout.replicas) == (4, 32, 16)
    assert (cfg.algo.clip_low, cfg.algo.clip_high, cfg.algo.dual_clip) == (0.2, 0.28, 10.0)
    assert (cfg.rollout.filter_groups, cfg.rollout.filter_max_batches) == (True, 10)
    assert cfg.rollout.filter_metric == "correct"
    assert (cfg.reward.overlong.buffer_tokens, cfg.reward.weights) == (4096, {"score": 1.0, "overlong": 1.0})
    assert cfg.rollout.engine_options == {"enable_chunked_prefill": True, "max_num_batched_tokens": 10240}
    assert (cfg.run.dir, cfg.run.name) == ("/HOME/verl/ckpts/DAPO", "DAPO-7b")
    assert {key for key, outcome in fate(found).items() if outcome is Outcome.NOT_MAPPED} == {
        "data.truncation",
        "actor_rollout_ref.model.override_config.max_position_embeddings",
    }  # fmt: skip
    assert any("cluster.address" in note for note in found.notes)


def test_retool(tmp_path: Path) -> None:
    found = read("retool.sh")
    cfg = config_of(found, tmp_path)
    assert (cfg.rollout.max_turns, cfg.rollout.tools, cfg.rollout.tool_format) == (16, ["sandbox_tool.yaml"], "hermes")
    assert (cfg.rollout.max_calls_per_turn, cfg.rollout.max_tool_response_chars) == (1, 256)  # verl's defaults
    assert (cfg.sandbox.mode, cfg.sandbox.url, cfg.sandbox.memory_mb) == ("remote", "http://localhost:8080", 512)
    assert cfg.reward.function == "recipe/retool/retool.py:compute_score"
    assert cfg.data.train == f"{SCRIPTS}/dataset/DAPO-Math-17k"
    assert (cfg.val.n, cfg.val.top_p, cfg.val.temperature) == (30, 0.6, 1.0)
    assert "2: put their rows into one" in next(f.detail for f in found.findings if f.key == "data.val_files")


def test_sft(tmp_path: Path) -> None:
    found = read("sft.sh", "4", "out/run")
    cfg = config_of(found, tmp_path)
    assert (cfg.cluster.workers, cfg.train.sequence_parallel, cfg.data.batch_size) == (4, 2, 256)
    assert (cfg.train.steps, cfg.train.epochs, cfg.train.optim.lr) == (1, 4, 1e-4)
    assert (cfg.train.optim.schedule, cfg.train.optim.warmup_ratio) == ("cosine", 0.1)  # verl's defaults
    assert (cfg.data.max_length, cfg.train.sequences_per_microbatch) == (1024, 4)
    assert (cfg.run.dir, cfg.run.logger) == ("out/run", ["console", "jsonl"])
    assert Outcome.NOT_MAPPED not in fate(found).values()
    # Without its arguments the script ends; what depends on them is named, and not guessed.
    bare = read("sft.sh")
    assert fate(bare)["trainer.default_local_dir"] is fate(bare)["launcher.nproc_per_node"] is Outcome.NOT_MAPPED
    assert "cluster.workers" not in bare.draft.values


@pytest.mark.parametrize(("name", "arguments"), [("gsm8k_grpo.sh", []), ("dapo.sh", []), ("retool.sh", []),
                                                 ("sft.sh", ["4", "out"])])  # fmt: skip
def test_nine_in_ten_keys_find_a_place(name: str, arguments: list[str]) -> None:
    counts = read(name, *arguments).counted()
    assert counts[Outcome.NOT_MAPPED] <= 0.1 * sum(counts.values())


def test_what_is_not_known_is_named() -> None:
    found = read("odd.sh")
    details = {f.key: f.detail for f in found.findings if f.outcome is Outcome.NOT_MAPPED}
    assert details["trainer.experiment_name"] == "not evaluated: the output of $(date +%F)"
    assert "set only under a condition" in details["data.train_batch_size"]
    assert details["actor_rollout_ref.actor.ppo_mini_batch_size"].startswith("it depends on data.train_batch_size")
    assert details["trainer.no_such_key"] == "import-verl does not know this key"
    assert "removes the key" in details["data.val_files"]
    assert "Megatron" in details["actor_rollout_ref.actor.megatron.context_parallel_size"]
    assert "variable SLURM_JOB_NUM_NODES is not set" in details["trainer.nnodes"]
    assert {"data.batch_size", "cluster.workers", "run.name"}.isdisjoint(found.draft.values)
    assert any("cluster.env" in note for note in found.notes)
    assert any("trainer.total_epochs=7" in note and "never saw it" in note for note in found.notes)
    assert found.draft.values["train.epochs"] == 30  # so verl's default counts
    text = preset_text(found)
    assert all(f"#   {key}: " in text for key in details)
    assert report(found)[0].startswith("11 keys: 2 mapped")


def test_no_launch_and_no_file(tmp_path: Path) -> None:
    script = tmp_path / "x.sh"
    script.write_text("python3 -m verl.experimental.fully_async_policy.main_ppo a.b=1\n")
    with pytest.raises(DataError, match=r"starts no trainer .*main_ppo \(line 1\)"):
        run(str(script))
    script.write_text("run() {\n  python -m verl.trainer.main_ppo a.b=1\n}\nrun\n")
    with pytest.raises(DataError, match="it starts: nothing") as error:
        run(str(script))
    assert "functions and `bash -c` are not read" in (error.value.hint or "")
    script.write_text("echo 'never closed\n")
    with pytest.raises(DataError, match="line 1: ' is not closed"):
        run(str(script))
    with pytest.raises(DataError, match="cannot be read"):
        run(str(tmp_path / "missing.sh"))


def test_command_writes_a_preset_once(tmp_path: Path) -> None:
    out = tmp_path / "sub" / "mine.toml"
    command = [sys.executable, "-m", "posttrain", "import-verl", str(SCRIPTS / "sft.sh"), "2", "x", "--out", str(out)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert done.stdout == f"posttrain sft --preset {out}\n"
    assert "18 keys: 11 mapped, 7 need not be said here, 0 not mapped (100 % accounted for)" in done.stderr
    with pytest.raises(ConfigError, match="exists"):
        run(str(SCRIPTS / "sft.sh"), ["2", "x"], out=str(out))
    assert [p.name for p in out.parent.iterdir()] == ["mine.toml"]
    found = json.loads(as_json(read("sft.sh", "2", "x")))
    assert found["counts"] == {"mapped": 11, "no need": 7, "not mapped": 0}


FREEZE, IMAGES = "actor_rollout_ref.actor.freeze_vision_tower", "data.image_key=images"


@pytest.mark.parametrize(
    ("arguments", "tower", "outcome"),
    [
        ([IMAGES, f"{FREEZE}=False"], "trained", Outcome.MAPPED),
        ([IMAGES, f"{FREEZE}=True"], None, Outcome.NO_NEED),
        ([IMAGES], None, None),
        ([], None, None),
    ],
)
def test_vision_tower(arguments: list[str], tower: str | None, outcome: Outcome | None) -> None:
    found = read("gsm8k_grpo.sh", *arguments)
    assert found.draft.values.get("train.vision_tower") == tower
    assert fate(found).get(FREEZE) is outcome
    # verl trains the tower unless it is told not to: a script with images that does not say so gets a note.
    assert any("train.vision_tower=trained" in note for note in found.notes) is (arguments == [IMAGES])


def test_columns_that_are_called_otherwise() -> None:
    assert fate(read("gsm8k_grpo.sh", IMAGES))["data.image_key"] is Outcome.NO_NEED
    assert fate(read("gsm8k_grpo.sh", "data.image_key=pictures"))["data.image_key"] is Outcome.NOT_MAPPED


@pytest.mark.parametrize(
    "argument",
    [
        "data.train_batch_size=abc",
        "data.train_batch_size=null",
        "actor_rollout_ref.actor.ppo_mini_batch_size=0",
        "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=abc",
        "actor_rollout_ref.actor.optim.lr=fast",
        "actor_rollout_ref.rollout.tensor_model_parallel_size=0",
        "actor_rollout_ref.rollout.n=null",
        "data.train_files=3",
    ],
)
def test_values_that_are_no_numbers_are_named(argument: str) -> None:
    key, _, value = argument.partition("=")
    found = read("gsm8k_grpo.sh", argument)
    detail = next(f.detail for f in found.findings if f.key == key and f.outcome is Outcome.NOT_MAPPED)
    assert f"{key} = {parse_value(value)!r}" in detail
    check(found)  # no half of a rule is in the preset


def test_names_of_older_versions() -> None:
    actor, critic = "actor_rollout_ref.actor.optim.warmup_style=cosine", "critic.optim.warmup_style=cosine"
    assert read("gsm8k_grpo.sh", actor).draft.values["train.optim.schedule"] == "cosine"
    found = read("gsm8k_grpo.sh", "algorithm.adv_estimator=gae", critic)
    assert found.draft.values["critic.optim.schedule"] == "cosine"
    found = read("sft.sh", "2", "out", "optim.warmup_steps_ratio=0.3")
    assert found.draft.values["train.optim.warmup_ratio"] == 0.3
    cap = "actor_rollout_ref.actor.tis_imp_ratio_cap"
    cut = read("gsm8k_grpo.sh", f"{cap}=2").draft.values
    assert (cut["algo.correction.weight"], cut["algo.correction.upper"]) == ("token", 2.0)
    assert fate(read("gsm8k_grpo.sh", f"{cap}=-1"))[cap] is Outcome.NO_NEED


def test_a_checkpoint_after_each_epoch_is_not_mapped(tmp_path: Path) -> None:
    script = tmp_path / "x.sh"
    script.write_text(
        "python -m verl.trainer.sft_trainer engine=fsdp optim=fsdp "
        "trainer.save_freq=after_each_epoch trainer.test_freq=after_each_epoch\n"
    )
    found = fate(convert(script))
    assert found["trainer.save_freq"] is found["trainer.test_freq"] is Outcome.NOT_MAPPED
    assert found["engine"] is found["optim"] is Outcome.NO_NEED
    script.write_text("python -m verl.trainer.sft_trainer engine=megatron\n")
    assert fate(convert(script))["engine"] is Outcome.NOT_MAPPED


@pytest.mark.parametrize(
    "content",
    [
        b"tools: [",
        b"- a list",
        b"",
        b"\xff\xfe\xfd",
        b"tools: [3]",
        b"tools: [{class_name: a.SandboxFusionTool, config: 3}]",
        b"tools: [{class_name: a.SandboxFusionTool, config: {memory_limit_mb: much}}]",
    ],
)
def test_tool_file_that_is_none(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "tools.yaml").write_bytes(content)
    script = tmp_path / "x.sh"
    script.write_text(
        "python -m verl.trainer.main_ppo actor_rollout_ref.rollout.multi_turn.tool_config_path=tools.yaml\n"
    )
    assert any("tools.yaml" in note for note in convert(script, root=tmp_path).notes)


@pytest.mark.parametrize("content", [b"- a list", b"3", b"a: [", b"\xff\xfe\xfd"])
def test_config_file_that_is_none(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "mine.yaml").write_bytes(content)
    script = tmp_path / "x.sh"
    script.write_text("python -m verl.trainer.main_ppo --config-path=. --config-name=mine\n")
    assert any("mine.yaml cannot be read" in note for note in convert(script, root=tmp_path).notes)


def test_torchrun_without_its_number(tmp_path: Path) -> None:
    script = tmp_path / "x.sh"
    script.write_text("torchrun --nproc_per_node -m verl.trainer.fsdp_sft_trainer data.train_batch_size=8\n")
    found = convert(script)
    assert fate(found)["launcher.nproc_per_node"] is Outcome.NOT_MAPPED
    assert "cluster.workers" not in found.draft.values


def test_values_that_do_not_go_together(tmp_path: Path) -> None:
    script = tmp_path / "x.sh"
    script.write_text(
        "python -m verl.trainer.main_ppo actor_rollout_ref.rollout.name=vllm algorithm.adv_estimator=rloo\n"
    )
    with pytest.raises(ConfigError, match=r"rollout\.n must be at least 2"):
        check(convert(script))


def test_rules_name_keys_that_are_there() -> None:
    for rules, known in ((RL, defaults.RL), (SFT, defaults.SFT), (SFT_ENGINE, defaults.SFT_ENGINE)):
        for rule in rules:
            assert rule.kind is not Outcome.MAPPED or rule.theirs
            for ours in rule.ours:
                ours_default(ours)  # AttributeError where there is none
        for key in known:
            assert any(rule.matches(key) for rule in rules), key


# ---------------------------------------------------------------------- the shell, beside bash

_NAMES = st.sampled_from(["a", "b", "c", "long_name"])
_PLAIN = st.text("ab1/._-:", min_size=1, max_size=6)
_FORMS = st.one_of(
    _PLAIN,
    st.text('ab1 $#;"*[]{,}', max_size=6).map(lambda s: f"'{s}'"),
    _NAMES.map(lambda n: f"${n}"),
    _NAMES.map(lambda n: f"${{{n}}}"),
    st.tuples(_NAMES, st.sampled_from([":-", "-", ":+", "+"]), _PLAIN).map(lambda t: f"${{{t[0]}{t[1]}{t[2]}}}"),
    st.tuples(_NAMES, _NAMES).map(lambda t: f"${{{t[0]}:-${t[1]}}}"),
    st.tuples(_NAMES, st.sampled_from(["#", "##", "%", "%%"]), st.sampled_from(["a", "*/", "/*", "1*", "*"])).map(
        lambda t: f"${{{t[0]}{t[1]}{t[2]}}}"
    ),
    st.tuples(_NAMES, st.sampled_from([",,", "^^"])).map(lambda t: f"${{{t[0]}{t[1]}}}"),
    st.just('"${list[@]}"'),
    st.just("${list[@]}"),
    st.just("${#list[@]}"),
    st.just("${list[1]}"),
    st.just('$(basename "$a")'),
    st.tuples(st.integers(-9, 99), st.sampled_from(["+", "-", "*", "/", "%", "**"]), st.integers(1, 9)).map(
        lambda t: f"$(( {t[0]} {t[1]} ({t[2]} + 1) * n ))"
    ),
)
_WORDS = st.lists(st.one_of(_FORMS, _FORMS.filter(lambda f: "'" not in f and '"' not in f).map(lambda f: f'"x{f} y"')),
                  min_size=1, max_size=3).map("".join)  # fmt: skip
_LINES = st.one_of(
    st.tuples(_NAMES, st.sampled_from(["", "+"]), _WORDS).map(lambda t: f"{t[0]}{t[1]}={t[2]}"),
    st.tuples(st.sampled_from(["", "+"]), st.lists(_WORDS, max_size=3)).map(lambda t: f"list{t[0]}=({' '.join(t[1])})"),
    st.tuples(_NAMES, _WORDS).map(lambda t: f"export {t[0]}={t[1]} # a comment"),
)


@settings(max_examples=150, deadline=None)
@given(st.lists(_LINES, max_size=6), st.lists(_WORDS, min_size=1, max_size=4))
def test_words_are_as_bash_makes_them(lines: list[str], words: list[str]) -> None:
    start = "n=3\na='one two'\nb=\nc=x/y.z\nlong_name=A\nlist=(1 '2 3')\n"
    script = start + "\n".join(lines) + "\nset -f\npython -m verl.main_ppo " + " \\\n  ".join(words)
    real = subprocess.run(
        ["bash", "-c", script.replace("python -m verl.main_ppo", r"printf '%s\0' --")], capture_output=True, timeout=10,
        env={"PATH": "/usr/bin:/bin"},
    )  # fmt: skip
    (launch,) = read_script(script, {}).launches
    ours = [word.known for word in launch.words]
    if None in ours:  # it may say that it does not know, but never anything else than bash
        reasons = [reason for word in launch.words for reason in word.reasons]
        known = ("brace expansion", "not set", "$((", "the output of")
        assert all(any(part in reason for part in known) for reason in reasons), reasons
    else:
        theirs = real.stdout.decode().split("\0")[:-1][1:] if real.stdout else []
        assert ours == theirs


def test_a_value_that_is_not_known_stays_so() -> None:
    shell = Shell(variables_of({"a": "1"}), [])
    for raw in ("$missing", "${missing}", "$(ls)", "`ls`", "${a/1/2}", "$((missing + 1))", "$((a << 2))", "{x,y}",
                "$((08 + 1))", "$((2 ** 99))", "$((1 / 0))"):  # fmt: skip
        (word,) = shell.expand(raw)
        assert word.known is None, raw
        assert word.reasons
    assert shell.expand("${missing:-2}")[0].known == "2"


def test_values_are_as_hydra_reads_them() -> None:
    assert [parse_value(text) for text in ("1e-6", "1_000", "True", "null", "-1", "x/y", "'1'", "")] == [
        1e-6, 1000, True, None, -1, "x/y", "1", "",
    ]  # fmt: skip
    assert parse_value("[console,wandb]") == ["console", "wandb"]
    assert parse_value("""["a", 'b c', [1]]""") == ["a", "b c", [1]]
    assert parse_value("{a: 1, b: [x]}") == {"a": 1, "b": ["x"]}

"""Presets: the order of the layers, the origin of each value, and messages that name the key and the file."""

import os
from pathlib import Path

import pytest
import tomli

from posttrain.config import Config, preset_files
from posttrain.config.keys import leaf_keys
from posttrain.config.preset_files import default_preset, find_preset, list_presets, load_preset
from posttrain.config.presets import resolve
from posttrain.config.writing import dump_toml, flatten_config
from posttrain.core.errors import ConfigError


def write(folder: Path, name: str, text: str) -> str:
    path = folder / f"{name}.toml"
    path.write_text(text)
    return str(path)


@pytest.mark.parametrize("preset", list_presets(), ids=lambda preset: preset.name)
def test_shipped_preset_parses_for_its_command(preset: preset_files.Preset) -> None:
    resolved = resolve(preset.command, preset.name)  # type: ignore[arg-type]
    assert resolved.config.command == preset.command
    assert resolved.config.run.name == preset.name
    assert resolved.config.description
    assert set(resolved.provenance) == set(leaf_keys())
    # What a run stores is the whole truth: it reads back to the same tree.
    assert Config.model_validate(tomli.loads(dump_toml(resolved.config))) == resolved.config


def test_known_recipes() -> None:
    sft = resolve("sft", "qwen2.5-0.5b-multiturn").config
    assert (sft.data.max_length, sft.data.batch_size, sft.train.sequence_parallel, sft.train.epochs) == (
        16384,
        16,
        2,
        2,
    )
    dapo = resolve("rl", "qwen2.5-0.5b-dapo").config
    assert (dapo.algo.clip_low, dapo.algo.clip_high, dapo.algo.dual_clip, dapo.algo.kl_coef) == (0.2, 0.28, 10.0, 0.0)
    assert (dapo.rollout.n, dapo.val.n, dapo.rollout.max_turns, dapo.train.offload) == (16, 30, 8, True)
    assert (dapo.rollout.max_prompt_tokens, dapo.rollout.max_response_tokens) == (2048, 16384)
    for name in ("qwen2.5-3b-gsm8k-multiturn", "qwen3-4b-gsm8k-multiturn"):
        rl = resolve("rl", name).config
        assert (rl.rollout.n, rl.rollout.max_turns, rl.rollout.tensor_parallel) == (8, 5, 2)
        assert (rl.rollout.over_sample_rate, rl.rollout.memory_fraction) == (0.1, 0.5)
        assert (rl.train.optim.lr, rl.algo.kl_coef, rl.algo.kl_estimator) == (1e-6, 0.001, "low_var_kl")
        assert rl.train.activation_checkpointing == "full"
    assert resolve("rl", "qwen3-4b-gsm8k-multiturn").config.model.path == "Qwen/Qwen3-4B"
    coder = resolve("sft", "qwen2.5-coder-7b-sft").config
    assert (coder.data.batch_size, coder.train.sequences_per_microbatch, coder.data.max_length) == (128, 2, 4096)
    assert (coder.train.optim.lr, coder.train.optim.schedule, coder.train.optim.warmup_ratio) == (2e-5, "cosine", 0.05)


def test_layers_and_provenance(tmp_path: Path) -> None:
    write(
        tmp_path, "base", 'command = "sft"\n[train]\nsteps = 1\nepochs = 2\n[data]\nbatch_size = 4\nmax_length = 64\n'
    )
    child = write(tmp_path, "child", 'extends = "./base.toml"\n[train]\nsteps = 2\n[data]\nbatch_size = 5\n')
    resolved = resolve("sft", child, ["data.batch_size=6", "train.epochs=3"], {"train.epochs": 4, "train.steps": None})
    config, origin = resolved.config, resolved.provenance
    assert (config.train.steps, origin["train.steps"]) == (2, "preset child")
    assert (config.data.max_length, origin["data.max_length"]) == (64, "preset base")
    assert (config.data.batch_size, origin["data.batch_size"]) == (6, "--set")
    assert (config.train.epochs, origin["train.epochs"]) == (4, "flag --epochs")
    assert (config.data.shuffle, origin["data.shuffle"]) == (True, "default")
    assert config.run.name == resolved.preset_name == "child"


def test_algo_bundle_lies_below_the_preset_and_the_flag_above_it(tmp_path: Path) -> None:
    preset = write(tmp_path, "p", 'command = "rl"\n[algo]\nname = "dr_grpo"\nnormalize_by_std = true\n')
    below = resolve("rl", preset)
    assert below.config.algo.normalize_by_std is True  # the preset's own word wins over the bundle of its algo
    assert below.config.algo.loss_agg == "seq-mean-token-sum-norm"
    assert below.provenance["algo.loss_agg"] == "algo dr_grpo"
    above = resolve("rl", preset, flags={"algo.name": "dr_grpo"})
    assert above.config.algo.normalize_by_std is False
    assert above.provenance["algo.normalize_by_std"] == "--algo dr_grpo"
    kept = resolve("rl", preset, ["algo.normalize_by_std=true"], {"algo.name": "dr_grpo"})
    assert kept.config.algo.normalize_by_std is True
    switched = resolve("rl", preset, ["algo.name=grpo"])
    assert (switched.config.algo.name, switched.config.algo.loss_agg) == ("grpo", "token-mean")


@pytest.mark.parametrize(
    ("text", "key", "value"),
    [
        ("data.train=data/x.parquet", "data.train", "data/x.parquet"),
        ('rollout.tools=["gsm8k"]', "rollout.tools", ["gsm8k"]),
        ("cluster.address=10.0.0.1:6379", "cluster.address", "10.0.0.1:6379"),
        ("train.optim={lr = 1, grad_clip = 2.0}", "train.optim.lr", 1.0),
        ("train.steps=none", "train.steps", None),
        ("train.optim.betas=[0.8, 0.9]", "train.optim.betas", (0.8, 0.9)),
        ("run.name=2024-01-01", "run.name", "2024-01-01"),
        ("run.name=", "run.name", ""),
    ],
)
def test_set_takes_toml_values_and_bare_words(text: str, key: str, value: object) -> None:
    node: object = resolve("sft", "tiny-multiturn", [text]).config
    for part in key.split("."):
        node = getattr(node, part)
    assert node == value


@pytest.mark.parametrize(
    ("setting", "message", "hint"),
    [
        ("train.lr=1", "unknown key `train.lr` in --set", "did you mean `train.optim.lr`?"),
        ("rolout.n=1", "unknown key `rolout.n` in --set", "did you mean `rollout.n`?"),
        ("train=1", "`train` in --set is a section, not a value", "`train.epochs`"),
        ("run.name.x=1", "unknown key `run.name.x` in --set", "did you mean `run.name`?"),
        ("qqq=1", "unknown key `qqq` in --set", "posttrain presets show"),
        ("train.steps", "not of the form key=value", "--set train.steps=20"),
        ("tools.a.x=nan", "tools = {'a': {'x': nan}} has a number that is not finite", "no setting takes them"),
        ('tools."a.b".type="x"', 'has a " in its key', "without quotes"),
        ("train.steps=ten", "train.steps = 'ten' (--set): ", None),
        ('data.batch_size="4"', "data.batch_size = '4' (--set): ", None),
        ("cluster.workers=3", "data.batch_size = 32 is not divisible by 3", "cluster.workers is set by: --set"),
    ],
)
def test_bad_settings_name_the_key_and_help(setting: str, message: str, hint: str | None) -> None:
    with pytest.raises(ConfigError) as caught:
        resolve("sft", "tiny-multiturn", [setting])
    assert message in caught.value.message
    assert hint is None or (caught.value.hint is not None and hint in caught.value.hint)


def test_a_value_of_the_preset_that_loses_its_effect_is_named_with_what_to_set() -> None:
    with pytest.raises(ConfigError, match=r"train\.optim\.schedule = 'constant': set it to 0, or") as caught:
        resolve("rl", "smollm2-135m-gsm8k", ["train.optim.schedule=constant"])
    assert caught.value.hint == (
        "train.optim.min_lr_ratio is set by: preset smollm2-135m-gsm8k; train.optim.schedule is set by: --set"
    )
    changed = ["train.optim.schedule=constant", "train.optim.min_lr_ratio=0"]
    assert resolve("rl", "smollm2-135m-gsm8k", changed).config.train.optim.min_lr_ratio == 0.0


def test_one_line_per_wrong_value() -> None:
    with pytest.raises(ConfigError) as caught:
        resolve("sft", "tiny-multiturn", ["train.steps=ten"], {"run.seed": "x"})
    lines = caught.value.message.splitlines()
    assert [line.split(" = ")[0] for line in lines] == ["run.seed", "train.steps"]
    assert "(flag --seed)" in lines[0]


def test_unknown_keys_of_a_file_name_the_file(tmp_path: Path) -> None:
    preset = write(tmp_path, "p", 'command = "sft"\nfoo = 1\n[data]\nbatchsize = 1\n')
    with pytest.raises(ConfigError) as caught:
        resolve("sft", preset)
    assert caught.value.message.splitlines() == [
        f"unknown key `foo` in {preset}",
        f"unknown key `data.batchsize` in {preset}",
    ]
    assert caught.value.hint is not None
    assert "did you mean `data.batch_size`?" in caught.value.hint


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("command = sft", "is not valid TOML"),
        ('command = "train"', "unknown command 'train'"),
        ("[data]\nbatch_size = 1", "no `command`"),
        ('command = "sft"\nextends = 3', "extends = 3"),
        ('command = "sft"\nextends = "nothing.toml"', "preset file not found"),
        ('command = "sft"\n"data.train" = "x"', 'unknown key `"data.train"`'),
    ],
)
def test_bad_preset_files(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load_preset(write(tmp_path, "bad", text))


def test_circle_of_presets(tmp_path: Path) -> None:
    write(tmp_path, "a", 'command = "sft"\nextends = "./b.toml"')
    b = write(tmp_path, "b", 'extends = "./a.toml"')
    with pytest.raises(ConfigError, match="b -> a -> b"):
        load_preset(b)


def test_unknown_preset_and_preset_of_another_command() -> None:
    with pytest.raises(ConfigError) as caught:
        find_preset("tiny-multitrun")
    assert caught.value.hint == "did you mean 'tiny-multiturn'?"
    with pytest.raises(ConfigError, match="is for `posttrain rl`, not for `posttrain sft`") as caught:
        resolve("sft", "tiny-gsm8k")
    assert "tiny-multiturn" in str(caught.value.hint)


def test_default_preset_follows_the_gpu(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    smi = tmp_path / "nvidia-smi"
    smi.write_text("#!/bin/sh\necho 'GPU 0: Something (UUID: GPU-1)'\n")
    smi.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert default_preset("sft") == (
        "qwen2.5-0.5b-gsm8k-sft",
        "GPU found: using preset qwen2.5-0.5b-gsm8k-sft",
    )
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert default_preset("sft") == ("tiny-multiturn", "no GPU found: using preset tiny-multiturn")
    for defaults in (preset_files.GPU_PRESETS, preset_files.CPU_PRESETS):
        for command, name in defaults.items():
            assert load_preset(name).command == command


def test_eval_needs_no_preset() -> None:
    resolved = resolve("eval", flags={"eval.pass_at": [1, 5]})
    assert resolved.config.eval.pass_at == [1, 5]
    assert resolved.provenance["eval.pass_at"] == "flag --pass-at"


def test_provenance_comments_do_not_change_the_toml() -> None:
    resolved = resolve("rl", "tiny-gsm8k")
    text = dump_toml(resolved.config, resolved.provenance)
    assert tomli.loads(text) == tomli.loads(dump_toml(resolved.config))
    assert 'path = "run:tiny-multiturn"  # preset tiny-gsm8k' in text.splitlines()
    assert "]  # preset tiny-gsm8k" in text.splitlines()  # rollout.tools, spread over lines
    assert text.count("  # ") == len(flatten_config(resolved.config))


def test_provenance_comments_of_odd_keys_and_texts() -> None:
    weights = {'tool/a"b': 1.0, "score": 1.0}
    preset = {"extends": "tiny-gsm8k", "reward.weights": weights, "reward.judge.prompt": "a\u2028b\x85c"}
    resolved = resolve("rl", preset)
    text = dump_toml(resolved.config, resolved.provenance)
    assert tomli.loads(text) == tomli.loads(dump_toml(resolved.config))
    assert r'"tool/a\"b" = 1.0  # the preset given in Python' in text.splitlines()


def test_set_changes_one_entry_of_a_table() -> None:
    """A preset's table stays as it is but for that entry; in TOML as in `--set tools={...}` a table is one value."""
    sets = ["tools.search.type=search", "tools.search.options.k=3", "reward.weights.format=0.5"]
    resolved = resolve("rl", "tiny-gsm8k", sets)
    assert resolved.config.tools == {"search": {"type": "search", "options": {"k": 3}}}
    assert resolved.config.reward.weights == {"score": 1.0, "format": 0.5}
    line = "k = 3  # --set"
    assert line in dump_toml(resolved.config, resolved.provenance).splitlines()
    whole = resolve("rl", "tiny-gsm8k", ["tools={a={type='search'}}", "tools.a.url=http://x"])
    assert whole.config.tools == {"a": {"type": "search", "url": "http://x"}}
    with pytest.raises(ConfigError, match=r"unknown key `tools\.` in --set"):
        resolve("rl", "tiny-gsm8k", ["tools.=3"])
    with pytest.raises(ConfigError, match=r"unknown key `train\.steps\.x`"):
        resolve("rl", "tiny-gsm8k", ["train.steps.x=3"])

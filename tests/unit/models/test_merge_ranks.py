"""Checkpoints of training workers at several world sizes, merged: tied and not, LoRA, values, and beside a critic."""

import subprocess
import sys

import peft
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, Qwen2Config, Qwen2ForCausalLM

from posttrain import merge_ckpt
from posttrain.models.builtin import builtin_config, builtin_tokenizer
from posttrain.models.export import save_text_side
from posttrain.models.load import ModelSource
from posttrain.train import checkpoint
from tests.helpers.ports import free_ports

pytestmark = pytest.mark.slow

WORK = """
import sys
from pathlib import Path
import torch
import torch.distributed as dist
from torch.distributed.tensor.debug import CommDebugMode
from safetensors.torch import save_file
from posttrain.config import TrainConfig
from posttrain.models import lora
from posttrain.models.load import ModelSource
from posttrain.train.spec import WorkerSpec
from posttrain.train.worker import TrainWorker

root, rank, size, *ports = Path(sys.argv[1]), *map(int, sys.argv[2:])
for kind, port in zip(("tied", "untied", "lora", "values"), ports, strict=True):
    values = kind == "values"
    train = TrainConfig.model_validate({"lora": {"rank": 3, "alpha": 12}} if kind == "lora" else {})
    source = ModelSource(str(root / ("untied" if kind == "untied" else "tied")))
    worker = TrainWorker(WorkerSpec(source, "cpu", "float32", 1, 1.0, train, values=values, threads=1), rank, size)
    worker.setup("127.0.0.1", port, 60.0)
    with torch.no_grad():  # as if trained: each rank's part of each weight moves by itself
        generator = torch.Generator().manual_seed(rank)
        for parameter in worker.lm.parameters():
            if parameter.requires_grad:
                part = getattr(parameter, "to_local", lambda: parameter)()
                part.add_(torch.randn(part.shape, generator=generator), alpha=0.1)
    with CommDebugMode() as calls:
        whole = {name: weight.clone() for name, weight in lora.whole_weights(worker.lm.model)}
    few = 2 if kind == "lora" else 1  # base and adapters; each weight by itself would be tens
    assert calls.get_total_counts() == (few if size > 1 else 0), calls.get_comm_counts()
    for part in ("actor", "critic") if kind == "tied" else ("actor",):
        worker.save(str(root / kind / str(size) / part), False)
        assert worker.saved() is not None
    if rank == 0:
        save_file(whole, root / kind / str(size) / "expected.safetensors")
    dist.barrier()
    dist.destroy_process_group()
"""


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    """Two models that differ in whether their embeddings are tied. Few of their sizes are multiples of 4."""
    folder = tmp_path_factory.mktemp("ranks")
    for tied in (True, False):
        sizes = builtin_config("tiny").to_dict() | {"hidden_size": 72, "intermediate_size": 131}
        torch.manual_seed(0)
        place = folder / ("tied" if tied else "untied")
        Qwen2ForCausalLM(Qwen2Config(**sizes | {"tie_word_embeddings": tied})).save_pretrained(place)
        builtin_tokenizer("tiny").save_pretrained(place)
    return folder


@pytest.fixture(scope="module", params=[1, 2, 4], ids="{} ranks".format)
def size(root, request):
    """The number of ranks, whose checkpoints are written."""
    ports = free_ports(4)
    command = [sys.executable, "-c", WORK, str(root)]
    ranks = [subprocess.Popen([*command, str(rank), str(request.param), *ports]) for rank in range(request.param)]
    assert [rank.wait(400) for rank in ranks] == [0] * request.param
    return request.param


def merged(root, kind, size, tmp_path, **options):
    """(what the workers had, the merged folder)"""
    source = ModelSource(str(root / ("untied" if kind == "untied" else "tied")))
    made = root / kind / str(size)
    folder = checkpoint.begin(tmp_path / "checkpoints", size)
    for part in (p for p in made.iterdir() if p.is_dir()):
        part.rename(folder / part.name)
    save_text_side(source, folder / "actor" / "huggingface", reward_model=kind == "values")
    checkpoint.commit(folder, size, {}, keep=1)
    return load_file(made / "expected.safetensors"), merge_ckpt.run(str(tmp_path), str(tmp_path / "out"), **options)


@pytest.mark.parametrize("kind", ["tied", "untied"])
def test_a_language_model(root, size, kind, tmp_path):
    """That of the tied one has a critic beside it, which stays where it is."""
    expected, out = merged(root, kind, size, tmp_path)
    assert (tmp_path / "checkpoints" / f"global_step_{size}" / "critic").is_dir() == (kind == "tied")
    found = load_file(out / "model.safetensors")
    assert found.keys() == expected.keys()
    assert ("lm_head.weight" in found) == (kind == "untied")
    assert all(torch.equal(found[name], weight) for name, weight in expected.items())
    model = AutoModelForCausalLM.from_pretrained(out)
    assert all(torch.equal(model.get_parameter(name), weight) for name, weight in expected.items())


def test_an_adapter(root, size, tmp_path):
    expected, out = merged(root, "lora", size, tmp_path)
    only = merge_ckpt.run(str(tmp_path), str(tmp_path / "adapter"), adapter=True)
    base = AutoModelForCausalLM.from_pretrained(root / "tied")
    before = {name: weight.clone() for name, weight in base.named_parameters()}
    theirs = peft.PeftModel.from_pretrained(base, only).merge_and_unload()
    found = load_file(out / "model.safetensors")
    for name, weight in found.items():
        torch.testing.assert_close(weight, expected[name], rtol=0, atol=1e-6)
        torch.testing.assert_close(weight, theirs.get_parameter(name), rtol=0, atol=1e-6)
    changed = {name.split(".")[-2] for name, weight in found.items() if not torch.equal(weight, before[name])}
    assert changed == {"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"}


def test_a_model_of_values(root, size, tmp_path):
    expected, out = merged(root, "values", size, tmp_path)
    expected["score.weight"] = expected.pop("lm_head.weight")
    found = load_file(out / "model.safetensors")
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], weight) for name, weight in expected.items())
    assert found["score.weight"].shape == (1, 72)
    assert bool(found["score.weight"].any())

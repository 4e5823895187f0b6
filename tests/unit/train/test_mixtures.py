"""Mixtures of experts over workers: the same losses, gradients and checkpoints however experts are shared out."""

import json
import shutil
import subprocess
import sys
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from posttrain import merge_ckpt
from posttrain.config import Config, LoraConfig, TrainConfig
from posttrain.core.errors import ConfigError, RunError
from posttrain.data.pack import PackedBatch
from posttrain.models import lora
from posttrain.models.attention_kernels import choose
from posttrain.models.experts import Mixture
from posttrain.models.export import save_text_side
from posttrain.models.load import ModelSource, build, load_config
from posttrain.rl.batch import pack
from posttrain.runs.preflight import check_use
from posttrain.train import checkpoint
from posttrain.train.expert_parallel import check_expert_parallel
from posttrain.train.microbatch import MicroBatch
from tests.helpers.architectures import ARCHITECTURES
from tests.helpers.ports import free_ports

LENGTHS = (24, 9, 31, 17, 40, 12, 5, 28)
CPU = torch.device("cpu")

WORK = """
import json, os, signal, sys, torch, torch.distributed as dist, traceback
from pathlib import Path
from safetensors.torch import save_file
from posttrain.config import TrainConfig
from posttrain.data.pack import PackedBatch, place
from posttrain.models import lora
from posttrain.models.gather import whole
from posttrain.models.load import ModelSource, build
from posttrain.models.shards import held
from posttrain.train.spec import LossSpec, WorkerSpec
from posttrain.train.worker import TrainWorker

folder = Path(sys.argv[1])
cases = [json.loads(line) for line in sys.stdin]
batch = PackedBatch(**torch.load(folder / "batch.pt", weights_only=True))
build(ModelSource("builtin:tiny-moe"), dtype=torch.float32)  # imports what it needs, before there are four of them


def work(case, rank):
    workers = case["workers"]
    train = TrainConfig.model_validate(case["train"])
    source = ModelSource(str(folder / "shared") if case["shared_expert"] else "builtin:tiny-moe")
    spec = WorkerSpec(source, "cpu", "float32", 3, 1.0, train, threads=1, replays_routing=case["replays"])
    worker = TrainWorker(spec, rank, workers)
    worker.setup("127.0.0.1", int(case["port"]), 60.0)
    if case["load"]:
        worker.load(str(folder / case["load"]))
    else:  # experts that matter, and routers that prefer some
        generator = torch.Generator().manual_seed(5)
        for parameter in worker.parameters.values():
            noise = torch.randn(parameter.shape, generator=generator) * 0.1
            part, place_of_part = held(parameter)
            part += noise[place_of_part]
    ranks = workers // train.sequence_parallel
    shards = place(batch.lengths, ranks=ranks, token_budget=case["budget"]).shards(batch)
    shard = shards[rank // train.sequence_parallel]
    micros = [worker._micro_batch(micro) for micro in shard]
    pull = worker._pull_of_balance(micros) if train.router_aux_loss_coef else None
    for micro in micros:
        worker._backward(micro, LossSpec(), pull)
    found = {name: whole(p.grad).contiguous() for name, p in worker.parameters.items() if p.grad is not None}
    worker.optimizer.zero_grad(set_to_none=True)
    metrics = worker.update(shard, LossSpec())
    loss = torch.tensor([metrics.sums["loss"]], dtype=torch.float64)
    dist.all_reduce(loss)
    sent = {f"weight {name}": tensor.clone() for name, tensor in lora.whole_weights(worker.lm.model, torch.float32)}
    if case["save"]:
        worker.save(str(folder / case["save"]), False)
    if rank == 0:
        save_file(found | sent, folder / f"{case['name']}.safetensors")
        (folder / f"{case['name']}.json").write_text(json.dumps(metrics.shared | {"loss": float(loss)}))
    dist.barrier()
    dist.destroy_process_group()


def rank_of(rank):
    try:
        for case in cases:
            if rank < case["workers"]:
                work(case, rank)
    except BaseException:
        traceback.print_exc()
        os._exit(1)
    os._exit(0)


ranks = {os.fork() or rank_of(rank) for rank in range(4)}
while ranks:
    ended, status = os.wait()
    ranks.discard(ended)
    if status:
        for other in ranks:
            os.kill(other, signal.SIGKILL)
        sys.exit("a rank failed")
"""

shared_out = pytest.mark.slow
"""For tests that compare what up to four processes found, in half a minute for all."""
AUX = {"router_aux_loss_coef": 0.01, "optim": {"lr": 1e-2}}


def case(name, workers=1, *, budget=1000, replays=False, shared_expert=False, load="", save="", **train):
    return {
        "name": name, "workers": workers, "budget": budget, "replays": replays, "shared_expert": shared_expert,
        "load": load, "save": save, "train": AUX | train,
    }  # fmt: skip


CASES = [
    case("one"),
    case("cut", budget=45),
    case("fsdp2", 2, budget=60),
    case("fsdp4", 4),
    case("sp2", 2, sequence_parallel=2),
    case("ep2 of 2", 2, expert_parallel=2, save="of2"),
    case("ep2 of 4", 4, expert_parallel=2, budget=30),
    case("ep4 of 4", 4, expert_parallel=4),
    case(
        "ep2 of 4, all else", 4, expert_parallel=2, budget=30, activation_checkpointing="full", gather_weights="step",
        reduce_gradients="step",
    ),
    case("selective", activation_checkpointing="selective", budget=45),
    case("replay", replays=True),
    case("replay, cut", replays=True, budget=45),
    case("replay, sp2", 2, replays=True, sequence_parallel=2),
    case("replay, ep2 of 4", 4, replays=True, expert_parallel=2),
    case("resumed: one", load="of2", save="of1"),
    case("from one: one", load="of1"),
    case("from one: ep2 of 2", 2, expert_parallel=2, load="of1"),
    case("resumed: ep4 of 4", 4, expert_parallel=4, load="of2"),
    case("resumed: ep2 of 4", 4, expert_parallel=2, load="of2"),
    case("shared expert", shared_expert=True),
    case(
        "shared expert, selective, ep2 of 2", 2, shared_expert=True, expert_parallel=2, budget=60,
        activation_checkpointing="selective",
    ),
    case(
        "shared expert, selective, ep2 of 4", 4, shared_expert=True, expert_parallel=2, budget=30,
        activation_checkpointing="selective",
    ),
    case("lora", lora={"rank": 4}),
    case("lora, ep2 of 4", 4, expert_parallel=2, lora={"rank": 4}),
]  # fmt: skip


def batch_of(lengths, routing=False):
    generator = torch.Generator().manual_seed(1)
    ids = [torch.randint(1, 1000, (n,), generator=generator) for n in lengths]
    batch = PackedBatch.from_sequences(ids, [[i > 3 for i in range(n)] for n in lengths])
    batch.loss_weights = batch.loss_mask / batch.loss_mask.sum()
    if routing:
        first = torch.randint(8, (batch.num_tokens, 2, 1), generator=generator)
        step = torch.randint(1, 8, (batch.num_tokens, 2, 1), generator=generator)
        rows = torch.cat([first, (first + step) % 8], 2) + 1
        rows[batch.cu_seqlens[1:].long() - 1] = 0
        batch.routing = rows.reshape(-1, 4).to(torch.uint8)
    return batch


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    """Gradients and weights after a step, and metrics, of every case."""
    folder = tmp_path_factory.mktemp("mixtures")
    ARCHITECTURES["Qwen2-MoE"].save(folder / "shared")
    batch = batch_of(LENGTHS, routing=True)
    torch.save({name: value for name, value in vars(batch).items() if value is not None}, folder / "batch.pt")
    lines = "".join(json.dumps(c | {"port": p}) + "\n" for c, p in zip(CASES, free_ports(len(CASES)), strict=True))
    done = subprocess.run(
        [sys.executable, "-c", WORK, str(folder)], input=lines, capture_output=True, text=True, timeout=500
    )
    assert done.returncode == 0, done.stderr

    def of(name):
        return load_file(folder / f"{name}.safetensors"), json.loads((folder / f"{name}.json").read_text())

    of.folder = folder
    return of


def expect(found, name, reference):
    """The same losses, gradients and metrics within 1e-6, and the same weights after a step of Adam, which divides each
    gradient by its own size."""
    (tensors, numbers), (wanted, expected) = found(name), found(reference)
    assert tensors.keys() == wanted.keys()
    for key, tensor in wanted.items():
        atol = 2e-3 if key.startswith("weight ") else 1e-6
        torch.testing.assert_close(tensors[key], tensor, rtol=0, atol=atol, msg=lambda m, key=key: f"{key}: {m}")
    assert numbers == pytest.approx(expected, abs=2e-6, rel=1e-5)


@shared_out
@pytest.mark.parametrize(
    "name", ["cut", "fsdp2", "fsdp4", "sp2", "ep2 of 2", "ep2 of 4", "ep4 of 4", "ep2 of 4, all else", "selective"]
)
def test_losses_and_gradients_do_not_depend_on_how_the_work_is_shared_out(found, name):
    """The auxiliary loss and the load metrics included."""
    expect(found, name, "one")


@shared_out
@pytest.mark.parametrize("name", ["replay, cut", "replay, sp2", "replay, ep2 of 4"])
def test_nor_with_replayed_experts(found, name):
    expect(found, name, "replay")
    assert found(name)[1]["moe/replay_agreement"] < 0.5
    gradient = "model.layers.0.mlp.gate.weight"
    assert not torch.allclose(found(name)[0][gradient], found("one")[0][gradient], atol=1e-5)


@shared_out
@pytest.mark.parametrize("workers", [2, 4])
def test_nor_where_a_layer_goes_on_after_its_experts_and_is_computed_again(found, workers):
    """A shared expert, which all tokens go through, comes after the experts that are shared out."""
    expect(found, f"shared expert, selective, ep2 of {workers}", "shared expert")


@shared_out
@pytest.mark.parametrize(
    ("name", "reference"),
    [
        ("resumed: ep4 of 4", "resumed: one"),
        ("resumed: ep2 of 4", "resumed: one"),
        ("from one: ep2 of 2", "from one: one"),
    ],
)
def test_a_checkpoint_resumes_at_another_expert_parallel_size(found, name, reference):
    expect(found, name, reference)
    before = "one" if reference.startswith("resumed") else "resumed: one"
    assert found(name)[1]["loss"] < found(before)[1]["loss"] - 0.05  # it goes on from the step before


@shared_out
def test_a_checkpoint_merges_to_a_model_that_transformers_loads(found, tmp_path):
    """One that two workers wrote, each with its experts; experts are stored one by one, as on the hub."""
    expected, _ = found("ep2 of 2")
    source = ModelSource("builtin:tiny-moe")
    folder = checkpoint.begin(tmp_path / "checkpoints", 1)
    shutil.copytree(found.folder / "of2", folder / "actor")
    save_text_side(source, folder / "actor" / "huggingface")
    checkpoint.commit(folder, 1, {}, keep=1)
    out = merge_ckpt.run(str(tmp_path), str(tmp_path / "out"), dtype="float32")
    assert "model.layers.1.mlp.experts.7.down_proj.weight" in load_file(out / "model.safetensors")
    model = AutoModelForCausalLM.from_pretrained(out)
    weights = dict(model.named_parameters())
    assert weights.keys() == {name.removeprefix("weight ") for name in expected if name.startswith("weight ")}
    assert all(torch.equal(weight, expected[f"weight {name}"]) for name, weight in weights.items())


@shared_out
def test_adapters_are_trained_beside_experts_that_are_shared_out(found):
    expect(found, "lora, ep2 of 4", "lora")
    assert all(".lora_" in name for name in found("lora")[0] if not name.startswith("weight "))


@shared_out
def test_the_auxiliary_loss_has_a_gradient_beside_that_of_the_loss(found):
    router = "model.layers.1.mlp.gate.weight"
    (tensors, numbers), (other, _) = found("one"), found("replay")
    assert 2.0 <= numbers["moe/aux_loss"] < 8.0
    assert float(tensors[router].abs().max()) > 1e-4
    assert not torch.equal(tensors[router], other[router])


def test_tokens_count_by_the_sequences_that_they_belong_to():
    """Not where a sequence carries no loss, nor in padding; a shared prompt as often as sequences share it."""
    kernel = choose("sdpa", CPU, torch.float32)
    mixture = Mixture(build(ModelSource("builtin:tiny-moe"), dtype=torch.float32))
    batch = PackedBatch.from_sequences([[1, 2, 3, 4], [1, 2, 9], [5, 6]], [[True] * 4, [True] * 3, [False] * 2])
    micro = MicroBatch.build(batch, CPU, kernel, mixture=mixture)
    assert micro.routed.counted.tolist() == [1] * 7 + [0] * 2
    batch.shared = torch.tensor([0, 2, 0])
    micro = MicroBatch.build(batch, CPU, kernel, mixture=mixture)
    assert micro.input_ids.tolist() == [1, 2, 3, 4, 9, 5, 6]
    assert micro.routed.counted.tolist() == [2, 2, 1, 1, 1, 0, 0]
    assert MicroBatch.build(batch.empty_like(), CPU, kernel, mixture=mixture).routed.counted.tolist() == [0, 0]


def config(**changes):
    values = {"command": "sft", "model": {"path": "builtin:tiny-moe"}, "cluster": {"workers": 4}}
    return Config.model_validate(values | changes)


def test_what_cannot_be_shared_out_is_refused_before_a_run():
    dense = ModelSource("builtin:tiny")
    with pytest.raises(ConfigError, match=r"train\.expert_parallel = 2: models of type qwen2 have no experts"):
        check_use(config(train={"expert_parallel": 2}), dense)
    with pytest.raises(ConfigError, match=r"train\.expert_parallel = 3 does not divide the 8 experts"):
        check_use(
            config(train={"expert_parallel": 3}, cluster={"workers": 3}, data={"batch_size": 6}),
            ModelSource("builtin:tiny-moe"),
        )
    with pytest.raises(ConfigError, match="leaves 3 workers for each expert"):
        check_expert_parallel(load_config(ModelSource("builtin:tiny-moe")), 2, 3)
    with pytest.raises(ConfigError, match="have no routers of a known kind"):
        check_use(config(train={"router_aux_loss_coef": 0.01}), dense)
    with pytest.raises(ConfigError, match="have no routers of a known kind"):
        check_use(config(command="rl", rollout={"router_replay": "R3"}), dense)
    check_use(config(train={"expert_parallel": 2, "router_aux_loss_coef": 0.01}), ModelSource("builtin:tiny-moe"))


@pytest.mark.parametrize(
    ("train", "message"),
    [
        ({"shard_size": 2}, "train.shard_size: all workers share one copy"),
        ({"sequence_parallel": 2}, "train.sequence_parallel has not been tested"),
        ({"optim": {"name": "adamw_8bit"}}, "has not been tested"),
        ({"cpu_offload": True}, "train.cpu_offload has not been tested"),
    ],
)
def test_combinations_that_were_not_tested_are_refused(train, message):
    with pytest.raises(ValueError, match=message):
        TrainConfig.model_validate({"expert_parallel": 2} | train)


@pytest.mark.parametrize("modules", [["experts"], ["q_proj", "down_proj"], ["gate"]])
def test_adapters_on_experts_and_routers_are_refused(modules):
    model = build(ModelSource("builtin:tiny-moe"), dtype=torch.float32)
    with pytest.raises(ConfigError, match=r"train\.lora\.target_modules = .*Qwen3Moe(Experts|TopKRouter)"):
        lora.inject(model, LoraConfig(rank=2, target_modules=modules), dtype=torch.float32)


def test_episodes_without_recorded_experts_are_not_replayed():
    whole = [np.arange(4, dtype=np.int32), np.ones(4, np.bool_), np.zeros(4, np.float32)]
    with_experts, without = (
        SimpleNamespace(tokens=whole[0], loss_mask=whole[1], logprobs=whole[2], routing=routing)
        for routing in (np.arange(16, dtype=np.uint8), np.empty(0, np.uint8))
    )
    assert pack([with_experts], routing=True).routing.shape == (4, 4)
    assert pack([with_experts]).routing is None
    with pytest.raises(RunError, match="1 of 2 episodes have no recorded experts") as error:
        pack([with_experts, without], routing=True)
    assert "router_replay = 'R3'" in error.value.hint

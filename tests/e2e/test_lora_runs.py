"""LoRA in real processes: against a plain loop with peft, at any world size, and through every command."""

import asyncio
import json
import re
import shlex
from pathlib import Path

import peft
import pyarrow.parquet as pq
import pytest
import torch
from transformers import AutoModelForCausalLM

from posttrain import merge_ckpt
from posttrain.algos.reduce import token_weights
from posttrain.cluster.cluster import Cluster, local_ray
from posttrain.config import Config
from posttrain.config.presets import resolve
from posttrain.core.errors import Interrupted
from posttrain.data.pack import PackedBatch
from posttrain.generation import command as generate
from posttrain.models.builtin import create_builtin
from posttrain.models.load import ModelSource, load_model, locate
from posttrain.prep import command as prep
from posttrain.rl import command as rl
from posttrain.sft import command as sft
from posttrain.train import checkpoint
from posttrain.train.spec import LossSpec
from posttrain.weight_sync.publish import publish
from tests.e2e.run_commands import run_commands

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore:torch.distributed is disabled")]

REPO = Path(__file__).resolve().parents[2]
STEPS = 20
SEED = 3
OPTIM = {"lr": 5e-3, "eps": 1e-6, "betas": (0.9, 0.95), "weight_decay": 0.01, "schedule": "constant"}
LORA = {"rank": 4, "alpha": 16}


@pytest.fixture(scope="module", autouse=True)
def ray_here():
    with local_ray():
        yield


def batches():
    generator = torch.Generator().manual_seed(0)
    for _ in range(STEPS):
        lengths = torch.randint(2, 60, (6,), generator=generator).tolist()
        ids = [torch.randint(40, (n,), generator=generator) for n in lengths]  # few tokens: something to learn
        batch = PackedBatch.from_sequences(ids, [(torch.rand(n, generator=generator) < 0.7).tolist() for n in lengths])
        batch.loss_weights = token_weights(batch.loss_mask, batch.cu_seqlens, "token-mean")
        yield batch


def config(workers, **train):
    section = {"optim": OPTIM, "lora": LORA} | train
    return Config.model_validate(
        {"command": "sft", "run": {"seed": SEED}, "train": section, "cluster": {"workers": workers, "device": "cpu"}}
    )


def with_trainer(cfg, work):
    """``work(group)``, a coroutine, on a trainer of its own."""

    async def main():
        async with Cluster(cfg) as cluster:
            return await work(await cluster.trainer("actor", ModelSource("builtin:tiny"), total_steps=STEPS))

    return asyncio.run(main())


async def steps(group, first=0, last=STEPS):
    return [await group.update(batch, LossSpec()) for batch in list(batches())[first:last]]


def plain_steps(folder):
    """The same steps with torch, transformers and peft alone; the adapter starts as the one in ``folder``."""
    model = peft.PeftModel.from_pretrained(create_builtin("tiny", SEED), folder, is_trainable=True)
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(
        trained, lr=OPTIM["lr"], betas=OPTIM["betas"], eps=OPTIM["eps"], weight_decay=OPTIM["weight_decay"]
    )
    found = []
    for batch in batches():
        loss = torch.zeros(())
        for ids, mask in zip(batch.input_ids.split(batch.lengths), batch.loss_mask.split(batch.lengths), strict=True):
            logprobs = model(input_ids=ids[None]).logits[0, :-1].log_softmax(-1)
            loss = loss - logprobs.gather(-1, ids[1:, None])[mask[1:]].sum() / batch.loss_mask.sum()
        optimizer.zero_grad()
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(trained, 1.0)
        optimizer.step()
        found.append({"loss": loss.item(), "grad_norm": norm.item()})
    return found, model.merge_and_unload()


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    """(folder of checkpoints, metrics) of 20 steps of one worker, saved at the start, half way and at the end."""
    folder = tmp_path_factory.mktemp("alone")

    async def work(group):
        await group.save(str(folder / "start"))
        found = await steps(group, 0, 10)
        await group.save(str(folder / "half"))
        found += await steps(group, 10, STEPS)
        await group.save(str(folder / "end"))
        return found

    return folder, with_trainer(config(1), work)


def assert_same_steps(got, expected):
    for n, (step, wanted) in enumerate(zip(got, expected, strict=True), start=1):
        for name in ("loss", "grad_norm"):
            assert step[name] == pytest.approx(wanted[name], rel=1e-5), f"{name} of step {n}"


def test_a_plain_loop_takes_the_same_steps(alone):
    folder, found = alone
    expected, merged = plain_steps(folder / "start" / "adapter")
    assert_same_steps(found, expected)
    assert expected[-1]["loss"] < 0.95 * expected[0]["loss"]
    ours = load_model(locate(str(folder / "end" / "adapter")), dtype=torch.float32)
    for name, parameter in ours.named_parameters():
        torch.testing.assert_close(parameter, merged.get_parameter(name), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("train", [{}, {"activation_checkpointing": "selective", "reduce_gradients": "step"}])
def test_two_workers_take_the_same_steps(alone, train):
    small = {"tokens_per_microbatch": 100}
    assert_same_steps(with_trainer(config(2, **small, **train), steps), alone[1])


@pytest.mark.parametrize("workers", [1, 2])
def test_in_bfloat16_adapters_stay_in_float32(alone, workers):
    """Frozen weights in the type they compute in, beside adapters of another type, under FSDP."""
    batch = next(batches())

    async def work(group):
        base = await group.logprobs(batch)
        found = await steps(group, 0, 6)
        types = await group.actors[0].__ray_call__.remote(
            lambda self: {(str(p.dtype), p.requires_grad) for p in self.worker.parameters.values()}
        )
        return base, found, types, await group.logprobs(batch, adapter=False), await group.logprobs(batch)

    base, found, types, off, on = with_trainer(config(workers, dtype="bfloat16"), work)
    assert types == {("torch.bfloat16", False), ("torch.float32", True)}
    for step, wanted in zip(found, alone[1], strict=False):
        assert step["loss"] == pytest.approx(wanted["loss"], rel=1e-3)
        assert step["grad_norm"] == pytest.approx(wanted["grad_norm"], rel=1e-2)
    assert torch.equal(off, base)
    assert (on - base).abs().max() > 0.1


def test_an_engine_gets_merged_weights_from_two_workers(alone):
    """And proves it: those of a resumed run, after a forward pass that left the root unsharded."""
    check = [list(range(40)), [3, 1, 2]]

    async def main():
        async with Cluster(config(2)) as cluster:
            group = await cluster.trainer("actor", ModelSource("builtin:tiny"), total_steps=STEPS)
            samplers = await cluster.samplers(ModelSource("builtin:tiny"), [0])
            await group.load(str(alone[0] / "half"))
            await group.logprobs(next(batches()))
            options = {"check": check, "tolerance": 1e-4}
            transfers = cluster.transfers()
            first = await publish(group, samplers, transfers, version=1, **options)
            await steps(group, 10, 12)
            return first, await publish(group, samplers, transfers, version=2, **options)

    for found in asyncio.run(main()):
        assert found["sync/check_gap"] < 1e-5


def test_resume_at_another_world_size(alone):
    folder, expected = alone

    async def work(group):
        await group.load(str(folder / "half"))
        return await steps(group, 10, STEPS)

    assert_same_steps(with_trainer(config(2), work), expected[10:])


# ---------------------------------------------------------------------- the commands


def test_the_commands_of_the_guide(tmp_path):
    """docs/lora.md, with fewer steps and prompts."""
    page = (REPO / "docs" / "lora.md").read_text(encoding="utf-8")
    (block,) = re.findall(r"^```bash\n(.*?)^```", page, flags=re.S | re.M)
    shorter = {
        "sft": ["--steps", "3"],
        "rl": ["--steps", "1", "--set", "data.batch_size=4", "--set", "rollout.max_response_tokens=32"],
        "generate": ["--limit", "4", "--set", "rollout.max_response_tokens=32"],
        "merge-ckpt": [],
    }
    commands = [shlex.split(line)[1:] for line in block.splitlines()]
    assert [words[0] for words in commands] == ["sft", "rl", "generate", "merge-ckpt", "merge-ckpt"]
    data = ["prep", "arith", "--train-rows", "64", "--test-rows", "8"]
    run_commands(tmp_path, [data, *([*words, *shorter[words[0]]] for words in commands)])
    assert (tmp_path / "merged" / "model.safetensors").is_file()
    assert (tmp_path / "adapter" / "adapter_model.safetensors").is_file()


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A folder with generated data, and a finished LoRA run ``tuned`` from a built-in model with another seed."""
    folder = tmp_path_factory.mktemp("place")
    prep.run("arith", out=str(folder / "data"), seed=0, train_rows=64, test_rows=8)
    flags = {"run.dir": str(folder / "runs"), "run.name": "tuned", "run.seed": 11}
    flags |= {"data.train": str(folder / "data" / "sft_train.parquet")}
    sets = ["train.lora.rank=8", "train.steps=6", "checkpoint.save_hf=true", "cluster.device='cpu'"]
    sft.run(resolve("sft", "tiny-arith-sft", sets=sets, flags=flags))
    return folder


def metrics(run):
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def test_sft_learns_and_every_form_of_the_result_is_the_same(place):
    run = place / "runs" / "tuned"
    losses = [row["train/loss"] for row in metrics(run)]
    assert losses[-1] < losses[0]
    found = checkpoint.find(run)
    merged = merge_ckpt.run("tuned", str(place / "merged"), check=True, runs=str(place / "runs"))
    adapter = merge_ckpt.run("tuned", str(place / "adapter"), adapter=True, check=True, runs=str(place / "runs"))
    expected = AutoModelForCausalLM.from_pretrained(merged).state_dict()
    models = {
        "save_hf": AutoModelForCausalLM.from_pretrained(found.path / "actor" / "huggingface"),
        "peft": peft.PeftModel.from_pretrained(create_builtin("tiny", 11), adapter).merge_and_unload(),
        "engine": load_model(locate(str(found.path)), dtype=torch.float32, seed=0),
    }
    for kind, model in models.items():
        for name, tensor in model.state_dict().items():
            torch.testing.assert_close(tensor, expected[name], rtol=1e-6, atol=1e-7, msg=f"{kind}: {name}")
    name = "model.layers.0.self_attn.q_proj.weight"
    assert not torch.equal(expected[name], create_builtin("tiny", 11).state_dict()[name])


def test_generate_from_the_run_is_generate_from_the_merged_folder(place):
    merged = merge_ckpt.run("tuned", str(place / "for_generate"), runs=str(place / "runs"))
    texts = []
    for n, model in enumerate(("run:tuned", str(merged))):
        out = place / f"responses{n}.parquet"
        flags = {"run.dir": str(place / "runs"), "run.name": f"g{n}", "model.path": model, "generate.out": str(out)}
        flags |= {"generate.data": str(place / "data" / "test.parquet")}
        sets = ["rollout.temperature=0", "rollout.n=1", "rollout.max_response_tokens=24", "cluster.device='cpu'"]
        generate.run(resolve("generate", "tiny-arith-generate", sets=sets, flags=flags))
        texts.append(pq.read_table(out)["response_ids"].to_pylist())
    assert texts[0] == texts[1]
    assert any(len(ids[0]) > 1 for ids in texts[0])


@pytest.fixture
def roles(monkeypatch):
    """The trainers that a run starts."""
    started = []
    trainer = Cluster.trainer

    async def recording(self, role, *args, **kwargs):
        started.append(role)
        return await trainer(self, role, *args, **kwargs)

    monkeypatch.setattr(Cluster, "trainer", recording)
    return started


def rl_run(place, name, *more):
    flags = {"run.dir": str(place / "runs"), "run.name": name, "model.path": "run:tuned"}
    flags |= {"data.train": str(place / "data" / "train.parquet")}
    sets = ["train.lora.rank=4", "algo.kl_coef=0.05", "train.steps=3", "train.save_every=1", "train.optim.lr=5e-3"]
    sets += ["train.optim.warmup_ratio=0.0", "train.optim.schedule='constant'", "data.batch_size=4", "rollout.n=4"]
    (place / "reward.py").write_text(
        "def letters(data_source, solution_str, ground_truth, extra_info):\n    return solution_str.count('e') / 10\n"
    )
    sets += [f"reward.function='{place}/reward.py:letters'"]  # untrained as the model is, it gets no answer right
    sets += ["rollout.max_response_tokens=32", "run.logger=['jsonl']", "cluster.device='cpu'", *more]
    return rl.run(resolve("rl", "tiny-arith", sets=sets, flags=flags))


def test_rl_on_a_lora_run_with_its_base_as_reference(place, roles):
    """The model of `run:tuned` is an adapter on a base, and the reference of the new adapter on it."""
    run = rl_run(place, "learned")
    assert roles == ["actor"]
    rows = metrics(run)
    assert [row["step"] for row in rows] == [1, 2, 3]
    assert rows[0]["actor/kl_loss"] == pytest.approx(0.0, abs=1e-9)
    assert all(row["actor/kl_loss"] > 1e-4 for row in rows[1:])
    assert all(row["sync/check_gap"] < 1e-4 for row in rows)
    source = locate(str(checkpoint.find(run).path))
    assert len(source.adapters) == 2
    model = load_model(source, dtype=torch.float32)
    start = load_model(locate(str(checkpoint.find(place / "runs" / "tuned").path)), dtype=torch.float32)
    changed = [name for name, p in model.named_parameters() if not torch.equal(p, start.get_parameter(name))]
    assert len(changed) == 14


def test_rl_that_was_stopped_goes_on(place, monkeypatch):
    from posttrain.runs.training_run import TrainingRun

    save = TrainingRun.save
    # Else what is sampled depends on which requests come together, and that on time.
    repeatable = ("rollout.batch_invariant=true", "rollout.record_schedule=true")

    async def stopping(self, step, *args, **more):
        await save(self, step, *args, **more)
        self.stop.requested = step == 2

    with monkeypatch.context() as patch:
        patch.setattr(TrainingRun, "save", stopping)
        with pytest.raises(Interrupted):
            rl_run(place, "stopped", *repeatable)
    assert [row["step"] for row in metrics(place / "runs" / "stopped")] == [1, 2]
    run = rl_run(place, "stopped", *repeatable)  # the engine gets base and adapter, and must prove it
    whole = rl_run(place, "whole", *repeatable)
    for row, wanted in zip(metrics(run), metrics(whole), strict=True):
        for name in ("actor/pg_loss", "actor/kl_loss", "actor/grad_norm", "critic/score/mean"):
            assert row[name] == pytest.approx(wanted[name], rel=1e-4, abs=1e-6), (row["step"], name)

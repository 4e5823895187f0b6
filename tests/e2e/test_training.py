"""Training in real processes on the CPU: what must not depend on how the work is spread, and what must survive."""

import asyncio
import json
import math
import os
import shutil
import signal
import threading
import time
from dataclasses import replace

import pytest
import ray
import torch
from torch.distributed.checkpoint import FileSystemReader, load
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from posttrain.algos.corrections import correct
from posttrain.algos.reduce import token_weights
from posttrain.algos.segments import segment_ids
from posttrain.cluster.actors import ActorHandle
from posttrain.cluster.calls import gather
from posttrain.cluster.cluster import Cluster, local_ray
from posttrain.cluster.samplers import RemoteSampler
from posttrain.config import AlgoConfig, Config, CorrectionConfig
from posttrain.config.presets import resolve
from posttrain.core.errors import DeadlineError, Interrupted, PosttrainError, RunError, WeightSyncError, WorkerError
from posttrain.core.types import SamplingParams
from posttrain.data.pack import PackedBatch
from posttrain.data.parquet import Conversation, sft_row, write_rows
from posttrain.models.attention import Ragged
from posttrain.models.attention_kernels import choose
from posttrain.models.builtin import builtin_tokenizer
from posttrain.models.load import ModelSource, load_model
from posttrain.models.weights import load_weights
from posttrain.rl import command as rl
from posttrain.rl.batch import leave_out
from posttrain.runs.run import RunTarget, StopSignal
from posttrain.runs.training_run import TrainingRun
from posttrain.sft import command as sft
from posttrain.tracking import Tracker
from posttrain.train import checkpoint
from posttrain.train.model import PackedLM
from posttrain.train.spec import LossSpec
from posttrain.weight_sync.buckets import Bucket
from posttrain.weight_sync.publish import publish

SOURCE = ModelSource("builtin:tiny")
EOS = builtin_tokenizer("tiny").eos_token_id
SDPA = choose("sdpa", torch.device("cpu"), torch.float32)
LARGE, SMALL = 1_000_000, 150  # tokens of a micro-batch


@pytest.fixture(scope="module", autouse=True)
def ray_here():
    with local_ray():
        yield


def config(**sections):
    optim = {"lr": 1e-3, "eps": 1e-6, "schedule": "constant"}
    values = {"command": "rl", "run": {"seed": 3}, "train": {"optim": optim, "tokens_per_microbatch": LARGE}}
    for name, section in sections.items():
        values[name] = values.get(name, {}) | section
    return Config.model_validate(values)


@pytest.fixture(scope="module")
def clusters():
    """``clusters(cfg)``: a cluster that ends with the module."""
    opened = []

    def open_cluster(cfg):
        cluster = Cluster(cfg)
        asyncio.run(cluster.__aenter__())
        opened.append(cluster)
        return cluster

    yield open_cluster
    for cluster in opened:
        asyncio.run(cluster.__aexit__(None, None, None))


@pytest.fixture(scope="module")
def alone(clusters):
    """(cluster, trainer) of one worker."""
    cluster = clusters(config(rollout={"replicas": 2}))
    return cluster, asyncio.run(cluster.trainer("actor", SOURCE))


@pytest.fixture(scope="module")
def pair(clusters, tmp_path_factory):
    """A trainer of two workers which also recompute activations and take the vocabulary in small chunks."""
    plugin = tmp_path_factory.mktemp("plugin") / "small_chunks.py"
    plugin.write_text("from posttrain.models import logprobs\n\nlogprobs.BUFFER_BYTES = 40 * 1024 * 4\n")
    cfg = config(train={"activation_checkpointing": "full"}, cluster={"workers": 2})
    cluster = clusters(cfg.model_copy(update={"plugins": [str(plugin)]}))
    return asyncio.run(cluster.trainer("actor", SOURCE))


@pytest.fixture(scope="module")
def start(alone, tmp_path_factory):
    """A checkpoint of the untrained model."""
    folder = tmp_path_factory.mktemp("start")
    asyncio.run(alone[1].save(str(folder)))
    return str(folder)


def sequences(count=13, seed=0, longest=120):
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(2, longest, (count,), generator=generator).tolist()
    return [torch.randint(1000, (n,), generator=generator).tolist() for n in lengths]


def sft_batch():
    ids = sequences()
    generator = torch.Generator().manual_seed(1)
    masks = [(torch.rand(len(s), generator=generator) < 0.6).tolist() for s in ids]
    masks[2] = [False] * len(ids[2])  # a sequence without loss
    batch = PackedBatch.from_sequences(ids, masks)
    batch.loss_weights = token_weights(batch.loss_mask, batch.cu_seqlens, "token-mean")
    return batch


def rl_batch():
    return rl_columns(sft_batch())


def rl_columns(batch):
    """Ratios, advantages and a reference that reach every branch of the loss."""
    generator = torch.Generator().manual_seed(2)
    noise = lambda scale: torch.randn(batch.num_tokens, generator=generator) * scale  # noqa: E731
    batch.loss_weights = token_weights(batch.loss_mask, batch.cu_seqlens, "seq-mean-token-mean")
    batch.old_logprobs = -6.9 + noise(0.4)
    batch.ref_logprobs = -6.9 + noise(0.3)
    batch.rollout_logprobs = batch.old_logprobs + noise(0.1)
    advantages = torch.randn(batch.num_sequences, generator=generator)
    batch.advantages = advantages.repeat_interleave(batch.cu_seqlens.diff().long())
    return batch


def group_batch():
    """Groups of one prompt each, and responses of two turns."""
    ids, masks = [], []
    for group, prompt in enumerate(sequences(5, seed=4, longest=60)):
        for response in sequences(group % 4 + 1, seed=10 + group, longest=40):
            ids.append(prompt + response)
            turn = len(response) // 3
            own = [True] * turn + [False] * turn + [True] * (len(response) - 2 * turn)
            masks.append([False] * len(prompt) + own)
    return rl_columns(PackedBatch.from_sequences(ids, masks))


RL = AlgoConfig(kl_coef=0.1, dual_clip=3.0, clip_high=0.28)
LOSSES = {"sft": (sft_batch, LossSpec(), "loss"), "rl": (rl_batch, LossSpec(RL), "pg_loss")}
MADE = {kind: (make, loss) for kind, (make, loss, _) in LOSSES.items()} | {"groups": (group_batch, LossSpec(RL))}


def two_steps(group, start, kind, budget):
    """Metrics of two optimizer steps from the same start, and the log-probabilities after them."""
    make, loss = MADE[kind]
    batch = make()

    async def work():
        await group.load(start)
        group.tokens_per_microbatch = budget
        steps = [await group.update(batch, loss) for _ in range(2)]
        logprobs = await group.logprobs(batch)
        group.tokens_per_microbatch = LARGE
        return steps, logprobs

    return asyncio.run(work())


@pytest.fixture(scope="module")
def reference(alone, start):
    return {kind: two_steps(alone[1], start, kind, LARGE) for kind in LOSSES}


SAME = ("grad_norm", "lr", "entropy", "pg_loss", "pg_clipfrac", "pg_clipfrac_lower", "ppo_kl", "kl_loss", "loss")
SUMS = ("gap/diff", "gap/squares", "gap/abs", "gap/k3", "gap/outside", "gap/tokens")


@pytest.mark.parametrize("kind", sorted(LOSSES))
@pytest.mark.parametrize("budget", [LARGE, SMALL])
@pytest.mark.parametrize("workers", [1, 2])
def test_steps_do_not_depend_on_workers_and_micro_batches(workers, budget, kind, alone, pair, start, reference):
    """Loss and gradient norm at steps 1 and 2 within 1e-5, for 1 and 2 workers and any cut into micro-batches."""
    steps, logprobs = two_steps({1: alone[1], 2: pair}[workers], start, kind, budget)
    expected, expected_logprobs = reference[kind]
    for got, wanted in zip(steps, expected, strict=True):
        assert set(got) == set(wanted)
        for name in (n for n in (*SAME, *SUMS) if n in wanted):
            assert got[name] == pytest.approx(wanted[name], rel=1e-5, abs=1e-6), name
    assert expected[0][LOSSES[kind][2]] != pytest.approx(expected[1][LOSSES[kind][2]], rel=1e-3)
    assert expected[0]["grad_norm"] > 1e-3
    torch.testing.assert_close(logprobs, expected_logprobs, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("budget", [LARGE, SMALL])
@pytest.mark.parametrize("workers", [1, 2])
def test_shared_prompts_change_no_step(workers, budget, alone, pair, start, shared_prompts):
    """Two steps of an RL loss on groups of 1 to 4 sequences: metrics and log-probabilities as without sharing, by 1
    worker and by 2 (which recompute activations), and for any cut into micro-batches."""
    batch, (expected, expected_logprobs) = shared_prompts
    group = {1: alone[1], 2: pair}[workers]
    group.share_prompts = True
    steps, logprobs = two_steps(group, start, "groups", budget)
    group.share_prompts = False
    for got, wanted in zip(steps, expected, strict=True):
        assert got["tokens_shared"] > 0.1 * batch.num_tokens
        assert (got["tokens_run"], wanted["tokens_shared"]) == (batch.num_tokens, 0)
        assert got["flops"] < wanted["flops"]
        for name in (n for n in (*SAME, *SUMS) if n in wanted):
            assert got[name] == pytest.approx(wanted[name], rel=1e-5, abs=1e-6), name
    torch.testing.assert_close(logprobs, expected_logprobs, rtol=1e-4, atol=1e-4)


@pytest.fixture(scope="module")
def shared_prompts(alone, start):
    return group_batch(), two_steps(alone[1], start, "groups", LARGE)


@pytest.mark.parametrize("left", [6, 1, 0], ids=["half", "one of two workers has nothing", "nothing is left"])
@pytest.mark.parametrize("workers", [1, 2])
def test_sequences_without_a_signal_are_left_out_of_the_same_step(workers, left, alone, pair, start):
    """Three steps, of which the second is without most or all sequences: as if their zeros were computed."""
    group, loss = {1: alone[1], 2: pair}[workers], LossSpec(AlgoConfig(dual_clip=3.0))
    plain = replace(rl_batch(), ref_logprobs=None)
    of_tokens = (torch.arange(plain.num_sequences) < left).repeat_interleave(plain.cu_seqlens.diff().long())
    whole = replace(plain, advantages=plain.advantages * of_tokens)
    fewer = replace(whole)
    assert leave_out(fewer)["perf/skipped_tokens"] > 0.4
    assert any(fewer.loss_mask) == (left > 0)

    async def steps(second):
        await group.load(start)
        group.tokens_per_microbatch = SMALL
        results = [await group.update(batch, loss) for batch in (plain, second, plain)]
        logprobs = await group.logprobs(plain), await group.logprobs(second)
        group.tokens_per_microbatch = LARGE
        return results, *logprobs

    expected, logprobs_then, _ = asyncio.run(steps(whole))
    found, logprobs, some = asyncio.run(steps(fewer))
    for name in ("tokens_run", "flops"):
        assert found[1][name] < 0.6 * expected[1][name]
    for got, wanted in zip(found, expected, strict=True):
        for name in ("grad_norm", "lr", "pg_loss"):
            assert got[name] == pytest.approx(wanted[name], rel=1e-4, abs=1e-6), name
    torch.testing.assert_close(logprobs, logprobs_then, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(some, torch.where(fewer.loss_mask, logprobs, 0.0), rtol=1e-4, atol=1e-4)


def test_the_first_loss_is_that_of_plain_transformers(start, reference):
    """Not of our own packed forward pass, masks or chunks."""
    batch = sft_batch()
    model = load_model(ModelSource("builtin:tiny"), dtype=torch.float32, seed=3)
    model.set_attn_implementation("eager")
    total, count = 0.0, 0
    for ids, mask in zip(batch.input_ids.split(batch.lengths), batch.loss_mask.split(batch.lengths), strict=True):
        with torch.no_grad():
            logprobs = model(ids[None]).logits[0].log_softmax(-1)[:-1].gather(-1, ids[1:, None]).squeeze(-1)
        total -= float(logprobs[mask[1:]].sum())
        count += int(mask.sum())
    assert reference["sft"][0][0]["loss"] == pytest.approx(total / count, rel=1e-5)


def test_evaluation_is_the_loss_without_a_step(alone, pair, start, reference):
    batch = sft_batch()
    for group in (alone[1], pair):
        asyncio.run(group.load(start))
        for _ in range(2):
            assert asyncio.run(group.evaluate(batch)) == pytest.approx(reference["sft"][0][0]["loss"], rel=1e-5)


def test_fewer_sequences_than_workers(alone, pair, start):
    batch = sft_batch().select([4])
    batch.loss_weights = token_weights(batch.loss_mask, batch.cu_seqlens, "token-mean")
    results = []
    for group in (alone[1], pair):
        asyncio.run(group.load(start))
        results.append(asyncio.run(group.update(batch, LossSpec())))
    for name in ("loss", "grad_norm", "entropy"):
        assert results[1][name] == pytest.approx(results[0][name], rel=1e-5)


def test_the_gap_is_that_of_the_policy_before_the_update_to_the_engine(alone, pair, start):
    batch = rl_batch()
    batch.old_logprobs = batch.rollout_logprobs

    async def work(group):
        await group.load(start)
        now = await group.logprobs(batch)
        found = await group.update(batch, LossSpec(RL))
        await group.load(start)
        return now, found, await group.update(batch, LossSpec(RL, gap=False))

    for group in (alone[1], pair):
        now, found, expected = asyncio.run(work(group))
        for name in SAME[:-1]:
            assert found[name] == pytest.approx(expected[name], rel=1e-5, abs=1e-6), name
        assert found["pg_clipfrac"] > 0.0
        distance = float((now - batch.rollout_logprobs)[batch.loss_mask].abs().sum())
        assert found["gap/abs"] == pytest.approx(distance, rel=1e-4)
        assert "gap/abs" not in expected


@pytest.fixture(scope="module")
def sharing(clusters):
    """A trainer of two workers that share sequences."""
    cluster = clusters(config(train={"sequence_parallel": 2}, cluster={"workers": 2}))
    return asyncio.run(cluster.trainer("actor", SOURCE))


@pytest.mark.parametrize("lower", [None, 0.5], ids=["TIS", "IcePop"])
def test_a_correction_within_the_update_is_the_one_of_a_pass_before_it(lower, alone, pair, sharing, start):
    """Tokens are weighted by the log-probabilities of the update's own forward pass: metrics, and the next step's, as
    with the weights of a forward pass of its own, also where workers and micro-batches have parts of the batch."""
    bounds = CorrectionConfig(weight="token", upper=1.5, lower=lower)
    batch = rl_batch()
    batch.old_logprobs = None

    async def two_steps(group, within):
        await group.load(start)
        steps = []
        for _ in range(2):
            own = await group.logprobs(batch)
            given = batch
            if not within:
                sequence = segment_ids(batch.cu_seqlens)
                factors, _ = correct(own - batch.rollout_logprobs, sequence, batch.loss_mask, **bounds.model_dump())
                assert 0.1 < float((factors[batch.loss_mask] == (1.5 if lower is None else 0.0)).float().mean()) < 0.9
                given = replace(batch, loss_weights=batch.loss_weights * factors)
            steps.append(await group.update(given, LossSpec(RL, correction=bounds if within else None)))
            assert (group.before_update is not None) == within
            if within:
                torch.testing.assert_close(group.before_update, own, rtol=1e-5, atol=1e-5)
        return steps

    expected = asyncio.run(two_steps(alone[1], within=False))
    plain = asyncio.run(alone[1].update(batch, LossSpec(RL)))
    assert plain["grad_norm"] != pytest.approx(expected[0]["grad_norm"], rel=1e-2)
    for group, budget in ((alone[1], LARGE), (pair, SMALL), (sharing, SMALL)):
        group.tokens_per_microbatch = budget
        found = asyncio.run(two_steps(group, within=True))
        group.tokens_per_microbatch = LARGE
        for got, wanted in zip(found, expected, strict=True):
            for name in (*SAME[:-1], *SUMS):
                assert got[name] == pytest.approx(wanted[name], rel=1e-5, abs=1e-6), name


def test_batches_without_loss(alone, pair, start):
    """A sequence of one token has nothing to predict; neither has a batch whose masks are empty."""
    single = PackedBatch.from_sequences([[7]], [[True]])
    blank = PackedBatch.from_sequences([[7, 8, 9], [1, 2]], [[False] * 3, [False] * 2])
    for group in (alone[1], pair):
        asyncio.run(group.load(start))
        for batch in (single, blank):
            assert asyncio.run(group.logprobs(batch)).tolist() == [0.0] * batch.num_tokens
            batch.loss_weights = token_weights(batch.loss_mask, batch.cu_seqlens, "token-mean")
            result = asyncio.run(group.update(batch, LossSpec()))
            assert (result["loss"], result["grad_norm"]) == (0.0, 0.0)


def test_a_gradient_that_is_not_finite_changes_nothing(alone, pair, start):
    batch = sft_batch()
    broken = sft_batch()
    broken.loss_weights[broken.loss_mask.nonzero()[7]] = float("nan")

    async def work(group):
        await group.load(start)
        await group.update(batch, LossSpec())
        before = await group.logprobs(batch)
        result = await group.update(broken, LossSpec())
        assert (result["skipped"], math.isnan(result["grad_norm"])) == (1.0, True)
        assert "model.norm.weight" in await group.nonfinite_gradients()
        assert torch.equal(await group.logprobs(batch), before)
        # The optimizer's state is as it was too; only the schedule has moved on.
        after = await group.update(batch, LossSpec())
        await group.load(start)
        await group.update(batch, LossSpec())
        expected = await group.update(batch, LossSpec())
        assert {k: after[k] for k in ("skipped", "loss", "grad_norm")} == {
            k: expected[k] for k in ("skipped", "loss", "grad_norm")
        }

    for group in (alone[1], pair):
        asyncio.run(work(group))


def test_skipped_updates_are_counted_and_too_many_in_a_row_end_the_run(alone, start, tmp_path, capsys, monkeypatch):
    _, group = alone
    batch = sft_batch()
    broken = replace(batch, loss_weights=torch.full_like(batch.loss_weights, torch.inf))
    resolved = resolve("sft", flags={"run.dir": str(tmp_path), "run.name": "r", "train.max_skipped_steps": 2})
    folder = RunTarget.find(resolved).open()
    with Tracker(folder.path, "r", 9, ["console"]) as tracker:
        run = TrainingRun(resolved.config, folder, SOURCE, tracker, StopSignal(), total_steps=9)

        async def step(batch):
            result = await run.update(group, batch, LossSpec())
            run.step += 1
            return result["skipped"]

        async def work():
            await group.load(start)
            # Good ones between them: they are not in a row.
            assert [await step(b) for b in (broken, batch, broken, batch)] == [1.0, 0.0, 1.0, 0.0]
            assert run.skipped_steps == 2
            await run.save(run.step, {"actor": group}, {})
            await run.checkpoints.settle()  # as at the end of a run: it is written meanwhile
            assert await step(broken) == 1.0
            with monkeypatch.context() as patch:  # another model's good updates do not hide it
                patch.setattr(group, "role", "critic")
                assert (await run.update(group, batch, LossSpec()))["skipped"] == 0.0
            with pytest.raises(RunError, match="2 updates in a row were skipped, the last at step 6") as error:
                await step(broken)
            file = folder.path / "nonfinite_step_6.pt"
            assert str(file) in error.value.message
            assert "model.embed_tokens.weight" in error.value.message
            again = TrainingRun(resolved.config, replace(folder, resumed=True), SOURCE, tracker, StopSignal(), 9)
            await again.resume({"actor": group})
            assert (again.step, again.skipped_steps) == (4, 2)
            return torch.load(file, weights_only=True)

        saved = asyncio.run(work())
    names = {"input_ids", "position_ids", "cu_seqlens", "loss_mask", "loss_weights"}
    assert saved.keys() == names
    assert all(torch.equal(saved[name], getattr(broken, name)) for name in names)
    lines = capsys.readouterr().err.splitlines()
    assert lines[0].startswith("step 1: update skipped, gradient norm nan: not finite in model.")


# ---------------------------------------------------------------------- checkpoints


def test_saved_by_two_loaded_by_one(alone, pair, start, tmp_path):
    batch = rl_batch()
    spec = LossSpec(RL)

    async def work():
        await pair.load(start)
        for _ in range(2):
            await pair.update(batch, spec)
        await pair.save(str(tmp_path))
        saved = await pair.logprobs(batch)
        await alone[1].load(start)
        different = await alone[1].logprobs(batch)
        await alone[1].load(str(tmp_path))
        loaded = await alone[1].logprobs(batch)
        # The optimizer's state came along: the third step is the same too.
        return saved, different, loaded, await pair.update(batch, spec), await alone[1].update(batch, spec)

    saved, different, loaded, third, its_third = asyncio.run(work())
    torch.testing.assert_close(loaded, saved, rtol=1e-5, atol=1e-5)
    assert float((different - saved).abs().max()) > 1e-2
    for name in ("pg_loss", "grad_norm", "kl_loss"):
        assert its_third[name] == pytest.approx(third[name], rel=1e-4)
    # The whole model out of the same shards, as merging and sampling read it.
    lm = PackedLM(load_model(ModelSource("builtin:tiny"), dtype=torch.float32))
    load_weights(lm.model, ModelSource("", shards=str(tmp_path / "model")), 0)
    predict = batch.loss_mask.nonzero().flatten()
    ragged = Ragged.build(batch.cu_seqlens, torch.device("cpu"), SDPA)
    with torch.no_grad():
        values, _ = lm(batch.input_ids, batch.position_ids, predict - 1, batch.input_ids[predict], ragged, 1.0)
    torch.testing.assert_close(values, saved[predict], rtol=1e-5, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize(
    "optim", [{"name": "adamw_8bit"}, {"stochastic_rounding": True}], ids=["8bit", "stochastic rounding"]
)
def test_torchao_state_at_another_world_size(optim, clusters, tmp_path):
    """Three workers, whose shards do not end where blocks of 8 bits do, save; they and one worker go on from there."""
    pytest.importorskip("torchao")
    dtype = "bfloat16" if "stochastic_rounding" in optim else "float32"
    train = {"optim": {"lr": 1e-3, "eps": 1e-6, **optim}, "param_dtype": dtype}
    batch = rl_batch()
    spec = LossSpec(RL)
    sections = {"train": train, "data": {"batch_size": 33}}
    opened = [clusters(config(cluster={"workers": n}, **sections)) for n in (3, 1)]

    async def work():
        three, one = [await cluster.trainer("actor", SOURCE) for cluster in opened]
        for _ in range(2):
            await three.update(batch, spec)
        await three.save(str(tmp_path))
        results = []
        for group in (three, three, one):
            await group.load(str(tmp_path))
            steps = [await group.update(batch, spec) for _ in range(2)]
            results.append([(s["pg_loss"], s["grad_norm"], s["kl_loss"]) for s in steps])
        return results

    once, again, alone = asyncio.run(work())
    assert again == once
    for step, expected in zip(alone, once, strict=True):
        assert step == pytest.approx(expected, rel=2e-2)
    assert once[0] != pytest.approx(once[1], rel=1e-2)


# ---------------------------------------------------------------------- weight sync


class Stale(RemoteSampler):
    """A sampler whose weights get lost: it is given those of an earlier update, under the new version."""

    stale: dict[tuple, Bucket]
    """By their entries."""

    async def load_bucket(self, bucket, data=None):
        await super().load_bucket(replace(self.stale[bucket.entries], number=bucket.number))


def test_what_is_saved_after_an_evaluation_is_what_was_trained(clusters, tmp_path):
    """FSDP then holds embeddings and head whole, and in the compute type: not what belongs in a checkpoint."""
    cluster = clusters(config(cluster={"workers": 2}, train={"dtype": "bfloat16"}))
    batch = sft_batch()

    async def work():
        group = await cluster.trainer("actor", SOURCE)
        await group.update(batch, LossSpec())
        await group.save(str(tmp_path / "before"))
        await group.evaluate(batch)
        await group.save(str(tmp_path / "after"))

    asyncio.run(work())
    for part in ("model", "optim"):
        before, after = (read_shards(tmp_path / name / part) for name in ("before", "after"))
        assert before.keys() == after.keys()
        assert len(before) > 20
        for name, tensor in before.items():
            assert tensor.dtype == torch.float32
            assert torch.equal(after[name], tensor), name


def read_shards(folder):
    """Every tensor of a checkpoint, by its name there."""
    metadata = FileSystemReader(folder).read_metadata().state_dict_metadata
    state = {
        name: torch.empty(found.size, dtype=found.properties.dtype)
        for name, found in metadata.items()
        if isinstance(found, TensorStorageMetadata)
    }
    load(state, checkpoint_id=folder, no_dist=True)
    return state


def test_weight_sync_is_proven(alone, start, tmp_path):
    cluster, group = alone
    batch, check = sft_batch(), sequences(4, seed=5)
    everything = PackedBatch.from_sequences(check, [[True] * len(s) for s in check])
    options = {"check": check, "tolerance": 1e-4}

    async def gap(sampler):
        scored = torch.tensor([x for s in await sampler.score(check) for x in s])
        return float((scored - await group.logprobs(everything)).abs().max())

    async def work():
        await group.load(start)
        samplers = await cluster.samplers(SOURCE, [EOS])
        assert [await gap(s) for s in samplers] == [pytest.approx(0.0, abs=1e-4)] * 2
        await group.open_sender(["host"], 64 << 20)
        old = {}
        while (buckets := await group.next_bucket(0)) is not None:
            (one,) = buckets
            old[one.entries] = replace(one, path=str(shutil.copy(one.path, tmp_path / f"old-{len(old)}")))
        assert len(old) > 1  # so that one is gathered while another is read
        await group.close_sender()
        for _ in range(3):
            await group.update(batch, LossSpec())
        assert min([await gap(s) for s in samplers]) > 1e-2

        transfers = cluster.transfers()
        metrics = await publish(group, samplers, transfers, version=1, **options)
        assert metrics["sync/check_gap"] < 1e-5
        assert max([await gap(s) for s in samplers]) < 1e-4
        params = SamplingParams(8)
        assert {(await s.generate([1, 2, 3], params)).version for s in samplers} == {1}

        stale = Stale(samplers[1].handle, deadline_s=60.0)
        stale.stale = old
        await group.update(batch, LossSpec())
        with pytest.raises(WeightSyncError, match=r"sampler 1 does not hold weight version 2") as error:
            await publish(group, [samplers[0], stale], transfers, version=2, **options)
        assert "sync_tolerance" in error.value.hint

    asyncio.run(work())


# ---------------------------------------------------------------------- workers that die


def test_a_killed_worker_is_named(clusters):
    """Its handle fails too, in a collective; the one that died is the one to hear about."""
    cluster = clusters(config(cluster={"workers": 2, "step_deadline_s": 60.0}))

    async def work():
        group = await cluster.trainer("actor", SOURCE)
        group.tokens_per_microbatch = SMALL
        long = PackedBatch.from_sequences(ids := sequences(400, seed=7), [[True] * len(s) for s in ids])
        long.loss_weights = token_weights(long.loss_mask, long.cu_seqlens, "token-mean")
        pid = await group.actors[1].__ray_call__.remote(lambda self: os.getpid())
        task = asyncio.create_task(group.update(long, LossSpec()))
        await asyncio.sleep(0.7)
        assert not task.done()
        os.kill(pid, signal.SIGKILL)
        started = time.monotonic()
        with pytest.raises(WorkerError, match="actor worker 1 died during update"):
            await task
        assert time.monotonic() - started < 20.0
        # And it stays so.
        with pytest.raises(WorkerError, match="actor worker 1 died during logprobs"):
            await group.logprobs(sft_batch())

    asyncio.run(work())


def test_the_failure_that_explains_the_others_is_reported():
    """A worker that dies makes its handles fail in a collective, and theirs may be the first error to arrive."""

    @ray.remote(num_cpus=0)
    class Worker:
        def work(self, what):
            if what == "raise":
                raise RuntimeError("connection closed by handle")
            if what == "ours":
                time.sleep(0.3)
                raise RunError("the gradient is not finite", hint="lower the rate")
            if what == "die":
                time.sleep(0.3)
                os._exit(1)
            time.sleep(3600)

    async def outcome(*whats, deadline_s=20.0):
        actors = [Worker.remote() for _ in whats]
        await gather([a.__ray_ready__.remote() for a in actors], [ActorHandle("a"), ActorHandle("b")], "start", 60.0)
        refs = [a.work.remote(what) for a, what in zip(actors, whats, strict=True)]
        try:
            await gather(refs, [ActorHandle("worker a"), ActorHandle("worker b")], "step 3", deadline_s)
        except PosttrainError as error:
            return error
        finally:
            for actor in actors:
                ray.kill(actor)

    async def work():
        died = await outcome("raise", "die")
        assert (type(died), died.message) == (
            WorkerError,
            "worker b died during step 3: its process was killed or crashed",
        )
        raised = await outcome("hang", "raise")
        assert isinstance(raised, WorkerError)
        assert raised.message.startswith("worker b failed in step 3: RuntimeError: connection closed by handle")
        ours = await outcome("raise", "ours")
        assert (type(ours), ours.message, ours.hint) == (RunError, "the gradient is not finite", "lower the rate")
        late = await outcome("hang", "hang", deadline_s=0.2)
        assert isinstance(late, DeadlineError)
        assert late.message == "worker a, worker b did not finish step 3 within 0.2 s"

    asyncio.run(work())


# ---------------------------------------------------------------------- a run that is stopped and goes on


def write_conversations(path, count):
    words = ["red", "green", "blue", "one", "two", "three"]
    rows = [
        sft_row(
            Conversation(
                [
                    {"role": "user", "content": f"Say {words[i % 6]} {i % 7 + 1} times"},
                    {"role": "assistant", "content": " ".join([words[i % 6]] * (i % 7 + 1))},
                ]
            )
        )
        for i in range(count)
    ]
    write_rows(path, rows)


STEPS = 24


@pytest.fixture
def sft_run(tmp_path):
    """``sft_run(name)``: one `sft` run, and its metrics without the times."""
    write_conversations(tmp_path / "train.parquet", 50)
    write_conversations(tmp_path / "val.parquet", 9)
    preset = tmp_path / "steady.toml"
    preset.write_text('command = "sft"\n')

    def run(name, stop_after=None):
        sets = [
            f"run.dir='{tmp_path / 'runs'}'",
            f"run.name='{name}'",
            f"data.train='{tmp_path / 'train.parquet'}'",
            f"data.val='{tmp_path / 'val.parquet'}'",
            "data.batch_size=8",
            f"train.steps={STEPS}",
            "train.save_every=4",
            "train.val_every=6",
            "train.optim.lr=1e-3",
            "run.logger=['jsonl']",
            "cluster.device='cpu'",
        ]
        folder = tmp_path / "runs" / name
        if stop_after is not None:
            interrupt_after(folder / "metrics.jsonl", stop_after)
        sft.run(resolve("sft", str(preset), sets))
        return folder

    return run


def interrupt_after(path, lines):
    """Ctrl-C for this process, once the file has so many lines."""

    def watch():
        deadline = time.monotonic() + 120
        while time.monotonic() < deadline:
            if path.is_file() and path.read_text().count("\n") >= lines:
                os.kill(os.getpid(), signal.SIGINT)
                return
            time.sleep(0.002)

    threading.Thread(target=watch, daemon=True).start()


def metrics(folder):
    keep = ("step", "train/loss", "train/grad_norm", "train/lr", "train/tokens", "train/loss_tokens", "val/loss")
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [{k: v for k, v in row.items() if k in keep} for row in rows]


def assert_same_rows(rows, expected):
    assert [row.keys() for row in rows] == [row.keys() for row in expected]
    for row, wanted in zip(rows, expected, strict=True):
        assert row == pytest.approx(wanted, rel=1e-6)


def status(folder):
    return json.loads((folder / "run.json").read_text())["status"]


def test_a_run_that_was_stopped_twice_equals_one_that_was_not(sft_run, tmp_path):
    whole = metrics(sft_run("whole"))
    assert [row["step"] for row in whole] == list(range(1, STEPS + 1))
    assert [row["step"] for row in whole if "val/loss" in row] == [6, 12, 18, 24]
    assert whole[-1]["val/loss"] < whole[5]["val/loss"]

    for stop_after in (3, 9):
        with pytest.raises(Interrupted, match=rf"stopped after step \d+ of {STEPS}"):
            sft_run("stopped", stop_after)
        folder = tmp_path / "runs" / "stopped"
        assert status(folder) == "interrupted"
        done = metrics(folder)
        assert stop_after <= len(done) < STEPS
        assert_same_rows(done, whole[: len(done)])
    # The newest checkpoint gets damaged: the run goes on from the one before, and writes the steps between again.
    newest = checkpoint.find(folder)
    shard = next((newest.path / "actor" / "model").glob("*.distcp"))
    shard.write_bytes(shard.read_bytes()[:-1])
    found, problems = checkpoint.newest(folder / "checkpoints")
    assert found.step < newest.step
    assert "is damaged" in problems[0]

    sft_run("stopped")
    assert status(folder) == "finished"
    assert_same_rows(metrics(folder), whole)
    assert checkpoint.find(folder).step == STEPS


# ---------------------------------------------------------------------- Ctrl-C


INTERRUPTING = """
import signal
from posttrain.rewards import DATA_SOURCES, GRADERS, cheap
from posttrain.core.types import Score

DATA_SOURCES["test/interrupting"] = "interrupting"
seen = []

@GRADERS.register("interrupting")
@cheap  # runs in the driver
def interrupting(response, ground_truth, extra_info):
    if not seen:
        seen.append(1)
        signal.raise_signal(signal.SIGINT)
    return Score(0.0, False)
"""


@pytest.mark.slow
def test_ctrl_c_while_validating_loses_neither_the_step_nor_its_metrics(tmp_path):
    def rows(source):
        prompt = [{"role": "user", "content": "Say 8"}]
        return [{"data_source": source, "prompt": prompt, "reward_model": {"ground_truth": "8"}} for _ in range(2)]

    write_rows(tmp_path / "train.parquet", rows("openai/gsm8k"))
    write_rows(tmp_path / "val.parquet", rows("test/interrupting"))
    (tmp_path / "interrupting.py").write_text(INTERRUPTING)
    sets = [
        f"plugins=['{tmp_path}/interrupting.py']",
        f"data.val='{tmp_path}/val.parquet'",
        *("data.batch_size=2", "rollout.n=2", "rollout.tools=[]", "rollout.max_response_tokens=8"),
        *("train.val_every=1", "train.steps=3"),
    ]
    flags = {"run.dir": str(tmp_path / "runs"), "run.name": "r", "data.train": str(tmp_path / "train.parquet")}
    flags |= {"model.path": "builtin:tiny"}
    with pytest.raises(Interrupted, match="stopped after step 1 of 3"):
        rl.run(resolve("rl", "tiny-arith", sets=sets, flags=flags))
    folder = tmp_path / "runs" / "r"
    found, problems = checkpoint.newest(folder / "checkpoints")
    assert found is not None
    assert (found.step, problems) == (1, [])
    assert [json.loads(line)["step"] for line in (folder / "metrics.jsonl").read_text().splitlines()] == [1]
    rl.run(resolve("rl", "tiny-arith", sets=sets, flags=flags))
    assert [json.loads(line)["step"] for line in (folder / "metrics.jsonl").read_text().splitlines()] == [1, 2, 3]

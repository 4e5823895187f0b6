"""Algorithms of `rl` in real runs on the tiny model: that each takes its steps, and what must not change a weight."""

import asyncio
import json
import math
import re
from pathlib import Path

import pyarrow.parquet as pq
import pytest
import torch
from torch import nn
from typer.testing import CliRunner

from posttrain.algos import ADVANTAGES, BUNDLES
from posttrain.algos.losses import value
from posttrain.algos.reduce import token_weights
from posttrain.cli import app
from posttrain.cluster.cluster import Cluster, local_ray
from posttrain.config import Config
from posttrain.config.presets import resolve
from posttrain.core.errors import ConfigError
from posttrain.data.pack import PackedBatch
from posttrain.data.parquet import write_rows
from posttrain.models.builtin import builtin_tokenizer, create_builtin
from posttrain.models.load import ModelSource, load_model, locate
from posttrain.models.weights import load_weights
from posttrain.rl import command as rl
from posttrain.rl.batch import pack, usable
from posttrain.rl.learner import Learner, kl_in_reward
from posttrain.rollout.files import RolloutFiles, fingerprint
from posttrain.runs.run import RunDir, StopSignal
from posttrain.runs.training_run import TrainingRun
from posttrain.tracking import Tracker
from posttrain.train import checkpoint
from posttrain.train.spec import LossSpec
from tests.helpers.stopped_runs import cut_back

REPO = Path(__file__).resolve().parents[2]
pytestmark = pytest.mark.slow

OPTIM = ["train.optim.lr=3e-3", "train.optim.warmup_ratio=0.0", "train.optim.eps=1e-5"]

PLUGIN = """
import zlib

from posttrain.rewards import DATA_SOURCES, GRADERS, cheap
from posttrain.core.types import Score

DATA_SOURCES["test/any"] = "any"
DATA_SOURCES["test/same"] = "same"

@GRADERS.register("any")
@cheap
def any_(response, ground_truth, extra_info):
    score = float(zlib.crc32(response.encode()) % 4)
    return Score(score, score >= 2, extracted=str(score), parts={"even": score % 2})

@GRADERS.register("same")
@cheap
def same(response, ground_truth, extra_info):
    return Score(0.3, False)
"""


@pytest.fixture(scope="module", autouse=True)
def ray_here():
    with local_ray():
        yield


@pytest.fixture(scope="module")
def here(tmp_path_factory):
    """A folder with data and graders."""
    folder = tmp_path_factory.mktemp("algos")
    for name in ("any", "same"):
        rows = [
            {
                "data_source": f"test/{name}",
                "prompt": [{"role": "user", "content": f"Say {i}"}],
                "reward_model": {"style": "rule", "ground_truth": "8"},
            }
            for i in range(8)
        ]
        write_rows(folder / f"{name}.parquet", rows)
    (folder / "plugin.py").write_text(PLUGIN)
    return folder


def run(here, name, *sets, data="any", **flags):
    """The folder and the metrics of one `rl` run on the untrained tiny model."""
    sampling = [f"data.train='{here}/{data}.parquet'", "data.batch_size=2", "rollout.n=4", "rollout.tools=[]"]
    sampling += ["rollout.max_response_tokens=8", f"plugins=['{here}/plugin.py']", "model.path='builtin:tiny'"]
    flags = {"run.dir": str(here / "runs"), "run.name": name} | {k.replace("__", "."): v for k, v in flags.items()}
    folder = rl.run(resolve("rl", "tiny-arith", sets=[*sampling, *OPTIM, *sets], flags=flags))
    return folder, [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def weights(folder, part="actor"):
    """Of the newest checkpoint of a run, by name."""
    model = load_model(ModelSource("builtin:tiny"), dtype=torch.float32)
    if part == "critic":
        model.set_output_embeddings(nn.Linear(model.config.hidden_size, 1, bias=False))
    load_weights(model, ModelSource("", shards=str(checkpoint.find(folder).path / part / "model")), 0)
    return dict(model.named_parameters())


@pytest.fixture(scope="module")
def recorded(here):
    """A run of grpo, whose traces others replay."""
    return run(here, "grpo", "train.steps=3", algo__name="grpo")[0]


# ---------------------------------------------------------------------- every algorithm

NEEDS = {"opd": ["algo.teacher='run:grpo'"], "gdpo": ["reward.weights={score = 1.0, even = 2.0}"]}


@pytest.fixture(scope="module")
def models(here, recorded, tmp_path_factory):
    """``models(name, *sets)``: two steps of an algorithm on the recorded trajectories of a step, from the start, and
    what they change of the actor's log-probabilities. ``models.to_teacher``: how far the start's are from the
    teacher's. All models are started once."""
    tokenizer, source = builtin_tokenizer("tiny"), ModelSource("builtin:tiny")
    traces = RolloutFiles(str(recorded / "rollouts"), vocabulary=len(tokenizer), tokenizer=fingerprint(tokenizer))
    groups = traces.read(traces.steps[0])
    for group in groups:
        for place, episode in enumerate(group):
            episode.reward += place / 100  # no two alike: pass@k trains nothing where two are the best
    base = resolve("rl", "tiny-arith", OPTIM).config
    cluster = Cluster(base)
    runner = asyncio.Runner()
    runner.run(cluster.__aenter__())
    actor = runner.run(cluster.trainer("actor", source))
    critic = runner.run(cluster.trainer("critic", source, values=True))
    ref = runner.run(cluster.trainer("reference", source, trainable=False))
    teacher = runner.run(cluster.trainer("teacher", locate(str(checkpoint.find(recorded).path)), trainable=False))
    start = tmp_path_factory.mktemp("start")
    runner.run(actor.save(str(start / "actor")))
    runner.run(critic.save(str(start / "critic")))

    async def steps(name, *sets):
        flags = {"algo.name": name, "run.dir": str(here / "runs"), "run.name": "unused"}
        cfg = resolve("rl", "tiny-arith", [*OPTIM, *NEEDS.get(name, []), *sets], flags).config
        needs = ADVANTAGES.get(cfg.algo.advantage)
        await actor.load(str(start / "actor"))
        await critic.load(str(start / "critic"))
        batch = pack(usable(groups))
        before = await actor.logprobs(batch)
        with Tracker(None, name, 2, []) as tracker:
            folder = RunDir(here / "runs" / "unused", resumed=False)
            run = TrainingRun(cfg, folder, source, tracker, StopSignal(), total_steps=2)
            learner = Learner(
                run,
                actor,
                critic if needs.critic else None,
                ref if cfg.algo.kl_coef else None,
                teacher if needs.teacher else None,
                kl_in_reward(cfg.algo),
            )
            baselines = {group[0].prompt.index: 1.0 for group in groups} if needs.greedy else None
            metrics = []
            for step in run.steps():
                # In the second step other weights than those of now sampled everything.
                metrics.append((await learner.learn(groups, version=step - 1, baselines=baselines))[1])
        return metrics, (await actor.logprobs(batch) - before)[batch.loss_mask]

    def take(name, *sets):
        return runner.run(steps(name, *sets))

    batch = pack(usable(groups))
    gap = runner.run(teacher.logprobs(batch)) - runner.run(actor.logprobs(batch))
    take.to_teacher = gap[batch.loss_mask]
    yield take
    runner.run(cluster.__aexit__(None, None, None))
    runner.close()


@pytest.mark.parametrize("name", BUNDLES.names())
def test_every_algorithm_takes_its_steps(models, name):
    """Two updates a step, so that the second one sees ratios other than 1."""
    metrics, change = models(name, "algo.updates_per_step=2")
    assert all(isinstance(v, int | float) and math.isfinite(v) for m in metrics for v in m.values())
    assert all(m["actor/grad_norm"] > 0 for m in metrics)
    assert any(m["actor/ppo_kl"] != 0 for m in metrics)
    assert all(m["actor/updates"] == 2 for m in metrics)
    assert float(change.abs().mean()) > 0.01


def test_on_policy_the_clip_and_the_ratio_of_a_sequence_do_not_act(models):
    """With one update by the policy that sampled, losses that differ in what they do about ratios are one loss."""
    same = ["algo.advantage=grpo", "algo.loss_agg=token-mean"]
    [expected, _], change = models("grpo", *same)
    for name in ("gspo", "gmpo", "cispo", "sapo"):
        [first, _], _ = models(name, *same)
        assert first["actor/grad_norm"] == pytest.approx(expected["actor/grad_norm"], rel=1e-5)
    assert torch.equal(models("grpo", *same)[1], change)  # each of them began at the same weights


def test_distillation_goes_to_the_teacher(models):
    """A step along the gradient J'A of the advantages A changes the log-probabilities by JJ'A to first order, so that
    its product with A is positive whatever was sampled; A is what the teacher's have more."""
    [first, _], change = models("opd")
    aim = models.to_teacher
    assert first["critic/advantages/mean"] == pytest.approx(float(aim.mean()), rel=1e-4)
    assert first["critic/advantages/max"] == pytest.approx(float(aim.max()), rel=1e-4)
    assert float(torch.cosine_similarity(change, aim, dim=0)) > 0.5


def test_kl_in_the_reward(models):
    sets = [
        "algo.kl_in=reward",
        "algo.kl_coef=0.5",
        "algo.kl_target=0.001",
        "algo.kl_horizon=40",
        "algo.kl_estimator=k1",
    ]
    (first, last), change = models("grpo", *sets)
    assert first["actor/reward_kl_penalty"] == pytest.approx(0.0, abs=1e-6)  # it is the reference still
    assert first["actor/reward_kl_penalty_coeff"] == 0.5
    # 8 episodes of a horizon of 40 are a fifth, and a step changes it by a fifth of that.
    assert last["actor/reward_kl_penalty_coeff"] == pytest.approx(0.5 * 0.96)
    penalty, coefficient = last["actor/reward_kl_penalty"], last["actor/reward_kl_penalty_coeff"]
    assert penalty != 0.0
    taken = last["critic/score/mean"] - last["critic/rewards/mean"]  # of an episode; the penalty is one token's
    assert taken == pytest.approx(penalty * coefficient * len(change) / 8, rel=1e-4)


def test_kl_and_entropy_in_the_loss(models):
    plain, _ = models("grpo")
    # Of a model that has learned nothing the entropy hardly depends on the weights.
    more, _ = models("grpo", "algo.entropy_coef=10.0", "algo.kl_coef=0.1", "algo.kl_estimator='k3+'")
    assert more[0]["actor/pg_loss"] == pytest.approx(plain[0]["actor/pg_loss"], abs=1e-6)
    assert more[0]["actor/grad_norm"] != pytest.approx(plain[0]["actor/grad_norm"], rel=1e-3)
    assert more[1]["actor/kl_loss"] > 0.0


@pytest.mark.parametrize(
    "sets",
    [
        ["algo.correction.weight=token", "algo.correction.lower=0.5"],
        ["algo.correction.weight=sequence", "algo.correction.reject=geometric_mean"],
    ],
    ids=["IcePop", "sequence TIS"],
)
def test_a_correction_of_no_gap_does_nothing(models, sets):
    """Trainer and engine agree to float32's rounding."""
    plain, _ = models("grpo")
    metrics, _ = models("grpo", *sets)
    first = metrics[0]
    assert first["correction/masked"] == first["correction/truncated"] == first["correction/rejected"] == 0.0
    assert first["correction/weight/mean"] == pytest.approx(1.0, abs=1e-3)
    assert first["correction/effective_sample_size"] == pytest.approx(1.0, abs=1e-3)
    assert first["actor/grad_norm"] == pytest.approx(plain[0]["actor/grad_norm"], rel=1e-3)


def test_remax_plays_greedy_episodes(here):
    _, metrics = run(here, "remax", "train.steps=2", algo__name="remax")
    assert [m["rollout/missing_baselines"] for m in metrics] == [0.0, 0.0]
    assert all(m["actor/grad_norm"] > 0 for m in metrics)


# ---------------------------------------------------------------------- what must change nothing


@pytest.mark.parametrize(
    "sets",
    [[], ["algo.updates_per_step=2", "algo.kl_coef=0.1", "train.share_prompts=true"]],
    ids=["grpo", "grpo, KL, twice, shared prompts"],
)
def test_without_a_learning_rate_nothing_changes_for_ten_steps(here, recorded, sets):
    """The same recorded batch again and again: every metric of the policy stays as it is. Ratios are to the engine's
    log-probabilities of this very policy, and 1 within the numerics of two ways to compute them in float32."""
    first = here / "one_step"
    first.mkdir(exist_ok=True)
    trace = recorded / "rollouts" / "step_000001.parquet"
    (first / trace.name).write_bytes(trace.read_bytes())
    sets = ["train.optim.lr=0.0", "train.optim.weight_decay=0.0", "train.epochs=10", "train.steps=10", *sets]
    folder, metrics = run(here, "still", *sets, rollout__replay=str(first), run__overwrite=True)
    assert len(metrics) == 10
    assert all(m["perf/padding"] == 0.0 for m in metrics)
    assert all(("perf/shared_tokens" in m) == ("train.share_prompts=true" in sets) for m in metrics)
    assert all(m.get("perf/shared_tokens", 1.0) > 0.3 for m in metrics)
    names = [n for n in metrics[0] if n.startswith(("actor/", "critic/", "rollout_gap/"))]
    assert {"actor/pg_loss", "actor/entropy", "actor/grad_norm", "rollout_gap/mean_abs"} <= set(names)
    for later in metrics[1:]:
        assert {n: later[n] for n in names} == {n: metrics[0][n] for n in names}
    assert metrics[0]["actor/pg_clipfrac"] == 0.0
    assert abs(metrics[0]["actor/ppo_kl"]) < 1e-5
    assert metrics[0]["rollout_gap/mean_abs"] < 1e-5
    assert metrics[0]["rollout_gap/outside"] == 0.0
    start = dict(load_model(ModelSource("builtin:tiny"), dtype=torch.float32, seed=0).named_parameters())
    assert all(torch.equal(tensor, start[name]) for name, tensor in weights(folder).items())


def test_sampling_without_a_learning_rate_stays_on_policy(here, capsys):
    """As above, with new episodes every step."""
    sets = ["train.steps=10", "train.optim.lr=0.0", "train.optim.weight_decay=0.0", f"data.val='{here}/any.parquet'"]
    sets += ["train.val_every=1", "val.temperature=0.0", "val.before_train=true"]
    folder, metrics = run(here, "still-sampling", *sets)
    assert [step["step"] for step in metrics] == list(range(11))
    for step in metrics[1:]:
        assert step["actor/ppo_kl"] == 0.0
        assert step["actor/pg_clipfrac"] == 0.0
        assert step["rollout_gap/mean_abs"] < 1e-5
        assert step["rollout_gap/outside"] == 0.0
        assert step["sync/check_gap"] < 1e-5
    assert len({step["val-core/test/any/acc/mean@1"] for step in metrics}) == 1
    assert len(re.findall(r"^validation: \d+ prompts$", capsys.readouterr().err, flags=re.MULTILINE)) == 11
    start = dict(load_model(ModelSource("builtin:tiny"), dtype=torch.float32, seed=0).named_parameters())
    assert all(torch.equal(tensor, start[name]) for name, tensor in weights(folder).items())


def test_a_run_without_a_signal_goes_on_where_its_episodes_are_left_out(here, capsys):
    """Every update decays the weights by the same, to the bit. With a KL in the loss nothing is left out."""
    decay = ["train.steps=2", "algo.updates_per_step=2", "train.optim.weight_decay=0.1"]
    plain, _ = run(here, "decays", *decay, data="same")
    folder, metrics = run(here, "skips", *decay, "train.skip_zero_advantages=true", data="same")
    assert [m["perf/skipped_tokens"] for m in metrics] == [1.0] * 2
    assert [m["actor/updates"] for m in metrics] == [2.0] * 2
    start = dict(load_model(ModelSource("builtin:tiny"), dtype=torch.float32, seed=0).named_parameters())
    expected = weights(plain)
    assert all(torch.equal(tensor, expected[name]) for name, tensor in weights(folder).items())
    assert not all(torch.equal(tensor, start[name]) for name, tensor in expected.items())
    assert "skip_zero_advantages" not in capsys.readouterr().err
    sets = ["train.skip_zero_advantages=true", "algo.kl_coef=0.1", "train.steps=1"]
    _, [metrics] = run(here, "kl-skips", *sets, data="same")
    assert "perf/skipped_tokens" not in metrics
    said = "train.skip_zero_advantages does nothing: with algo.kl_coef every episode has a part"
    assert said in capsys.readouterr().err


def test_equal_rewards_leave_every_bit_of_the_weights(here):
    folder, metrics = run(here, "same", "train.steps=3", "train.optim.weight_decay=0.0", data="same")
    assert [m["critic/score/mean"] for m in metrics] == [pytest.approx(0.3)] * 3
    assert [m["rollout/groups_without_signal"] for m in metrics] == [1.0] * 3
    assert [m["actor/grad_norm"] for m in metrics] == [0.0] * 3
    start = dict(load_model(ModelSource("builtin:tiny"), dtype=torch.float32, seed=0).named_parameters())
    assert all(torch.equal(tensor, start[name]) for name, tensor in weights(folder).items())


# ---------------------------------------------------------------------- the critic


def test_a_critic_trains_and_resumes(here, recorded):
    """PPO whole, from recorded trajectories: stopped after two steps, it ends as if it had not been."""
    replay = str(recorded / "rollouts")
    sets = ["train.save_every=1", "algo.kl_coef=0.1", "algo.kl_in=reward", "algo.kl_target=0.01", "algo.kl_horizon=100"]
    sets += ["critic.optim.lr=3e-3", "critic.warmup_steps=1", "algo.updates_per_step=2", "algo.gamma=0.99"]
    sets += ["train.optim.schedule=constant"]
    flags = {"rollout__replay": replay, "algo__name": "ppo"}
    folder, whole = run(here, "whole", *sets, "train.steps=3", **flags)
    assert whole[0]["critic/values/max"] == whole[0]["critic/values/min"] == 0.0  # the head begins at 0
    assert whole[0]["critic/vf_loss"] > 0.0
    assert "actor/pg_loss" not in whole[0]  # the critic's warm-up, in which the policy is the reference
    assert [row["actor/reward_kl_penalty_coeff"] for row in whole[:2]] == [0.1, 0.1]
    assert whole[1]["critic/values/max"] > whole[1]["critic/values/min"]
    assert "actor/pg_loss" in whole[1]
    expected = {part: weights(folder, part) for part in ("actor", "critic")}
    cut_back(folder, 2)
    _, parts = run(here, "whole", *sets, "train.steps=3", **flags)
    names = [n for n in whole[2] if n.startswith(("actor/", "critic/"))]
    assert [row["step"] for row in parts] == [1, 2, 3]
    assert parts[2]["time"] > whole[2]["time"]
    assert {n: parts[2][n] for n in names} == {n: whole[2][n] for n in names}
    for part, wanted in expected.items():
        assert all(torch.equal(tensor, wanted[name]) for name, tensor in weights(folder, part).items())


def test_a_run_that_resumes_after_a_validation_samples_as_it_had(here):
    """The one that goes on has not validated: what a validation samples is not of the stream of training."""
    sets = ["rollout.max_concurrent=1", "train.save_every=1", "train.val_every=2", f"data.val='{here}/same.parquet'"]
    folder, whole = run(here, "validated", *sets, "val.n=2", "val.temperature=1.0", "train.steps=3")
    sampled = pq.read_table(folder / "rollouts/step_000003.parquet", columns=["tokens"]).to_pylist()
    cut_back(folder, 2)
    _, parts = run(here, "validated", *sets, "val.n=2", "val.temperature=1.0", "train.steps=3")
    assert parts[2]["time"] > whole[2]["time"]
    assert pq.read_table(folder / "rollouts/step_000003.parquet", columns=["tokens"]).to_pylist() == sampled
    assert parts[2]["actor/grad_norm"] == whole[2]["actor/grad_norm"]


def values_batch():
    generator = torch.Generator().manual_seed(4)
    lengths = torch.randint(2, 60, (9,), generator=generator).tolist()
    ids = [torch.randint(1000, (n,), generator=generator).tolist() for n in lengths]
    batch = PackedBatch.from_sequences(ids, [(torch.rand(len(s), generator=generator) < 0.7).tolist() for s in ids])
    batch.loss_weights = token_weights(batch.loss_mask, batch.cu_seqlens, "token-mean")
    batch.values = torch.zeros(batch.num_tokens)
    batch.returns = torch.randn(batch.num_tokens, generator=generator)
    return batch


@pytest.mark.parametrize("workers", [1, 2])
def test_a_critic_takes_the_steps_of_a_plain_loop(workers):
    """Three updates of a head on plain transformers, row by row, without packing."""
    optim = {"lr": 1e-3, "eps": 1e-6, "weight_decay": 0.0, "betas": [0.9, 0.999]}
    values = {"command": "rl", "run": {"seed": 3}, "cluster": {"workers": workers}}
    cfg = Config.model_validate(values | {"train": {"optim": optim, "tokens_per_microbatch": 100}})
    batch = values_batch()

    async def ours():
        async with Cluster(cfg) as cluster:
            critic = await cluster.trainer("critic", ModelSource("builtin:tiny"), total_steps=10, values=True)
            first = await critic.values(batch)
            losses = [(await critic.update(batch, LossSpec(value_clip=0.2)))["vf_loss"] for _ in range(3)]
            return first, losses, await critic.values(batch)

    first, losses, last = asyncio.run(ours())
    assert not first.any()

    model = load_model(ModelSource("builtin:tiny"), dtype=torch.float32, seed=3)
    model.set_attn_implementation("eager")
    head = nn.Linear(model.config.hidden_size, 1, bias=False)
    nn.init.zeros_(head.weight)
    trained = [*model.model.parameters(), *head.parameters()]
    optimizer = torch.optim.AdamW(trained, lr=1e-3, eps=1e-6, weight_decay=0.0, betas=(0.9, 0.999))

    def all_values():
        rows = []
        for ids in batch.input_ids.split(batch.lengths):
            states = model.model(ids[None]).last_hidden_state[0]
            rows.append(torch.cat([torch.zeros(1), head(states).squeeze(-1)[:-1]]))
        return torch.cat(rows)

    own = batch.loss_mask
    for expected in losses:
        optimizer.zero_grad()
        loss, _ = value(
            all_values()[own], batch.values[own], batch.returns[own], torch.full((int(own.sum()),), 1 / int(own.sum())),
            clip=0.2,
        )  # fmt: skip
        assert loss.item() == pytest.approx(expected, rel=1e-5)
        loss.backward()
        nn.utils.clip_grad_norm_(trained, 1.0)
        optimizer.step()
    with torch.no_grad():
        torch.testing.assert_close(last[own], all_values()[own], rtol=1e-4, atol=1e-5)


# ---------------------------------------------------------------------- refusals


@pytest.mark.parametrize(("key", "name"), [("algo.teacher", "opd"), ("critic.path", "ppo")])
def test_a_model_of_other_tokens_is_refused(here, tmp_path, key, name):
    tokenizer = builtin_tokenizer("tiny")
    tokenizer.add_tokens(["<one more>"])
    tokenizer.save_pretrained(tmp_path)
    model = create_builtin("tiny", 0)
    model.resize_token_embeddings(len(tokenizer), mean_resizing=False)
    model.save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match=rf"{key} = .* has other tokens than model.path = 'builtin:tiny'"):
        run(here, "other", f"{key}='{tmp_path}'", algo__name=name)
    assert not (here / "runs" / "other").exists()


# ---------------------------------------------------------------------- plugin files


@pytest.fixture
def command(here, registries, monkeypatch):
    """``command(name, *options)``: the folder and the metrics of three steps of `posttrain rl` on the untrained tiny
    model."""
    monkeypatch.chdir(here)

    def posttrain(name, *options):
        sets = ["data.batch_size=2", "rollout.n=4", "rollout.tools=[]", "rollout.max_response_tokens=8", *OPTIM]
        sets += ["algo.updates_per_step=2"]
        line = ["rl", "--preset", "tiny-arith", "--model", "builtin:tiny", "--data", "any.parquet", "--steps", "3"]
        line += ["--name", name, "--plugin", "plugin.py", *options, *(x for key in sets for x in ("--set", key))]
        result = CliRunner().invoke(app, line)
        assert result.exit_code == 0, result.output
        folder = here / "runs" / name
        return folder, [json.loads(row) for row in (folder / "metrics.jsonl").read_text().splitlines()]

    return posttrain


@pytest.mark.parametrize(
    ("plugin", "options", "metric"),
    [
        ("my_loss", ["--algo", "dro", "--set", "algo.loss_kwargs.beta=0.5"], "actor/squared_log_ratio"),
        ("my_advantage", ["--set", "algo.advantage=win_rate"], "critic/advantages/max"),
    ],
)
def test_trains_with_an_algorithm_of_a_plugin_file(command, plugin, options, metric):
    """Through the command: the driver and the training worker both import the file."""
    folder, metrics = command(plugin, "--plugin", str(REPO / "examples" / f"{plugin}.py"), *options)
    assert len(metrics) == 3
    assert all(m["actor/grad_norm"] > 0 and m["actor/updates"] == 2 for m in metrics)
    assert any(m[metric] > 0 for m in metrics)
    assert all(m["critic/advantages/max"] <= (1.0 if plugin == "my_advantage" else 3.0) for m in metrics)
    start = dict(load_model(ModelSource("builtin:tiny"), dtype=torch.float32).named_parameters())
    assert any(not torch.equal(weight, start[name]) for name, weight in weights(folder).items())

"""Updates without the episodes whose advantages are all 0: the same step, from fewer tokens."""

import math
import random
from collections import Counter
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from posttrain.algos import POLICY_LOSSES
from posttrain.config.presets import resolve
from posttrain.models.load import ModelSource
from posttrain.rl.batch import leave_out, pack, weigh
from posttrain.rl.learner import Learner, kl_in_reward
from posttrain.rl.metrics import update_metrics
from posttrain.runs.run import RunDir, StopSignal
from posttrain.runs.training_run import TrainingRun
from posttrain.tracking import Tracker
from posttrain.train.spec import WorkerSpec
from tests.helpers import recorded
from tests.helpers.local_trainer import local_trainer

SOURCE = ModelSource("builtin:tiny")
OPTIM = ["train.optim.lr=1e-3", "train.optim.warmup_ratio=0.0", "train.optim.eps=1e-5", "train.optim.weight_decay=0.1"]
MIXED = (1, 0, 1, 0, 1, 0)
"""Which groups have rewards that differ."""


def config(*sets, algo="grpo"):
    return resolve("rl", "tiny-arith", [*OPTIM, *sets], {"algo.name": algo, "run.name": "unused"}).config


def groups_of(signal=MIXED, members=4, seed=0):
    """Groups of episodes of several turns, whose lengths differ much, by weights of two versions."""
    rng = random.Random(seed)
    groups = []
    for number, differs in enumerate(signal):
        prompt = [rng.randrange(1000) for _ in range(rng.randint(2, 30))]
        group = []
        for member in range(members):
            turns = [(rng.randint(1, 20), owned) for owned in (True, False, True)[: rng.choice([1, 3])]]
            mask = np.array([False] * len(prompt) + [owned for n, owned in turns for _ in range(n)])
            made = recorded.trajectory(
                number,
                reward=float(member % 2) if differs else float(number == 1),
                tokens=np.array(prompt + [rng.randrange(1000) for n, _ in turns for _ in range(n)], np.int32),
                loss_mask=mask,
                logprobs=np.where(mask, [-6.9 + rng.gauss(0, 0.3) for _ in mask], 0.0).astype(np.float32),
                weight_version=np.where(mask, [rng.choice([0, 1]) for _ in mask], -1).astype(np.int32),
            )
            group.append(made)
        groups.append(group)
    return groups


class Steps:
    """Steps of a real worker, from the same weights again and again."""

    def __init__(self, group):
        self.group = group
        self.start = {name: p.detach().clone() for name, p in group.worker.parameters.items()}
        self.computed = Counter()
        call = group.call

        async def counted(method, per_worker=None):
            if method in ("logprobs", "update"):
                self.computed[method] += sum(batch.num_tokens for batch in per_worker[0][0])
            return await call(method, per_worker)

        group.call = counted

    async def take(self, cfg, batches, tmp_path, version=1):
        """(metrics, weights and moments, computed tokens by method) of a step for each batch"""
        worker = self.group.worker
        with torch.no_grad():
            for name, parameter in worker.parameters.items():
                parameter.copy_(self.start[name])
        worker.optimizer.state.clear()
        worker.step = 0
        self.computed.clear()
        self.group.tokens_per_microbatch = cfg.train.tokens_per_microbatch
        self.group.share_prompts = cfg.train.share_prompts
        metrics = []
        with Tracker(None, "test", len(batches), []) as tracker:
            run = TrainingRun(cfg, RunDir(tmp_path, resumed=False), SOURCE, tracker, StopSignal(), len(batches))
            learner = Learner(run, self.group, None, None, None, kl_in_reward(cfg.algo))
            for groups, step in zip(batches, run.steps(), strict=False):
                metrics.append((await learner.learn(groups, version=None if version is None else step))[1])
        found = {name: p.detach().clone() for name, p in worker.parameters.items()}
        for name, parameter in worker.parameters.items():
            for key, value in worker.optimizer.state[parameter].items():
                found[f"{name}.{key}"] = value.detach().clone()
        return metrics, found, dict(self.computed)


@pytest.fixture(scope="module")
def steps():
    train = config().train
    with local_trainer(WorkerSpec(SOURCE, "cpu", "float32", 3, 1.0, train, total_steps=8)) as group:
        yield Steps(group)


SKIP = "train.skip_zero_advantages=true"
OF_TOKENS = ("actor/entropy", "actor/ppo_kl", "actor/pg_clipfrac", "actor/pg_clipfrac_lower")


def assert_same_step(found, expected):
    """Weights and both moments, within what another order of float32 sums does."""
    assert set(found) == set(expected)
    for name, tensor in expected.items():
        torch.testing.assert_close(found[name], tensor, rtol=1e-4, atol=2e-6, msg=lambda text, n=name: f"{n}: {text}")


CASES = {
    "token-mean": (),
    "seq-mean-token-mean": ("algo.loss_agg=seq-mean-token-mean",),
    "seq-mean-token-sum": ("algo.loss_agg=seq-mean-token-sum",),
    "several updates": ("data.batch_size=6", "algo.updates_per_step=3", "algo.dual_clip=3.0"),
    "small micro-batches": ("train.tokens_per_microbatch=70",),
    "shared prompts": ("train.share_prompts=true", "algo.updates_per_step=2"),
    "a correction of tokens": ("algo.correction.weight=token", "algo.correction.lower=0.5"),
    "a correction of tokens, two updates": ("algo.correction.weight=token", "algo.updates_per_step=2"),
    "a correction of sequences": ("algo.correction.weight=sequence", "algo.correction.upper=4.0"),
    "sequences rejected": ("algo.correction.reject=geometric_mean", "algo.correction.reject_above=1.05"),
    "staleness": ("rollout.staleness=1",),
}


@pytest.mark.parametrize("sets", CASES.values(), ids=CASES)
async def test_the_step_is_the_same_and_the_other_episodes_are_not_computed(steps, tmp_path, sets):
    batches = [groups_of(seed=0), groups_of(seed=1, signal=(0, 1, 1, 0, 0, 1))]
    before, expected, all_tokens = await steps.take(config(*sets), batches, tmp_path)
    after, found, some = await steps.take(config(*sets, SKIP), batches, tmp_path)
    assert_same_step(found, expected)
    assert some.keys() == all_tokens.keys()
    for method, tokens in all_tokens.items():
        assert some[method] < 0.75 * tokens
    for metrics, plain in zip(after, before, strict=True):
        same = [n for n in plain if n.startswith(("actor/", "critic/", "reward/")) and n not in OF_TOKENS]
        assert {n: metrics[n] for n in same} == pytest.approx({n: plain[n] for n in same}, rel=1e-4, abs=1e-6)
        assert metrics["perf/total_num_tokens"] == plain["perf/total_num_tokens"]
        assert 0.2 < metrics["perf/skipped_tokens"] < 0.8
        assert "perf/skipped_tokens" not in plain
        assert metrics["perf/padding"] < 0.02


@pytest.mark.parametrize("algo", ["gspo", "gmpo", "cispo", "sapo", "gpg", "dapo", "dr_grpo", "rloo"])
async def test_every_loss_that_says_so_takes_the_same_step(steps, tmp_path, algo):
    sets = ["algo.updates_per_step=2", "rollout.filter_groups=false"]
    batches = [groups_of(), groups_of(seed=1)]
    _, expected, _ = await steps.take(config(*sets, algo=algo), batches, tmp_path)
    metrics, found, _ = await steps.take(config(*sets, SKIP, algo=algo), batches, tmp_path)
    assert_same_step(found, expected)
    assert all(m["perf/skipped_tokens"] > 0.2 for m in metrics)


async def test_a_replay_takes_the_same_step(steps, tmp_path):
    """Ratios to recorded log-probabilities of another policy."""
    batches = [groups_of()]
    sets = ("rollout.replay=unused",)
    _, expected, _ = await steps.take(config(*sets), batches, tmp_path, version=None)
    [metrics], found, _ = await steps.take(config(*sets, SKIP), batches, tmp_path, version=None)
    assert_same_step(found, expected)
    assert metrics["actor/pg_clipfrac"] > 0.0


@pytest.mark.parametrize("correction", [(), ("algo.correction.weight=token",)], ids=["plain", "corrected"])
async def test_updates_without_a_signal_count_all_the_same(steps, tmp_path, correction):
    """The moments decay and so do the weights, and the learning rate goes on: in an update of two, and in a step."""
    sets = ["algo.updates_per_step=2", "train.optim.schedule=linear", *correction]
    batches = [groups_of((1, 1, 1, 0, 0, 0)), groups_of((0,) * 6, seed=1), groups_of(seed=2)]
    before, expected, _ = await steps.take(config(*sets), batches, tmp_path)
    after, found, _ = await steps.take(config(*sets, SKIP), batches, tmp_path)
    assert_same_step(found, expected)
    assert [m["actor/updates"] for m in after] == [2.0] * 3
    assert [m["actor/lr"] for m in after] == [m["actor/lr"] for m in before]
    empty = after[1]
    assert (empty["perf/skipped_tokens"], empty["perf/throughput"], empty["actor/grad_norm"]) == (1.0, 0.0, 0.0)
    assert empty["actor/pg_loss"] == 0.0
    assert not {n for n in empty if n in OF_TOKENS or n.startswith(("rollout_gap/", "correction/"))}
    assert all(OF_TOKENS[0] in m for m in (after[0], after[2]))


async def test_metrics_of_tokens_are_those_of_a_step_of_the_computed_episodes_alone(steps, tmp_path):
    """Means over their own tokens, not shares of the whole batch's."""
    alone = [group for group, signal in zip(groups_of(), MIXED, strict=True) if signal]
    off_policy = ("rollout.replay=unused",)
    [expected], _, _ = await steps.take(config(*off_policy), [alone], tmp_path, version=None)
    [metrics], _, _ = await steps.take(config(*off_policy, SKIP), [groups_of()], tmp_path, version=None)
    names = [n for n in expected if n in OF_TOKENS or n.startswith("rollout_gap/")]
    assert {"actor/entropy", "actor/ppo_kl", "actor/pg_clipfrac", "rollout_gap/mean_abs"} <= set(names)
    assert {n: metrics[n] for n in names} == pytest.approx({n: expected[n] for n in names}, rel=1e-4, abs=1e-7)


async def test_a_batch_that_is_computed_whole_has_the_same_metrics(steps, tmp_path):
    batches = [groups_of((1,) * 6)]
    [plain], expected, _ = await steps.take(config(), batches, tmp_path)
    [metrics], found, _ = await steps.take(config(SKIP), batches, tmp_path)
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())
    assert metrics["perf/skipped_tokens"] == 0.0
    assert {n: metrics[n] for n in OF_TOKENS} == pytest.approx({n: plain[n] for n in OF_TOKENS}, rel=1e-6)


async def test_advantages_that_read_the_policy_are_computed_first(steps, tmp_path):
    """A KL in the reward: the policy's log-probabilities of all episodes, for which they are computed once."""

    class Frozen:
        async def logprobs(self, batch):
            return torch.where(batch.loss_mask, -6.9, 0.0)

    cfg = config("algo.kl_coef=0.1", "algo.kl_in=reward", SKIP)
    assert cfg.skips_zero_advantages
    steps.computed.clear()
    with Tracker(None, "test", 1, []) as tracker:
        run = TrainingRun(cfg, RunDir(tmp_path, resumed=False), SOURCE, tracker, StopSignal(), 1)
        learner = Learner(run, steps.group, None, Frozen(), None, kl_in_reward(cfg.algo))
        kept, metrics = await learner.learn(groups_of(), version=1)
    total = sum(len(t.tokens) for t in kept)
    assert steps.computed == {"logprobs": total, "update": total}  # a KL of its own for every episode
    assert metrics["perf/skipped_tokens"] == 0.0


# ---------------------------------------------------------------------- where it applies


@pytest.mark.parametrize(
    ("sets", "why"),
    [
        (("algo.kl_coef=0.1",), "algo.kl_coef"),
        (("algo.entropy_coef=-0.1",), "algo.entropy_coef"),
        (("train.router_aux_loss_coef=0.01",), "train.router_aux_loss_coef"),
        (("algo.policy_loss=kl_cov",), "algo.policy_loss = 'kl_cov'"),
        (("algo.policy_loss=clip_cov",), "algo.policy_loss = 'clip_cov'"),
        (("algo.advantage=gae",), "algo.advantage = 'gae'"),
    ],
)
async def test_it_does_nothing_where_every_episode_has_a_part(sets, why):
    cfg = config(*sets, SKIP)
    assert cfg.trained_without_advantage == [why]
    assert not cfg.skips_zero_advantages
    assert config(SKIP).skips_zero_advantages
    assert not config().skips_zero_advantages
    notes = []

    class Cluster:
        async def trainer(self, role, source, **_):
            return role

    cfg = config(*sets, SKIP, "algo.kl_coef=0.0") if why != "algo.kl_coef" else cfg
    run = SimpleNamespace(cfg=cfg, source=SOURCE, total_steps=1, describe=lambda actor: None)
    run.tracker = SimpleNamespace(note=notes.append)
    await Learner.open(Cluster(), run)
    assert notes == [f"train.skip_zero_advantages does nothing: with {why} every episode has a part"]


def test_a_loss_of_a_plugin_says_it_of_itself():
    from posttrain.algos.catalog import PolicyLoss

    assert not PolicyLoss("mine", lambda logprobs, tokens: (logprobs, {})).nothing_without_advantage
    declared = {name for name in POLICY_LOSSES.names() if POLICY_LOSSES.get(name).nothing_without_advantage}
    assert {"clipped", "gspo", "gmpo", "cispo", "sapo", "gpg"} <= declared
    assert not {"kl_cov", "clip_cov"} & declared


# ---------------------------------------------------------------------- the arithmetic


def test_loss_is_taken_from_whole_episodes_and_weights_stay():
    kept = [recorded.trajectory(index, length=5 + index) for index in range(4)]  # 2, 3, 4, 5 tokens of the policy
    batch = pack(kept)
    batch.advantages = torch.zeros(batch.num_tokens)
    batch.advantages[int(batch.cu_seqlens[1]) + 4] = 0.5  # one token of the second episode
    batch.advantages[int(batch.cu_seqlens[2])] = 7.0  # a token of the third that is not the policy's
    assert weigh(batch, [[t] for t in kept], config("algo.updates_per_step=2")) == [[0, 1], [2, 3]]
    weights = batch.loss_weights.clone()
    metrics = leave_out(batch)
    assert batch.carrying == [1]
    assert torch.equal(batch.loss_weights, weights)
    assert metrics == {"perf/skipped_tokens": pytest.approx(1 - 6 / 26)}


def test_means_over_tokens_are_of_the_updates_that_computed_some():
    """Loss weights add up to 0.5 in the first of three updates, to 0 in the second, and to 2 in the third."""
    results = [
        {"weight": 0.5, "pg_loss": 0.3, "entropy": 0.5, "kl_loss": 0.2, "actor/mine": 0.1, "moe/aux_loss": 2.0},
        {"weight": 0.0, "pg_loss": 0.0, "entropy": 0.0, "kl_loss": 0.0, "actor/mine": 0.0, "moe/aux_loss": math.nan},
        {"weight": 2.0, "pg_loss": 0.6, "entropy": 6.0, "kl_loss": 0.4, "actor/mine": 0.8, "moe/aux_loss": 4.0},
    ]
    results[0] |= {"gap/tokens": 4.0, "gap/abs": 1.0}
    results[2] |= {"gap/tokens": 4.0, "gap/abs": 3.0}
    metrics = update_metrics(results)
    assert metrics["actor/pg_loss"] == pytest.approx(0.3)
    assert metrics["actor/entropy"] == pytest.approx((1.0 + 3.0) / 2)
    assert metrics["actor/kl_loss"] == pytest.approx((0.4 + 0.2) / 2)
    assert metrics["actor/mine"] == pytest.approx((0.2 + 0.4) / 2)
    assert metrics["moe/aux_loss"] == 3.0
    assert metrics["rollout_gap/mean_abs"] == 0.5
    assert update_metrics(results[1:2]) == {"actor/pg_loss": 0.0}

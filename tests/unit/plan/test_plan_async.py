"""The step of a run that samples while it trains."""

import asyncio
import itertools
import json
import math
import random
from dataclasses import replace
from statistics import mean, median

import pytest

from posttrain.core.types import Sample
from posttrain.data.loader import BatchOrder
from posttrain.plan.batch import assumed_lengths
from posttrain.plan.calibration import HOST_TURN_S
from posttrain.plan.command import compared
from posttrain.plan.compare import compare, computed_of, lengths_of, waits_of
from posttrain.plan.estimate import Plan
from posttrain.plan.pacing import WARM_UP, Waits, paced
from posttrain.plan.speed import Seconds
from posttrain.plan.table import as_data, render
from posttrain.rollout.batches import TrainingBatches
from posttrain.rollout.interaction import Interaction, UserTurn
from posttrain.rollout.pool import SamplerPool
from posttrain.rollout.source import TrajectorySource
from tests.helpers.scripted import EOS, environment, gsm8k_prompt
from tests.helpers.virtual_time import Rewards, VirtualTime
from tests.unit.plan.test_plan import config, question

SIZE, N, STEPS = 8, 4, 100


def plan_of(k, placement="separate", **rollout):
    cfg = config("rl", rollout={"engine": "vllm", "staleness": k, **rollout}, cluster={"placement": placement})
    return Plan(question(cfg, gpus=2))


# ---------------------------------------------------------------------- beside the batches of a run


class Engine:
    def __init__(self, seconds):
        self.seconds = seconds

    async def generate(self, prompt_ids, params, images=()):
        await asyncio.sleep(self.seconds)
        return Sample([41, EOS], [-1.0, -1.0], "stop", 0)


class Late(Interaction):
    """Answers after a log-normal time, and says nothing."""

    def __init__(self, median, sigma):
        self.median, self.sigma, self.random, self.waits = median, sigma, random.Random(1), []

    async def create(self, prompt):
        return None

    async def respond(self, state, messages):
        self.waits.append(self.median * math.exp(self.sigma * self.random.gauss(0, 1)))
        await asyncio.sleep(self.waits[-1])
        return UserTurn(None)


def played(k, window, busy, sampling, late, *, pacing=True):
    """The mean seconds of a step of ``TrainingBatches``, and how long its groups waited."""

    async def main():
        cfg = {"staleness": k, "window": window, "max_turns": 3, "max_response_tokens": 60, "pacing": pacing}
        env = replace(environment(**cfg, tool_deadline_s=1e6, episode_deadline_s=1e6), interaction=late)
        pool = SamplerPool([Engine(sampling)], None, restarts=0)
        prompts = [gsm8k_prompt(f"row {i}?", index=i) for i in range(64)]
        source = TrajectorySource(pool, env, Rewards())
        batches = TrainingBatches(source, prompts, BatchOrder(64, SIZE, 0, True), n=N)
        loop, begun = asyncio.get_running_loop(), []
        for step in range(STEPS):
            begun.append(loop.time())
            await batches.next(STEPS - 1 - step)
            await asyncio.sleep(busy)
        await batches.close()
        await pool.close()
        return [later - sooner for sooner, later in itertools.pairwise(begun[10:-9])]

    with asyncio.Runner(loop_factory=VirtualTime) as runner:
        seconds = runner.run(main())
    groups = [max(late.waits[i : i + N]) for i in range(0, len(late.waits) - N + 1, N)]
    of_steps = [groups[i : i + SIZE] for i in range(0, len(groups) - SIZE + 1, SIZE)]
    return mean(seconds), Waits(median(map(median, of_steps)), median(map(max, of_steps)), SIZE)


@pytest.mark.parametrize(("wait", "sigma"), [(0.0, 0.0), (0.2, 1.2), (1.0, 0.5)])
@pytest.mark.parametrize(("k", "window"), [(1, 0.0), (1, 0.25), (2, 0.25), (4, 0.25)])
def test_what_trainers_wait_for_is_what_the_batches_of_a_run_make_them_wait_for(k, window, wait, sigma):
    busy, sampling = 1.1, 0.8
    measured, waits = played(k, window, busy, sampling, Late(wait, sigma))
    found = paced(k, math.floor(window * SIZE), SIZE, busy, sampling, waits)
    assert busy + found.waiting == pytest.approx(measured, rel=0.1)


def test_without_pacing_trainers_wait_less_where_waits_have_a_long_tail():
    busy, sampling, steps = 1.1, 0.8, []
    for pacing in (True, False):
        measured, waits = played(4, 0.25, busy, sampling, Late(0.05, 1.2), pacing=pacing)
        found = paced(4, 2, SIZE, busy, sampling, waits, pacing=pacing)
        assert busy + found.waiting == pytest.approx(measured, rel=0.1)
        steps.append(measured)
    with_pacing, without = steps
    assert without < 1.02 * busy < 1.08 * busy < with_pacing
    assert WARM_UP < STEPS


def test_a_window_makes_trainers_wait_where_groups_are_sampled_one_step_ahead():
    no_waits = Waits()
    assert paced(1, 0, 64, 2.0, 1.5, no_waits).waiting == 0.0
    assert paced(1, 16, 64, 2.0, 1.5, no_waits).waiting == pytest.approx(1.5)
    assert paced(2, 16, 64, 2.0, 1.5, no_waits).waiting == 0.0
    overtaking = [config("rl", rollout={"staleness": k}).rollout.overtaking for k in (1, 2, 4)]
    assert overtaking == [0.0, 0.25, 0.25]


# ---------------------------------------------------------------------- the step of a plan


@pytest.mark.parametrize("placement", ["colocated", "separate"])
def test_sampling_takes_no_time_of_a_step_where_it_is_ahead(placement):
    turns, found = plan_of(0, placement), plan_of(1, placement)
    assert turns.step_seconds == pytest.approx(sum(phase.total for phase in turns.phases.values()))
    assert (turns.overlap, turns.late, turns.waiting) == (0.0, 0.0, {})
    busy = sum(phase.total for name, phase in found.phases.items() if name != "gen")
    assert found.overlap == found.phases["gen"].total
    assert found.step_seconds == pytest.approx(busy + found.late)
    assert busy <= found.step_seconds <= busy + found.overlap
    told = as_data(found, [])
    assert (told["overlap_seconds"], told["late_seconds"]) == (found.overlap, found.late)
    assert told["waiting"]["wait/updates"] == pytest.approx(found.phases["sync"].total / found.step_seconds)
    assert "sampling while training" in render(found, [])
    assert "sampling while training" not in render(turns, [])


@pytest.mark.parametrize(("kind", "late"), [("compute", 3.0), ("host", 0.0)])
def test_on_one_gpu_only_what_the_gpu_itself_does_adds_up(kind, late):
    found = plan_of(2, "colocated")
    seconds = {"gen": Seconds(**{kind: 3.0}), "update_actor": Seconds(compute=4.0), "sync": Seconds(fixed=0.5)}
    vars(found)["phases"] = seconds
    vars(found)["_pace"] = paced(2, 2, 8, 4.5, 3.0, Waits())
    assert found.late == pytest.approx(late)
    assert found.step_seconds == pytest.approx(4.5 + late)


def test_an_engine_stands_still_while_the_kernels_of_a_trainer_run_on_its_gpu():
    def waiting(placement, **update):
        found = plan_of(2, placement)
        seconds = {"update_actor": Seconds(**update), "sync": Seconds(fixed=0.5), "gen": Seconds(host=5.0)}
        vars(found)["phases"] = seconds
        vars(found)["_generation"] = lambda groups=None: Seconds(host=5.0)
        return found._pace.waiting

    alone = waiting("separate", compute=2.0)
    assert waiting("separate", host=2.0) == waiting("colocated", host=2.0) == alone
    assert waiting("colocated", compute=2.0) > alone + 0.5
    assert waiting("colocated", compute=2.0) < alone + 2.0 + 1e-9


def test_a_further_turn_of_an_episode_takes_the_engine_time():
    cfg = config("rl", rollout={"engine": "sglang", "max_turns": 4, "tools": ["calculator"]})
    asked = question(cfg)
    one, four = (
        Plan(replace(asked, lengths=replace(asked.lengths, turns=turns))).phases["gen"].host for turns in (1.0, 4.0)
    )
    episodes = cfg.data.batch_size * cfg.rollout.n
    assert four - one == pytest.approx(episodes * 3 * HOST_TURN_S["sglang"])
    assert assumed_lengths(cfg).turns == 4.0
    rows = [{"perf/total_num_tokens": 1000.0, "num_turns/mean": 2.5}]
    assert lengths_of(cfg, rows).turns == 2.5


def test_waits_for_tools_are_part_of_sampling_in_turns_and_make_trainers_wait_otherwise():
    waits = Waits(60.0, 90.0, 8)
    for k in (0, 1):
        cfg = config("rl", rollout={"engine": "vllm", "staleness": k}, cluster={"placement": "separate"})
        without, found = (Plan(replace(question(cfg, gpus=2), waits=w)) for w in (Waits(), waits))
        assert found.phases["gen"].total - without.phases["gen"].total == pytest.approx(0.0 if k else 90.0)
        assert found.step_seconds > without.step_seconds + 15.0
    assert found.waiting["wait/trainers"] > without.waiting["wait/trainers"]


def test_what_trainers_wait_for_is_not_compared_with_the_time_of_sampling():
    measured = {"timing_s/gen": 0.1, "timing_s/update_actor": 2.0, "timing_s/step": 3.0}
    measured |= {"wait/trainers": 0.2, "wait/updates": 0.1}
    for k, names in (
        (0, ["timing_s/gen", "timing_s/update_actor"]),
        (1, ["timing_s/update_actor", "timing_s/step", "wait/trainers", "wait/updates"]),
    ):
        assert [pair.name for pair in compare(plan_of(k), [measured])] == names
    nothing = measured | {"perf/skipped_tokens": 1.0, "perf/memory_gib": 2.0}  # no episode to learn from
    assert [pair.name for pair in compare(plan_of(0), [nothing])] == ["timing_s/gen"]
    rows = [
        {"tools/seconds_per_group/median": 2.0, "tools/seconds_per_group/max": seconds} for seconds in (7.0, 8.0, 9.0)
    ]
    assert waits_of(config("rl", data={"batch_size": 4}), rows) == Waits(2.0, 9.0, 4)


def test_a_run_that_left_episodes_out_is_compared_with_the_time_of_the_others():
    """Updates and the pass before them; a pass that advantages read is over all episodes."""
    rows = [{"perf/skipped_tokens": share} for share in (0.9, 0.9, 0.5, 0.6, 0.4)]
    assert computed_of(rows) == pytest.approx(0.5)
    assert computed_of([{}]) == 1.0
    sets = {"updates_per_step": 2}
    cfg = config("rl", rollout={"engine": "vllm"}, algo=sets)
    whole, half = (Plan(replace(question(cfg, gpus=1), computed=share)) for share in (1.0, 0.5))
    for name in ("update_actor", "old_log_prob"):
        assert 0.4 < half.phases[name].compute / whole.phases[name].compute < 0.6
    assert half.phases["gen"] == whole.phases["gen"]
    assert half.batch.tokens == whole.batch.tokens
    assert half.mfu == pytest.approx(whole.mfu, rel=0.3)
    in_reward = config("rl", rollout={"engine": "vllm"}, algo=sets | {"kl_in": "reward", "kl_coef": 0.1})
    whole, half = (Plan(replace(question(in_reward, gpus=1), computed=share)) for share in (1.0, 0.5))
    assert half.phases["old_log_prob"] == whole.phases["old_log_prob"]


def test_plan_run_compares_with_the_share_that_a_run_computed(tmp_path):
    cfg = config("rl", rollout={"engine": "vllm"}, train={"skip_zero_advantages": True})
    asked = question(cfg, gpus=1)
    row = {"step": 1, "perf/total_num_tokens": 400_000.0, "timing_s/update_actor": 9.0}

    def predicted(**more):
        (tmp_path / "metrics.jsonl").write_text(json.dumps(row | more))
        pairs = {pair.name: pair.predicted for pair in compared(asked, tmp_path)}
        assert pairs["perf/total_num_tokens"] == pytest.approx(400_000, rel=0.01)
        return pairs["timing_s/update_actor"]

    assert 0.2 < predicted(**{"perf/skipped_tokens": 0.75}) / predicted() < 0.35

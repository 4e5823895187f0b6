"""Schedules that are recorded and repeated: the same batches, whatever takes how long in the run that repeats them."""

import asyncio
import dataclasses
import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from posttrain.core.errors import ConfigError, DataError, DeadlineError, RunError
from posttrain.core.types import Sample
from posttrain.rollout.files import RolloutFiles, write_rollouts
from posttrain.rollout.schedule import FILE, Schedule, ScheduleLog, header, prompts_digest
from posttrain.rollout.schedule_replay import Recorded, Replay
from posttrain.rollout.seeds import seed_of
from posttrain.runs.resume import REPEATS
from tests.helpers.scripted import EOS, gsm8k_prompt
from tests.unit.rollout.test_async_batches import AS_CHECKPOINT, DELAYS, STEPS, Engine, World, staleness, turns

HEADER = {"schedule": 1, "prompts": "of these", "config": {"rollout.staleness": 1, "train.optim.lr": 0.1}}


class Seeded(Engine):
    """Samples by seed, place and version alone."""

    async def generate(self, prompt_ids, params, images=()):
        await self.open.wait()
        version, update, ids = self.version, self.update, []
        while len(ids) < params.max_new_tokens:
            await turns(self.world.delay())
            if self.update != update:
                return Sample(ids, [-1.0] * len(ids), "abort", version)
            drawn = seed_of(params.seed, len(prompt_ids) + len(ids), version) % 8
            ids.append(EOS if drawn == 0 else 40 + drawn)
            if drawn == 0:
                return Sample(ids, [-1.0] * len(ids), "stop", version)
        return Sample(ids, [-1.0] * len(ids), "length", version)


def told(groups):
    """What training sees of groups."""
    return [(t.prompt.index, t.tokens.tolist(), t.weight_version.tolist(), t.reward) for group in groups for t in group]


def play(folder, delays, cfg, schedules, *, stop_after=None):
    """What each step of a run trains, and what is counted of it. With ``stop_after`` the run is left in the next step,
    and goes on from the checkpoint that it made after this one. ``schedules()`` makes the schedule of each attempt."""
    world = World(delays, cfg, engine=Seeded)
    found, saved = [], {"step": 0, "state": None, "file": None}

    async def attempt(last):
        world.version, world.asked = saved["step"], world.asked + 7
        schedule = world.schedule = schedules()
        batches = world.open()
        state = json.loads(saved["state"]) if saved["state"] else None
        batches.resume(state, RolloutFiles(saved["file"], tokenizer="t").read(0) if saved["file"] else [])
        schedule.updated(saved["step"])
        for step in range(saved["step"] + 1, STEPS + 1):
            groups = await world.step(batches, step)
            found.append((told(groups), dataclasses.asdict(world.source.stats)))
            if step == last:
                played = batches.in_flight()
                file = str(folder / "in_flight.parquet") if played else None
                if played:
                    write_rollouts(folder / "in_flight.parquet", played, **AS_CHECKPOINT)
                saved.update(step=step, state=json.dumps(batches.state()), file=file)
            await schedule.before_update(step)
            await world.publish(step)
            schedule.updated(step)
            if step == last:
                await turns(world.delay())
                break
        await batches.close()

    if stop_after:
        asyncio.run(attempt(stop_after))
    asyncio.run(attempt(None))
    assert max(world.ages) <= cfg["staleness"]
    return found


def recorded_by(folder, delays, cfg, **more):
    return play(folder, delays, cfg, lambda: ScheduleLog(folder / FILE, HEADER, 3), **more), Recorded.read(folder)


def replay_of(folder, recorded, seed=3, kind=Replay):
    return lambda: kind(recorded, seed, ScheduleLog(folder / "again.jsonl", HEADER, seed), 60.0)


@settings(max_examples=30, deadline=None)
@given(delays=DELAYS, others=DELAYS, k=st.sampled_from([0, 1, 2]), kind=st.sampled_from(["", "user", "filter"]))
def test_a_schedule_is_repeated_whatever_takes_how_long(tmp_path_factory, delays, others, k, kind):
    folder = tmp_path_factory.mktemp("recorded")
    cfg = staleness(k) | {"user": {"max_user_turns": 2}, "filter": {"filter_groups": True}}.get(kind, {})
    cfg |= {"filter_metric": "reward"} if kind == "filter" else {}
    wanted, recorded = recorded_by(folder, delays, cfg)
    assert recorded.steps == STEPS
    assert play(folder, others, cfg, replay_of(folder, recorded)) == wanted
    (folder / "again.jsonl").rename(folder / FILE)
    turns_of = [[e for e in run.events if "ended" in e or "trained" in e] for run in (recorded, Recorded.read(folder))]
    assert turns_of[0] == turns_of[1]


@settings(max_examples=15, deadline=None)
@given(delays=DELAYS, others=DELAYS, k=st.sampled_from([1, 2]), after=st.integers(1, 4))
def test_a_run_that_was_resumed_is_repeated_and_a_replay_is_not_resumed(tmp_path_factory, delays, others, k, after):
    folder = tmp_path_factory.mktemp("resumed")
    wanted, recorded = recorded_by(folder, delays, staleness(k), stop_after=after)
    found = play(folder, others, staleness(k), replay_of(folder, recorded))
    assert [batch for batch, _ in found] == [batch for batch, _ in wanted]
    with pytest.raises(ConfigError, match="a replay begins at the first step"):
        play(folder, others, staleness(k), replay_of(folder, recorded), stop_after=after)


def test_what_differs_from_the_recorded_run_is_named(tmp_path):
    _, recorded = recorded_by(tmp_path, [3] * 4, staleness(1))
    lines = (tmp_path / FILE).read_text().splitlines()
    number, event = next((i, e) for i, e in enumerate(map(json.loads, lines)) if "ended" in e)
    event["episodes"][1]["reward"] = 17.0
    lines[number] = json.dumps(event)
    (tmp_path / FILE).write_text("\n".join(lines) + "\n")
    changed = Recorded.read(tmp_path)
    with pytest.raises(RunError, match=r"row \d, episode 1: other reward than recorded: .* instead of 17.0") as error:
        play(tmp_path, [3] * 4, staleness(1), replay_of(tmp_path, changed))
    assert "grader" in error.value.hint
    with pytest.raises(
        RunError, match=r"draw \d, episode \d: \d+ tokens of version 0 instead of"
    ):  # another seed samples another text
        play(tmp_path, [3] * 4, staleness(1), replay_of(tmp_path, recorded, seed=4))


def waiting(number, *recorded):
    """A replay of these turns with a deadline of 0.05 s, and the end of a draw that waits for its own."""
    drawn = [{"drawn": n, "row": n + 5} for n in range(3)]
    replay = Replay(Recorded("first", HEADER, [*drawn, *recorded]), 3, Schedule(), 0.05)
    replay.resume(None)
    replay.updated(0)
    return replay, asyncio.create_task(replay.ended(number, []))


def end(number):
    return {"ended": number, "episodes": []}


def test_a_group_that_waits_for_its_turn_in_vain_says_whose_turn_it_is():
    async def wait():
        replay, other = waiting(1, end(0), end(1))
        with pytest.raises(DeadlineError) as error:
            await other
        with pytest.raises(DeadlineError):  # whatever else waits ends with the same error
            await replay.sampled_by(1)
        return error.value

    error = asyncio.run(wait())
    assert "draw 1 (row 6) has been played, and waited 0.05 s for its turn" in error.message
    assert "draw 0 (row 5) ended before it" in error.message
    assert "rollout.episode_deadline_s" in error.hint


def test_a_group_waits_for_trainers_and_the_loop_without_a_deadline():
    async def wait():
        replay, other = waiting(1, end(0), {"trained": [0], "step": 1}, end(2), end(1))
        await replay.ended(0, [])
        await asyncio.sleep(0.2)  # the turn is the loop's, which may validate
        assert not other.done()
        replay.trained([0])
        await asyncio.sleep(0.2)  # draw 2 may need the weights that trainers work on
        assert not other.done()
        replay.updated(1)
        await replay.ended(2, [])
        await other

    asyncio.run(wait())


def test_a_group_that_the_recorded_run_did_not_end_waits_for_the_end_of_the_run():
    async def wait():
        _, other = waiting(2, end(0), end(1))
        await asyncio.sleep(0.2)
        assert not other.done()
        other.cancel()

    asyncio.run(wait())


def test_a_replay_may_have_other_deadlines_than_the_recorded_run():
    recorded = Recorded("first", HEADER | {"config": {"rollout.episode_deadline_s": 600.0}}, [])
    recorded.check(HEADER | {"config": {"rollout.episode_deadline_s": 3600.0}}, REPEATS)


def test_a_replay_has_the_engines_of_the_recorded_run():
    recorded = Recorded("first", HEADER | {"config": {"rollout.replicas": 2}}, [])
    with pytest.raises(ConfigError, match=r"rollout\.replicas: 2 -> 1"):
        recorded.check(HEADER | {"config": {"rollout.replicas": 1}}, REPEATS)


def test_the_schedule_of_a_run_that_was_stopped_is_repeated_to_its_end(tmp_path):
    wanted, recorded = recorded_by(tmp_path, [3] * 4, staleness(1))
    place = next(i for i, event in enumerate(recorded.events) if event.get("step") == 3)
    half = dataclasses.replace(recorded, events=recorded.events[: place + 1])
    found = []

    class Kept(Replay):
        def trained(self, numbers):
            super().trained(numbers)
            found.append(list(numbers))

    with pytest.raises(RunError, match="ends here, before its last step"):
        play(tmp_path, [5] * 4, staleness(1), replay_of(tmp_path, half, kind=Kept))
    assert found == [event["trained"] for event in half.events if "trained" in event]
    assert len(found) == 3 < len(wanted)


def test_runs_without_a_schedule_or_with_a_damaged_one_are_refused(tmp_path):
    with pytest.raises(ConfigError, match="there is no run"):
        Recorded.read(tmp_path / "none")
    with pytest.raises(ConfigError, match=r"has no schedule\.jsonl") as error:
        Recorded.read(tmp_path)
    assert "rollout.record_schedule" in error.value.hint
    lacks = '{"ended": 1, "episodes": [{"versions": [[-1, 2]]}]}'
    damaged = [json.dumps(HEADER) + f"\n{event}\n" for event in ('{"ended": 1}', lacks, "7", "{")]
    for text in ("", "{}\n", "[]\n", '{"schedule": 2}\n', *damaged):
        (tmp_path / FILE).write_text(text)
        with pytest.raises(DataError, match=r"schedule\.jsonl: not a schedule"):
            Recorded.read(tmp_path)
    (tmp_path / FILE).write_text(json.dumps(HEADER) + '\n{"weights": 0}\n{"drawn": ')  # killed amid a line
    assert list(Recorded.read(tmp_path).events) == [{"weights": 0}]


def test_another_config_and_other_prompts_are_refused():
    prompts = [gsm8k_prompt("row 1?", index=1)]
    recorded = Recorded("r", header({"train.optim.lr": 0.1, "run.name": "r"}, prompts), [])
    recorded.check(header({"train.optim.lr": 0.1, "run.name": "other"}, prompts), frozenset({"run.name"}))
    with pytest.raises(ConfigError, match=r"another config:\n  train\.optim\.lr: 0\.1 -> 0\.2") as error:
        recorded.check(header({"train.optim.lr": 0.2, "run.name": "r"}, prompts), frozenset())
    assert "config.toml" in error.value.hint
    with pytest.raises(ConfigError, match="recorded with other prompts"):
        other = header({"train.optim.lr": 0.1, "run.name": "r"}, [gsm8k_prompt("row 2?", index=1)])
        recorded.check(other, frozenset())


def test_the_digest_of_prompts_is_that_of_all_they_hold():
    plain = gsm8k_prompt("row 1?", index=1)
    changes = [
        {"messages": [{"role": "user", "content": "row 2?"}]},
        {"data_source": "other"},
        {"ground_truth": "another"},
        {"extra_info": {"level": 3}},
        {"images": [{"path": "a.png"}]},
    ]
    prompts = [plain, *(dataclasses.replace(plain, **change) for change in changes)]
    assert len({prompts_digest([prompt]) for prompt in prompts}) == len(prompts)
    assert prompts_digest(prompts) != prompts_digest(prompts[::-1])
    of_objects = [dataclasses.replace(plain, extra_info={"made": made}) for made in (object(), object())]
    assert prompts_digest(of_objects[:1]) == prompts_digest(of_objects[1:])


def test_a_log_that_lacks_what_was_done_before_is_not_gone_on_with(tmp_path):
    log = ScheduleLog(tmp_path / FILE, HEADER, seed=0)
    with pytest.raises(ConfigError, match="lacks what the run did before"):
        log.resume(100)
    log.resume(None)
    log.drawn(0, 5)
    length = log.state()
    log.drawn(1, 6)
    log.resume(length)
    assert [json.loads(line) for line in (tmp_path / FILE).read_text().splitlines()] == [HEADER, {"drawn": 0, "row": 5}]

"""Environments in ordinary episodes: their messages, rewards, tools, failures, and how a config names them."""

import asyncio
import dataclasses
import importlib
from pathlib import Path

import pytest
from pydantic import ValidationError
from typer.testing import CliRunner

from posttrain.cli import app
from posttrain.config import Config, RewardConfig
from posttrain.core.errors import CodeError, ConfigError
from posttrain.data.chat import ChatDeltas
from posttrain.envs import Environment, Step
from posttrain.envs.opening import World, open_world
from posttrain.envs.play import SessionPlayer
from posttrain.rewards.compose import Rewarder, own_verdict
from posttrain.rewards.grade import GraderPool
from posttrain.rl.metrics import rollout_metrics
from posttrain.rollout.agents import AgentHost
from posttrain.rollout.episode import Episode
from posttrain.rollout.pool import SamplerPool
from posttrain.rollout.seeds import seed_of
from posttrain.rollout.source import TrajectorySource
from tests.helpers.scripted import EOS, TOKENIZER, ScriptedSampler, environment, gsm8k_prompt, run_episode, tokens

EXAMPLES = Path(__file__).parents[3] / "examples"


def playing(kind, **cfg):
    """What episodes share that play an environment of class ``kind``."""
    world = World("environment 'test'", kind, tuple(kind.tools))
    base = environment(**cfg)
    return dataclasses.replace(base, world=world, deltas=ChatDeltas(TOKENIZER, list(kind.tools) or None))


def user(text):
    return {"role": "user", "content": text}


class Echo(Environment):
    """Says what the model says, three times, and pays for each turn. Counts how often it was closed."""

    closed = 0

    async def reset(self, task, seed):
        self.turns, self.seed = 0, seed
        return [*task.messages, user(f"seed {seed}")]

    async def step(self, message):
        self.turns += 1
        return Step([user(message["content"] + "!")], reward=0.5, done=self.turns == 3)

    async def close(self):
        type(self).closed += 1


async def test_an_environment_answers_until_it_is_done_and_its_rewards_add_up():
    Echo.closed = 0
    env = playing(Echo, max_turns=5)
    sampler = ScriptedSampler("a", "b", "c")
    trajectory = await run_episode(gsm8k_prompt(), sampler, env)
    assert (trajectory.error, trajectory.stop_reason, trajectory.turns) == (None, "stop", 3)
    assert [m["content"] for m in trajectory.messages][2:] == ["a", "a!", "b", "b!", "c"]
    assert trajectory.reward_parts == {"env": 1.5}
    assert trajectory.turn_rewards.tolist() == [0.5, 0.5, 0.5]
    assert Echo.closed == 1
    # The prompt is what reset gave, and tokens are the prompt, samples and deltas.
    assert trajectory.prompt.messages == trajectory.messages[:2]
    expected = env.prompt_ids(trajectory.prompt)
    assert trajectory.prompt_length == len(expected)
    for text, reply in (("a", "a!"), ("b", "b!"), ("c", None)):
        expected += [*tokens(text), EOS]
        expected += env.deltas.ids([user(reply)]) if reply else []
    assert trajectory.tokens.tolist() == expected
    assert trajectory.loss_mask.sum() == sum(len(tokens(t)) + 1 for t in "abc")


async def test_episodes_that_begin_with_more_than_the_model_may_read_are_counted():
    class Long(Echo):
        async def reset(self, task, seed):
            await super().reset(task, seed)
            return [*task.messages, user("word " * (500 if task.index == 1 else 1))]

    source = TrajectorySource(SamplerPool([ScriptedSampler(*"aaa")]), playing(Long, max_turns=5, max_prompt_tokens=400))
    groups = await source.sample([gsm8k_prompt(index=i) for i in range(2)], 1)
    assert [t.stop_reason for (t,) in groups] == ["stop", "prompt_too_long"]
    assert rollout_metrics(groups, source)["rollout/prompts_too_long"] == 1


async def test_an_environment_may_change_its_task():
    class Adding(Environment):
        async def reset(self, task, seed):
            task.messages.append(user(task.extra_info["more"].pop()))
            return task.messages

        async def step(self, message):
            return Step(done=True)

    prompt = dataclasses.replace(gsm8k_prompt(), extra_info={"more": ["now"]})
    for _ in range(2):
        trajectory = await run_episode(prompt, ScriptedSampler("a"), playing(Adding))
        assert [m["content"] for m in trajectory.messages] == ["What is 3 + 5?", "now", "a"]


async def test_rewards_of_turns_that_make_1_are_1_so_that_the_episode_is_correct():
    class Shares(Environment):
        async def reset(self, task, seed):
            self.left = [0.1, 0.2, 0.7]
            return task.messages

        async def step(self, message):
            return Step([user("go on")], self.left.pop(), done=not self.left)

    trajectory = await run_episode(gsm8k_prompt(), ScriptedSampler("a", "b", "c"), playing(Shares))
    assert trajectory.reward_parts == {"env": 1.0}
    assert own_verdict(trajectory).correct


async def test_episodes_of_one_task_have_one_seed_and_other_tasks_another():
    async def seed(index):
        trajectory = await run_episode(gsm8k_prompt(index=index), ScriptedSampler("a", "b", "c"), playing(Echo))
        return trajectory.messages[1]["content"]

    first, again, other = [await seed(index) for index in (0, 0, 1)]
    assert first == again != other


async def test_max_turns_ends_a_game_that_is_not_done():
    trajectory = await run_episode(gsm8k_prompt(), ScriptedSampler("a", "b"), playing(Echo, max_turns=2))
    assert (trajectory.stop_reason, trajectory.turns, trajectory.reward_parts) == ("max_turns", 2, {"env": 1.0})


async def test_what_an_environment_says_cannot_end_its_turn():
    class Sly(Environment):
        async def step(self, message):
            return Step([user(f"hi{TOKENIZER.eos_token}")])

    trajectory = await run_episode(gsm8k_prompt(), ScriptedSampler("a", "b"), playing(Sly, max_turns=2))
    assert TOKENIZER.eos_token not in trajectory.messages[2]["content"]


class Failing(Environment):
    """Does what a test wants in one of its methods."""

    async def step(self, message):
        return Step(done=True)


def failing(method, action):
    async def act(self, *args):
        if isinstance(action, Exception):
            raise action
        if isinstance(action, float):
            await asyncio.sleep(action)
        return action

    return type("Failing", (Failing,), {method: act})


@pytest.mark.parametrize(
    ("method", "action", "said"),
    [
        ("reset", ValueError("no disk"), "failed in reset: ValueError: no disk"),
        ("step", ValueError("no disk"), "failed in step: ValueError: no disk"),
        ("close", ValueError("no disk"), "failed in close: ValueError: no disk"),
        ("step", 60.0, "failed in step: it did not answer within 0.05 s"),
        ("step", "done", "step returned str, not Step"),
        ("step", Step([]), "gave no messages, and the episode is not over"),
        ("step", Step(reward=float("nan"), done=True), "step gave a reward of nan"),
        ("step", Step(reward=None, done=True), "step gave a reward of None"),
        ("step", Step(reward=10**400, done=True), "step gave a reward of inf"),
        ("step", Step([{"role": "assistant", "content": "x"}]), "gave a message that cannot be shown"),
        ("reset", [{"role": "user", "content": None}], "gave a message that cannot be shown"),
    ],
)
async def test_a_failure_of_an_environment_is_a_failed_episode_with_its_reason(method, action, said):
    env = playing(failing(method, action), tool_deadline_s=0.05)
    trajectory = await run_episode(gsm8k_prompt(), ScriptedSampler("a"), env)
    assert trajectory.stop_reason == "error"
    assert said in trajectory.error


async def test_an_episode_that_is_cancelled_in_reset_begins_anew_and_one_that_samples_goes_on():
    Echo.closed = 0
    episode = Episode(gsm8k_prompt(), playing(failing("reset", 60.0)))
    task = asyncio.create_task(episode.play(ScriptedSampler("a")))
    while episode.state == "pending":
        await asyncio.sleep(0)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    assert not episode.resumable
    await episode.release()

    episode = Episode(gsm8k_prompt(), playing(Echo))
    task = asyncio.create_task(episode.play(ScriptedSampler("a", 60.0)))
    while episode.turns == 0 or episode.state != "running":
        await asyncio.sleep(0)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    assert episode.resumable
    assert Echo.closed == 0
    trajectory = await episode.play(ScriptedSampler("b", "c"))
    assert (trajectory.error, trajectory.turns, trajectory.reward_parts) == (None, 3, {"env": 1.5})


async def test_the_reward_of_an_environment_is_the_verdict_in_place_of_a_graders():
    cfg = RewardConfig()
    rewarder = Rewarder(cfg, GraderPool(cfg), 400)
    env = playing(Echo)
    source = TrajectorySource(SamplerPool([ScriptedSampler("a", "b", "c")]), env, rewarder)
    [[trajectory]] = await source.sample([gsm8k_prompt(source="nobody/knows-it")], 1)
    assert (trajectory.error, trajectory.reward, trajectory.correct) == (None, 1.5, True)


@pytest.mark.parametrize(
    ("tasks", "said"),
    [
        ([{"prompt": "q"}], "its task 0 is dict, not Prompt"),
        ([gsm8k_prompt(index="a")], "its task 0 has the index 'a'"),
        ([gsm8k_prompt(index=2**31)], "its task 0 has the index 2147483648"),
        ([gsm8k_prompt(source=None)], "its task 0 has the data source None"),
        ([gsm8k_prompt(index=1), gsm8k_prompt(index=7), gsm8k_prompt(index=7)], "its tasks 1 and 2 have the index 7"),
    ],
)
def test_tasks_that_are_none_are_refused_before_a_run(tasks, said):
    class Mine(Environment):
        def tasks(self, split):
            return tasks

    async def agent(task):
        pass

    agent.tasks = Mine().tasks
    for brings in (World("environment 'mine'", Mine, ()), AgentHost(agent, SessionPlayer(agent, None, None))):
        with pytest.raises(CodeError, match=rf"{said} \(.*test_environments.py, line"):
            brings.tasks("train")


# ---------------------------------------------------------------------- the examples


def example(name, **options):
    return open_world(f"{EXAMPLES / name}", options)


async def test_the_text_game_gives_hints_and_pays_for_the_number():
    world = example("guess.py:Guess", guesses=3)
    env = dataclasses.replace(environment(max_turns=4), world=world)
    task = world.tasks("train")[3]
    module = importlib.import_module(type(world.make()).__module__)
    probe = module.Guess()
    await probe.reset(task, seed_of(task.index))
    hidden = probe.hidden
    low, high = str(max(1, hidden - 1)), str(hidden + 1)
    trajectory = await run_episode(task, ScriptedSampler("eh", high, f"then {hidden}"), env)
    assert [m["content"] for m in trajectory.messages if m["role"] == "user"][1:] == ["Say a number.", "No, lower."]
    assert (trajectory.reward_parts, trajectory.turns) == ({"env": 1.0}, 3)
    lost = await run_episode(task, ScriptedSampler(high, high, high), env)
    assert (lost.reward_parts, lost.turns, lost.stop_reason) == ({"env": 0.0}, 3, "stop")
    assert low != high


def shell(command):
    return f'<tool_call>\n{{"name": "shell", "arguments": {{"command": "{command}"}}}}\n</tool_call>'


async def test_the_terminal_task_runs_commands_and_checks_the_files():
    world = example("terminal.py:Terminal")
    env = dataclasses.replace(
        environment(max_turns=4, max_response_tokens=2000),
        world=world,
        deltas=ChatDeltas(TOKENIZER, list(world.tools)),
    )
    task = world.tasks("train")[0]
    right = await run_episode(
        task, ScriptedSampler(shell("wc -l poem.txt"), shell("grep -c . poem.txt > lines.txt"), "done"), env
    )
    assert right.error is None
    assert [m["content"] for m in right.messages if m["role"] == "tool"] == ["3 poem.txt", "(no output)"]
    assert (right.reward_parts, right.tool_calls, right.turns) == ({"env": 1.0}, 2, 3)
    wrong = await run_episode(task, ScriptedSampler("done"), env)
    assert (wrong.error, wrong.reward_parts) == (None, {"env": 0.0})


@pytest.mark.parametrize("file", ["guess.py", "terminal.py"])
def test_examples_are_short(file):
    assert len((EXAMPLES / file).read_text().splitlines()) <= 80


# ---------------------------------------------------------------------- names and config


def test_unknown_environments_and_options_are_refused_with_a_hint(tmp_path):
    guess = str(EXAMPLES / "guess.py")
    with pytest.raises(ConfigError, match="unknown environment 'gues'"):
        open_world("gues", {})
    with pytest.raises(ConfigError, match="has no 'Gues'") as error:
        open_world(f"{guess}:Gues", {})
    assert "Guess" in error.value.hint
    with pytest.raises(ConfigError, match="unknown option 'hihgest'") as error:
        open_world(f"{guess}:Guess", {"hihgest": 5})
    assert "highest" in error.value.hint
    broken = tmp_path / "broken.py"
    broken.write_text("class Half:\n    tools = ()\n\nclass Dead:\n    def __init__(self):\n        1 / 0\n")
    with pytest.raises(CodeError, match=r"Half is no environment, it has no 'tasks' \(.*broken.py"):
        open_world(f"{broken}:Half", {})
    with pytest.raises(CodeError, match=r"cannot be made: ZeroDivisionError.*broken.py, line 6"):
        open_world(f"{broken}:Dead", {})
    for number, tools in enumerate(("[{'name': 'f'}]", "[{'function': {}}]", "'f'")):
        unshown = tmp_path / f"unshown{number}.py"
        unshown.write_text(f"from posttrain.envs import Environment as E\n\nclass Unshown(E):\n    tools = {tools}\n")
        with pytest.raises(CodeError, match=r"its tools are no list of OpenAI function schemas \(.*unshown"):
            open_world(f"{unshown}:Unshown", {})
    bare = tmp_path / "bare.py"
    bare.write_text(unshown.read_text().replace("'f'", "[{'type': 'function', 'function': {'name': 'f'}}]"))
    (tool,) = open_world(f"{bare}:Unshown", {}).tools
    assert tool["function"] == {"name": "f", "parameters": {"type": "object", "properties": {}}}
    hinted = tmp_path / "hinted.py"
    hinted.write_text("class Hinted:\n    def __init__(self, board: 'Unknown' = None):\n        pass\n")
    with pytest.raises(CodeError, match=r"cannot be made: NameError: name 'Unknown' is not defined \(.*hinted.py"):
        open_world(f"{hinted}:Hinted", {})


@pytest.mark.parametrize(
    ("command", "rollout", "said"),
    [
        ("rl", {"env": "guess", "tools": ["calculator"]}, "brings its own tools"),
        ("rl", {"env_options": {"a": 1}}, "no effect without rollout.env"),
        ("rl", {"env": "guess", "replay": "x"}, "no effect with rollout.replay"),
        ("sft", {"env": "guess"}, "sft plays none"),
    ],
)
def test_settings_of_environments_without_effect_are_refused(command, rollout, said):
    with pytest.raises(ValidationError, match=said):
        Config(command=command, rollout=rollout)


def test_greedy_baselines_of_an_environment_are_refused():
    with pytest.raises(ValidationError, match="greedy episodes of them are not played"):
        Config(command="rl", rollout={"env": "guess"}, algo={"name": "remax", "advantage": "remax"})


def test_rl_plays_the_environments_own_tasks(tmp_path, monkeypatch):
    monkeypatch.chdir(EXAMPLES.parent)
    said = CliRunner().invoke(app, ["rl", "--preset", "examples/guess.toml", "--dry-run"])
    assert (said.exit_code, "no problems found" in said.output) == (0, True), said.output
    # The class of the file needs data: it has no tasks of its own.
    file = tmp_path / "empty.py"
    file.write_text("from posttrain.envs import Environment\n\nclass Empty(Environment):\n    step = None\n")
    said = CliRunner().invoke(app, ["rl", "--preset", "examples/guess.toml", "--env", f"{file}:Empty", "--dry-run"])
    assert (said.exit_code, "has no tasks of its own" in said.output) == (2, True), said.output

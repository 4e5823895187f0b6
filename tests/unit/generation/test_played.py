"""Episodes of environments and agents in `generate`, and their scores in `eval`, by a server that answers at once."""

import json
import re
import sys
import zlib
from pathlib import Path

import pyarrow.parquet as pq
import pytest
from typer.testing import CliRunner

import posttrain
from posttrain.cli import app
from posttrain.config.presets import resolve
from posttrain.core.errors import ConfigError, DataError, Interrupted, RunError
from posttrain.evaluation.command import evaluate
from posttrain.generation import command as generate
from posttrain.generation.output import parts_folder
from posttrain.models.builtin import builtin_tokenizer
from posttrain.prep import command as prep
from tests.helpers.chat_endpoint import local_and_quick, serving
from tests.helpers.scripted import EOS

ROOT = Path(__file__).resolve().parents[3]
TOKENIZER = builtin_tokenizer("tiny")
MODELS = json.dumps({"data": [{"id": "tiny"}]})
GUESS = f"{ROOT}/examples/guess.py:Guess"

AGENTS = '''
import asyncio, os, pathlib, signal
import httpx

async def ask(task, messages, **more):
    async with httpx.AsyncClient(timeout=20, verify=False) as client:  # no certificates to load
        answer = await client.post(f"{task.openai_url}/chat/completions", json={"messages": messages, **more})
        answer.raise_for_status()
        return answer.json()["choices"][0]["message"]

async def branching(task):
    """Asks a sub-agent, then for itself; says nothing of the rows with an even number."""
    await ask(task, [{"role": "user", "content": "a sub-agent"}])
    said = await ask(task, task.messages)
    await ask(task, [*task.messages, said, {"role": "user", "content": "Are you sure?"}])
    return task.index / 4 if task.index % 2 else None

async def twice(task):
    first, second = [await ask(task, task.messages) for _ in range(2)]
    return float(first["content"] != second["content"])

async def curious(task):
    await ask(task, task.messages, logprobs=True)

async def interrupted(task):
    await ask(task, task.messages)
    if task.index == 3 and not pathlib.Path(__file__).with_name("again").exists():
        os.kill(os.getpid(), signal.SIGINT)
        await asyncio.sleep(600)
    return 1.0

async def failing(task):
    await ask(task, task.messages)
    if task.index == 0:
        raise ValueError("no idea")
    return 1.0
'''


@pytest.fixture(autouse=True)
def _local_and_quick(monkeypatch):
    local_and_quick(monkeypatch)
    monkeypatch.setattr(generate, "_FLUSH_S", 0.05)


@pytest.fixture
def data(tmp_path):
    prep.run("arith", out=str(tmp_path / "data"), seed=0, limit=4)
    return tmp_path / "data" / "test.parquet"


@pytest.fixture
def agents(tmp_path):
    (tmp_path / "agents.py").write_text(AGENTS)
    return tmp_path / "agents.py"


def reply(nth, body):
    """A number from 0 to 9, made of prompt and seed alone."""
    said = zlib.crc32(json.dumps([body["prompt"], body["seed"]]).encode()) % 10
    ids = [*TOKENIZER(f"#### {said}", add_special_tokens=False)["input_ids"], EOS]
    return 200, {}, json.dumps({"choices": [{"text": "", "finish_reason": "stop", "token_ids": ids}]})


def serve(answer=reply):
    return serving(answer, read=lambda body: body, get=MODELS)


def settings(url, out, **more):
    endpoint = {"url": url, "retries": 0, "concurrency": 4}
    rollout = {"n": 2, "max_turns": 4, "max_response_tokens": 200}
    flags = {"model.path": "builtin:tiny", "generate.out": str(out)}
    flags |= {f"generate.endpoint.{key}": value for key, value in endpoint.items()}
    return flags | {f"rollout.{key}": value for key, value in rollout.items()} | more


def sampled(url, out, *, reuse=False, **more):
    return generate.run(resolve("generate", {}, flags=settings(url, out, **more)), reuse=reuse)


def test_an_environment_plays_its_validation_tasks_and_its_rewards_are_the_scores(tmp_path, capsys):
    out = tmp_path / "out.parquet"
    with serve() as endpoint:
        rows = pq.read_table(sampled(endpoint.url, out, **{"rollout.env": GUESS})).to_pylist()
    assert "those to validate on" in capsys.readouterr().err
    assert len(rows) == 16
    assert [row["extra_info"]["index"] for row in rows] == list(range(16))
    assert {(row["data_source"], row["reward_model"]["ground_truth"]) for row in rows} == {("guess", "val")}
    assert [error for row in rows for error in row["errors"] if error] == []
    scores = [score for row in rows for score in row["env_scores"]]
    assert {0.0, 1.0} == set(scores)
    assert [score == 1.0 for score in scores] == [right for row in rows for right in row["env_correct"]]
    first = json.loads(rows[0]["conversations"][0])
    assert [m["role"] for m in first[:3]] == ["user", "assistant", "user"]
    assert first[2]["content"].startswith("No, ")
    assert "branches" not in rows[0]
    # No grader has this data source.
    report = evaluate(out, [1, 2])
    assert report.overall["pass@1"] == pytest.approx(sum(scores) / 32)
    assert (report.overall["rewarded"], report.overall["reward"]) == (32, pytest.approx(sum(scores) / 32))
    shown = CliRunner().invoke(app, ["eval", str(out), "--failures", str(tmp_path / "wrong.jsonl")])
    assert "32 of 32 responses have the reward of their environment or agent" in " ".join(shown.stdout.split())
    assert "no maj@2 of guess: its environment or agent does not tell" in shown.stdout
    wrong = [json.loads(line) for line in (tmp_path / "wrong.jsonl").read_text().splitlines()]
    assert len(wrong) == scores.count(0.0)
    assert {(record["kind"], record["score"]) for record in wrong} == {("wrong", 0.0)}
    same = CliRunner().invoke(app, ["eval", "--compare", str(out), str(out), "--json"])
    found = json.loads(same.stdout)
    assert (found["matched_by"], found["overall"]["problems"]) == ("index", 16)


def test_a_function_of_the_users_grades_in_place_of_the_environment(tmp_path):
    (tmp_path / "mine.py").write_text("def f(data_source, solution_str, ground_truth, extra_info): return 1.0")
    with serve() as endpoint:
        out = sampled(endpoint.url, tmp_path / "out.parquet", **{"rollout.env": GUESS, "generate.limit": 2})
    cfg = resolve("eval", sets=[f"reward.function={tmp_path}/mine.py:f"]).config
    report = evaluate(out, [1], cfg.reward)
    assert (report.overall["pass@1"], report.overall["rewarded"]) == (1.0, 0)


def test_a_run_of_an_environment_goes_on_and_its_settings_are_compared(tmp_path, monkeypatch):
    monkeypatch.setattr(generate, "_MOST_FAILED", 2)
    monkeypatch.setattr(generate, "_MOST_GROUPS", 1)
    out = tmp_path / "out.parquet"
    more = {"rollout.env": GUESS, "rollout.env_options": {"highest": 5}, "generate.limit": 6}
    broken = lambda nth, body: reply(nth, body) if nth <= 12 else (500, {}, "I am ill")  # noqa: E731
    with serve(broken) as endpoint, pytest.raises(RunError, match="I am ill"):
        sampled(endpoint.url, out, **more | {"generate.endpoint.concurrency": 1})
    with serve() as endpoint:
        with pytest.raises(ConfigError, match=r"rollout\.env_options\.highest: 5 -> 6"):
            sampled(endpoint.url, out, **more | {"rollout.env_options": {"highest": 6}})
        assert endpoint.requests == []
        sampled(endpoint.url, out, **more)
        rest = len(endpoint.requests)
        calm = sampled(endpoint.url, tmp_path / "calm.parquet", **more)
        assert rest < len(endpoint.requests) - rest
        asked = len(endpoint.requests)
        assert sampled(endpoint.url, out, reuse=True, **more) == out
        for change, message in (
            ({"rollout.env": "", "rollout.env_options": {}, "rollout.agent": f"{ROOT}/examples/guess.py:play"}, "env"),
            ({"generate.limit": 5}, "it has 6 prompts"),
        ):
            with pytest.raises(DataError, match=message):
                sampled(endpoint.url, out, reuse=True, **more | change)
        assert len(endpoint.requests) == asked
    assert pq.read_table(out).equals(pq.read_table(calm))
    assert not parts_folder(out).exists()


def test_other_tasks_of_the_same_environment_are_not_mixed(tmp_path):
    file, told = tmp_path / "mine.py", tmp_path / "tasks.json"
    file.write_text(
        "import json\nfrom posttrain.core.types import Prompt\nfrom posttrain.envs import Environment, Step\n\n"
        "class Mine(Environment):\n"
        "    def tasks(self, split):\n"
        f"        tasks = json.load(open({str(told)!r}))\n"
        "        return [Prompt(i, [{'role': 'user', 'content': text}], 'mine', truth, {'level': truth})\n"
        "                for i, text, truth in tasks if split == 'train']\n\n"
        "    async def step(self, message):\n"
        "        return Step(reward=0.5, done=True)\n"
    )
    out, more = tmp_path / "out.parquet", {"rollout.env": f"{file}:Mine"}

    def bring(*tasks):
        told.write_text(json.dumps(tasks))

    with serve() as endpoint:
        bring((7, "one", "a"), (8, "one", 2), (9, "one", None))
        rows = pq.read_table(sampled(endpoint.url, out, **more)).to_pylist()
        # Truths of several types are JSON text, and the rows know the tasks' own numbers.
        assert [row["reward_model"]["ground_truth"] for row in rows] == ['"a"', "2", None]
        assert [row["extra_info"]["index"] for row in rows] == [7, 8, 9]
        report = evaluate(out, [1])
        assert (report.overall["pass@1"], report.overall["reward"]) == (0.0, 0.5)
        bring((7, "one", "a"), (8, "two", 2), (9, "one", None))
        with pytest.raises(DataError, match=r"the content of environment .*Mine' is another"):
            sampled(endpoint.url, out, reuse=True, **more)
        bring((7, "one", "a"), (7, "one", "b"))
        with pytest.raises(ConfigError, match="its tasks 0 and 1 have the index 7"):
            sampled(endpoint.url, out, reuse=True, **more)
        bring()
        with pytest.raises(ConfigError, match="has no tasks of its own") as caught:
            sampled(endpoint.url, out, reuse=True, **more)
    assert "--data" in caught.value.hint


def test_an_agent_plays_rows_and_those_without_its_reward_are_graded(data, agents, tmp_path):
    out = tmp_path / "out.parquet"
    more = {"rollout.agent": f"{agents}:branching", "generate.data": str(data)}
    with serve() as endpoint:
        table = pq.read_table(sampled(endpoint.url, out, **more))
        again = pq.read_table(sampled(endpoint.url, tmp_path / "again.parquet", **more, **{"generate.limit": 2}))
    assert table.slice(0, 2).equals(again)  # seeds of an agent's requests depend on nothing but their places
    rows = table.to_pylist()
    assert [row["env_scores"] for row in rows] == [[None] * 2, [0.25] * 2, [None] * 2, [0.75] * 2]
    for row in rows:
        assert row["errors"] == [None, None]
        for text, conversation, response in zip(row["branches"], row["conversations"], row["responses"], strict=True):
            [branch] = json.loads(text)
            assert branch["messages"][0]["content"] == "a sub-agent"
            assert (branch["given"], branch["sampled_tokens"] > 2) == (1, True)
            messages = json.loads(conversation)
            assert [m["role"] for m in messages] == ["user", "assistant", "user", "assistant"]
            assert response == f"{messages[1]['content']}\n{messages[3]['content']}"
    report = evaluate(out, [1])
    assert (report.overall["responses"], report.overall["rewarded"], report.overall["reward"]) == (8, 4, 0.5)
    evaluate(out, [1], failures=tmp_path / "wrong.md")
    shown = (tmp_path / "wrong.md").read_text()
    assert shown.count("A branch, to which the first 1 messages were given:") == shown.count("### Sample") >= 4
    assert shown.count("[user] a sub-agent") == shown.count("[user] Are you sure?") == shown.count("### Sample")
    with serve() as endpoint:
        last = sampled(
            endpoint.url, tmp_path / "last.parquet", **more, **{"rollout.branches": "last", "generate.limit": 1}
        )
    assert {text for row in pq.read_table(last).to_pylist() for text in row["branches"]} == {"[]"}


def test_prompts_that_are_the_responses_of_an_agent_leave_it_their_scores(data, agents, tmp_path):
    with serve() as endpoint:
        more = {"rollout.agent": f"{agents}:branching", "generate.data": str(data)}
        played = sampled(endpoint.url, tmp_path / "played.parquet", **more)
        plain = sampled(endpoint.url, tmp_path / "plain.parquet", **{"generate.data": str(played)})
    assert {"env_scores", "env_correct", "branches"}.isdisjoint(pq.read_schema(plain).names)
    assert evaluate(played, [1]).overall["rewarded"] == 4
    assert evaluate(plain, [1]).overall["rewarded"] == 0


def test_an_agent_that_asks_twice_for_the_same_has_two_answers(data, agents, tmp_path):
    with serve() as endpoint:
        more = {"rollout.agent": f"{agents}:twice", "generate.data": str(data)}
        out = sampled(endpoint.url, tmp_path / "out.parquet", **more)
        assert len({json.dumps([body["prompt"], body["seed"]]) for _, _, body in endpoint.requests}) == 16
    assert sum(score for row in pq.read_table(out)["env_scores"].to_pylist() for score in row) > 4


def test_an_agent_that_fails_is_a_row_with_its_reason(data, agents, tmp_path):
    more = {"generate.data": str(data), "rollout.n": 1}
    with serve() as endpoint:
        out = sampled(endpoint.url, tmp_path / "a.parquet", **more | {"rollout.agent": f"{agents}:failing"})
        rows = pq.read_table(out).to_pylist()
        assert "the agent failed: ValueError: no idea" in rows[0]["errors"][0]
        assert [row["env_scores"] for row in rows] == [[None], [1.0], [1.0], [1.0]]
        report = evaluate(out, [1])
        assert (report.overall["pass@1"], report.overall["generation_errors"]) == (1.0, 1)
        # A server gives no log-probabilities: an agent that asks for them is told so.
        with pytest.raises(RunError, match=r"all 4 episodes failed, the last with: .*400 Bad Request"):
            sampled(endpoint.url, tmp_path / "b.parquet", **more | {"rollout.agent": f"{agents}:curious"})


def test_ctrl_c_ends_agents_and_their_rows_are_sampled_later(data, agents, tmp_path):
    out = tmp_path / "out.parquet"
    more = {
        "rollout.agent": f"{agents}:interrupted", "generate.data": str(data), "generate.endpoint.concurrency": 1,
        "rollout.n": 1,
    }  # fmt: skip
    with serve() as endpoint:
        with pytest.raises(Interrupted, match=r"stopped after [0-3] of 4 prompts") as caught:
            sampled(endpoint.url, out, **more)
        [done] = re.findall(r"after (\d)", str(caught.value))
        asked = len(endpoint.requests)
        (tmp_path / "again").write_text("")
        assert pq.read_table(sampled(endpoint.url, out, **more))["env_correct"].to_pylist() == [[True]] * 4
        assert len(endpoint.requests) == asked + 4 - int(done)


PROGRAM = """
import json, os, urllib.request

def post(url, body):
    return json.load(urllib.request.urlopen(urllib.request.Request(url, json.dumps(body).encode())))

task, session = json.loads(os.environ["POSTTRAIN_TASK"]), os.environ["POSTTRAIN_SESSION_URL"]
post(f"{session}/v1/chat/completions", {"messages": task["messages"]})
post(f"{session}/reward", {"reward": 0.5})
"""


def test_a_program_plays_and_another_one_has_other_rows(data, tmp_path):
    (tmp_path / "agent.py").write_text(PROGRAM)
    command = f"{sys.executable} {tmp_path}/agent.py"
    out = tmp_path / "out.parquet"
    more = {"rollout.agent_command": command, "generate.data": str(data), "rollout.n": 1, "generate.limit": 1}
    with serve() as endpoint:
        rows = pq.read_table(sampled(endpoint.url, out, **more)).to_pylist()
        assert [(row["errors"], row["env_scores"], row["branches"]) for row in rows] == [([None], [0.5], ["[]"])]
        with pytest.raises(DataError, match=r"rollout\.agent_command: "):
            sampled(endpoint.url, out, reuse=True, **more | {"rollout.agent_command": f"{command} --more"})


def test_eval_samples_with_an_environment_by_flags_and_from_python(tmp_path, monkeypatch):
    monkeypatch.chdir(ROOT)
    with serve() as endpoint:
        sets = {"generate.endpoint.url": endpoint.url, "run.dir": str(tmp_path), "model.path": "builtin:tiny"}
        words = [word for key, value in sets.items() for word in ("--set", f"{key}={value}")]
        line = [
            "eval",
            "--preset",
            "examples/guess-generate.toml",
            "--limit",
            "3",
            "--pass-at",
            "1,4",
            "--json",
            *words,
        ]
        said = CliRunner().invoke(app, line)
        assert said.exit_code == 0, said.output
        found = json.loads(said.stdout)
        file = tmp_path / "eval-builtin-tiny-guess.py-Guess" / "responses.parquet"
        assert (found["file"], found["n"], found["overall"]["rewarded"]) == (str(file), 4, 12)
        asked = len(endpoint.requests)
        tree = {"extends": "examples/guess-generate.toml", "run.dir": str(tmp_path)}
        result = posttrain.run_eval(
            preset=tree | {"rollout.env": ""}, env="examples/guess.py:Guess", model="builtin:tiny", limit=3,
            endpoint=endpoint.url, pass_at=[1, 4],
        )  # fmt: skip
        assert (result.file, result.scores["pass@4"]) == (file, found["overall"]["pass@4"])
        assert len(endpoint.requests) == asked
        agent = posttrain.run_generate(
            tree | {"rollout.env": ""}, agent="examples/guess.py:play", model="builtin:tiny", limit=1,
            endpoint=endpoint.url, name="agent", n=1,
        )  # fmt: skip
    [row] = pq.read_table(agent.file).to_pylist()
    assert row["env_scores"][0] in (0.0, 1.0)


def test_flags_of_an_environment_without_prompts_or_beside_a_file_are_refused(tmp_path):
    said = CliRunner().invoke(app, ["eval", str(tmp_path / "x.parquet"), "--env", GUESS])
    assert (said.exit_code, "a file is given" in said.output) == (2, True), said.output
    with pytest.raises(DataError, match="no prompts"):
        sampled("http://127.0.0.1:1/v1", tmp_path / "out.parquet")

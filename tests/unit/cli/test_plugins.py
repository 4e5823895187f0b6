"""A user's own code that raises, leaves or breaks its contract: one message with its file and line, and exit code 2."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import os
import pickle
import re
import textwrap
import traceback
from pathlib import Path
from typing import Any

import pytest
from click.testing import Result
from typer.testing import CliRunner

from posttrain.cli import app
from posttrain.cluster.actors import ActorContext
from posttrain.config import RewardConfig, SandboxConfig
from posttrain.config.presets import resolve
from posttrain.core.errors import CodeError, DataError
from posttrain.core.registry import load_plugins
from posttrain.core.types import Prompt
from posttrain.data.parquet import read_prompts, write_rows
from posttrain.prep.datasets import DATASETS
from posttrain.rewards import GRADERS
from posttrain.rewards.trial import try_function
from posttrain.rl import command as rl
from posttrain.rollout.interaction import Interaction, UserTurn
from posttrain.tools import Tool, ToolResult
from posttrain.tools.formats import ParsedTurn, ToolParser
from posttrain.tools.sets import close_tools
from tests.helpers.scripted import ScriptedSampler, environment, gsm8k_prompt, run_episode

DATASET = """
from posttrain.data.parquet import Conversation
from posttrain.prep.datasets import DATASETS, Dataset
from posttrain.rewards import DATA_SOURCES, GRADERS, compute_score
from posttrain.core.types import Score
DATA_SOURCES["my/set"] = "mine"

@GRADERS.register("mine")
def grade(response, ground_truth, extra_info):
    return {grade}

@DATASETS.register("mine")
class Mine(Dataset):
    name, data_source, licence, hub_id, splits = "mine", "my/set", "CC0-1.0", None, ("train",)
    def available(self, source):
        return {available}
    def rows(self, split, source, *, n=None, seed=0):
        for i in range(3):
            yield {row}
    def to_rlhf(self, row, index, split):
        return {rlhf}
    def to_sft(self, row, index, split):
        return {sft}
    def check(self, row):
        return {check}
"""
GOOD = {
    "grade": "Score(1.0, True)",
    "available": "self.splits",
    "row": "{'asked': f'q{i}', 'gold': str(i)}",
    "rlhf": "{'data_source': 'my/set', 'prompt': [{'role': 'user', 'content': row['asked']}], "
    "'reward_model': {'ground_truth': row['gold']}}",
    "sft": "None",
    "check": "compute_score(self.data_source, row['gold'], row['gold'])",
}


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder and registries of its own for each test."""
    monkeypatch.chdir(tmp_path)
    for registry in (DATASETS, GRADERS):
        monkeypatch.setattr(registry, "_entries", dict(registry._entries))


def written(name: str, text: str) -> str:
    Path(name).write_text(textwrap.dedent(text))
    return name


def line_of(file: str, part: str) -> int:
    """The number of the first line with this text."""
    return next(n for n, line in enumerate(Path(file).read_text().splitlines(), start=1) if part in line)


def invoke(*words: str) -> Result:
    return CliRunner().invoke(app, words)


def refused(done: Result, *parts: str) -> None:
    """Exit code 2, one error with these parts, a hint, and no traceback."""
    assert done.exit_code == 2, done.output
    assert done.stderr.count("error: ") == 1
    assert "\nhint: " in done.stderr
    assert "Traceback" not in done.output
    for part in parts:
        assert part in done.stderr


PLUGINS = {
    "import sys\nsys.exit(3)\n": "SystemExit: it called sys.exit(3) (plugin.py, line 2)",
    "x = 1\nif x\n    y = 2\n": "SyntaxError: expected ':' (plugin.py, line 2)",
    "import json\n\njson.loads('{')\n": "(plugin.py, line 3)",
    "import no_such_thing\n": "ModuleNotFoundError: No module named 'no_such_thing' (plugin.py, line 1)",
    "from posttrain.rewards import GRADERS\nfor one in (1, 2):\n    GRADERS.register('twice')(one)\n": (
        "plugin plugin.py: grader 'twice' is registered twice (plugin.py, line 3)"
    ),
    "def f():\n    return missing\nf()\n": "NameError: name 'missing' is not defined (plugin.py, line 2)",
}


@pytest.mark.parametrize("text", PLUGINS)
def test_a_plugin_that_cannot_be_imported_is_named_with_its_line(text: str) -> None:
    plugin = written("plugin.py", text)
    by_config = ("--preset", "tiny-multiturn", "--set", f'plugins=["{plugin}"]')
    for words in (("prep", "--list", "--plugin", plugin), ("eval", "--plugin", plugin), ("sft", *by_config)):
        refused(invoke(*words), PLUGINS[text])
    with pytest.raises(CodeError, match=re.escape(PLUGINS[text])):
        ActorContext(os.getcwd(), [plugin]).enter()  # an actor of Ray begins so


def test_debug_shows_the_traceback_of_a_users_code() -> None:
    plugin = written("plugin.py", "def f():\n    1 / 0\nf()\n")
    done = invoke("--debug", "prep", "--list", "--plugin", plugin)
    assert done.exit_code == 2
    assert "Traceback" in done.stderr
    assert "in f\n    1 / 0" in done.stderr


def test_an_error_from_another_process_keeps_its_traceback_for_debug() -> None:
    with pytest.raises(CodeError) as caught:
        load_plugins([written("plugin.py", "def f():\n    1 / 0\nf()\n")])
    error = pickle.loads(pickle.dumps(caught.value))
    assert (error.message, error.hint) == (caught.value.message, caught.value.hint)
    assert "in f\n    1 / 0" in "".join(traceback.format_exception(error))


BROKEN_SETS = {
    "missing column": ({"rlhf": "{'prompt': row['question']}"}, "'question' is missing", "the row has asked, gold"),
    "wrong type": ({"rlhf": "{'prompt': row['asked'] + 1}"}, "TypeError (plugin.py, line ", "the row has asked, gold"),
    "name": ({"rlhf": "unknown"}, "NameError: name 'unknown' is not defined (plugin.py, line "),
    "exit": ({"rlhf": "exit(1)"}, "it called sys.exit(1) (plugin.py, line "),
    "rlhf type": ({"rlhf": "[row]"}, "data set 'mine': to_rlhf returned list, not dict (plugin.py, line "),
    "sft type": ({"sft": "row"}, "data set 'mine': to_sft returned dict, not Conversation (plugin.py, line "),
    "check type": ({"check": "True"}, "data set 'mine': check returned bool, not Score (plugin.py, line "),
    "rows": ({"row": "{}['asked']"}, "data set 'mine', split 'train': rows: KeyError: 'asked' (plugin.py, line "),
    "rows type": ({"row": "[i]"}, "rows returned list, not dict (plugin.py, line "),
    "available": (
        {"available": "None"},
        "data set 'mine': available: TypeError: 'NoneType' object is not iterable (plugin.py, line ",
    ),
    "grader": ({"grade": "missing"}, "grader 'mine' raised NameError: name 'missing' is not defined (plugin.py, line "),
    "grader type": ({"grade": "1.0"}, "grader 'mine' returned float, not Score"),
    "grader part": ({"grade": "Score(1.0, True, parts={'a': 'b'})"}, "returned 'b' as 'a', which is no finite number"),
}


@pytest.mark.parametrize("case", BROKEN_SETS)
def test_prep_names_the_line_of_a_broken_data_set_and_writes_nothing(case: str) -> None:
    change, *parts = BROKEN_SETS[case]
    text = DATASET
    for name, code in {**GOOD, **change}.items():
        text = text.replace("{" + name + "}", code)
    refused(invoke("prep", "mine", "--plugin", written("plugin.py", text)), *parts)
    assert not Path("data").exists()


def test_prep_of_a_class_that_is_no_data_set() -> None:
    written(
        "plugin.py",
        "from posttrain.prep.datasets import DATASETS\n@DATASETS.register('none')\nclass None_:\n    pass\n",
    )
    refused(invoke("prep", "none", "--plugin", "plugin.py"), "data set 'none' cannot be made", "'name'", "plugin.py")


# ---------------------------------------------------------------------- reward functions


def run_rl(function: str, *sets: str) -> Result:
    row = {"data_source": "x", "prompt": [{"role": "user", "content": "2 + 2?"}], "reward_model": {"ground_truth": "4"}}
    write_rows("train.parquet", [row] * 2)
    words = ["rl", "--preset", "tiny-gsm8k", "--model", "builtin:tiny", "--data", "train.parquet", "--name", "a"]
    for text in (f"reward.function=reward.py:{function}", *sets):
        words += ["--set", text]
    return invoke(*words)


REWARDS = """
def fewer(data_source, solution_str):
    return 1.0

def buggy(data_source, solution_str, ground_truth, extra_info):
    return len(extra)

def words(data_source, solution_str, ground_truth, extra_info):
    return "good"

def without_score(**arguments):
    return {"acc": True}

def leaves(**arguments):
    exit(1)

def bonus(data_source, solution_str, ground_truth, extra_info, factor):
    return 1.0

async def late(**arguments):
    return arguments["ground_truth"].upper()["x"]
"""


@pytest.mark.parametrize(
    ("function", "message"),
    [
        ("fewer", "cannot be called as a reward function: got an unexpected keyword argument 'ground_truth'"),
        ("bonus", "cannot be called as a reward function: missing a required argument: 'factor'"),
        ("buggy", "train.parquet, row 0: reward.function 'buggy' raised NameError: name 'extra' is not defined"),
        ("words", "train.parquet, row 0: reward.function 'words' returned no score: the score is 'good', not a number"),
        ("without_score", "returned no score: the dict it returned has no 'score': ['acc']"),
        ("leaves", "it called sys.exit(1)"),
        ("late", "TypeError: string indices must be integers"),
    ],
)
def test_rl_refuses_a_broken_reward_function_before_anything_starts(function: str, message: str) -> None:
    written("reward.py", REWARDS)
    line = line_of("reward.py", f"def {function}(")
    body = function in ("buggy", "leaves", "late")
    refused(run_rl(function), message, f"(reward.py, line {line + body})")
    assert not Path("runs").exists()


def test_rl_refuses_arguments_that_the_reward_function_does_not_take() -> None:
    written("reward.py", REWARDS)
    refused(run_rl("words", "reward.function_kwargs={extra=1}"), "got an unexpected keyword argument 'extra'")


def test_a_reward_function_that_raises_on_one_row_is_a_warning() -> None:
    written(
        "reward.py",
        """
        import os

        def fails(ground_truth, **others):
            raise ValueError(f"no {ground_truth}")

        def evaluates(solution_str, **others):
            return float(eval(solution_str))

        def dies(**arguments):
            os._exit(3)

        def works(**arguments):
            return 1.0
        """,
    )
    prompt = Prompt(7, [{"role": "user", "content": "q"}], "x", "east")

    def tried(name: str) -> str | None:
        return try_function(RewardConfig(function=f"reward.py:{name}"), SandboxConfig(), (), prompt, "train.parquet")

    assert tried("works") is None
    warning = tried("fails") or ""
    assert warning.startswith(
        "train.parquet, row 7: reward.function 'fails' raised ValueError: no east (reward.py, line 5)"
    )
    assert "NameError" in (tried("evaluates") or "")
    assert "died (exit code 3)" in (tried("dies") or "")


def test_rl_begins_with_what_the_user_shall_know_of_data_and_reward() -> None:
    written("reward.py", "def fails(**arguments):\n    raise ValueError('no')\n")
    question = {"role": "user", "content": "2 + 2?"}
    row = {"data_source": "x", "prompt": [question], "reward_model": {"ground_truth": "4"}}
    longer = {**row, "prompt": [{**question, "content": "2 + 2? " * 100}]}
    write_rows("train.parquet", [row, row, longer])
    sets = ["data.truncation=drop", "rollout.max_prompt_tokens=200", "reward.function=reward.py:fails"]
    flags = {"model.path": "builtin:tiny", "data.train": "train.parquet", "rollout.tools": []}
    job = rl.prepare(resolve("rl", "tiny-gsm8k", sets=sets, flags=flags))
    *_, left_out, failing, crowded = job.notes()
    assert re.match(r"train.parquet: 1 prompt is too long, the longest has \d\d\d+ tokens, and left out", left_out)
    assert failing.startswith("warning: train.parquet, row 0: reward.function 'fails' raised ValueError: no (reward.py")
    assert crowded.startswith("warning: data.batch_size = 8, and there are 2 rows: a step has a row up to 4 times")


@pytest.mark.parametrize(("tools", "told"), [(["calculator", "gsm8k"], True), (["calculator"], False)])
def test_rl_says_that_a_tool_tells_the_model_whether_it_is_right(tools: list[str], told: bool) -> None:
    row = {"data_source": "openai/gsm8k", "prompt": [{"role": "user", "content": "2 + 2?"}]}
    write_rows("rows.parquet", [row | {"reward_model": {"ground_truth": "4"}}] * 8)
    flags = {"model.path": "builtin:tiny", "data.train": "rows.parquet", "data.val": "rows.parquet"}
    job = rl.prepare(resolve("rl", "tiny-gsm8k", flags=flags | {"rollout.tools": tools}))
    assert any("learns from calc_gsm8k_reward whether its answer is right" in note for note in job.notes()) is told


# ---------------------------------------------------------------------- tools and interactions


class Careless(Tool):
    """A tool whose methods do what they are told."""

    name = "careless"
    schema = {"type": "function", "function": {"name": "careless", "parameters": {"type": "object"}}}  # noqa: RUF012

    def __init__(self, **does: Any) -> None:
        self.does = does

    def _do(self, method: str) -> Any:
        found = self.does.get(method)
        if isinstance(found, BaseException):
            raise found
        return found

    def create(self, prompt: Prompt) -> Any:  # type: ignore[override]  # not async, as a user may write it
        return self._do("create")

    async def call(self, state: Any, arguments: dict[str, Any]) -> ToolResult:
        return self._do("call")  # type: ignore[no-any-return]

    async def reward(self, state: Any) -> float | None:
        return self._do("reward")  # type: ignore[no-any-return]


CALL = '<tool_call>\n{"name": "careless", "arguments": {}}\n</tool_call>'


@pytest.mark.parametrize(
    ("does", "error"),
    [
        ({"create": SystemExit(1)}, "tool careless failed in create: SystemExit: it called sys.exit(1) ("),
        ({"create": KeyError("row")}, "tool careless failed in create: KeyError: 'row' ("),
        ({"reward": "much"}, "tool careless failed at the end of the episode: ValueError: could not convert"),
        (
            {"reward": SystemExit()},
            "tool careless failed at the end of the episode: SystemExit: it called sys.exit() (",
        ),
    ],
)
def test_a_tool_that_breaks_its_contract_fails_its_episode_only(does: dict[str, Any], error: str) -> None:
    env = environment(Careless(**does))
    episode = asyncio.run(run_episode(gsm8k_prompt(), ScriptedSampler("done"), env))
    assert error in (episode.error or "")


def test_the_methods_of_a_tool_may_be_plain() -> None:
    class Plain(Careless):
        released = False

        def reward(self, state: Any) -> float | None:  # type: ignore[override]
            return 0.5

        def release(self, state: Any) -> None:  # type: ignore[override]
            self.released = True

        def close(self) -> None:  # type: ignore[override]
            self.does["closed"] = True

    tool = Plain()
    episode = asyncio.run(run_episode(gsm8k_prompt(), ScriptedSampler("done"), environment(tool)))
    assert (episode.error, episode.reward_parts) == (None, {"tool/careless": 0.5})
    told: list[str] = []
    asyncio.run(close_tools({"careless": tool}, told.append))
    assert (tool.released, tool.does, told) == (True, {"closed": True}, [])


@pytest.mark.parametrize(
    ("result", "text"),
    [
        (SystemExit(2), "error: careless failed: SystemExit: it called sys.exit(2) (test_plugins.py, line "),
        ("text", "error: careless failed: careless: call returned str, not ToolResult ("),
        (ToolResult(8), "error: careless failed: careless: call gave int as the text of its ToolResult ("),  # type: ignore[arg-type]
    ],
)
def test_a_call_that_breaks_its_contract_is_told_to_the_model(result: Any, text: str) -> None:
    env = environment(Careless(call=result))
    episode = asyncio.run(run_episode(gsm8k_prompt(), ScriptedSampler(CALL, "done"), env))
    assert episode.error is None
    assert text in episode.messages[-2]["content"]


@pytest.mark.parametrize(
    ("turn", "error"),
    [
        ("well done", "the interaction failed: respond returned str, not UserTurn ("),
        (UserTurn(8), "the interaction failed: respond gave int as the user's text ("),  # type: ignore[arg-type]
        (UserTurn(None, "much"), "the interaction failed: respond gave a reward of much"),  # type: ignore[arg-type]
    ],
)
def test_an_interaction_that_says_no_turn_fails_its_episode_only(turn: Any, error: str) -> None:
    class Mute(Interaction):
        async def create(self, prompt: Prompt) -> None:
            return None

        async def respond(self, state: Any, messages: Any) -> UserTurn:
            return turn  # type: ignore[no-any-return]

    env = dataclasses.replace(environment(), interaction=Mute())
    episode = asyncio.run(run_episode(gsm8k_prompt(), ScriptedSampler("4"), env))
    assert error in (episode.error or "")


def test_a_format_of_calls_that_raises_fails_its_episode_only() -> None:
    class Unable(ToolParser):
        def parse(self, text: str, tools: Any = None) -> ParsedTurn:
            raise IndexError("no call")

    env = dataclasses.replace(environment(Careless()), parser=Unable())
    episode = asyncio.run(run_episode(gsm8k_prompt(), ScriptedSampler("4"), env))
    assert "the format of calls failed: IndexError: no call (" in (episode.error or "")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "class T:\n    def __init__(self):\n        exit(4)\n",
            "it cannot be made: SystemExit: it called sys.exit(4)",
        ),
        ("def T(a: Unknown) -> str:\n    return ''\n", "NameError: name 'Unknown' is not defined"),
        ("class T:\n    name = 'a'\n", "T is no tool, it has no 'schema' (tools.py, line 1)"),
        (
            "from posttrain.tools import Tool\nclass T(Tool):\n    name, schema = 'a', 'b'\n",
            "T is no tool, its 'schema' is no OpenAI function schema (tools.py, line 2)",
        ),
        (
            "from posttrain.tools import Tool\nclass T(Tool):\n    name, schema = 'a', {'name': 'a'}\n",
            "T is no tool, its 'schema' is no OpenAI function schema (tools.py, line 2)",
        ),
        (
            "from posttrain.tools import Tool\nclass T(Tool):\n    name, schema = 'a', {'function': {'name': 'b'}}\n",
            "T is no tool, its 'schema' has the name 'b', and its 'name' is 'a' (tools.py, line 2)",
        ),
    ],
)
def test_prep_refuses_a_tool_that_is_none(text: str, message: str) -> None:
    written("tools.py", text)
    refused(invoke("prep", "arith", "--limit", "4", "--tools", "tools.py:T"), "tools.py", message)


# ---------------------------------------------------------------------- rows


def rows_file(name: str, *rows: dict[str, Any]) -> str:
    Path(name).write_text("".join(json.dumps(row) + "\n" for row in rows))
    return name


GSM8K = {"question": "What is 1 + 1?", "answer": "It is 2.\n#### 2"}


@pytest.mark.parametrize(
    ("dataset", "row", "fault"),
    [
        ("gsm8k", {"question": "q"}, "`answer` has no last line"),
        ("gsm8k", {"question": 3, "answer": "#### 3"}, "`question` is missing or empty"),
        ("math", {"answer": "3"}, "the problem is missing or empty"),
        ("kk", {"quiz": "q", "cot_repeat_steps": 3, "solution_text_format": "x"}, "`cot_repeat_steps` is no list"),
        ("code", {"problem": "p", "public_tests": {"input": 3}}, "`input` is no list: it is int"),
        ("messages", {"messages": [{"role": ["user"], "content": "a"}]}, "the role of a message is no text"),
    ],
)
def test_prep_names_file_row_and_columns_of_a_bad_row(dataset: str, row: dict[str, Any], fault: str) -> None:
    done = invoke("prep", dataset, "--source", rows_file("train.jsonl", row))
    refused(done, f"{dataset} train row 0 (train.jsonl, row 0): {fault}", "1 of 1 rows are bad")
    assert not Path("data").exists()


def test_the_row_of_a_split_is_named_in_its_own_file() -> None:
    Path("raw").mkdir()
    rows_file("raw/train-0.jsonl", GSM8K, {**GSM8K, "question": "What is 2 + 0?"})
    rows_file("raw/train-1.jsonl", {**GSM8K, "question": "What is 0 + 2?"}, {"question": "q", "gold": 3})
    refused(
        invoke("prep", "gsm8k", "--source", "raw"),
        "gsm8k train row 3 (raw/train-1.jsonl, row 1): `answer` has no last line `#### <number>`: "
        "the row has question, gold",
    )


@pytest.mark.parametrize("dataset", ["math", "math500", "minerva", "deepmath"])
def test_prep_refuses_worked_solutions_of_another_set_as_gold_answers(dataset: str) -> None:
    done = invoke("prep", dataset, "--source", rows_file("train.jsonl", GSM8K))
    refused(done, "the gold answer is a worked solution and not a final answer: is this a file of another set?")


def test_prep_refuses_gold_answers_in_prose_and_keeps_those_of_several_words() -> None:
    prose = "He has three apples and buys four more of them, so that in the end he has seven apples in all."
    refused(
        invoke("prep", "math500", "--source", rows_file("a.jsonl", {"problem": "p", "answer": prose})),
        "the gold answer is a worked solution",
    )
    kept = {"problem": "p", "answer": r"\text{all even integers}"}
    assert invoke("prep", "math500", "--source", rows_file("b.jsonl", kept)).exit_code == 0


@pytest.mark.parametrize(
    ("dataset", "answer", "exit_code"), [("aime24", "three", 2), ("amc23", 27.0, 0), ("aime25", "070", 0)]
)
def test_the_answers_of_contests_are_whole_numbers(dataset: str, answer: object, exit_code: int) -> None:
    row = {"problem": "p", "answer": answer}
    done = invoke("prep", dataset, "--source", rows_file("test.jsonl", row))
    assert done.exit_code == exit_code, done.output
    assert exit_code == 0 or "the gold answer is no whole number" in done.stderr


# ---------------------------------------------------------------------- splits


def test_one_file_given_by_itself_is_one_split() -> None:
    row = {"problem": "p", "answer": "3"}
    assert invoke("prep", "math", "--source", rows_file("train.jsonl", row)).exit_code == 0
    assert sorted(file.name for file in Path("data/math").glob("*.parquet")) == ["train.parquet"]


def test_prep_refuses_one_file_that_would_be_train_and_test() -> None:
    Path("raw").mkdir()
    row = {"text": "Write one.", "code": "def one(): return 1", "test_list": ["assert one() == 1"]}
    rows_file("raw/mbpp.jsonl", row, {**row, "text": "Write 1."})
    refused(
        invoke("prep", "mbpp", "--source", "raw"),
        "mbpp: 2 of the 2 rows of split 'train' are also in split 'validation'",
        "--val-fraction",
    )
    assert not Path("data").exists()


def test_prep_says_how_many_training_rows_overlap_the_test_set() -> None:
    Path("raw").mkdir()
    rows = [{"question": f"What is {i} and {i}?", "answer": f"#### {2 * i}"} for i in range(10)]
    rows_file("raw/train.jsonl", *rows)
    rows_file("raw/test.jsonl", rows[3], *({**row, "question": f"Now {row['question']}"} for row in rows[:4]))
    done = invoke("prep", "gsm8k", "--source", "raw")
    assert done.exit_code == 0
    assert "1 of the 5 rows of split 'test' are also in split 'train'" in done.stderr
    overlap = (
        "1 of the 10 rows of split 'train' overlap test (13 words in a row, or all); --decontaminate test drops them"
    )
    assert overlap in done.stderr
    clean = invoke("prep", "gsm8k", "--source", "raw", "--out", "clean", "--decontaminate", "test")
    assert clean.exit_code == 0
    assert "rows of split" not in clean.stderr


def test_names_that_no_file_may_have_are_refused() -> None:
    long = "a" * 300
    for words, part in {
        ("arith", "--limit", "4", "--out", long): "the name is too long",
        ("gsm8k", "--source", long): "no such file or folder",
        ("arith", "--limit", "4", "--decontaminate", long): "no such file",
        ("arith", "--plugin", f"{long}.py"): "plugin file not found",
    }.items():
        refused(invoke("prep", *words), part)
    done = invoke("sft", "--preset", "tiny-multiturn", "--name", long)
    assert done.exit_code == 2
    assert "String should have at most 200 characters" in done.stderr
    with pytest.raises(DataError, match="no such file"):
        read_prompts(long)

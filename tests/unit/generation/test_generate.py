"""Seeds of requests, the window of episodes, rows in parts, and runs of `generate` that are ended and go on."""

import asyncio
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
import zlib
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
from typer.testing import CliRunner

from posttrain.cli import app
from posttrain.config.presets import resolve
from posttrain.core.errors import ConfigError, DataError, Interrupted, RunError, WorkerError
from posttrain.core.types import ON_POLICY, Sample
from posttrain.engines.hf_sampling import exponentials, keys_of, pick
from posttrain.generation import command as generate
from posttrain.generation.output import ResponseParts, differences, manifest_of, parts_folder, response_table
from posttrain.models.builtin import builtin_tokenizer, create_builtin
from posttrain.models.load import ModelSource, locate, mark_of
from posttrain.prep import command as prep
from posttrain.rollout.episode import Episode
from posttrain.rollout.pool import SamplerPool
from posttrain.rollout.seeds import seed_of
from posttrain.rollout.window import Window
from tests.helpers.chat_endpoint import local_and_quick, serving
from tests.helpers.scripted import EOS, Gsm8kTool, ScriptedSampler, call, environment, gsm8k_prompt, tokens

ROOT = Path(__file__).resolve().parents[3]
TOKENIZER = builtin_tokenizer("tiny")
MODELS = json.dumps({"data": [{"id": "tiny"}]})


# ---------------------------------------------------------------------- seeds


def test_seeds_are_those_of_earlier_versions():
    """A run that was begun by another version goes on with the same seeds."""
    assert [seed_of(0, 0, 0), seed_of(1, 2, 3), seed_of(12, 3)] == [1254398694, 1159913351, 1096212504]
    assert len({seed_of(0, row, sample) for row in range(100) for sample in range(10)}) == 1000


def test_random_numbers_are_exponential_and_independent_of_their_neighbours():
    seeds, places = np.meshgrid(np.arange(100), np.arange(20))
    keys = keys_of(seeds.ravel().tolist(), places.ravel().tolist())
    assert len(np.unique(keys, axis=0)) == 2000
    numbers = exponentials(torch.from_numpy(keys), 300).reshape(20, 100, 300).double()
    shares = np.exp(-numbers.numpy())
    counts = np.histogram(shares, 50, (0, 1))[0]
    assert counts.sum() == 600_000
    assert ((counts - 12_000) ** 2 / 12_000).sum() < 86  # chi squared of 49 degrees: p = 0.001
    for axis in range(3):
        one, other = np.delete(shares, 0, axis), np.delete(shares, -1, axis)
        assert abs(np.corrcoef(one.ravel(), other.ravel())[0, 1]) < 0.005


def test_tokens_are_picked_by_their_probability(monkeypatch):
    probabilities = torch.tensor([0.0, 0.5, 0.0, 0.2, 0.2999, 0.0001])
    rows = probabilities.expand(200_000, -1)
    keys = torch.from_numpy(keys_of([7] * 200_000, list(range(200_000))))
    found = torch.bincount(pick(rows, keys).flatten(), minlength=6) / 200_000
    error = (probabilities * (1 - probabilities) / 200_000).sqrt()
    assert ((found - probabilities).abs() <= 4 * error).all()
    monkeypatch.setattr("posttrain.engines.hf_sampling._CHUNK", 600)
    one_by_one = torch.cat([pick(rows[:1], key[None]) for key in keys[:500]])
    assert torch.equal(pick(rows[:500], keys[:500]), one_by_one)


def test_rounding_changes_few_tokens():
    """Not more than the distributions differ: a cumulative sum would change hundreds of times as many."""
    chance = torch.Generator().manual_seed(0)
    probabilities = torch.softmax(3 * torch.randn(20_000, 1000, generator=chance), -1)
    other = probabilities * (1 + 1e-4 * torch.randn(probabilities.shape, generator=chance))
    keys = torch.from_numpy(keys_of([1] * 20_000, list(range(20_000))))
    changed = (pick(probabilities, keys) != pick(other, keys)).float().mean().item()
    assert changed < 4e-4
    assert changed <= 4 * (probabilities - other).abs().sum(-1).mean().item()


async def test_every_turn_of_an_episode_has_its_own_seed():
    seeds = []
    for _ in range(2):
        sampler = ScriptedSampler(call(8), "#### 8")
        await Episode(gsm8k_prompt(), environment(Gsm8kTool()), seed=11).play(sampler)
        seeds.append([p.seed for p in sampler.params])
        assert seeds[-1] == [seed_of(11, len(ids)) for ids in sampler.prompts]
    assert seeds[0] == seeds[1]
    assert seeds[0][0] != seeds[0][1]
    sampler = ScriptedSampler("#### 8")
    await Episode(gsm8k_prompt(), environment()).play(sampler)
    assert sampler.params[0].seed is None


# ---------------------------------------------------------------------- the window


class Gated:
    """A sampler whose answers wait for leave, but for those to whom it is given at once."""

    def __init__(self, slow=()):
        self.slow, self.gate = set(slow), asyncio.Event()
        self.running = self.most = self.asked = 0

    async def generate(self, prompt_ids, params, images=()):
        number, self.asked = self.asked, self.asked + 1
        self.running += 1
        self.most = max(self.most, self.running)
        try:
            await (self.gate.wait() if number in self.slow else asyncio.sleep(0.001))
        finally:
            self.running -= 1
        ids = [*tokens("#### 8"), EOS]
        return Sample(ids, [0.0] * len(ids), "stop", 0)


async def play(sampler, count, *, n=1, most=4, on_group=lambda group: None):
    def prompts():
        for index in range(count):
            assert index * n - sampler.asked < most  # it is taken when there is space, and not before
            yield gsm8k_prompt(index=index)

    async with Window(SamplerPool([sampler]), environment(), ON_POLICY, prompts(), n=n, most=most, seed=0) as window:
        groups = []
        while not window.over:
            for group in await window.finished(5.0):
                on_group(group)
                groups.append(group)
    return groups


async def test_a_slow_episode_holds_up_nobody_and_prompts_are_taken_when_there_is_capacity():
    sampler, order = Gated(slow=[0]), []

    def on_group(group):
        order.append(group[0].prompt.index)
        if len(order) == 39:
            sampler.gate.set()

    groups = await play(sampler, 40, on_group=on_group)
    assert order[-1] == 0
    assert sorted(order) == list(range(40))
    assert sampler.most == 4
    assert all(len(group) == 1 for group in groups)


async def test_a_group_is_complete_and_in_order_and_more_than_fit_at_once():
    groups = await play(Gated(), 3, n=7, most=4)
    assert sorted(len(group) for group in groups) == [7, 7, 7]
    assert {t.prompt.index for group in groups for t in group} == {0, 1, 2}


async def test_a_window_that_is_left_cancels_and_releases():
    sampler = Gated(slow=range(10))
    prompts = iter([gsm8k_prompt(index=i) for i in range(10)])
    async with Window(SamplerPool([sampler]), environment(), ON_POLICY, prompts, n=2, most=4, seed=0) as window:
        assert await window.finished(0.02) == []
        assert window.in_flight() == {"sampling": 4, "tool": 0, "waiting": 0}
        assert sampler.running == 4
    assert sampler.running == 0


# ---------------------------------------------------------------------- parts


def group_of(index, *texts, error=None):
    async def played():
        env = environment()
        turns = [RunError(error)] if error else texts
        return [await Episode(gsm8k_prompt(index=index), env).play(ScriptedSampler(turn)) for turn in turns]

    return asyncio.run(played())


@pytest.fixture
def data(tmp_path):
    prep.run("arith", out=str(tmp_path / "data"), seed=0, limit=6)
    return tmp_path / "data" / "test.parquet"


def opened(data, out, count=6, **settings):
    return ResponseParts.open(out, manifest_of({"rollout.n": 1, **settings}, data, "1"), count)


def test_rows_are_found_again_and_put_in_order(data, tmp_path):
    out = tmp_path / "out.parquet"
    parts = opened(data, out)
    of_a_tool = group_of(1, "#### 1")
    of_a_tool[0].messages[-1]["content"] = "#### \ud800 é"  # half of a pair, which is no UTF-8
    parts.write([(4, group_of(4, "#### 4")), (1, of_a_tool)])
    parts.close()
    (parts_folder(out) / ".part-000009.parquet.1.tmp").write_text("torn")
    parts = opened(data, out)
    assert parts.done.tolist() == [False, True, False, False, True, False]
    parts.write([(i, group_of(i, f"#### {i}")) for i in (5, 0, 3)])
    parts.write([(2, group_of(2, error="gone"))])
    assert not list(parts_folder(out).glob(".*.tmp"))
    parts.finish(data, out)
    assert not parts_folder(out).exists()
    table = pq.read_table(out)
    assert table["responses"].to_pylist() == [["#### 0"], ["#### ? é"], [""], ["#### 3"], ["#### 4"], ["#### 5"]]
    assert table["errors"].to_pylist() == [[None], [None], ["RunError: gone"], [None], [None], [None]]
    source = pq.read_table(data)
    for name in source.column_names:
        assert table[name].to_pylist() == source[name].to_pylist()


def test_what_json_has_no_form_for_in_a_message_is_written_as_text():
    group = group_of(0, "#### 8")
    group[0].messages.append({"role": "user", "content": "go on", "score": np.int64(3)})
    (text,) = response_table([(0, group)])["conversations"].to_pylist()[0]
    assert json.loads(text)[-1] == {"role": "user", "content": "go on", "score": "3"}


def test_parts_are_whole_or_gone(data, tmp_path, monkeypatch):
    """However far a process comes that is killed while it deletes them."""
    out = tmp_path / "out.parquet"
    parts = opened(data, out)
    parts.write([(i, group_of(i, "#### 8")) for i in range(6)])

    def killed(folder):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr("posttrain.generation.output.shutil.rmtree", killed)
        parts.finish(data, out)
    parts.close()
    assert pq.read_table(out).num_rows == 6
    assert not parts_folder(out).exists()
    out.unlink()
    again = opened(data, out)
    assert not again.done.any()
    again.close()
    assert [p.name for p in tmp_path.glob("*.gone")] == []


def test_parts_of_other_settings_are_refused_and_stay(data, tmp_path):
    out = tmp_path / "out.parquet"
    parts = opened(data, out)
    parts.write([(0, group_of(0, "#### 8"))])
    with pytest.raises(ConfigError, match="in use"):
        subprocess_open(data, out)
    parts.close()
    with pytest.raises(ConfigError, match=r"rollout\.n: 1 -> 2") as caught:
        opened(data, out, **{"rollout.n": 2})
    assert "--overwrite" in caught.value.hint
    copy = Path(shutil.copy(data, data.with_name("copy.parquet")))
    pq.write_table(pq.read_table(data).slice(1), data)
    with pytest.raises(ConfigError, match=r"the content of .* is another"):
        opened(data, out)
    assert opened(copy, out).done.sum() == 1  # wherever the same content lies


def subprocess_open(data, out):
    """Open the parts in another process, since locks are between processes; raises what that says."""
    program = (
        "import sys; from pathlib import Path; from posttrain.generation.output import *\n"
        "ResponseParts.open(Path(sys.argv[2]), manifest_of({'rollout.n': 1}, sys.argv[1], '1'), 6)"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, data, out],
        capture_output=True,
        text=True,
        env=os.environ | {"PYTHONPATH": ROOT},
    )
    if done.returncode:
        raise ConfigError(done.stderr)


def test_a_part_that_is_damaged_is_sampled_again(data, tmp_path):
    out = tmp_path / "out.parquet"
    parts = opened(data, out)
    for row in range(3):
        parts.write([(row, group_of(row, "#### 8"))])
    parts.close()
    part = parts_folder(out) / "part-000001.parquet"
    part.write_bytes(part.read_bytes()[:100])
    parts = opened(data, out)
    assert parts.done.tolist() == [True, False, True, False, False, False]
    assert "could not be read" in parts.notes[0]
    parts.write([(1, group_of(1, "#### 8"))])
    assert sorted(p.name for p in parts_folder(out).glob("part-*")) == [
        f"part-{number:06d}.parquet" for number in (0, 2, 3)
    ]


# ---------------------------------------------------------------------- the command, by a server


@pytest.fixture(autouse=True)
def _local_and_quick(monkeypatch):
    local_and_quick(monkeypatch)
    monkeypatch.setattr(generate, "_FLUSH_S", 0.05)


def flags(url, data, out, **more):
    return {
        "model.path": "builtin:tiny", "generate.data": str(data), "generate.out": str(out),
        "generate.endpoint.url": url, "generate.endpoint.retries": 0, "rollout.n": 2, **more,
    }  # fmt: skip


def reply(nth, body):
    """What a server says that honours seeds: the answer is made of prompt and seed alone."""
    said = zlib.crc32(json.dumps([body["prompt"], body["seed"]]).encode()) % 100
    ids = [*TOKENIZER(f"#### {said}", add_special_tokens=False)["input_ids"], EOS]
    return 200, {}, json.dumps({"choices": [{"text": "", "finish_reason": "stop", "token_ids": ids}]})


def serve(answer=reply):
    return serving(answer, read=lambda body: body, get=MODELS)


def sampled(url, data, out, **more):
    return generate.run(resolve("generate", "tiny-arith-generate", flags=flags(url, data, out, **more)))


def test_a_server_that_goes_away_stops_the_run_and_what_was_done_is_kept(data, tmp_path, monkeypatch):
    monkeypatch.setattr(generate, "_MOST_FAILED", 6)
    monkeypatch.setattr(generate, "_MOST_GROUPS", 2)
    broken = lambda nth, body: reply(nth, body) if nth <= 4 else (500, {}, "I am ill")  # noqa: E731
    out = tmp_path / "out.parquet"
    with serve(broken) as endpoint, pytest.raises(RunError, match=r"the last \d+ episodes failed.*I am ill"):
        sampled(endpoint.url, data, out, **{"generate.endpoint.concurrency": 1})
    assert not out.exists()
    with serve() as endpoint:
        sampled(endpoint.url, data, out)
        before = len(endpoint.requests)
    with serve() as endpoint:
        sampled(endpoint.url, data, tmp_path / "calm.parquet")
        assert before < len(endpoint.requests) == 12
    assert pq.read_table(out).equals(pq.read_table(tmp_path / "calm.parquet"))


def test_a_run_of_which_every_episode_fails_leaves_no_file_to_grade(data, tmp_path):
    """`eval` would take it for sampled, and never ask the server again."""
    out = tmp_path / "out.parquet"
    ill = serve(lambda nth, body: (500, {}, "I am ill"))
    with ill as endpoint, pytest.raises(RunError, match=r"all 12 episodes failed, the last with: .*I am ill"):
        sampled(endpoint.url, data, out)
    assert not out.exists()
    with serve() as endpoint:
        assert pq.read_table(sampled(endpoint.url, data, out))["errors"].to_pylist() == [[None, None]] * 6


def test_a_run_without_a_name_has_no_file(data):
    with pytest.raises(ConfigError, match=r"run\.name = '' is not a folder name"):
        generate.run(resolve("generate", {}, flags={"model.path": "builtin:tiny", "generate.data": str(data)}))


async def test_one_prompt_that_always_fails_stops_no_run_however_many_answers_it_has():
    class Played:
        def __init__(self, *outcomes):
            self.outcomes = list(outcomes)

        over = property(lambda self: not self.outcomes)

        async def finished(self, wait_s):
            error = None if self.outcomes.pop(0) else "the tool fails"
            return [[SimpleNamespace(error=error) for _ in range(128)]]

    class Recorder(list):
        def add(self, groups):
            self.extend(groups)

        async def write_if_due(self):
            pass

    pool, stop = SimpleNamespace(samplers=[1]), SimpleNamespace(requested=False)
    recorder = Recorder()
    await generate._play(Played(True, False, True, False), pool, recorder, stop)
    assert len(recorder) == 4
    with pytest.raises(RunError, match="the last 512 episodes failed, the last with: the tool fails"):
        await generate._play(Played(True, *[False] * 5), pool, Recorder(), stop)


def test_eval_says_that_a_tool_told_the_model_whether_it_was_right(data, tmp_path):
    tools = {
        "plain": {"rollout.tools": ["calculator"]},
        "told": {"rollout.tools": ["calculator", "checker"], "tools.checker.type": "gsm8k"},
    }
    files = {}
    with serve() as endpoint:
        for name, more in tools.items():
            files[name] = str(sampled(endpoint.url, data, tmp_path / f"{name}.parquet", **more))
    said = "warning: no scores of a benchmark: the model learns from calc_gsm8k_reward whether its answer is right"
    command = CliRunner()
    assert said in command.invoke(app, ["eval", files["told"]]).stdout
    assert "warning" not in command.invoke(app, ["eval", files["plain"]]).output
    both = command.invoke(app, ["eval", "--compare", files["plain"], files["told"], "--json"])
    assert said in both.stderr
    as_json = [json.loads(command.invoke(app, ["eval", files[name], "--json"]).stdout) for name in tools]
    assert [found["tells_answer"] for found in as_json] == [[], ["calc_gsm8k_reward"]]


def test_failures_are_rows_and_one_warning(data, tmp_path, capsys):
    some = lambda nth, body: reply(nth, body) if nth % 2 else (500, {}, "I am ill")  # noqa: E731
    with serve(some) as endpoint:
        rows = pq.read_table(sampled(endpoint.url, data, tmp_path / "out.parquet")).to_pylist()
    errors = [error for row in rows for error in row["errors"]]
    assert sum(error is not None and "I am ill" in error for error in errors) == 6
    assert sum(error is None for error in errors) == 6
    warnings = re.findall(r"^warning: step \d+: (.*)$", capsys.readouterr().err, flags=re.MULTILINE)
    assert 1 <= len(warnings) <= 3  # once, and again where it is worse
    assert all(re.match(r"\d of \d+ episodes failed .*; the first: .*I am ill", text) for text in warnings)


async def test_engines_that_are_all_gone_end_the_run():
    """And no row says that it failed for that."""
    pool = SamplerPool([ScriptedSampler("#### 8", WorkerError("worker 0 died"))])

    class Recorded:
        rows = []  # noqa: RUF012

        def add(self, groups):
            self.rows += groups

        async def write_if_due(self):
            pass

    prompts = iter([gsm8k_prompt(index=i) for i in range(4)])
    async with Window(pool, environment(), ON_POLICY, prompts, n=1, most=1, seed=0) as window:
        with pytest.raises(WorkerError, match="worker 0 died"):
            await generate._play(window, pool, Recorded(), type("Stop", (), {"requested": False}))
    assert [group[0].error for group in Recorded.rows] == [None]


def test_what_is_there_is_not_replaced_but_reused_where_asked(data, tmp_path):
    out = tmp_path / "out.parquet"
    with serve() as endpoint:
        sampled(endpoint.url, data, out)
        first = len(endpoint.requests)
        with pytest.raises(DataError, match="output file exists"):
            sampled(endpoint.url, data, out)
        given = flags(endpoint.url, data, out)
        assert generate.run(resolve("generate", "tiny-arith-generate", flags=given), reuse=True) == out
        assert len(endpoint.requests) == first
        for change, message in (({"rollout.n": 3}, "rollout.n: 2 -> 3"), ({"generate.limit": 5}, "it has 6 prompts")):
            changed = resolve("generate", "tiny-arith-generate", flags=given | change)
            with pytest.raises(DataError, match=message):
                generate.run(changed, reuse=True)
        sampled(endpoint.url, data, out, **{"run.overwrite": True, "rollout.n": 1})
    assert [len(row) for row in pq.read_table(out)["responses"].to_pylist()] == [1] * 6
    # A process that was ended when the file was there and its parts were not yet gone:
    parts = ResponseParts.open(out, json.loads(pq.read_schema(out).metadata[b"posttrain.generation.command"]), 6)
    parts.write([(row, group_of(row, "#### 8")) for row in range(6)])
    parts.close()
    with serve() as endpoint:
        sampled(endpoint.url, data, out, **{"rollout.n": 1})
        assert endpoint.requests == []
    assert not parts_folder(out).exists()


def test_a_server_that_does_not_answer_leaves_all_as_it_was(data, tmp_path):
    out = tmp_path / "out.parquet"
    out.write_bytes(b"of another command")
    with serve() as endpoint:
        gone = endpoint.url
    for place in (out, tmp_path / "new.parquet"):
        with pytest.raises(ConfigError, match="gives no list of models"):
            sampled(gone, data, place, **{"run.overwrite": True})
    assert sorted(path.name for path in tmp_path.iterdir()) == ["data", "out.parquet"]
    assert out.read_bytes() == b"of another command"


def test_the_prompts_are_never_replaced(data, tmp_path):
    before = data.read_bytes()
    link = tmp_path / "link.parquet"
    link.symlink_to(data)
    for out in (data, link):
        with pytest.raises(ConfigError, match="would replace"):
            sampled("http://127.0.0.1:9", data, out, **{"run.overwrite": True})
    assert data.read_bytes() == before
    assert not parts_folder(data).exists()


def test_a_model_that_was_trained_again_is_another(data, tmp_path):
    """In a folder of the same name: what the old weights answered is not what the new ones do."""
    model = create_builtin("tiny", 0)
    model.save_pretrained(tmp_path / "model")
    given = {"model.path": str(tmp_path / "model")}
    cfg = resolve("generate", "tiny-arith-generate", flags=given).config
    before = manifest_of(generate.settings_of(cfg, locate(cfg.model.path)), data, "1")
    assert differences(before, manifest_of(generate.settings_of(cfg, locate(cfg.model.path)), data, "2")) == []
    create_builtin("tiny", 1).save_pretrained(tmp_path / "model")
    (line,) = differences(before, manifest_of(generate.settings_of(cfg, locate(cfg.model.path)), data, "1"))
    assert line.startswith("model.files: ")
    checkpoint = tmp_path / "global_step_1"
    (checkpoint / "actor" / "model").mkdir(parents=True)
    source = ModelSource("x", shards=str(checkpoint / "actor" / "model"))
    marks = []
    for text in ("one", "one", "two"):  # the digests of its files, whenever they were written
        (checkpoint / "COMPLETE").write_text(text)
        marks.append(mark_of(source))
    assert marks[0] == marks[1] != marks[2]
    assert mark_of(ModelSource("builtin:tiny")) is None


def test_what_computes_rows_in_another_type_gives_other_rows(data):
    cfgs = [
        resolve("generate", "tiny-arith-generate", flags={"train.dtype": kind}).config
        for kind in ("float32", "bfloat16")
    ]
    before, now = (manifest_of(generate.settings_of(cfg, locate("builtin:tiny")), data, "1") for cfg in cfgs)
    assert differences(before, now) == ["train.dtype: 'float32' -> 'bfloat16'"]


def test_ctrl_c_keeps_what_is_done(data, tmp_path):
    def slow(nth, body):
        if nth == 6:
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(0.3)
        return reply(nth, body)

    out = tmp_path / "out.parquet"
    with serve(slow) as endpoint, pytest.raises(Interrupted, match=r"stopped after [1-5] of 6 prompts") as caught:
        sampled(endpoint.url, data, out, **{"generate.endpoint.concurrency": 1})
    assert caught.value.exit_code == 130
    with serve() as endpoint:
        sampled(endpoint.url, data, out)
        assert 0 < len(endpoint.requests) < 12


@pytest.mark.slow
def test_killed_twice_it_writes_the_rows_of_a_calm_run(tmp_path, monkeypatch):
    """scripts/chaos_generate.py does it with an engine."""
    prep.run("arith", out=str(tmp_path / "data"), seed=0, limit=150)
    data = tmp_path / "data" / "test.parquet"
    out, calm = tmp_path / "out.parquet", tmp_path / "calm.parquet"

    def slow(nth, body):
        time.sleep(0.02)
        return reply(nth, body)

    with serve(slow) as endpoint:
        more = {"rollout.n": 1, "generate.endpoint.concurrency": 4, "generate.endpoint.retries": 4}
        sampled(endpoint.url, data, calm, **more)
        asked = len(endpoint.requests)
        given = flags(endpoint.url, data, out, **more)
        sets = [word for key, value in given.items() for word in ("--set", f"{key}={json.dumps(value)}")]
        program = (
            "import sys; from posttrain.generation import command; command._FLUSH_S = 0.05\n"
            "from posttrain.cli import main; main()"
        )
        line = [sys.executable, "-c", program, "generate", "--preset", "tiny-arith-generate", *sets]
        kills = 0
        while True:
            process = subprocess.Popen(line, env=os.environ | {"PYTHONPATH": str(ROOT)}, stderr=subprocess.DEVNULL)
            target = len(endpoint.requests) + 50
            while process.poll() is None and (kills == 2 or len(endpoint.requests) < target):
                time.sleep(0.01)
            if process.poll() is not None:
                break
            process.kill()
            process.wait()
            kills += 1
        assert process.returncode == 0
        assert asked < len(endpoint.requests) < 2 * asked + 2 * 60  # what was done was not sampled again
    assert kills == 2
    assert pq.read_table(out).equals(pq.read_table(calm))
    assert not parts_folder(out).exists()

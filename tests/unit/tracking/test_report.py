"""The report: what of a run is in it, what is left out, that text stays text, and that a run does not depend on it."""

from __future__ import annotations

import base64
import io
import json
import re
import threading
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

from posttrain.cli import app
from posttrain.core.errors import ConfigError
from posttrain.core.types import Message
from posttrain.data.images import RawImage
from posttrain.rollout.advantage_files import advantages_file, read_advantages
from posttrain.runs import report
from posttrain.tracking.report import thumbnails
from posttrain.tracking.report.background import Reporter
from posttrain.tracking.report.collect import Collector
from posttrain.tracking.report.details import LOGPROB_SCALE
from posttrain.tracking.report.episodes import Numbers, choose
from posttrain.tracking.report.folder import RunFolder
from posttrain.tracking.report.page import MOST_BYTES, write_page
from posttrain.tracking.report.pieces import Pieces, Splitter
from posttrain.tracking.report.thumbnails import Thumbnails
from tests.helpers.seeing import picture
from tests.helpers.written_runs import HOSTILE, TOKENIZER, branched, episode, many, write_run


@pytest.fixture(scope="module")
def run_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    steps = many(steps=3, groups=2, n=2)
    steps[1][0][0] = episode(0, 1.0, HOSTILE, step=2)
    return write_run(tmp_path_factory.mktemp("runs"), "a", steps)


def block(page: str, name: str) -> bytes:
    found = re.search(rf'id="{name}">([^<]*)<', page)
    assert found is not None
    return zlib.decompress(base64.b64decode(found[1]))


def read(page: Path) -> tuple[dict[str, Any], bytes]:
    text = page.read_text(encoding="utf-8")
    # A browser refuses the NaN and Infinity of Python's JSON, and would show nothing.
    data: dict[str, Any] = json.loads(block(text, "data"), parse_constant=pytest.fail)
    return data, block(text, "tokens")


def test_what_is_in_a_page(run_path: Path, tmp_path: Path) -> None:
    page = report.run([str(run_path)], "runs", tmp_path / "page.html")
    data, tokens = read(page)
    (run,) = data["runs"]
    assert (run["name"], run["status"], run["episodes"], run["shown"], run["problems"]) == ("a", "finished", 12, 12, [])
    assert run["curves"]["steps"] == [1, 2, 3]
    assert run["curves"]["values"]["actor/entropy"] == [None] * 3  # it was not a number
    assert run["settings"]["rollout.n"] == ["8", "preset tiny-arith"]
    assert run["settings"]["train.epochs"][1] == "default"
    assert run["versions"]["torch"]
    parts = run["distributions"]["of"]
    assert np.sum(parts["reward"]["counts"]) == 12
    assert parts["reward"]["edges"] == [0.0, 1.0]
    assert parts["staleness"]["edges"] == [0]
    assert parts["gap"]["edges"] == ["<1e-6", "<0.001", "more"]
    assert np.allclose(parts["gap"]["counts"], [[0.5, 0.5, 0.0]] * 3)

    first = next(e for e in data["episodes"] if e["step"] == 1)
    expected = episode(0, first["reward"], step=1)
    own = [m for m in first["messages"] if "count" in m]
    assert [m["role"] for m in first["messages"]] == ["user", "assistant", "tool", "assistant"]
    assert first["messages"][2]["name"] == "calc_gsm8k_reward"
    count = data["tokens"]
    columns = np.frombuffer(tokens, np.uint8).reshape(5, count)
    texts = [data["pieces"][i] for i in columns[0] + 256 * columns[1].astype(int)]
    for message, wanted in zip(own, [m for m in expected.messages if m["role"] == "assistant"], strict=True):
        assert "".join(texts[message["first"] :][: message["count"]]) == wanted["content"] + "<|im_end|>"
        assert message["versions"] == [0]
    sampled = slice(own[0]["first"], own[0]["first"] + own[0]["count"])
    start = expected.prompt_length
    logprobs = -((columns[3][sampled] / LOGPROB_SCALE) ** 2)
    assert np.abs(logprobs - expected.logprobs[start : start + own[0]["count"]]).max() < 0.1
    advantages = columns[4][sampled].view(np.int8) / 127 * first["scale"]
    assert np.allclose(advantages, first["reward"] - 0.5, atol=0.01)


def test_text_of_models_cannot_be_read_as_markup(run_path: Path, tmp_path: Path) -> None:
    page = report.run([str(run_path)], "runs", tmp_path / "page.html")
    text = page.read_text(encoding="utf-8")
    assert text.count("<script") == 3
    assert "alert" not in text
    assert "\u202e" not in text
    data, _ = read(page)
    assert "alert" in json.dumps(data, ensure_ascii=False) or "alert" in "".join(data["pieces"])
    policy = re.search(r'Content-Security-Policy" content="([^"]*)"', text)
    assert policy is not None
    assert policy[1].startswith("default-src 'none'; base-uri 'none'; form-action 'none'")
    assert "unsafe" not in policy[1]
    assert not re.search(r"\b(?:src|href)=[\"']?(?:https?:)?//", text)


def test_a_file_that_exists_is_kept_unless_overwrite_is_given(run_path: Path, tmp_path: Path) -> None:
    page, own = tmp_path / "keep.html", run_path / "report.html"
    for file in (page, own):
        file.write_text("keep")
    line = ["report", str(run_path), "--out", str(page)]
    done = CliRunner().invoke(app, line)
    assert (done.exit_code, page.read_text()) == (2, "keep"), done.output
    assert "give --overwrite, or another --out" in done.output
    assert CliRunner().invoke(app, [*line, "--overwrite"]).exit_code == 0
    assert CliRunner().invoke(app, ["report", str(run_path)]).exit_code == 0
    assert all("<title>" in file.read_text() for file in (page, own))


def test_a_page_replaces_no_file_of_another_kind(run_path: Path) -> None:
    metrics = run_path / "metrics.jsonl"
    before = metrics.read_bytes()
    done = CliRunner().invoke(app, ["report", str(run_path), "--out", str(metrics), "--overwrite"])
    assert (done.exit_code, metrics.read_bytes()) == (2, before), done.output
    assert "the name of a page ends with .html" in done.stderr
    assert f"hint: --out {run_path / 'metrics.html'}" in done.stderr


def test_a_name_in_the_title_is_escaped(tmp_path: Path) -> None:
    path = write_run(tmp_path, "x", [[]])
    path = path.rename(path.with_name("<b>\u202ex"))  # a name that no run begins with
    text = report.run([str(path)], "runs", None).read_text(encoding="utf-8")
    assert "<title>&lt;b&gt;\N{REPLACEMENT CHARACTER}x · posttrain report</title>" in text


def test_pieces_join_to_the_text_whatever_it_is() -> None:
    pieces = Pieces()
    splitter = Splitter(TOKENIZER, pieces)
    table = pieces.table
    for text in (HOSTILE, " leading", "日本語 ñandú 🙂🙃", "a\n\n  b\tc", "<|im_end|>"):
        ids = TOKENIZER.encode(text, add_special_tokens=False)
        numbers = splitter.split(ids)
        assert len(numbers) == len(ids)
        names = list(table)
        assert "".join(names[i] for i in numbers) == text


def test_runs_and_seeds_side_by_side(tmp_path: Path) -> None:
    for name, seed, sets in (("a", 0, ()), ("b", 1, ()), ("c", 0, ("train.optim.lr=0.1",))):
        write_run(tmp_path, name, many(1, 1, 2), sets, seed)
    page = report.run(["a", "b", "c"], str(tmp_path), None)
    assert page == tmp_path / "report-a-b-c.html"
    data, _ = read(page)
    assert [run["group"] for run in data["runs"]] == [0, 0, 1]
    assert [run["settings"]["train.optim.lr"] for run in data["runs"]][1:] == [
        ["0.0002", "preset tiny-arith"], ["0.1", "--set"],
    ]  # fmt: skip
    assert {e["run"] for e in data["episodes"]} == {0, 1, 2}


def test_runs_of_one_name_in_two_folders_are_told_apart_by_their_paths(tmp_path: Path) -> None:
    paths = [str(write_run(tmp_path / folder, name, many(1, 1, 2))) for folder, name in ("xa", "ya", "yb")]
    data, _ = read(report.run(paths, "runs", tmp_path / "page.html"))
    assert [run["name"] for run in data["runs"]] == [*paths[:2], "b"]


def test_another_tokenizer_or_none_leaves_text_without_colours(run_path: Path, tmp_path: Path) -> None:
    path = write_run(tmp_path, "a", many(1, 1, 2), [])
    config = (path / "config.toml").read_text().replace("builtin:tiny", str(tmp_path / "gone"))
    (path / "config.toml").write_text(config)
    data, tokens = read(report.run([str(path)], "runs", None))
    assert tokens == b""
    assert "tokenizer" in data["runs"][0]["uncoloured"]
    assert data["episodes"][0]["messages"][-1] == {"role": "assistant", "text": "#### 6"}


def test_shows_rollouts_without_a_file_of_advantages(tmp_path: Path) -> None:
    path = write_run(tmp_path, "a", many(1, 1, 2))
    advantages_file(path / "rollouts" / "step_000001.parquet").unlink()
    data, _ = read(report.run([str(path)], "runs", None))
    assert [e["scale"] for e in data["episodes"]] == [None, None]


def test_names_a_damaged_rollout_file_and_shows_the_rest(tmp_path: Path) -> None:
    path = write_run(tmp_path, "a", many(2, 1, 2))
    (path / "rollouts" / "step_000001.parquet").write_bytes(b"PAR1 no")
    data, _ = read(report.run([str(path)], "runs", None))
    assert "step_000001.parquet: unreadable" in data["runs"][0]["problems"][0]
    assert [e["step"] for e in data["episodes"]] == [2, 2]


def test_branches_of_an_episode_lie_together_and_tell_where_they_fork(tmp_path: Path) -> None:
    group = [episode(0, 1.0), *branched(0.25), *branched(0.0, error="RunError: the agent failed: no idea")]
    path = write_run(tmp_path, "a", [[group, [episode(1, 0.0)]]])
    data, _ = read(report.run([str(path)], "runs", None))
    rows = data["episodes"]
    assert [(e["episode"], e["branch"], e["branches"]) for e in rows] == [
        (1, 0, 1), *((2, k, 3) for k in range(3)), *((3, k, 3) for k in range(3)), (4, 0, 1),
    ]  # fmt: skip
    last, own, sub = rows[1:4]
    assert [m["role"] for m in last["messages"]] == ["user", "assistant", "user", "assistant"]
    # The question and the first answer are those of the branch that the last one forks off, token by token.
    tokens_of_first = len(TOKENIZER.encode("one", add_special_tokens=False)) + 1
    branch, messages, tokens = last["fork"]
    assert (branch, messages) == (1, 2)
    assert own["prompt_tokens"] + tokens_of_first <= tokens < last["prompt_tokens"]
    assert (own["fork"], sub["fork"]) == (None, None)
    assert [e["sampled"] for e in (last, sub)] == [
        len(TOKENIZER.encode(said, add_special_tokens=False)) + 1 for said in ("three", "sub")
    ]
    assert {e["error"] for e in rows[4:7]} == {"RunError: the agent failed: no idea"}
    assert [e["scale"] for e in rows[4:7]] == [None] * 3
    files, _ = Numbers().read(path / "rollouts")
    assert choose(files, most=3, most_tokens=10**9) == [(0, 0)]  # no episode is shown in part


def test_rewards_of_turns_stand_beside_them(tmp_path: Path) -> None:
    played = episode(0, 0.75)
    played.turn_rewards = np.array([0.5, 0.25], np.float32)
    cut_off = episode(1, 0.5)
    cut_off.turn_rewards = np.array([0.5], np.float32)  # its last turn was not answered
    data, _ = read(report.run([str(write_run(tmp_path, "a", [[[played, cut_off, episode(2, 0.0)]]]))], "runs", None))
    rewards = [[m.get("reward") for m in e["messages"] if m["role"] == "assistant"] for e in data["episodes"]]
    assert rewards == [[0.5, 0.25], [0.5, None], [None, None]]
    assert "turn_rewards" not in data["episodes"][0]["more"]


def test_rewards_that_are_not_finite_are_text(tmp_path: Path) -> None:
    """A tool gave one, for which the episode failed."""
    failed = episode(0, 0.0)
    failed.error, failed.reward_parts = "reward: the part tool/calc of the reward is nan", {"tool/calc": float("nan")}
    failed.turn_rewards = np.array([0.5, np.inf], np.float32)
    data, _ = read(report.run([str(write_run(tmp_path, "a", [[[failed, episode(1, 1.0)]]]))], "runs", None))
    shown = data["episodes"][0]
    assert shown["parts"] == {"tool/calc": "nan"}
    assert [m["reward"] for m in shown["messages"] if m["role"] == "assistant"] == [0.5, "inf"]


@pytest.mark.parametrize("others", [1, 30])
def test_rewards_whose_distance_is_infinite_leave_the_page_readable(others: int, tmp_path: Path) -> None:
    """As of a reward function that measures how far off an answer is, of a model that says 1e308."""
    rewards = [-1.7e308, 1.7e308, *map(float, range(others))]
    run = write_run(tmp_path, "a", [[[episode(number, reward)] for number, reward in enumerate(rewards)]])
    data, _ = read(report.run([str(run)], "runs", None))
    assert sum(map(sum, data["runs"][0]["distributions"]["of"]["reward"]["counts"])) == len(rewards)


def test_large_values_have_a_finite_mean(tmp_path: Path) -> None:
    rows = [{"step": step, "critic/score/mean": -1.7e308} for step in range(3000)]
    assert set(RunFolder(tmp_path, {}, {}, {}, rows).curves()["values"]["critic/score/mean"]) == {-1.7e308}


def test_images_are_shown_small_beside_what_names_them(tmp_path: Path) -> None:
    """Those of the prompt in every episode of a group, a tool's in its own; bytes that are no image in none."""
    group = [episode(0, float(number)) for number in range(3)]
    for number, one in enumerate(group):
        one.prompt.messages[0]["content"] = "<image>, <image> or <image>?"
        one.prompt.images.extend([{"bytes": picture(300, 200)}, {"bytes": HOSTILE.encode()}, {"path": "gone.png"}])
        told: Message = {"role": "tool", "name": "zoom", "content": "<image>"}
        one.messages = [one.prompt.messages[0], *one.messages[1:], told]
        one.tool_images.append({"bytes": picture(48, 48, seed=number)})
    words = episode(1, 0.5)
    words.messages = [{"role": "user", "content": "The word <image>."}, *words.messages[1:]]
    page = report.run([str(write_run(tmp_path, "a", [[group, [words]]]))], "runs", None)
    data, _ = read(page)
    shown = [[m["images"] for m in e["messages"] if "images" in m] for e in data["episodes"]]
    assert sorted(map(str, shown)) == sorted(map(str, [[[0, -1, -1], [1]], [[0, -1, -1], [2]], [[0, -1, -1], [3]], []]))
    sizes = []
    for url in data["thumbnails"]:
        head, _, body = url.partition(",")
        assert head == "data:image/jpeg;base64"
        sizes.append(RawImage(base64.b64decode(body, validate=True)).decode().size)
    assert sizes == [(75, 112), (48, 48), (48, 48), (48, 48)]
    assert "tool_images" not in data["episodes"][0]["more"]


def test_thumbnails_take_a_bounded_part_of_the_page(monkeypatch: pytest.MonkeyPatch) -> None:
    made = Thumbnails()
    numbers = [made.add({"bytes": picture(112, 112, seed)}) for seed in (*range(9), 0)]
    assert numbers == [*range(9), 0]
    monkeypatch.setattr(thumbnails, "MOST_CHARACTERS", sum(map(len, made.table[:4])) + 5)
    bounded = Thumbnails()
    assert [bounded.add({"bytes": picture(112, 112, seed)}) for seed in (*range(9), 0)] == [*range(4), *[-1] * 5, 0]


def test_a_thumbnail_has_nothing_but_the_picture() -> None:
    from PIL import Image

    file = io.BytesIO()
    Image.new("RGB", (64, 64)).save(file, "JPEG", comment=b"x" * 60_000, icc_profile=b"y" * 60_000)
    made = Thumbnails()
    assert made.add({"bytes": file.getvalue()}) == 0
    assert len(made.table[0]) < 3000


def test_seconds_of_rare_phases_add_up_where_a_point_is_the_mean_of_several_steps(tmp_path: Path) -> None:
    rows = [{"step": step, "val/loss": 2.0, "timing_s/save": 30.0} if step % 100 == 0 else {"step": step}
            for step in range(1, 3001)]  # fmt: skip
    curves = RunFolder(tmp_path, {}, {}, {}, rows).curves()
    seconds = curves["values"]["timing_s/save"]
    assert curves["every"] == 2
    assert sum(value or 0.0 for value in seconds) * curves["every"] == 30 * 30.0
    assert {value for value in seconds if value is not None} == {15.0}
    assert {value for value in curves["values"]["val/loss"] if value is not None} == {2.0}


def test_what_is_chosen_has_best_worst_failed_and_every_step(tmp_path: Path) -> None:
    steps = many(steps=20, groups=4, n=4)
    steps[6][1][1].reward, steps[12][2][2].reward = 9.0, -9.0
    path = write_run(tmp_path, "a", steps)
    files, _ = Numbers().read(path / "rollouts")
    chosen = choose(files, most=80, most_tokens=10**9)
    assert len(chosen) == 80
    assert chosen == choose(files, most=80, most_tokens=10**9)
    assert {(6, 5), (12, 10)} <= set(chosen)
    assert {number for number, row in chosen if files[number].failed[row]} == {9, 19}
    assert {number for number, _ in chosen} == set(range(20))
    few = choose(files, most=80, most_tokens=500)
    assert sum(int(files[number].tokens[row]) for number, row in few) <= 500


def test_twenty_thousand_trajectories_fit(tmp_path: Path) -> None:
    path = write_run(tmp_path, "a", many(steps=25, groups=100, n=8, words=60))
    page = report.run([str(path)], "runs", None)
    assert page.stat().st_size < 5_000_000
    data, _ = read(page)
    (run,) = data["runs"]
    assert run["episodes"] == 20_000
    assert 100 < run["shown"] == len(data["episodes"]) < 1000
    assert np.sum(run["distributions"]["of"]["reward"]["counts"]) == 20_000 - 2


def test_a_page_that_would_be_too_large_shows_less(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write_run(tmp_path, "a", many(steps=4, groups=4, n=4, words=100))
    whole = write_page(tmp_path / "whole.html", [path])
    monkeypatch.setattr("posttrain.tracking.report.page.MOST_BYTES", whole - 10_000)
    assert write_page(tmp_path / "less.html", [path]) <= whole - 10_000 < MOST_BYTES
    assert 0 < read(tmp_path / "less.html")[0]["runs"][0]["shown"] < 64


def test_wrong_names_are_one_message(run_path: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no run 'ab'") as error:
        report.run(["ab"], str(run_path.parent), None)
    assert error.value.hint == "did you mean 'a'?"
    with pytest.raises(ConfigError, match="twice"):
        report.run([str(run_path), "a"], str(run_path.parent), None)
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="cannot write"):
        report.run([str(run_path)], "runs", tmp_path / "file" / "page.html")
    with pytest.raises(ConfigError, match="is not a run folder"):
        RunFolder.read(tmp_path)


@pytest.mark.parametrize("name", ["run.json", "provenance.json"])
def test_a_damaged_file_of_a_run_is_named(name: str, tmp_path: Path) -> None:
    path = write_run(tmp_path, "a", [[]])
    (path / name).write_text("[1]")
    done = CliRunner().invoke(app, ["report", str(path)])
    assert done.exit_code == 2, done.output
    assert f"{name} does not hold a JSON object" in done.stderr


def test_a_run_does_not_wait_for_its_report_nor_fail_with_it(tmp_path: Path) -> None:
    path = write_run(tmp_path, "a", many(1, 1, 2))
    notes: list[str] = []
    reporter = Reporter(path, notes.append)
    go = threading.Event()
    collect = Collector.collect

    class Slow(Collector):
        def collect(self, *arguments: Any, **named: Any) -> Any:
            assert go.wait(30)
            return collect(self, *arguments, **named)

    reporter._collector = Slow()
    reporter.refresh()
    reporter.refresh()
    assert not reporter.file.exists()
    assert not reporter.finish(0.01)
    assert notes == [
        f"warning: no report: it was not made within 0.01 s (`posttrain report {path.name}` makes it later)"
    ]
    go.set()
    assert Reporter(path, notes.append).finish(30)
    assert read(reporter.file)[0]["runs"][0]["name"] == "a"

    (path / "run.json").unlink()
    broken = Reporter(path, notes.append)
    assert not broken.finish(30)
    assert not broken.finish(30)
    assert len(notes) == 2
    assert "is not a run folder" in notes[1]


def test_advantages_are_those_of_the_rows(run_path: Path) -> None:
    found = read_advantages(advantages_file(run_path / "rollouts" / "step_000001.parquet"))
    assert list(found) == [0, 1, 2, 3]
    trained_with = many(1, 2, 2)[0][0][1].advantages
    assert trained_with is not None
    assert np.array_equal(found[1], trained_with)

"""The report in a browser: it draws, finds and opens, by mouse and by keyboard, and what models wrote stays text."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from posttrain.runs import report
from tests.browser.pages import drawn, opened
from tests.helpers.written_runs import HOSTILE, branched, episode, many, write_run

pytestmark = pytest.mark.browser


def test_a_run(tmp_path: Path) -> None:
    steps = many(steps=3, groups=2, n=2)
    steps[2][1][1] = episode(7, 1.0, HOSTILE, step=3)
    steps[2][1][1].extracted = HOSTILE
    page_file = report.run([str(write_run(tmp_path, "a", steps))], "runs", None)
    with opened(page_file) as page:
        assert page.inner_text("h1").startswith("a")
        assert drawn(page, '[data-metric="critic/score/mean"]')
        assert drawn(page, "#time .plot")
        assert "cut" not in page.inner_text("#time")
        assert page.locator('[data-histogram="reward"] rect').count() == 2
        page.locator("summary").click()
        page.wait_for_selector('[data-metric="timing_s/gen"] canvas')

        page.keyboard.press("/")
        page.keyboard.type("onerror=ALERT")
        page.get_by_text("1 shown", exact=True).wait_for()
        detail = page.locator("#detail")
        assert "</script><script>alert(1)</script>" in page.inner_text("#detail").replace("\n", "")
        assert detail.locator("script, img").count() == 0
        assert detail.locator(".ctl", has_text="U+202E").count() == 2  # in the turn, and in the answer found
        assert detail.locator(".ctl", has_text="U+001B").count() == 2
        assert "é🙂" in page.inner_text("#detail")
        page.keyboard.press("Escape")
        page.get_by_text("12 shown", exact=True).wait_for()

        page.select_option("#by-sort", "worst")
        page.locator("#list .row").first.click()
        for colour, tone in (("advantage", "--low"), ("logprob", "--cold")):
            page.select_option("#by-colour", colour)
            assert tone in str(detail.locator("[data-t]").nth(1).get_attribute("style"))
        detail.locator("[data-t]").nth(1).hover()
        assert "log-probability" in page.inner_text("#tip")
        page.locator("#list .row").first.focus()
        page.keyboard.press("ArrowDown")
        chosen = "[...document.querySelectorAll('.row')].findIndex(row => row.getAttribute('aria-selected') === 'true')"
        assert page.evaluate(chosen) == 1
        assert "rollout.n" in page.inner_text("#settings")


def test_runs_side_by_side_in_the_dark(tmp_path: Path) -> None:
    for name, seed, sets in (("a", 0, ()), ("b", 1, ()), ("c", 0, ("train.optim.lr=0.1",))):
        write_run(tmp_path, name, many(2, 1, 2), sets, seed)
    with opened(report.run(["a", "b", "c"], str(tmp_path), None), "dark") as page:
        assert page.inner_text("h1") == "3 runs"
        assert "mean" in page.inner_text("#head")
        assert drawn(page, '[data-metric="critic/score/mean"]')
        assert "train.optim.lr" in page.inner_text("#settings table")
        page.select_option("#run", label="c")
        assert "c/rollouts" in page.inner_text("#trajectories .lead")
        assert page.locator("#list .row").count() == 4


def test_branches_of_an_agent_are_listed_with_their_episode(tmp_path: Path) -> None:
    failed = branched(0.0, error="RunError: the agent failed: no idea")
    run = write_run(tmp_path, "a", [[[episode(0, 1.0), *branched(0.25), *failed]]])
    with opened(report.run([str(run)], "runs", None)) as page:
        page.select_option("#by-outcome", "branches")
        page.get_by_text("6 shown", exact=True).wait_for()
        page.select_option("#by-sort", "worst")
        rows = page.locator("#list .row")
        heads = page.locator("#list .row span:first-child").all_text_contents()
        assert heads == ["step 1 · prompt 0 · branch 1 of 3", "branch 2 of 3", "branch 3 of 3"] * 2
        assert "the agent failed: no idea" in str(rows.first.text_content())
        rows.nth(3).dispatch_event("click")  # by no place on the page: it moves while plots are drawn
        branches = page.get_by_label("Branches of this episode").locator("button")
        told = branches.all_inner_texts()
        assert told[0].startswith("branch 1 of 3, the last · forks off branch 2 after 2 messages (")
        assert "begins with a prompt of its own" in told[1]
        assert told[1].endswith("tokens trained on")
        branches.nth(2).dispatch_event("click")
        assert "a question of a sub-agent" in page.inner_text("#detail")
        assert "branch 3 of 3" in str(page.locator('.row[aria-selected="true"]').text_content())


TEXTS = """() => {
  const texts = new Map();
  const draw = CanvasRenderingContext2D.prototype.fillText;
  CanvasRenderingContext2D.prototype.fillText = function (text, ...where) {
    const card = this.canvas.closest("[data-metric]")?.dataset.metric ?? "";
    texts.set(card, [...(texts.get(card) ?? []), text]);
    return draw.call(this, text, ...where);
  };
  plots.forEach((plot) => plot.redo());
  return new Promise((done) => setTimeout(() => done(Object.fromEntries(texts)), 300));
}"""
"""Draws all plots again, and returns the texts on the canvas of each metric."""


def with_metrics(run: Path, rows: list[dict[str, float]]) -> Path:
    lines = [json.dumps({"step": step, "time": 0.0} | row) for step, row in enumerate(rows, start=1)]
    (run / "metrics.jsonl").write_text("\n".join(lines))
    return run


def test_a_long_first_step_is_cut_with_a_mark_and_no_tick_comes_twice(tmp_path: Path) -> None:
    rows = [
        {"critic/score/mean": 12345 + step / 100, "timing_s/gen": seconds, "timing_s/step": seconds}
        for step, seconds in enumerate([68.0, *[5.0] * 30])
    ]
    run = with_metrics(write_run(tmp_path, "a", many(1, 1, 2)), rows)
    with opened(report.run([str(run)], "runs", None)) as page:
        assert drawn(page, '[data-metric="critic/score/mean"]')
        assert drawn(page, "#time .plot")
        texts = page.evaluate(TEXTS)["critic/score/mean"]
        assert len(texts) == len(set(texts)) > 4
        assert "Bars with a gap are cut: step 1 took 68 s." in page.inner_text("#time")


def test_warnings_are_on_top_as_text(tmp_path: Path) -> None:
    run = write_run(tmp_path, "a", many(1, 1, 2))
    lines = [
        {"name": "graders_fail", "level": level, "step": level, "text": f"{level} {HOSTILE}", "hint": "mend it"}
        for level in (1, 2)
    ]
    (run / "warnings.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    with opened(report.run([str(run)], "runs", None), width=420) as page:
        box = page.get_by_role("region", name="Warnings")
        assert box.inner_text().startswith("1 warning\nstep 2")
        assert "<script>alert(1)</script>" in box.inner_text()
        assert "hint: mend it" in box.inner_text()
        assert box.bounding_box()["y"] < page.locator(".tiles").bounding_box()["y"]  # type: ignore[index]


def test_a_failed_run_and_its_neighbours_on_a_phone(tmp_path: Path) -> None:
    """Nothing is wider than the screen, words stay whole, and what failed does not wait for a first step."""
    failed = write_run(tmp_path, "failed-before-its-first-step", [[]], status="failed")
    (failed / "metrics.jsonl").write_text("")
    write_run(tmp_path, "b", many(3, 1, 2))
    with opened(report.run([str(failed)], "runs", None), width=420) as page:
        assert page.inner_text("h1").endswith("failed")
        assert "No step was finished." in page.inner_text("#curves")
        assert "yet" not in page.inner_text("main")
        assert page.locator(".tiles").count() == 0
        assert page.evaluate("document.documentElement.scrollWidth") == 420
    with opened(report.run([failed.name, "b"], str(tmp_path), None), width=420) as page:
        assert page.evaluate("document.documentElement.scrollWidth") == 420
        states = page.locator("table.runs .state")
        assert states.all_inner_texts() == ["failed", "finished"]
        assert all(states.nth(i).bounding_box()["height"] < 30 for i in range(2))  # type: ignore[index]
        assert page.locator("nav").bounding_box()["height"] < 60  # type: ignore[index]
        assert drawn(page, '[data-metric="critic/score/mean"]')

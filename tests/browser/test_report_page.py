"""The report in a browser: it draws, finds and opens, by mouse and by keyboard, and what models wrote stays text."""

from __future__ import annotations

from pathlib import Path

import pytest

from posttrain import report
from tests.browser.pages import drawn, opened
from tests.unit.written_runs import HOSTILE, episode, many, write_run

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
        assert "c/traces" in page.inner_text("#trajectories .lead")
        assert page.locator("#list .row").count() == 4

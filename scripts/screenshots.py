#!/usr/bin/env python
"""Make pictures of runs with Chromium (POSTTRAIN_CHROMIUM, or one on the PATH): their reports, on a desktop and on a
phone (420 px), and the panel of the first one after its last step, in terminals of 60, 108 and 150 columns.

docs/images/ has some of them. Look at all of them after a change of the report or the panel.

python scripts/screenshots.py runs/quickstart/rl
python scripts/screenshots.py runs/seed-0 runs/seed-1 runs/slower --out docs/images
"""

from __future__ import annotations

import argparse
import io
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Literal, NamedTuple

from rich.console import Console

from posttrain.tracking.panel import LivePanel
from posttrain.tracking.progress import Progress, Work
from posttrain.tracking.report.folder import RunFolder
from posttrain.tracking.report.page import write_page
from posttrain.tracking.warnings import newest, read_warnings

if TYPE_CHECKING:
    from playwright.sync_api import Browser

REPO = Path(__file__).resolve().parent.parent
NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
COLUMNS = (60, 108, 150)
DESKTOP, PHONE = 1280, 420


def find_chromium() -> str | None:
    """The browser that POSTTRAIN_CHROMIUM names, or one on the PATH."""
    return os.environ.get("POSTTRAIN_CHROMIUM") or next((found for n in NAMES if (found := shutil.which(n))), None)


@contextmanager
def browser(path: str) -> Iterator[Browser]:
    """A headless one; in a container it often runs as root, where it has no sandbox of its own."""
    from playwright.sync_api import sync_playwright

    with sync_playwright() as driver:
        opened = driver.chromium.launch(executable_path=path, args=["--no-sandbox"] if os.geteuid() == 0 else [])
        try:
            yield opened
        finally:
            opened.close()


class Shot(NamedTuple):
    """A picture of a page."""

    page: Path
    width: int
    height: int
    scheme: Literal["light", "dark"] = "light"
    section: str = ""
    """What of the page is shown; empty: its beginning."""


def panel_text(run: Path, columns: int) -> str:
    """The panel as SVG, as it is while the run is validated after its last step."""
    folder = RunFolder.read(run)
    progress = Progress(
        f"{folder.state['command']} {folder.name}", len(folder.rows), warnings=newest(read_warnings(run))
    )
    for row in folder.rows:
        progress.update(int(row["step"]), {name: float(value) for name, value in row.items()})
    now = time.monotonic()
    progress.started, progress.step_started = now - sum(s for _, s in progress.seconds), now - 20.0
    progress.open_phases.append(("testing", now - 12.0))
    for name, seconds in (("gen", 5.0), ("update_actor", 2.0), ("sync", 0.5)):
        progress.took(name, seconds)
    progress.work = Work("validation", 1319, "prompts", now - 12.0, done=412)
    progress.in_flight = lambda: {"sampling": 212, "tool": 13, "waiting": 31, "grading": 4}
    console = Console(width=columns, record=True, file=io.StringIO(), force_terminal=True)
    LivePanel(progress, console).close()  # what is left in the terminal is its last state
    return console.export_svg(title=f"{columns} columns")


def panels(opened: Browser, run: Path, out: Path) -> None:
    """The panel in terminals of several widths."""
    for columns in COLUMNS:
        page = opened.new_page(viewport={"width": 13 * columns + 60, "height": 900})
        page.set_content(f'<body style="margin: 0">{panel_text(run, columns)}</body>')
        page.locator("svg").screenshot(path=out / f"panel-{columns}.png")
        page.close()


def report(opened: Browser, shot: Shot, out: Path) -> None:
    """A part of a report."""
    page = opened.new_page(viewport={"width": shot.width, "height": shot.height}, color_scheme=shot.scheme)
    page.goto(shot.page.as_uri())
    page.wait_for_selector("html[data-ready]")
    if shot.section == "trajectories":
        page.select_option("#by-colour", "logprob")
        page.select_option("#by-outcome", "tools")
        page.select_option("#by-sort", "unlikely")
    if shot.section:
        page.evaluate(f"document.getElementById('{shot.section}').scrollIntoView({{ behavior: 'instant' }})")
    page.wait_for_timeout(900)
    page.screenshot(path=out)
    page.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", nargs="+", type=Path, help="folders of runs")
    parser.add_argument("--out", type=Path, default=REPO / "docs" / "images")
    arguments = parser.parse_args()
    chromium = find_chromium()
    if chromium is None:
        sys.exit("no Chromium: install one, or set POSTTRAIN_CHROMIUM")
    out: Path = arguments.out
    out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as folder, browser(chromium) as opened:
        one = Path(folder) / "one.html"
        write_page(one, arguments.runs[:1])
        shots = {
            "report.png": Shot(one, DESKTOP, 860),
            "report-trajectories.png": Shot(one, DESKTOP, 760, "dark", "trajectories"),
            "report-420.png": Shot(one, PHONE, 1500),
            "report-420-time.png": Shot(one, PHONE, 1500, "dark", "time"),
        }
        if len(arguments.runs) > 1:
            several = Path(folder) / "several.html"
            write_page(several, arguments.runs)
            shots["report-runs.png"] = Shot(several, DESKTOP, 700)
            shots["report-runs-420.png"] = Shot(several, PHONE, 1500)
        for name, shot in shots.items():
            report(opened, shot, out / name)
        panels(opened, arguments.runs[0], out)
    for file in sorted(out.glob("*.png")):
        print(f"{file}  {file.stat().st_size / 1024:.0f} KB")


if __name__ == "__main__":
    main()

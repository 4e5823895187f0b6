#!/usr/bin/env python
"""What the report of a run with many trajectories costs: seconds to make, the first time and at a later save; how long
the event loop of a run waits meanwhile; its size; how long a browser takes to open it.

python scripts/bench_report.py --trajectories 20000 --words 120
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import sys
import tempfile
import time
from pathlib import Path

REPO = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(REPO))

from posttrain.rollout.files import rollouts_folder  # noqa: E402
from posttrain.tracking.report.background import Reporter  # noqa: E402
from posttrain.tracking.report.collect import Collector  # noqa: E402
from posttrain.tracking.report.page import write_page  # noqa: E402
from scripts.screenshots import browser, find_chromium  # noqa: E402
from tests.helpers.written_runs import many, write_run  # noqa: E402

STEPS = 100
READY = "document.documentElement.dataset.ready"


async def longest_wait(reporter: Reporter) -> tuple[float, float]:
    """(median, longest) delay in ms of a task that wants to run every 5 ms while a report is made."""
    delays = []
    reporter.refresh()
    while reporter._thread is not None and reporter._thread.is_alive():
        before = time.perf_counter()
        await asyncio.sleep(0.005)
        delays.append(1e3 * (time.perf_counter() - before - 0.005))
    return statistics.median(delays), max(delays)


def open_times(page: Path, times: int = 5) -> list[float]:
    """Milliseconds from the start of the navigation until the page has drawn itself."""
    chromium = find_chromium()
    if chromium is None:
        sys.exit("no Chromium: install one, or set POSTTRAIN_CHROMIUM")
    found = []
    with browser(chromium) as opened:
        for _ in range(times):
            tab = opened.new_page(viewport={"width": 1280, "height": 900})
            tab.goto(page.as_uri())
            tab.wait_for_selector("html[data-ready]")
            found.append(float(tab.evaluate(READY)))
            tab.close()
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trajectories", type=int, default=20_000)
    parser.add_argument("--words", type=int, default=120, help="of an answer; each is about three tokens")
    arguments = parser.parse_args()
    n, groups = 8, arguments.trajectories // STEPS // 8
    with tempfile.TemporaryDirectory() as folder:
        run = write_run(Path(folder), "bench", many(STEPS, groups, n, arguments.words))
        size = sum(file.stat().st_size for file in rollouts_folder(run).iterdir())
        collector = Collector()
        seconds = []
        for _ in range(2):
            start = time.perf_counter()
            size = write_page(run / "report.html", [run], collector)
            seconds.append(time.perf_counter() - start)
        median, longest = asyncio.run(longest_wait(Reporter(run, print)))
        opens = open_times(run / "report.html")
    print(f"{STEPS * groups * n:,} trajectories, {size / 2**20:.0f} MiB of rollout files")
    print(f"made in {seconds[0]:.1f} s, again in {seconds[1]:.1f} s; {size / 2**20:.2f} MiB")
    print(f"event loop meanwhile: {median:.1f} ms late in the median, {longest:.0f} ms at most")
    print(f"opened in {statistics.median(opens):.0f} ms (median of {len(opens)}, the slowest {max(opens):.0f} ms)")


if __name__ == "__main__":
    main()

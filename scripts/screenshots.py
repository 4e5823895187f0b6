#!/usr/bin/env python
"""Make the pictures of docs/images/ from the reports of runs, with Chromium (POSTTRAIN_CHROMIUM, or one on the PATH).

python scripts/screenshots.py runs/quickstart/rl
python scripts/screenshots.py runs/seed-0 runs/seed-1 runs/slower --out docs/images
"""

from __future__ import annotations

import argparse
import os
import shutil
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from posttrain.reporting.page import write_page

if TYPE_CHECKING:
    from playwright.sync_api import Browser

REPO = Path(__file__).resolve().parent.parent
NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")


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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", nargs="+", type=Path, help="folders of runs")
    parser.add_argument("--out", type=Path, default=REPO / "docs" / "images")
    arguments = parser.parse_args()
    chromium = find_chromium()
    if chromium is None:
        sys.exit("no Chromium: install one, or set POSTTRAIN_CHROMIUM")
    arguments.out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as folder, browser(chromium) as opened:
        one = Path(folder) / "one.html"
        write_page(one, arguments.runs[:1])
        shots: dict[str, tuple[Literal["light", "dark"], Path, str, int]] = {
            "report.png": ("light", one, "", 860),
            "report-trajectories.png": ("dark", one, "trajectories", 760),
        }
        if len(arguments.runs) > 1:
            several = Path(folder) / "several.html"
            write_page(several, arguments.runs)
            shots["report-runs.png"] = ("light", several, "", 700)
        for name, (scheme, page_file, section, height) in shots.items():
            page = opened.new_page(viewport={"width": 1280, "height": height}, color_scheme=scheme)
            page.goto(page_file.as_uri())
            page.wait_for_selector("html[data-ready]")
            if section == "trajectories":
                page.select_option("#by-colour", "logprob")
                page.select_option("#by-outcome", "tools")
                page.select_option("#by-sort", "unlikely")
                page.evaluate("document.getElementById('trajectories').scrollIntoView({ behavior: 'instant' })")
            page.wait_for_timeout(900)
            page.screenshot(path=arguments.out / name)
            page.close()
            print(f"{arguments.out / name}  {(arguments.out / name).stat().st_size / 1024:.0f} KB")


if __name__ == "__main__":
    main()

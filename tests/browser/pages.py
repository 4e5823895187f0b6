"""A page from the disk in a headless Chromium, which must ask for nothing and complain of nothing."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import pytest

from scripts.screenshots import browser, find_chromium

if TYPE_CHECKING:
    from playwright.sync_api import Page


@contextmanager
def opened(file: Path, scheme: Literal["light", "dark"] = "light", width: int = 1280) -> Iterator[Page]:
    """The page of ``file``, when it has drawn itself. Leaving it fails the test for any request to somewhere else, any
    message of the console and any dialog. Skips where there is no browser."""
    chromium = find_chromium()
    if chromium is None or find_spec("playwright") is None:
        pytest.skip("no Chromium: install one, or set POSTTRAIN_CHROMIUM")
    asked: list[str] = []
    said: list[str] = []
    with browser(chromium) as started:
        page = started.new_page(viewport={"width": width, "height": 900}, color_scheme=scheme)
        page.on("request", lambda request: asked.append(request.url))
        page.on("console", lambda message: said.append(message.text))
        page.on("pageerror", lambda error: said.append(str(error)))
        page.on("dialog", lambda dialog: said.append(dialog.message))
        page.goto(file.as_uri())
        page.wait_for_selector("html[data-ready]", timeout=20_000)
        yield page
        assert said == []
        assert asked == [file.as_uri()]


def drawn(page: Page, selector: str) -> bool:
    """Whether anything is on the canvas of a plot, which is drawn when it comes into view."""
    place = page.locator(selector).first
    place.scroll_into_view_if_needed()
    canvas = place.locator("canvas").first
    canvas.wait_for()
    count = "c => c.getContext('2d').getImageData(0, 0, c.width, c.height).data.filter(v => v).length"
    return int(canvas.evaluate(count)) > 500

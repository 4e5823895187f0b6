"""Fixtures that all tests share."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from posttrain.prep.datasets.base import DATASETS
from posttrain.rewards import DATA_SOURCES, GRADERS
from posttrain.rollout.interaction import INTERACTIONS
from posttrain.tools.base import TOOLS
from posttrain.tools.formats import PARSERS

REPO = Path(__file__).resolve().parent.parent
OTHER_TESTS_S = 1800.0
"""Longest wait for the tests that another process runs beside this one."""


@pytest.hookimpl(tryfirst=True)
def pytest_runtestloop() -> None:
    """Let the second worker wait for the process ``POSTTRAIN_TEST_SECOND_AFTER``.

    `scripts/test` has it running on one of two cores: each test then has a core of its own."""
    other = os.environ.get("POSTTRAIN_TEST_SECOND_AFTER")
    if not other or os.environ.get("PYTEST_XDIST_WORKER") != "gw1":
        return
    end = time.monotonic() + OTHER_TESTS_S
    while _is_running(int(other)) and time.monotonic() < end:
        time.sleep(0.5)


def _is_running(pid: int) -> bool:
    try:
        # A zombie has ended: its parent, a shell that runs pytest, fetches its exit code afterwards.
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


@pytest.fixture(scope="session")
def test_data() -> Path:
    """Folder of real data: ``POSTTRAIN_TEST_DATA``, default ``../shared/data`` beside the checkout."""
    folder = Path(os.environ.get("POSTTRAIN_TEST_DATA") or REPO.parent / "shared" / "data")
    if not folder.is_dir():
        pytest.skip(f"no real data: {folder} is not a folder (set POSTTRAIN_TEST_DATA)")
    return folder


@pytest.fixture(scope="module", autouse=True)
def registries_of_its_own() -> Iterator[None]:
    """Plugins that one file's tests load, by running commands in this process, are gone for the next file's."""
    with pytest.MonkeyPatch.context() as patch:
        for registry in (DATASETS, GRADERS, INTERACTIONS, PARSERS, TOOLS):
            patch.setattr(registry, "_entries", dict(registry._entries))
        sources = dict(DATA_SOURCES)
        yield
        DATA_SOURCES.clear()
        DATA_SOURCES.update(sources)

"""Fixtures that all tests share."""

from __future__ import annotations

import gc
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from posttrain.algos import ADVANTAGES, BUNDLES, POLICY_LOSSES
from posttrain.core.cycles import RARE
from posttrain.envs import ENVIRONMENTS
from posttrain.envs.agents import AGENTS
from posttrain.prep.datasets.base import DATASETS
from posttrain.rewards import DATA_SOURCES, GRADERS
from posttrain.rollout.interaction import INTERACTIONS
from posttrain.tools.base import TOOLS
from posttrain.tools.formats import PARSERS

REPO = Path(__file__).resolve().parent.parent

gc.set_threshold(*RARE)  # a seventh of the tests' time
MAX_WORKERS = 4
"""Maximum test files that run at a time: each may hold a model, or a run with its own processes."""


def pytest_xdist_auto_num_workers(config: pytest.Config) -> int:
    """Return the number of processes for ``-n auto``: one for each core, or 0 to run all tests in this process.

    The fast tests wait for deadlines a quarter of the time, and get half a process more for each core. A single file
    runs in this process, where its output is seen at once. So do tests of a GPU, which they share."""
    several = len(config.args) > 1 or Path(config.args[0]).is_dir()
    if not several or "not gpu" not in config.option.markexpr:
        return 0
    cores = len(os.sched_getaffinity(0))
    return min(cores * 3 // 2 if "not slow" in config.option.markexpr else cores, MAX_WORKERS)


def pytest_xdist_setupnodes() -> None:
    """Give the processes of pytest one thread each: with one for each core, their threads would wait for each other."""
    os.environ.setdefault("OMP_NUM_THREADS", "1")


@pytest.fixture(scope="session")
def test_data() -> Path:
    """Folder of real data: ``POSTTRAIN_TEST_DATA``, default ``../shared/data`` beside the checkout."""
    folder = Path(os.environ.get("POSTTRAIN_TEST_DATA") or REPO.parent / "shared" / "data")
    if not folder.is_dir():
        pytest.skip(f"no real data: {folder} is not a folder (set POSTTRAIN_TEST_DATA)")
    return folder


@contextmanager
def _own_registries() -> Iterator[None]:
    """Forget in the end what plugins have registered in the body, and that they were imported."""
    with pytest.MonkeyPatch.context() as patch:
        for registry in (
            DATASETS,
            GRADERS,
            INTERACTIONS,
            PARSERS,
            TOOLS,
            ADVANTAGES,
            BUNDLES,
            POLICY_LOSSES,
            ENVIRONMENTS,
            AGENTS,
        ):
            patch.setattr(registry, "_entries", dict(registry._entries))
        sources, modules = dict(DATA_SOURCES), set(sys.modules)
        yield
        DATA_SOURCES.clear()
        DATA_SOURCES.update(sources)
        for name in set(sys.modules) - modules:
            if name.startswith("posttrain_plugin_"):
                del sys.modules[name]


@pytest.fixture(scope="module", autouse=True)
def registries_of_its_own() -> Iterator[None]:
    """Plugins that one file's tests load, by running commands in this process, are gone for the next file's."""
    with _own_registries():
        yield


@pytest.fixture
def registries() -> Iterator[None]:
    """Plugins that a test loads are gone for the next test."""
    with _own_registries():
        yield

"""Side by side on a machine's GPUs: who gets which, and who is stopped."""

import importlib.util
import sys
from pathlib import Path

import pytest

FILE = Path(__file__).parents[3] / "scripts" / "gpu_jobs.py"


@pytest.fixture(scope="module")
def gpu_jobs():
    spec = importlib.util.spec_from_file_location("gpu_jobs", FILE)
    module = sys.modules["gpu_jobs"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    yield module
    del sys.modules["gpu_jobs"]


def job(gpu_jobs, name, code, **fields):
    return gpu_jobs.Job(name, (sys.executable, "-c", code), **fields)


SHOW = "import os; print('|', os.environ['CUDA_VISIBLE_DEVICES'], os.environ.get('MINE'))"


@pytest.mark.slow
def test_each_has_gpus_of_its_own_and_ends_in_time(gpu_jobs, tmp_path):
    jobs = [
        job(gpu_jobs, "one", SHOW, env={"MINE": "yes"}),
        job(gpu_jobs, "hangs", "import time; time.sleep(600)", limit_s=3.0),
        job(gpu_jobs, "both", SHOW, gpus=2),
        job(gpu_jobs, "fails", "raise SystemExit(3)"),
    ]
    done = gpu_jobs.run(jobs, ["4", "7"], tmp_path, 120.0)
    assert {name: status for name, (status, _) in done.items()} == {"one": 0, "hangs": None, "both": 0, "fails": 3}
    assert done["hangs"][1] < 60
    assert "| 4 yes" in (tmp_path / "one.log").read_text()
    assert sorted((tmp_path / "both.log").read_text().split()[1].split(",")) == ["4", "7"]
    assert "#### hangs: out of time" in gpu_jobs.report("hangs", done["hangs"], tmp_path)
    assert "| 4 yes" in gpu_jobs.report("one", done["one"], tmp_path)


def test_what_does_not_fit_is_not_started(gpu_jobs, tmp_path):
    jobs = [job(gpu_jobs, "hangs", "import time; time.sleep(600)"), job(gpu_jobs, "late", SHOW)]
    done = gpu_jobs.run(jobs, ["0"], tmp_path, 1.0)
    assert list(done) == ["hangs"]
    assert done["hangs"][0] is None


def test_names_are_unique_and_files_are_there(gpu_jobs):
    jobs = [job for group in gpu_jobs.GROUPS.values() for job in group]
    names = [job.name for job in jobs] + list(gpu_jobs.GROUPS)
    twice = {name for name in names if names.count(name) > 1}
    for name in twice:  # a group may be called as a job of its own
        assert names.count(name) == 2
        assert name in [job.name for job in gpu_jobs.GROUPS[name]]
    for one in jobs:
        files = [part for part in one.command if part.endswith(".py")]
        assert files
        assert all((FILE.parents[1] / file).is_file() for file in files), one.name

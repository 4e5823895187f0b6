"""Processes of engines that begin before Ray is up, and become the workers that it asks for."""

from __future__ import annotations

import json
import multiprocessing
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import psutil
import pytest
import ray

from posttrain.cluster import start, waiting_worker
from posttrain.cluster.actors import Supervised, actor_class
from posttrain.cluster.cluster import local_ray
from posttrain.cluster.start import init_ray
from posttrain.cluster.waiting_worker import begin_engines, taking
from posttrain.config import Config
from posttrain.core import machines
from posttrain.core.errors import RunError
from posttrain.core.spawn_ahead import AheadProcess, end_unused, spawn_ahead

HERE = "tests.unit.cluster.test_waiting_worker"
CHILD = AheadProcess(HERE, ("wave",), fixed=("ODD_",))
OPTIONS = {"num_cpus": 0, "runtime_env": {"env_vars": waiting_worker.GPU_VARIABLES}}


def until(found: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not found():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def report(pipe: Connection) -> None:
    pipe.send((os.getpid(), "wave" in sys.modules))


class Worker(Supervised):
    """As ``SamplerActor`` begins."""

    def __init__(self, ahead: list[AheadProcess]) -> None:
        ray_came_after = list(sys.modules).index("ray") > list(sys.modules).index("torch")
        super().__init__()
        spawn_ahead(ahead)
        names = ("CUDA_VISIBLE_DEVICES", "NCCL_NVLS_ENABLE", "OMP_NUM_THREADS", "TQDM_DISABLE", "LATE")
        self.found = os.getpid(), os.getppid(), ray_came_after, [os.environ.get(name) for name in names]

    def surroundings(self) -> tuple[int, int, bool, list[str | None]]:
        return self.found

    def child(self) -> tuple[list[int], tuple[int, bool]]:
        there = [process.pid for process in psutil.Process().children() if "spawn_ahead" in str(process.cmdline())]
        context = multiprocessing.get_context("spawn")
        ours, theirs = context.Pipe(duplex=False)
        process = context.Process(target=report, args=(theirs,))
        process.start()
        found = ours.recv()
        process.join()
        end_unused()
        return there, found


@pytest.fixture
def on_one_gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[Config]:
    """As on a machine with one GPU, where SGLang is the engine: here the embedded one stands for it."""
    monkeypatch.setattr(waiting_worker, "only_gpu", lambda: "3")
    monkeypatch.setattr(waiting_worker, "processes_ahead", lambda engine, rollout: (CHILD,))
    monkeypatch.setattr(start, "can_fork", lambda: False)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    yield Config.model_validate({"command": "rl", "rollout": {"engine": "hf"}})
    assert not waiting_worker._waiting


def begun() -> psutil.Process:
    [waiting] = waiting_worker._waiting
    return psutil.Process(waiting._process.pid)


@pytest.mark.slow
def test_it_becomes_the_worker_that_ray_asks_for(on_one_gpu: Config, monkeypatch: pytest.MonkeyPatch) -> None:
    with begin_engines(on_one_gpu):
        process = begun()
        monkeypatch.setenv("LATE", "1")  # of those that nothing reads on import
        with local_ray():
            actor = actor_class(Worker).options(**taking(OPTIONS, "hf", [CHILD])).remote([CHILD])
            pid, parent, after, environment = ray.get(actor.surroundings.remote(), timeout=120)
            assert (pid, parent, after) == (process.pid, os.getpid(), True)
            assert environment == ["3", "0", "1", "1", "1"]
            there, (child, imported) = ray.get(actor.child.remote(), timeout=120)
            assert (there, imported) == ([child], True)  # begun once, ahead, and taken
            assert taking(OPTIONS, "hf", [CHILD]) is OPTIONS  # none is left
            other = actor_class(Worker).options(**OPTIONS).remote([])
            assert ray.get(other.surroundings.remote(), timeout=120)[0] != pid
            process.kill()
            with pytest.raises(ray.exceptions.ActorDiedError):
                ray.get(actor.surroundings.remote(), timeout=120)
            until(lambda: not psutil.pid_exists(pid))  # no zombie


@pytest.mark.slow
def test_ray_starts_another_where_it_began_otherwise(on_one_gpu: Config, monkeypatch: pytest.MonkeyPatch) -> None:
    with begin_engines(on_one_gpu):
        process = begun()
        monkeypatch.setenv("ODD_SETTING", "1")
        with local_ray():
            logs = Path(ray._private.worker._global_node.get_logs_dir_path())
            actor = actor_class(Worker).options(**taking(OPTIONS, "hf", [CHILD])).remote([])
            pid, _, _, environment = ray.get(actor.surroundings.remote(), timeout=120)
            assert pid != process.pid
            assert environment[:2] == ["3", "0"]
            until(lambda: not process.is_running())
            said = "".join(path.read_text() for path in logs.glob("raylet.*"))
            assert "A worker starts anew: others would have set ODD_SETTING" in said


def test_those_that_nobody_takes_end_with_the_command(on_one_gpu: Config) -> None:
    with begin_engines(on_one_gpu):
        process, folder = begun(), Path(waiting_worker._waiting[0].address).parent
        assert taking(OPTIONS, "sglang", [CHILD]) is OPTIONS
        assert taking(OPTIONS, "hf", []) is OPTIONS
        assert folder.is_dir()
    assert not process.is_running()
    assert not folder.exists()


def test_it_ends_with_the_driver(tmp_path: Path) -> None:
    code = (
        "from posttrain.cluster.waiting_worker import _Waiting; import sys\n"
        "waiting = _Waiting('hf', (), {}); print(waiting._process.pid, waiting.address, flush=True); sys.stdin.read()"
    )
    driver = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    with driver:
        assert driver.stdout is not None
        pid, address = driver.stdout.readline().split()
        process = psutil.Process(int(pid))
        driver.kill()
    until(lambda: not process.is_running() or process.status() == psutil.STATUS_ZOMBIE)
    assert not Path(address).parent.exists()


@pytest.mark.parametrize(
    "changed",
    [
        {"rollout": {"engine": "vllm"}},
        {"rollout": {"engine": "hf"}},
        {"rollout": {"engine": "sglang", "batch_invariant": True}},
        {"rollout": {"engine": "sglang"}, "cluster": {"device": "cpu"}},
        {"rollout": {"engine": "sglang"}, "cluster": {"address": "auto"}},
        {"rollout": {"engine": "sglang"}, "command": "sft"},
        {"rollout": {"engine": "sglang"}, "command": "generate", "generate": {"endpoint": {"url": "http://x/v1"}}},
    ],
    ids=json.dumps,
)
def test_none_begins_where_it_could_not_be_used(changed: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(waiting_worker, "only_gpu", lambda: "0")
    with begin_engines(Config.model_validate({"command": "rl"} | changed)):
        assert not waiting_worker.any_waiting()


def test_none_begins_where_ray_chooses_among_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    cfg = Config.model_validate({"command": "rl", "rollout": {"engine": "sglang"}})
    monkeypatch.setattr(waiting_worker, "only_gpu", lambda: None)
    with begin_engines(cfg):
        assert not waiting_worker.any_waiting()
    monkeypatch.setattr(waiting_worker, "only_gpu", lambda: "0")
    with begin_engines(cfg):
        assert waiting_worker.any_waiting()


def test_a_temporary_folder_too_deep_for_sockets_is_an_error(
    on_one_gpu: Config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    deep = tmp_path / ("x" * 90)
    deep.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(deep))
    with pytest.raises(RunError, match="no socket in the temporary folder: AF_UNIX path too long") as raised:
        begin_engines(on_one_gpu).__enter__()
    assert "RAY_TMPDIR" in str(raised.value.hint)
    monkeypatch.setenv("RAY_TMPDIR", str(deep))
    with pytest.raises(RunError, match=r"Ray does not start on this machine: .*AF_UNIX path length cannot"):
        init_ray()
    assert not list(deep.glob("posttrain-*"))


@pytest.mark.parametrize(
    ("devices", "asked", "only"),
    [
        (1, None, "0"),
        (2, None, None),
        (2, "1", "1"),
        (2, "GPU-8d1e", "GPU-8d1e"),
        (2, "0,1", None),
        (2, "", None),
        (1, "-1", None),
        (0, "0", None),
    ],
)
def test_the_only_gpu(devices: int, asked: str | None, only: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machines, "nvidia_devices", lambda: [Path(f"/dev/nvidia{number}") for number in range(devices)])
    if asked is None:
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    else:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", asked)
    assert machines.only_gpu() == only

"""`posttrain doctor`, on this machine as it is, and with conditions made worse for a process of their own."""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import tomli
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name

from posttrain.doctor import command, machine, services, software
from posttrain.doctor.base import Check, CheckResult, run_checks, worst
from posttrain.engines.choice import ENGINES
from posttrain.sandbox.syscalls import SyscallFilter

REPO = Path(__file__).resolve().parents[3]


def doctor(*options: str, **kwargs: Any) -> tuple[int, dict[str, dict[str, str]]]:
    """(exit code, finding by name)"""
    command = [sys.executable, "-m", "posttrain", "doctor", "--json", *options]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, **kwargs)
    assert done.stderr == ""
    return done.returncode, {found["name"]: found for found in json.loads(done.stdout)["findings"]}


def test_this_machine(tmp_path: Path) -> None:
    code, found = doctor("--quick", "--dir", str(tmp_path))
    assert list(found) == [
        "python", "packages", "cuda", "gpus", "attention", "engine hf", "engine sglang", "engine vllm", "host memory",
        "run folder", "tmp", "shared memory", "ulimit nofile", "ulimit nproc", "ulimit memlock", "ports", "sandbox",
    ]  # fmt: skip
    assert code == (1 if any(f["status"] == "fail" for f in found.values()) else 0)
    assert all(f["hint"] for f in found.values() if f["status"] != "ok")
    assert found["python"]["detail"].startswith(f"{sys.version_info[0]}.{sys.version_info[1]}.")
    assert "ray" not in found
    if "programs run in namespaces" in found["sandbox"]["detail"]:
        assert ("behind a filter" in found["sandbox"]["detail"]) == (SyscallFilter.find() is not None)


@pytest.mark.slow
def test_ray_starts_here() -> None:
    _, found = doctor()
    assert found["ray"]["status"] == "ok", found["ray"]
    assert "it sees" in found["ray"]["detail"]


def test_few_open_files() -> None:
    def lower() -> None:
        resource.setrlimit(resource.RLIMIT_NOFILE, (512, 512))

    code, found = doctor("--quick", preexec_fn=lower)
    assert code == 1
    assert found["ulimit nofile"] == {
        "name": "ulimit nofile", "status": "fail", "detail": "512 (hard: 512)",
        "hint": "sockets of Ray and open shards; ulimit -n 65536",
    }  # fmt: skip


def test_a_run_folder_that_cannot_be(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    (found,) = machine.run_folder(str(tmp_path / "file" / "runs"))
    assert (found.status, "--dir" in found.hint) == ("fail", True)
    (found,) = machine.run_folder("/proc/runs")
    assert found.status == "fail"
    (found,) = machine.run_folder(str(tmp_path / "not" / "yet"))
    assert found.status in ("ok", "warn")
    assert list(tmp_path.iterdir()) == [tmp_path / "file"]


_IN_A_SMALL_DISK = """
import sys
from posttrain.doctor import machine
from posttrain.sandbox.syscalls import SyscallFilter
full = machine.run_folder(sys.argv[1])[0]
print(full.status, full.detail)
small = machine.shared_memory(sys.argv[1])[0]
print(small.status, small.hint)
"""


def test_a_full_disk(tmp_path: Path) -> None:
    mounted = f'mount -t tmpfs -o size=512k none {tmp_path} && exec {sys.executable} -c "$1" {tmp_path}'
    command = ["unshare", "-rm", "sh", "-c", mounted, "sh", _IN_A_SMALL_DISK]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    if "Operation not permitted" in done.stderr:
        pytest.skip("this kernel allows no namespaces")
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert lines[0] == f"fail {tmp_path}: No space left on device"
    assert lines[1].startswith("fail in a container: --shm-size")


def test_files_that_a_container_has_read_do_not_take_its_memory(tmp_path: Path) -> None:
    (tmp_path / "memory.max").write_text(f"{1 << 30}\n")
    (tmp_path / "memory.current").write_text(f"{1 << 30}\n")
    for files, free in ((1 << 29, "0.5"), (0, "0.0")):
        (tmp_path / "memory.stat").write_text(f"anon {1 << 28}\ninactive_file {files}\n")
        (found,) = machine.memory(str(tmp_path))
        assert found.detail.startswith(f"{free} of 1.0 GiB free"), found


def test_nobody_at_the_address() -> None:
    (found,) = services.address("127.0.0.1:9", 2.0)
    assert found.status == "fail"
    assert "no Ray cluster at cluster.address" in found.detail


def test_a_cluster_has_a_minute_to_answer_on_a_loaded_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """Less what the imports took, and all of it before the check itself is given up."""
    waited: list[float] = []

    async def nodes_at(where: str, deadline_s: float) -> list[dict[str, float]]:
        waited.append(deadline_s)
        return [{"CPU": 2.0}]

    clock = iter([100.0, 140.0])
    monkeypatch.setattr("posttrain.cluster.cluster.nodes_at", nodes_at)
    monkeypatch.setattr("posttrain.cluster.address.check_address", lambda where, deadline_s: None)
    monkeypatch.setattr(services.time, "monotonic", lambda: next(clock, 140.0))
    [check] = [check for check in command.checks(address="10.0.0.1:6379") if check.name == "cluster"]
    [found] = check.ask()
    assert (found.status, found.detail) == ("ok", "Ray answers at 10.0.0.1:6379: 1 nodes, 2 CPUs, 0 GPUs")
    assert waited == [20.0]
    assert check.deadline_s > 60.0


def test_a_check_that_hangs_or_dies_holds_up_no_other() -> None:
    def hang() -> list[CheckResult]:
        time.sleep(60)
        return []

    def die() -> list[CheckResult]:
        os._exit(3)

    def wrong() -> list[CheckResult]:
        raise OSError("no such thing")

    def well() -> list[CheckResult]:
        return [CheckResult("well", "ok", "yes")]

    begin = time.monotonic()
    asked = [Check(f.__name__, f, 1.0, "look there") for f in (hang, die, wrong, well)]
    found = [finding for findings in run_checks(asked) for finding in findings]
    assert time.monotonic() - begin < 10
    assert found == [
        CheckResult("hang", "fail", "no answer within 1 s", "look there"),
        CheckResult("die", "fail", "the check died (exit code 3)", "look there"),
        CheckResult("wrong", "fail", "OSError: no such thing", "look there"),
        CheckResult("well", "ok", "yes"),
    ]
    assert worst(found) == "fail"
    assert worst([]) == "ok"


def test_packages_out_of_range(monkeypatch: pytest.MonkeyPatch) -> None:
    wanted = [Requirement("torch>=99"), Requirement("no-such-thing>=1"), Requirement("numpy>=1")]
    monkeypatch.setattr(software, "requirements", lambda: wanted)
    torch, missing, last = software.packages()
    assert (torch.status, torch.hint) == ("fail", "pip install 'torch>=99'")
    assert missing.detail == "not installed, wanted: >=1"
    assert last.detail.endswith("1 of 3 packages in their ranges")


def test_ranges_are_those_of_the_package() -> None:
    names = {requirement.name for requirement in software.requirements()}
    assert {"torch", "transformers", "ray", "numpy"} <= names
    assert "vllm" not in names
    assert [r.name for r in software.requirements("flash-attn")] == ["flash-attn"]
    extras = tomli.loads((REPO / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    for name, kind in ENGINES.items():
        if kind.packages:  # pyproject.toml has to repeat these
            (extra,) = map(Requirement, extras[name])
            assert extra.specifier == Requirement(f"x{kind.versions}").specifier, name


NVLINK = """
\x1b[4m\tGPU0\tGPU1\tCPU Affinity\x1b[0m
GPU0\t X \tNV18\t0-47
GPU1\tNV18\t X \t0-47

Legend:
  SYS  = Connection traversing PCIe
"""


@pytest.mark.parametrize(
    ("said", "told", "used"),
    [
        ("NVIDIA H200, 143771, 4096, 580.1", "1 x NVIDIA H200, 140 GiB; driver 580.1", "in use: GPU 0: 4.0 GiB"),
        ("NVIDIA GB10, [N/A], [N/A], 580.1", "1 x NVIDIA GB10; driver 580.1", None),
    ],
)
def test_gpus_and_what_their_driver_tells_of_them(
    said: str, told: str, used: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    smi = tmp_path / "nvidia-smi"
    smi.write_text(f'#!/bin/sh\n[ "$1" = -L ] && echo "GPU 0: x" || echo "{said}"\n')
    smi.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    found = {result.name: result for result in machine.gpus()}
    assert found["gpus"] == CheckResult("gpus", "ok", told)
    assert (found["gpu memory"].detail if "gpu memory" in found else None) == used


def test_links_between_gpus() -> None:
    assert machine.links(NVLINK) == [CheckResult("gpu links", "ok", "NVLink between all (NV18)")]
    (found,) = machine.links(NVLINK.replace("NV18", "SYS"))
    assert (found.status, found.detail) == ("warn", "not all by NVLink: SYS")
    assert machine.links("")[0].status == "warn"


@pytest.mark.parametrize("engine", ["sglang", "vllm"])
def test_tested_versions_are_in_the_supported_ranges(engine: str) -> None:
    tested = software.tested_versions(engine)
    kind = ENGINES[engine]  # type: ignore[index]
    assert SpecifierSet(kind.versions).contains(tested[kind.packages[0]])
    for requirement in software.requirements():
        assert requirement.specifier.contains(tested[canonicalize_name(requirement.name)]), requirement


def test_warns_of_an_engine_whose_versions_did_not_run_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    here = {name: software.tested_versions("vllm")[name] for name in ("vllm", "torch", "transformers", "ray")}
    here["torch"] += "+cu130"
    monkeypatch.setattr(software, "installed", lambda name: here.get(name))
    assert [f.status for f in software.engines() if f.name == "engine vllm"] == ["ok"]
    here["vllm"], here["ray"] = "0.32.0", "2.61.0"
    [found] = [f for f in software.engines() if f.name == "engine vllm"]
    assert (found.status, found.hint) == ("warn", "scripts/install_gpu vllm installs what did")
    assert "vllm 0.32.0 (tested: 0.24.0), ray 2.61.0 (tested: 2.60.0)" in found.detail
    assert "torch" not in found.detail


def test_install_gpu_names_the_engines_it_knows() -> None:
    done = subprocess.run(["scripts/install_gpu", "trt"], cwd=REPO, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (2, "")
    assert "hint: scripts/install_gpu sglang, or scripts/install_gpu vllm" in done.stderr


def test_install_gpu_refuses_a_python_that_the_tested_versions_are_not_for(tmp_path: Path) -> None:
    (tmp_path / "bin").mkdir()
    python = tmp_path / "bin/python"
    python.write_text("#!/bin/sh\necho 3.11\n")
    python.chmod(0o755)
    env = os.environ | {"POSTTRAIN_VENV": str(tmp_path)}
    done = subprocess.run(
        ["scripts/install_gpu", "vllm"], cwd=REPO, env=env, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 2
    assert "has Python 3.11; the versions that are tested with vllm are for 3.12" in done.stderr


@pytest.mark.slow
def test_the_tested_versions_can_still_be_installed_together() -> None:
    done = subprocess.run(["scripts/lock_gpu", "--check"], cwd=REPO, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("can be installed") == 2

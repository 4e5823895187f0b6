"""GPUs, disks, shared memory, limits and ports of this machine."""

from __future__ import annotations

import os
import re
import resource
import shutil
import socket
import subprocess
import tempfile
from pathlib import Path

import psutil

from posttrain.core.machines import has_gpu
from posttrain.doctor.base import CheckResult

GIB = 2**30
_RAY_FULL = 0.95
"""Share of the disk under /tmp at which Ray stops storing objects (its `local_fs_capacity_threshold`)."""


def gpus() -> list[CheckResult]:
    """Names and memory of the GPUs, who uses them, and how they are linked."""
    smi = shutil.which("nvidia-smi")
    if not has_gpu():
        return [CheckResult("gpus", "ok", "none")]
    if smi is None:
        return [
            CheckResult("gpus", "warn", "nvidia-smi is missing", "install the driver's tools to see memory and links")
        ]
    fields = "name,memory.total,memory.used,driver_version"
    rows = [
        [cell.strip() for cell in line.split(",")]
        for line in _output(smi, f"--query-gpu={fields}", "--format=csv,noheader,nounits").splitlines()
        if line.strip()
    ]
    names = {f"{sum(r[0] == row[0] for r in rows)} x {row[0]}{_gib(row[1])}" for row in rows}
    found = [CheckResult("gpus", "ok", f"{'; '.join(sorted(names))}; driver {rows[0][3]}")]
    used = {i: int(row[2]) for i, row in enumerate(rows) if row[2].isdigit()}
    busy = [f"GPU {i}: {mebibytes / 1024:.1f} GiB" for i, mebibytes in used.items() if mebibytes > 2048]
    if busy:
        hint = "end what uses them, or name others in CUDA_VISIBLE_DEVICES"
        found.append(CheckResult("gpu memory", "warn", f"in use: {', '.join(busy)}", hint))
    return [*found, *(links(_output(smi, "topo", "-m")) if len(rows) > 1 else [])]


def _gib(mebibytes: str) -> str:
    """Return the memory of a GPU as the end of its name; nothing where the driver does not tell it (`[N/A]`)."""
    return f", {int(mebibytes) / 1024:.0f} GiB" if mebibytes.isdigit() else ""


def links(matrix: str) -> list[CheckResult]:
    """What `nvidia-smi topo -m` says of each pair of GPUs."""
    kinds = set()
    for line in re.sub(r"\x1b\[[\d;]*m", "", matrix).splitlines():
        cells = line.split()
        if cells and re.fullmatch(r"GPU\d+", cells[0]) and "X" in cells:
            kinds |= {cell for cell in cells[1:] if re.fullmatch(r"NV\d+|PIX|PXB|PHB|NODE|SYS", cell)}
    if not kinds:
        return [CheckResult("gpu links", "warn", "nvidia-smi topo -m shows none", "look at its output")]
    if all(kind.startswith("NV") for kind in kinds):
        return [CheckResult("gpu links", "ok", f"NVLink between all ({', '.join(sorted(kinds))})")]
    hint = "sharded training is slower over PCIe: train.reduce_gradients = 'step' and train.gather_weights = 'step'"
    return [CheckResult("gpu links", "warn", f"not all by NVLink: {', '.join(sorted(kinds))}", hint)]


def _output(*command: str) -> str:
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def run_folder(folder: str) -> list[CheckResult]:
    """The folder of runs can be written to, and has room."""
    path = Path(folder).absolute()
    there = path
    while not there.exists():
        there = there.parent
    choose = "choose another with --dir here and --set run.dir=DIR in a run"
    if not there.is_dir():
        return [CheckResult("run folder", "fail", f"{there} is not a folder", choose)]
    try:
        with tempfile.NamedTemporaryFile(dir=there, prefix=".posttrain-doctor-") as file:
            file.write(b"0" * 2**20)
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        return [CheckResult("run folder", "fail", f"{there}: {error.strerror}", choose)]
    free = shutil.disk_usage(there).free
    detail = f"{path}: {free / GIB:.1f} GiB free"
    if free < 1 * GIB:
        return [
            CheckResult(
                "run folder", "fail", detail, f"a checkpoint of the tiny model takes megabytes, of 7B 80 GB; {choose}"
            )
        ]
    if free < 20 * GIB:
        return [
            CheckResult(
                "run folder", "warn", detail, "a checkpoint takes 12 bytes a weight (0.5B: 6 GB); checkpoint.keep"
            )
        ]
    return [CheckResult("run folder", "ok", detail)]


def tmp() -> list[CheckResult]:
    """Where Ray keeps its sockets, logs and spilled objects."""
    place = tempfile.gettempdir()
    usage = shutil.disk_usage(place)
    used = 1 - usage.free / usage.total
    detail = f"{place}: {usage.free / GIB:.1f} GiB free, {100 * used:.0f} % used"
    hint = "make room, or point TMPDIR and RAY_TMPDIR to another disk"
    if not os.access(place, os.W_OK) or usage.free < GIB // 4:
        return [CheckResult("tmp", "fail", detail, hint)]
    if used > _RAY_FULL:
        return [CheckResult("tmp", "warn", f"{detail}: Ray stops at {100 * _RAY_FULL:.0f} %", hint)]
    return [CheckResult("tmp", "ok", detail)]


def shared_memory(place: str = "/dev/shm") -> list[CheckResult]:
    """Ray's objects, and what NCCL's ranks exchange on one machine."""
    if not Path(place).is_dir():
        return [CheckResult("shared memory", "fail", f"{place} is missing", "mount a tmpfs there")]
    usage = shutil.disk_usage(place)
    detail = f"{place}: {usage.free / GIB:.2f} of {usage.total / GIB:.2f} GiB free"
    hint = "in a container: --shm-size=16g (Docker's default is 64 MB); files of dead processes may be in there"
    if usage.free < GIB // 4:
        return [CheckResult("shared memory", "fail", detail, hint)]
    if usage.free < 2 * GIB:
        return [CheckResult("shared memory", "warn", detail, hint)]
    return [CheckResult("shared memory", "ok", detail)]


def memory(group: str = "/sys/fs/cgroup") -> list[CheckResult]:
    """Memory of the host, or of the container."""
    total, free = psutil.virtual_memory().total, psutil.virtual_memory().available
    place = Path(group)
    text = (place / "memory.max").read_text().strip() if (place / "memory.max").is_file() else "max"
    if text.isdigit() and int(text) < total:
        total, used = int(text), int((place / "memory.current").read_text())
        # What is used counts the files that were read, which make room when it is needed.
        stat = dict(line.split() for line in (place / "memory.stat").read_text().splitlines())
        free = min(free, total - used + int(stat["inactive_file"]))
    detail = f"{free / GIB:.1f} of {total / GIB:.1f} GiB free, {len(os.sched_getaffinity(0))} CPUs"
    if free < 2 * GIB:
        return [CheckResult("host memory", "warn", detail, "Ray and a driver take about 2 GiB before any model")]
    return [CheckResult("host memory", "ok", detail)]


def limits() -> list[CheckResult]:
    """ulimits of this shell, which every process of a run inherits."""
    found = []
    for name, number, fails, warns, why in (
        ("nofile", resource.RLIMIT_NOFILE, 1024, 8192, "sockets of Ray and open shards; ulimit -n 65536"),
        ("nproc", resource.RLIMIT_NPROC, 512, 4096, "threads of Ray and torch; ulimit -u 65536"),
    ):
        soft, hard = resource.getrlimit(number)
        if soft == resource.RLIM_INFINITY or soft >= warns:
            found.append(CheckResult(f"ulimit {name}", "ok", _amount(soft)))
        else:
            detail = f"{soft} (hard: {_amount(hard)})"
            found.append(CheckResult(f"ulimit {name}", "fail" if soft < fails else "warn", detail, why))
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    if has_gpu() and soft != resource.RLIM_INFINITY and soft < GIB:
        hint = (
            "InfiniBand and pinned memory want it unlimited: ulimit -l unlimited, or in a container --ulimit memlock=-1"
        )
        found.append(CheckResult("ulimit memlock", "warn", f"{soft / 2**20:.0f} MiB", hint))
    else:
        amount = "unlimited" if soft == resource.RLIM_INFINITY else f"{soft / 2**20:.0f} MiB"
        found.append(CheckResult("ulimit memlock", "ok", amount))
    return found


def _amount(number: int) -> str:
    return "unlimited" if number == resource.RLIM_INFINITY else str(number)


def ports() -> list[CheckResult]:
    """The loopback device works, this host has an address, and who listens at Ray's port."""
    try:
        with socket.create_server(("127.0.0.1", 0)) as server:
            socket.create_connection(server.getsockname(), timeout=5).close()
    except OSError as error:
        return [
            CheckResult(
                "ports", "fail", f"127.0.0.1 cannot be used: {error}", "is the loopback device up? ip link set lo up"
            )
        ]
    name = socket.gethostname()
    try:
        address = socket.gethostbyname(name)
    except OSError as error:
        hint = f"add {name} to /etc/hosts: processes of a run find each other by it"
        return [CheckResult("ports", "fail", f"the host name {name} has no address: {error}", hint)]
    detail = f"127.0.0.1 works, {name} is {address}"
    with socket.socket() as probe:
        probe.settimeout(1)
        listening = probe.connect_ex(("127.0.0.1", 6379)) == 0
    if listening:
        detail += "; somebody listens at 6379, Ray's port: a run without cluster.address starts a Ray of its own"
    return [CheckResult("ports", "ok", detail)]

"""GPUs by their datasheets, and the machine that a run is planned for."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from posttrain.core.errors import ConfigError
from posttrain.core.registry import unknown
from posttrain.core.sizes import GIB


@dataclass(frozen=True)
class Gpu:
    """One kind of GPU, by NVIDIA's datasheet."""

    name: str
    """As `--gpu` takes it."""
    match: str
    """Whole words of the name that the driver gives it."""
    flops: float
    """Dense bf16 FLOP/s, sums in float32"""
    memory_gib: float
    """What the driver lets programs have"""
    bandwidth: float
    """Memory bandwidth, bytes a second"""
    link: float
    """To its neighbours in the machine, one way, bytes a second"""
    measured: bool = False
    """True where the calibration of this package comes from it."""
    fp8: bool = True
    """It multiplies in FP8 (compute capability 8.9 and later)."""


_TB, _GB, _TERA = 1e12, 1e9, 1e12
GPUS = (
    Gpu("h200", "H200", 989 * _TERA, 139.8, 4.8 * _TB, 450 * _GB, measured=True),
    Gpu("h100-pcie", "H100 PCIe", 756 * _TERA, 79.1, 2.0 * _TB, 64 * _GB),
    Gpu("h100", "H100", 989 * _TERA, 79.1, 3.35 * _TB, 450 * _GB),
    Gpu("h800", "H800", 989 * _TERA, 79.1, 3.35 * _TB, 200 * _GB),
    Gpu("h20", "H20", 148 * _TERA, 95.1, 4.0 * _TB, 450 * _GB),
    Gpu("gb200", "GB200", 2500 * _TERA, 184.3, 8.0 * _TB, 900 * _GB),
    Gpu("gb300", "GB300", 2500 * _TERA, 276.6, 8.0 * _TB, 900 * _GB),
    Gpu("b200", "B200", 2250 * _TERA, 178.4, 8.0 * _TB, 900 * _GB),
    Gpu("b300", "B300", 2250 * _TERA, 267.7, 8.0 * _TB, 900 * _GB),
    Gpu("a100-40g", "A100-SXM4-40GB", 312 * _TERA, 39.4, 1.555 * _TB, 300 * _GB, fp8=False),
    Gpu("a100-pcie-40g", "A100-PCIE-40GB", 312 * _TERA, 39.4, 1.555 * _TB, 32 * _GB, fp8=False),
    Gpu("a100", "A100", 312 * _TERA, 79.2, 2.039 * _TB, 300 * _GB, fp8=False),
    Gpu("a800", "A800", 312 * _TERA, 79.2, 2.039 * _TB, 200 * _GB, fp8=False),
    Gpu("l40s", "L40S", 362 * _TERA, 44.4, 0.864 * _TB, 32 * _GB),
    Gpu("l40", "L40", 181 * _TERA, 44.4, 0.864 * _TB, 32 * _GB),
    Gpu("a10g", "A10G", 70 * _TERA, 22.1, 0.6 * _TB, 32 * _GB, fp8=False),
    Gpu("a10", "A10", 125 * _TERA, 22.1, 0.6 * _TB, 32 * _GB, fp8=False),
    Gpu("l4", "L4", 121 * _TERA, 22.1, 0.3 * _TB, 32 * _GB),
    Gpu("5090", "RTX 5090", 209.5 * _TERA, 31.4, 1.792 * _TB, 64 * _GB),
    Gpu("4090", "RTX 4090", 165.2 * _TERA, 23.5, 1.008 * _TB, 32 * _GB),
    Gpu("3090", "RTX 3090", 71.0 * _TERA, 23.6, 0.936 * _TB, 32 * _GB, fp8=False),
)
"""The first whose ``match`` is in a device's name counts."""

NETWORK = 50 * _GB
"""Bytes a second from a GPU to other nodes, one way: a 400 Gbit/s adapter for each, as such machines have."""


@dataclass(frozen=True)
class Machine:
    """Where a run is to be."""

    gpu: Gpu | None
    """None: no GPU."""
    gpus: int = 1
    """GPUs of each node."""
    nodes: int = 1

    @property
    def total(self) -> int:
        return self.gpus * self.nodes if self.gpu is not None else 0

    @property
    def kind(self) -> str | None:
        """Name of its kind of GPU."""
        return None if self.gpu is None else self.gpu.name

    @property
    def memory(self) -> float:
        """Bytes of a GPU."""
        return 0.0 if self.gpu is None else self.gpu.memory_gib * GIB

    def link(self, workers: int) -> float:
        """Bytes a second, one way, between ``workers`` GPUs that work together."""
        assert self.gpu is not None
        return self.gpu.link if workers <= self.gpus else min(self.gpu.link, NETWORK)

    def describe(self) -> str:
        """For the head of a plan."""
        if self.gpu is None:
            return "CPU"
        of = f"{self.nodes} x " if self.nodes > 1 else ""
        return f"{of}{self.gpus} x {self.gpu.match} ({self.gpu.memory_gib:g} GiB each)"

    def stored(self) -> dict[str, Any] | None:
        """What `run.json` keeps of the machine of a run's driver; None: it has no GPU."""
        if self.gpu is None:
            return None
        return {"gpu": self.gpu.match, "memory_gib": self.gpu.memory_gib, "gpus": self.gpus}


def gpu_of_name(name: str) -> Gpu | None:
    """The GPU that the driver calls ``name``; None where it is not in the table."""
    return next((gpu for gpu in GPUS if re.search(rf"\b{re.escape(gpu.match)}\b", name)), None)


def gpu_named(name: str) -> Gpu:
    """The GPU of `--gpu NAME`. Raises ``ConfigError`` with the nearest name."""
    key = name.lower().removeprefix("rtx").strip(" -_")
    for gpu in GPUS:
        if key == gpu.name:
            return gpu
    raise ConfigError(f"unknown GPU {name!r}", hint=unknown(key, [gpu.name for gpu in GPUS]))


def nvidia_devices() -> list[Path]:
    """Return the files by which programs reach the NVIDIA GPUs of this machine."""
    return sorted(Path("/dev").glob("nvidia[0-9]*"))


def only_gpu() -> str | None:
    """Return the one NVIDIA GPU that this process may use, as CUDA_VISIBLE_DEVICES names it. None: there is none, there
    are several, or it takes the driver to tell."""
    devices = nvidia_devices()
    asked = os.environ.get("CUDA_VISIBLE_DEVICES")
    names = [str(number) for number in range(len(devices))] if asked is None else asked.split(",")
    only = names[0].strip() if devices and len(names) == 1 else ""
    return only if only not in ("", "-1") else None


def has_gpu() -> bool:
    """Return whether an NVIDIA GPU can be used here, without importing torch."""
    if os.environ.get("CUDA_VISIBLE_DEVICES", "all").strip() in ("", "-1"):
        return False
    driver = Path("/proc/driver/nvidia/gpus")
    if driver.is_dir() and any(driver.iterdir()):
        return True
    smi = shutil.which("nvidia-smi")
    if smi is None:
        return False
    try:
        listed = subprocess.run([smi, "-L"], capture_output=True, text=True, timeout=10, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return False  # a driver that does not answer cannot be trained on
    return "GPU " in listed.stdout


def this_machine() -> Machine:
    """What the NVIDIA driver here says of its GPUs. A kind that is not in the table has their memory only, and no
    speed; without a driver there is no GPU."""
    query = ["nvidia-smi", "--query-gpu=name,memory.total,memory.reserved", "--format=csv,noheader,nounits"]
    try:
        done = subprocess.run(query, capture_output=True, text=True, timeout=10, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return Machine(None)
    rows = [line.rsplit(",", 2) for line in done.stdout.splitlines() if line.count(",") > 1]
    if done.returncode or not rows:
        return Machine(None)
    name, total, reserved = (part.strip() for part in rows[0])
    # The driver keeps what is reserved for itself: 0.5 GiB of an H100.
    mebibytes = int(total) - (int(reserved) if reserved.isdigit() else 0) if total.isdigit() else 0
    return Machine(_gpu(name, round(mebibytes / 1024, 1)), len(rows))


def machine_stored(stored: Mapping[str, Any] | None) -> Machine:
    """The machine that ``Machine.stored`` gave."""
    if stored is None:
        return Machine(None)
    return Machine(_gpu(str(stored["gpu"]), float(stored["memory_gib"])), int(stored["gpus"]))


def _gpu(name: str, memory_gib: float) -> Gpu:
    """By the driver's name, with the memory that it says there is (0: it does not say); of a kind that is not in the
    table that is all that is known."""
    found = gpu_of_name(name) or Gpu(name, name, 0.0, 0.0, 0.0, 0.0)
    return replace(found, memory_gib=memory_gib or found.memory_gib)

"""Ray nodes in network namespaces of their own, which can be killed and started again."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from pathlib import Path

from _netns import Namespace

ROOT = Path(__file__).resolve().parent.parent
DEVICE, ADDRESSES, PORT = "pt0", ("10.77.0.1", "10.77.0.2"), 6379
START_S = 240.0
"""Longest start of a Ray node, of a run, and of a step."""


class Failed(RuntimeError):
    """Something did not answer in time, or ended that should not have."""


class Node:
    """A Ray node in a namespace of its own, with one GPU or none."""

    def __init__(self, index: int, namespace: Namespace, folder: Path, out: Path, gpus: int) -> None:
        self.index, self.namespace, self.gpus = index, namespace, gpus
        self._folder, self._out, self._starts = folder, out, 0
        self._ray: subprocess.Popen[bytes] | None = None

    def environment(self) -> dict[str, str]:
        """Return the environment of all processes of the node."""
        paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
        own = {"PYTHONPATH": os.pathsep.join(paths), "RAY_AUTH_MODE": "disabled", "HF_HUB_OFFLINE": "1"}
        own |= {"NCCL_SOCKET_IFNAME": DEVICE, "GLOO_SOCKET_IFNAME": DEVICE, "NCCL_HOSTID": f"node{self.index}"}
        own |= {"NCCL_IB_DISABLE": "1", "NCCL_NVLS_ENABLE": "0", "NCCL_MNNVL_ENABLE": "0"}
        own |= {"NCCL_DEBUG": "INFO", "NCCL_DEBUG_SUBSYS": "INIT,NET,ENV"}
        own |= {"NCCL_DEBUG_FILE": str(self._out / "nccl" / f"node{self.index}.%p.log")}
        return os.environ | own | {"CUDA_VISIBLE_DEVICES": str(self.index) if self.gpus else ""}

    def popen(self, command: list[str], log: Path) -> subprocess.Popen[bytes]:
        with self.namespace.inside(), log.open("wb") as output:
            return subprocess.Popen(
                command,
                cwd=self._out,
                env=self.environment(),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
            )

    def start(self) -> None:
        """Start Ray, and wait until it runs. Raises ``Failed``."""
        self._starts += 1
        self.namespace.set_link(DEVICE, True)
        log = self._out / f"ray{self.index}.{self._starts}.log"
        command = [sys.executable, "-m", "ray.scripts.scripts", "start", "--block", "--disable-usage-stats"]
        command += ["--node-ip-address", ADDRESSES[self.index], "--num-cpus", "2", "--num-gpus", str(self.gpus)]
        command += ["--object-store-memory", "1000000000", "--temp-dir", f"{self._folder}/{self.index}{self._starts}"]
        first = ["--head", "--port", str(PORT), "--include-dashboard", "false"]
        command += first if self.index == 0 else ["--address", f"{ADDRESSES[0]}:{PORT}"]
        self._ray = self.popen(command, log)
        end = time.monotonic() + START_S
        while "Ray runtime started" not in log.read_text(errors="replace"):
            if self._ray.poll() is not None or time.monotonic() > end:
                raise Failed(f"Ray did not start on node {self.index}: {log.read_text(errors='replace')[-1500:]}")
            time.sleep(0.1)

    def kill(self, *, pull: bool = False) -> int:
        """End all processes of the node with SIGKILL; returns how many.

        Args:
            pull: its cable first. Otherwise the kernel, which lives, tells those who are connected to the processes.
        """
        if pull:
            self.namespace.set_link(DEVICE, False)
        killed = self.namespace.kill()
        if self._ray is not None:
            self._ray.wait(timeout=30.0)
        return killed

    def actors(self) -> list[str]:
        """Return the actors that train or sample on the node, by Ray's names of their processes."""
        found = []
        for pid in self.namespace.pids():
            try:
                title = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")[0].decode(errors="replace")
            except OSError:  # it has just ended
                continue
            if name := re.match(r"ray::(TrainActor|SamplerActor)", title):
                found.append(name[1])
        return sorted(found)

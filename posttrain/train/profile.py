"""Record a worker with torch.profiler: where the time of an update goes."""

from __future__ import annotations

from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile

TABLE_ROWS = 20


class Profiler:
    """Records what its thread does between ``start`` and ``stop``."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._running: profile | None = None
        self._warm = False

    def start(self) -> None:
        if not self._warm:
            # The first trace of a process sets up the tracer while it measures: let that be one of nothing.
            with self._profile():
                torch.ones(1, device=self.device).add_(1)
            self._warm = True
        self._running = self._profile()
        self._running.start()

    def stop(self, folder: Path, name: str) -> None:
        """End the trace. Writes ``folder/name.json.gz`` (a Chrome trace) and ``folder/name.txt``, a table of the
        kernels that took most time of their own (operators, on a CPU)."""
        assert self._running is not None
        if self.device.type == "cuda":
            torch.cuda.synchronize()
        trace, self._running = self._running, None
        trace.stop()
        folder.mkdir(parents=True, exist_ok=True)
        trace.export_chrome_trace(str(folder / f"{name}.json.gz"))
        order = "self_device_time_total" if self.device.type == "cuda" else "self_cpu_time_total"
        table = trace.key_averages().table(sort_by=order, row_limit=TABLE_ROWS, max_name_column_width=80)
        (folder / f"{name}.txt").write_text(table, encoding="utf-8")

    def _profile(self) -> profile:
        on_gpu = [ProfilerActivity.CUDA] * (self.device.type == "cuda")
        return profile(activities=[ProfilerActivity.CPU, *on_gpu], acc_events=True)

"""Rollouts beside the raw engine: which GPU is watched."""

import sys
import threading
from types import ModuleType, SimpleNamespace

import torch


class Nvml(ModuleType):
    """NVML of a machine with GPUs, each of which is busy for another share of the time."""

    NVMLError_DriverNotLoaded = RuntimeError

    def __init__(self):
        super().__init__("pynvml")
        self.asked = threading.Event()

    def nvmlInit(self): ...

    def nvmlDeviceGetHandleByIndex(self, index):
        return index

    def nvmlDeviceGetUtilizationRates(self, index):
        self.asked.set()
        return SimpleNamespace(gpu=10 * index)


def test_the_gpu_that_is_watched_is_the_first_visible_one(load, monkeypatch):
    bench, nvml = load("bench_real_rollouts"), Nvml()
    monkeypatch.setitem(sys.modules, "pynvml", nvml)
    monkeypatch.setattr(torch.cuda, "pynvml", nvml, raising=False)
    monkeypatch.setattr(torch.cuda, "_HAS_PYNVML", True)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,1")
    with bench.Usage() as usage:
        assert nvml.asked.wait(60)
    assert usage.gpu == 0.3

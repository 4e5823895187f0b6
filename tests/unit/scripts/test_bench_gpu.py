"""What the benchmarks for GPUs do that needs none: runs within a limit, and an engine's experts beside its samples."""

import math
import sys

import numpy as np
import pytest
import torch

from posttrain.core.types import Sample


def test_a_run_that_takes_too_long_is_stopped_and_says_so(load, tmp_path):
    bench = load("bench_vision")
    said = bench.run_limited(["sleep", "600"], tmp_path, tmp_path / "log", 0.1)
    assert said.startswith("stopped after 0 s")


def test_a_run_that_fails_says_why_and_one_that_ends_says_nothing(load, tmp_path):
    bench = load("bench_vision")
    code = "import sys; print('out'); sys.exit('no such model')"
    assert "no such model" in bench.run_limited([sys.executable, "-c", code], tmp_path, tmp_path / "log", 300.0)
    assert bench.run_limited([sys.executable, "-c", "print('good')"], tmp_path, tmp_path / "log", 300.0) == ""
    assert (tmp_path / "log").read_text() == "good\n"


def test_experts_stand_beside_the_tokens_that_they_computed(load):
    bench = load("bench_rollout_gpu")
    asked = [[5, 6, 7], [8]]
    first, second = (np.arange(count * 2, dtype=np.uint8).reshape(count, 2) for count in (4, 2))
    samples = [Sample([9, 10], [-1.0, -2.0], "length", 1, first), Sample([11, 12], [-3.0, -4.0], "length", 1, second)]
    batch = bench.with_experts(asked, samples)
    assert batch.routing.tolist() == [[0, 1], [2, 3], [4, 5], [6, 7], [0, 0], [0, 1], [2, 3], [0, 0]]
    assert batch.loss_mask.tolist() == [False, False, False, True, True, False, True, True]


def test_differences_are_of_the_trainer_against_the_engine(load):
    bench = load("bench_rollout_gpu")
    found = bench.differences(torch.tensor([-1.0, -2.0]), torch.tensor([-1.0, -2.5], dtype=torch.float64))
    assert found["mean abs"] == 0.25
    assert found["k3"] == pytest.approx((math.exp(0.5) - 1.5) / 2)
    assert found["outside [0.9, 1.1]"] == 0.5

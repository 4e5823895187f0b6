"""Which of many tensors hold a value that is not finite."""

import math

import pytest
import torch

from posttrain.models.shards import nonfinite


def tensors():
    return {
        "bfloat16": torch.full((3, 5), -3.0e38, dtype=torch.bfloat16),
        "float16": torch.full((4,), 65_504.0, dtype=torch.float16),
        "float32": torch.tensor([3.0e38, -1.0]),
        "scalar": torch.tensor(0.0),
        "empty": torch.empty(0, 7),
        "steps": torch.tensor([2**40]),
    }


def test_large_values_are_finite():
    assert nonfinite(tensors()) == []
    assert nonfinite({}) == []


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("names", [["bfloat16"], ["float16"], ["float32"], ["scalar"], ["bfloat16", "float32"]])
def test_those_that_are_not_are_named(names, value):
    given = tensors()
    for name in names:
        given[name].view(-1)[-1] = value
    assert nonfinite(given) == names

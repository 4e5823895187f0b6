"""The token columns of an episode."""

from dataclasses import replace

import pytest

from posttrain.core.types import Sample
from posttrain.data.record import Record

SAMPLE = Sample([5, 6, 7, 8], [-1.0, -2.0, -3.0, -4.0], "stop", 3, updates=((1, 4), (3, 6)))


@pytest.mark.parametrize(("sample", "versions"), [
    (SAMPLE, [3, 4, 4, 6]),
    (replace(SAMPLE, updates=((0, 4), (0, 5))), [5] * 4),  # it began after both
    (replace(SAMPLE, updates=((4, 9),)), [3] * 4),  # it had ended
    (replace(SAMPLE, ids=[5, 6], logprobs=[-1.0, -2.0]), [3, 4]),  # a part of it, cut at a stop text
])  # fmt: skip
def test_each_token_has_the_version_that_sampled_it(sample, versions):
    record = Record([1, 2])
    record.sampled(sample)
    record.given([9])
    columns = record.columns()
    assert columns["weight_version"].tolist() == [-1, -1, *versions, -1]
    again = Record.of(columns).columns()
    assert {name: column.tolist() for name, column in again.items()} == {
        name: column.tolist() for name, column in columns.items()
    }

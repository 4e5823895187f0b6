"""Metrics of an update are combined over ranks by what they are."""

from posttrain.train.spec import UpdateMetrics, over_ranks


def test_sums_are_added_and_the_largest_of_maxima_counts():
    ranks = [
        UpdateMetrics({"loss": 0.5}, {"grad_norm": 2.0, "lr": 0.1}, {"seconds": 1.0}),
        UpdateMetrics({"loss": 0.25, "cov": 3.0}, {"grad_norm": 2.0, "lr": 0.1}, {"seconds": 4.0}),
    ]
    assert over_ranks(ranks) == {"loss": 0.75, "cov": 3.0, "grad_norm": 2.0, "lr": 0.1, "seconds": 4.0}
    assert ranks[0].sums == {"loss": 0.5}

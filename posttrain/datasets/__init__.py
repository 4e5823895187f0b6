"""Datasets that ``posttrain prep`` knows: one short file each."""

from posttrain.datasets.base import DATASETS, Dataset, WordProblems

__all__ = ["DATASETS", "Dataset", "WordProblems"]

"""Datasets that ``posttrain prep`` knows: one short file each."""

from posttrain.datasets.base import DATASETS, Dataset, FileSet, Refusal, WordProblems, refusal

__all__ = ["DATASETS", "Dataset", "FileSet", "Refusal", "WordProblems", "refusal"]

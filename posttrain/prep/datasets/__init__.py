"""Datasets that ``posttrain prep`` knows: one short file each."""

from posttrain.prep.datasets.base import (
    DATASETS,
    Dataset,
    FileSet,
    Kind,
    Refusal,
    WordProblems,
    available_splits,
    fault,
    open_dataset,
    raw_rows,
    refusal,
)

__all__ = [
    "DATASETS",
    "Dataset",
    "FileSet",
    "Kind",
    "Refusal",
    "WordProblems",
    "available_splits",
    "fault",
    "open_dataset",
    "raw_rows",
    "refusal",
]

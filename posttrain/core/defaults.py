"""Defaults of `merge-ckpt`, no part of the config tree. Imports nothing, so that the command line starts fast."""

from typing import Literal

WeightsDtype = Literal["float32", "bfloat16", "float16"]
MERGED_DTYPE: WeightsDtype = "float32"
"""Data type of the weights in a folder that transformers loads."""
MERGED_SHARD_SIZE = "5GB"
"""Largest file of them."""

"""Matrix products of a trainer whose result for a token does not depend on how many other tokens are in the batch."""

from __future__ import annotations

import os

import torch


def use_invariant_products() -> None:
    """For all products of this process, before its first one.

    cuBLAS chooses a kernel by the shapes. Those that cut the inner dimension into parts and add these up in an order of
    their own need room to work in; without it none is chosen. (So does vLLM on these GPUs.) Attention over ragged rows
    and what torch compiles go row by row as they are.
    """
    os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":16:8"
    os.environ["CUBLASLT_WORKSPACE_SIZE"] = "1"
    torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = (False, False)  # nor split-K
    torch.backends.cuda.preferred_blas_library("cublaslt")

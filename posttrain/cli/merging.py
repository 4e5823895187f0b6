"""Command that converts checkpoints to Hugging Face folders: merge-ckpt."""

from __future__ import annotations

from typing import Annotated

import typer

from posttrain.cli.console import echo
from posttrain.cli.options import (
    OverwriteOption,
)
from posttrain.core.defaults import MERGED_DTYPE, MERGED_SHARD_SIZE, WeightsDtype


def merge_ckpt(
    checkpoint: Annotated[str, typer.Argument(help="A run's name, its folder, or a global_step_N folder.")],
    out: Annotated[str, typer.Option(help="Hugging Face folder to write.")],
    adapter: Annotated[bool, typer.Option("--adapter", help="Write only the adapter of a LoRA run, for peft.")] = False,
    dtype: Annotated[
        WeightsDtype | None, typer.Option(help="Dtype of the written weights.", show_default=MERGED_DTYPE)
    ] = None,
    max_shard_size: Annotated[
        str | None, typer.Option(help="Maximum size of a safetensors file.", show_default=MERGED_SHARD_SIZE)
    ] = None,
    check: Annotated[
        bool, typer.Option("--check", help="Load the result with transformers and compare it with the trainer.")
    ] = False,
    push: Annotated[
        str | None, typer.Option(metavar="NAMESPACE/NAME", help="Upload the result to the Hugging Face hub.")
    ] = None,
    private: Annotated[
        bool | None,
        typer.Option(
            "--private/--public", help="Visibility of a repository that --push creates.", show_default="private"
        ),
    ] = None,
    overwrite: OverwriteOption = False,
) -> None:
    """Merge a sharded checkpoint, ours or verl's, into a Hugging Face folder. Needs memory for the largest weight."""
    from posttrain import merge_ckpt

    echo(
        merge_ckpt.run(
            checkpoint,
            out,
            overwrite=overwrite,
            adapter=adapter,
            dtype=dtype,
            max_shard_size=max_shard_size,
            check=check,
            push=push,
            private=private,
        )
    )

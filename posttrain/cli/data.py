"""Command that turns raw data into checked parquet: prep."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from posttrain.cli.console import echo
from posttrain.cli.options import OverwriteOption, PluginOption, names_in
from posttrain.core.errors import ConfigError


def prep(
    name: Annotated[str | None, typer.Argument(help="Name of the data set; --list shows them.")] = None,
    list_: Annotated[bool, typer.Option("--list", help="List the data sets.")] = False,
    source: Annotated[
        str | None, typer.Option(help="Raw files: a file, a folder or a glob; default: the Hugging Face hub.")
    ] = None,
    out: Annotated[str | None, typer.Option(help="Folder to write to; default data/NAME.")] = None,
    limit: Annotated[int | None, typer.Option(min=1, help="Maximum rows per split, from its start.")] = None,
    split: Annotated[list[str] | None, typer.Option(help="Only this split; repeatable.")] = None,
    seed: Annotated[int, typer.Option(min=0, help="Seed of generated data; other sets read none.")] = 0,
    train_rows: Annotated[
        int | None, typer.Option(min=1, help="Maximum rows of the train split; of generated data, their number.")
    ] = None,
    test_rows: Annotated[
        int | None, typer.Option(min=1, help="Maximum rows of the test split; of generated data, their number.")
    ] = None,
    val_fraction: Annotated[
        float, typer.Option(help="Share of the train split to write to val files, chosen by a hash of the prompt.")
    ] = 0.0,
    template: Annotated[
        str | None,
        typer.Option(help="Chat template that must render every row: a .jinja file, or a model that has one."),
    ] = None,
    tokenizer: Annotated[
        str | None, typer.Option(help="Model whose tokenizer measures the row lengths of the card.")
    ] = None,
    tools: Annotated[
        str | None, typer.Option(help="Tools, separated by commas, to add to SFT rows and tools_kwargs.")
    ] = None,
    demos: Annotated[
        str | None,
        typer.Option(metavar="KIND", help="Demonstrations of gsm8k: check (the default), calculator or plain."),
    ] = None,
    decontaminate: Annotated[
        list[str] | None,
        typer.Option(metavar="FILE", help="Drop training rows whose prompt overlaps this parquet or set; repeatable."),
    ] = None,
    plugin: PluginOption = None,
    overwrite: OverwriteOption = False,
) -> None:
    """Turn raw data into checked parquet."""
    from posttrain.core.registry import load_plugins
    from posttrain.prep import command as prep
    from posttrain.prep.datasets import DATASETS

    load_plugins(plugin or [])
    if list_:
        prep.print_list()
        return
    if name is None:
        raise ConfigError("which data set?", hint=f"one of: {', '.join(DATASETS.names())}")
    report = prep.run(
        name,
        source,
        out,
        limit=limit,
        splits=split or (),
        seed=seed,
        train_rows=train_rows,
        test_rows=test_rows,
        val_fraction=val_fraction,
        template=template,
        tokenizer=tokenizer,
        tools=names_in(tools or ""),
        demos=demos,
        decontaminate=decontaminate or (),
        overwrite=overwrite,
    )
    for reason, rows in report.dropped.items():
        echo(f"{rows} rows dropped: {reason}", err=True)
    for note in report.notes:
        echo(note, err=True)
    for file, rows in report.rows.items():
        echo(f"{Path(report.out) / file}  {rows} rows")

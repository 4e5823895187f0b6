"""`posttrain report`: the page of one or more runs."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from pathlib import Path

from posttrain.core.errors import ConfigError
from posttrain.core.files import check_new
from posttrain.runs.run import run_folder
from posttrain.tracking.report.background import FILE
from posttrain.tracking.report.page import write_page


def run(names: Sequence[str], root: str, out: Path | None, *, overwrite: bool = False) -> Path:
    """Write the report of ``names``, each the name of a run below ``root`` or the path of its folder; returns its file:
    ``out``, or ``report.html`` in the folder of the only run, or ``report-A-B.html`` in ``root``.

    Raises:
        ConfigError: one of them is no run, ``out`` is not named like a page or exists and ``overwrite`` is false, or
            the file cannot be written.
    """
    if out is not None:
        if out.suffix.lower() not in (".html", ".htm"):
            named = shlex.quote(str(out.with_suffix(".html")))
            raise ConfigError(f"--out {out}: the name of a page ends with .html", hint=f"--out {named}")
        check_new(out, "--out", overwrite=overwrite)
    folders = [run_folder(root, name) for name in names]
    if len({folder.resolve() for folder in folders}) < len(folders):
        raise ConfigError("a run is named twice", hint="name each once")
    if out is None:
        first, *others = [folder.resolve().name for folder in folders]
        more = others if len(others) < 3 else [f"and-{len(others)}-more"]
        out = folders[0].parent / f"report-{'-'.join([first, *more])}.html" if others else folders[0] / FILE
    write_page(out, folders)
    return out

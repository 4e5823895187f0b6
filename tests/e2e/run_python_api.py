"""Runs Python code of the documents in this process, as a notebook would: in the main thread, under an event loop.

python run_python_api.py FOLDER FILE...      notebooks (.ipynb) and pages (.md, their python blocks), in this order

The last line on stdout is JSON: for each file the number of lines that it has plotted.
"""

import ast
import asyncio
import json
import os
import re
import sys
from pathlib import Path

import matplotlib.pyplot as plt

from posttrain.cluster.cluster import local_ray


def cells(file: Path) -> list[str]:
    text = file.read_text(encoding="utf-8")
    if file.suffix == ".md":
        return re.findall(r"^```python\n(.*?)^```", text, flags=re.S | re.M)
    return ["".join(cell["source"]) for cell in json.loads(text)["cells"] if cell["cell_type"] == "code"]


async def run_file(file: Path) -> int:
    plt.close("all")
    names: dict[str, object] = {"__name__": "__main__"}
    for number, cell in enumerate(cells(file), start=1):
        code = compile(cell, f"{file.name}, cell {number}", "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
        exec(code, names)
    return sum(len(axes.lines) for number in plt.get_fignums() for axes in plt.figure(number).axes)


if __name__ == "__main__":
    folder, *files = map(os.path.abspath, sys.argv[1:])
    os.chdir(folder)
    with local_ray():
        lines = {os.path.basename(file): asyncio.run(run_file(Path(file))) for file in files}
    print(json.dumps(lines))

"""verl 0.9.1 in an environment of its own, for the scripts that compare with it: its pins are not ours.

It holds what the compared parts of verl import, and no GPU code: everything runs on a CPU.
    POSTTRAIN_VERL_VENV  the environment's folder (default .venv-verl at the top of the checkout)
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

VERL = "verl==0.9.1"
IMPORTED = [
    "torch", "ray", "transformers", "accelerate", "pandas", "tensordict<=0.10", "omegaconf", "codetiming",
    "peft", "datasets", "pillow",
]  # fmt: skip
"""What these parts of verl need; the rest of its requirements are engines."""
REPO = Path(__file__).resolve().parents[1]


def python() -> Path:
    """The environment's interpreter. The environment is made the first time, which takes minutes and a network."""
    folder = Path(os.environ.get("POSTTRAIN_VERL_VENV", REPO / ".venv-verl")).absolute()
    interpreter, stamp = folder / "bin" / "python", folder / "posttrain-stamp"
    wanted = "\n".join([*IMPORTED, VERL])
    if stamp.is_file() and stamp.read_text() == wanted:
        return interpreter
    print(f"making an environment for {VERL} in {folder}", file=sys.stderr)
    subprocess.run([sys.executable, "-m", "venv", folder], check=True)
    pip = [interpreter, "-m", "pip", "install", "--quiet"]
    for arguments in (IMPORTED, ["--no-deps", VERL]):
        subprocess.run([*pip, *arguments], check=True, stdout=sys.stderr)
    stamp.write_text(wanted)
    return interpreter


def environment() -> dict[str, str]:
    """In which that interpreter finds this checkout's modules that need torch and transformers only."""
    return os.environ | {"PYTHONPATH": str(REPO)}


def run_there() -> None:
    """Run the present script again with that interpreter, in the place of this process; nothing if this is it."""
    interpreter = python()
    if Path(sys.prefix) != interpreter.parent.parent:
        os.execve(interpreter, [str(interpreter), *sys.argv], environment())

"""The wheel works outside the checkout, and the scripts say what they need."""

import importlib.util
import os
import re
import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path

import pyarrow.parquet as pq
import pytest
import tomli

from posttrain import __version__

REPO = Path(__file__).parents[3]


def test_constraints_pin_every_dependency() -> None:
    project = tomli.loads((REPO / "pyproject.toml").read_text())["project"]
    lines = (REPO / "constraints.txt").read_text().splitlines()
    pins = {line.partition("==")[0].lower().replace("_", "-") for line in lines if not line.startswith("#")}
    wanted = [*project["dependencies"], *project["optional-dependencies"]["dev"]]
    names = {d: d.partition(">=")[0].partition("[")[0].lower().replace("_", "-") for d in wanted}
    missing = [d for d, name in names.items() if name not in pins]
    assert missing == []


@pytest.mark.parametrize(
    "script",
    [
        "scripts/quickstart",
        "scripts/test",
        "scripts/coverage",
        "scripts/test_vllm",
        ".ci/run",
        "scripts/_venv.sh",
        "scripts/slurm_rl.sbatch",
    ],
)
def test_scripts_parse(script: str) -> None:
    subprocess.run(["bash", "-n", str(REPO / script)], check=True)
    if not script.endswith(".sh"):
        assert os.access(REPO / script, os.X_OK)


def test_quickstart_refuses_an_old_python(tmp_path: Path) -> None:
    old = tmp_path / "python3"
    old.write_text("#!/bin/sh\nexit 1\n")
    old.chmod(0o755)
    environment = {**os.environ, "PYTHON": str(old), "POSTTRAIN_VENV": str(tmp_path / "venv")}
    done = subprocess.run(
        [str(REPO / "scripts" / "quickstart")], cwd=tmp_path, env=environment, capture_output=True, text=True
    )
    assert done.returncode == 2
    assert done.stdout == ""
    assert "is not Python 3.11 or newer" in done.stderr
    assert not (tmp_path / "venv").exists()


def test_an_environment_with_an_engine_is_left_as_it_is(tmp_path: Path) -> None:
    commands = tmp_path / "venv" / "bin"
    commands.mkdir(parents=True)
    pip = f'#!/bin/sh\n[ "$1" = -c ] && echo 3.12 || echo "$@" >> {tmp_path}/pip\n'
    for name, text in (("python", pip), ("posttrain", "#!/bin/sh\necho posttrain $1\n")):
        (commands / name).write_text(text)
        (commands / name).chmod(0o755)
    (commands / "activate").write_text(f"PATH={commands}:$PATH\n")

    def script(name: str, *args: str) -> subprocess.CompletedProcess[str]:
        environment = {**os.environ, "POSTTRAIN_VENV": str(tmp_path / "venv")}
        command = [str(REPO / "scripts" / name), *args]
        return subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)

    assert script("install_gpu", "sglang").stdout == "posttrain doctor\n"
    installed = (tmp_path / "pip").read_text()
    assert "tested/sglang.txt" in installed
    assert script("quickstart").stdout == "posttrain quickstart\n"
    assert (tmp_path / "pip").read_text() == installed
    refused = script("test")
    assert refused.returncode == 2
    assert "is of scripts/install_gpu" in refused.stderr
    assert "hint: POSTTRAIN_VENV=.venv-dev " in refused.stderr
    assert (tmp_path / "pip").read_text() == installed


@pytest.mark.slow
def test_wheel_runs_outside_the_checkout(tmp_path: Path) -> None:
    # With the build back-end at hand no index is needed.
    isolation = ["--no-isolation"] if importlib.util.find_spec("hatchling") else []
    build = [sys.executable, "-m", "build", "--wheel", *isolation, "--outdir", str(tmp_path), str(REPO)]
    built = subprocess.run(build, capture_output=True, text=True)
    assert built.returncode == 0, built.stdout + built.stderr
    (wheel,) = tmp_path.glob("posttrain-*.whl")
    names = zipfile.ZipFile(wheel).namelist()
    assert {f"posttrain/_presets/{file.name}" for file in (REPO / "presets").glob("*.toml")} <= set(names)
    tiny = [file.relative_to(REPO) for file in (REPO / "posttrain/models/tiny").iterdir() if file.is_file()]
    page = [file.relative_to(REPO) for file in (REPO / "posttrain/tracking/report/assets").iterdir()]
    assert {str(file) for file in (*tiny, *page)} <= set(names)
    assert not [name for name in names if not name.startswith("posttrain")]

    # A fresh environment that borrows this one's dependencies, but not its posttrain.
    venv = tmp_path / "venv"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(venv)], check=True)
    python = venv / "bin" / "python"
    pip = [sys.executable, "-m", "pip", "--python", str(python), "install", "--quiet", "--no-deps", "--no-index"]
    subprocess.run([*pip, str(wheel)], check=True)
    (site,) = venv.glob("lib/python*/site-packages")
    (site / "borrowed.pth").write_text(sysconfig.get_paths()["purelib"] + "\n")

    outside = tmp_path / "outside"
    outside.mkdir()
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}

    def posttrain(*args: str) -> str:
        command = [str(venv / "bin" / "posttrain"), *args]
        done = subprocess.run(command, cwd=outside, env=environment, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        return done.stdout

    where = [str(python), "-c", "import posttrain; print(posttrain.__file__)"]
    located = subprocess.run(where, cwd=outside, env=environment, capture_output=True, text=True, check=True)
    assert located.stdout.startswith(str(venv))
    assert posttrain("version").strip() == __version__
    assert "tiny-gsm8k" in posttrain("presets")
    posttrain("prep", "arith", "--limit", "10")
    (outside / "runs" / "a").mkdir(parents=True)
    for name, text in (("run.json", "{}"), ("provenance.json", "{}"), ("config.toml", "")):
        (outside / "runs" / "a" / name).write_text(text)
    assert posttrain("report", "a").strip() == "runs/a/report.html"
    assert pq.read_metadata(outside / "data" / "arith" / "train.parquet").num_rows == 10


@pytest.mark.parametrize("page", ["CONTRIBUTING.md", "AGENTS.md"])
def test_paths_named_for_contributors_exist(page: str) -> None:
    text = (REPO / page).read_text(encoding="utf-8")
    named = re.findall(r"(?<![\w/.-])((?:posttrain|docs|scripts|tests|presets)/[\w./-]*[\w/])", text)
    assert len(named) > 5
    assert [path for path in named if "PACKAGE" not in path and not (REPO / path).exists()] == []

"""Installed packages and their versions. The ranges are those of the package's own metadata (pyproject.toml), and of
`posttrain.engines.choice` for engines."""

from __future__ import annotations

import platform
from importlib import metadata, resources

from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.version import Version

from posttrain.core.machines import has_gpu
from posttrain.doctor.base import CheckResult
from posttrain.engines.choice import ENGINES


def python() -> list[CheckResult]:
    """The interpreter is one that posttrain is for."""
    wanted = str(metadata.metadata("posttrain")["Requires-Python"])
    here = platform.python_version()
    if SpecifierSet(wanted).contains(here, prereleases=True):
        return [CheckResult("python", "ok", f"{here} (wanted: {wanted})")]
    return [CheckResult("python", "fail", f"{here}, wanted: {wanted}", "make the environment with another Python")]


def requirements(extra: str = "") -> list[Requirement]:
    """What posttrain requires; with ``extra``, what that extra adds."""
    found = [Requirement(text) for text in metadata.requires("posttrain") or []]
    return [
        r
        for r in found
        if (r.marker is None and not extra)
        or (r.marker is not None and r.marker.evaluate({"extra": extra}) and bool(extra) == ("extra" in str(r.marker)))
    ]


def installed(name: str) -> str | None:
    """The version of a distribution, None if it is not installed."""
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def packages() -> list[CheckResult]:
    """Every package that posttrain needs is there, in its range; the ones that matter most by name."""
    bad = []
    shown = []
    wanted = requirements()
    for requirement in wanted:
        version = installed(requirement.name)
        if version is None or not requirement.specifier.contains(version, prereleases=True):
            bad.append(
                CheckResult(
                    requirement.name,
                    "fail",
                    f"{version or 'not installed'}, wanted: {requirement.specifier}",
                    f"pip install '{requirement.name}{requirement.specifier}'",
                )
            )
        elif requirement.name in ("torch", "transformers", "ray"):
            shown.append(f"{requirement.name} {version} ({requirement.specifier})")
    detail = f"{', '.join(shown)}; {len(wanted) - len(bad)} of {len(wanted)} packages in their ranges"
    return [*bad, CheckResult("packages", "warn" if bad else "ok", detail, "see the lines above" if bad else "")]


def engines() -> list[CheckResult]:
    """Which engines can sample here, and whether these versions ran on a GPU."""
    found = [CheckResult("engine hf", "ok", "always there")]
    for name, kind in ENGINES.items():
        if not kind.packages:
            continue
        here = [(package, version) for package in kind.packages if (version := installed(package))]
        if not here:
            found.append(CheckResult(f"engine {name}", "ok", f"not installed (pip install 'posttrain[{name}]')"))
            continue
        package, version = here[0]
        if not SpecifierSet(kind.versions).contains(version, prereleases=True):
            hint = f"pip install '{package}{kind.versions}'; until then rollout.engine = {name!r} is refused"
            found.append(CheckResult(f"engine {name}", "warn", f"{package} {version}, tested: {kind.versions}", hint))
        elif package == kind.packages[0] and (others := _untested(name, package)):
            detail = f"{package} {version} ({kind.versions}), which did not run on a GPU with {', '.join(others)}"
            hint = f"scripts/install_gpu {name} installs what did"
            found.append(CheckResult(f"engine {name}", "warn", detail, hint))
        else:
            found.append(CheckResult(f"engine {name}", "ok", f"{package} {version} ({kind.versions})"))
    return found


def tested_versions(engine: str) -> dict[str, str]:
    """Return {package: version} of the installation in which an engine ran on a GPU; `scripts/install_gpu` makes it."""
    text = resources.files("posttrain.doctor").joinpath(f"tested/{engine}.txt").read_text(encoding="utf-8")
    return dict(line.split("==") for line in text.splitlines() if not line.startswith("#"))


def _untested(engine: str, package: str) -> list[str]:
    """Return those versions of what computes that are not the tested ones, each with the version that is tested."""
    tested = tested_versions(engine)
    return [
        f"{name} {version} (tested: {tested[name]})"
        for name in (package, "torch", "transformers", "ray")
        if (version := installed(name)) and Version(version).public != tested[name]
    ]


def kernels() -> list[CheckResult]:
    """FlashAttention, which `train.attention = "auto"` takes where it is there."""
    if not has_gpu():
        return [CheckResult("attention", "ok", "sdpa: without a GPU there is no other")]
    (wanted,) = requirements("flash-attn")
    names = {"flash-attn-4": "flash4", "flash_attn_3": "flash3", wanted.name: "flash2"}
    here = [f"{kernel} ({name} {version})" for name, kernel in names.items() if (version := installed(name))]
    version = installed(wanted.name)
    if version is not None and not wanted.specifier.contains(version, prereleases=True):
        hint = f"pip install --no-build-isolation '{wanted.name}{wanted.specifier}'"
        return [CheckResult("attention", "warn", f"{wanted.name} {version}, wanted: {wanted.specifier}", hint)]
    if here:
        return [CheckResult("attention", "ok", ", ".join(here))]
    return [CheckResult("attention", "ok", "torch's varlen attention; flash-attn is not installed, and is faster")]


def cuda() -> list[CheckResult]:
    """torch, its CUDA and NCCL, and whether they work with the driver."""
    import torch

    build = f"torch {torch.__version__}"
    if not has_gpu():
        detail = f"{build}: no NVIDIA GPU that can be used: the tiny presets run on the CPU"
        return [CheckResult("cuda", "ok", detail)]
    if torch.version.cuda is None:
        hint = "pip install torch from the index of your CUDA version, https://pytorch.org/get-started"
        return [CheckResult("cuda", "fail", f"{build} is built without CUDA, and there is a GPU", hint)]
    if not torch.cuda.is_available():
        hint = "run `nvidia-smi`: the driver may be older than this CUDA; is CUDA_VISIBLE_DEVICES right?"
        return [CheckResult("cuda", "fail", f"{build} with CUDA {torch.version.cuda} cannot use the GPU", hint)]
    torch.ones(8, device="cuda").sum().item()
    nccl = ".".join(map(str, torch.cuda.nccl.version()))
    half = "bfloat16" if torch.cuda.is_bf16_supported() else "no bfloat16"
    detail = f"{build}, CUDA {torch.version.cuda}, NCCL {nccl}, {torch.cuda.device_count()} GPUs, {half}"
    if half != "bfloat16":
        return [CheckResult("cuda", "warn", detail, "--set train.dtype=float32")]
    return [CheckResult("cuda", "ok", detail)]

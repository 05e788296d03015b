"""`lowbit doctor`: which kernels, compilers, GPUs and extras this machine can use, and why not the others."""

from __future__ import annotations

import os
import platform
import shutil
import warnings
from collections.abc import Iterator
from dataclasses import asdict, dataclass

import torch
import typer

import lowbit
from lowbit import optional
from lowbit.cli.output import print_json


@dataclass(frozen=True)
class Finding:
    """A line of the report. `usable`: None for a version. `detail`: the reason and the way out."""

    section: str
    name: str
    usable: bool | None
    detail: str


def doctor(json: bool) -> None:
    """The command `doctor`."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the findings repeat these warnings
        found = [*_versions(), *_gpus(), *_compilers(), *_kernels(), *_extras()]
    if json:
        print_json({"findings": [asdict(finding) for finding in found]})
        return
    section = ""
    for finding in found:
        if finding.section != section:
            section = finding.section
            typer.echo(f"{section}:")
        mark = {True: "yes", False: "no ", None: "   "}[finding.usable]
        typer.echo(f"  {mark} {finding.name}: {finding.detail}")


def _versions() -> Iterator[Finding]:
    processor = f"{platform.system()} {platform.machine()}, {os.cpu_count()} processors"
    threads = torch.get_num_threads()
    yield Finding("versions", "lowbit", None, lowbit.__version__)
    yield Finding("versions", "Python", None, f"{platform.python_version()} on {processor}")
    yield Finding("versions", "torch", None, f"{torch.__version__}, {threads} threads")
    yield Finding(
        "versions", "CUDA of torch", None, torch.version.cuda or "none, this is a CPU build"
    )
    yield Finding("versions", "triton", None, optional.version("triton") or "not installed")


def _gpus() -> Iterator[Finding]:
    if not torch.cuda.is_available():
        reason = (
            "torch is a build for CPUs: install a CUDA build of torch from pytorch.org"
            if torch.version.cuda is None
            else "torch sees none: check nvidia-smi, the driver's version and CUDA_VISIBLE_DEVICES"
        )
        yield Finding("GPUs", "GPU", False, reason)
        return
    for i in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(i)
        level = (properties.major, properties.minor)
        units = [
            name
            for name, first in (("int8", (8, 0)), ("float8", (8, 9)), ("wgmma", (9, 0)))
            if level >= first and (name != "wgmma" or level == first)
        ]
        memory = properties.total_memory / 2**30
        detail = (
            f"{properties.name}, {memory:.0f} GiB, compute capability {level[0]}.{level[1]}; "
            f"matrix units for {', '.join(units) or 'neither int8 nor float8'}"
        )
        yield Finding("GPUs", f"cuda:{i}", bool(units), detail)


def _compilers() -> Iterator[Finding]:
    yield _finding("compilers", "C++ compiler", _why_no_host_compiler(), _host_compiler())
    yield _finding("compilers", "NVRTC", _why_no_nvrtc(), "compiles CUDA kernels at first use")
    nvcc = shutil.which("nvcc")
    detail = f"{nvcc or 'not found'}; lowbit does not need it"
    yield Finding("compilers", "nvcc", None if nvcc is None else True, detail)
    from lowbit_kernels.runtime import disk_cache, trusted_folder

    try:
        folder = disk_cache.cache_folder()
        trusted_folder.trusted(folder, make=True)
        kept, detail = True, str(folder)
    except OSError as error:
        kept, detail = False, f"{error}: set LOWBIT_CACHE_DIR to a folder of your own"
    yield Finding("compilers", "folder of compiled kernels", kept, detail)


def _finding(section: str, name: str, obstacle: str | None, detail: str) -> Finding:
    return Finding(section, name, obstacle is None, obstacle or detail)


def _host_compiler() -> str:
    from lowbit_kernels.runtime import host_compiler

    return " ".join(host_compiler.compiler())


def _why_no_host_compiler() -> str | None:
    """Why the compiler does not compile a function of one line; None: it does."""
    from lowbit_kernels.runtime import host_compiler

    try:
        host_compiler.library('extern "C" int lowbit_doctor() { return 1; }')
    except RuntimeError as error:
        return " ".join(str(error).split())
    return None


def _why_no_nvrtc() -> str | None:
    from lowbit_kernels.runtime import nvrtc

    if not torch.cuda.is_available():
        return "there is no GPU to compile for"
    if not nvrtc.is_available():
        return "cuda.bindings is missing: pip install cuda-python"
    return None


def _why_no_triton() -> str | None:
    if optional.version("triton") is None:
        return f"triton is not installed: {optional.install('triton')}"
    return None if torch.cuda.is_available() else "there is no GPU to run it on"


def _kernels() -> Iterator[Finding]:
    on_cpu = _why_no_host_compiler()
    if on_cpu is None and not torch.backends.openmp.is_available():
        on_cpu = "this torch has no OpenMP"
    fallback = "; PyTorch operations take their place"
    hopper = None
    if (obstacle := _why_no_nvrtc()) is not None:
        hopper = obstacle
    elif torch.cuda.get_device_capability() != (9, 0):
        hopper = "they are for compute capability 9.0"
    for name, obstacle, detail in (
        ("CPU kernels", on_cpu, "int4 and int8 linears, optimizer steps, dequantization"),
        ("CUDA optimizer steps", _why_no_nvrtc(), "one launch for all parameters"),
        ("CUDA kernels for Hopper", hopper, "int4, int8 and float8 products, quantization"),
        ("Triton kernels", _why_no_triton(), "products and quantization on other GPUs"),
    ):
        yield _finding("kernels", name, f"{obstacle}{fallback}" if obstacle else None, detail)


def _extras() -> Iterator[Finding]:
    if not optional.extras():
        missing = "lowbit has no metadata here, which names its extras: install it by pip"
        yield Finding("extras", "all", False, missing)
    for extra, packages in optional.extras().items():
        obstacles = [_why_not(package) for package in packages if package.obstacle() is not None]
        detail = ", ".join(f"{package.name} {package.version()}" for package in packages)
        if obstacles:
            detail = f"{', '.join(obstacles)}: {optional.install(extra, upgrade=True)}"
        yield Finding("extras", extra, not obstacles, detail or "nothing on this platform")


def _why_not(package: optional.Package) -> str:
    """Why the extra cannot use the installed package."""
    found = package.version()
    if found is None:
        return f"without {package.name}"
    return f"{package.name} {found} is installed, and {package} is needed"

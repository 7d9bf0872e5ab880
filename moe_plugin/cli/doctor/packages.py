"""Versions of what moe-plugin uses, and the command that adds what is missing."""

from __future__ import annotations

import re
import shlex
import sys
from dataclasses import dataclass
from importlib import metadata
from importlib.util import find_spec


@dataclass(frozen=True)
class Package:
    """A distribution that moe-plugin can use.

    Attributes:
        gpu: useful only with a GPU.
        command: how to install it where its name is not enough for pip.
    """

    name: str
    module: str
    use: str
    gpu: bool = False
    command: str = ""


PIP = f"{shlex.quote(sys.executable)} -m pip install"
FAIRSEQ_NEEDS = ("regex", "sacrebleu", "tqdm", "bitarray", "cffi", "packaging")
PACKAGES = (
    Package("torch", "torch", "everything"),
    Package("numpy", "numpy", "everything"),
    Package("hydra-core", "hydra", "YAML through Hydra, fairseq"),
    Package("omegaconf", "omegaconf", "the config tree"),
    Package("triton", "triton", "fused kernels", gpu=True),
    Package("fairseq", "fairseq", "the fairseq host",
            command=f"{PIP} {' '.join(FAIRSEQ_NEEDS)} && {PIP} --no-deps fairseq==0.12.2"),
    Package("megatron-core", "megatron.core", "the Megatron host"),
    Package("psutil", "psutil", "checkpoints of the Megatron host"),
    Package("tensorboard", "tensorboard", "statistics in TensorBoard"),
    Package("wandb", "wandb", "statistics in Weights & Biases"),
    Package("matplotlib", "matplotlib", "plots of benchmarks and plans"),
    Package("rich", "rich", "colours and tables of `moe-plugin watch`"),
    Package("tqdm", "tqdm", "progress bars"),
    Package("transformer-engine", "transformer_engine", "Megatron's fused layers", gpu=True,
            command=f"{PIP} --no-build-isolation 'transformer-engine[pytorch]'"),
    Package("apex", "apex", "fused layer norm and Adam of the hosts", gpu=True,
            command=f"APEX_CPP_EXT=1 APEX_CUDA_EXT=1 {PIP} --no-build-isolation "
                    "git+https://github.com/NVIDIA/apex"),
    Package("deep_ep", "deep_ep", "dispatch.name=deepep", gpu=True,
            command=f"{PIP} --no-build-isolation git+https://github.com/deepseek-ai/DeepEP@v1.2.1"),
    Package("pytest", "pytest", "the tests"),
)


def installed_version(package: Package) -> str | None:
    """The version from the metadata, `unknown` for a module without metadata, None if absent."""
    try:
        if find_spec(package.module) is None:
            return None
    except (ImportError, ValueError):  # the parent package is missing or broken
        return None
    try:
        return metadata.version(package.name)
    except metadata.PackageNotFoundError:
        return "unknown"


def requirement(name: str) -> str:
    """The requirement from moe-plugin's own metadata (`tensorboard>=2.14`), else the name."""
    try:
        stated = metadata.requires("moe-plugin") or []
    except metadata.PackageNotFoundError:
        stated = []
    for line in stated:
        text = line.split(";")[0].strip()
        if re.split(r"[<>=!~\[ (]", text)[0].lower() == name:
            return text
    return name


def install_command(package: Package) -> str:
    """A shell command that adds the package to the running environment."""
    return package.command or f"{PIP} {shlex.quote(requirement(package.name))}"


def package_rows(has_gpu: bool) -> list[dict[str, str | None]]:
    """One row per package: name, version, use, state, and the install command where missing.

    The state is `installed`, `missing` or `not needed here (no GPU)`.
    """
    rows = []
    for package in PACKAGES:
        version, needed = installed_version(package), has_gpu or not package.gpu
        state = "installed" if version else "missing" if needed else "not needed here (no GPU)"
        rows.append({"name": package.name, "version": version, "use": package.use, "state": state,
                     "install": install_command(package) if state == "missing" else None})
    return rows

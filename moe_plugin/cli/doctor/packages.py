"""Versions of what moe-plugin uses, and the command that adds what is missing; whether each host
imports with our adapter, and which fused parts the hosts use.
"""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from dataclasses import dataclass
from importlib import metadata
from importlib.util import find_spec
from typing import Any

from moe_plugin.training.gradients import fused


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
# the wheels ask for Python 3.12, and work on 3.11; an older Python gets one without Megatron's loop
MEGATRON = (f"{PIP} psutil packaging pyyaml triton && {PIP} --no-deps --ignore-requires-python "
            "megatron-core==0.19.2" if sys.version_info >= (3, 11) else "")
FAIRSEQ_NEEDS = ("regex", "sacrebleu", "tqdm", "bitarray", "cffi", "packaging")
PACKAGES = (
    Package("torch", "torch", "everything"),
    Package("numpy", "numpy", "everything"),
    Package("hydra-core", "hydra", "YAML through Hydra, fairseq"),
    Package("omegaconf", "omegaconf", "the config tree"),
    Package("triton", "triton", "fused kernels", gpu=True),
    Package("fairseq", "fairseq", "the fairseq host",
            command=f"{PIP} {' '.join(FAIRSEQ_NEEDS)} && {PIP} --no-deps fairseq==0.12.2"),
    Package("megatron-core", "megatron.core", "the Megatron host", command=MEGATRON),
    Package("transformers", "transformers", "models and checkpoints of Hugging Face"),
    Package("peft", "peft", "files of adapters, and adapters of models of transformers"),
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
    Package("deep_ep", "deep_ep", "dispatch.name=deepep (2.1: deepep_v2; branch hybrid-ep: "
            "hybridep)", gpu=True,
            command=f"{PIP} --no-build-isolation git+https://github.com/deepseek-ai/DeepEP@v1.2.1"),
    Package("nccl4py", "nccl", "dispatch.name=nccl_ep", gpu=True,
            command=f"{PIP} 'nccl4py[cu13]'"),
    Package("pytest", "pytest", "the tests"),
)
_BY_NAME = {p.name: p for p in PACKAGES}
ADAPTER = {
    "fairseq": ("fairseq", "moe_plugin.hosts.fairseq"),
    "megatron": ("megatron-core", "moe_plugin.hosts.megatron.spec"),
    "transformers": ("transformers", "moe_plugin.hosts.transformers"),
}
_TIMEOUT_S = 300


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


def host_rows() -> list[dict[str, Any]]:
    """One row per host: name, version, state, reason, install command where it is missing."""
    started = {name: _start(name) for name in ADAPTER}
    return [_row(name, process) for name, process in started.items()]


def _start(name: str) -> subprocess.Popen | None:
    distribution, module = ADAPTER[name]
    if installed_version(_BY_NAME[distribution]) is None:
        return None
    # a separate process: a host may crash, or patch other modules; it yields to what the user waits
    # for meanwhile
    return subprocess.Popen([sys.executable, "-c", f"import os; os.nice(5); import {module}"],
                            stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)


def _row(name: str, process: subprocess.Popen | None) -> dict[str, Any]:
    package = _BY_NAME[ADAPTER[name][0]]
    row = {"name": name, "version": installed_version(package), "state": "not available",
           "reason": None, "install": None}
    if process is None:
        return {**row, "reason": f"{package.name} is not installed",
                "install": install_command(package)}
    try:
        _, errors = process.communicate(timeout=_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.communicate()
        return {**row, "reason": f"its import took more than {_TIMEOUT_S} s"}
    if process.returncode:
        last = (errors.strip().splitlines() or [f"exit status {process.returncode}"])[-1]
        wanted = requirement(package.name)
        if wanted == package.name:
            return {**row, "reason": f"does not import: {last}"}
        return {**row, "reason": f"does not import: {last}; moe-plugin is for {wanted}",
                "install": install_command(package)}
    return {**row, "state": "available"}


def fused_rows() -> list[dict[str, Any]]:
    """What the hosts use for Adam, norms, and the norm and scaling of gradients, and why."""
    return [{"name": choice.role, "state": choice.active, "reason": choice.reason}
            for choice in fused.choices()]

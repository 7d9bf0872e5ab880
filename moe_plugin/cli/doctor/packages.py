"""Functions that check the environment: package versions, host frameworks, devices and compiled
functions.

These functions also return the command that installs each missing package. For each host, they
check whether this package's adapter can be imported, and which fused implementations the host uses.
"""

from __future__ import annotations

import importlib
import os
import pkgutil
import re
import shlex
import subprocess
import sys
import time
from dataclasses import dataclass
from importlib import metadata
from importlib.util import find_spec
from typing import Any

import torch

import moe_plugin
from moe_plugin.config.refusals import HOSTS, LACKS, OF_HOSTS
from moe_plugin.hosts.fairseq import refusals as fairseq
from moe_plugin.hosts.megatron import refusals as megatron
from moe_plugin.kernels.activations import ACTIVATIONS
from moe_plugin.kernels.cpu import frozen, products
from moe_plugin.kernels.cpu.native import functions
from moe_plugin.kernels.cpu.products import in_float32
from moe_plugin.planner.units import show_size, show_time
from moe_plugin.training.gradients import fused
from moe_plugin.training.run_features import FEATURES
from moe_plugin.tuning.compute_times import ChoiceFiles
from moe_plugin.utils.machine import cpu_name
from moe_plugin.utils.registry import KINDS

# modules that import_everything skips, because they would import fairseq or Megatron
_APART = ("moe_plugin.cli", "moe_plugin.hosts")
_OPTIONAL = {"rich", "triton"}


def import_everything() -> list[dict[str, str]]:
    """Import all modules except hosts and commands, so that all components are registered.

    Returns: For each module that cannot be imported, a row with the keys `module` and `reason`.
    """
    failed = []
    names = [m.name for m in pkgutil.iter_modules(moe_plugin.__path__, "moe_plugin.")]
    while names:
        name = names.pop()
        if name in _APART:
            continue
        try:
            module = importlib.import_module(name)
        except ImportError as error:
            # modules of extras are imported only where the extra is used, and the list of packages
            # already reports that the extra is missing
            if not (isinstance(error, ModuleNotFoundError) and error.name in _OPTIONAL):
                failed.append({"module": name, "reason": str(error)})
            continue
        paths = vars(module).get("__path__", [])  # only packages have one
        names += [m.name for m in pkgutil.iter_modules(paths, f"{name}.")]
    return failed


def missing_rows() -> list[dict[str, str]]:
    """For each registered component that cannot run on this machine, return a row with its kind,
    its name and the reason. Frameworks that are used only as benchmark baselines are left out.
    """
    return [{"kind": kind, "name": entry.name, "reason": reason}
            for kind in sorted(set(KINDS) - {"bench_peer"}) for entry in KINDS[kind]
            if (reason := entry.why_not()) is not None]


def choice_rows() -> list[dict[str, str]]:
    """Return the measurements that `experts.compute=auto` has stored on this machine.

    Each row contains the load, the chosen implementation, the reason for the choice, and the age
    and spread of the measurements.
    """
    return [{"load": key, "name": kept.name, "why": kept.why,
             "age": show_time(max(0.0, time.time() - kept.made)),
             "spread": f"{100 * kept.spread:.0f} %"} for key, kept in ChoiceFiles().listed()]


def run_rows() -> list[dict[str, str]]:
    """Return one row for each optional feature of a training run.

    Each row contains the setting of the feature and the hosts that support it. For every host
    without support, the row contains the reason and a workaround.
    """
    settings = (*(row.setting for row in FEATURES if row.setting), *OF_HOSTS)
    return [{"name": name, "state": ", ".join(h for h in HOSTS if (name, h) not in LACKS),
             "what": "; ".join(f"{host}: {lack.reason} ({lack.remedy})"
                               for (lacking, host), lack in LACKS.items() if lacking == name)}
            for name in settings]


def refusal_rows() -> list[dict[str, str]]:
    """Return the combinations of settings that are rejected by a host. Each row contains the host,
    a requested setting, and the settings that cannot be combined with it.
    """
    by_request = dict[tuple[str, str], list[str]]()
    for host, table in (("fairseq", fairseq.TABLE), ("megatron", megatron.TABLE)):
        for request in table.values():
            by_request.setdefault((host, request.title), []).extend(
                row.title for row in request.rows)
    return [{"host": host, "name": name, "what": ", ".join(dict.fromkeys(settings))}
            for (host, name), settings in by_request.items()]


DRIVER = "/dev/nvidiactl"  # exists if NVIDIA's driver is loaded


def devices() -> list[dict[str, str]]:
    """Return a row for the CPU, and one row for each GPU that torch finds."""
    threads = f"{os.cpu_count()} cores, torch uses {torch.get_num_threads()} threads"
    rows = [{
        "name": "cpu", "state": "active" if not torch.cuda.is_available() else "available",
        "what": f"{cpu_name()}, {threads}{_widened()}"
    }]
    for index in range(torch.cuda.device_count()):
        p = torch.cuda.get_device_properties(index)
        rows.append({
            "name": f"cuda:{index}", "state": "active",
            "what": f"{p.name}, {show_size(p.total_memory)}, compute capability {p.major}.{p.minor}"
        })
    if not torch.cuda.is_available():
        rows.append({"name": "cuda", "state": "not available", "what": _why_no_cuda()})
    return rows


def _widened() -> str:
    names = [str(dtype).removeprefix("torch.") for dtype in (torch.bfloat16, torch.float16)
             if in_float32(dtype)]
    return f"; computes experts in {' and '.join(names)} as float32, for lack of instructions" \
        if names else ""


def compiled() -> list[dict[str, str]]:
    """Return one row for each C++ function that can replace torch operations on the CPU.

    Functions that have not been compiled yet are compiled during this call.
    """
    parts = [(f"experts' {name}", functions.why_not(name)) for name in ACTIVATIONS]
    parts.append(("several experts at a time, float32", products.why_one_by_one()))
    parts.append((f"routers of up to {functions.EXPERTS} experts, bfloat16",
                  functions.why_not(None)))
    parts += [("sums of rows, bfloat16", functions.why_not_sums()),
              ("decoding of frozen experts", frozen.why_not()),
              ("matmuls of frozen experts, bfloat16", frozen.why_not_multiply())]
    return [{"name": name, "state": "not available" if reason else "active",
             "what": f"computed by torch: {reason}" if reason else ""} for name, reason in parts]


def _why_no_cuda() -> str:
    if torch.version.cuda is None:
        return "this torch is built without CUDA"
    return f"torch is built for CUDA {torch.version.cuda}, but finds no GPU"


def unused_gpu() -> str | None:
    """If a GPU driver is loaded but torch does not use a GPU, return the reason. Otherwise, return
    None.
    """
    if torch.cuda.is_available() or not os.path.exists(DRIVER):
        return None
    return f"the driver of a GPU is loaded, but {_why_no_cuda()}"


@dataclass(frozen=True)
class Package:
    """A distribution that moe-plugin can use.

    Attributes:
        module: name of the Python module in the distribution.
        use: what this package uses the distribution for.
        gpu: whether the distribution is useful only with a GPU.
        command: the command that installs the distribution. Only needed if `pip install NAME` does
            not install the distribution.
    """

    name: str
    module: str
    use: str
    gpu: bool = False
    command: str = ""


PIP = f"{shlex.quote(sys.executable)} -m pip install"
# these wheels require Python 3.12, but work on 3.11; older versions of Python get no Megatron host
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
    Package("transformers", "transformers", "Hugging Face models and checkpoints"),
    Package("peft", "peft", "files of adapters, and adapters of transformers models"),
    Package("psutil", "psutil", "checkpoints of the Megatron host"),
    Package("tensorboard", "tensorboard", "statistics in TensorBoard"),
    Package("wandb", "wandb", "statistics in Weights & Biases"),
    Package("matplotlib", "matplotlib", "plots of benchmarks and plans"),
    Package("rich", "rich", "colors and tables of `moe-plugin watch`"),
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
    """Return the version of an installed package, `unknown` if the package has no metadata, or None
    if the package is not installed.
    """
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
    """Return the version requirement in moe-plugin's metadata (such as `tensorboard>=2.14`), or the
    bare package name if the metadata do not list the package.
    """
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
    """Return a shell command that installs the package into the running environment."""
    return package.command or f"{PIP} {shlex.quote(requirement(package.name))}"


def package_rows(has_gpu: bool) -> list[dict[str, str | None]]:
    """Return one row for each package, with the name, the version, the use and the state. The row
    of a missing package also contains the install command.

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
    """Return one row for each host, with the name, the version, the state and the reason. The row
    of a missing host also contains the install command.
    """
    started = {name: _start(name) for name in ADAPTER}
    return [_row(name, process) for name, process in started.items()]


def _start(name: str) -> subprocess.Popen | None:
    distribution, module = ADAPTER[name]
    if installed_version(_BY_NAME[distribution]) is None:
        return None
    # a separate process, because a host may crash or patch other modules; its priority is lower,
    # because the user waits for the self check at the same time
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
        supported = requirement(package.name)
        if supported == package.name:
            return {**row, "reason": f"does not import: {last}"}
        return {**row, "reason": f"does not import: {last}; moe-plugin supports {supported}",
                "install": install_command(package)}
    return {**row, "state": "available"}


def fused_rows() -> list[dict[str, Any]]:
    """Return one row for each purpose (Adam, norms, or computing the norm of the gradients and
    scaling them), with the fused implementation in use and the reason.
    """
    return [{"name": choice.role, "state": choice.active, "reason": choice.reason}
            for choice in fused.choices()]

"""Whether each host imports with our adapter, and which fused parts the hosts use."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

from moe_plugin.cli.doctor.packages import PACKAGES, install_command, installed_version
from moe_plugin.gradients import fused

_PACKAGE = {p.name: p for p in PACKAGES}
_ADAPTER = {
    "fairseq": ("fairseq", "moe_plugin.hosts.fairseq"),
    "megatron": ("megatron-core", "moe_plugin.hosts.megatron.spec")
}
_TIMEOUT_S = 300


def host_rows() -> list[dict[str, Any]]:
    """One row per host: name, version, state, reason, install command where it is missing."""
    started = {name: _start(name) for name in _ADAPTER}
    return [_row(name, process) for name, process in started.items()]


def _start(name: str) -> subprocess.Popen | None:
    distribution, module = _ADAPTER[name]
    if installed_version(_PACKAGE[distribution]) is None:
        return None
    # a separate process: a host may crash, or patch other modules; it yields to what the user waits
    # for meanwhile
    return subprocess.Popen([sys.executable, "-c", f"import os; os.nice(5); import {module}"],
                            stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)


def _row(name: str, process: subprocess.Popen | None) -> dict[str, Any]:
    package = _PACKAGE[_ADAPTER[name][0]]
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
        return {**row, "reason": f"does not import: {last}"}
    return {**row, "state": "available"}


def fused_rows() -> list[dict[str, Any]]:
    """What the hosts use for Adam, norms, and the norm and scaling of gradients, and why."""
    return [{"name": choice.role, "state": choice.active, "reason": choice.reason}
            for choice in fused.choices()]

"""What registers by name and cannot run here, what is kept of measurements, what hosts lack."""

from __future__ import annotations

import importlib
import pkgutil
import time

import moe_plugin
from moe_plugin.config.lacks import HOSTS, LACKS, OF_HOSTS
from moe_plugin.planner.units import show_time
from moe_plugin.training.run_features import FEATURES
from moe_plugin.tuning.compute_times import ChoiceFiles
from moe_plugin.utils.registry import KINDS

# commands; the others import fairseq or Megatron
_APART = ("moe_plugin.cli", "moe_plugin.hosts")
_OPTIONAL = {"rich", "triton"}


def import_everything() -> list[dict[str, str]]:
    """Import all modules but hosts and commands, so that every name is registered.

    Returns:
        What failed to import: `module`, `reason`.
    """
    failed = []
    names = [m.name for m in pkgutil.iter_modules(moe_plugin.__path__, "moe_plugin.")]
    while names:
        name = names.pop()
        if name in _APART:
            continue
        try:
            module = importlib.import_module(name)
        except ModuleNotFoundError as error:
            if error.name in _OPTIONAL:
                # such modules are imported where the extra is used; the list of packages says that
                # it is missing
                continue
            failed.append({"module": name, "reason": str(error)})
            continue
        except ImportError as error:
            failed.append({"module": name, "reason": str(error)})
            continue
        paths = vars(module).get("__path__", [])  # only packages have one
        names += [m.name for m in pkgutil.iter_modules(paths, f"{name}.")]
    return failed


def missing_rows() -> list[dict[str, str]]:
    """Registered names that cannot run here: kind, name and reason; without peers of benchmarks."""
    return [{"kind": kind, "name": entry.name, "reason": reason}
            for kind in sorted(set(KINDS) - {"bench_peer"}) for entry in KINDS[kind]
            if (reason := entry.why_not()) is not None]


def choice_rows() -> list[dict[str, str]]:
    """What `experts.compute=auto` has measured on this machine and kept: load, name of the choice,
    why, how long ago, and how far the measurements that chose it differ.
    """
    return [{"load": key, "name": kept.name, "why": kept.why,
             "age": show_time(max(0.0, time.time() - kept.made)),
             "spread": f"{100 * kept.spread:.0f} %"} for key, kept in ChoiceFiles().listed()]


def run_rows() -> list[dict[str, str]]:
    """What a run may have around its steps: setting, the hosts that have it, and of each other one
    why it has not, and the remedy.
    """
    settings = (*(row.setting for row in FEATURES if row.setting), *OF_HOSTS)
    return [{"name": name, "state": ", ".join(h for h in HOSTS if (name, h) not in LACKS),
             "what": "; ".join(f"{host}: {lack.reason} ({lack.remedy})"
                               for (lacking, host), lack in LACKS.items() if lacking == name)}
            for name in settings]

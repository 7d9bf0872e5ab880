"""Calls a function in a process of its own, whose memory and modules are its own, too."""

from __future__ import annotations

import base64
import importlib
import json
import os
import pickle
import subprocess
import sys
from collections.abc import Callable, Mapping
from typing import Any

from moe_plugin.lab.bench.memory_limit import run_limited


def _command(function: Callable[..., Any], args: tuple[Any, ...]) -> list[str]:
    given = base64.b64encode(pickle.dumps(args)).decode()
    return ["env", "OMP_NUM_THREADS=1", sys.executable, "-m", "moe_plugin.lab.bench.child",
            function.__module__, function.__name__, given]


def call(function: Callable[..., Any], *args: Any,
         environment: Mapping[str, str] | None = None) -> Any:
    """What `function(*args)` returns in a new process with one thread.

    Args:
        function: of a module; returns plain values.
        environment: variables of the process, besides this one's.
    """
    done = subprocess.run(_command(function, args), stdout=subprocess.PIPE, text=True, check=True,
                          env={**os.environ, **(environment or {})})
    return _result(done.stdout)


def call_limited(limit: int | None, function: Callable[..., Any],
                 *args: Any) -> dict[str, Any] | None:
    """The same of a function that returns a mapping, in a cgroup.

    Args:
        limit: bytes of memory; None: as much as there is.
    Returns: what the function returned, and `cgroup_peak_bytes`; None: killed for its memory.
    """
    done = run_limited(_command(function, args), limit)
    return None if done is None else {"cgroup_peak_bytes": done.peak_bytes, **_result(done.output)}


def _result(output: str) -> Any:
    return json.loads(output.splitlines()[-1])


def main() -> None:
    module, name, given = sys.argv[1:]
    function = getattr(importlib.import_module(module), name)
    found = function(*pickle.loads(base64.b64decode(given)))
    sys.stdout.write("\n" + json.dumps(found) + "\n")


if __name__ == "__main__":
    main()

"""Calls a function in a process of its own, whose memory and modules are its own, too."""

from __future__ import annotations

import base64
import importlib
import json
import os
import pickle
import socket
import subprocess
import sys
from collections.abc import Callable, Mapping
from typing import Any


def command(function: Callable[..., Any], args: tuple[Any, ...]) -> list[str]:
    """What starts a process in which `function(*args)` runs, with one thread and our modules."""
    given = base64.b64encode(pickle.dumps(args)).decode()
    places = os.pathsep.join(sys.path)
    return ["env", "OMP_NUM_THREADS=1", f"PYTHONPATH={places}", sys.executable, "-m",
            "scripts.bench.child", function.__module__, function.__name__, given]


def call(function: Callable[..., Any], *args: Any,
         environment: Mapping[str, str] | None = None) -> Any:
    """What `function(*args)` returns in a new process with one thread.

    Args:
        function: of a module; returns plain values.
        environment: variables of the process, besides this one's.
    """
    done = subprocess.run(command(function, args), stdout=subprocess.PIPE, text=True, check=True,
                          env={**os.environ, **(environment or {})})
    return result(done.stdout)


def result(output: str) -> Any:
    """What the function returned, from what the process wrote."""
    return json.loads(output.splitlines()[-1])


def main() -> None:
    sys.path[:] = os.environ["PYTHONPATH"].split(os.pathsep)  # without this folder before them
    module, name, given = sys.argv[1:]
    function = getattr(importlib.import_module(module), name)
    found = function(*pickle.loads(base64.b64decode(given)))
    sys.stdout.write("\n" + json.dumps(found) + "\n")


if __name__ == "__main__":
    main()


def free_port() -> int:
    """A port of this machine that nothing listens on."""
    with socket.socket() as probe:
        probe.bind(("", 0))
        return int(probe.getsockname()[1])

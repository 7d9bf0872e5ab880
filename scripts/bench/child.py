"""Call a function in a separate process with its own memory and imported modules."""

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
    """Return the command line that runs `function(*args)` in a process with one thread. The process
    can import this repository's modules.
    """
    given = base64.b64encode(pickle.dumps(args)).decode()
    places = os.pathsep.join(sys.path)
    return ["env", "OMP_NUM_THREADS=1", f"PYTHONPATH={places}", sys.executable, "-m",
            "scripts.bench.child", function.__module__, function.__name__, given]


def call(function: Callable[..., Any], *args: Any,
         environment: Mapping[str, str] | None = None) -> Any:
    """Call `function(*args)` in a new process with one thread and return the result.

    Args:
        function: a function defined at the top level of a module, which returns plain values.
        environment: additional environment variables for the process.
    """
    done = subprocess.run(command(function, args), stdout=subprocess.PIPE, text=True, check=True,
                          env={**os.environ, **(environment or {})})
    return result(done.stdout)


def result(output: str) -> Any:
    """Parse the return value of the function from the output of the process."""
    return json.loads(output.splitlines()[-1])


def main() -> None:
    # the folder of this script must not be the first entry, because its modules are in a package
    sys.path[:] = os.environ["PYTHONPATH"].split(os.pathsep)
    module, name, given = sys.argv[1:]
    function = getattr(importlib.import_module(module), name)
    found = function(*pickle.loads(base64.b64decode(given)))
    sys.stdout.write("\n" + json.dumps(found) + "\n")


if __name__ == "__main__":
    main()


def free_port() -> int:
    """Return a free network port of this machine."""
    with socket.socket() as probe:
        probe.bind(("", 0))
        return int(probe.getsockname()[1])

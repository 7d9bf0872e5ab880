"""Runs a block of Python in a process that has imported what many blocks do (tests/preloaded.py):
the layer, what torch's optimizers import, a model of transformers; 2 s, 1 s and 3 s in each
otherwise.
"""

from __future__ import annotations

import importlib
import io
from contextlib import redirect_stdout, suppress

for _name in ("moe_plugin.layer", "torch._dynamo", "transformers.models.mixtral.modeling_mixtral"):
    with suppress(ImportError):  # some environments have no transformers
        importlib.import_module(_name)


def printed(text: str) -> str:
    """What a program prints."""
    with redirect_stdout(io.StringIO()) as out:
        exec(compile(text, "<block>", "exec"), {"__name__": "__main__"})
    return out.getvalue()

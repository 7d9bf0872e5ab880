"""Run code that `torch.compile` does not trace.

Importing this module loads the compiler. Therefore, import this module only where it is needed,
when `torch.compiler.is_compiling()` is True.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


@torch.compiler.disable
def uncompiled(call: Callable[..., Any], *args: Any) -> Any:
    """Call `call(*args)` outside of compiled graphs, and return its result. The functions that
    `call` calls are also not compiled.
    """
    return call(*args)

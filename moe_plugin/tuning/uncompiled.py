"""Code that `torch.compile` does not trace.

Import this module only where it is used, under `torch.compiler.is_compiling()`, because the import
loads the compiler.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


@torch.compiler.disable
def uncompiled(call: Callable[..., Any], *args: Any) -> Any:
    """Return `call(*args)`, run outside of compiled graphs together with everything it calls."""
    return call(*args)

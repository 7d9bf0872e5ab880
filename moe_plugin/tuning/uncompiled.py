"""Code that `torch.compile` does not trace.

Import this module only where it is needed, if `torch.compiler.is_compiling()` is True, because the
import loads the compiler.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from moe_plugin.utils.selective import hidden_from_policies


@torch.compiler.disable
def uncompiled(call: Callable[..., Any], *args: Any) -> Any:
    """Run `call(*args)` and everything that it calls outside of compiled graphs, and return the
    result."""
    return hidden_from_policies(call)(*args)

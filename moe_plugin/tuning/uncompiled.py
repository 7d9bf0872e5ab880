"""Run code that `torch.compile` does not trace.

Importing this module loads the compiler. Therefore, import this module only where it is needed,
when `torch.compiler.is_compiling()` is True.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from moe_plugin.utils.selective import hidden_from_policies


@torch.compiler.disable
def uncompiled(call: Callable[..., Any], *args: Any) -> Any:
    """Call `call(*args)` outside of compiled graphs, and return its result. The functions that
    `call` calls are also not compiled.
    """
    return hidden_from_policies(call)(*args)

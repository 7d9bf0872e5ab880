"""Run code without tracing it in `torch.compile`.

Importing this module loads the compiler. Import it only where it is needed, when
`torch.compiler.is_compiling()` is True.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from moe_plugin.utils.selective import hidden_from_policies


@torch.compiler.disable
@hidden_from_policies
def uncompiled(call: Callable[..., Any], *args: Any) -> Any:
    """Call `call(*args)` outside of compiled graphs, and return its result. Functions that are
    called by `call` are not compiled either.
    """
    return call(*args)

"""Code that `torch.compile` leaves alone. Import this module where it is used, under
`torch.compiler.is_compiling()`: it loads the compiler.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


@torch.compiler.disable
def uncompiled(call: Callable[..., Any], *args: Any) -> Any:
    """`call(*args)` outside compiled graphs, with all that it calls."""
    return call(*args)

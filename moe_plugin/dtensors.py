"""Parameters that FSDP2 shards."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any, TypeGuard

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor


def is_sharded(value: Any) -> TypeGuard[DTensor]:
    """Whether a value is a DTensor. Their module is slow to import and not imported for this:
    where nothing has imported it, there are none.
    """
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(value, module.DTensor)

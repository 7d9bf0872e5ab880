"""Which MoE layers are those of multi-token prediction, versions 0.15 to 0.19.

| | 0.15 | 0.16 | 0.17 | 0.18, 0.19 |
|---|---|---|---|---|
| their numbers begin | at 1 | after the others | at 1 | at 1 |
| says so when it builds an MoE layer | no | no | one of its own exact class | yes |
| one repeated layer (`mtp_use_repeated_layer`) | no | no | yes | yes |

In a hybrid model (0.18 on) each prediction is a stack of layers, whose numbers all begin at 1; up
to 0.19 only their names say so, in which predictions are numbered from 1.
"""

from __future__ import annotations

import functools
import re
from contextvars import ContextVar
from typing import Any

from megatron.core import __version__ as core_version

NUMBER = tuple(int(part) for part in core_version.split(".")[:2])
_IN_STACK = re.compile(r"mtp\.layers\.(\d+)\.mtp_model_layer\.layers\.")
_inside: ContextVar[bool] = ContextVar("moe_plugin_inside_mtp", default=False)


def is_mtp_layer(extra: dict[str, Any]) -> bool:
    """Whether an MoE layer that is built with these arguments is one of multi-token prediction, as
    far as this version says so.
    """
    return is_told(extra) or prediction_of(extra) is not None


def is_told(extra: dict[str, Any]) -> bool:
    """Whether Megatron's own router, too, would know that it is in such a layer."""
    return bool(extra.get("is_mtp_layer")) or _inside.get()


def prediction_of(extra: dict[str, Any]) -> int | None:
    """Of which prediction of a hybrid model, from 0, an MoE layer built with these arguments is;
    None: of none.
    """
    found = _IN_STACK.search(extra.get("name") or "")
    return int(found[1]) - 1 if found else None


def tell_layers() -> None:
    """Let 0.17 say so to our class, too."""
    from megatron.core.transformer.multi_token_prediction import MultiTokenPredictionLayer as Layer

    original: Any = Layer.__init__
    if NUMBER != (0, 17) or hasattr(original, "__wrapped__"):
        return

    @functools.wraps(original)
    def build(self: Any, *args: Any, **kwargs: Any) -> None:
        token = _inside.set(True)
        try:
            original(self, *args, **kwargs)
        finally:
            _inside.reset(token)

    Layer.__init__ = build

"""The cells of the exactness matrix that run on a GPU which computes later."""

from __future__ import annotations

import functools
from typing import Any

from tests.combinations import Cell
from tests.exactness.cells import Size, traits_of

# what orders nothing is left as it is
_PLAIN: dict[str, Any] = {
    "k": 2, "bias": True, "activation": "gelu", "score": "softmax", "normalize": "none",
    "prioritized": False, "kind": "gated_ffn", "compute": "kernels", "dropout": 0.0,
    "weights_first": False, "rows_computed": "own", "collectives": "native"
}
# by number of ranks: each dispatcher, pages, spilled rows
FEW = {2: (0, 2, 6, 7), 4: (0, 2, 3, 4)}


@functools.cache
def cells_of_world(world: int) -> list[Cell]:
    """Exchanges that run while rows are computed: every dispatcher with pieces forward, backward
    and both, by every exchange; of even, uneven and empty loads; of whole experts and of cut ones;
    rows that ranks compute for others; rows that backward needs in pages, on the host, too.
    """
    whole, cut = Size(world, 8, None, 1), Size(world, world // 2, None, 2)
    pages = {"stash_mib": 0.02, "stash_host_mib": 1.0}
    if world == 4:
        return [_cell("ragged", whole, (2, 0), "2dh", "uneven"),
                _cell("bounded", cut, (1, 2), "leader", "padding"),
                _cell("padded", whole, (3, 2), "2dh", "starving"),
                _cell("bounded", whole, (3, 2), "2dh", "uneven"),
                _cell("ragged", cut, (1, 2), "leader", "starving", spill="least_loaded"),
                _cell("padded", whole, (2, 0), "leader", "padding", compute="loop")]
    return [_cell("ragged", whole, (2, 3), "linear", "uneven"),
            _cell("ragged", cut, (1, 2), "native", "padding", kind="ffn", compute="loop"),
            _cell("padded", whole, (3, 2), "native", "starving"),
            _cell("padded", whole, (2, 0), "linear", "padding", kind="ffn", compute="loop"),
            _cell("bounded", cut, (3, 2), "linear", "uneven", kind="ffn"),
            _cell("bounded", whole, (1, 2), "native", "starving"),
            _cell("bounded", whole, (2, 0), "native", "uneven", **pages),
            _cell("ragged", whole, (3, 2), "linear", "uneven", spill="least_loaded")]


def _cell(dispatch: str, size: Size, pieces: tuple[int, int], exchange: str, tokens: str,
          **more: Any) -> Cell:
    return {**_PLAIN, "dispatch": dispatch, "size": size, "pieces": pieces, "all_to_all": exchange,
            "tokens": tokens, "cut": traits_of(dispatch).piece_axes[0],
            "factor": 1.0 if dispatch == "padded" else None, **more}

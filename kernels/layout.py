"""The stride copy between the two phases of a two-dimensional all-to-all."""

from __future__ import annotations

from torch import Tensor

from moe_plugin.kernels.registry import op


@op
def transpose_chunks(x: Tensor, outer: int, inner: int) -> Tensor:
    """Equal chunks of dimension 0 from [outer, inner] order to [inner, outer] order.

    x: [outer * inner * c, ...] of any dtype; the result has its shape and dtype. 2DH (Tutel):
    chunks by destination rank (node, local) become chunks by (local, node), so that the exchange
    inside the node sends one contiguous piece to each neighbour; and back with the factors swapped.
    """
    if x.shape[0] % (outer * inner):
        raise ValueError(
            f"{x.shape[0]} rows do not make {outer} x {inner} equal chunks: must be a multiple of "
            f"{outer * inner}; pad them"
        )
    chunks = x.reshape(outer, inner, -1).transpose(0, 1)
    return chunks.reshape(x.shape)

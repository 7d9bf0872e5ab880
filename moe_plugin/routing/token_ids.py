"""Token ids and sequences for routers and losses that need them (router hash, loss sequence), and
checks of them.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from moe_plugin.records import TokenInfo


def check_integers(name: str, values_T: Tensor, tokens: int) -> None:
    """`ValueError` unless `values_T` is an integer tensor of shape [tokens]; name: in messages."""
    if tuple(values_T.shape) != (tokens,):
        raise ValueError(f"{name} of shape {tuple(values_T.shape)} does not fit: must be "
                         f"{(tokens,)}, one for each token")
    dtype = values_T.dtype
    if dtype.is_floating_point or dtype.is_complex or dtype == torch.bool:
        raise ValueError(f"{name} of dtype {dtype} does not fit: must be integers; pass "
                         f"{name}.long()")


def check_range(values: Tensor, first: int, last: int, message: str) -> None:
    """`ValueError` unless all integers are in first..last. The host does not wait for a GPU: there
    the device stops with an assertion, which the host meets at its next wait.

    Args:
        values: int, any shape.
        first, last: the smallest and the largest allowed value.
        message: `message.format(low, high)` with the values that there are.
    """
    if not values.numel() or torch.compiler.is_compiling() or values.is_meta:
        return
    if values.device.type != "cpu":
        torch._assert_async(((values >= first) & (values <= last)).all(),
                            message.format(f"below {first}", f"or above {last}"))
        return
    low, high = int(values.min()), int(values.max())
    if not first <= low <= high <= last:
        raise ValueError(message.format(low, high))


class TakesTokenIds:
    """Base of a host's MoE layers, to which `hand_token_ids` hands token ids.

    Attributes:
        needs: what the layer's router needs of a call, see `RouterModule.needs`.
        tokens_BT: int64 [B, T], token ids of the next call; None: not given.
    """

    needs: frozenset[str] = frozenset()
    tokens_BT: Tensor | None = None


def hand_token_ids(model: nn.Module, *names: str) -> None:
    """Hand a model's token ids [B, T] to the MoE layers in it that need them.

    It does so before each forward pass.

    Args:
        model: its token ids are its first positional argument, or a keyword argument.
        names: keyword arguments that may hold them, first match first.
    """
    layers = [m for m in model.modules() if isinstance(m, TakesTokenIds) and "token_ids" in m.needs]

    def hand_over(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        given = [*args[:1], *(kwargs[name] for name in names if name in kwargs), None]
        for layer in layers:
            layer.tokens_BT = given[0]

    if layers:
        model.register_forward_pre_hook(hand_over, with_kwargs=True)


def token_info(x_TBD: Tensor, ids_TB: Tensor | None, needs: frozenset[str],
               batch_axis: int = 1) -> TokenInfo | None:
    """What the router needs to know of a batch; None where it needs nothing.

    Args:
        x_TBD: [T, B, D] tokens, position after position; [B, T, D] with `batch_axis` 0.
        ids_TB: int64, the same axes: their ids, where the router needs them.
        needs: of the router.
        batch_axis: axis that counts sequences, 0 or 1.
    """
    if not needs:
        return None
    batch = x_TBD.shape[batch_axis]
    sequence = torch.arange(batch, device=x_TBD.device).unsqueeze(1 - batch_axis)
    sequence_TB = sequence.expand(x_TBD.shape[:2])
    return TokenInfo(ids_TB, sequence_TB if "sequences" in needs else None, batch)

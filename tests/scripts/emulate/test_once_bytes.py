"""Bytes on the links between emulated nodes are those of the rows that are sent, and what carries
them.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from moe_plugin import MoELayer, TorchComm
from moe_plugin.config import from_dict
from scripts.bench.toy import SleepingExpert
from scripts.emulate import EmulatedCluster
from tests.dispatch.fixed_routing import Fixed, drawn

Make = Callable[..., EmulatedCluster]
WIDTH, EXPERTS, K, TOKENS = 1024, 16, 8, 48
ROW, CODE, FLOAT = 4 * WIDTH, 2, 4
NODE = 2  # ranks of a node


def _call(send: str, calls: int) -> None:
    """Calls of a layer on a rank, forward and backward."""
    comm = TorchComm()
    router = Fixed(choices()[comm.rank]).float()
    layer = MoELayer(from_dict({
        "model_dim": WIDTH, "num_experts": EXPERTS, "losses": {}, "router": {"top_k": K},
        "parallel": {"mode": "fixed", "r": 1}, "comm": {"all_to_all": "linear"},
        "dispatch": {"send": send}}), comm, router=router, experts=lambda index: SleepingExpert())
    for _ in range(calls):
        layer(torch.randn(TOKENS, WIDTH, requires_grad=True)).output.sum().backward()


def choices() -> list[Tensor]:
    return drawn(2 * NODE, EXPERTS, K, [TOKENS])


def leaving(send: str, node: int) -> int:
    """Bytes of rows and pairs that leave a node of two in a call and its backward pass."""
    size, local = 0, EXPERTS // (2 * NODE)
    for rank, ids_TK in enumerate(choices()):
        here = rank // NODE == node
        for token in ids_TK.tolist():
            away = [expert // local for expert in token
                    if expert >= 0 and expert // local // NODE != rank // NODE]
            rows = {"rows": len(away), "ranks": len(set(away)), "nodes": bool(away)}[send]
            # its input and its output's gradient; or the results, and the inputs' gradients
            size += 2 * rows * ROW
            if send != "rows":  # pairs there, the weights' gradients back
                size += len(away) * (CODE + FLOAT if here else FLOAT)
    return size


@pytest.mark.distributed
@pytest.mark.parametrize("send", ["rows", "ranks", "nodes"])
def test_links_carry_what_the_formula_says(cluster: Make, send: str) -> None:
    """Headers, acknowledgements and counts come on top."""
    made, seen = cluster(2, NODE, rate_bit_s=1e9, delay_s=1e-4), []
    for calls in (1, 4):
        before = made.stats()
        made.run(_call, send, calls)
        seen.append([after.bytes_in - old.bytes_in
                     for after, old in zip(made.stats(), before, strict=True)])
    for node, (one, four) in enumerate(zip(*seen, strict=True)):
        assert 1 < (four - one) / 3 / leaving(send, node) < 1.12, send

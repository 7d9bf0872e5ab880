"""torch.compile and activation checkpointing together: the same step as without."""

from __future__ import annotations

import pytest
import torch
import torch._dynamo
from torch import Tensor, nn

from tests.exactness.recomputed import KINDS, ROUTERS, blocks_of, expected, forward, inputs, seen

TOKENS = (8, 8)


def compiled_step(name: str, kind: str, compiles: str) -> dict[str, Tensor]:
    """A step of which each block is compiled and then checkpointed, or that is compiled whole."""
    torch._dynamo.reset()
    blocks, xs = blocks_of(ROUTERS[name]), inputs(*TOKENS)
    compiled = [torch.compile(block, backend="aot_eager") for block in blocks]

    def loss(x_TD: Tensor) -> Tensor:
        return forward(nn.ModuleList(compiled) if compiles == "blocks" else blocks, KINDS[kind],
                       x_TD)

    run = torch.compile(loss, backend="aot_eager") if compiles == "step" else loss
    losses = [run(x) for x in xs]
    for one in losses:
        one.backward()
    return seen(blocks, xs, losses)


@pytest.mark.parametrize("name,kind,compiles", [
    ("topk random", "plain", "blocks"), ("topk random", "plain", "step"),
    ("sigmoid_bias", "reentrant", "blocks"), ("sigmoid_bias", "plain", "blocks"),
    ("global batch", "plain", "step"), ("topk random", "selective", "step"),
    ("sigmoid_bias", "selective", "step"), ("topk random", "selective", "blocks")])
def test_a_compiled_step_that_is_recomputed(name: str, kind: str, compiles: str) -> None:
    found = compiled_step(name, kind, compiles)
    wanted = expected(name, tokens=TOKENS, order=(0, 1))
    assert found.keys() == wanted.keys()
    for key, value in wanted.items():  # graphs add up in another order than single operations
        assert (found[key] is None) == (value is None), key
        if value is not None:
            torch.testing.assert_close(found[key], value, rtol=1e-9, atol=1e-12, msg=key)


def test_a_compiled_block_in_a_checkpoint_does_not_know_the_load_of_its_first_pass() -> None:
    with pytest.raises(RuntimeError, match="call it inside the compiled function"):
        compiled_step("global batch", "plain", "blocks")

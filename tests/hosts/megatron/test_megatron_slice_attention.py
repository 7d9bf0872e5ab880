"""Attention by slices against attention to the whole sequence: outputs and all gradients."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("megatron.core",
                    reason="needs megatron-core: pip install 'moe-plugin[megatron]'")

from tests.hosts.megatron.ranks import on_ranks

pytestmark = pytest.mark.megatron
LENGTH = 24


def _attention(**native: Any) -> Any:
    from megatron.core.transformer.enums import AttnMaskType
    from megatron.core.transformer.transformer_config import TransformerConfig

    from moe_plugin.hosts.megatron.pipeline.attention import SliceAttention

    values = {"num_layers": 3, "hidden_size": 32, "num_attention_heads": 4,
              "attention_dropout": 0.0, "use_cpu_initialization": True, **native}
    return SliceAttention(TransformerConfig(**values), 3, AttnMaskType.causal, "self")


def _inputs(groups: int, dtype: torch.dtype) -> list[Tensor]:
    g = torch.Generator().manual_seed(0)
    shapes = [(LENGTH, 2, 4, 8), (LENGTH, 2, groups, 8), (LENGTH, 2, groups, 8)]
    return [torch.randn(shape, generator=g).to(dtype) for shape in shapes]


def _mask(documents: Sequence[int]) -> Tensor:
    # True = not seen; the second sequence consists of documents that do not see each other
    causal = torch.ones(LENGTH, LENGTH, dtype=torch.bool).triu(1)
    number = torch.repeat_interleave(torch.arange(len(documents)), torch.tensor(documents))
    return torch.stack([causal, causal | (number[:, None] != number)])[:, None]


def _whole(attention: Any, inputs: list[Tensor], mask: Tensor | None,
           grad: Tensor) -> list[Tensor]:
    leaves = [x.clone().requires_grad_() for x in inputs]
    y = attention(*leaves, mask)
    return [y.detach(), *torch.autograd.grad(y, leaves, grad)]


def _sliced(attention: Any, inputs: list[Tensor], mask: Tensor | None, grad: Tensor,
            slices: Sequence[int], recompute: bool) -> list[Tensor]:
    from megatron.core import tensor_parallel

    from moe_plugin.hosts.megatron.pipeline.attention import Sequences, SlicePart

    ends = list(itertools.accumulate(slices, initial=0))
    whole = Sequences(LENGTH, inputs[0].device, mask)
    parts = [SlicePart(whole, start, length) for start, length in zip(ends, slices, strict=False)]
    leaves, outputs = [], []
    for part in parts:
        attention.part = part
        rows = slice(part.start, part.start + part.length)
        mine = [x[rows].clone().requires_grad_() for x in inputs]
        call = (*mine, None)
        outputs.append(tensor_parallel.checkpoint(attention, False, *call) if recompute
                       else attention(*call))
        leaves.append(mine)
    for part, y in zip(reversed(parts), reversed(outputs), strict=True):
        attention.part = part
        y.backward(grad[part.start:part.start + part.length])
    attention.part = None
    grads = [torch.cat([mine[i].grad for mine in leaves]) for i in range(3)]
    return [torch.cat(outputs).detach(), *grads]


CASES = {
    "one head each": ({}, 4, None), "grouped": ({"num_query_groups": 2}, 2, None),
    "one group": ({"num_query_groups": 1}, 1, None),
    "documents": ({"num_query_groups": 2}, 2, (5, 9, 10)),
    "scaled by layer": ({"apply_query_key_layer_scaling": True,
                         "attention_softmax_in_fp32": True}, 4, None),
}


def _all_cases() -> dict[str, float]:
    from moe_plugin.hosts.megatron.compat import cpu
    from tests.hosts.megatron.layers import Case, initialise_parallel

    cpu.enable()
    initialise_parallel(Case())
    worst = {}
    for name, (native, groups, documents) in CASES.items():
        attention, inputs = _attention(**native), _inputs(groups, torch.float64)
        grad = torch.randn(LENGTH, 2, 32, dtype=torch.float64)
        mask = documents and _mask(documents)
        expected = _whole(attention, inputs, mask, grad)
        for slices in ((24,), (12, 12), (11, 6, 4, 2, 1), (1,) * 24):
            for recompute in (False, True):
                found = _sliced(attention, inputs, mask, grad, slices, recompute)
                worst[f"{name} {len(slices)} {recompute}"] = max(
                    float((a - b).abs().max()) for a, b in zip(found, expected, strict=True))
    return worst


def test_slices_give_the_outputs_and_gradients_of_the_whole_sequence() -> None:
    """Unequal slices, grouped queries, masks of documents, recomputation; float64."""
    [worst] = on_ranks(1, _all_cases)
    assert len(worst) == 8 * len(CASES) and max(worst.values()) < 1e-12, worst


def _refusals() -> list[str]:
    from moe_plugin.hosts.megatron.compat import cpu
    from moe_plugin.hosts.megatron.pipeline.attention import Sequences, SlicePart
    from tests.hosts.megatron.layers import Case, initialise_parallel

    cpu.enable()
    initialise_parallel(Case())
    found = []

    def refused(call: Any) -> None:
        try:
            call()
        except (ValueError, RuntimeError) as error:
            found.append(str(error))

    refused(lambda: _attention(window_size=(4, 0)))
    attention, inputs = _attention(), _inputs(4, torch.float32)
    first = [x[:12].requires_grad_() for x in inputs]
    whole = Sequences(LENGTH, inputs[0].device, torch.zeros(1, 1, LENGTH, LENGTH).bool())
    attention.part = SlicePart(whole, 0, 12)
    refused(lambda: attention(*first, None))
    attention.part = SlicePart(Sequences(LENGTH, inputs[0].device), 0, 12)
    refused(attention(*first, None).sum().backward)
    return found


def test_what_attention_by_slices_cannot_do() -> None:
    [[window, mask, order]] = on_ranks(1, _refusals)
    assert "window_size=(4, 0) cannot be used" in window and "needs a causal mask" in mask
    assert "passes of slices in reverse order" in order

"""The layer where context-parallel ranks have parts of a sequence: the numbers of Megatron's own.

Attention over such parts needs Transformer Engine; an MoE layer does not.

Also:

* Attention by slices against attention to the whole sequence: outputs and all gradients.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from moe_plugin.hosts.megatron.compat.core import groups
from tests.hosts.megatron.layers import Case, build, initialise_parallel, needs_padding_mask, run
from tests.hosts.megatron.ranks import on_ranks

BALANCE = {"moe_router_load_balancing_type": "aux_loss", "moe_aux_loss_coeff": 0.1}
AUX = {**BALANCE, "moe_z_loss_coeff": 0.01}
CASES = {
    "CP2": (2, Case(cp=2, native=AUX)),
    # without the z loss: Megatron's is a mean of the ranks' means, ours of all tokens not padded
    "CP2, padding": (2, Case(cp=2, native=BALANCE, padding=True)),
    "CP2 EP2": (2, Case(cp=2, ep=2, gated=True, native=AUX)),
    "CP2, by sequences": (2, Case(cp=2, native={
        **AUX, "moe_router_load_balancing_type": "seq_aux_loss"})),
    "CP2 EP2, two replicas": (4, Case(cp=2, ep=2, native=AUX)),
    "CP2 TP2 EP2": (4, Case(cp=2, tp=2, ep=2, sequence_parallel=True, native=AUX)),
    "CP2 TP2 ETP2": (4, Case(cp=2, tp=2, etp=2, sequence_parallel=True, native=AUX)),
    "CP4 EP2, capacity": (4, Case(cp=4, ep=2, native={
        **AUX, "moe_expert_capacity_factor": 1.0})),
}


def _compared(cases: list[Case]) -> list[dict[str, float]]:
    """The largest difference of every result from Megatron's layer, relative to its size. Megatron
    logs the z loss of each rank's own tokens, and so do we where no balance loss counts the tokens
    of all parts: means over the parts are compared.
    """
    found = []
    for case in cases:
        initialise_parallel(case)
        native, ours = (run(build(case, flag), case) for flag in (False, True))
        for side in (native, ours) if "logged z_loss" in native else ():
            dist.all_reduce(side["logged z_loss"], group=groups(None).tokens)
            side["logged z_loss"] /= groups(None).tokens.size()
        assert set(native) <= set(ours), (set(native), set(ours))
        found.append({
            name: float((value - ours[name]).abs().max() / value.abs().max().clamp(min=1e-6))
            for name, value in native.items() if value is not None})
    return found


@pytest.mark.parametrize("world", [2, 4])
def test_parts_of_a_sequence_equal_native(world: int) -> None:
    """Outputs, gradients and logged balance losses, which count the tokens of all parts."""
    chosen = {name: case for name, (ranks, case) in CASES.items() if ranks == world}
    for case in chosen.values():
        needs_padding_mask(case)
    ranks = on_ranks(world, _compared, list(chosen.values()))
    for number, name in enumerate(chosen):
        worst = {key: max(rank[number][key] for rank in ranks) for key in ranks[0][number]}
        assert len(worst) >= 5 and max(worst.values()) < 5e-6, (name, worst)


def _groups() -> list[int]:
    initialise_parallel(Case(cp=2))
    own = groups(None)
    return [own.context.size(), own.tokens.size(), own.data.size()]


def test_groups_of_parts() -> None:
    assert on_ranks(2, _groups) == [[2, 2, 2]] * 2


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


CASES_OF_SLICE_ATTENTION = {
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
    for name, (native, queries, documents) in CASES_OF_SLICE_ATTENTION.items():
        attention, inputs = _attention(**native), _inputs(queries, torch.float64)
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
    assert len(worst) == 8 * len(CASES_OF_SLICE_ATTENTION) and max(worst.values()) < 1e-12, worst


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

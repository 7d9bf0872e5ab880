"""The layer where context-parallel ranks have parts of a sequence: the numbers of Megatron's own.

Attention over such parts needs Transformer Engine; an MoE layer does not.
"""

from __future__ import annotations

import pytest
import torch.distributed as dist

pytest.importorskip("megatron.core",
                    reason="needs megatron-core: pip install 'moe-plugin[megatron]'")

from moe_plugin.hosts.megatron.compat.core import groups
from tests.hosts.megatron.layers import Case, build, initialise_parallel, needs_padding_mask, run
from tests.hosts.megatron.ranks import on_ranks

pytestmark = [pytest.mark.megatron, pytest.mark.distributed]
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

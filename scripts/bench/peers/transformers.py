"""The experts of `transformers`' Mixtral as candidates. There is one candidate for each
implementation of the experts in `transformers`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import torch
from torch import Tensor, nn

from moe_plugin.comm import Comm
from moe_plugin.planner.units import show_size
from scripts.bench.peers import base
from scripts.bench.problem import Data, Problem

COPIES = 4 << 30  # maximum number of bytes of weights that `batched_mm` may copy


def _why_not(problem: Problem, implementation: str) -> str | None:
    if not problem.gated:
        return "Mixtral's experts are gated; use --gated"
    if base.expert_group().size > 1 and base.not_installed(
            "transformers.distributed.expert_parallel"):
        return "this transformers has no expert parallelism"
    copied = (3 * problem.rows * problem.model_dim * problem.hidden_dim
              * problem.torch_dtype.itemsize)
    if implementation == "batched_mm" and copied > COPIES:
        return f"it would copy {show_size(copied)} of weights"
    return None


def _candidate(problem: Problem, data: Data, implementation: str) -> Iterator[base.Candidate]:
    from transformers import MixtralConfig
    from transformers.models.mixtral.modeling_mixtral import MixtralExperts

    group = base.expert_group()
    data = data.local(group.rank, group.size)
    config = MixtralConfig(
        hidden_size=problem.model_dim, intermediate_size=problem.hidden_dim, hidden_act="silu",
        num_local_experts=problem.experts // group.size, num_experts_per_tok=problem.top_k)
    config._experts_implementation = implementation  # `from_pretrained` sets this attribute
    experts = MixtralExperts(config).to(problem.device, problem.torch_dtype)
    assert data.w_gate_LDF is not None
    base.copy(experts.gate_up_proj, torch.cat([data.w_gate_LDF, data.w_in_LDF], 2).transpose(1, 2))
    base.copy(experts.down_proj, data.w_out_LFD.transpose(1, 2))
    compute = _over(group, experts, problem.device)
    yield base.behind_router(
        lambda x, ids_TK, weights_TK: compute(x, ids_TK, weights_TK.to(x.dtype)), problem,
        data.router_ED, experts.parameters(), "MixtralExperts behind a plain float32 router")


def _over(group: Comm, experts: nn.Module, device: str) -> Callable[..., Tensor]:
    """Wrap the experts in an exchange over several ranks that uses the all-to-alls of
    `transformers`.
    """
    if group.size == 1:
        return experts
    from torch.distributed import init_device_mesh
    from transformers.distributed.expert_parallel import AllToAllEP

    mesh = init_device_mesh(device, (group.size, 1), mesh_dim_names=("experts", "batch"))
    exchanged: Callable[..., Tensor] = AllToAllEP(experts, mesh["experts"], mesh["batch"])
    return exchanged


def _register(implementation: str) -> base.Build:
    @base.register_peer(f"transformers_{implementation}", "transformers",
                        refuses=partial(_why_not, implementation=implementation))
    def build(problem: Problem, data: Data) -> Iterator[base.Candidate]:
        """Build MixtralExperts with one of the implementations in `transformers`."""
        yield from _candidate(problem, data, implementation)

    return build


builds = {way: _register(way) for way in ("grouped_mm", "batched_mm", "eager")}

"""Every registered router through the whole layer: output and all gradients equal a dense
computation of its decisions.

The experts that each rank chose are recorded; weights are computed again from the inputs by the
router's reference, so that the gradient through them is independent of the package too. Whether the
choice itself is right: tests/routing.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from torch import Tensor

from moe_plugin.comm import Topology, run_simulated
from moe_plugin.config import from_dict, to_dict
from moe_plugin.layer import MoELayer
from moe_plugin.records import TokenInfo
from moe_plugin.routing import routers
from tests.combinations import Cell, all_pairs, name_of
from tests.exactness.cells import own_tokens, traits_of
from tests.exactness.harness import NAMES, config_of, load_experts, naming, slice_of
from tests.oracle import Case, expert, make_inputs, make_parameters, objective
from tests.routing.references import Call, gradient_of, namespace, reference_of, tensors_of

pytestmark = pytest.mark.fast

TOKENS = {
    "uneven": ([7, 0, 3, 11, 1, 0, 5, 2], None), "padding": ([6] * 8, [2, 6, 0, 1, 3, 0, 6, 1])
}


@dataclasses.dataclass
class Seen:
    """What one rank saw: results, gradients by name, and the router's state and decision."""

    output: Tensor
    input_grad: Tensor
    grads: dict[str, Tensor]
    router_grads: dict[str, Tensor]
    ids: Tensor
    p: dict[str, Tensor]


def run_rank(case: Case, comm, config, training: bool) -> Seen:
    layer = MoELayer(config, comm, dtype=torch.float64)
    load_experts(layer, make_parameters(case), case)
    give_parameters(layer.router)
    layer.router.train(training)
    p, seen = tensors_of(layer.router), []
    layer.router.register_forward_hook(lambda module, args, routing: seen.append(routing.ids_TK))
    xs, masks = make_inputs(case)
    x = xs[comm.rank].clone().requires_grad_()
    out = layer(x, masks[comm.rank], info=TokenInfo(token_ids(x)))
    objective(out.output, {}, comm.rank).backward()
    grads = {name: getattr(layer.experts, attribute).grad for name, (attribute, _) in NAMES.items()
             if getattr(layer.experts, attribute, None) is not None}
    return Seen(out.output.detach(), gradient_of(x), grads,
                {n: gradient_of(q) for n, q in layer.router.named_parameters()}, seen[0], p)


def give_parameters(router: torch.nn.Module) -> None:
    """The same on every rank, whose threads share one random generator, and biases other than zero.
    """
    g = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter in router.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=g, dtype=torch.float64) * 0.5)
        if hasattr(router, "bias_E"):
            router.bias_E += torch.randn(router.bias_E.shape, generator=g) * 0.2
        if hasattr(router, "table_V"):
            router.table_V.copy_(
                torch.randint(router.num_experts, router.table_V.shape, generator=g))


def token_ids(x: Tensor) -> Tensor:
    return torch.arange(len(x)) * 7 % 11


def dense(
        case: Case, config, seen: list[Seen], name: str,
        training: bool) -> tuple[list[Tensor], list[Tensor], dict[str, Tensor], dict[str, Tensor]]:
    """Outputs, input gradients, gradients of whole experts and of the router, token by token."""
    p = {key: value.clone().requires_grad_() for key, value in make_parameters(case).items()}
    xs, masks = make_inputs(case)
    settings = namespace(
        to_dict(config)["router"] | {"experts": case.experts, "training": training})
    outputs, inputs, router_p, total = [], [], seen[0].p, torch.zeros(())
    for rank, (x, mask) in enumerate(zip(xs, masks, strict=True)):
        x = x.clone().requires_grad_()
        real = torch.ones(len(x), dtype=torch.bool) if mask is None else mask
        weights, passthrough = reference_of(name).weigh(
            Call(x, real, router_p, settings, token_ids(x)), seen[rank].ids)
        rows = []
        for t, ids in enumerate(seen[rank].ids.tolist()):
            row = sum((expert(case, p, e, weights[t, j] * x[t])
                       if case.weights_first else weights[t, j] * expert(case, p, e, x[t])
                       for j, e in enumerate(ids) if e >= 0),
                      torch.zeros(case.width, dtype=torch.float64))
            rows.append(row + (passthrough[t] * x[t] if passthrough is not None and real[t] else 0))
        outputs.append(torch.stack(rows) if rows else x * 0)
        inputs.append(x)
        total = total + objective(outputs[-1], {}, rank)
    total.backward()
    return ([o.detach() for o in outputs], [gradient_of(x) for x in inputs], {
        n: gradient_of(v) for n, v in p.items()
    }, {n: gradient_of(v) for n, v in router_p.items() if v.requires_grad})


def check(case: Case, name: str, **changes: Any) -> None:
    reference = reference_of(name)
    tree = to_dict(config_of(case, **changes)) | {"losses": {}}
    for key, value in reference.settings.items():
        tree["router"][key] = tree["router"][key] | value if isinstance(value, dict) else value
    tree["router"] |= {"name": name, "normalize": "auto"}
    config = from_dict(tree)
    seen = run_simulated(case.world, lambda comm: run_rank(case, comm, config, reference.training),
                         topology=Topology.uniform(case.world, 2))
    outputs, inputs, grads, router_grads = dense(case, config, seen, name, reference.training)
    for rank, mine in enumerate(seen):
        torch.testing.assert_close(mine.output, outputs[rank],
                                   msg=lambda m, rank=rank: f"output of rank {rank}: {m}")
        torch.testing.assert_close(mine.input_grad, inputs[rank],
                                   msg=lambda m, rank=rank: f"input gradient of rank {rank}: {m}")
        for key, grad in mine.grads.items():
            torch.testing.assert_close(grad, slice_of(key, grads[key], case, rank),
                                       msg=lambda m, key=key: f"gradient of {key}: {m}")
    for key, grad in router_grads.items():
        torch.testing.assert_close(sum(mine.router_grads[key] for mine in seen), grad,
                                   msg=lambda m, key=key: f"router gradient of {key}: {m}")


CELLS = all_pairs({
    "router": routers.names(), "world": [1, 2, 4, 8], "dispatch": own_tokens(),
    "tokens": list(TOKENS), "weights_first": [False, True]
})


@pytest.mark.parametrize("cell", CELLS, ids=name_of)
def test_router(cell: Cell) -> None:
    world, dispatch, (counts, masked) = cell["world"], cell["dispatch"], TOKENS[cell["tokens"]]
    factor = 0.0 if traits_of(dispatch).fixed_slots else None
    case = Case(world, 8 if masked is None else 4, 2, counts[:world],
                None if masked is None else masked[:world], factor, seed=world,
                weights_first=cell["weights_first"])
    with naming(name_of(cell)):
        check(case, cell["router"], dispatch__name=dispatch)

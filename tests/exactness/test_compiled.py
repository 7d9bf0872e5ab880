"""torch.compile over several ranks: the compiled layer is the eager one and the dense reference,
in output, losses and all gradients; exchanges are well-formed operations of torch.
"""

from __future__ import annotations

import dataclasses
import importlib
from typing import Any

import pytest
import torch
import torch._dynamo
import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from moe_plugin import MoELayer, TorchComm
from moe_plugin.comm import Topology, algorithms, graph_ops
from moe_plugin.comm.graph_ops import Route
from moe_plugin.config import MoEConfig
from moe_plugin.dispatch import dispatchers
from moe_plugin.routing.capacity import with_equal_tokens
from tests.combinations import Cell, all_pairs, every_value, name_of
from tests.distributed import run_gloo
from tests.exactness import cells
from tests.exactness.harness import (
    RankResult,
    compare,
    config_of,
    expert_grads,
    loaded,
    naming,
    reference,
    run_rank,
)
from tests.kernels.compiled_graphs import with_own_results
from tests.oracle import Case, make_inputs, objective

pytestmark = pytest.mark.distributed
WORLD = 2
# fixed slots and promised numbers of tokens: nothing is read by the host, so it is one graph
ONE_GRAPH: list[Cell] = all_pairs({
    "dispatch": ["padded"], "experts": [4, 1], "factor": [1.0, 0.5], "d": [1, 2],
    "all_to_all": ["linear", "2dh"], "r": [None, 0], "collectives": ["native", "forest"],
})
ONE_GRAPH += [
    {"dispatch": "bounded", "experts": 4, "factor": None, "d": d, "all_to_all": "linear", "r": r}
    for d, r in ((1, None), (2, None), (1, 0))
]
BREAKS: list[Cell] = [
    {"dispatch": "padded", "experts": 4, "factor": 0.0, "d": 2, "all_to_all": "native", "r": None},
    {"dispatch": "ragged", "experts": 4, "factor": None, "d": 2, "all_to_all": "linear", "r": None},
]


@pytest.fixture(scope="module", autouse=True)
def _compiler_is_imported() -> None:
    """600 modules, which every forked rank would import for its first graph: 1.3 s of its core."""
    for name in ("functorch.compile", "torch._inductor.compile_fx"):
        importlib.import_module(name)


def case_of(cell: Cell) -> Case:
    return Case(WORLD, cell["experts"], min(2, cell["experts"]), [6, 6], None, cell["factor"])


def settings_of(cell: Cell) -> MoEConfig:
    return config_of(case_of(cell), dispatch__name=cell["dispatch"], parallel__d=cell["d"],
                     parallel__r=cell["r"], comm__all_to_all=cell["all_to_all"],
                     comm__collectives=cell.get("collectives", "native"),
                     dispatch__equal_tokens=cell in ONE_GRAPH,
                     dispatch__max_tokens=6 * (cell["dispatch"] == "bounded"))


def run_compiled(case: Case, comm: TorchComm, config: MoEConfig, fullgraph: bool,
                 backend: str) -> RankResult:
    """As `run_rank`, through a compiled layer; twice, the second time without compiling."""
    layer = loaded(case, comm, config)
    torch._dynamo.reset()

    def call(x: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        out = layer(x)
        return out.output, out.losses

    run = torch.compile(call, fullgraph=fullgraph, backend=with_own_results(backend))
    for last in (False, True):
        layer.zero_grad()
        x = make_inputs(case, torch.float64)[0][comm.rank].clone().requires_grad_()
        with torch._dynamo.config.patch(error_on_recompile=last):
            output, losses = run(x)
            objective(output, losses, comm.rank).backward()
    grads = {"router": layer.router.weight_ED.grad, **expert_grads(layer)}
    return RankResult(output.detach(), {n: v.detach() for n, v in losses.items()}, x.grad, grads,
                      {})


def _run_cells(some: list[Cell], backend: str) -> list[RankResult]:
    torch._dynamo.config.disable = False
    comm, found = TorchComm(), []
    comm.prepare(Topology.uniform(WORLD, 1))
    for cell in some:
        case, config = case_of(cell), settings_of(cell)
        with naming(name_of(cell)):
            eager = run_rank(case, comm, config)
            ours = run_compiled(case, comm, config, cell in ONE_GRAPH, backend)
            found.append(dataclasses.replace(ours, stats=eager.stats))
            torch.testing.assert_close([ours.output, ours.input_grad, ours.losses, ours.grads],
                                       [eager.output, eager.input_grad, eager.losses, eager.grads],
                                       rtol=1e-10, atol=1e-11)
    return found


@pytest.mark.parametrize(("some", "backend"), [
    pytest.param([ONE_GRAPH[place] for place in every_value(ONE_GRAPH, along=None)], "aot_eager",
                 id="one graph"),
    pytest.param(ONE_GRAPH, "aot_eager", id="one graph, all pairs", marks=pytest.mark.slow),
    pytest.param(BREAKS[1:], "aot_eager", id="with breaks"),
    pytest.param(BREAKS[:1], "aot_eager", id="with breaks and slots", marks=pytest.mark.slow),
    pytest.param([ONE_GRAPH[0], ONE_GRAPH[-3], BREAKS[1]], "inductor", id="by Inductor",
                 marks=pytest.mark.slow),  # its compiler takes half a minute
])
def test_a_compiled_layer_is_the_eager_one(some: list[Cell], backend: str) -> None:
    by_rank = run_gloo(WORLD, _run_cells, some, backend, timeout_s=400)
    for index, cell in enumerate(some):
        with naming(name_of(cell)):
            compare(case_of(cell), [results[index] for results in by_rank],
                    reference(case_of(cell)))


def test_every_dispatcher_with_fixed_slots_and_own_tokens_is_compiled() -> None:
    fixed = {name for name in cells.own_tokens() if cells.traits_of(name).fixed_slots}
    one_layout = {name for name in dispatchers.names() if cells.traits_of(name).splits_slots}
    assert fixed - one_layout <= {cell["dispatch"] for cell in ONE_GRAPH}


def _opchecks() -> list[Any]:
    comm, rank = TorchComm(), dist.get_rank()
    route, found = Route(comm, algorithms.get("linear")), []
    splits = ([1, 3], [1, 2]) if rank == 0 else ([2, 2], [3, 2])
    for send, recv in ((None, None), splits):
        rows = 4 if send is None else sum(send)
        for dtype in (torch.float32, torch.bfloat16):
            x = torch.randn(rows, 3, dtype=dtype, requires_grad=True)
            found.append(torch.library.opcheck(graph_ops.all_to_all,
                                               (x, None, route.key, send, recv)))
    for name, back in (("all_gather", "reduce_scatter"), ("reduce_scatter", "all_gather"),
                       ("all_reduce", "identity"), ("own_part", "all_gather")):
        x = torch.randn(4, 3, requires_grad=True)
        found.append(torch.library.opcheck(graph_ops.collective, (x, comm.key, WORLD, name, back)))
    found.append(torch.library.opcheck(graph_ops.collective,
                                       (torch.tensor(3), comm.key, WORLD, "all_max", "none")))
    found.append(torch.library.opcheck(with_equal_tokens,
                                       (torch.zeros(5, 2, dtype=torch.int64), comm.key)))
    return found


def test_opcheck() -> None:
    for found in run_gloo(WORLD, _opchecks):
        assert len(found) == 10
        assert {status for each in found for status in each.values()} == {"SUCCESS"}


def _broken_promise() -> str:
    torch._dynamo.config.disable = False
    cell = ONE_GRAPH[0]
    layer = MoELayer(settings_of(cell), TorchComm(), dtype=torch.float64)
    run = torch.compile(lambda x: layer(x).output, fullgraph=True, backend="aot_eager")
    width = layer.config.model_dim
    try:
        run(torch.randn(5 + 2 * dist.get_rank(), width, dtype=torch.float64))
    except ValueError as error:
        return str(error)
    return "nothing"


def test_a_promise_is_checked_in_the_graph_too() -> None:
    said = run_gloo(WORLD, _broken_promise)
    assert all("dispatch.equal_tokens=True requires the same number" in text for text in said)


class _Seen(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.names: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.add(str(func))
        return func(*args, **(kwargs or {}))


def _eager_operations() -> set[str]:
    cell = ONE_GRAPH[0]
    layer = MoELayer(settings_of(cell), TorchComm(), dtype=torch.float64)
    with _Seen() as seen:
        layer(torch.randn(6, layer.config.model_dim, dtype=torch.float64)).output.sum().backward()
    return {name for name in seen.names if name.startswith("moe_plugin")}


def test_without_a_compiler_no_exchange_is_an_operation() -> None:
    assert run_gloo(WORLD, _eager_operations) == [set()] * WORLD

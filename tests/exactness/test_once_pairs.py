"""`dispatch.send` with every setting of a layer: exact against the dense reference, or refused by
name when the layer is built. Each setting is in the matrix, in the table here, or out of reach.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import pytest

from moe_plugin.comm import Topology, run_simulated
from moe_plugin.config import MoEConfig
from moe_plugin.dispatch import dispatchers
from moe_plugin.dispatch.pieces import PIECE_AXES
from moe_plugin.planner.choice import SENDS
from moe_plugin.planner.spill import POLICIES
from tests.exactness import cells
from tests.exactness.harness import compare, config_of, naming, reference, run_rank
from tests.exactness.spills import planned, random_planner
from tests.oracle import Case

pytestmark = pytest.mark.fast

WORLD = 4
ONCE = [send for send in SENDS if send != "rows"]
# settings by the name that they have in a cell of the matrix
IN_THE_MATRIX = {
    "dispatch.name": "dispatch", "dispatch.send": "send", "dispatch.capacity_factor": "factor",
    "parallel.r": "size", "parallel.shards": "size", "parallel.d": "pieces",
    "parallel.d_backward": "pieces", "parallel.cut": "cut", "experts.kind": "kind",
    "experts.compute": "compute", "experts.activation": "activation", "experts.bias": "bias",
    "experts.clamp": "clamp", "experts.linear_offset": "clamp", "experts.dropout": "dropout",
    "experts.weights_first": "weights_first",
    "comm.all_to_all": "all_to_all", "comm.collectives": "collectives"}
# what happens before rows are made, beside them, or to nothing but times
OUT_OF_REACH = {
    "dispatch": ["eval_capacity_factor", "eval_token_fraction", "equal_tokens"],
    "parallel": ["replan", "guests", "speeds"],
    "experts": ["hidden_dim", "compute_selection", "shared_hidden_dim", "shared_gate", "init_std",
                "cache_policy", "store_path", "store_throttle", "precision"],
    "comm": ["topology", "cluster", "network", "watchdog_s", "timeout_s"]}


@dataclasses.dataclass(frozen=True)
class Entry:
    """Settings by path; what they are refused for, None: they work; changes of the case."""

    settings: dict[str, Any]
    refused: str | None = None
    case: dict[str, Any] = dataclasses.field(default_factory=dict)

    def __str__(self) -> str:
        return ",".join(f"{name}={value}" for name, value in self.settings.items())


def entries() -> Iterator[Entry]:
    for name in dispatchers.names():
        traits = dispatchers.get(name).traits
        if not traits.sends_once:
            capacity = {"dispatch.capacity_factor": 0.0} if traits.fixed_slots else {}
            yield Entry({"dispatch.name": name, **capacity}, f"dispatch.name='{name}'")
    for axis in PIECE_AXES:
        refused = f"parallel.cut='{axis}'" if axis == "experts" else None
        yield Entry({"parallel.d": 2, "parallel.cut": axis}, refused)
    for policy in POLICIES:
        yield Entry({"parallel.spill": policy})
        yield Entry({"parallel.spill": policy, "parallel.d": 2, "experts.weights_first": True},
                    case={"weights_first": True, "kind": "gated_ffn"})
    bounded = {"dispatch.name": "bounded"}
    yield Entry({**bounded, "dispatch.stash_mib": 8.0, "dispatch.stash_host_mib": 8.0},
                "dispatch.stash_mib=8.0")
    yield Entry({**bounded, "dispatch.max_rows_factor": 4.0})
    yield Entry({**bounded, "dispatch.max_tokens": 11, "dispatch.on_overflow": "repeat"})
    yield Entry({**bounded, "parallel.spill": "everywhere"}, "dispatch.name='bounded'")
    for more in ({}, bounded):
        yield Entry({**more, "parallel.prefill": True})
        yield Entry({**more, "parallel.mode": "predicted"})
        yield Entry({**more, "parallel.mode": "auto"})
        yield Entry({**more, "experts.store": "host", "experts.cache": "64KiB",
                     "experts.compute": "loop"})
        yield Entry({**more, "experts.recompute_activation": True})
        yield Entry({**more, "experts.shared_overlap": True})
        yield Entry({**more, "parallel.replicas": 2, "parallel.schedule": "s1"},
                    case={"world": 2, "tokens": [7, 5]})
    yield Entry({"comm.wire": "fp16"})
    yield Entry({"comm.wire": "fp16", "comm.wire_back": "bf16"})
    yield Entry({"experts.latent_dim": 6}, case={"latent": 6})


@pytest.mark.parametrize("send", ONCE)
@pytest.mark.parametrize("entry", list(entries()), ids=str)
def test_exact_or_refused_when_a_layer_is_built(entry: Entry, send: str) -> None:
    case = Case(**{"world": WORLD, "experts": 8, "top_k": 4, "tokens": [7, 0, 11, 4], "skew": 0.5,
                   **entry.case})
    config = config_of(case, dispatch__send=send, **{
        path.replace(".", "__"): value for path, value in entry.settings.items()})

    def run() -> None:
        results = run_simulated(WORLD, lambda comm: run_rank(case, comm, config),
                                topology=Topology.uniform(WORLD, 2))
        loose = 1e-2 if "comm.wire" in entry.settings else None
        with naming(str(entry)):
            compare(case, results, reference(case),
                    **({"rtol": loose, "atol": loose} if loose else {}))

    if entry.refused is None:
        with planned(random_planner(7)):
            run()
        return
    said = (f"dispatch.send='{send}' cannot be combined with {entry.refused}. Use |"
            "parallel.spill='everywhere' cannot be combined with dispatch.name='bounded': use ")
    with pytest.raises(ValueError, match=said):
        run()


def test_every_setting_is_accounted_for() -> None:
    config = MoEConfig()
    here = {path for entry in entries() for path in entry.settings}
    out = {f"{section}.{name}" for section, names in OUT_OF_REACH.items() for name in names}
    for section in OUT_OF_REACH:
        for field in dataclasses.fields(getattr(config, section)):
            path = f"{section}.{field.name}"
            assert (path in IN_THE_MATRIX or path in here) != (path in out), path
    assert not set(IN_THE_MATRIX) & out
    for name in dispatchers.names():
        for cell in cells.once_cells(name)[:1]:
            assert set(IN_THE_MATRIX.values()) <= set(cell), name


def test_dispatchers_that_send_once_are_all_in_the_matrix() -> None:
    able = {name for name in dispatchers.names() if dispatchers.get(name).traits.sends_once}
    assert able == {name for name in dispatchers.names() if cells.once_cells(name)} >= {
        "ragged", "bounded"}

"""The predicted table counts what a step of the layer launches."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from scripts.bench.launches import recorded, step
from scripts.bench.problem import Problem
from scripts.bench.resources import GPUS
from scripts.bench.studies.gpu_predicted import bound, flops, used
from scripts.bench.studies.layers import LAYERS

pytest.importorskip("triton", reason="triton is not installed")
GPU = GPUS["sm_90"]
PAGES = Path(__file__).resolve().parents[3] / "docs/benchmarks"


@pytest.mark.parametrize("problem", LAYERS["cuda"], ids=lambda problem: problem.label())
def test_products_have_the_layer_s_flops_and_fill_the_gpu(problem: object) -> None:
    calls = recorded(step(problem), GPU.chip).calls
    products = [call for call in calls if flops(call)]
    assert sum(map(flops, products)) == problem.work()[0]
    assert {call.launch.kernel for call in products} == {
        "product_kernel", "act_backward_kernel", "weight_kernel"}
    assert all(0.8 < used(call, GPU, 1) <= 1 for call in products)


@pytest.mark.parametrize("dispatch,gated", [("ragged", True), ("bounded", False)])
def test_launches_of_a_layer_step(dispatch: str, gated: bool) -> None:
    """As many as docs/kernels_gpu.md says: each costs the host some 10 us, and small layers take no
    longer on a GPU.
    """
    problem = Problem(tokens=32, model_dim=32, hidden_dim=24, experts=4, top_k=2, dtype="bfloat16",
                      gated=gated, device="cuda")
    found = recorded(step(problem, dispatch={"name": dispatch}), GPU.chip)
    assert {call.launch.kernel for call in found.calls} >= {"top_k_kernel", "weight_kernel"}
    number = len(found.calls) + len(found.operations)
    page = (PAGES.parent / "kernels_gpu.md").read_text()
    assert f"| launches | {number} for forward and backward of a small" in page, found.operations


def test_the_bound_is_the_dense_time_over_all_times() -> None:
    dense = 2.0e-3
    layer = {"rows": [{"flops": int(dense * GPU.tflops * 1e12), "seconds": 2.5e-3},
                      {"flops": 0, "seconds": 0.5e-3}], "operation_seconds": 1e-3}
    assert bound(layer, GPU) == pytest.approx(0.5)


def test_the_committed_page_is_of_this_code() -> None:
    """Each state says which code it is of; the last one has today's launches, with their sizes."""
    states = json.loads((PAGES / "data/gpu_predicted.json").read_text())["states"]
    page = (PAGES / "gpu_predicted.md").read_text()
    for state, found in states.items():
        assert re.fullmatch(r"kernels/gpu [0-9a-f]{8}", found["code"]), state
        assert len(re.findall(rf"\| {state} +\| {found['code']} ", page)) == len(found["layers"])
    for problem, layer in zip(LAYERS["cuda"], states["after"]["layers"], strict=True):
        today = recorded(step(problem), GPU.chip)
        assert [(row["label"], row["flops"], row["bytes"], row["programs"])
                for row in layer["rows"]] == [
            (call.launch.label, flops(call), call.bytes, call.programs) for call in today.calls], (
            "measure again: moe-plugin bench gpu-predicted --state after --code ...")
        assert (layer["operations"], layer["operation_bytes"]) == (
            len(today.operations), sum(size for _, size in today.operations))

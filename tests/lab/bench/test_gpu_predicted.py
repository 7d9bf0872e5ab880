"""The predicted table counts what a step of the layer launches."""

from __future__ import annotations

import pytest

from moe_plugin.lab.bench.chips import GPUS
from moe_plugin.lab.bench.launches import recorded, step
from moe_plugin.lab.bench.studies.gpu_predicted import bound, flops, used
from moe_plugin.lab.bench.studies.layers import LAYERS

pytest.importorskip("triton", reason="triton is not installed")
GPU = GPUS["sm_90"]


@pytest.mark.parametrize("problem", LAYERS["cuda"], ids=lambda problem: problem.label())
def test_products_have_the_layer_s_flops_and_fill_the_gpu(problem: object) -> None:
    calls = recorded(step(problem), GPU.chip).calls
    products = [call for call in calls if flops(call)]
    assert sum(map(flops, products)) == problem.flops
    assert {call.launch.kernel for call in products} == {
        "product_kernel", "act_backward_kernel", "weight_kernel"}
    assert all(0.8 < used(call, GPU, 1) <= 1 for call in products)


def test_the_bound_is_the_dense_time_over_all_times() -> None:
    dense = 2.0e-3
    layer = {"rows": [{"flops": int(dense * GPU.tflops * 1e12), "seconds": 2.5e-3},
                      {"flops": 0, "seconds": 0.5e-3}], "operation_seconds": 1e-3}
    assert bound(layer, GPU) == pytest.approx(0.5)

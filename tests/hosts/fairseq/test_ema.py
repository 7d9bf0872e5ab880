"""`--store-ema` with our layers: averages of weights, in the precision that the weights have."""

from __future__ import annotations

import pytest
import torch

from moe_plugin import MoELayer
from moe_plugin.config import from_dict
from moe_plugin.routing import finish_step
from tests.routing.test_fp32 import settings

pytest.importorskip("fairseq")


@pytest.mark.parametrize("fp32", [False, True])
@pytest.mark.parametrize("router", ["sigmoid_bias", "dense_to_sparse", "switch,sigmoid_bias"])
def test_averages(router: str, fp32: bool) -> None:
    """a <- (a + w) / 2; a router under `router.fp32` and its bias in float32, integers copied."""
    from fairseq.dataclass.configs import EMAConfig
    from fairseq.models.ema.ema import EMA

    import moe_plugin.hosts.fairseq  # noqa: F401 - mends fairseq

    layer = MoELayer(from_dict(settings(router))).bfloat16()
    before = {name: value.clone() for name, value in layer.state_dict().items()
              if isinstance(value, torch.Tensor)}
    ema = EMA(layer, EMAConfig(store_ema=True, ema_decay=0.5, ema_fp32=fp32))
    with torch.no_grad():
        for value in (*layer.parameters(), *layer.buffers()):
            if value.is_floating_point():
                value.add_(0.001)
    finish_step(layer)
    ema.step(layer, 1)
    found, now = ema.get_model().state_dict(), layer.state_dict()
    for name, value in before.items():
        assert found[name].dtype == value.dtype
        if not value.is_floating_point():
            assert torch.equal(found[name], now[name]) and not torch.equal(now[name], value)
            continue
        want = (value.double() + now[name].double()) / 2
        off = 2**-22 if value.dtype == torch.float32 else 2**-7  # of the largest, about 1
        torch.testing.assert_close(found[name].double(), want, rtol=0, atol=off)
        assert value.dtype == (torch.float32 if "router." in name else torch.bfloat16), name
    again = EMA(layer, EMAConfig(store_ema=True, ema_fp32=fp32))
    again.restore(found)
    assert all(torch.equal(again.get_model().state_dict()[name], found[name]) for name in before)

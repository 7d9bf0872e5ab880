"""A setting that a new Megatron calls otherwise is one line of `compat.settings`."""

from __future__ import annotations

from dataclasses import fields, make_dataclass
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("megatron.core",
                    reason="needs megatron-core: pip install 'moe-plugin[megatron]'")

pytestmark = pytest.mark.megatron


@pytest.fixture
def newer(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A Megatron that calls `moe_router_topk` otherwise, and the line that says so."""
    from moe_plugin.hosts.megatron.compat import settings

    monkeypatch.setitem(settings.RENAMED, "moe_router_topk", "moe_top_k")
    return settings


def _config() -> Any:
    from moe_plugin.hosts.megatron.compat.names import TransformerConfig

    return TransformerConfig(num_layers=2, hidden_size=8, num_attention_heads=2,
                             num_moe_experts=4, moe_router_topk=3, add_bias_linear=False)


def _renamed() -> Any:
    """The same settings with `moe_top_k` in the place of `moe_router_topk`."""
    values = {"moe_top_k" if one.name == "moe_router_topk" else one.name:
              vars(_config())[one.name] for one in fields(_config())}
    return make_dataclass("TransformerConfig", values)(**values)


def test_layers_follow_it(newer: Any) -> None:
    from moe_plugin.hosts.megatron.translate import translate

    config = translate(_renamed(), {}).config
    assert config == translate(_config(), {}).config
    assert config.router.top_k == 3


def test_without_the_line_it_is_unknown() -> None:
    from moe_plugin.hosts.megatron.translate import translate

    with pytest.raises(AttributeError, match="moe_router_topk"):
        translate(_renamed(), {})


def test_calls_pass_it_on(newer: Any) -> None:
    from moe_plugin.hosts.megatron.compat.core import call_supported

    def build(moe_top_k: int) -> int:
        return moe_top_k

    assert call_supported(build, moe_router_topk=3, of_another_version=1) == 3


def test_arguments_of_the_script_follow_it(newer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    arguments = SimpleNamespace(_GLOBAL_ARGS=SimpleNamespace(moe_top_k=3))
    monkeypatch.setitem(newer.sys.modules, "megatron.training.global_vars", arguments)
    assert newer.script_arguments()["moe_router_topk"] == 3

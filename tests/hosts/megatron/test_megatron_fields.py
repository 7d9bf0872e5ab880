"""Every setting of MoE layers of the installed Megatron has a row that says what becomes of it."""

from __future__ import annotations

import argparse
import logging
import typing
from dataclasses import field, fields, make_dataclass
from typing import Any

import pytest

pytest.importorskip("megatron.core",
                    reason="needs megatron-core: pip install 'moe-plugin[megatron]'")

from moe_plugin.hosts.megatron.compat.fields import (
    ARGUMENTS,
    FIELDS,
    By,
    names,
    of_experts,
    refuse_unknown_arguments,
    without_effect,
    without_row,
)
from moe_plugin.hosts.megatron.translate import translate

pytestmark = [pytest.mark.megatron, pytest.mark.fast]
BASE = {"num_layers": 2, "hidden_size": 16, "num_attention_heads": 2, "num_moe_experts": 4,
        "add_bias_linear": False, "moe_aux_loss_coeff": 0.01}


def _config(**given: Any) -> Any:
    from moe_plugin.hosts.megatron.compat.names import TransformerConfig

    config = TransformerConfig(**BASE)  # its own checks would refuse half of the values
    for name, value in given.items():
        setattr(config, name, value)
    return config


def test_no_setting_of_the_config_lacks_a_row() -> None:
    found = [one.name for one in fields(_config())]
    assert sum(map(of_experts, found)) > 40
    assert without_row(found) == [], "give each a row in hosts/megatron/compat/fields.py"


def test_no_flag_lacks_a_row(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(typing, "override", lambda method: method, raising=False)  # Python 3.11
    arguments = pytest.importorskip("megatron.training.arguments")
    parser = arguments.add_megatron_arguments(argparse.ArgumentParser())
    found = [action.dest for action in parser._actions]
    assert "moe_router_topk" in found
    assert without_row(found, {**FIELDS, **ARGUMENTS}) == [], \
        "give each a row in hosts/megatron/compat/fields.py"


def test_no_name_is_in_both_tables() -> None:
    assert not FIELDS.keys() & ARGUMENTS.keys()


@pytest.mark.parametrize("name", names(By.REFUSED))
def test_refused_with_value_bound_and_remedy(name: str) -> None:
    row, value = FIELDS[name], 7
    assert row.taken is not None and not row.takes(value)
    with pytest.raises(ValueError) as error:
        translate(_config(**{name: value}), {})
    for part in (f"{name}=7 is not supported", f"must be {row.taken[-1]!r}", row.words):
        assert part in str(error.value)
    for taken in row.taken:
        translate(_config(**{name: taken}), {})


@pytest.mark.parametrize(("name", "value"), [
    ("moe_router_force_load_balancing", True), ("moe_router_force_biased", 0.5),
    ("moe_enable_routing_replay", True), ("moe_router_topk_limited_devices", 1),
    ("moe_router_load_balancing_type", "seq_aux_loss"),
    ("moe_router_score_function", "sqrtsoftplus"), ("moe_router_dtype", "fp64"),
    ("moe_expert_capacity_factor", 1.0), ("add_bias_linear", True)])
def test_megatrons_router_is_built_for_it(name: str, value: Any) -> None:
    assert FIELDS[name].by is By.ROUTER
    [reason] = translate(_config(**{name: value}), {}).native_router
    assert reason.startswith(f"{name}={value}")


def test_our_router_is_used_for_values_that_it_has_too() -> None:
    for name in names(By.ROUTER):
        for value in FIELDS[name].taken or (0.25,):
            config = _config(**{name: value})
            if name == "moe_router_load_balancing_type" and value == "none":
                config.moe_aux_loss_coeff = 0.0
            assert translate(config, {}).native_router == (), name


def test_what_has_no_effect_is_said() -> None:
    [line] = [text for text in translate(_config(
        moe_ncclep_zero_copy=True, moe_hybridep_num_sms_preprocessing=64), {}).notices
        if text.startswith("choose a native implementation")]
    assert "moe_ncclep_zero_copy=True" in line


def test_what_megatrons_router_reads_has_an_effect() -> None:
    plan = translate(_config(moe_router_num_groups=2, moe_router_group_topk=1,
                             moe_router_fusion=True), {})
    assert plan.native_router and "moe_router_fusion" not in " ".join(plan.notices)


@pytest.mark.parametrize("default", [None, 3, "list"])
def test_a_setting_of_a_newer_megatron_is_refused_unless_it_is_at_its_default(
        default: Any) -> None:
    config = _config()
    new = ("moe_not_yet_known", Any,
           field(default_factory=list) if default == "list" else field(default=default))
    newer = make_dataclass("Newer", [new], bases=(type(config),))
    config.__class__, config.moe_not_yet_known = newer, [] if default == "list" else default
    translate(config, {})
    config.moe_not_yet_known = 8
    with pytest.raises(ValueError, match=r"moe_not_yet_known=8 is unknown to moe-plugin.*Leave it "
                                         r"out \(the default is (None|3|\[\])\)"):
        translate(config, {})


def test_a_default_that_is_made_is_no_setting_without_effect() -> None:
    new = ("moe_grouped_gemm", Any, field(default_factory=lambda: [1]))
    config = make_dataclass("Newer", [new])()
    assert without_effect(config) == []
    config.moe_grouped_gemm = [2]
    assert without_effect(config) == ["moe_grouped_gemm=[2]"]


def test_an_argument_of_a_newer_megatron_is_refused() -> None:
    refuse_unknown_arguments({"num_experts": None, "lr": None}, {"num_experts": 8, "lr": 0.1})
    with pytest.raises(ValueError, match="moe_new_flag=True is unknown .* default is False"):
        refuse_unknown_arguments({"moe_new_flag": False}, {"moe_new_flag": True})


def test_a_version_newer_than_tested_is_said(monkeypatch: pytest.MonkeyPatch,
                                             caplog: pytest.LogCaptureFixture) -> None:
    from moe_plugin.hosts.megatron.compat import core
    from moe_plugin.utils.messages import warn_once

    warn_once.cache_clear()
    monkeypatch.setattr(core, "NUMBER", (0, 99))
    with caplog.at_level(logging.WARNING):
        core.check_version()
        core.check_version()
    [record] = [r for r in caplog.records if "is newer than 0.20" in r.getMessage()]
    assert "scripts/test_megatron_versions.sh" in record.getMessage()

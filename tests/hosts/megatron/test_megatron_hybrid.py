"""Megatron's hybrid models with our layers of experts."""

from __future__ import annotations

import argparse
import importlib.util
import json
import logging
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("megatron.core",
                    reason="needs megatron-core: pip install 'moe-plugin[megatron]'")
from tests.hosts.megatron.layers import Case, draw, initialise_parallel, load, whole_gradients
from tests.hosts.megatron.ranks import on_ranks
from tests.hosts.megatron.training import MODEL, PP2, Run, launched, when_built

pytestmark = [pytest.mark.megatron, pytest.mark.distributed, pytest.mark.skipif(
    importlib.util.find_spec("megatron.core.models.hybrid") is None,
    reason="needs HybridModel, of megatron-core 0.18 and newer")]
TOKENS, LENGTH, BATCH = 24, 8, 2
LOSSES = {"moe_router_load_balancing_type": "aux_loss", "moe_aux_loss_coeff": 0.1,
          "moe_z_loss_coeff": 0.01}


def _config(pattern: str, case: Case) -> Any:
    main, *predictions = pattern.split("/")
    case.native |= {**LOSSES, "num_layers": len(main), "is_hybrid_model": True, "ffn_hidden_size":
                    20, "mtp_num_layers": len(predictions) or None, "hidden_dropout": 0.0,
                    "attention_dropout": 0.0, "gated_linear_unit": False}
    return case.config()


def _model(pattern: str, case: Case, ours: bool) -> Any:
    """A hybrid model; the same weights on all ranks, ours or not."""
    model = _build(_config(pattern, case), pattern, ours)
    layers = _layers_of_experts(model)
    drawn = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for name, parameter in sorted(model.named_parameters()):
            if ".router." not in name and ".experts." not in name:
                parameter.copy_(torch.randn(parameter.shape, generator=drawn) * 0.2)
    for number, layer in enumerate(layers):
        load(layer, case, draw(case, seed=number))
    return model


def _build(config: Any, pattern: str, ours: bool) -> Any:
    from megatron.core.models.hybrid.hybrid_model import HybridModel

    from moe_plugin.hosts.megatron.compat import hybrid
    from moe_plugin.hosts.megatron.spec import swap_moe

    stack = hybrid.stack_spec(config, pattern, False)
    return HybridModel(config, swap_moe(stack, {}) if ours else stack, TOKENS, LENGTH,
                       hybrid_layer_pattern=pattern)


def _layers_of_experts(model: Any) -> list[Any]:
    return [module for module in model.modules() if hasattr(module, "shared_experts")
            and hasattr(module, "router")]


def _results(model: Any, case: Case) -> dict[str, Tensor]:
    from megatron.core import parallel_state as ps

    from moe_plugin.hosts.megatron.compat import aux_losses

    aux_losses.set_logged_losses({})
    ids = torch.randint(TOKENS, (BATCH, LENGTH), generator=torch.Generator().manual_seed(
        ps.get_data_parallel_rank()))
    mask = torch.ones(1, 1, LENGTH, LENGTH, dtype=torch.bool).triu(1)
    losses = model(ids, torch.arange(LENGTH).expand_as(ids), mask, labels=ids.roll(-1, 1),
                   loss_mask=torch.ones(BATCH, LENGTH))
    losses.mean().backward()
    found = {f"gradient of {name}": parameter.grad for name, parameter in model.named_parameters()
             if ".router." not in name and ".experts." not in name}
    for number, layer in enumerate(_layers_of_experts(model)):
        for name, grad in vars(whole_gradients(layer, case)).items():
            found[f"gradient of {name} in layer of experts {number}"] = grad
    found |= {"losses": losses.detach()}
    found |= {f"logged {name}": entry.values.sum()
              for name, entry in aux_losses.logged_losses().items()}
    return {name: value for name, value in found.items() if value is not None}


def _differences(pattern: str, case: Case) -> tuple[dict[str, float], list[Any]]:
    """(of every result, relative to its size, between Megatron's layers and ours; numbers of our
    layers in the model).
    """
    initialise_parallel(case)
    models = [_model(pattern, case, ours) for ours in (False, True)]
    native, ours = (_results(model, case) for model in models)
    assert native.keys() == ours.keys()
    return ({name: float((native[name] - ours[name]).abs().max()
                         / native[name].abs().max().clamp(min=1e-6)) for name in native},
            [layer.layer_number for layer in _layers_of_experts(models[1])])


@pytest.mark.parametrize(("world", "pattern", "case", "numbers"), [
    (1, "*E-*E/*E/*E", Case(), [2, 5, 7, 12]), (2, "E*-E", Case(ep=2), [1, 4]),
    (1, "*E-*E/*E/*E", Case(native={"mtp_use_repeated_layer": True}), [2, 5, 7])],
    ids=["alone", "EP2", "repeated"])
def test_losses_and_gradients_are_natives(world: int, pattern: str, case: Case,
                                          numbers: list[int]) -> None:
    for found, mine in on_ranks(world, _differences, pattern, case):
        assert len(found) > 20 and max(found.values()) < 2e-5, sorted(
            found.items(), key=lambda item: -item[1])[:5]
        assert mine == numbers


def _said_of_a_config_without_the_mark() -> str:
    """Megatron builds such a model; its layers of experts are then numbered wrongly."""
    initialise_parallel(case := Case())
    config = _config("*E", case)
    config.is_hybrid_model = False
    with pytest.raises(ValueError, match="is_hybrid_model") as error:
        _build(config, "*E", True)
    return str(error.value)


def test_a_config_that_does_not_say_hybrid_is_refused() -> None:
    [said] = on_ranks(1, _said_of_a_config_without_the_mark)
    assert "must be True" in said and "TransformerConfig(is_hybrid_model=True" in said


def _native_layers(argv: list[str]) -> tuple[set[str], list[str]]:
    """Classes of the layers of experts of a run, and what is said of --native-moe."""
    said: list[str] = []
    logging.getLogger("moe_plugin.megatron").addFilter(
        lambda record: said.append(record.getMessage()) or True)

    def kinds(run: Run) -> set[str]:
        return {type(m).__name__ for m in run.model.modules()
                if type(m).__name__.endswith("MoELayer")}

    return when_built(argv, kinds), [line for line in said if line.startswith("--native-moe")]


def test_native_layers_where_they_are_asked_for(data: str) -> None:
    """Settings of ours are then named: nothing reads them."""
    argv = [*MODEL[2:], "--hybrid-layer-pattern", "*E", "--data-path", data, "--train-iters", "1",
            "--native-moe", "--moe-parallel", "fixed", "--moe-timeout", "60"]
    [(kinds, said)] = on_ranks(1, _native_layers, argv)
    assert kinds == {"MoELayer"}
    [line] = said
    assert "--moe-parallel 'fixed'" in line and "timeout" not in line


@pytest.mark.parametrize("pattern", ["*E|*-", "*-|*E/*E"], ids=["last without E", "predictions"])
def test_stages_of_a_pattern_train_as_natives(data: str, tmp_path: Path, pattern: str) -> None:
    """Two pipeline stages, one of them without experts, from a checkpoint of Megatron's layers."""
    argv = [*MODEL[2:], *PP2, "--hybrid-layer-pattern", pattern, "--data-path", data,
            "--untie-embeddings-and-output-weights", "--position-embedding-type", "rope",
            "--train-iters", "3"]
    native = ["--native-moe"]
    launched([*native, "--save", "first", "--save-interval", "1", "--exit-interval", "1"], 2,
             tmp_path, model=argv)
    found = []
    for log, more in (("native", native), ("ours", [])):
        launched([*more, "--load", "first", "--no-load-optim", "--no-load-rng", "--log-file",
                  f"{log}.jsonl"], 2, tmp_path, model=argv)
        rows = map(json.loads, (tmp_path / f"{log}.jsonl").read_text().splitlines())
        # of a prediction's layer Megatron's own is in another place of the log
        found.append([{**{name: sorted(values) for name, values in row["aux_losses"].items()},
                       **{key: row[key] for key in row if key.endswith(("_loss", "grad_norm"))}}
                      for row in rows if "lm_loss" in row])
    assert [len(rows) for rows in found] == [2, 2] and found[0][0]["load_balancing_loss"]
    assert found[1] == [{key: pytest.approx(value, rel=1e-5) for key, value in row.items()}
                        for row in found[0]]


def _reported_mean(pattern: str) -> float:
    """Megatron's log of an auxiliary loss that is 1 in every layer of experts."""
    from megatron.core.transformer.moe.moe_logging import MoEMetricsTracker

    from moe_plugin.hosts.megatron.compat import hybrid

    initialise_parallel(Case())
    hybrid.mend_loss_log()
    name, found = "load_balancing_loss", {}
    writer = SimpleNamespace(
        add_scalar=lambda name, value, step: found.update({name: float(value)}))
    args = argparse.Namespace(hybrid_layer_pattern=pattern, num_layers=4, mtp_num_layers=2)
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "megatron.training.global_vars",
                      SimpleNamespace(_GLOBAL_ARGS=args))
        tracker = MoEMetricsTracker()
        for place in (2, 4, 5, 6, 6, 6):  # those of predictions share what there is behind
            tracker.record(name, torch.tensor(1.0), place, 6)
        tracker.report(1.0, 1, writer, force_initialize=True, track_names=[name],
                       num_layers=pattern.count("E"), moe_layer_freq=2, mtp_num_layers=2)
    return found[name]


def test_the_log_is_a_mean_over_all_layers_of_experts() -> None:
    assert on_ranks(1, _reported_mean, "*E*E/EE/EE") == [1.0]

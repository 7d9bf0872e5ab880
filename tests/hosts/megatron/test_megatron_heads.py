"""Multi-token prediction: gradients of all layers and the log of balance losses are those of a
model with Megatron's own MoE layers, with layers of their own for each depth and with one layer for
all of them (`mtp_use_repeated_layer`, from 0.17 on).

Also:

* An ensemble of output heads on a GPT model with MoE layers, under the confident oracle loss.
"""

from __future__ import annotations

import importlib.metadata
import json
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import torch

from moe_plugin.hosts.megatron.ensemble import OracleLosses, ensemble_of
from moe_plugin.training.cmcl import (
    EnsembleSettings,
    confident_oracle_loss,
    ensemble_errors,
)
from tests.hosts.megatron.layers import Case, copy_native_weights, initialise_parallel
from tests.hosts.megatron.ranks import on_ranks
from tests.hosts.megatron.training import MODEL, PP2, arguments_of, argv_for, launched, ran

VERSION = tuple(int(part) for part in importlib.metadata.version("megatron-core").split(".")[:2])
VOCABULARY, LENGTH, BATCH, DEPTHS = 20, 8, 2, 2
AUX = {"moe_router_load_balancing_type": "aux_loss", "moe_aux_loss_coeff": 0.5,
       "moe_z_loss_coeff": 0.1}
SELECTIVE = {"recompute_granularity": "selective", "recompute_modules": ["moe"]}
FULL = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}


def _config(case: Case) -> Any:
    more = {"num_layers": 3, "mtp_num_layers": DEPTHS, "mtp_loss_scaling_factor": 0.1,
            "hidden_dropout": 0.0, "attention_dropout": 0.0, "moe_layer_freq": [0, 1, 1]}
    return Case(**{**vars(case), "native": {**more, **case.native}}).config()


def _model(config: Any, ours: bool, settings: dict[str, Any] | None = None) -> Any:
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_mtp_block_spec

    from moe_plugin.hosts.megatron.compat import core
    from moe_plugin.hosts.megatron.spec import swap_moe

    layers = core.gpt_block_spec(config, False)
    layers = swap_moe(layers, settings or {}) if ours else layers
    torch.manual_seed(5)
    return GPTModel(config, layers, vocab_size=VOCABULARY, max_sequence_length=LENGTH,
                    mtp_block_spec=get_gpt_mtp_block_spec(config, layers,
                                                          use_transformer_engine=False))


def _moe_layers(model: Any) -> dict[str, Any]:
    from megatron.core.transformer.moe.moe_layer import MoELayer

    return {name: layer for name, layer in model.named_modules() if isinstance(layer, MoELayer)}


def _copy(native: Any, ours: Any) -> None:
    theirs = dict(native.named_parameters())
    with torch.no_grad():
        for name, parameter in theirs.items():
            if name.endswith("router.weight"):
                parameter.mul_(20)  # choices that no rounding changes
    copy_native_weights(theirs, ours)


def _step(model: Any, config: Any) -> dict[str, torch.Tensor]:
    """Two micro-batches, forward and then backward as in a pipeline: router gradients by layer,
    other gradients, the log.
    """
    from moe_plugin.hosts.megatron.compat import aux_losses

    aux_losses.forget_losses()
    g = torch.Generator().manual_seed(9)
    mask = torch.ones(1, 1, LENGTH, LENGTH, dtype=torch.bool).triu(1)
    model.train()
    sums = []
    for _ in range(2):
        tokens = torch.randint(VOCABULARY, (BATCH, LENGTH), generator=g)
        positions = torch.arange(LENGTH).expand_as(tokens)
        sums.append(model(tokens, positions, mask, labels=tokens.roll(-1, 1),
                          loss_mask=torch.ones(BATCH, LENGTH)).mean())
    for loss in sums:
        loss.backward()
    found = {name: layer.router.weight.grad if hasattr(layer.router, "weight")
             else layer.router.weight_ED.grad for name, layer in _moe_layers(model).items()}
    found |= {name: p.grad for name, p in model.named_parameters() if ".mlp." not in name}
    for name, entry in aux_losses.logged_losses().items():
        value = entry.values.clone()
        if entry.reduce_group is not None:
            torch.distributed.all_reduce(value, group=entry.reduce_group)
        torch.distributed.all_reduce(value)
        value /= torch.distributed.get_world_size()
        found[f"logged {name}"] = value
    return found


def _compared(case: Case) -> tuple[dict[str, float], dict[str, list[float]], list[int]]:
    """(differences from the native model, its log by name and layer, our layers' numbers)"""
    initialise_parallel(case)
    config = _config(case)
    models = [_model(config, flag) for flag in (False, True)]
    _copy(*models)
    native, ours = (_step(model, config) for model in models)
    assert native.keys() == ours.keys()
    worst = {name: float((value - ours[name]).abs().max() / value.abs().max().clamp(min=1e-6))
             for name, value in native.items()}
    logged = {name: value.tolist() for name, value in native.items() if name.startswith("logged")}
    return worst, logged, [layer.layer_number for layer in _moe_layers(models[1]).values()]


def _has(name: str) -> bool:
    from megatron.core.transformer.transformer_config import TransformerConfig

    return name in {field.name for field in fields(TransformerConfig)}


REPEATED = {"mtp_use_repeated_layer": True}
CASES = {
    "own layers": Case(native=AUX), "own layers, recomputed": Case(native={**AUX, **FULL}),
    "every second layer": Case(native={**AUX, "moe_layer_freq": 2}),
    "native router": Case(native={**AUX, "moe_router_dtype": "fp64"}),
    "repeated": Case(native={**AUX, **REPEATED}),
    "repeated, recomputed": Case(native={**AUX, **REPEATED, **FULL}),
    "repeated, experts recomputed": Case(native={**AUX, **REPEATED, **SELECTIVE}),
    "repeated, every second layer": Case(native={**AUX, **REPEATED, "moe_layer_freq": 2}),
    "repeated, native router": Case(native={**AUX, **REPEATED, "moe_router_dtype": "fp64"}),
}
PARALLEL = {
    "EP2": Case(ep=2, native=AUX),
    "TP2, by token": Case(tp=2, sequence_parallel=True,
                          native={**AUX, "calculate_per_token_loss": True}),
    "EP2, repeated": Case(ep=2, native={**AUX, **REPEATED, **FULL}),
    "TP2, repeated, by token": Case(tp=2, sequence_parallel=True, native={
        **AUX, **REPEATED, **SELECTIVE, "calculate_per_token_loss": True}),
}


def _needs_repeated_layers(case: Case) -> bool:
    repeated = "mtp_use_repeated_layer" in case.native
    if (0, 17) <= VERSION < (0, 19) and case.native.get("recompute_granularity") == "full":
        pytest.skip("Megatron 0.17 and 0.18 recompute no layers of multi-token prediction")
    if repeated and not _has("mtp_use_repeated_layer"):
        pytest.skip("this megatron-core repeats no layer (needs >= 0.17)")
    return repeated


@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_gradients_and_log_equal_native(case: Case) -> None:
    repeated = _needs_repeated_layers(case)
    [(worst, logged, numbers)] = on_ranks(1, _compared, case)
    assert max(worst.values()) < 2e-5 and len(worst) > 12, worst
    if VERSION < (0, 16):
        return  # which numbers these layers from 1 again, and logs them so
    moe = {1, 3} if case.native.get("moe_layer_freq") == 2 else {2, 3}
    predicted = {4} if repeated else {4, 5}
    assert set(numbers) == moe | predicted
    for values in logged.values():
        assert {1 + i for i, value in enumerate(values) if value} == moe | predicted


@pytest.mark.parametrize("case", PARALLEL.values(), ids=PARALLEL.keys())
def test_gradients_and_log_equal_native_on_two_ranks(case: Case) -> None:
    """By token: where Megatron's own losses are right (from 0.19 on)."""
    _needs_repeated_layers(case)
    if "calculate_per_token_loss" in case.native and VERSION < (0, 19):
        pytest.skip("Megatron's own layer weighs by the tokens of one rank up to 0.18")
    for worst, _, _ in on_ranks(2, _compared, case):
        assert max(worst.values()) < 2e-5, worst


def _biases(passes: int) -> list[float]:
    from moe_plugin.hosts.megatron.compat import core

    initialise_parallel(Case())
    config = _config(Case(native={**AUX, **REPEATED, "moe_router_score_function": "sigmoid"}))
    model = _model(config, True, {"router.name": "sigmoid_bias"})
    core.microbatches_a_step = lambda: 2
    [layer] = (layer for name, layer in _moe_layers(model).items() if name.startswith("mtp"))
    x = torch.randn(LENGTH, BATCH, config.hidden_size, generator=torch.Generator().manual_seed(1))
    for _ in range(passes):
        layer.train()(x)
    return layer.router.bias_E.tolist()


def test_a_step_of_a_repeated_layer_has_all_its_passes() -> None:
    """A selection bias moves once per step: of two micro-batches here, each with every depth."""
    _needs_repeated_layers(CASES["repeated"])
    assert not any(on_ranks(1, _biases, 2 * DEPTHS)[0])
    [moved] = on_ranks(1, _biases, 2 * DEPTHS + 1)
    assert any(moved) and on_ranks(1, _biases, 4 * DEPTHS) == [moved]


def test_losses_and_what_is_wrong() -> None:
    logits, labels = torch.randn(2, 4, 3, 7), torch.randint(7, (2, 4))
    mask = torch.tensor([[1.0, 1, 1, 0], [1, 1, 1, 1]])
    losses, model = OracleLosses(EnsembleSettings(heads=3)), torch.nn.Identity()
    losses.take_mask(model, (), {"loss_mask": mask})
    found = losses(labels, logits.transpose(0, 1))
    real = mask.flatten() > 0
    want = confident_oracle_loss(logits.flatten(0, 1), labels.flatten(), 1, 0.75,
                                 group_N=torch.arange(8) // 4, groups=2, mask_N=real)
    torch.testing.assert_close(found.flatten(), want.loss_N)
    assert found[0, 3] == 0
    oracle, top1 = ensemble_errors(logits.flatten(0, 1), labels.flatten())
    wrong = [int((each & real).sum()) for each in (oracle, top1)]
    assert losses.counts is not None and losses.counts.tolist() == [7, *wrong]
    losses.counts = None
    losses.take_mask(model.eval(), (), {})
    losses(labels, logits.transpose(0, 1))
    assert losses.counts[0] == 8 and losses.counts[3:].sum() == 8 + 16 + 8


def _train(steps: int) -> tuple[list[float], str]:
    from megatron.core.models.gpt.gpt_model import GPTModel

    from moe_plugin.hosts.megatron.compat import core
    from moe_plugin.hosts.megatron.ensemble import add_heads
    from moe_plugin.hosts.megatron.spec import swap_moe

    case = Case(native={"num_moe_experts": 4})
    initialise_parallel(case)

    def gpt(shared: bool) -> Any:
        return core.call_supported(
            GPTModel, config=case.config(),
            transformer_layer_spec=swap_moe(core.gpt_moe_layer_spec(False)), vocab_size=32,
            max_sequence_length=12, position_embedding_type="rope",
            share_embeddings_and_output_weights=shared)

    try:
        add_heads(gpt(True), EnsembleSettings(heads=3))
        message = ""
    except ValueError as error:
        message = str(error)
    model = add_heads(gpt(False), EnsembleSettings(heads=3, hidden=8, sharing=0.7))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    tokens = torch.arange(12).repeat(4, 1) + torch.arange(4)[:, None]
    positions, labels = torch.arange(12).repeat(4, 1), tokens + 1
    mask = torch.ones(1, 1, 12, 12, dtype=torch.bool).triu(1)
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        loss = model(tokens, positions, mask, labels=labels).mean()
        loss.backward()
        optimizer.step()
        losses.append(float(loss))
    assert model(tokens, positions, mask).shape == (4, 12, 3, 32)
    return losses, message


def test_a_gpt_model_with_heads_learns() -> None:
    [(losses, message)] = on_ranks(1, _train, 30)
    assert losses[-1] < 0.75 * losses[0]
    assert "share_embeddings_and_output_weights=True cannot be used" in message


FLAGS = ["--ensemble-heads", "3", "--ensemble-hidden", "8", "--ensemble-sharing", "0.7",
         "--untie-embeddings-and-output-weights"]


def test_heads_by_flags_over_two_stages(data: str, tmp_path: Path) -> None:
    for name, more in (("first", ["--train-iters", "4", "--save", "ckpt"]),
                       ("then", ["--train-iters", "5", "--load", "ckpt"])):
        launched([*PP2, *FLAGS, "--data-path", data, "--split", "90,10,0", "--eval-interval", "4",
                  "--eval-iters", "1", "--log-file", name, *more], 2, tmp_path)
        logs = [json.loads(line) for line in (tmp_path / name).read_text().splitlines()]
        _check(logs, [5] if name == "then" else [1, 2, 3, 4], 8)


def _check(logs: list[dict[str, Any]], numbers: list[int], sequences: int) -> None:
    """sequences: of a validation."""
    steps = [row for row in logs if "lm_loss" in row]
    *_, valid = (row for row in logs if "valid_loss" in row)
    assert [row["iteration"] for row in steps] == numbers
    assert len(steps) == 1 or steps[-1]["lm_loss"] < steps[0]["lm_loss"]
    for row in [*steps, valid]:
        assert 0 < row["oracle_error"] <= 1 and 0 < row["top1_error"] <= 1
    tokens = sequences * 32  # for one responsible head of three
    assert {name: sum(counts) for name, counts in valid["confidence"].items()} == {
        "responsible": tokens, "other": 2 * tokens, "ensemble": tokens}
    assert "confidence" not in steps[0]


def test_errors_of_steps_with_votes(data: str) -> None:
    argv = argv_for(data, 2, *FLAGS, "--ensemble-sharing", "0", "--global-batch-size", "6")
    plain, votes = (on_ranks(3, _records, [*argv, *more])[0]
                    for more in ([], ["--moe-votes", "3"]))
    assert len(plain) == 2
    for mine, want in zip(votes, plain, strict=True):
        assert len(want["aux_losses"]) == 2
        for name, values in want["aux_losses"].items():
            assert mine["aux_losses"][name] == pytest.approx(values, rel=1e-4) and min(values) > 0
        for name in ("lm_loss", "oracle_error", "top1_error"):
            assert mine[name] == pytest.approx(want[name], rel=1e-4) and want[name] > 0


def _records(argv: list[str]) -> list[dict[str, Any]]:
    return ran(argv).records


@pytest.mark.parametrize("more,said", [
    (["--oracle-k", "4"], "oracle_k=4 is out of bounds: must be in 1..3"),
    (["--ensemble-heads", "1"], "ensemble_heads=1 is out of bounds"),
    (["--ensemble-hidden", "0"], "ensemble_sharing=0.7 is out of bounds: must be 0 without"),
    (["--tensor-model-parallel-size", "2"], "tensor_model_parallel_size=2 is out of bounds"),
    (["--oracle-beta", "nan"], "oracle_beta=nan is out of bounds"),
    (["--ensemble-heads", "0"], "--ensemble-hidden has no effect without an ensemble"),
])
def test_flags_of_heads_are_checked(more: list[str], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        ensemble_of(arguments_of([*MODEL, *FLAGS, *more]))

"""An ensemble of output heads on a GPT model with MoE layers, under the confident oracle loss."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("megatron.core",
                    reason="needs megatron-core: pip install 'moe-plugin[megatron]'")

from moe_plugin.hosts.megatron.ensemble import OracleLosses, ensemble_of
from moe_plugin.training.ensembles.cmcl import (
    EnsembleSettings,
    confident_oracle_loss,
    ensemble_errors,
)
from tests.hosts.megatron.layers import Case, initialise_parallel
from tests.hosts.megatron.ranks import on_ranks
from tests.hosts.megatron.training import MODEL, PP2, arguments_of, launched, ran

pytestmark = pytest.mark.megatron


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


@pytest.mark.distributed
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


@pytest.mark.distributed
def test_errors_of_steps_with_votes(data: str) -> None:
    argv = [*MODEL, *FLAGS, "--ensemble-sharing", "0", "--data-path", data, "--train-iters", "2",
            "--global-batch-size", "6"]
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

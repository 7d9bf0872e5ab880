"""The training script's fp16, and its overlapped communication of gradients and parameters.

Also:

* Recipes of fp8 and fp4: what our layer takes from Megatron's settings, and what it refuses.
"""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from moe_plugin import MoELayer
from moe_plugin.hosts.megatron.compat.recipes import RECIPES, in_bf16
from moe_plugin.hosts.megatron.translate import translate
from tests.hosts.megatron.layers import Case, batch, build, initialise_parallel
from tests.hosts.megatron.ranks import on_ranks
from tests.hosts.megatron.training import EP2, MODEL, PP2, argv_for, trained

SHARDED = ["--use-distributed-optimizer"]
OVERLAP = ["--overlap-grad-reduce", "--ddp-bucket-size", "3000"]
GATHER = [*SHARDED, *OVERLAP, "--overlap-param-gather"]


def _rows(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def _losses(path: Path) -> list[float]:
    return [row["lm_loss"] for row in _rows(path) if "lm_loss" in row]


def _weights(*folders: str) -> list[dict[str, torch.Tensor]]:
    """The model's tensors in each checkpoint, by name."""
    from megatron.core import parallel_state
    from megatron.core.dist_checkpointing.serialization import load_plain_tensors

    parallel_state.initialize_model_parallel()
    return [{name: tensor for name, tensor in load_plain_tensors(folder).items()
             if isinstance(tensor, torch.Tensor) and "optimizer" not in name}
            for folder in folders]


CASES = {
    "EP2": (2, EP2, [], OVERLAP), "two replicas": (2, [], SHARDED, GATHER),
    "EP2, sharded": (2, EP2, SHARDED, GATHER),
    "EP2 in two replicas": (4, EP2, SHARDED, GATHER),
    "gathered experts": (2, [*EP2, "--moe-parallel-r", "0"], SHARDED, GATHER),
}


@pytest.mark.parametrize("name", CASES)
def test_overlapped_communication_changes_no_loss(name: str, data: str, tmp_path: Path) -> None:
    """Also over an evaluation and a checkpoint, which read parameters between two steps."""
    world, sizes, plain, overlapped = CASES[name]
    argv = argv_for(data, 4, "--eval-interval", "2", "--eval-iters", "1", "--split", "90,10,0",
                    "--save-interval", "3", *sizes)
    runs = [[*argv, "--save", str(tmp_path / run), *flags]
            for run, flags in (("plain", plain), ("overlapped", overlapped))]
    resumed = [*runs[1], "--load", str(tmp_path / "overlapped"), "--log-file",
               str(tmp_path / "resumed.jsonl")]
    for run in runs:
        on_ranks(world, trained, run)
    want, got = (_rows(tmp_path / run / "log.jsonl") for run in ("plain", "overlapped"))
    keys = ("lm_loss", "valid_loss", "grad_norm")
    assert len(want) == 7
    for one, other in zip(got, want, strict=True):
        assert {key: one[key] for key in keys if key in one} == pytest.approx(
            {key: other[key] for key in keys if key in other}, rel=1e-6)
    [(one, other)] = on_ranks(1, _weights, *(str(tmp_path / run / "iter_0000003")
                                             for run in ("plain", "overlapped")))
    assert any("experts" in weight for weight in one) and one.keys() == other.keys()
    for weight in one:
        torch.testing.assert_close(other[weight], one[weight], rtol=1e-5, atol=1e-6)
    (tmp_path / "overlapped" / "latest_checkpointed_iteration.txt").write_text("3")
    on_ranks(world, trained, resumed)
    assert _losses(tmp_path / "resumed.jsonl") == pytest.approx(
        _losses(tmp_path / "plain" / "log.jsonl")[3:], rel=1e-6)


@pytest.mark.parametrize(("world", "sizes"), [(2, EP2), (2, [*EP2, *SHARDED]), (2, PP2)],
                         ids=["EP2", "EP2, sharded", "PP2"])
def test_fp16_trains_as_bf16_and_counts_overflows(world: int, sizes: list[str], data: str,
                                                  tmp_path: Path) -> None:
    argv = [*MODEL, "--data-path", data, "--lr-decay-style", "constant", *sizes]
    fp16 = [*argv, "--fp16", "--initial-loss-scale", str(2**30), "--hysteresis", "1",
            "--train-iters", "24", "--save", str(tmp_path / "fp16"), "--save-interval", "19"]
    short = [[*argv, *precision, "--train-iters", "5", "--log-file", str(tmp_path / name)]
             for name, precision in (("bf16", ["--bf16"]),
                                     ("low", ["--fp16", "--initial-loss-scale", "1024"]))]
    for run in (fp16, *short):
        on_ranks(world, trained, run)
    rows, want = _rows(tmp_path / "fp16" / "log.jsonl"), _losses(tmp_path / "bf16")
    assert _losses(tmp_path / "low") == pytest.approx(want, abs=2e-2)
    skipped = [row["skipped_steps"] for row in rows]
    # more than the ten in a row that stop other runs
    assert skipped[:11] == list(range(1, 12)) and skipped[-1] < 19
    # each of them halves the scale, and none is part of a mean
    assert [row["loss_scale"] for row in rows] == [2.0**30 / 2**count for count in skipped]
    assert [row["lm_loss"] is None for row in rows] == [
        now > before for before, now in zip([0, *skipped], skipped, strict=False)]
    first = next(row["lm_loss"] for row in rows if row["lm_loss"])
    assert first == pytest.approx(want[0], rel=5e-2)  # on later samples
    assert rows[-1]["lm_loss"] < want[0] - 0.1
    (tmp_path / "fp16" / "latest_checkpointed_iteration.txt").write_text("19")
    on_ranks(world, trained, [*fp16, "--load", str(tmp_path / "fp16"), "--log-file",
                             str(tmp_path / "resumed.jsonl")])
    again = _rows(tmp_path / "resumed.jsonl")
    assert [row["loss_scale"] for row in again] == [rows[-1]["loss_scale"]] * 5
    assert [row["lm_loss"] for row in again] == pytest.approx(
        [row["lm_loss"] for row in rows[19:]], abs=5e-3)


def config(**values: Any) -> Any:
    """A `TransformerConfig`; Megatron builds none in fp8 without Transformer Engine."""
    made = Case().config()
    for name, value in values.items():
        setattr(made, name, value)
    return made


def followed(native: Any, **settings: Any) -> dict[str, str]:
    """What differs from the defaults of precision and wire."""
    found = translate(native, settings).config
    values = {"precision": found.experts.precision, "wire": found.comm.wire,
              "wire_back": found.comm.wire_back}
    defaults = {"precision": "ieee", "wire": "none", "wire_back": "same"}
    return {name: value for name, value in values.items() if value != defaults[name]}


@pytest.mark.parametrize(("recipe", "chosen", "precision"), [
    (name, chosen, precision) for (kind, name), row in RECIPES.items() if kind == "fp8"
    for chosen, precision in row.products.items()])
def test_experts_follow_a_recipe(recipe: str, chosen: str, precision: str) -> None:
    enums = pytest.importorskip("megatron.core.enums")
    for value in (recipe, enums.Fp8Recipe(recipe)):
        native = config(fp8=chosen, fp8_recipe=value, moe_router_padding_for_quantization=True)
        assert followed(native) == {"precision": precision}
        assert followed(native, **{"experts.precision": "nvfp4"}) == {"precision": "nvfp4"}
        [said] = [line for line in translate(native, {}).notices if "low-precision" in line]
        assert said.endswith(f"experts.precision={precision}")


@pytest.mark.parametrize("key", [key for key, row in RECIPES.items() if not row.products])
def test_other_recipes_are_refused_unless_the_user_says_what_experts_compute(
        key: tuple[str, str]) -> None:
    kind, recipe = key
    native = config(**{kind: "hybrid" if kind == "fp8" else "e2m1", f"{kind}_recipe": recipe})
    with pytest.raises(ValueError, match=f"{kind}_recipe='{recipe}'.*--fp8-recipe blockwise or mx"):
        translate(native, {})
    assert followed(native, **{"experts.precision": "fp8"}) == {"precision": "fp8"}


def test_what_changes_a_recipe_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    for kind in ("fp8", "fp4"):
        native = config(**{kind: "e4m3", f"{kind}_param": True})
        with pytest.raises(ValueError, match=f"Leave out --{kind}-param-gather"):
            translate(native, {"experts.precision": "ieee"})
    native = config(fp8="e4m3", fp8_recipe="blockwise")
    monkeypatch.setenv("NVTE_FP8_BLOCK_SCALING_FP32_SCALES", "1")
    with pytest.raises(ValueError, match="NVTE_FP8_BLOCK_SCALING_FP32_SCALES='1' changes"):
        translate(native, {})
    assert followed(config(fp8="e4m3", fp8_recipe="mxfp8")) == {"precision": "mxfp8"}


def test_recipes_by_module_are_refused_unless_the_user_says_what_experts_compute() -> None:
    native = config(quant_recipe=object())
    with pytest.raises(ValueError, match=r"quant_recipe \(--te-precision-config-file, .* not supp"):
        translate(native, {})
    assert followed(native, **{"experts.precision": "fp8"}) == {"precision": "fp8"}


def test_rows_travel_as_dispatch_and_combine_ask() -> None:
    both = config(moe_dispatch_fwd_dtype="mxfp8", moe_combine_bwd_dtype="mxfp8")
    assert followed(both) == {"wire": "mxfp8", "wire_back": "none"}
    assert followed(both, **{"comm.wire": "fp8"}) == {"wire": "fp8"}
    assert followed(both, **{"comm.wire_back": "same"}) == {"wire": "mxfp8"}
    assert not followed(config(moe_dispatch_fwd_dtype="bf16", moe_combine_bwd_dtype="bf16"))
    with pytest.raises(ValueError, match="moe_combine_bwd_dtype='bf16' is not supp.*--moe-wire"):
        translate(config(moe_dispatch_fwd_dtype="mxfp8"), {})


def test_layers_that_stay_in_bf16() -> None:
    native = SimpleNamespace(first_last_layers_bf16=True, num_layers=4,
                             num_layers_at_start_in_bf16=1, num_layers_at_end_in_bf16=2)
    assert [in_bf16(native, number) for number in range(1, 5)] == [True, False, True, True]
    assert not in_bf16(SimpleNamespace(num_layers=4), 1)


def _layer(case: Case) -> tuple[list[torch.Tensor], list[torch.Tensor], torch.Tensor]:
    """Output and input gradient of a layer of that recipe, of our own layer with those products,
    and the output of a layer that the recipe leaves out.
    """
    initialise_parallel(case)
    recipe = {"fp8": "hybrid", "fp8_recipe": "blockwise"}
    make = Case.config
    Case.config = lambda self: _with(make(self), **recipe)  # type: ignore[method-assign]
    layer = build(case, True)
    x, weigh, _ = batch(case)

    def results(run: Any) -> list[torch.Tensor]:
        at = x.clone().requires_grad_()
        y = run(at)
        return [y.detach(), *torch.autograd.grad((y * weigh).sum(), [at])]

    mine = results(lambda at: layer(at)[0])
    ours = MoELayer(layer.plan.config)
    ours.load_state_dict(layer.moe.state_dict())
    theirs = results(lambda at: ours(at).output)
    recipe.update(first_last_layers_bf16=True, num_layers_at_start_in_bf16=1,
                  num_layers_at_end_in_bf16=0)
    return mine, theirs, results(lambda at: build(case, True)(at)[0])[0]


def _with(made: Any, **values: Any) -> Any:
    for name, value in values.items():
        setattr(made, name, value)
    return made


def test_a_layer_of_the_model_computes_in_the_recipe() -> None:
    [(mine, theirs, left_out)] = on_ranks(1, _layer, Case(gated=True))
    for got, want in zip(mine, theirs, strict=True):
        torch.testing.assert_close(got, want, rtol=0, atol=0)
    off = float((mine[0] - left_out).norm() / left_out.norm())
    assert 0.01 < off < 0.12, off


def test_every_format_is_one_of_ours() -> None:
    from moe_plugin.config.experts import ROUNDED

    made = {each for row in RECIPES.values() for each in row.products.values()}
    assert made < set(ROUNDED)
    assert all(row.why_not or row.products for row in RECIPES.values())

"""Recipes of fp8 and fp4: what our layer takes from Megatron's settings, and what it refuses."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("megatron.core",
                    reason="needs megatron-core: pip install 'moe-plugin[megatron]'")

from moe_plugin import MoELayer
from moe_plugin.hosts.megatron.compat.recipes import RECIPES, in_bf16
from moe_plugin.hosts.megatron.translate import translate
from tests.hosts.megatron.layers import Case, batch, build, initialise_parallel
from tests.hosts.megatron.ranks import on_ranks

pytestmark = pytest.mark.megatron


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
        with pytest.raises(ValueError, match=f"leave out --{kind}-param-gather"):
            translate(native, {"experts.precision": "ieee"})
    native = config(fp8="e4m3", fp8_recipe="blockwise")
    monkeypatch.setenv("NVTE_FP8_BLOCK_SCALING_FP32_SCALES", "1")
    with pytest.raises(ValueError, match="NVTE_FP8_BLOCK_SCALING_FP32_SCALES='1' changes"):
        translate(native, {})
    assert followed(config(fp8="e4m3", fp8_recipe="mxfp8")) == {"precision": "mxfp8"}


def test_recipes_by_module_are_refused_unless_the_user_says_what_experts_compute() -> None:
    native = config(quant_recipe=object())
    with pytest.raises(ValueError, match=r"quant_recipe \(--te-precision-config-file, .* None"):
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

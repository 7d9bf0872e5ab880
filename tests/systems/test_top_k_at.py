"""Tutel's dynamic top-ANY as a schedule: `router.top_k_at` in a loop of one's own, in fairseq and
in Megatron gives what runs with these fixed numbers of experts give from the same weights.
"""

from __future__ import annotations

import copy
import importlib.util
import math
from pathlib import Path
from typing import Any

import pytest
import torch

from moe_plugin import MoELayer
from moe_plugin.config import from_dict
from moe_plugin.hosts.plain.run import TrainingSteps
from moe_plugin.routing import finish_step

D, E, T = 16, 8, 48
PADDED = {"name": "padded", "capacity_factor": 1.0}


def layer(top_k: int = 4, at: Any = None, dispatch: Any = None, **router: Any) -> MoELayer:
    torch.manual_seed(0)
    return MoELayer(from_dict({
        "model_dim": D, "num_experts": E, "experts": {"hidden_dim": 24},
        "dispatch": dispatch or {}, "router": {"top_k": top_k, "top_k_at": at or {}, **router}}))


def x_TD(seed: int) -> torch.Tensor:
    return torch.randn(T, D, generator=torch.Generator().manual_seed(seed))


def passed(moe: MoELayer, seed: int) -> list[torch.Tensor]:
    """Output and all gradients of a call."""
    moe.zero_grad()
    out = moe(x_TD(seed))
    (out.output.square().mean() + sum(out.losses.values())).backward()
    return [out.output.detach(), *(p.grad.clone() for p in moe.parameters())]


@pytest.mark.fast
@pytest.mark.parametrize("router", [
    {}, {"name": "cosine"}, {"name": "ktop1"}, {"name": "sigmoid_bias"}, {"name": "quantile"},
    {"name": "expert_choice"}, {"name": "group_limited", "groups": 2, "group_top_k": 2}],
    ids=lambda router: router.get("name", "topk"))
@pytest.mark.parametrize("dispatch", [{}, PADDED], ids=["dropless", "capacity"])
def test_each_step_is_that_of_the_fixed_number(router: Any, dispatch: Any) -> None:
    moe = layer(4, {2: 2, 4: 1}, dispatch, **router)
    optimizer = torch.optim.SGD(moe.parameters(), lr=0.1)
    for step, k in enumerate((4, 2, 2, 1, 1), 1):
        fixed = layer(k, None, dispatch, **router)
        fixed.load_state_dict(moe.state_dict())
        for ours, theirs in zip(passed(moe, step), passed(fixed, step), strict=True):
            assert torch.equal(ours, theirs), step
        if dispatch and "name" not in router:
            assert moe(x_TD(step)).stats.capacity == k * math.ceil(T / E)
        optimizer.step()
        finish_step(moe)


@pytest.mark.fast
def test_parts_of_a_run_and_a_saved_state() -> None:
    moe = layer(4, {0.25: 2, 0.5: 1})
    seen: list[int] = []

    def loss_of(model: MoELayer, x: torch.Tensor) -> torch.Tensor:
        out = model(x)
        seen.append(model.router.top_k)
        return out.output.square().mean()

    steps = TrainingSteps(moe, torch.optim.SGD(moe.parameters(), lr=0.1), loss_of, total=8)
    for seed in range(4):
        steps(x_TD(seed))
    saved = copy.deepcopy(moe.state_dict())
    for seed in range(4):
        steps(x_TD(seed))
    assert seen == [4, 4, 2, 2, 1, 1, 1, 1]
    again = layer(4, {0.25: 2, 0.5: 1})
    again.load_state_dict(saved)
    assert again.router.top_k == 1  # of the fifth step
    assert again.eval()(x_TD(0)).stats is not None
    # and into layers without a schedule, and from them
    layer(4).load_state_dict(saved)
    layer(4, {2: 1}).load_state_dict(layer(4).state_dict())
    with pytest.raises(ValueError, match="fractions of the run, but.*TrainingSteps"):
        finish_step(layer(4, {0.5: 1}))


@pytest.mark.fast
def test_a_compiled_layer_follows() -> None:
    moe = layer(4, {2: 2})
    compiled = torch.compile(moe, backend="eager")
    for k in (4, 2):
        fixed = layer(k)
        assert torch.equal(compiled(x_TD(1)).output, fixed(x_TD(1)).output)
        finish_step(moe)


@pytest.mark.fast
@pytest.mark.parametrize(("settings", "error"), [
    ({"name": "switch", "top_k_at": {2: 1}}, "top_k_at=.*router.name='switch', whose experts per "
     "token are fixed; leave it out, or use router.name=topk"),
    ({"name": "dense_to_sparse", "top_k_at": {2: 1}}, "dense_to_sparse.*are fixed"),
    ({"top_k_at": {2: 9}}, "top_k_at=.*<= num_experts=8"),
    ({"top_k_at": {0: 2}}, "steps from 2"), ({"top_k_at": {0.5: 2, 10: 1}}, "or by fractions"),
    ({"top_k_at": {5: 2, 3: 1}}, "ascending"), ({"top_k_at": {5: 0}}, ">= 1 expert"),
    ({"top_k_at": {5: 1}, "second_expert_policy": "random"}, "top_k is 2, then 1: set it to 2"),
    ({"name": "noisy_topk", "top_k_at": {5: 1}}, "top_k_at.*so the router would"),
    ({"top_k_at": 3}, "must be a mapping of number to number")])
def test_what_cannot_be_is_refused(settings: Any, error: str) -> None:
    with pytest.raises(ValueError, match=error):
        MoELayer(from_dict({"model_dim": D, "num_experts": E, "router": settings}))


@pytest.mark.fast
def test_a_layer_that_measures_goes_on() -> None:
    """The tuner sees other loads, and results are those of a fixed layout."""
    torch.manual_seed(0)
    values = {"model_dim": D, "num_experts": E, "router": {"top_k": 4, "top_k_at": {3: 1}}}
    tuned = MoELayer(from_dict({**values, "parallel": "auto"}))
    plain = MoELayer(from_dict(values))
    plain.load_state_dict(tuned.state_dict(), strict=False)
    for seed in range(5):
        torch.testing.assert_close(tuned(x_TD(seed)).output, plain(x_TD(seed)).output)
        finish_step(tuned)
        finish_step(plain)


@pytest.mark.fairseq
@pytest.mark.skipif(importlib.util.find_spec("fairseq") is None, reason="needs fairseq")
def test_fairseq(tmp_path: Path) -> None:
    """By parts of the run and by steps; resumed; the runs of fixed numbers one after the other."""
    from tests.hosts.fairseq import conftest

    (tmp_path / "text").mkdir()
    data = conftest.make_corpus(tmp_path / "text").lm
    base = (f"{data} {conftest.LANGUAGE_MODEL} {conftest.MOE} --moe-dispatch ragged "
            "--moe-capacity-factor none --moe-second-expert-policy all --disable-validation "
            "--save-interval-updates 4 --lr 0.5")

    def losses(more: str, folder: str) -> list[float]:
        return conftest.run("fairseq-train", f"{base} {more} --save-dir {tmp_path / folder}"
                            ).ok().losses

    fixed = losses("--moe-top-k 2 --max-update 4", "fixed")
    fixed += losses("--moe-top-k 1 --max-update 8", "fixed")
    assert len(fixed) == 8
    assert losses("--moe-top-k 2 --moe-top-k-at 5=1 --max-update 8", "steps") == fixed
    parts = losses("--moe-top-k 2 --moe-top-k-at 0.5=1 --max-update 8", "parts")
    assert parts == fixed
    early = losses("--moe-top-k 2 --moe-top-k-at 5=1 --max-update 6", "resumed")
    assert early + losses("--moe-top-k 2 --moe-top-k-at 5=1 --max-update 8", "resumed") == fixed
    assert losses("--moe-top-k 2 --max-update 8", "other") != fixed
    conftest.run("fairseq-train", f"{base} --moe-router switch --moe-top-k-at 5=1 --max-update 8"
                 ).failed_with("--moe-top-k-at", "whose experts per token are fixed")


def _megatron(argv: list[str]) -> list[float]:
    from tests.hosts.megatron.training import ran

    return [record["lm_loss"] for record in ran(argv).steps_logged]


@pytest.mark.megatron
@pytest.mark.skipif(importlib.util.find_spec("megatron") is None or importlib.util.find_spec(
    "megatron.training") is None, reason="needs megatron.training")
def test_megatron(tmp_path: Path) -> None:
    from tests.hosts.megatron.conftest import make_data
    from tests.hosts.megatron.ranks import on_ranks
    from tests.hosts.megatron.training import MODEL, refusal

    base = [*MODEL, "--data-path", make_data(tmp_path), "--moe-router-pre-softmax", "--lr",
            "3e-2", "--lr-decay-style", "constant", "--save-interval", "4"]

    def losses(folder: str, iterations: int, *more: str) -> list[float]:
        place = str(tmp_path / folder)
        return on_ranks(1, _megatron, [*base, "--save", place, "--load", place, "--train-iters",
                                       str(iterations), *more])[0]

    fixed = losses("fixed", 4, "--moe-router-topk", "2")
    fixed += losses("fixed", 8, "--moe-router-topk", "1", "--override-opt_param-scheduler")
    assert len(fixed) == 8
    both = ["--moe-router-topk", "2", "--moe-top-k-at", "5=1"]
    assert losses("steps", 8, *both) == pytest.approx(fixed, abs=1e-6)
    assert losses("parts", 8, *both[:2], "--moe-top-k-at", "0.5=1") == pytest.approx(
        fixed, abs=1e-6)
    early = losses("resumed", 6, *both)
    assert early + losses("resumed", 8, *both, "--override-opt_param-scheduler") == pytest.approx(
        fixed, abs=1e-6)
    assert losses("other", 8, "--moe-router-topk", "2") != pytest.approx(fixed, abs=1e-6)
    [message] = on_ranks(1, refusal, [*base, "--train-iters", "2", *both,
                                      "--moe-router-load-balancing-type", "sinkhorn"])
    assert "router.top_k_at" in message and "Megatron's own router" in message

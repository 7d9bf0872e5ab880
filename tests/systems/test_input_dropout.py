"""Dropout on the router's input (Switch Transformers, "input dropout"): a loop by hand with the
same mask, training alone, the experts' input untouched, tensor-parallel ranks with one mask.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from moe_plugin import MoELayer
from moe_plugin.config import from_dict

D, E, T, P = 8, 4, 24, 0.4


def layer(**router: Any) -> MoELayer:
    torch.manual_seed(0)
    return MoELayer(from_dict({
        "model_dim": D, "num_experts": E, "losses": {},
        "experts": {"hidden_dim": 12, "bias": False},
        "router": {"top_k": 2, "input_dropout": P, **router}})).double()


def by_hand(moe: MoELayer, x_TD: torch.Tensor, kept_TD: torch.Tensor) -> torch.Tensor:
    """The router sees kept values over 1 - P; experts see x."""
    rows = []
    w_in, w_out = moe.experts.w_in_LDF, moe.experts.w_out_LFD
    for x_D, kept_D in zip(x_TD, kept_TD, strict=True):
        scores = torch.softmax(moe.router.weight_ED @ (x_D * kept_D / (1 - P)), 0)
        best = scores.topk(2)
        rows.append(sum(
            weight / best.values.sum() * (torch.nn.functional.gelu(x_D @ w_in[e]) @ w_out[e])
            for weight, e in zip(best.values, best.indices.tolist(), strict=True)))
    return torch.stack(rows)


def gradients(moe: MoELayer, x_TD: torch.Tensor, y_TD: torch.Tensor) -> list[torch.Tensor]:
    return list(torch.autograd.grad(y_TD.square().sum(), [x_TD, *moe.parameters()]))


@pytest.mark.fast
def test_a_loop_by_hand_with_the_same_mask() -> None:
    moe, x_TD = layer(), torch.randn(T, D, dtype=torch.double, requires_grad=True)
    torch.manual_seed(5)
    ours = moe(x_TD).output
    torch.manual_seed(5)
    kept_TD = torch.nn.functional.dropout(torch.ones(T, D, dtype=torch.double), P) > 0
    assert 0.2 < 1 - kept_TD.double().mean() < 0.6
    theirs = by_hand(moe, x_TD, kept_TD)
    torch.testing.assert_close(ours, theirs)
    for a, b in zip(gradients(moe, x_TD, ours), gradients(moe, x_TD, theirs), strict=True):
        torch.testing.assert_close(a, b)
    moe.eval()
    none = by_hand(moe, x_TD, torch.full((T, D), 1 - P, dtype=torch.double))
    torch.testing.assert_close(moe(x_TD).output, none)


@pytest.mark.fast
@pytest.mark.parametrize("reentrant", [True, False])
def test_a_recomputation_has_the_mask_of_its_first_pass(reentrant: bool) -> None:
    moe, x_TD = layer(), torch.randn(T, D, dtype=torch.double, requires_grad=True)
    found = []
    for call in (lambda x: moe(x).output,
                 lambda x: checkpoint(lambda x: moe(x).output, x, use_reentrant=reentrant)):
        moe.zero_grad()
        x_TD.grad = None
        torch.manual_seed(7)
        y_TD = call(x_TD)
        torch.randn(3)  # what other layers draw
        y_TD.square().sum().backward()
        found.append([y_TD, x_TD.grad, *(p.grad for p in moe.parameters())])
    for kept, again in zip(*found, strict=True):
        assert torch.equal(kept, again)


@pytest.mark.fast
@pytest.mark.parametrize("value", [-0.1, 1.0])
def test_bounds(value: float) -> None:
    with pytest.raises(ValueError, match=rf"router.input_dropout={value} .*\[0, 1\); use 0"):
        from_dict({"router": {"input_dropout": value}})


def _tensor_parallel(dispatch: str) -> tuple[torch.Tensor, torch.Tensor, float]:
    """Outputs of two passes in training with Megatron's seeds, and the configured probability."""
    from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed

    from tests.hosts.megatron.layers import Case, initialise_parallel
    from tests.hosts.megatron.test_megatron_routers import _layer

    case = Case(native={"moe_router_topk": 2}, tp=2, etp=2 if dispatch == "index_slice" else 1)
    initialise_parallel(case)
    built = _layer(case, "topk", **{"router.input_dropout": P, "dispatch.name": dispatch}).train()
    torch.manual_seed(11)
    model_parallel_cuda_manual_seed(11)
    x = torch.randn(8, 2, built.config.hidden_size, generator=torch.Generator().manual_seed(1))
    first, second = (built(x)[0].detach() for _ in range(2))
    return first, second, built.moe.config.router.input_dropout


@pytest.mark.distributed
@pytest.mark.megatron
@pytest.mark.skipif(importlib.util.find_spec("megatron") is None, reason="needs megatron-core")
@pytest.mark.parametrize("dispatch", ["ragged", "index_slice"])
def test_tensor_parallel_ranks_of_megatron_draw_one_mask(dispatch: str) -> None:
    """They see the same tokens, and have the same output, which another mask changes. With
    `index_slice` each routes all of them for its own experts.
    """
    from tests.hosts.megatron.ranks import on_ranks

    (one, one_again, p), (other, other_again, _) = on_ranks(2, _tensor_parallel, dispatch)
    assert p == P
    torch.testing.assert_close(one, other, rtol=0, atol=0)
    torch.testing.assert_close(one_again, other_again, rtol=0, atol=0)
    assert not torch.allclose(one, one_again)


@pytest.mark.fairseq
@pytest.mark.skipif(importlib.util.find_spec("fairseq") is None, reason="needs fairseq")
def test_fairseqs_command(tmp_path: Path) -> None:
    """The flag changes training; activations that are computed again do not."""
    from tests.hosts.fairseq import conftest

    data = conftest.make_corpus(tmp_path).lm
    base = (f"{data} {conftest.LANGUAGE_MODEL} {conftest.MOE} {conftest.DROPLESS} --no-save "
            "--max-update 3 --disable-validation")
    flag = f"--moe-router-input-dropout {P}"
    without, kept, again = (conftest.run("fairseq-train", f"{base} {more}").ok().losses
                            for more in ("", flag, f"{flag} --checkpoint-activations"))
    assert len(kept) == 3 and kept == again and kept != without


def _curve(argv: list[str]) -> list[tuple[float, float]]:
    from tests.hosts.megatron.training import ran

    return [(r["lm_loss"], r["grad_norm"]) for r in ran(argv).steps_logged]


@pytest.mark.distributed
@pytest.mark.megatron
@pytest.mark.skipif(importlib.util.find_spec("megatron") is None or importlib.util.find_spec(
    "megatron.training") is None, reason="needs megatron.training")
def test_megatrons_command(tmp_path: Path) -> None:
    """The same, from a file, on two tensor-parallel ranks."""
    from tests.hosts.megatron.ranks import on_ranks
    from tests.hosts.megatron.training import MODEL, RECOMPUTE, TP2

    (tmp_path / "moe.yaml").write_text(f"router: {{input_dropout: {P}}}\n")
    base = [*MODEL, *TP2, "--mock-data", "--train-iters", "3"]
    settings = ["--moe-config", str(tmp_path / "moe.yaml")]
    without, kept, again = (on_ranks(2, _curve, [*base, *more]) for more in (
        [], settings, [*settings, *RECOMPUTE]))
    assert kept[0] == kept[1] and len(kept[0]) == 3
    assert kept == again and kept != without

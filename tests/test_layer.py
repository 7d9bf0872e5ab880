"""What a user of `MoELayer` relies on beyond the exactness matrix."""

from __future__ import annotations

import copy
import io
import pickle

import pytest
import torch
from torch import nn

from moe_plugin import MoELayer, weighted_loss
from moe_plugin.comm import LocalComm, run_simulated
from moe_plugin.comm.placement import HostContext
from moe_plugin.config import MoEConfig, from_dict
from moe_plugin.experts.base import expert_parameters
from moe_plugin.routing.routers.topk import TopKRouter
from tests.seeds import seeded

pytestmark = pytest.mark.fast


def config(**tree) -> MoEConfig:
    return from_dict({"model_dim": 8, "num_experts": 4, "experts": {"hidden_dim": 16}, **tree})


def test_any_leading_shape_and_mask() -> None:
    layer = MoELayer(config())
    x = torch.randn(3, 5, 8)
    mask = torch.rand(3, 5) > 0.4
    out = layer(x, mask)
    assert out.output.shape == x.shape and (out.output[~mask] == 0).all()
    torch.testing.assert_close(out.output[mask], layer(x[mask]).output)


def test_routed_experts_compute_what_the_layer_does_and_add_no_names() -> None:
    """One path for the layer and for models with their own router; checkpoints name the experts
    without it.
    """
    layer = MoELayer(config(dispatch={"capacity_factor": None}))
    x_TD = torch.randn(10, 8)
    routing = layer.router(x_TD, None)
    result = layer.routed_experts(x_TD, routing.ids_TK, routing.weights_TK)
    torch.testing.assert_close(result, layer(x_TD).output, rtol=0, atol=0)
    parameters = {"router.weight_ED", "experts.w_in_LDF", "experts.bias_in_LF",
                  "experts.w_out_LFD", "experts.bias_out_LD"}
    assert dict(layer.named_parameters()).keys() == parameters
    assert {name.partition(".")[0] for name in layer.state_dict()} == {
        "router", "experts", "_extra_state"}
    assert dict(layer.named_children()).keys() == {"router", "experts"}


def test_top_k_of_a_call() -> None:
    layer, other = MoELayer(config()), MoELayer(config(router={"top_k": 3}))
    other.load_state_dict(layer.state_dict())
    x = torch.randn(10, 8)
    torch.testing.assert_close(layer(x, top_k=3).output, other(x).output)


@pytest.mark.parametrize("x,mask,words", [
    (torch.randn(4, 7), None, "model_dim"),
    (torch.randn(8), None, "model_dim"),
    (torch.ones(4, 8, dtype=torch.int64), None, "floating"),
    (torch.randn(4, 8, device="meta"), None, "meta device"),
    (torch.randn(4, 8), torch.ones(4), "token_mask"),
    (torch.randn(4, 8), torch.ones(5, dtype=torch.bool), "token_mask"),
])
def test_wrong_inputs(x: torch.Tensor, mask: torch.Tensor | None, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        MoELayer(config())(x, mask)


@pytest.mark.parametrize("layer_dtype,x_dtype", [(torch.float16, torch.float32),
                                                 (torch.float64, torch.float32),
                                                 (torch.float32, torch.bfloat16)])
def test_input_of_another_dtype(layer_dtype: torch.dtype, x_dtype: torch.dtype) -> None:
    with pytest.raises(ValueError,
                       match=f"has dtype {x_dtype}, but the experts have dtype {layer_dtype}"):
        MoELayer(config(), dtype=layer_dtype)(torch.randn(4, 8, dtype=x_dtype))


@pytest.mark.parametrize("dispatch", [{}, {"name": "padded", "capacity_factor": 1.0}],
                         ids=["ragged", "padded"])
@pytest.mark.parametrize("filling", [float("nan"), float("inf")])
def test_what_padding_holds_reaches_nothing(dispatch: dict, filling: float) -> None:
    layer = MoELayer(
        config(dispatch=dispatch, experts={"hidden_dim": 16, "shared_hidden_dim": 8},
               losses={"switch": 1.0, "z": 1.0}))
    x, mask = torch.randn(6, 8), torch.arange(6) < 4
    x[4:] = filling
    x.requires_grad_()
    out = layer(x, mask)
    (out.output.square().sum() + sum(out.losses.values())).backward()
    assert (out.output[4:] == 0).all() and (
        x.grad[4:] == 0).all() and x.grad.isfinite().all() and out.output.isfinite().all()
    assert all(p.grad.isfinite().all() for p in layer.parameters())


@pytest.mark.parametrize("tree,words", [
    ({"model_dim": 0}, "model_dim=0"),
    ({"router": {"name": "no"}}, "unknown router 'no'"),
    ({"losses": {"no": 1}}, "unknown loss 'no'"),
    ({"dispatch": {"name": "no"}}, "unknown dispatcher 'no'"),
    ({"comm": {"all_to_all": "no"}}, "unknown all_to_all 'no'"),
    ({"experts": {"kind": "no"}}, "unknown experts 'no'"),
    ({"experts": {"compute": "no"}}, "unknown expert_compute 'no'"),
])
def test_wrong_names(tree: dict, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        MoELayer(config(**tree))


@pytest.mark.parametrize("experts,words", [(6, "num_experts=6 does not fit 4"),
                                           (3, "num_experts=3 does not fit 4")])
def test_experts_that_do_not_fit_the_ranks(experts: int, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        run_simulated(4, lambda comm: MoELayer(config(num_experts=experts), comm))


def test_hidden_that_cannot_be_cut() -> None:
    with pytest.raises(ValueError, match="experts.hidden_dim=18 cannot be split into 4"):
        run_simulated(
            4, lambda comm: MoELayer(
                config(num_experts=1, experts={"hidden_dim": 18}, router={"top_k": 1}), comm))


def test_padded_needs_a_capacity() -> None:
    with pytest.raises(ValueError, match="dispatch.capacity_factor"):
        MoELayer(config(dispatch={"name": "padded"}))
    # a capacity for evaluation alone: refused before training begins
    alone = config(dispatch={"name": "padded", "eval_token_fraction": 0.5})
    with pytest.raises(ValueError, match="dispatch.capacity_factor"):
        MoELayer(alone)
    scoring = MoELayer(alone, host=HostContext(training=False))
    assert scoring.eval()(torch.randn(3, 8)).stats.capacity == 2
    with pytest.raises(ValueError, match="dispatch.capacity_factor"):
        scoring.train()(torch.randn(3, 8))


def test_initial_values_do_not_depend_on_the_number_of_ranks() -> None:
    def build(comm) -> dict[str, torch.Tensor]:
        with seeded(5):
            layer = MoELayer(config(num_experts=2), comm)
        return {name: p.detach().clone() for name, p in layer.experts.named_parameters()}

    whole = run_simulated(1, build)[0]
    halves = run_simulated(2, build)
    quarters = run_simulated(4, build)
    for name, value in whole.items():
        assert torch.equal(torch.cat([h[name] for h in halves]), value)
        axis = {"w_in_LDF": 1, "bias_in_LF": 0, "w_out_LFD": 0, "bias_out_LD": 0}[name]
        for expert in range(2):
            assert torch.equal(
                torch.cat([quarters[2 * expert + j][name][0] for j in range(2)], axis),
                value[expert])


def test_experts_are_marked_and_others_are_not() -> None:
    layer = MoELayer(config(experts={"hidden_dim": 16, "shared_hidden_dim": 8}))
    marked = set(expert_parameters(layer))
    assert marked == {name for name, _ in layer.named_parameters() if name.startswith("experts.")
                      } and len(marked) == 4


@pytest.mark.parametrize("remake", [
    copy.deepcopy, lambda layer: pickle.loads(pickle.dumps(layer)), lambda layer: layer.double(),
    lambda layer: layer.to("meta").to_empty(device="cpu"),
], ids=["deepcopy", "pickle", "double", "meta"])
@pytest.mark.parametrize("kind", ["ffn", "custom"])
def test_experts_stay_marked_in_every_copy(remake, kind: str) -> None:
    layer = remake(MoELayer(config(), experts=None if kind == "ffn" else Affine))
    marked = set(expert_parameters(layer))
    assert marked == {name for name, _ in layer.named_parameters() if name.startswith("experts.")
                      } and marked


def test_shared_expert_adds_a_dense_ffn() -> None:
    layer = MoELayer(config(experts={"hidden_dim": 16, "shared_hidden_dim": 12}))
    x, mask = torch.randn(6, 8), torch.arange(6) < 4
    shared = layer.shared_expert
    dense = shared.fc_out(nn.functional.gelu(shared.fc_in(x))) * mask[:, None]
    with_it = layer(x, mask).output
    layer.shared_expert = None
    torch.testing.assert_close(with_it, layer(x, mask).output + dense)


@pytest.mark.parametrize("kind", ["ffn", "gated_ffn"])
def test_initial_weights_of_the_shared_expert_have_the_same_deviation(kind: str) -> None:
    torch.manual_seed(0)
    layer = MoELayer(config(experts={"kind": kind, "hidden_dim": 64, "shared_hidden_dim": 256,
                                     "init_std": 1e-3}))
    for name, parameter in layer.shared_expert.named_parameters():
        if name.endswith("bias"):
            assert not parameter.any()
        else:
            assert float(parameter.detach().std()) == pytest.approx(1e-3, rel=0.1), name


def test_a_gate_scales_the_shared_expert() -> None:
    experts = {"hidden_dim": 16, "shared_hidden_dim": 12, "shared_gate": True}
    layer = MoELayer(config(experts=experts))
    x, mask = torch.randn(6, 8, requires_grad=True), torch.arange(6) < 4
    shared = layer.shared_expert
    dense = shared.fc_out(nn.functional.gelu(shared.fc_in(x))) * torch.sigmoid(
        x @ shared.gate.weight.T) * mask[:, None]
    with_it = layer(x, mask).output
    layer.shared_expert = None
    torch.testing.assert_close(with_it, layer(x, mask).output + dense)
    with_it.sum().backward()
    assert float(shared.gate.weight.grad.abs().sum()) > 0
    with pytest.raises(ValueError, match="experts.shared_gate=True is out of bounds"):
        config(experts={"shared_gate": True})


class Affine(nn.Module):
    def __init__(self, index: int) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.full((8,), float(index + 1)))

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return rows * self.scale


def test_custom_experts_over_ranks() -> None:
    x = torch.randn(2, 7, 8)

    def rank(comm):
        layer = MoELayer(config(), comm, experts=Affine)
        nn.init.ones_(layer.router.weight_ED)
        with torch.no_grad():
            layer.router.weight_ED[1] += x[0, 0]  # some token prefers expert 1
        out = layer(x[comm.rank])
        out.output.sum().backward()
        assert all(p.grad is not None and p.expert for p in layer.experts.parameters())
        return out.output.detach(), layer.router(x[comm.rank], None, None)

    for i, (output, routing) in enumerate(run_simulated(2, rank)):
        factor = (routing.weights_TK * (routing.ids_TK + 1)).sum(1, keepdim=True).detach()
        torch.testing.assert_close(output, x[i] * factor)
    with pytest.raises(ValueError, match="custom experts cannot be split"):
        run_simulated(8, lambda comm: MoELayer(config(), comm, experts=Affine))


@pytest.mark.parametrize("compute", ["loop", "batched", "grouped", "auto"])
def test_autocast(compute: str) -> None:
    layer = MoELayer(config(experts={"hidden_dim": 16, "compute": compute, "shared_hidden_dim": 8}))
    x = torch.randn(32, 8, requires_grad=True)
    plain = layer(x)
    with torch.autocast("cpu", torch.bfloat16):
        out = layer(x)
    assert out.output.dtype == torch.float32
    torch.testing.assert_close(out.output, plain.output, rtol=5e-2, atol=5e-2)
    out.output.sum().backward()
    assert all(p.grad is not None and p.grad.dtype == torch.float32 and p.grad.isfinite().all()
               for p in layer.parameters())


def test_losses_are_returned_and_weighed_once() -> None:
    layer = MoELayer(config(losses={"gshard": 0.5, "z": 2.0, "switch": 0.0}))
    out = layer(torch.randn(9, 8))
    assert set(out.losses) == {"gshard", "z"}
    want = 0.5 * out.losses["gshard"] + 2 * out.losses["z"]
    torch.testing.assert_close(weighted_loss(out.losses, layer.config.losses), want)


def test_statistics() -> None:
    layer = MoELayer(config(dispatch={"capacity_factor": 0.5}))
    out = layer(torch.randn(16, 8), torch.arange(16) < 12)
    stats = out.stats.as_dict()
    assert stats["tokens"] == 12 and sum(stats["load"]) == 24 and stats["capacity"] == 2
    assert stats["dropped"] == 24 - stats["rows"] > 0 and stats["max_over_mean"] == max(
        stats["load"]) / 6
    assert 0 < stats["entropy"] < 1.39 and stats["bytes_sent"] == 0


def test_bytes_are_what_was_sent() -> None:
    def rank(comm):
        layer = MoELayer(
            config(dispatch={"name": "padded", "capacity_factor": 1.0, "equal_tokens": True}), comm)
        return layer(torch.randn(6, 8)).stats

    for stats in run_simulated(2, rank):
        # 4 experts, 2 * ceil(6/4) = 4 slots each; half of the 16 slots cross, out and back, 8
        # floats of 4 bytes
        assert stats.bytes_sent == 2 * 8 * 8 * 4 and stats.rows == 16 and stats.capacity == 4


def test_state_of_other_experts_is_refused() -> None:
    state = MoELayer(config()).state_dict()
    MoELayer(config()).load_state_dict(state)
    with pytest.raises(ValueError, match="num_experts=4, but this layer has num_experts=8"):
        MoELayer(config(num_experts=8)).load_state_dict(state)
    with pytest.raises(
            ValueError,
            match="ep_(size=1, but this layer has ep_size=2|rank=0, but this layer has ep_rank=1)"):
        run_simulated(2, lambda comm: MoELayer(config(), comm).load_state_dict(state))


def test_one_rank_without_input_gradient_does_not_hang() -> None:
    def rank(comm):
        layer = MoELayer(config(), comm)
        layer(torch.randn(3, 8, requires_grad=comm.rank == 0)).output.sum().backward()
        return layer.experts.w_in_LDF.grad is not None

    assert run_simulated(2, rank) == [True, True]


def test_a_launched_process_without_a_group_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ValueError, match="WORLD_SIZE=2 .*init_process_group"):
        MoELayer(config())
    assert MoELayer(config(), LocalComm()).comm.size == 1


@pytest.mark.parametrize("settings", [
    {}, {"router": {"name": "topk,base"}}, {"parallel": {"mode": "auto"}},
    {"comm": {"all_to_all": "auto"}}, {"experts": {"compute_selection": "rule"}},
    {"dispatch": {"capacity_factor": 1.0, "name": "padded"}}], ids=str)
def test_a_used_layer_is_pickled_copied_and_saved(settings: dict) -> None:
    layer, x, file = MoELayer(
        from_dict({"model_dim": 8, "num_experts": 4} | settings)), torch.randn(5, 8), io.BytesIO()
    layer(x).output.sum().backward()
    torch.save(layer.eval(), file)
    file.seek(0)
    for other in (pickle.loads(pickle.dumps(layer)), copy.deepcopy(layer),
                  torch.load(file, weights_only=False)):
        assert torch.equal(other(x).output, layer(x).output)
        other.train()(x).output.sum().backward()


def test_a_router_of_two_choices_refuses_one_expert() -> None:
    for top_k, words in ((1, "router.top_k=1 .* must be 2 where router.name='gshard'"),
                         (2, "router.top_k=2 .* must be <= num_experts=1")):
        with pytest.raises(ValueError, match=words):
            from_dict({"model_dim": 8, "num_experts": 1,
                       "router": {"name": "gshard", "top_k": top_k}})

    class Two(TopKRouter):
        fixed_k = 2

    with pytest.raises(ValueError, match="num_experts=1 is out of bounds: must be >= 2 with Two"):
        Two(from_dict({"model_dim": 8, "num_experts": 1, "router": {"top_k": 1}}))


class Returns(torch.nn.Module):
    """An expert that returns what a function makes of its rows."""

    def __init__(self, make) -> None:
        super().__init__()
        self.make = make

    def forward(self, rows: torch.Tensor) -> object:
        return self.make(rows)


@pytest.mark.parametrize("make,found", [
    (lambda rows: torch.cat([rows, rows[:1]]), r"a tensor of shape \({more}, 8\)"),
    (lambda rows: rows[:0], r"a tensor of shape \(0, 8\)"),
    (lambda rows: rows[:, :6], r"a tensor of shape \({n}, 6\)"),
    (lambda rows: (rows, None), "a tuple"),
])
def test_an_expert_that_returns_another_shape_is_named(make, found: str) -> None:
    """Rows of another number would move those of the later experts to other tokens."""
    layer = MoELayer(config(dispatch={"name": "ragged", "capacity_factor": None}),
                     experts=lambda index: Returns(make if index == 1 else torch.neg))
    x = torch.randn(40, 8)
    n = int((layer.router(x).ids_TK == 1).sum())
    assert n > 0
    message = (rf"expert 1 \(Returns\) returned {found.format(n=n, more=n + 1)} for rows of shape "
               rf"\({n}, 8\), but the shapes must be equal")
    with pytest.raises(ValueError, match=message):
        layer(x)

"""What is particular to single routers: noise, temperature, bias, tables, groups; several routers
in one layer.
"""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn.utils import parametrize

from moe_plugin import MoELayer
from moe_plugin.comm import LocalComm, run_simulated
from moe_plugin.comm.placement import HostContext
from moe_plugin.config import from_dict
from moe_plugin.records import TokenInfo
from moe_plugin.routing import (
    Router,
    ScoreFunction,
    build_router,
    finish_step,
    routers,
    score_functions,
)
from moe_plugin.routing.call import RoutingCall
from moe_plugin.routing.routers.balanced import log_plan
from moe_plugin.routing.routers.hashing import balanced_table
from moe_plugin.routing.routers.topk import SHORT, _directions

pytestmark = pytest.mark.fast


def make(name: str, experts: int = 8, k: int = 2, comm=None, losses: dict | None = None,
         dim: int = 6, **router):
    config = from_dict({
        "model_dim": dim, "num_experts": experts, "losses": losses or {},
        "router": {"name": name, "top_k": k, **router}
    })
    return build_router(config, comm, dtype=torch.float64)


@pytest.mark.parametrize("name,k", [("switch", 1), ("gshard", 2), ("base", 1), ("hash", 1)])
def test_a_fixed_number_of_experts(name: str, k: int) -> None:
    more = {"hash": {"vocabulary": 9}} if name == "hash" else {}
    with pytest.raises(ValueError, match=f"router.top_k=4 .* must be {k} where .*{name}"):
        make(name, k=4, **more)
    router = make(name, **more)
    assert make(name, k=k, **more).fixed_k == router.config.experts_per_token == k
    info = TokenInfo(torch.arange(5))
    assert router(torch.randn(5, 6), None, None, info).ids_TK.shape == (5, k)
    with pytest.raises(ValueError, match=f"top_k=3 cannot .* always chooses {k}"):
        router(torch.randn(5, 6), None, 3, info)


@given(st.sampled_from([2, 4]), st.integers(1, 2), st.integers(0, 10**6))
@settings(max_examples=30, deadline=None)
def test_all_experts_of_a_token_lie_in_its_groups(groups: int, k: int, seed: int) -> None:
    torch.manual_seed(seed)
    x = torch.randn(20, 6, dtype=torch.float64)
    sam = make("sam", groups=groups, k=k, losses={"sam_alignment": 1.0})
    got = sam(x)
    group_TK = got.ids_TK // (8 // groups)
    assert (group_TK == group_TK[:, :1]).all()
    p = (x @ sam.weight_ED.T).softmax(1)
    best = p.view(20, groups, -1).sum(2).argmax(1)
    assert torch.equal(group_TK[:, 0], best)
    outside = p.masked_fill(torch.arange(8) // (8 // groups) == best[:, None], -1.0)
    excess = (outside - p.gather(1, got.ids_TK[:, -1:])).clamp(min=0)
    torch.testing.assert_close(got.losses["sam_alignment"], excess.sum(1).mean())
    assert (got.losses["sam_alignment"] == 0) == bool((excess == 0).all())
    limited = make("group_limited", groups=4, group_top_k=2, k=3)(x).ids_TK // 2
    assert all(len(set(row)) <= 2 for row in limited.tolist())


@pytest.mark.parametrize("name", ["group_limited", "sigmoid_bias"])
@pytest.mark.parametrize("counted", [1, 2, 3])
def test_a_groups_score_is_the_sum_of_its_best(name: str, counted: int) -> None:
    router = make(name, experts=12, k=6, groups=4, group_top_k=2, group_scores=counted)
    x = torch.randn(50, 6, dtype=torch.float64)
    logits = x @ router.weight_ED.T
    scores = logits.softmax(1) if name == "group_limited" else logits.sigmoid()
    group = scores.view(50, 4, 3).sort(2, descending=True).values[:, :, :counted].sum(2)
    want = [sorted(row) for row in group.topk(2).indices.tolist()]
    got = [sorted(set(row)) for row in (router(x).ids_TK // 3).tolist()]
    assert got == want


def test_groups_are_checked() -> None:
    with pytest.raises(ValueError, match="router.group_scores=4 exceeds the 2 experts"):
        make("group_limited", groups=4, group_scores=4)
    with pytest.raises(ValueError, match="router.groups=0 cannot be used by router sam"):
        make("sam")
    with pytest.raises(ValueError, match="router.groups=3 cannot be used"):
        make("group_limited", groups=3)
    with pytest.raises(ValueError, match="router.top_k=5 is too large for router sam, .* 4"):
        make("sam", groups=2)(torch.randn(3, 6), None, 5)
    with pytest.raises(
            ValueError,
            match="router.top_k=3 is not a divisor of num_experts=8, as .*ktop1 requires. Use 2"):
        make("ktop1", k=3)
    with pytest.raises(ValueError, match="router.top_k=6 is not a divisor of num_experts=8.*Use 4"):
        make("ktop1", k=2)(torch.randn(3, 6), top_k=6)


def test_prototype_losses_are_the_mean_over_prototypes() -> None:
    names = {"gshard": 1.0, "switch": 1.0, "z": 1.0}
    router = make("ktop1", losses=names)
    x = torch.randn(30, 6, dtype=torch.float64)
    got = router(x).losses
    want = dict.fromkeys(names, 0.0)
    for part in router.weight_ED.split(4):
        alone = make("switch", experts=4, losses=names)
        with torch.no_grad():
            alone.weight_ED.copy_(part)
        for name, value in alone(x).losses.items():
            want[name] = want[name] + value.detach() / 2
    for name in names:
        torch.testing.assert_close(got[name].detach(), want[name])


def test_noisy_topk_is_shazeers_formula() -> None:
    router = make("noisy_topk", experts=5, losses={"importance": 1.0, "noisy_load": 1.0})
    with torch.no_grad():
        router.noise_ED.copy_(torch.randn(5, 6))
    x, mask = torch.randn(12, 6, dtype=torch.float64), torch.arange(12) < 9
    torch.manual_seed(3)
    got = router(x, mask)
    torch.manual_seed(3)
    clean, deviation = x * mask[:, None] @ router.weight_ED.T, torch.log1p(
        (x * mask[:, None] @ router.noise_ED.T).exp())
    h = clean + torch.randn(12, 5, dtype=torch.float64) * deviation
    load, importance = torch.zeros(5, dtype=torch.float64), torch.zeros(5, dtype=torch.float64)
    phi = torch.distributions.Normal(0.0, 1.0).cdf
    for t in range(9):
        top = h[t].topk(2)
        assert got.ids_TK[t].tolist() == top.indices.tolist()
        torch.testing.assert_close(got.weights_TK[t], top.values.softmax(0))
        for e in range(5):
            others = torch.cat([h[t, :e], h[t, e + 1 :]]).topk(2).values[-1]
            load[e] += phi((clean[t, e] - others) / deviation[t, e]).detach()
        for j in range(2):
            importance[top.indices[j]] += top.values.softmax(0)[j].detach()
    torch.testing.assert_close(got.losses["noisy_load"].detach(), load.var() / load.mean() ** 2)
    torch.testing.assert_close(got.losses["importance"].detach(),
                               importance.var() / importance.mean()**2)
    got.losses["noisy_load"].backward()
    assert router.noise_ED.grad.abs().sum() > 0
    assert set(router.eval()(x).losses) == {"importance"}
    with pytest.raises(ValueError, match="losses.noisy_load cannot be used with "):
        make("topk", losses={"noisy_load": 1.0})


def test_cosine_ignores_length() -> None:
    router = make("cosine", cosine_dim=16).eval()
    x = torch.randn(20, 6, dtype=torch.float64)
    a, b = router(x), router(1000 * x)
    assert torch.equal(a.ids_TK, b.ids_TK)
    torch.testing.assert_close(a.weights_TK, b.weights_TK)
    with torch.no_grad():
        router.temperature.fill_(50.0)  # clamped: at most 100
        assert router.scores(x, RoutingCall()).abs().max() <= 100 + 1e-9


def test_dense_to_sparse_ends_as_top_one_of_the_noisy_logits() -> None:
    rules = {"start": 5.0, "end": 1e-3, "steps": 4, "threshold": 0.05}
    router = make("dense_to_sparse", sparsity=rules)
    x = torch.randn(200, 6, dtype=torch.float64)
    active, temperatures = [], []
    for _ in range(6):
        torch.manual_seed(0)
        got = router(x)
        active.append(int((got.ids_TK >= 0).sum()))
        temperatures.append(float(router.temperature()))
        finish_step(router)
    assert temperatures == pytest.approx([5.0 * (1e-3 / 5.0) ** min(1, i / 4) for i in range(6)])
    assert active == sorted(active, reverse=True) and active[0] > 1500 and active[-1] < 204
    torch.manual_seed(0)
    noisy = x @ router.weight_ED.T - torch.empty(200, 8, dtype=torch.float64).exponential_().log()
    assert torch.equal(got.ids_TK[:, 0], noisy.argmax(1)) and got.weights_TK[:, 0].min() > 0.5
    again = make("dense_to_sparse", sparsity=rules)
    again.load_state_dict(router.state_dict())
    assert again.temperature() == router.temperature()
    assert torch.equal(router.eval()(x).ids_TK, router(x).ids_TK)


@given(st.integers(2, 8), st.floats(1e-3, 0.5), st.integers(0, 10**6))
@settings(max_examples=40, deadline=None)
def test_dense_to_sparse_in_the_cold_limit_is_top_one_of_the_noisy_logits(
        experts: int, threshold: float, seed: int) -> None:
    torch.manual_seed(seed)
    x, router = torch.randn(30, 6, dtype=torch.float64), make(
        "dense_to_sparse", experts=experts, sparsity={"start": 1e-7, "threshold": threshold})
    torch.manual_seed(seed)
    got = router(x)
    torch.manual_seed(seed)
    noisy = x @ router.weight_ED.T - torch.empty(30, experts,
                                                 dtype=torch.float64).exponential_().log()
    assert torch.equal(got.ids_TK[:, 0], noisy.argmax(1)) and (got.ids_TK[:, 1:] == -1).all()
    torch.testing.assert_close(got.weights_TK[:, 0], torch.ones(30, dtype=torch.float64))


def test_expert_choice_is_balanced_and_keeps_the_best() -> None:
    router = make("expert_choice", experts=4, k=2)
    x, mask = torch.randn(30, 6, dtype=torch.float64), torch.arange(30) < 21
    got = router(x, mask)
    load = torch.bincount(got.ids_TK[got.ids_TK >= 0], minlength=4)
    assert load.tolist() == [math.ceil(21 * 2 / 4)] * 4 and (got.ids_TK[21:] == -1).all()


def test_sinkhorn_balances() -> None:
    torch.manual_seed(1)
    router = make("sinkhorn", experts=4, k=1, sinkhorn_rounds=50)
    x = torch.randn(400, 6, dtype=torch.float64) + torch.randn(6)
    balanced = torch.bincount(router(x).ids_TK[:, 0], minlength=4)
    greedy = torch.bincount(router.eval()(x).ids_TK[:, 0], minlength=4)
    assert balanced.max() < 125 and greedy.max() > balanced.max() + 20


def test_bias_moves_against_the_load_of_all_ranks_and_micro_batches() -> None:
    torch.manual_seed(2)
    xs = torch.randn(2, 3, 40, 6, dtype=torch.float64) + torch.randn(6)
    weight = torch.randn(4, 6, dtype=torch.float64)

    def rank(comm):
        router = make("sigmoid_bias", experts=4, k=1, comm=comm, bias_rate=0.01)
        with torch.no_grad():
            router.weight_ED.copy_(weight)
        chosen = [router(x).ids_TK for x in xs[comm.rank]]
        router.eval()
        router(xs[0, 0])  # evaluation does not count
        router.train()
        finish_step(router)
        first = router.bias_E.clone()
        finish_step(router)  # nothing came: nothing moves
        assert torch.equal(first, router.bias_E) and router.load_E.sum() == 0
        return torch.bincount(torch.cat(chosen).flatten(), minlength=4), first

    results = run_simulated(2, rank)
    load = sum(r[0] for r in results).double()
    for _, bias in results:
        torch.testing.assert_close(bias, (0.01 * torch.sign(load.mean() - load)).float())


def test_bias_balances_without_a_loss_and_stays_float32() -> None:
    torch.manual_seed(0)
    router = make("sigmoid_bias", experts=4, k=1, bias_rate=0.02).to(torch.bfloat16)
    assert router.bias_E.dtype == torch.float32
    x = torch.randn(800, 6) + torch.randn(6)
    shares = []
    for _ in range(80):
        load = torch.bincount(router(x).ids_TK[:, 0], minlength=4)
        shares.append(float(load.max()) / 200)
        finish_step(router)
    assert shares[0] > 1.25 and shares[-1] < 1.12
    weights = router.eval()(x).weights_TK
    torch.testing.assert_close(
        weights.max(),
        torch.sigmoid(x @ router.weight_ED.float().T).gather(1,
                                                             router(x).ids_TK).max())
    assert "bias_E" in router.state_dict() and router.double().bias_E.dtype == torch.float32


@given(st.integers(1, 50), st.integers(1, 7), st.integers(0, 10**6))
@settings(max_examples=40, deadline=None)
def test_balanced_tables(vocabulary: int, experts: int, seed: int) -> None:
    g = torch.Generator().manual_seed(seed)
    equal = torch.bincount(balanced_table(torch.ones(vocabulary, dtype=torch.int64), experts, g),
                           minlength=experts)
    assert equal.max() - equal.min() <= 1
    counts = torch.randint(0, 100, (vocabulary,), generator=g)
    load = torch.zeros(experts, dtype=torch.int64).index_add_(0, balanced_table(counts, experts, g),
                                                              counts)
    assert load.max() - load.min() <= counts.max()


def test_hash_tables_from_settings(tmp_path) -> None:
    path = tmp_path / "table.txt"
    path.write_text("3 0\n1 2 7")
    x, info = torch.randn(5, 6), TokenInfo(torch.arange(5))
    assert make("hash", hash={"kind": "file",
                              "path": str(path)})(x, None, None,
                                                  info).ids_TK[:, 0].tolist() == [3, 0, 1, 2, 7]
    with pytest.raises(ValueError, match=r"contains experts 0..7, but experts must be in 0..3"):
        make("hash", experts=4, hash={"kind": "file", "path": str(path)})
    with pytest.raises(ValueError, match=r"contains experts 0..7, but experts must be in 0..6"):
        make("hash", experts=7, hash={"kind": "file", "path": str(path)})
    with pytest.raises(ValueError, match="router.hash.vocabulary=0 is not valid"):
        make("hash")
    with pytest.raises(ValueError, match="vocabulary=6 is not valid.*5 entries"):
        make("hash", hash={"kind": "file", "path": str(path), "vocabulary": 6})
    with pytest.raises(ValueError, match="cannot be read"):
        make("hash", hash={"kind": "file", "path": str(tmp_path / "none")})
    one, two = (make("hash", hash={"kind": "random", "vocabulary": 40, "seed": 5}).table_V
                for _ in range(2))
    assert torch.equal(one, two) and not torch.equal(
        one,
        make("hash", hash={"kind": "random", "vocabulary": 40, "seed": 6}).table_V)
    router = make("hash", hash={"vocabulary": 4})
    with pytest.raises(ValueError, match=r"token ids are in 0..4, but must be in 0..3"):
        router(x, None, None, info)
    with pytest.raises(ValueError, match="HashRouter needs the vocabulary index"):
        router(x)
    with pytest.raises(ValueError, match="must have shape .5,., one value per token"):
        router(x, None, None, TokenInfo(torch.arange(4)))
    with pytest.raises(ValueError, match="token_ids_T has dtype torch.float32"):
        router(x, None, None, TokenInfo(torch.arange(5.0)))
    # padding may carry any id
    assert router(x, torch.arange(5) < 4, None, info).ids_TK[:, 0].tolist()[4] == -1


def test_padding_does_not_change_the_plan_of_the_real_tokens() -> None:
    logits_TE, real_T = torch.randn(9, 4, dtype=torch.float64), torch.arange(9) % 3 > 0
    torch.testing.assert_close(log_plan(logits_TE, real_T, 5)[real_T],
                               log_plan(logits_TE[real_T], real_T[real_T], 5))


@pytest.mark.parametrize("name", ["sigmoid_bias", "quantile"])
def test_routers_that_count_remember_an_adapter(name: str) -> None:
    router = make(name)
    parametrize.register_parametrization(router, "weight_ED", nn.Identity())
    router(torch.randn(5, 6))
    assert router.adapted


@pytest.mark.parametrize("name", routers.names())
def test_counts_of_a_step_cannot_overflow(name: str) -> None:
    needed = {"hash": {"hash": {"vocabulary": 5}}, "group_limited": {"groups": 4},
              "sam": {"groups": 4}}
    counts = [value for key, value in make(name, **needed.get(name, {})).named_buffers()
              if "load" in key]
    assert counts and all(count.dtype in (torch.int64, torch.float64) for count in counts)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int16, torch.int32])
def test_token_ids_of_any_integer_dtype(dtype: torch.dtype) -> None:
    router, ids_T = make("hash", hash={"vocabulary": 5}), torch.tensor([4, 0, 1, 1, 3])
    found = router(torch.randn(5, 6), None, None, TokenInfo(ids_T.to(dtype))).ids_TK
    assert torch.equal(found[:, 0], router.table_V[ids_T])


def test_negative_frequencies_are_refused(tmp_path) -> None:
    path = tmp_path / "counts.txt"
    path.write_text("3 0 -7 2")
    with pytest.raises(ValueError, match="router.hash.path=.* the frequency -7, but "
                                         "frequencies must be >= 0"):
        make("hash", hash={"kind": "balanced", "path": str(path)})


def test_token_ids_reach_the_router_through_the_layer() -> None:
    config = from_dict({
        "model_dim": 6, "num_experts": 4, "losses": {"sequence": 1.0},
        "router": {"name": "hash", "hash": {"vocabulary": 12}}
    })
    layer = MoELayer(config)
    assert layer.router.needs == {"token_ids", "sequences"}
    ids = torch.arange(12).view(3, 4)
    info = TokenInfo(ids, torch.arange(3)[:, None].expand(3, 4), 3)
    out = layer(torch.randn(3, 4, 6), info=info)
    assert torch.equal(out.stats.load_KE[0], torch.bincount(layer.router.table_V, minlength=4))
    with pytest.raises(ValueError, match="losses.sequence needs the sequence number"):
        layer(torch.randn(3, 4, 6), info=TokenInfo(ids))


@pytest.mark.parametrize("sequence_T,sequences,message", [
    (torch.zeros(4, dtype=torch.int64), 0, "at least 1, but sequences=0. Pass"),
    (torch.zeros(3, dtype=torch.int64), 1, r"sequence_T has shape \(3,\), but must have"),
    (torch.zeros(4), 1, r"sequence_T has dtype torch.float32, but must contain integers. Pass"),
    (torch.tensor([0, 1, -1, 0]), 2, r"sequence_T has values -1\.\.1.*must be in 0..sequences-1=1"),
    (torch.tensor([0, 1, 2, 0]), 2, r"sequence_T has values 0\.\.2, .*pass the number"),
])
def test_sequences_that_do_not_fit_are_refused(sequence_T: torch.Tensor, sequences: int,
                                               message: str) -> None:
    tree = {"model_dim": 6, "num_experts": 4}
    x, info = torch.randn(4, 6), TokenInfo(None, sequence_T, sequences)
    with pytest.raises(ValueError, match=message):
        MoELayer(from_dict({**tree, "losses": {"sequence": 1.0}}))(x, info=info)
    MoELayer(from_dict(tree))(x, info=info)  # which does not read them


def test_sequences_of_any_integer_dtype() -> None:
    layer = MoELayer(from_dict({"model_dim": 6, "num_experts": 4, "losses": {"sequence": 1.0}}))
    x, of_T = torch.randn(4, 6), torch.tensor([0, 0, 1, 1])
    values = [layer(x, info=TokenInfo(None, of_T.to(dtype), 2)).losses["sequence"]
              for dtype in (torch.int64, torch.int32, torch.uint8)]
    assert values[0] > 0 and len(set(map(float, values))) == 1


def test_directions_of_a_cosine_router() -> None:
    """They start with a standard deviation of 0.01; vectors up to `SHORT` have no direction."""
    assert 0.007 < float(make("cosine", cosine_dim=64).direction_EP.std()) < 0.013
    y_TP = torch.tensor([[SHORT, 0.0], [0.0, 2 * SHORT]], dtype=torch.float64)
    assert _directions(y_TP).tolist() == [[0.0, 0.0], [0.0, 1.0]]


@pytest.mark.parametrize("name", [
    "topk", "sigmoid_bias", "noisy_topk", "expert_choice", "sinkhorn", "cosine"])
def test_the_entropy_has_no_gradient(name: str) -> None:
    routing = make(name)(torch.randn(5, 6, dtype=torch.float64), None, None, None)
    assert routing.weights_TK.requires_grad and not routing.entropy.requires_grad


def test_a_token_of_zeros_leaves_the_gradients_of_a_cosine_router_as_they_are() -> None:
    router = make("cosine")
    x = torch.randn(5, router.model_dim)
    grads = []
    for tokens in (x, torch.cat([x, torch.zeros(2, router.model_dim)])):
        router.zero_grad()
        router(tokens).weights_TK[:, 0].sum().backward()
        grads.append(router.project_P.grad)
    assert grads[0].any()
    torch.testing.assert_close(grads[1], grads[0])


def test_one_of_several_routers_decides_a_call() -> None:
    config = from_dict({
        "model_dim": 6, "num_experts": 4, "losses": {"gshard": 1.0},
        "router": {"name": "switch, sigmoid_bias,expert_choice"}
    })
    host = HostContext(batch_comm=LocalComm())
    layer = MoELayer(config, host=host)
    assert all(router.host is host and router.batch_comm is host.batch_comm
               for router in layer.router.routers)
    x = torch.randn(8, 6)
    shapes = [layer(x, info=TokenInfo(router_index=i)).stats.load_KE.shape[0] for i in range(3)]
    assert shapes == [1, 2, 4] and layer(x).stats.load_KE.shape[0] == 1
    with pytest.raises(ValueError, match=r"router_index=3, but must be in 0..2"):
        layer(x, info=TokenInfo(router_index=3))
    finish_step(layer)
    assert layer.router.routers[1].load_E.sum() == 0


def test_a_custom_router(own_entries: None) -> None:
    @routers.register("test_first_two")
    class FirstTwo(Router):
        """Always experts 0 and 1."""

        fixed_k = 2

        def build(self, dtype, device) -> None:
            """None."""

        def scores(self, x_TD, call):
            return torch.zeros(len(x_TD), self.num_experts)

        def select(self, call):
            return torch.tensor([[0, 1]]).expand(len(call.logits_TE), 2)

    out = MoELayer(6, num_experts=4, router={"name": "test_first_two"})(torch.randn(7, 6))
    assert out.stats.as_dict()["load"] == [7, 7, 0, 0]


def test_a_score_function_of_ones_own(own_entries: None) -> None:
    """A formula alone is computed step by step; with its slope it is one pass, to the same values
    and gradients. An unknown name lists the known ones.
    """
    @score_functions.register("test_root")
    class Root(ScoreFunction):
        """The root of softplus(logit)."""

        def scores(self, logits_TE):
            return torch.nn.functional.softplus(logits_TE).sqrt()

    @score_functions.register("test_root_in_one_pass")
    class RootInOnePass(Root):
        """With its slope."""

        kernels = frozenset({"torch"})

        def slope_(self, pull, scores):
            return pull.mul_((1 - (-scores.square()).exp()) / (2 * scores.square()))

    found = []
    for name in ("test_root", "test_root_in_one_pass"):
        torch.manual_seed(2)
        layer = MoELayer(6, num_experts=4, router={"score": name}, dtype=torch.float64,
                         losses={"gshard": 1.0, "z": 1.0, "sequence": 1.0})
        assert layer.router.one_pass() == (name != "test_root")
        x_TD = torch.randn(9, 6, dtype=torch.float64, requires_grad=True)
        out = layer(x_TD, info=TokenInfo(sequence_T=torch.arange(9) // 3, sequences=3))
        total = out.output.square().sum() + sum(out.losses.values())
        found.append([out.output, *out.losses.values(),
                      *torch.autograd.grad(total, [x_TD, layer.router.weight_ED])])
    for mine, theirs in zip(*found, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-9, atol=1e-11)
    with pytest.raises(ValueError, match="unknown score function 'tanh'; .*sigmoid, softmax"):
        MoELayer(6, num_experts=4, router={"score": "tanh"})

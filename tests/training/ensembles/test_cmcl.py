"""Confident oracle loss: assignment, identities, limits; a toy where overconfidence shows."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from moe_plugin.training.cmcl import (
    EnsembleHeads,
    confidence_counts,
    confidence_histograms,
    confident_oracle_loss,
    ensemble_errors,
    responsible,
    sequence_errors,
    share_features,
    uniform_divergence,
)


def brute_force(logits: torch.Tensor, y: int, k: int, beta: float) -> tuple[float, set[int]]:
    """The least loss of one sample over all subsets of k members, term by term."""
    p = logits.softmax(-1)
    classes = logits.shape[-1]
    best = (math.inf, set())
    for subset in itertools.combinations(range(len(logits)), k):
        loss = 0.0
        for m in range(len(logits)):
            if m in subset:
                loss -= math.log(p[m, y])
            else:
                loss += beta * sum(
                    math.log(1 / classes / p[m, c]) / classes for c in range(classes))
        if loss < best[0] - 1e-12:
            best = (loss, set(subset))
    return best


@given(st.integers(1, 5), st.integers(2, 6), st.sampled_from([0.0, 0.75, 3.0]),
       st.integers(0, 10**6), st.data())
@settings(max_examples=60, deadline=None)
def test_assignment_is_the_best_of_all_subsets(members: int, classes: int, beta: float, seed: int,
                                               data) -> None:
    k = data.draw(st.integers(1, members))
    g = torch.Generator().manual_seed(seed)
    logits = 2 * torch.randn(4, members, classes, generator=g, dtype=torch.float64)
    y = torch.randint(classes, (4,), generator=g)
    got = confident_oracle_loss(logits, y, k, beta)
    for n in range(4):
        loss, subset = brute_force(logits[n], int(y[n]), k, beta)
        assert float(got.loss_N[n]) == pytest.approx(loss, abs=1e-9)
        assert set(got.chosen_NM[n].nonzero().flatten().tolist()) == subset


def test_gradient_identity_of_stochastic_labels() -> None:
    """The mean over labels of the gradient of cross entropy is that of KL(U || P): p - 1/C."""
    logits = torch.randn(7, 3, 5, dtype=torch.float64, requires_grad=True)
    exact, = torch.autograd.grad(uniform_divergence(logits).sum(), logits)
    mean = sum(
        torch.autograd.grad(
            F.cross_entropy(logits.reshape(-1, 5), torch.full(
                (21,), c), reduction="sum"), logits)[0] for c in range(5)) / 5
    assert (exact - mean).abs().max() < 1e-12
    assert (exact - (logits.softmax(-1) - 1 / 5)).abs().max() < 1e-12
    assert (uniform_divergence(logits) >= 0).all() and uniform_divergence(torch.zeros(
        1, 1, 4)).item() == pytest.approx(0, abs=1e-6)


def test_stochastic_labels_are_drawn_for_each_member_and_sample() -> None:
    logits = torch.randn(1, 3, 4, dtype=torch.float64).repeat(20000, 1, 1).requires_grad_()
    y = torch.zeros(20000, dtype=torch.int64)
    exact, noisy = (confident_oracle_loss(logits, y, 1, 0.5, labels=labels)
                    for labels in ("exact", "stochastic"))
    assert torch.equal(exact.chosen_NM, noisy.chosen_NM)
    a, b = (torch.autograd.grad(loss.loss_N.mean() * 20000, logits)[0].mean(0)
            for loss in (exact, noisy))
    torch.testing.assert_close(a, b, atol=0.02, rtol=0)
    one, two = (torch.autograd.grad(
        confident_oracle_loss(logits, y, 1, 0.5, labels="stochastic").loss_N.sum(), logits)[0]
                for _ in range(2))
    others = ~exact.chosen_NM[0]
    labels = (one[:, others] < 0).long().argmax(-1)  # the drawn class alone has a negative gradient
    assert not torch.equal(labels[:, 0], labels[:, 1]) and not torch.equal(one, two)


def test_limits() -> None:
    logits, y = torch.randn(9, 4, 6, dtype=torch.float64), torch.randint(6, (9,))
    ce = torch.stack([F.cross_entropy(logits[:, m], y, reduction="none") for m in range(4)], 1)
    torch.testing.assert_close(confident_oracle_loss(logits, y, 1, 0.0).loss_N, ce.amin(1))
    torch.testing.assert_close(confident_oracle_loss(logits, y, 4, 0.75).loss_N, ce.sum(1))


def test_groups_share_their_members_and_masked_samples_have_no_say() -> None:
    logits, y = torch.randn(10, 3, 5, dtype=torch.float64), torch.randint(5, (10,))
    group, mask = torch.tensor([0] * 4 + [1] * 6), torch.arange(10) != 3
    y[3] = -100
    got = confident_oracle_loss(logits, y, 1, 0.75, group_N=group, groups=2, mask_N=mask)
    assert got.loss_N[3] == 0 and not got.chosen_NM[3].any()
    ce, kl = torch.zeros(2, 3, dtype=torch.float64), torch.zeros(2, 3, dtype=torch.float64)
    for n in range(10):
        if n != 3:
            for m in range(3):
                ce[group[n], m] += F.cross_entropy(logits[n, m], y[n])
                kl[group[n], m] += uniform_divergence(logits[n, m][None, None])[0, 0]
    want = (ce - 0.75 * kl).argmin(1)
    assert all(got.chosen_NM[n].nonzero().flatten().tolist() == [want[group[n]]] for n in range(10)
               if n != 3)


@pytest.mark.parametrize("arguments,message", [({"k": 0}, "k=0 .*1..3"), ({"k": 4}, "k=4 .*1..3"),
                                               ({"labels": "none"}, "labels='none'"),
                                               ({"beta": -1.0}, "beta=-1.0")])
def test_bad_arguments(arguments: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        confident_oracle_loss(torch.zeros(2, 3, 4), torch.zeros(2, dtype=torch.int64),
                              **{"k": 1, "beta": 1.0, **arguments})


def test_ties_go_to_the_lower_member() -> None:
    assert responsible(torch.zeros(2, 3), torch.zeros(2, 3), 2,
                       1.0).tolist() == [[True, True, False]] * 2


def test_feature_sharing() -> None:
    h = torch.randn(6, 3, 20000, dtype=torch.float64)
    mean = share_features(h, 0.7, False)
    torch.testing.assert_close(mean[:, 0], h[:, 0] + 0.7 * (h[:, 1] + h[:, 2]))
    drawn = share_features(h, 0.7, True)
    torch.testing.assert_close((drawn - mean).mean(), torch.zeros((), dtype=torch.float64),
                               atol=0.01, rtol=0)
    left = (drawn[:, 0] - h[:, 0])  # nothing, either or both of the others
    options = torch.stack([h[:, 0] * 0, h[:, 1], h[:, 2], h[:, 1] + h[:, 2]])
    nearest, which = (left - options).abs().min(0)
    assert nearest.max() < 1e-12 and which.flatten().bincount().double().div(
        left.numel()).tolist() == pytest.approx([0.09, 0.21, 0.21, 0.49], abs=0.01)
    assert share_features(h, 0.0, True) is h
    with pytest.raises(ValueError, match="sharing probability 1.5"):
        share_features(h, 1.5, True)


def test_errors_of_an_ensemble() -> None:
    logits = torch.tensor([[[9.0, 0, 0], [0, 1.0, 0]], [[9.0, 0, 0], [0, 1.0, 0]],
                           [[9.0, 0, 0], [0, 1.0, 0]]])
    oracle, top1 = ensemble_errors(logits, torch.tensor([0, 1, 2]))
    assert oracle.tolist() == [False, False, True] and top1.tolist() == [False, True, True]


def test_errors_of_sequences_and_confidences() -> None:
    logits = torch.tensor([[[[4.0, 0], [0, 1.0]], [[4.0, 0], [0, 1.0]]],
                           [[[4.0, 0], [4.0, 0]], [[0, 4.0], [0, 4.0]]]])  # [B, T, M, C]
    y = torch.tensor([[0, 1], [1, 1]])
    errors = sequence_errors(logits, y, True)
    assert errors["top1"].tolist() == [0.5, 0.5] and errors["member"].tolist() == [0.5, 0.5]
    assert errors["oracle"].tolist() == [0.5, 0.5]  # of the best member of a sequence
    assert sequence_errors(logits, y, False)["oracle"].tolist() == [0, 0.5]  # of each token
    p = torch.tensor([[0.5, 0.5], [1.0, 0.0], [0.3, 0.7], [0.9, 0.1]])
    counted = torch.tensor([True, True, True, False])
    assert confidence_counts(p, counted, 4).tolist() == [0, 0, 2, 1]
    # 0.98 and 0.73 of the members, 0.62 of their mean; the last token is padding
    chosen = torch.tensor([[True, False], [True, False], [False, True], [True, False]])
    real = torch.tensor([True, True, True, False])
    found = confidence_histograms(logits.flatten(0, 1), chosen, real)
    assert {name: counts.nonzero()[:, 0].tolist() for name, counts in found.items()} == {
        "responsible": [9], "other": [7, 9], "ensemble": [6, 9]}
    assert [int(counts.sum()) for counts in found.values()] == [3, 3, 3]


def clusters(n: int, g: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
    """Six overlapping Gaussians on a circle."""
    y = torch.randint(6, (n,), generator=g)
    angle = y * (2 * math.pi / 6)
    return 2 * torch.stack([angle.cos(), angle.sin()], 1) + 0.8 * torch.randn(n, 2, generator=g), y


def train(kind: str, seed: int) -> tuple[float, float, float]:
    """(oracle error, top-1 error, mean entropy of members that were not responsible) of three
    members, each a small network.
    """
    torch.manual_seed(seed)
    heads = EnsembleHeads(2, 6, 3, hidden=16)
    k, beta = {"mcl": (1, 0.0), "cmcl": (1, 0.75), "independent": (3, 0.0)}[kind]
    optimizer, g = torch.optim.Adam(heads.parameters(),
                                    lr=0.02), torch.Generator().manual_seed(seed)
    for _ in range(250):
        x, y = clusters(128, g)
        optimizer.zero_grad()
        confident_oracle_loss(heads(x), y, k, beta).loss_N.mean().backward()
        optimizer.step()
    x, y = clusters(4000, torch.Generator().manual_seed(99))
    with torch.no_grad():
        logits = heads.eval()(x)
    oracle, top1 = ensemble_errors(logits, y)
    chosen = confident_oracle_loss(logits, y, 1, 0.75).chosen_NM
    entropy = torch.distributions.Categorical(logits=logits).entropy()[~chosen].mean()
    return float(oracle.float().mean()), float(top1.float().mean()), float(entropy)


def test_a_toy_where_overconfidence_shows() -> None:
    """MCL's members are sure of themselves where they know nothing, so that their vote is bad;
    CMCL's are not, and keep the oracle.
    """
    results = {
        kind: torch.tensor([train(kind, seed) for seed in range(3)]).mean(0).tolist()
        for kind in ("mcl", "cmcl", "independent")
    }
    oracle, top1, entropy = 0, 1, 2
    assert results["cmcl"][top1] < results["mcl"][top1] - 0.1
    assert results["cmcl"][oracle] <= results["independent"][oracle]
    assert results["cmcl"][top1] < results["independent"][top1] + 0.05
    assert results["cmcl"][entropy] > 0.75 * math.log(6) > 2 * results["mcl"][entropy]


def test_heads() -> None:
    heads = EnsembleHeads(8, 5, 3, hidden=4, sharing=0.7)
    x = torch.randn(2, 6, 8)
    assert heads(x).shape == (2, 6, 3, 5) and not torch.equal(heads(x), heads(x))
    heads.eval()
    assert torch.equal(heads(x), heads(x))
    plain = EnsembleHeads(8, 5, 3)
    torch.testing.assert_close(plain(x)[..., 1, :], x @ plain.w_out_MHC[1])
    own = torch.randn(2, 3, 8)
    torch.testing.assert_close(plain(own, own=True)[:, 2], own[:, 2] @ plain.w_out_MHC[2])
    with pytest.raises(ValueError, match="sharing=0.5 has no effect"):
        EnsembleHeads(8, 5, 3, sharing=0.5)
    with pytest.raises(ValueError, match="heads=0"):
        EnsembleHeads(8, 5, 0)

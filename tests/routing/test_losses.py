"""Balance losses: formulas in loops, batches over ranks, a warning where nothing balances."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from moe_plugin import MoELayer
from moe_plugin.comm import LocalComm, run_simulated
from moe_plugin.comm.placement import HostContext
from moe_plugin.config import from_dict
from moe_plugin.records import TokenInfo
from moe_plugin.routing import build_router, finish_step
from tests.logs import warned

pytestmark = pytest.mark.fast


# Balance losses: formulas in loops, and what they promise about cutting a batch over ranks and
# micro-batches.


E, D = 4, 6
WEIGHT = torch.randn(E, D, generator=torch.Generator().manual_seed(9), dtype=torch.float64)


def make(losses: dict, comm=None, k: int = 2, host: HostContext = HostContext()):
    router = build_router(
        from_dict({"model_dim": D, "num_experts": E, "losses": losses, "router": {"top_k": k}}),
        comm, host=host, dtype=torch.float64)
    with torch.no_grad():
        router.weight_ED.copy_(WEIGHT)
    return router


def loop_switch(p: torch.Tensor, ids: torch.Tensor,
                load: torch.Tensor | None = None) -> torch.Tensor:
    load = torch.bincount(ids.flatten(), minlength=E) if load is None else load
    return sum(p[:, e].sum() * load[e] for e in range(E)) * E / (len(p) * load.sum())


def scores(x: torch.Tensor) -> torch.Tensor:
    return (x @ WEIGHT.T).softmax(1)


def test_sequence_loss_is_the_mean_of_the_switch_losses_of_sequences() -> None:
    x = torch.randn(20, D, dtype=torch.float64)
    sequence = torch.tensor([0] * 5 + [1] * 9 + [3] * 6)  # sequence 2 is empty
    mask = torch.arange(20) != 7
    got = make({"sequence": 1.0})(x, mask, None, TokenInfo(None, sequence, 4)).losses["sequence"]
    parts = []
    for q in (0, 1, 3):
        mine = x[(sequence == q) & mask]
        parts.append(loop_switch(scores(mine), scores(mine).topk(2).indices))
    torch.testing.assert_close(got.detach(), sum(parts) / 3)


def test_sequence_loss_does_not_depend_on_micro_batches_of_whole_sequences() -> None:
    x, router = torch.randn(6, 7, D, dtype=torch.float64), make({"sequence": 1.0})

    def loss(sentences: torch.Tensor) -> torch.Tensor:
        n = len(sentences)
        info = TokenInfo(None, torch.arange(n).repeat_interleave(7), n)
        return router(sentences.reshape(-1, D), None, None, info).losses["sequence"]

    torch.testing.assert_close(loss(x), (loss(x[:2]) + loss(x[2:4]) + loss(x[4:])) / 3)


@pytest.mark.parametrize("name", ["z", "sam_alignment"])
def test_means_over_tokens_do_not_depend_on_micro_batches(name: str) -> None:
    config = from_dict({
        "model_dim": D, "num_experts": E, "losses": {name: 1.0},
        "router": {"name": "sam", "groups": 2}
    })
    x, router = torch.randn(24, D, dtype=torch.float64), build_router(config, dtype=torch.float64)
    whole, parts = router(x).losses[name], [router(part).losses[name] for part in x.split(8)]
    torch.testing.assert_close(whole, sum(parts) / 3)
    assert whole > 0
    grads = [torch.autograd.grad(loss, router.weight_ED)[0] for loss in (whole, sum(parts) / 3)]
    torch.testing.assert_close(*grads)


@pytest.mark.parametrize("name", ["gshard", "switch", "sequence", "z", "global_batch", "ta_moe"])
def test_parts_of_ranks_that_share_a_batch_sum_to_the_loss_and_its_gradient(name: str) -> None:
    x, sequence = torch.randn(24, D, dtype=torch.float64), torch.arange(24) % 3
    mask = torch.arange(24) != 5
    whole = make({name: 1.0})
    want = whole(x, mask, None, TokenInfo(None, sequence, 3)).losses[name]
    want.backward()

    def rank(comm):
        router = make({name: 1.0}, comm, host=HostContext(loss_comm=comm))
        mine = slice(0, 10) if comm.rank == 0 else slice(10, 24)
        loss = router(x[mine], mask[mine], None, TokenInfo(None, sequence[mine], 3)).losses[name]
        loss.backward()
        return loss.detach(), router.weight_ED.grad

    parts = run_simulated(2, rank)
    torch.testing.assert_close(sum(p[0] for p in parts), want.detach())
    torch.testing.assert_close(sum(p[1] for p in parts), whole.weight_ED.grad)


def test_global_batch_sees_all_ranks_and_the_micro_batches_so_far() -> None:
    xs = torch.randn(2, 3, 10, D, dtype=torch.float64)

    def rank(comm):
        router = make({"global_batch": 1.0}, comm)
        got = [router(x).losses["global_batch"].detach() for x in xs[comm.rank]]
        finish_step(router)
        return got, router(xs[comm.rank, 0]).losses["global_batch"].detach()

    results = run_simulated(2, rank)
    ids = scores(xs.reshape(-1, D)).topk(2).indices.view(2, 3, 10, 2)
    for r, (got, again) in enumerate(results):
        for m in range(3):
            load = torch.bincount(ids[:, : m + 1].flatten(), minlength=E).double()
            torch.testing.assert_close(got[m], loop_switch(scores(xs[r, m]), ids[r, m], load))
        torch.testing.assert_close(again, got[0])
    # over ranks the mean is the loss of the batch as a whole
    first = torch.bincount(ids[:, 0].flatten(), minlength=E).double()
    torch.testing.assert_close(
        sum(r[0][0] for r in results) / 2,
        loop_switch(scores(xs[:, 0].reshape(-1, D)), ids[:, 0].reshape(-1, 2), first))


def test_in_evaluation_nothing_is_counted() -> None:
    router = make({"global_batch": 1.0}).eval()
    router(torch.randn(9, D, dtype=torch.float64))
    assert router.step_load_E.sum() == 0


def test_per_batch_losses_see_their_batch_alone() -> None:
    x, router = torch.randn(30, D, dtype=torch.float64), make({"switch": 1.0})
    halves = [router(part).losses["switch"] for part in x.split(15)]
    for part, loss in zip(x.split(15), halves, strict=True):
        torch.testing.assert_close(loss.detach(),
                                   loop_switch(scores(part),
                                               scores(part).topk(2).indices))


@pytest.mark.parametrize("losses,message", [
    ({"best": 1.0}, "unknown loss 'best'"),
    ({"noisy_load": 1.0}, "losses.noisy_load cannot be used"),
])
def test_losses_that_do_not_fit(losses: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make(losses)


# Training without balance is warned of, once.


def _said(numbers: tuple[int | None, ...] = (None,), **config: Any) -> list[str]:
    """Warnings where a model of several layers is made."""
    settings = from_dict({"model_dim": 8, "num_experts": 4, "losses": {}, **config})
    with warned("moe_plugin.routing.registry") as lines:
        for number in numbers:
            MoELayer(settings, LocalComm(), host=HostContext(layer_number=number))
    return lines


@pytest.mark.parametrize("numbers", [(None, None, None), (0, 1, 2)], ids=["unknown", "numbered"])
def test_a_model_without_a_balance_loss_is_warned_of_once(numbers: tuple[int | None, ...]) -> None:
    [text] = _said(numbers)
    assert text.startswith("moe-plugin: ")
    for part in ("router.name='topk' with losses={}", "--moe-losses gshard=0.01",
                 "--moe-aux-loss-coeff 0.01", "--moe-router sigmoid_bias"):
        assert part in text


@pytest.mark.parametrize("config", [
    {"losses": {"z": 0.1}}, {"losses": {"gshard": 0.0}}, {"router": {"name": "switch"}},
    {"router": {"name": "sigmoid_bias", "bias_rate": 0.0}}, {"router": {"name": "topk,base"}}])
def test_what_does_not_balance(config: dict[str, Any]) -> None:
    assert len(_said(**config)) == 1


@pytest.mark.parametrize("config", [
    {"losses": {"gshard": 0.01}}, {"losses": {"sequence": 0.01, "z": 0.1}},
    {"router": {"name": "sigmoid_bias"}}, {"router": {"name": "base"}},
    {"router": {"name": "expert_choice"}}, {"router": {"name": "sinkhorn"}},
    {"router": {"top_k": 4}}, {"num_experts": 1, "router": {"top_k": 1}}])
def test_what_balances(config: dict[str, Any]) -> None:
    assert _said(**config) == []


def test_later_layers_say_nothing() -> None:
    assert _said((3,)) == []


def test_the_first_of_several_processes_speaks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "1")
    assert _said() == []
    monkeypatch.setenv("RANK", "0")
    assert len(_said()) == 1

"""Blocks that keep, recompute or swap their activations: the same bits, in less memory."""

from __future__ import annotations

import copy
import gc
import random
import threading
import time
from functools import partial

import pytest
import torch
from torch import nn

from moe_plugin import MoELayer
from moe_plugin.comm import LocalComm, TorchComm
from moe_plugin.memory.activations.auto import MEASURING, manage
from moe_plugin.memory.activations.offload import POLICIES
from moe_plugin.memory.activations.swap import SwapError
from moe_plugin.memory.tiers import DiskTier, HostTier, TierError
from moe_plugin.planner.offload.activation_plan import plan
from moe_plugin.planner.offload.activation_problem import blocks_of
from moe_plugin.planner.offload.schedule import load_profile
from moe_plugin.planner.trials import Steady
from tests.distributed import run_gloo
from tests.seeds import seeded


@pytest.fixture(autouse=True)
def one_step_is_enough(monkeypatch):
    """Whether two steps agree is not up to this machine's clock."""
    monkeypatch.setattr("moe_plugin.memory.activations.auto.Steady",
                        partial(Steady, least=1, within=1e9))

DIM, TOKENS = 16, 24


class Block(nn.Module):
    """Attention-free transformer block: views of one product, dropout, experts, a residual."""

    def __init__(self, comm, number):
        super().__init__()
        self.norm, self.qkv = nn.LayerNorm(DIM), nn.Linear(DIM, 3 * DIM)
        self.moe = MoELayer(DIM, comm, num_experts=4, router={"noise": 0.5},
                            experts={"hidden_dim": 32, "dropout": 0.2})

    def forward(self, x_TD, mask_T=None):
        q_TD, k_TD, v_TD = self.qkv(self.norm(x_TD)).chunk(3, -1)
        mixed_TD = torch.softmax(q_TD @ k_TD.T, -1) @ v_TD
        if mask_T is not None:
            mixed_TD = mixed_TD.masked_fill(mask_T[:, None], 0.0)
        out = self.moe(x_TD + nn.functional.dropout(mixed_TD, 0.1))
        return x_TD + out.output


def make(blocks=4, comm=None, seed=0):
    """Blocks that start alike."""
    with seeded(seed):
        return nn.ModuleList(Block(comm or LocalComm(), i) for i in range(blocks))


def loss_of(blocks, seed):
    """A forward pass with random numbers of its own."""
    torch.manual_seed(seed)
    x_TD = torch.randn(TOKENS, DIM)
    mask_T = torch.arange(TOKENS) % 5 == 0
    for block in blocks:
        x_TD = block(x_TD, mask_T=mask_T)
    return x_TD.square().mean()


def train(blocks, steps=2, batches=1, after=lambda: None, loss_of=loss_of):
    """SGD; (losses, gradients of the last step and parameters after it)."""
    optimizer, losses = torch.optim.SGD(blocks.parameters(), 0.1), []
    for step in range(steps):
        optimizer.zero_grad()
        held = [loss_of(blocks, 10 * step + batch) for batch in range(batches)]
        for loss in held:
            loss.backward()
        losses += [loss.item() for loss in held]
        optimizer.step()
        after()
    return losses, [p.grad.clone() for p in blocks.parameters()], [
        p.detach().clone() for p in blocks.parameters()]


def same(a, b):
    assert a[0] == b[0]
    for some, others in zip(a[1:], b[1:], strict=True):
        assert all(torch.equal(x, y) for x, y in zip(some, others, strict=True))


MIXTURES = [("keep",) * 4, ("recompute",) * 4, ("swap",) * 4, ("swap", "recompute", "keep", "swap"),
            *(tuple(random.Random(i).choices(POLICIES, k=4)) for i in range(4))]


@pytest.mark.parametrize("policies", MIXTURES, ids="-".join)
def test_every_mixture_computes_the_bits_of_keep(policies, tmp_path):
    expected = train(make())
    blocks = make()
    activations = manage(blocks, policies, folder=tmp_path, smallest=0)
    same(train(blocks), expected)
    assert activations.ledger.now == 0
    activations.release()
    same(train(make()), expected)


@pytest.mark.parametrize("policies", [("swap",) * 4, ("swap", "recompute", "keep", "swap")])
def test_several_micro_batches_in_flight(policies, tmp_path):
    expected = train(make(), batches=3)
    blocks = make()
    manage(blocks, policies, folder=tmp_path, smallest=0)
    same(train(blocks, batches=3), expected)


def _on_two_ranks(policies, folder):
    expected = train(make(comm=TorchComm()))
    for chosen in policies:
        blocks = make(comm=TorchComm())
        manage(blocks, chosen, folder=folder, smallest=0)
        same(train(blocks), expected)


def test_experts_on_two_ranks(tmp_path):
    run_gloo(2, _on_two_ranks, MIXTURES[1:4], tmp_path)


def test_tensors_saved_twice_move_once_and_parameters_stay(tmp_path):
    class Twice(nn.Module):
        def __init__(self):
            super().__init__()
            self.w_DD = nn.Parameter(torch.randn(DIM, DIM))

        def forward(self, x_TD):
            y_TD = x_TD @ self.w_DD  # saves x and w
            return y_TD * y_TD.T.T * x_TD  # saves y, a view of it, their product, and x again

    blocks = nn.ModuleList([Twice()])
    activations = manage(blocks, "swap", folder=tmp_path, smallest=0)
    x_TD = torch.randn(TOKENS, DIM, requires_grad=True)
    blocks[0](x_TD).sum().backward()
    activations.release()
    # x, y and y * y, once out and once in
    assert 0 < activations.swapper.copier.counters.bytes <= 2 * 3 * TOKENS * DIM * 4


def test_small_tensors_stay(tmp_path):
    blocks = make(2)
    activations = manage(blocks, "swap", folder=tmp_path, smallest=10**6)
    train(blocks, steps=1)
    assert activations.swapper.copier.counters.copies == 0


class Moved:
    """The bytes that each pass swaps."""

    def __init__(self):
        self.of = []

    def __call__(self, what, begins, one):
        if what == "forward" and not begins:
            self.of.append(one.saved.moved)


def test_memory_is_that_of_two_blocks(tmp_path):
    """While a model swaps, the device holds the activations of at most two of its blocks, however
    slow the copies are.
    """
    for throttle in (None, 3e6, 1e7):  # bytes/s
        blocks = make(8)
        activations = manage(blocks, "swap", folder=tmp_path, smallest=0)
        activations.tell = moved = Moved()
        activations.swapper.copier.throttle = throttle
        train(blocks, steps=1)
        assert len(moved.of) == 8 and max(moved.of) < 1.1 * min(moved.of)
        assert 0 < activations.ledger.peak <= 2.1 * max(moved.of)  # of 8: keeping would hold all
        assert activations.swapper.copier.counters.bytes >= sum(moved.of)


class FullDisk(DiskTier):
    """Takes some tensors."""

    room = 5

    def put(self, x):
        if self.room == 0:
            raise TierError(28, "x bytes do not fit the disk (No space left on device)")
        self.room -= 1
        return super().put(x)


def test_a_full_disk_is_named_and_nothing_is_lost(tmp_path):
    expected, blocks, tier = train(make()), make(), FullDisk(tmp_path)
    activations = manage(blocks, "swap", tier=tier, smallest=0)
    with pytest.raises(SwapError, match="block 0 .*could not be copied out to .*No space left"):
        loss_of(blocks, 0).backward()
    assert torch._C._autograd._top_saved_tensors_default_hooks(False) is None
    tier.room = 10**9
    same(train(blocks), expected)
    gc.collect()  # the error's frames
    assert activations.ledger.now == 0


def test_a_copier_that_ends_is_named(tmp_path):
    class Ends(HostTier):
        def put(self, x):
            raise SystemExit("killed")

    blocks = make()
    manage(blocks, "swap", tier=Ends("cpu"), smallest=0)
    with pytest.raises(SwapError, match="SystemExit: killed"):
        loss_of(blocks, 0).backward()


def test_lost_values_are_named_in_backward(tmp_path):
    class Loses(DiskTier):
        def read_into(self, held, target):
            raise TierError(5, "the file ends early")

    blocks = make()
    manage(blocks, "swap", tier=Loses(tmp_path), smallest=0)
    with pytest.raises(SwapError, match="could not be copied back from .*the file ends early"):
        for _ in range(2):  # a copy may not have left yet
            loss_of(blocks, 0).backward()


def test_an_error_inside_a_block_leaves_no_hooks(tmp_path):
    blocks = make()
    manage(blocks, "swap", folder=tmp_path, smallest=0)
    forward = blocks[2].moe.forward
    blocks[2].moe.forward = lambda x: 1 / 0
    with pytest.raises(ZeroDivisionError):
        loss_of(blocks, 0)
    assert torch._C._autograd._top_saved_tensors_default_hooks(False) is None
    blocks[2].moe.forward = forward
    same(train(blocks), train(make()))


def test_a_change_in_place_is_an_error_as_without_swapping(tmp_path):
    class Changes(nn.Module):
        def forward(self, x_TD):
            y_TD = x_TD * 2
            z_TD = y_TD.sin()
            y_TD += 1
            return z_TD

    class Waits(HostTier):
        def put(self, x):
            go.wait()
            return super().put(x)

    go = threading.Event()
    blocks = nn.ModuleList([Changes()])
    manage(blocks, "swap", tier=Waits("cpu"), smallest=0)
    y_TD = blocks[0](torch.randn(TOKENS, DIM, requires_grad=True))
    go.set()
    with pytest.raises(SwapError, match="modified by an inplace operation"):
        y_TD.sum().backward()


def test_two_backward_passes_of_one_graph(tmp_path):
    plain, blocks = make(), make()
    manage(blocks, "swap", folder=tmp_path, smallest=0)
    for model in (plain, blocks):
        loss = loss_of(model, 0)
        loss.backward(retain_graph=True)
        loss.backward()
    assert all(torch.equal(p.grad, q.grad)
               for p, q in zip(plain.parameters(), blocks.parameters(), strict=True))


def test_without_gradients_nothing_is_swapped(tmp_path):
    blocks = make()
    activations = manage(blocks, "swap", folder=tmp_path, smallest=0)
    with torch.no_grad():
        loss_of(blocks, 0)
    assert activations.swapper.copier.counters.copies == 0


def test_a_copy_of_a_model_has_policies_of_its_own(tmp_path):
    blocks = make()
    activations = manage(blocks, "swap", folder=tmp_path, smallest=0)
    twin = copy.deepcopy(blocks)
    same(train(twin), train(make()))
    assert activations.swapper.copier.counters.copies == 0


@pytest.mark.parametrize("arguments, message", [
    ({"policy": "sometimes"}, "activations='sometimes' is unknown; use auto, keep"),
    ({"policy": ["keep"]},
     "1 activation policies were given for 4 blocks: use one policy for each block"),
    ({"policy": "auto"},
     "activations=auto needs a memory limit, but memory=None: set memory .* for example 8GiB"),
    ({"policy": "auto", "memory": "much"}, "not a size"),
])
def test_what_it_refuses(arguments, message):
    with pytest.raises(ValueError, match=message):
        manage(make(), **arguments)


def test_blocks_are_managed_once():
    blocks = make()
    manage(blocks, "keep")
    with pytest.raises(ValueError, match="block 0 are already managed"):
        manage(blocks, "keep")
    with pytest.raises(ValueError, match="each block only once"):
        manage([blocks[0], blocks[0]], "keep")




LIMITS = (0.3, 0.5, 0.75, 3.0)  # of what keeping all takes


@pytest.mark.parametrize("share", LIMITS)
def test_auto_stays_within_its_memory_and_computes_the_same(share, tmp_path):
    expected = train(make(6), steps=8)
    blocks, seen = make(6), []
    everything = 6 * activation_bytes(tmp_path)
    activations = manage(blocks, "auto", memory=int(share * everything), folder=tmp_path,
                         smallest=0, profile=tmp_path / "profile.json")

    def after():
        seen.append(activations.ledger.peak)
        activations.after_step()

    same(train(blocks, steps=8, after=after), expected)
    assert activations.decision is not None and activations.ledger.now == 0
    assert max(seen[len(MEASURING):]) <= share * everything
    assert (set(activations.policies) == {"keep"}) == (share > 1)
    profile = load_profile(tmp_path / "profile.json")
    assert plan(blocks_of(profile), int(share * everything),
                duplex=profile.duplex).decisions == activations.policies


def activation_bytes(folder):
    """Of one block."""
    blocks = make(1)
    activations = manage(blocks, "auto", memory=10**9, folder=folder, smallest=0)
    train(blocks, steps=3, after=activations.after_step)
    return activations.profile.blocks[0].activation_bytes


def test_a_step_above_its_memory_is_said_and_planned_anew(tmp_path, caplog):
    blocks = make(6)
    activations = manage(blocks, "auto", memory=int(3.5 * activation_bytes(tmp_path)),
                         folder=tmp_path, smallest=0)
    train(blocks, steps=3, after=activations.after_step)
    before = activations.decision
    train(blocks, steps=1, batches=2, after=activations.after_step)
    assert "above the limit of" in caplog.text and "planning again" in caplog.text
    assert activations.decision.outcome.peak < before.outcome.peak


def _plans_of_two_ranks(folder):
    comm = TorchComm()
    blocks = make(comm=comm)
    with pytest.raises(ValueError, match="their memory is"):
        manage(make(), "auto", memory=1000 + comm.rank, folder=folder, comm=comm)
    activations = manage(blocks, "auto", memory="120KiB", folder=folder, smallest=0, comm=comm)
    if comm.rank:  # a slower rank
        blocks[1].register_forward_pre_hook(lambda *_: time.sleep(0.01))
        forward = blocks[2].qkv.forward
        blocks[2].qkv.forward = lambda x: (time.sleep(0.01), forward(x))[1]
    result = train(blocks, steps=6, after=activations.after_step)
    same(result, train(make(comm=comm), steps=6))
    return activations.policies, activations.profile


def test_ranks_decide_alike(tmp_path):
    (first, profile), (second, other) = run_gloo(2, _plans_of_two_ranks, tmp_path)
    assert first == second and profile == other and "keep" not in first[:1]


def _planned_by_step(folder):
    comm, blocks, planned = TorchComm(), make(3), []
    activations = manage(blocks, "auto", memory="120KiB", folder=folder, smallest=0, comm=comm)

    def after():
        activations.after_step()
        planned.append(activations.planned)
        comm.all_reduce(torch.zeros(()))  # of the next step

    train(blocks, steps=len(MEASURING) - 1, after=after)
    # one rank leaves a block out, as it may where layers are dropped at random
    train(blocks[:2] if comm.rank else blocks, steps=1, after=after)
    train(blocks, steps=1, after=after)
    return planned, activations.policies


def test_ranks_plan_when_all_have_measured_all_blocks(tmp_path):
    first, second = run_gloo(2, _planned_by_step, tmp_path)
    assert first == second and first[0] == [False, False, False, True]

"""Weights that stream through the device: losses and weights are those of the resident model."""

from __future__ import annotations

import contextlib
import errno
import os
from contextlib import nullcontext
from functools import partial

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from moe_plugin import MoEConfig, MoELayer, weighted_loss
from moe_plugin.config import OffloadConfig, with_overrides
from moe_plugin.experts.base import is_expert
from moe_plugin.hosts.plain.blocks import MoEBlock
from moe_plugin.hosts.plain.streamed import streamed_trainer
from moe_plugin.memory.copier import Copier
from moe_plugin.memory.passes import aligned_buffer
from moe_plugin.memory.tiers import DiskTier, HostTier, TierError
from moe_plugin.memory.weights.blocks import StreamedBlock
from moe_plugin.memory.weights.files import load_weights, plan_segments, save_weights
from moe_plugin.memory.weights.optimizer_state import OptimizerStateBuffer
from moe_plugin.memory.weights.streamed import StepResult, StreamedTrainer
from moe_plugin.routing import finish_step_of_any
from moe_plugin.training.gradients.sync import PartedClip, clip_grad_norm_

VOCABULARY, WIDTH, LENGTH = 11, 8, 5
SGD = partial(torch.optim.SGD, lr=0.1, momentum=0.9)
ADAM = partial(torch.optim.Adam, lr=0.01, fused=True)


class Block(nn.Module):
    """Recurrent mixing and experts, with their balance loss."""

    def __init__(self, dropout: float = 0.0, norm: bool = False, comm: object = None,
                 **settings: object) -> None:
        super().__init__()
        self.config = with_overrides(
            MoEConfig(model_dim=WIDTH, num_experts=4),
            {"experts.hidden_dim": 12, "experts.compute_selection": "rule",
             **{name.replace("__", "."): value for name, value in settings.items()}})
        self.mix = nn.GRU(WIDTH, WIDTH, batch_first=True)
        self.dropout = nn.Dropout(dropout)
        self.norm = nn.BatchNorm1d(LENGTH) if norm else nn.Identity()
        self.moe = MoELayer(self.config, comm)

    def forward(self, x_BSD: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x_BSD = x_BSD + self.dropout(self.mix(F.layer_norm(x_BSD, x_BSD.shape[-1:]))[0])
        out = self.moe(self.norm(x_BSD))
        return x_BSD + out.output, weighted_loss(out.losses, self.config.losses)


def model(layers: int = 3, **settings: object) -> list[nn.Module]:
    """Embedding, blocks, head; the same weights in every call."""
    torch.manual_seed(3)
    return [nn.Embedding(VOCABULARY, WIDTH), *(Block(**settings) for _ in range(layers)),
            nn.Linear(WIDTH, VOCABULARY)]


def batches(step: int, count: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    random = torch.Generator().manual_seed(step)
    ids = [torch.randint(0, VOCABULARY, (2, LENGTH + 1), generator=random) for _ in range(count)]
    return [(ids_BS[:, :-1], ids_BS[:, 1:]) for ids_BS in ids]


def loss(count: int):
    return lambda out, target: F.cross_entropy(out.flatten(0, 1), target.flatten()) / count


def forward(blocks: list[nn.Module], x: torch.Tensor, randomness=None,
            ) -> tuple[torch.Tensor, torch.Tensor]:
    """The output of all blocks, and the sum of their balance losses."""
    balance = torch.zeros(())
    for number, block in enumerate(blocks):
        with nullcontext() if randomness is None else randomness(number):
            x = block(x)
            x, own = x if isinstance(x, tuple) else (x, None)
            balance = balance if own is None else balance + own
    return x, balance


def resident(blocks: list[nn.Module], optimizer, count: int, steps: int = 3,
             randomness=None, clip: float | None = None) -> list[torch.Tensor]:
    """The loop with all weights on the device; what each micro-batch's losses were."""
    steps_of = optimizer([p for block in blocks for p in block.parameters()])
    seen = []
    for step in range(steps):
        for m, (x, target) in enumerate(batches(step, count)):
            x, balance = forward(blocks, x, randomness and partial(randomness, step, m))
            value = loss(count)(x, target)
            (value + balance).backward()
            seen += [value.detach(), balance.detach()]
        if clip is not None:
            seen.append(clip_grad_norm_([p for block in blocks for p in block.parameters()], clip))
        steps_of.step()
        steps_of.zero_grad()
        for block in blocks:
            finish_step_of_any(block)
    return seen


def streamed(trainer: StreamedTrainer, count: int, steps: int = 3) -> list[torch.Tensor]:
    seen = []
    for step in range(steps):
        seen += seen_in(trainer.step(batches(step, count)))
    trainer.settle()
    return seen


def seen_in(result: StepResult) -> list[torch.Tensor]:
    """Losses and balance of each micro-batch, and the norm of a step that clips."""
    seen = [x for pair in zip(result.losses, result.balance, strict=True) for x in pair]
    return seen if result.norm is None else [*seen, result.norm]


def same(trainer: StreamedTrainer, blocks: list[nn.Module]) -> None:
    for block, module in zip(trainer.blocks, blocks, strict=True):
        for name, x, p in zip(block.names, block.read(), module.parameters(), strict=True):
            assert torch.equal(x, p), f"block {block.number}: {name}"
        for x, y in zip(block.module.buffers(), module.buffers(), strict=True):
            assert torch.equal(x, y)


def ends_as(trainer: StreamedTrainer, blocks: list[nn.Module], got: list[torch.Tensor],
            expected: list[torch.Tensor]) -> None:
    """All that was seen, and all weights, have the bits of the resident model; it ends."""
    assert all(torch.equal(a, b) for a, b in zip(got, expected, strict=True))
    same(trainer, blocks)
    trainer.close()


def unchanged(trainer: StreamedTrainer, before: list[list[torch.Tensor]]) -> None:
    for block, weights in zip(trainer.blocks, before, strict=True):
        assert all(torch.equal(x, y) for x, y in zip(block.read(), weights, strict=True))


def tier_of(kind: str, folder: object) -> HostTier | DiskTier:
    return HostTier("cpu") if kind == "host" else DiskTier(folder)


@pytest.mark.parametrize(("kind", "optimizer", "count", "segments", "settings"), [
    ("host", SGD, 1, None, {}), ("host", ADAM, 2, [2, 1, 2], {}),
    ("disk", SGD, 2, None, {}), ("disk", ADAM, 1, [2, 1, 1, 1], {}), ("disk", ADAM, 4, [2, 3], {}),
    ("disk", SGD, 4, [5], {}), ("host", SGD, 4, [1, 3, 1], {"resident": [0, 2]}),
    ("disk", ADAM, 2, None, {"resident": [4], "throttle": 2e6}),
    ("disk", ADAM, 2, [1, 2, 2], {"overlap": False})])
def test_equals_the_resident_model(tmp_path, kind, optimizer, count, segments, settings):
    """Losses of three steps and weights after them, bit for bit."""
    blocks = model()
    expected = resident(blocks, optimizer, count)
    trainer = StreamedTrainer(model(), loss(count), optimizer, tier_of(kind, tmp_path),
                              segments=segments, **settings)
    ends_as(trainer, blocks, streamed(trainer, count), expected)


@pytest.mark.parametrize(("kind", "optimizer", "count", "segments", "settings"), [
    ("host", SGD, 1, [2, 1, 2], {}), ("host", ADAM, 4, None, {"resident": [0, 2]}),
    ("disk", SGD, 4, [1, 3, 1], {"resident": [4]}), ("disk", ADAM, 2, None, {}),
    ("disk", ADAM, 1, [5], {"overlap": False})])
def test_clips_by_the_norm_of_all_blocks(tmp_path, kind, optimizer, count, segments, settings):
    """Losses, norms and weights are those of the resident model, bit for bit; gradients wait in the
    tier, which gets their room back.
    """
    blocks = model()
    expected = resident(blocks, optimizer, count, clip=2.4)
    norms = expected[2 * count::2 * count + 1]
    assert min(norms) < 2.4 < max(norms)  # some are clipped
    tier = tier_of(kind, tmp_path)
    trainer = StreamedTrainer(model(), loss(count), optimizer, tier, segments=segments,
                              clip=PartedClip(2.4), **settings)
    got = streamed(trainer, count, steps=2)
    room = tier.end if kind == "disk" else 0
    got += seen_in(trainer.step(batches(2, count)))
    trainer.settle()
    assert kind == "host" or tier.end == room
    ends_as(trainer, blocks, got, expected)


@pytest.mark.parametrize("kind", ["disk", "host"])
def test_the_optimizer_sees_which_parameters_are_experts(tmp_path, kind):
    trainer = StreamedTrainer(model(), loss(1), SGD, tier_of(kind, tmp_path))
    marks = [[is_expert(p) for p in block.params] for block in trainer.blocks]
    assert marks == [[is_expert(p) for p in block.stepped] for block in trainer.blocks]
    assert {True, False} == {mark for block in marks for mark in block}


def test_passes_that_are_forgotten_leave_nothing(tmp_path):
    blocks = model()
    expected = resident(blocks, SGD, 2, steps=1, clip=2.4)
    trainer = StreamedTrainer(model(), loss(2), SGD, DiskTier(tmp_path), clip=PartedClip(2.4))
    trainer.accumulate(batches(7, 2))
    trainer.forget()
    assert torch.equal(trainer.accumulate(batches(0, 2)).norm, expected[-1])
    trainer.update()
    trainer.settle()
    assert trainer.steps == 1
    same(trainer, blocks)
    trainer.close()


def test_a_disk_without_room_for_gradients_changes_no_weight(tmp_path, monkeypatch):
    """With clipping nothing is stepped before all gradients are there; the next step is whole."""
    blocks = model()
    trainer = StreamedTrainer(model(), loss(1), SGD, DiskTier(tmp_path), clip=PartedClip(2.4))
    before = [block.read() for block in trainer.blocks]
    write, written = os.pwrite, []

    def filling(*args):
        written.append(args)
        if len(written) > 4:
            raise OSError(errno.ENOSPC, "No space left on device")
        return write(*args)

    monkeypatch.setattr(os, "pwrite", filling)
    with pytest.raises(TierError, match="do not fit"):
        trainer.step(batches(0, 1))
    monkeypatch.undo()
    unchanged(trainer, before)
    expected = resident(blocks, SGD, 1, steps=1, clip=2.4)
    ends_as(trainer, blocks, streamed(trainer, 1, steps=1), expected)


@pytest.mark.parametrize("settings", [
    {"dropout": 0.3, "norm": True, "router__noise": 1.0},
    {"router__name": "sigmoid_bias", "router__bias_rate": 0.01, "losses": {"gshard": 0.1}}])
def test_random_numbers_and_counts_are_those_of_one_pass(tmp_path, settings):
    """Dropout, noisy routers, running statistics and balancing biases, in training and after."""
    trainer = StreamedTrainer(model(**settings), loss(2), SGD, DiskTier(tmp_path), seed=5)
    other = StreamedTrainer([nn.Linear(1, 1)], loss(1), SGD, HostTier("cpu"), seed=5)

    def randomness(step: int, m: int, number: int):
        other.steps = step
        return other.randomness(m, number)

    blocks = model(**settings)
    expected = resident(blocks, SGD, 2, randomness=randomness)
    before = torch.get_rng_state()
    got = streamed(trainer, 2)
    assert torch.equal(torch.get_rng_state(), before)
    ends_as(trainer, blocks, got, expected)


class Counted(nn.Linear):
    """Counts samples that are not padding."""

    def __init__(self) -> None:
        super().__init__(WIDTH, WIDTH)
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen += x.ne(0).any(1).sum()
        return super().forward(x)


def test_counts_that_begin_with_a_later_micro_batch(tmp_path):
    blocks = [Counted(), nn.Linear(WIDTH, 1)]
    trainer = StreamedTrainer(blocks, lambda y, _: y.mean(), SGD, DiskTier(tmp_path))
    trainer.step([(torch.zeros(3, WIDTH), None), (torch.ones(2, WIDTH), None)])
    assert int(blocks[0].seen) == 2
    trainer.close()


def test_holds_two_segments_and_loads_no_more_than_needed(tmp_path):
    """What is neither in the present segment nor in its neighbour takes no memory."""
    seen = []

    class Spy(nn.Linear):
        def forward(self, x):
            sizes = [block.module.weight.untyped_storage().nbytes() for block in trainer.blocks]
            seen.append([size > 16 for size in sizes])
            return super().forward(x)

    blocks = [partial(Spy, 8, 8) for _ in range(6)]
    trainer = StreamedTrainer(blocks, lambda y, target: y.sum(), SGD, DiskTier(tmp_path),
                              segments=[2, 2, 2])
    trainer.step([(torch.randn(3, 8), None)])
    trainer.settle()
    copied = trainer.copier.counters.copies
    trainer.step([(torch.randn(3, 8), None)])
    trainer.settle()
    assert max(sum(row) for row in seen) == 4 and len(seen) == 22
    # of three segments one is read in forward, one in backward; all are written, and their state
    # is read and written
    assert trainer.copier.counters.copies - copied == 2 + 2 + 6 + 12
    segments = trainer.device_bytes - trainer.bytes_beside_segments
    assert segments < 5 * trainer.blocks[0].layout.nbytes
    trainer.close()


def test_evaluates_and_changes_segments_between_steps(tmp_path):
    """A new cut and losses without training change no number."""
    blocks = model()
    expected = resident(blocks, ADAM, 2)
    trainer = StreamedTrainer(model(), loss(2), ADAM, DiskTier(tmp_path), segments=[1, 4])
    got = streamed(trainer, 2, steps=1)
    trainer.use_segments([2, 2, 1])
    assert trainer.segments == (2, 2, 1)
    first = trainer.evaluate(batches(1, 2))
    for step in (1, 2):
        got += seen_in(trainer.step(batches(step, 2)))
    assert torch.equal(first.losses[0], expected[4])
    ends_as(trainer, blocks, got, expected)


class FailingReads(DiskTier):
    """`fails`: of the next reads, which one; what has been given back is given back once."""

    def __init__(self, folder):
        super().__init__(folder)
        self.fails, self.freed = 0, []

    def read_into(self, held, target):
        self.fails -= 1
        if not self.fails:
            raise TierError(errno.EIO, "cannot be read")
        super().read_into(held, target)

    def free(self, held):
        super().free(held)
        assert held not in self.freed
        self.freed.append(held)


@pytest.mark.parametrize("again", [True, False])
def test_gradients_that_cannot_be_read_are_all_still_there(tmp_path, again):
    """The step can be tried again, or its gradients be forgotten."""
    def block():
        torch.manual_seed(0)
        module = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
        return module, module(torch.ones(2, 4)).sum()

    tier, copier, room = FailingReads(tmp_path), Copier("cpu"), OptimizerStateBuffer()
    module, out = block()
    out.backward()
    grads = [p.grad for p in module.parameters()]
    streamed_block = StreamedBlock(0, module, SGD, tier)
    flat_N = aligned_buffer(streamed_block.layout.nbytes, "cpu")
    streamed_block.fetch(copier, flat_N).wait()
    streamed_block.attach(flat_N)
    streamed_block.fetch_state(copier, room)
    streamed_block.keep_gradients(copier)
    streamed_block.wait_kept()
    tier.fails = 2
    with pytest.raises(TierError, match="cannot be read"):
        streamed_block.step(copier, room, lambda grads: None)
    assert not tier.freed and all(p.grad is None for p in module.parameters())
    if again:
        seen = []
        streamed_block.step(copier, room, lambda grads: seen.extend(g.clone() for g in grads))
        assert all(torch.equal(x, y) for x, y in zip(seen, grads, strict=True))
    else:
        streamed_block.forget_gradients()
    streamed_block.forget_gradients()
    streamed_block.settle()
    assert len(tier.freed) >= len(grads)
    copier.close()


def test_any_failure_of_a_copy_is_forgotten_with_the_gradients():
    """The step's own error is what its caller raises."""
    class Ends(HostTier):
        def put_later(self, copier, tensors):
            return super().put_later(copier, tensors)[0], copier.start_call(lambda: 1 / 0, 0)

    module, copier = nn.Linear(4, 4), Copier("cpu")
    streamed_block = StreamedBlock(0, module, SGD, Ends("cpu"))
    for p in module.parameters():
        p.grad = torch.zeros_like(p)
    streamed_block.keep_gradients(copier)
    with pytest.raises(ZeroDivisionError):
        streamed_block.wait_kept()
    streamed_block.forget_gradients()
    streamed_block.wait_kept()
    copier.close()


def test_a_full_disk_is_named_and_older_weights_stay(tmp_path, monkeypatch):
    """While weights are written after a step, and before the first one."""
    trainer = StreamedTrainer(model(), loss(1), SGD, DiskTier(tmp_path))
    before = [block.read() for block in trainer.blocks]

    def full(*args):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "pwrite", full)
    with pytest.raises(TierError, match="do not fit"):
        trainer.step(batches(0, 1))
        trainer.settle()
    with pytest.raises(TierError, match="do not fit"):
        StreamedTrainer(model(), loss(1), SGD, DiskTier(tmp_path))
    monkeypatch.undo()
    for block in trainer.blocks:
        with contextlib.suppress(TierError):
            block.settle()
    unchanged(trainer, before)
    trainer.close()


def test_refuses_what_cannot_be(tmp_path):
    """By name, bound and remedy."""
    make = partial(StreamedTrainer, loss=loss(1), optimizer=SGD, tier=HostTier("cpu"))
    tied = model()
    tied[-1].weight = tied[0].weight
    with pytest.raises(ValueError, match="blocks 0 and 4 share a parameter .weight, weight."):
        make(tied)
    with pytest.raises(ValueError, match="limit=100 bytes is smaller than two segments of .*raise"):
        make(model(), limit=100)
    with pytest.raises(ValueError, match=r"segments of \[2, 2\] blocks.*sum must be the model's 5"):
        make(model(), segments=[2, 2])
    with pytest.raises(ValueError, match="0 blocks"):
        make([])
    with pytest.raises(ValueError, match="0 micro-batches"):
        make(model()).step([])
    with pytest.raises(ValueError, match=r"\(DiskTier\) cannot be used with device=meta"):
        make(model(), tier=DiskTier(tmp_path), device="meta")
    wrong = nn.Linear(2, 2)
    wrong.weight = nn.Parameter(torch.ones(2, 2, 2)[:, :, 0])
    with pytest.raises(ValueError, match="block 0: parameter weight is not contiguous"):
        make([wrong])
    with pytest.raises(ValueError, match=r"block 0 \(GRU\) returned a value of type tuple"):
        make([nn.GRU(2, 2), nn.Linear(2, 2)]).step([(torch.ones(1, 2), None)])


def test_saves_and_loads_and_names_another_model(tmp_path):
    """A run that goes on from files ends with the same weights; files of other shapes are named."""
    trainer = StreamedTrainer(model(), loss(1), ADAM, DiskTier(tmp_path))
    streamed(trainer, 1, steps=2)
    save_weights(trainer, tmp_path / "saved")
    save_weights(trainer, tmp_path / "saved")
    later = StreamedTrainer(model(), loss(1), ADAM, HostTier("cpu"))
    later.step(batches(7, 1))
    load_weights(later, tmp_path / "saved")
    assert later.steps == 2
    for one in (trainer, later):
        one.step(batches(2, 1))
        one.settle()
    same(trainer, _resident_of(later))
    other = StreamedTrainer([nn.Embedding(VOCABULARY, 4)], loss(1), ADAM, HostTier("cpu"))
    with pytest.raises(ValueError, match=r"block_00000.*weight.* has shape \[11, 8\], but block "
                                         r"0 needs shape \[11, 4\]"):
        load_weights(other, tmp_path / "saved")
    (tmp_path / "saved" / "block_00003.safetensors").write_bytes(b"nothing")
    with pytest.raises(ValueError, match="block_00003.safetensors cannot be read"):
        load_weights(later, tmp_path / "saved")
    trainer.close()


def _resident_of(trainer: StreamedTrainer) -> list[nn.Module]:
    """The modules with their weights in memory."""
    for block in trainer.blocks:
        for p, x in zip(block.params, block.read(), strict=True):
            p.data = x
    return [block.module for block in trainer.blocks]


def test_numbers_that_are_not_finite_are_not_saved(tmp_path):
    trainer = StreamedTrainer(model(), loss(1), SGD, DiskTier(tmp_path))
    save_weights(trainer, tmp_path / "saved", finite=True)
    before = sorted(file.read_bytes() for file in (tmp_path / "saved").iterdir())
    block = trainer.blocks[1]
    block.write([torch.full_like(x, float("nan")) for x in block.read()])
    with pytest.raises(FloatingPointError, match="of block 1 is not finite, so .*saved is not wri"):
        save_weights(trainer, tmp_path / "saved", finite=True)
    assert before == sorted(file.read_bytes() for file in (tmp_path / "saved").iterdir())
    # killed between the two steps in which a save replaces an older one
    (tmp_path / "saved").rename(tmp_path / "saved.old")
    load_weights(trainer, tmp_path / "saved")
    assert all(x.isfinite().all() for x in block.read())
    trainer.close()


def test_weights_are_replaced_all_or_none(tmp_path):
    """As an average over peers replaces them."""
    for kind in ("disk", "host"):
        trainer = StreamedTrainer(model(), loss(1), SGD, tier_of(kind, tmp_path), resident=[1])
        streamed(trainer, 1, steps=1)
        before = [block.read() for block in trainer.blocks]

        def double(parts, take):
            for part in parts:
                for x in part:
                    x.mul_(2)
            return take

        for take, factor in ((False, 1), (True, 2)):
            assert trainer.replace_weights(partial(double, take=take)) is take
            for block, weights in zip(trainer.blocks, before, strict=True):
                for x, y in zip(block.read(), weights, strict=True):
                    assert torch.equal(x, factor * y)
        trainer.step(batches(1, 1))
        trainer.close()


@pytest.mark.parametrize("weights", ["device", "host"])
def test_settings_say_where_weights_are(tmp_path, weights):
    """One entrance for both; what streams is in files, because the device is a CPU."""
    settings = OffloadConfig(weights=weights, path=str(tmp_path) if weights == "host" else None)
    blocks = model()
    expected = resident(blocks, ADAM, 2, clip=0.5)
    trainer = streamed_trainer(settings, model(), loss(2), ADAM, segments=[2, 3], clip_norm=0.5)
    assert [block.streams for block in trainer.blocks] == [weights == "host"] * 5
    assert isinstance(trainer.tier, DiskTier) is (weights == "host")
    ends_as(trainer, blocks, streamed(trainer, 2), expected)


def test_settings_that_nothing_can_obey_are_named():
    """In plain PyTorch, and in hosts that own the training loop."""
    with pytest.raises(ValueError, match="offload.activations='swap' cannot be used.*Leave "
                                         "offload.activations out"):
        streamed_trainer(OffloadConfig(weights="host", activations="swap"), model(), loss(1), SGD)
    with pytest.raises(ValueError, match="offload.weights=device.*use offload.weights=host"):
        streamed_trainer(OffloadConfig(), model(), loss(1), SGD, resident=[0])
    with pytest.raises(ValueError, match="clip_norm=0 must be > 0"):
        streamed_trainer(OffloadConfig(), model(), loss(1), SGD, clip_norm=0)


def test_plans_segments_from_what_blocks_took(tmp_path):
    """Cuts that fit the limit; with too little nothing changes."""
    trainer = StreamedTrainer(model(), loss(2), ADAM, DiskTier(tmp_path))
    with pytest.raises(ValueError, match="0 steps and .* are not enough"):
        plan_segments(trainer, 1 << 20, 2)
    trainer.step(batches(0, 2))
    least = trainer.device_bytes
    found = plan_segments(trainer, 1 << 20, 2)
    assert trainer.segments == found.counts and sum(found.counts) == 5
    for limit in (2 * least, 3 * least):
        plan_segments(trainer, limit, 2)
        trainer.step(batches(1, 2))
        assert trainer.device_bytes <= limit
    before = trainer.segments
    with pytest.raises(ValueError, match="a limit of 9 bytes is too small.*Raise the limit"):
        plan_segments(trainer, 9, 2)
    assert trainer.segments == before
    trainer.close()


@pytest.mark.parametrize("where", ["host", "disk"])
def test_a_step_that_is_not_finite_changes_nothing(where, tmp_path):
    """No weight, no state of an optimizer or a router; the next step is as of a trainer that never
    saw it.
    """
    def made():
        torch.manual_seed(0)
        tier = HostTier("cpu") if where == "host" else DiskTier(tmp_path)
        moe = MoEBlock(4, num_experts=4, router="sigmoid_bias")
        return StreamedTrainer([nn.Linear(4, 4), moe, nn.Linear(4, 4)],
                               lambda y, target: (y - target).square().mean(),
                               partial(torch.optim.Adam, lr=0.1), tier, clip=PartedClip(1.0),
                               skip_not_finite=True)

    good = [(torch.randn(3, 4), torch.zeros(3, 4))]
    bad = [(torch.randn(5, 4), torch.full((5, 4), float("inf")))]
    results = []
    for steps in ([good, bad, good], [good, good]):
        trainer = made()
        norms = [trainer.step(batch).norm for batch in steps]
        trainer.settle()
        results.append([x.clone() for block in trainer.blocks
                        for x in (*block.read(), *block.module.buffers())])
        assert results[-1][-4].any()  # the biases
        assert [bool(norm.isfinite()) for norm in norms] == [batch is good for batch in steps]
        trainer.close()
    assert all(map(torch.equal, *results))
    with pytest.raises(ValueError, match="skip_not_finite=True needs clip"):
        StreamedTrainer([nn.Linear(1, 1)], lambda y, _: y.mean(), partial(torch.optim.Adam),
                        HostTier("cpu"), skip_not_finite=True)


def test_a_limit_of_the_settings_is_obeyed(tmp_path):
    settings = OffloadConfig(weights="host", path=str(tmp_path), weights_memory="1KiB")
    with pytest.raises(ValueError, match="limit=1024 bytes is smaller than two segments"):
        streamed_trainer(settings, [nn.Linear(64, 64), nn.Linear(64, 64)],
                         lambda y, target: y.mean(), partial(torch.optim.SGD, lr=0.1))
    with pytest.raises(ValueError, match="weights_memory='1KiB'.*none without offload.weights"):
        OffloadConfig(weights_memory="1KiB")


def test_weights_are_replaced_after_the_copy_that_reads_them():
    tier, log = HostTier("cpu"), []
    block = StreamedBlock(0, nn.Linear(2, 2), lambda params: torch.optim.SGD(params, 0.1), tier)
    copier = Copier("cpu")
    ticket = block.fetch(copier, aligned_buffer(block.layout.nbytes, "cpu"))
    before = [p.detach().clone() for p in block.stepped]
    ticket.synchronize = lambda: log.append([torch.equal(a, b) for a, b in zip(
        before, block.stepped, strict=True)])
    block.write([torch.ones(2, 2), torch.ones(2)])
    assert log == [[True, True]], "the old weights are there as long as the copy reads"
    assert all(bool((p == 1).all()) for p in block.stepped)
    copier.close()

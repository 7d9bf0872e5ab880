"""Memory is used again when it is not in use any more, and never before."""

from __future__ import annotations

import copy
import gc
import os
import pickle
import threading

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from moe_plugin.comm import LocalComm
from moe_plugin.kernels.workspace import PATIENCE, SMALL_BYTES, SWEEP, MemoryPool, Workspace
from moe_plugin.layer import MoELayer
from moe_plugin.memory.activations.auto import manage

LARGE = (SMALL_BYTES // 4, 2)  # float32: twice the smallest size that is kept


def fresh() -> Workspace:
    """With memory of its own."""
    return Workspace(MemoryPool())


def test_freed_memory_comes_back() -> None:
    memory, like = fresh(), torch.empty(0)
    first = memory.empty("a", LARGE, like)
    place = first.data_ptr()
    assert memory.empty("a", LARGE, like).data_ptr() != place, "in use"
    del first
    assert memory.empty("a", LARGE, like).data_ptr() == place
    assert memory.empty("b", LARGE, like).data_ptr() != place, "another purpose"


def test_memory_stays_with_views_storages_and_saved_tensors() -> None:
    memory, like = fresh(), torch.empty(0)
    taken = memory.empty("a", LARGE, like)
    place, view = taken.data_ptr(), taken[3:5]
    del taken
    assert memory.empty("a", LARGE, like).data_ptr() != place
    storage = view.untyped_storage()
    del view
    assert memory.empty("a", LARGE, like).data_ptr() != place
    del storage
    assert memory.empty("a", LARGE, like).data_ptr() == place
    weight = torch.ones(LARGE, requires_grad=True)
    saved = memory.empty("s", LARGE, like).fill_(3)
    place, product = saved.data_ptr(), weight * saved
    del saved
    memory.empty("s", LARGE, like).fill_(9)
    product.sum().backward()
    assert float(weight.grad.min()) == 3
    assert place in [x.data_ptr() for x in [memory.empty("s", LARGE, like) for _ in range(2)]]


@given(st.lists(st.tuples(st.integers(0, 2), st.integers(1, 5), st.booleans()), max_size=40))
@settings(max_examples=40, deadline=None)
def test_no_two_owners(requests: list[tuple[int, int, bool]]) -> None:
    memory, like, held = fresh(), torch.empty(0), []
    for number, (purpose, size, drop) in enumerate(requests):
        held.append((number, memory.empty(str(purpose), (size, SMALL_BYTES // 8),
                                          like).fill_(number)))
        if drop:
            held.pop(0)
        assert all(bool((tensor == value).all()) for value, tensor in held)


def test_what_is_not_needed_for_long_is_given_back() -> None:
    memory, like = fresh(), torch.empty(0)
    held = [memory.empty("a", (64, SMALL_BYTES), like) for _ in range(3)]
    before = memory.kept_bytes()
    for _ in range(2 * PATIENCE):
        memory.empty("a", LARGE, like)
    assert memory.kept_bytes() > before, "in use"
    held.clear()
    for _ in range(PATIENCE - 1):
        memory.empty("a", LARGE, like)
    assert memory.kept_bytes() > before, "not for long"
    for _ in range(2):
        memory.empty("a", LARGE, like)
    assert memory.kept_bytes() < before / 64


def test_growing_requests_do_not_leave_the_smaller_memory_behind() -> None:
    memory, like = fresh(), torch.empty(0)
    for rows in range(100, 600, 20):
        memory.empty("a", (rows, SMALL_BYTES // 64), like)
    assert memory.kept_bytes() < 1.5 * 600 * SMALL_BYTES // 16


def test_a_step_that_uses_each_once_loses_none() -> None:
    """Forward passes of many layers keep what their backward passes free in reverse."""
    memory, like, places = fresh(), torch.empty(0), []
    for _ in range(3):
        held = [memory.empty("a", LARGE, like) for _ in range(3 * PATIENCE)]
        places.append({x.data_ptr() for x in held})
        while held:
            held.pop()
    assert places[0] == places[1] == places[2]


def test_copies_start_without_state() -> None:
    memory = Workspace()
    state = memory.state(dict)
    state["a"] = 1
    assert memory.state(dict) is state
    for copied in (copy.deepcopy(memory), pickle.loads(pickle.dumps(memory))):
        assert copied.state(dict) == {} and copied.pool is memory.pool


def layers(number: int) -> torch.nn.Sequential:
    """Blocks of experts."""
    class Block(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.moe = layer_and_input()[0]

        def forward(self, x_TD: torch.Tensor) -> torch.Tensor:
            return self.moe(x_TD).output

    torch.manual_seed(0)
    return torch.nn.Sequential(*(Block() for _ in range(number)))


def kept_by(number: int, policy: str | None) -> dict[str, int]:
    """Bytes by purpose after two steps of so many layers (policy None: without gradients)."""
    model, x = layers(number), layer_and_input()[1]
    pool = MemoryPool()
    for module in model:
        module.moe.experts.memory.pool = pool
    activations = None if policy is None else manage(list(model), policy, smallest=0)
    for _ in range(2):
        with torch.set_grad_enabled(policy is not None):
            y = model(x)
        if activations is not None:
            y.square().mean().backward()
            model.zero_grad()
            activations.after_step()
    if activations is not None:
        activations.release()
    return {name: size for name, size in pool.kept_bytes().items() if "gradient" not in name}


def test_layers_hold_one_worst_case() -> None:
    """Without gradients, and where activations are recomputed, all layers together keep what one
    does; where they are kept, what is saved for backward is there for each.
    """
    for policy in (None, "recompute"):
        one, four = kept_by(1, policy), kept_by(4, policy)
        assert one and sum(four.values()) <= 1.2 * sum(one.values()), (policy, one, four)
    assert sum(kept_by(4, "keep").values()) > 2 * sum(kept_by(1, "keep").values())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", ["ffn", "gated_ffn"])
def test_memory_is_free_without_the_garbage_collector(kind: str, dtype: torch.dtype) -> None:
    """A cycle of references would keep a step's memory until the collector runs."""
    layer = MoELayer(64, num_experts=8, experts={"kind": kind, "hidden_dim": 128,
                                                 "compute": "fused"}).to(dtype)
    layer.experts.memory.pool = pool = MemoryPool()
    x_TD, kept = torch.randn(600, 64, dtype=dtype, requires_grad=True), []
    gc.disable()
    try:
        for _ in range(6):
            layer(x_TD).output.sum().backward()
            layer.zero_grad()
            kept.append(sum(pool.kept_bytes().values()))
    finally:
        gc.enable()
    assert kept[1] > 0 and kept[1:] == kept[1:2] * 5


def test_models_of_a_process_share_their_memory() -> None:
    first, second = layers(1), layers(1)
    assert first[0].moe.experts.memory.pool is second[0].moe.experts.memory.pool


def layer_and_input() -> tuple[MoELayer, torch.Tensor]:
    """Large enough for the workspace to be used."""
    layer = MoELayer(64, LocalComm(), num_experts=8, experts={"hidden_dim": 128})
    return layer, torch.randn(600, 64)


def test_gradients_that_are_kept_do_not_change() -> None:
    layer, x = layer_and_input()
    layer(x).output.sum().backward()
    kept = layer.experts.w_in_LDF.grad
    copied = kept.clone()
    for parameter in layer.parameters():
        parameter.grad = None
    layer(-2 * x).output.square().sum().backward()
    assert torch.equal(kept, copied) and not torch.equal(layer.experts.w_in_LDF.grad, copied)
    assert layer.experts.memory.kept_bytes() > 0


def test_gradients_accumulate() -> None:
    layer, x = layer_and_input()
    for _ in range(3):
        layer(x).output.sum().backward()
    tripled = layer.experts.w_out_LFD.grad.clone()
    layer.zero_grad()
    layer(x).output.sum().backward()
    torch.testing.assert_close(tripled, 3 * layer.experts.w_out_LFD.grad)


def test_twice_in_one_graph_and_backward_twice() -> None:
    layer, x = layer_and_input()
    weights = list(layer.parameters())
    first, second = layer(x).output, layer(x * 0.5).output
    both = torch.autograd.grad((first * second).sum(), weights, retain_graph=True)
    again = torch.autograd.grad((first * second).sum(), weights)
    slow = MoELayer(64, LocalComm(), num_experts=8, experts={"hidden_dim": 128, "compute": "loop"})
    slow.load_state_dict(layer.state_dict())
    want = torch.autograd.grad((slow(x).output * slow(x * 0.5).output).sum(),
                               list(slow.parameters()))
    for a, b, c in zip(both, again, want, strict=True):
        assert torch.equal(a, b)
        torch.testing.assert_close(a, c, rtol=1e-4, atol=1e-4 * float(c.abs().max()))


def test_threads_share_a_layer() -> None:
    layer, x = layer_and_input()
    with torch.no_grad():
        want = [layer(x * scale).output for scale in range(1, 5)]
    wrong: list[int] = []

    def work(scale: int) -> None:
        with torch.no_grad():
            for _ in range(10):
                if not torch.equal(layer(x * scale).output, want[scale - 1]):
                    wrong.append(scale)

    threads = [threading.Thread(target=work, args=(scale,)) for scale in range(1, 5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_what_other_processes_read_stays_theirs() -> None:
    memory, like = fresh(), torch.empty(0)
    shared = memory.empty("a", LARGE, like).share_memory_()
    place = shared.data_ptr()
    del shared
    again = memory.empty("a", LARGE, like)
    assert not again.is_shared() and again.data_ptr() != place


def test_a_purpose_that_nothing_asks_for_gives_its_memory_back() -> None:
    memory, like = fresh(), torch.empty(0)
    kept = memory.empty("kept", LARGE, like)
    memory.empty("old", LARGE, like)
    for _ in range(3 * SWEEP):
        memory.empty("new", LARGE, like)
    assert memory.pool.kept_bytes().keys() == {"kept", "new"}
    assert kept.shape == LARGE


def test_a_fork_has_locks_of_its_own() -> None:
    memory, like = Workspace(), torch.empty(0)
    with memory.pool._lock:  # as where another thread asks for memory
        child = os.fork()
        if not child:
            memory.empty("a", LARGE, like)
            Workspace()
            os._exit(0)
    assert os.waitpid(child, 0)[1] == 0

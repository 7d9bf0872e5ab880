"""Memory is used again when it is not in use any more, and never before."""

from __future__ import annotations

import copy
import pickle
import threading

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from moe_plugin.comm import LocalComm
from moe_plugin.config import from_dict
from moe_plugin.kernels.workspace import SMALL_BYTES, Workspace
from moe_plugin.layer import MoELayer

LARGE = (SMALL_BYTES // 4, 2)  # float32: twice the smallest size that is kept


def test_freed_memory_comes_back() -> None:
    memory, like = Workspace(), torch.empty(0)
    first = memory.empty("a", LARGE, like)
    place = first.data_ptr()
    assert memory.empty("a", LARGE, like).data_ptr() != place, "in use"
    del first
    assert memory.empty("a", LARGE, like).data_ptr() == place
    assert memory.empty("b", LARGE, like).data_ptr() != place, "another purpose"


def test_memory_stays_with_views_storages_and_saved_tensors() -> None:
    memory, like = Workspace(), torch.empty(0)
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
    assert place in [s.data_ptr() for s in memory._kept["s", torch.float32]]


@given(st.lists(st.tuples(st.integers(0, 2), st.integers(1, 5), st.booleans()), max_size=40))
@settings(max_examples=40, deadline=None)
def test_no_two_owners(requests: list[tuple[int, int, bool]]) -> None:
    memory, like, held = Workspace(), torch.empty(0), []
    for number, (purpose, size, drop) in enumerate(requests):
        held.append((number, memory.empty(str(purpose), (size, SMALL_BYTES // 8),
                                          like).fill_(number)))
        if drop:
            held.pop(0)
        assert all(bool((tensor == value).all()) for value, tensor in held)


def test_what_is_much_too_large_is_given_back() -> None:
    memory, like = Workspace(), torch.empty(0)
    memory.empty("a", (64, SMALL_BYTES), like)
    before = memory.kept_bytes()
    memory.empty("a", LARGE, like)
    assert memory.kept_bytes() < before / 8


def test_copies_start_empty() -> None:
    memory = Workspace()
    memory.empty("a", LARGE, torch.empty(0))
    assert copy.deepcopy(memory).kept_bytes() == 0 == pickle.loads(
        pickle.dumps(memory)).kept_bytes()


def layer_and_input() -> tuple[MoELayer, torch.Tensor]:
    """Large enough for the workspace to be used."""
    layer = MoELayer(from_dict({"model_dim": 64, "num_experts": 8, "experts": {"hidden_dim": 128}}),
                     LocalComm())
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
    slow = MoELayer(
        from_dict(
            {"model_dim": 64, "num_experts": 8, "experts": {"hidden_dim": 128, "compute": "loop"}}),
        LocalComm())
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

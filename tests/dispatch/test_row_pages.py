"""Pages for what backward needs: the same gradients, less memory, and nothing lost in silence."""

from __future__ import annotations

import copy
import gc
import pickle

import pytest
import torch
import torch._dynamo
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint

from moe_plugin.comm import Comm, LocalComm, run_simulated
from moe_plugin.config import DispatchConfig, from_dict
from moe_plugin.dispatch import row_pages as stash_module
from moe_plugin.dispatch.row_pages import PagedStash, PageRing, Pages
from moe_plugin.dispatch.rows_limit import RowsOverflow, overflowed
from moe_plugin.kernels.groups import read_pages, write_pages
from moe_plugin.layer import MoELayer
from moe_plugin.training.resilience.skipped_steps import limits_of, until_rows_fit
from tests.exactness.harness import RankResult, compare, config_of, loaded, reference, run_layer
from tests.oracle import Case
from tests.seeds import seeded

SMALL_PAGE = 64


@pytest.fixture(autouse=True)
def small_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 64 elements, so that small layers have several."""
    monkeypatch.setattr(stash_module, "PAGE", SMALL_PAGE)
    monkeypatch.setattr(stash_module, "MIB", 1024)  # settings in KiB


def make(case: Case, comm: Comm, **settings: object) -> MoELayer:
    config = config_of(case, dispatch__name="bounded", parallel__mode="fixed",
                       experts__compute="kernels", **{f"dispatch__{name}": value
                                                      for name, value in settings.items()})
    return loaded(case, comm, config)


def stash_of(layer: MoELayer) -> PagedStash:
    return layer.routed_experts.layouts.stash


def check_free(stash: PagedStash) -> None:
    """No page is in use, and every slot is free exactly once."""
    for pages in stash.made:
        pages.settle()
        assert int(pages.in_use) == 0
        for ring in pages.rings:
            assert int(ring.tail - ring.head) == ring.slots
            kept = sorted(ring.free_S[:ring.slots].tolist())
            assert kept == list(range(ring.first, ring.first + ring.slots))


@pytest.mark.parametrize("compute", ["kernels", "grouped", "loop"])
@pytest.mark.parametrize("world, experts, skew, pieces, kind", [
    (2, 4, 0.0, 1, "ffn"), (2, 8, 3.0, 3, "gated_ffn"), (4, 4, 3.0, 2, "ffn"),
    (4, 2, 0.0, 1, "gated_ffn")
])
def test_exact(world: int, experts: int, skew: float, pieces: int, kind: str,
               compute: str) -> None:
    case = Case(world, experts, 2, [6, 0, 5, 9][:world], None, None, kind, skew=skew)

    def rank(comm: Comm) -> RankResult:
        config = config_of(case, dispatch__name="bounded", dispatch__stash_mib=64.0,
                           parallel__mode="fixed", parallel__d=pieces,
                           experts__compute=compute)
        layer = loaded(case, comm, config)
        result = run_layer(case, layer)
        assert not overflowed(limits_of([layer]), comm)
        check_free(stash_of(layer))
        [pages] = stash_of(layer).made
        used.append(int(pages.rings[0].head))
        return result

    used: list[int] = []
    compare(case, run_simulated(world, rank), reference(case))
    assert max(used) > 0, "nothing went to pages"


class Live(TorchDispatchMode):
    """Bytes of what operations made and what still exists."""

    def __init__(self) -> None:
        super().__init__()
        self.made: dict[int, tuple[StorageWeakRef, int]] = {}

    def now(self) -> int:
        return sum(size for made, size in self.made.values() if not made.expired())

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # noqa: ANN001, ANN204
        out = func(*args, **(kwargs or {}))
        for x in tree_leaves(out):
            if isinstance(x, Tensor):
                storage = x.untyped_storage()
                self.made[storage._cdata] = StorageWeakRef(storage), storage.nbytes()
        return out


def kept_by_layers(comm: Comm, stash_kib: float, layers: int, **experts: object) -> tuple[int, int]:
    """(bytes that exist after forward of so many layers, of these in pages)."""
    config = from_dict({
        "model_dim": 32, "num_experts": 8, "losses": {}, "experts": {
            "hidden_dim": 64, **experts
        }, "dispatch": {"name": "bounded", "max_tokens": 64, "stash_mib": stash_kib},
        "parallel": "fixed"
    })
    with seeded(comm.rank):
        model = torch.nn.Sequential(*(MoELayer(config, comm) for _ in range(layers)))
        x = torch.randn(64, 32, requires_grad=True)
    for layer in model:
        layer.ddp_check.passed = True  # it looks at parameters, which are not counted here
    with Live() as live:
        for layer in model:
            x = layer(x).output
        gc.collect()
        in_pages = 0 if not stash_kib else sum(
            int(pages.in_use) * SMALL_PAGE * 4 for pages in stash_of(model[0]).made)
        return live.now(), in_pages


@pytest.mark.parametrize("experts", [
    {"compute": "kernels"}, {"compute": "loop"}, {"compute": "grouped"},
    {"compute": "loop", "recompute_activation": True},
    {"compute": "grouped", "activation": "silu", "kind": "gated_ffn"},
], ids=str)
def test_memory_is_one_buffer_and_what_is_used(experts: dict[str, object]) -> None:
    """Four ranks, rows bounded by the worst case: a layer more costs what is used, not the bound.
    """
    def rank(comm: Comm) -> tuple[int, ...]:
        grown = []
        for stash_kib in (0, 2400):
            (few, _), (many, in_pages) = (kept_by_layers(comm, stash_kib, n, **experts)
                                          for n in (2, 6))
            grown.append((many - few) // 4)
        return *grown, in_pages // 6

    worst = 4 * 128 * (32 + 64) * 4  # rows of the bound, input and value before the activation
    for plain, paged, used in run_simulated(4, rank):
        assert plain > worst  # of every layer
        # indices of the rows of the bound, the rows of this rank's choices, outputs, routing
        assert paged < worst / 2
        assert used < (plain - paged) / 2
        assert plain - paged > worst


def small(tokens: list[int]) -> Case:
    return Case(len(tokens), 2, 2, tokens, None, None)


def test_rows_go_to_the_host() -> None:
    case = small([12, 12])

    def rank(comm: Comm) -> RankResult:
        layer = make(case, comm, stash_mib=1.1, stash_host_mib=64.0)
        result = run_layer(case, layer)
        [pages] = stash_of(layer).made
        assert int(pages.rings[1].head) > 0 and int(pages.lost) == 0
        assert not overflowed(limits_of([layer]), comm)
        check_free(stash_of(layer))
        return result

    compare(case, run_simulated(2, rank), reference(case))


def test_pages_that_run_out_are_an_error_on_all_ranks() -> None:
    case = small([12, 12])

    def rank(comm: Comm) -> str:
        # one rank alone has too few; the other learns it when the step asks
        layer = make(case, comm, stash_mib=64.0 if comm.rank else 1.1)
        result = run_layer(case, layer)
        assert bool(result.grads["w_in"].isnan().any()) == (comm.rank == 0)
        with pytest.raises(RowsOverflow, match="took .* bytes, more than dispatch.stash_mib") as e:
            overflowed(limits_of([layer]), comm)
        return str(e.value)

    assert len(set(run_simulated(2, rank))) == 1


def test_a_step_is_repeated_with_more_pages() -> None:
    case = small([12, 12])

    def rank(comm: Comm) -> tuple[int, RankResult]:
        layer = make(case, comm, stash_mib=64.0 if comm.rank else 1.1, on_overflow="repeat")
        steps = []

        def step() -> RankResult:
            steps.append(len(steps))
            return run_layer(case, layer)

        until_rows_fit(layer, step, comm)
        result = until_rows_fit(layer, step, comm)
        check_free(stash_of(layer))
        return len(steps), result

    steps, results = zip(*run_simulated(2, rank), strict=True)
    assert steps == (3, 3), "one repetition of the first step alone, on both"
    compare(case, list(results), reference(case))


def two_layers(comm: Comm) -> list[MoELayer]:
    """Equal layers, without pages and with them. Ranks share a random generator."""
    made = [
        MoELayer(from_dict({
            "model_dim": 8, "num_experts": 4, "parallel": "fixed",
            "experts": {"hidden_dim": 16, "compute": "kernels"},
            "dispatch": {"name": "bounded", "max_tokens": 10, "stash_mib": stash_kib}
        }), comm) for stash_kib in (0, 64)
    ]
    made[1].load_state_dict(made[0].state_dict())
    return made


def inputs(comm: Comm, number: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(comm.rank)
    return [torch.randn(10, 8, generator=generator) for _ in range(number)]


def check_alike(layers: list[MoELayer], comm: Comm, xs: list[Tensor | None]) -> None:
    """Gradients of both layers, and of their inputs; all pages are free again."""
    assert not overflowed(limits_of(layers), comm)
    [pages] = stash_of(layers[1]).made
    assert int(pages.rings[0].head) > 0
    check_free(stash_of(layers[1]))
    torch.testing.assert_close(*xs)
    for mine, theirs in zip(*(layer.parameters() for layer in layers), strict=True):
        torch.testing.assert_close(mine.grad, theirs.grad)


def test_backward_in_any_order_twice_or_never() -> None:
    """Micro-batches as a pipeline has them, a graph that is kept, and one that is dropped."""
    def rank(comm: Comm) -> None:
        layers, alive = two_layers(comm), []
        for layer in layers:
            xs = inputs(comm, 4)
            a, b = layer(xs[0]).output.square().sum(), layer(xs[1]).output.square().sum()
            a.backward(retain_graph=True)
            c = layer(xs[2]).output.square().sum()
            b.backward()
            layer(xs[3])
            a.backward()
            c.backward()
            alive += [a, b, c]
        check_alike(layers, comm, [a, a])  # though the losses are still there

    run_simulated(2, rank)


@pytest.mark.parametrize("reentrant", [False, True])
def test_under_activation_checkpointing(reentrant: bool) -> None:
    """Which keeps nothing: pages are used where the second forward pass is one of its own."""
    def rank(comm: Comm) -> None:
        layers, grads = two_layers(comm), []
        for layer in layers:
            [x] = inputs(comm, 1)
            x.requires_grad_()
            checkpoint(lambda x, layer=layer: layer(x).output, x,
                       use_reentrant=reentrant).square().sum().backward()
            grads.append(x.grad)
        if reentrant:
            check_alike(layers, comm, grads)
        else:
            torch.testing.assert_close(*grads)
            assert not stash_of(layers[1]).made

    run_simulated(2, rank)


def test_a_copied_or_pickled_layer_leaves_the_pages_alone() -> None:
    def rank(comm: Comm) -> None:
        layers = two_layers(comm)
        layers[1](inputs(comm, 1)[0]).output.sum().backward()
        assert copy.deepcopy(stash_of(layers[1])) is stash_of(layers[1])
        again = pickle.loads(pickle.dumps(stash_of(layers[1])))
        assert not again.made

    run_simulated(2, rank)


def test_operations_are_one_graph() -> None:
    """As a CUDA graph needs them: nothing is read on the host, no shape depends on a value."""
    pages = Pages(8, 4, torch.zeros(0))

    def turn(x_N: Tensor, used: Tensor) -> tuple[Tensor, Tensor]:
        record_M, number, enough = pages.write(x_N, used)
        back_N = read_pages(record_M, pages.pages_SP, pages.host_SP, x_N.shape[0], enough)
        pages.free(record_M, number)
        return back_N, enough

    torch._dynamo.reset()
    compiled = torch.compile(turn, fullgraph=True, backend="aot_eager")
    with torch._dynamo.config.patch(error_on_recompile=True):
        for used in (300, 0, 700, 512, 300):
            x_N = torch.randn(700)
            back_N, enough = compiled(x_N, torch.tensor(used))
            assert bool(enough) is (used <= 512)  # 8 pages; 4 of the host are too few for more
            if enough:
                assert torch.equal(back_N[:used], x_N[:used])


@pytest.mark.parametrize("slots, on_host", [([2, 0, 5], False), ([7, 8, -1], True),
                                            ([-1, -1, -1], False)])
def test_pages_of_a_record(slots: list[int], on_host: bool) -> None:
    pages_SP, host_SP = torch.zeros(8, 4), torch.zeros(3 if on_host else 1, 4)
    record_M, x_N = torch.tensor(slots), torch.arange(10.0)
    write_pages(x_N, record_M, pages_SP, host_SP)
    back_N = read_pages(record_M, pages_SP, host_SP, 10, torch.tensor(True))
    for index, slot in enumerate(slots):
        if slot >= 0:
            part = slice(4 * index, min(10, 4 * index + 4))
            assert torch.equal(back_N[part], x_N[part])
            buffer = pages_SP[slot] if slot < 7 else host_SP[slot - 7]
            assert torch.equal(buffer[:part.stop - part.start], x_N[part])
    assert read_pages(record_M, pages_SP, host_SP, 10, torch.tensor(False)).isnan().all()


@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
def test_no_weight_is_taken_for_rows(dtype: torch.dtype | None) -> None:
    """One expert a rank, as wide as there are rows: its weights are as large as rows. With autocast
    so are their casts.
    """
    def rank(comm: Comm) -> None:
        layers = []
        for stash_kib in (0, 640):
            torch.manual_seed(0)
            layers.append(MoELayer(from_dict({
                "model_dim": 32, "num_experts": 2, "parallel": "fixed", "losses": {},
                "experts": {"hidden_dim": 32, "compute": "loop"}, "router": {"top_k": 1},
                "dispatch": {"name": "bounded", "max_tokens": 16, "stash_mib": stash_kib}
            }), comm))
        layers[1].load_state_dict(layers[0].state_dict())
        outputs = []
        for layer in layers:
            x = torch.randn(5, 32, generator=torch.Generator().manual_seed(comm.rank))
            with torch.autocast("cpu", dtype, enabled=dtype is not None):
                y = layer(x).output
            y.float().square().sum().backward()
            outputs.append(y)
        torch.testing.assert_close(*outputs)
        for mine, theirs in zip(*(layer.parameters() for layer in layers), strict=True):
            torch.testing.assert_close(mine.grad, theirs.grad)
        assert any(int(p.rings[0].head) for p in stash_of(layers[1]).made)

    run_simulated(2, rank)


class Asker:
    """Something that lives as long as a layer."""


def test_settings_follow_the_layers_that_exist() -> None:
    stash, like = PagedStash(), torch.zeros(0)
    small, large = Asker(), Asker()
    stash.ask(small, DispatchConfig(name="bounded", stash_mib=1.0, on_overflow="repeat"))
    before = stash.pages(like)
    kept = stash.keep(torch.arange(64.0)[:, None], torch.tensor([64]))
    stash.ask(large, DispatchConfig(name="bounded", stash_mib=4.0, stash_host_mib=2.0))
    pages = stash.pages(like)
    assert [[ring.slots for ring in p.rings] for p in (before, pages)] == [[4, 0], [16, 8]]
    assert torch.equal(kept.rows()[:, 0], torch.arange(64.0)) and stash.repeats
    del small
    gc.collect()
    assert not stash.repeats and stash.bytes == 4096
    stash.grow(10_000)
    assert stash.bytes == 12_500
    del large
    gc.collect()
    last = Asker()
    stash.ask(last, DispatchConfig(name="bounded", stash_mib=2.0))
    assert (stash.bytes, stash.host_bytes) == (2048, 0)
    assert stash.pages(like).rings[0].slots == 8


@pytest.mark.fast
def test_a_ring_gives_all_of_the_pages_or_none() -> None:
    ring, index_M = PageRing(3, 10, torch.device("cpu")), torch.arange(2)

    def take(number: int, wanted: bool = True) -> list[int]:
        return ring.take(torch.tensor(number), index_M, torch.tensor(wanted))[0].tolist()

    first, second = take(2), take(2)
    assert first == [10, 11] and second == [-1, -1] and take(1, False) == [-1, -1]
    assert take(1) == [12, -1] and take(1) == [-1, -1]
    ring.give(torch.tensor(first), index_M)
    assert take(2) == [10, 11] and take(1) == [-1, -1]


@pytest.mark.fast
def test_rows_that_were_lost_are_still_known_after_the_pages_have_grown() -> None:
    """A second layer with larger pages is built between an overflow and the check."""
    stash, first, second, like = PagedStash(), Comm, LocalComm, torch.zeros(1)
    stash.ask(first, DispatchConfig(stash_mib=1.0))
    small = stash.pages(like)
    small.lost.fill_(1)
    small.most.fill_(7)
    stash.ask(second, DispatchConfig(stash_mib=2.0))
    large = stash.pages(like)
    assert large is not small and (int(large.lost), int(large.most)) == (1, 7)


def test_a_copied_layout_asks_for_pages_too() -> None:
    def rank(comm: Comm) -> None:
        available = two_layers(comm)[1].routed_experts.layouts
        again = copy.copy(available)
        stash = available.stash
        del available
        gc.collect()
        assert again.stash is stash and stash.bytes == 64 * 1024

    run_simulated(2, rank)


@pytest.mark.parametrize("changed, said", [
    *(({"experts": {"compute": name}},
       f"experts.compute='{name}'.*Use one of auto, kernels, grouped, loop")
      for name in ("batched", "fused")),
    ({"experts": {"dropout": 0.1}}, "experts.dropout=0.1.*Use 0"),
    ({"parallel": {"r": 0}}, "parallel.r=0.*Use 1, or dispatch.stash_mib=0"),
])
def test_what_keeps_rows_out_of_pages_is_refused(changed: dict, said: str) -> None:
    config = from_dict({"model_dim": 8, "num_experts": 4, **changed,
                        "dispatch": {"name": "bounded", "stash_mib": 1.0}})
    with pytest.raises(ValueError, match=f"dispatch.stash_mib=1.0 cannot be combined with {said}"):
        run_simulated(2, lambda comm: MoELayer(config, comm))
    MoELayer(config, LocalComm())  # one rank has no filler to save


def test_custom_experts_are_refused() -> None:
    config = from_dict({"model_dim": 8, "num_experts": 2,
                        "dispatch": {"name": "bounded", "stash_mib": 1.0}})
    with pytest.raises(ValueError, match="cannot be combined with custom experts"):
        run_simulated(2, lambda comm: MoELayer(
            config, comm, experts=lambda index: torch.nn.Linear(8, 8)))


def test_layouts_to_choose_from_leave_gathered_parameters_out() -> None:
    def rank(comm: Comm) -> list[list[int]]:
        return [layer.routed_experts.layouts.legal() for layer in two_layers(comm)]

    assert run_simulated(2, rank) == [[[0, 1], [1]]] * 2

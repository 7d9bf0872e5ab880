"""Dispatchers that send tokens, over stand-ins with their packages' published interfaces; refusals
without these.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from moe_plugin import MoELayer, TorchComm
from moe_plugin.comm import LocalComm, run_simulated
from moe_plugin.config import from_dict
from moe_plugin.dispatch import dispatchers, token_exchange
from moe_plugin.dispatch.token_exchange import STEP, Size, TokenExchangePlan, done
from tests.combinations import Cell, all_pairs, name_of
from tests.distributed import run_gloo
from tests.exactness import cells
from tests.exactness.harness import RankResult, compare, naming, reference, run_rank

FAKE = str(Path(__file__).parents[1] / "fake_deepep")
NAMES = ["deepep", "deepep_v2", "hybridep", "nccl_ep"]


def _cells(dispatch: str) -> list[Cell]:
    traits = dispatchers.get(dispatch).traits
    return all_pairs({
        "dispatch": [dispatch],
        "size": [cells.Size(2, 1), cells.Size(2, 8), cells.Size(2, 4, 2)],
        "pieces": [(1, 0), (2, 0), (1, 3)] if traits.supports_pieces else [(1, 0)],
        "cut": traits.piece_axes,
        "factor": [None, 0.5, 0.0], "tokens": ["uneven", "padding", "none"],
        "k": [1, 2, 4], "kind": ["ffn", "gated_ffn"], "compute": ["auto"],
        "all_to_all": ["linear"], "collectives": ["native"], "bias": [True, False],
        "activation": ["gelu"],
        "score": ["softmax"], "normalize": ["before_drop"], "prioritized": [False],
        "weights_first": [False, True], "dropout": [0.0],
    })


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.syspath_prepend(FAKE)
    monkeypatch.setattr(token_exchange, "DEVICES", ("cpu",))
    monkeypatch.setattr(token_exchange, "DTYPES", (torch.bfloat16, torch.float64))
    yield
    for name in [*sys.modules]:
        if name.split(".")[0] in ("deep_ep", "nccl", "tokens_by_rank"):
            del sys.modules[name]


def _run_cells(some: list[Cell]) -> list[RankResult]:
    comm, found = TorchComm(), []
    for cell in some:
        with naming(name_of(cell)):
            found.append(run_rank(cells.case_of(cell), comm, cells.settings_of(cell)))
    return found


@pytest.mark.distributed
def test_cells(installed: None) -> None:
    """What is sent without being waited for is NaN in the stand-ins until somebody waits."""
    some = [cell for dispatch in NAMES for cell in _cells(dispatch)]
    by_rank = run_gloo(2, _run_cells, some)
    for index, cell in enumerate(some):
        with naming(name_of(cell)):
            # gate weights travel in float32
            compare(cells.case_of(cell), [results[index] for results in by_rank],
                    reference(cells.case_of(cell)), rtol=1e-5, atol=1e-6)


def _one_buffer() -> tuple[int, int, int, list[int]]:
    import deep_ep

    config = from_dict({"model_dim": 16, "num_experts": 4, "dispatch": {"name": "deepep"}})
    layers = [MoELayer(config, TorchComm(), dtype=torch.bfloat16) for _ in range(2)]
    x = torch.randn(6, 16, dtype=torch.bfloat16, requires_grad=True)
    out = layers[1](layers[0](x).output)
    out.output.sum().backward()
    wide = MoELayer(from_dict({"model_dim": 32, "num_experts": 4, "dispatch": {"name": "deepep"}}),
                    TorchComm(), dtype=torch.bfloat16)
    wide(torch.randn(3, 32, dtype=torch.bfloat16))
    first = deep_ep.Buffer.made[0]
    return (len(deep_ep.Buffer.made), first.dispatched, first.combined,
            [buffer.num_nvl_bytes for buffer in deep_ep.Buffer.made], out.stats.rows)


@pytest.mark.distributed
def test_layers_share_a_buffer_and_gradients_travel_by_it(installed: None) -> None:
    """Forward a dispatch and a combine a layer, backward the same; a wider layer makes another."""
    results = run_gloo(2, _one_buffer)
    for made, dispatched, combined, sizes, _ in results:
        assert (made, dispatched, combined) == (2, 4, 4)
        assert sizes == [16 * 2 * 2 * 256, 32 * 2 * 2 * 256]
    assert sum(rows for *_, rows in results) == 2 * 6 * 2  # top-2 of both ranks' tokens


@pytest.mark.parametrize(("dispatch", "remedy"), [
    ("deepep", "package deep_ep is not installed. Install DeepEP 1.x"),
    ("deepep_v2", "package deep_ep is not installed. Install DeepEP 2.1"),
    ("hybridep", "package deep_ep is not installed. Install HybridEP"),
    ("nccl_ep", "package nccl is .*. Install nccl4py 0.3.1 or newer")])
def test_without_the_package_it_is_refused_with_the_remedy(dispatch: str, remedy: str) -> None:
    assert dispatch not in dispatchers.names()
    config: Any = from_dict({"model_dim": 16, "num_experts": 4, "dispatch": {"name": dispatch}})
    with pytest.raises(ValueError, match=f"{dispatch}.*{remedy}.*'ragged'"):
        MoELayer(config, LocalComm())


def test_versions_are_told_apart_without_an_import(tmp_path: Path, monkeypatch: pytest.MonkeyPatch
                                                   ) -> None:
    package = tmp_path / "deep_ep"
    (package / "buffers").mkdir(parents=True)
    (package / "__init__.py").write_text("raise ImportError('needs a GPU')")
    (package / "buffers" / "elastic.py").touch()
    monkeypatch.syspath_prepend(str(tmp_path))
    assert "deepep_v2" in dispatchers.names() and "deepep" not in dispatchers.names()
    config: Any = from_dict({"model_dim": 16, "num_experts": 4, "dispatch": {"name": "hybridep"}})
    with pytest.raises(ValueError, match="deep_ep is of another version or branch: no hybrid_ep"):
        MoELayer(config, LocalComm())


@pytest.mark.parametrize("dispatch", NAMES)
def test_what_it_does_not_take_is_named(dispatch: str, installed: None,
                                        monkeypatch: pytest.MonkeyPatch) -> None:
    config = from_dict({"model_dim": 16, "num_experts": 4, "dispatch": {"name": dispatch}})
    with pytest.raises(ValueError, match="is not a torch.distributed group"):
        run_simulated(2, lambda comm: MoELayer(config, comm))
    monkeypatch.setattr(token_exchange, "DEVICES", ("cuda",))
    dispatcher = object.__new__(dispatchers.get(dispatch))
    with pytest.raises(ValueError, match="float32 on cpu, only torch.bfloat16 on cuda"):
        dispatcher.dispatch(torch.zeros(2, 16), None, None)


def _refused(dispatch: str) -> str:
    config = from_dict({"model_dim": 16, "num_experts": 4, "dispatch": {"name": dispatch},
                        "parallel": {"d": 2}})
    try:
        MoELayer(config, TorchComm(), dtype=torch.bfloat16)
    except ValueError as error:
        return str(error)
    return ""


@pytest.mark.distributed
def test_pieces_are_refused_where_nothing_could_overlap(installed: None) -> None:
    for dispatch in ("hybridep", "nccl_ep"):
        [said, _] = run_gloo(2, _refused, dispatch)
        assert f"dispatch.name='{dispatch}', which cannot divide its rows into pieces" in said
    assert run_gloo(2, _refused, "deepep_v2") == ["", ""]


def _buffers_of(dispatch: str) -> tuple[int, int]:
    """(buffers after three calls, of which the second has most tokens; handles that were made)"""
    import nccl.ep
    from deep_ep import ElasticBuffer

    groups: list[Any] = []
    create = nccl.ep.Group.create
    nccl.ep.Group.create = lambda *a: groups.append(create(*a)) or groups[-1]
    config = from_dict({"model_dim": 16, "num_experts": 4, "dispatch": {"name": dispatch}})
    comm = TorchComm()
    layer = MoELayer(config, comm, dtype=torch.bfloat16)
    for tokens in (6, 100 * comm.rank, 70):
        x = torch.randn(tokens, 16, dtype=torch.bfloat16, requires_grad=True)
        layer(x).output.sum().backward()
    return len(ElasticBuffer.made) + len(groups), sum(group.handles for group in groups)


@pytest.mark.distributed
def test_buffers_grow_on_all_ranks_and_handles_serve_again(installed: None) -> None:
    assert run_gloo(2, _buffers_of, "deepep_v2") == [(2, 0)] * 2
    assert run_gloo(2, _buffers_of, "nccl_ep") == [(2, 2)] * 2


@pytest.mark.fast
def test_gradients_are_sent_back_as_the_package_reads_memory() -> None:
    """Autograd may give a gradient whose elements lie in another order, or are all one element."""
    got: list[torch.Tensor] = []

    def send_back(grad_RD: torch.Tensor, _: object, grad_RK: torch.Tensor) -> tuple[Any, ...]:
        got.extend((grad_RD, grad_RK))
        return grad_RD, grad_RK, done

    call = SimpleNamespace(exchange=SimpleNamespace(send_back=send_back), handle=None)
    with torch.no_grad():
        token_exchange._Send.backward(call, torch.ones(()).expand(3, 4), torch.ones(2, 3).t(), None)
    assert [x.shape for x in got] == [(3, 4), (3, 2)] and all(x.is_contiguous() for x in got)


@pytest.mark.fast
@pytest.mark.parametrize(("most", "tokens"), [
    (0, STEP), (2 * STEP, STEP), (2 * STEP + 1, 2 * STEP)])
def test_buffers_have_room_for_a_piece_in_steps(most: int, tokens: int,
                                                monkeypatch: pytest.MonkeyPatch) -> None:
    sizes: list[Size] = []

    class Sized(Exception):
        """The buffers would be made now."""

    def make(kind: object, comm: object, size: Size) -> None:
        sizes.append(size)
        raise Sized

    monkeypatch.setattr(token_exchange, "exchange_of", make)
    monkeypatch.setattr(token_exchange, "DEVICES", ("cpu",))
    dispatcher = SimpleNamespace(
        name="hybridep", overlap=SimpleNamespace(pieces=2), exchange=SimpleNamespace(agrees=True),
        placement=SimpleNamespace(comm=None, virtual=4))
    plan = TokenExchangePlan(torch.zeros(5, 2, dtype=torch.int64), torch.ones(5, 2), most)
    with pytest.raises(Sized):
        token_exchange.TokenDispatcher.dispatch(
            dispatcher, torch.zeros(5, 8, dtype=torch.bfloat16), plan, None)
    assert sizes[0].tokens == tokens

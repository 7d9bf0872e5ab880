"""`parallel.prefill`: evaluation cuts its rows by load, the same on all ranks, and says so."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from moe_plugin import MoELayer
from moe_plugin.comm import Comm, LocalComm, run_simulated
from moe_plugin.config import from_dict
from moe_plugin.planner.choice import LayoutChoice
from tests.seeds import seeded

pytestmark = pytest.mark.fast

# a slow processor: rows compute while others travel. Its matmuls take as long for few rows, and so
# pieces of whole experts suit it, or as long as their rows, or it waits for its weights
DEVICES = {"rows": {"flops": 1e10, "half_rows": 0, "launch_s": 0, "memory_bytes_s": 1e12},
           "experts": {"flops": 1e12, "half_rows": 0, "launch_s": 0, "memory_bytes_s": 2e9}}


def layer(comm: Comm, folder: Path, kind: str = "rows", **settings) -> MoELayer:
    path = folder / f"{kind}.yaml"
    if not path.exists():
        path.write_text("".join(f"{name}: {value}\n" for name, value in DEVICES[kind].items()))
    parallel = {"mode": "fixed", "prefill": True, **settings.pop("parallel", {})}
    config = from_dict({
        "model_dim": 16, "num_experts": 16, "router": {"top_k": 2}, "experts": {"hidden_dim": 128},
        "parallel": parallel, "tuner": {"device": str(path)}, **settings})
    with seeded(0):
        return MoELayer(config, comm, dtype=torch.float64).eval()


def seen(made: MoELayer, tokens: int, comm: Comm) -> tuple[str, torch.Tensor, torch.Tensor]:
    """(layout, output, the fixed layout's output)."""
    x = torch.randn(tokens, 16, dtype=torch.float64,
                    generator=torch.Generator().manual_seed(comm.rank))
    with torch.no_grad():
        out = made(x)
        return out.stats.layout, out.output, made(x, choice=LayoutChoice(r=1)).output


@pytest.fixture
def devices(tmp_path: Path) -> Path:
    for kind in DEVICES:
        layer(LocalComm(), tmp_path, kind)
    return tmp_path


@pytest.mark.parametrize("settings", [
    {}, {"dispatch": {"equal_tokens": True}}, {"experts": {"hidden_dim": 128, "store": "host"}},
    {"dispatch": {"name": "padded", "capacity_factor": 1.0}}], ids=str)
@pytest.mark.parametrize("kind", DEVICES)
def test_pieces_follow_the_load_and_change_no_result(kind: str, settings: dict,
                                                     devices: Path) -> None:
    equal = settings.get("dispatch", {}).get("equal_tokens", False)

    def rank(comm: Comm) -> list[str]:
        made, labels = layer(comm, devices, kind, **settings), []
        for tokens in (1, 4096, 1):
            # a rank with few tokens takes what suits the one with most
            mine = tokens if equal or comm.rank == 0 else 3
            label, output, whole = seen(made, mine, comm)
            torch.testing.assert_close(output, whole, rtol=1e-12, atol=1e-12)
            labels.append(label)
        return labels

    first, second = run_simulated(2, rank)
    assert first == second
    few, many, again = first
    assert few == again and " d=1 " in few
    if settings.get("dispatch", {}).get("name") == "padded" and kind == "experts":
        assert many == few  # it cuts along rows alone, which read the weights for each piece
    else:
        assert " d=1 " not in many and ("piece_axis=experts" in many) == (kind == "experts"), many


def test_only_evaluation_without_a_choice_is_cut(devices: Path) -> None:
    def rank(comm: Comm) -> list[str]:
        made, off = layer(comm, devices), layer(comm, devices, parallel={"prefill": False})
        x = torch.randn(4096, 16, dtype=torch.float64)
        return [made.train()(x).stats.layout, made.eval()(x, choice=LayoutChoice(r=1)).stats.layout,
                off(x).stats.layout, layer(comm, devices, parallel={"r": 0})(x).stats.layout]

    assert run_simulated(2, rank) == [["r=1 d=1 linear auto"] * 3 + ["r=0 d=1 linear auto"]] * 2
    alone = layer(LocalComm(), devices)
    assert " d=1 " in alone(torch.randn(4096, 16, dtype=torch.float64)).stats.layout


def test_of_a_tuned_layout_only_the_pieces_change(devices: Path) -> None:
    def rank(comm: Comm) -> str:
        made = layer(comm, devices, parallel={"mode": "predicted", "d": 2})
        return made(torch.randn(4096, 16, dtype=torch.float64)).stats.layout

    assert all(label.startswith("r=1 d=") and "d=2 " not in label
               for label in run_simulated(2, rank))


@pytest.mark.parametrize("settings, message", [
    ({"dispatch": {"name": "all_gather"}}, "combined with dispatch.name='all_gather'"),
    ({"parallel": {"spill": "least_loaded"}}, "combined with parallel.spill='least_loaded'")])
def test_what_does_not_fit_is_refused(settings: dict, message: str, devices: Path) -> None:
    def rank(comm: Comm) -> str:
        with pytest.raises(ValueError) as caught:
            layer(comm, devices, **settings)
        return str(caught.value)

    assert all(message in text for text in run_simulated(2, rank))

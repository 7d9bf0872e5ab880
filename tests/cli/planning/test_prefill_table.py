"""`moe-plugin plan --prefill`: pieces and kernel by prompt length."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml

from moe_plugin.cli.main import main
from moe_plugin.cli.planning.pipeline import prefill_table
from moe_plugin.planner.cluster import Cluster, load_cluster
from moe_plugin.planner.model import ModelShape
from moe_plugin.planner.once import GroupShape, all_to_all_s
from moe_plugin.planner.prefill import Kernel

pytestmark = pytest.mark.fast

CONFIGS = Path(__file__).parents[3] / "configs"
MODEL = ModelShape(layers=2, model_dim=64, ffn_dim=64, experts=8, top_k=2)
# 1 ms per call and 2 us per row, or 3 us per row: alike at 1 ms over 4 experts, 250 rows
PROFILE = {"large": Kernel(((0, 0.0), (8192, 8192 * 2e-6)), 1e-3),
           "small": Kernel(((0, 0.0), (8192, 8192 * 3e-6)))}
CLUSTER = load_cluster(CONFIGS / "clusters/emulated.yaml").resized(2, 1)


def test_a_row_for_each_length() -> None:
    found = prefill_table(MODEL, CLUSTER, PROFILE, (100, 4000))
    few, many = found.rows
    assert (few.rows, many.rows) == (50, 2000)  # 2 choices each over 4 experts here, of two ranks
    size = 4000 * 2 * 64 * 2
    exchange = all_to_all_s(CLUSTER, GroupShape(2), "linear", size)
    assert many.whole_s == pytest.approx(2 * exchange + 1e-3 + 4 * 2000 * 2e-6)
    assert many.best.seconds < many.whole_s and many.best.pieces > 1
    assert few.best.seconds <= few.whole_s
    # from 250 rows per expert on, of 500 tokens on each rank, the first is as fast or faster
    assert found.kernels == ((500, "small", "large"),)


def test_one_rank_sends_nothing() -> None:
    row, = prefill_table(MODEL, Cluster(nodes=1, ranks_per_node=1), PROFILE, (1000,)).rows
    assert row.best.pieces == 1 and row.best.seconds == row.whole_s == pytest.approx(
        1e-3 + 2000 * 2e-6)
    with pytest.raises(ValueError, match="8 experts cannot be divided equally among 3 ranks"):
        prefill_table(MODEL, Cluster(nodes=3, ranks_per_node=1), PROFILE, (1,))


def test_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    kernels = tmp_path / "k.yaml"
    kernels.write_text(yaml.safe_dump({"kernels": {
        "large": {"launch_s": 1e-3, "points": [[1, 2e-6], [8192, 8192 * 2e-6]]},
        "small": {"points": [[1, 3e-6], [8192, 8192 * 3e-6]]}}}))
    words = ["plan", "--prefill", "64,4096", "--model", str(CONFIGS / "plans/small.yaml"),
             "--cluster", str(CONFIGS / "clusters/one_nic.yaml"), "--nodes", "2",
             "--ranks-per-node", "1", "--kernels", str(kernels)]
    assert main(words) == 0
    text = capsys.readouterr().out
    assert "kernel large instead of small" in text and "parallel.prefill: true" in text
    assert main([*words, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert [row["tokens"] for row in found["rows"]] == [64, 4096]
    for wrong, message in (({"kernels": {"a": {"points": [[1, 1.0]]}}}, "at least 2 points"),
                           ({"kernels": {"a": [1]}}, "must contain, for each kernel, points"),
                           ({"kernels": {}}, "the profile contains no kernels")):
        kernels.write_text(yaml.safe_dump(wrong))
        assert main(words) == 2
        assert message in capsys.readouterr().err
    assert main([*words, "--plot", "x.png"]) == 2
    assert "--plot cannot be combined with --prefill" in capsys.readouterr().err

"""The benchmark of collectives: what its page says of its numbers, and that it runs."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from moe_plugin.comm.forest import plan_few
from scripts.bench.studies import STUDIES
from scripts.bench.studies.collectives import ring_bound_s, with_ratios
from scripts.emulate import networks, why_not

COMMAND = [sys.executable, "-m", "moe_plugin.cli.main", "bench", "collectives"]


@pytest.mark.parametrize(("shape", "ratio"), [
    ("equal", 1.0), ("slow-node", 1.0), ("ring", 2.0), ("two-clusters", 7 / 4)])
def test_the_links_predict_how_much_slower_a_ring_is(shape: str, ratio: float) -> None:
    """Eight nodes: a ring uses one direction; over a thin link it takes 7 shards where 4 suffice.
    """
    network = networks.SHAPES[shape](8, 40e6)
    found = ring_bound_s(network, 1e6) / plan_few(network, "all_gather").seconds(1e6)
    assert found == pytest.approx(ratio, rel=1e-6)


def test_the_page_compares_with_the_faster_of_gloo_and_ring() -> None:
    cells = [with_ratios({
        "network": "ring of nodes", "ranks": 8, "kind": kind, "bytes": size, "gloo_s": 2.2,
        "ring_s": 2.1, "native_s": 2.2, "forest_s": forest_s, "chosen": name, "bound_s": 1.0,
        "ring_bound_s": 2.0}) for kind, size, forest_s, name in (
                 ("all_gather", 1 << 20, 1.1, "forest"), ("all_gather", 1 << 22, 1.0, "forest"),
                 ("all_reduce", 1 << 22, 3.0, "forest"))]
    page = STUDIES["collectives"].page({"cells": cells, "hosts": [{
        "host": "fairseq", "native_s": 0.5, "forest_s": 0.4, "predicted_saved_s": 0.11,
        "losses": [1.0], "apart": 0.001}], "cpus": 2, "load": [0, 0]})
    said = " ".join(page.split())
    assert "| 2.00 | 1.91 | forest |" in said and "| 2.00 | 2.10 | forest |" in said
    assert ("For 1 of the 2 collectives of the largest size, the measured ratio is within 15% of "
            "the predicted one.") in said
    assert "In 2 of 3 rows, `auto` chose" in said
    assert "| fairseq | 500 | 400 | 110 | 100 | 0.001 |" in said


@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.skipif(bool(why_not()), reason=str(why_not()))
def test_it_runs(tmp_path: Path) -> None:
    sizes = "--networks ring --sizes 65536 --repeats 1 --steps 5"
    subprocess.run([*COMMAND, "--out", str(tmp_path), *sizes.split()],
                   check=True, timeout=500)
    report = json.loads((tmp_path / "data" / "collectives.json").read_text())
    assert [cell["kind"] for cell in report["cells"]] == ["all_gather", "reduce_scatter",
                                                         "all_reduce"]
    assert [host["host"] for host in report["hosts"]] == ["fairseq", "megatron"]
    assert all(host["apart"] < 0.01 for host in report["hosts"])

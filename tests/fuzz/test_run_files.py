"""Files of a run and of the planner, of any content: a result, or a named error."""

from __future__ import annotations

import dataclasses
import io
import json
import math
from pathlib import Path
from typing import Any

import yaml
from hypothesis import given
from hypothesis import strategies as st

from moe_plugin.observe.history import read_run
from moe_plugin.observe.report.page import render
from moe_plugin.observe.watch import Watch
from moe_plugin.planner import load_cluster, predict_table
from moe_plugin.planner.cluster import Cluster, Device, load_device
from moe_plugin.planner.forest import Network
from moe_plugin.planner.forest.source import find_network
from moe_plugin.planner.model import load_model
from moe_plugin.planner.model_search import search
from tests.fuzz.hostile import VALUES, bounded, is_named, replaced

# Files of a run of any content: they are read, shown and reported, or refused by name.


DATA = Path(__file__).parents[1] / "observe" / "data"
SPANS = [["layers", "layer1 forward", 0.0, 0.5], ["exchange", "all_to_all", 0.1, 0.2]]
ROWS = [
    *(json.loads(line) for host in ("megatron", "fairseq")
      for line in (DATA / host / "stats.jsonl").read_text().splitlines()[:2]),
    *(json.loads(line) for line in (DATA / "megatron" / "log.jsonl").read_text().splitlines()[:3]),
    {"step": 3, "rank": 0, "time": 5.0, "timeline": SPANS},
    {"host": "megatron", "settings": {"train_iters": 24, "moe_router_topk": 2}},
]
LOG = [line for line in next(DATA.glob("fairseq/*.log")).read_text().splitlines() if "|" in line]


@st.composite
def lines(draw: st.DrawFn) -> bytes:
    """Lines of real files, most of them damaged."""
    found = []
    for _ in range(draw(st.integers(1, 5))):
        if draw(st.booleans()):
            row: Any = draw(st.sampled_from(ROWS))
            for _ in range(draw(st.integers(0, 2))):
                row = replaced(row, draw)
            text = json.dumps(row, default=str).encode()
        else:
            text = draw(st.sampled_from(LOG)).encode()
            if draw(st.booleans()):
                word = draw(st.sampled_from(text.split()))
                text = text.replace(word, _text(draw(VALUES)), 1)
        cut = draw(st.one_of(st.none(), st.integers(0, len(text))))
        found.append(text[:cut])
    return draw(st.sampled_from([b"\n", b"\r\n", b"\n\n"])).join(found) + draw(
        st.sampled_from([b"\n", b"", b"\xff", b"\x00"]))


def _text(value: Any) -> bytes:
    return str(value).encode("utf-8", "surrogatepass")


@given(lines())
@bounded(250)
def test_files_of_a_run(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "run.jsonl").write_bytes(content)
    try:
        run = read_run(tmp_path)
    except ValueError as error:
        assert is_named(error), error
        return
    assert render(run).endswith("</html>\n") or "</html>" in render(run)
    Watch(tmp_path, stream=io.StringIO()).once()


# Files of the planner of any content: finite predictions or a named error.


CONFIGS = Path(__file__).parents[2] / "configs"


def load_network(path: Path) -> Network:
    """A network from any kind of file."""
    return find_network(str(path))[0]


FILES = {
    load_cluster: sorted((CONFIGS / "clusters").glob("*.yaml")),
    load_device: sorted((CONFIGS / "devices").glob("*.yaml")),
    load_model: [p for p in sorted((CONFIGS / "plans").glob("*.yaml"))
                 if "global_batch" in p.read_text()],
    load_network: sorted((CONFIGS / "networks").glob("*.yaml")),
}


@st.composite
def damaged(draw: st.DrawFn, files: list[Path]) -> Any:
    """Values of a real file, one or two of them replaced."""
    values = yaml.safe_load(draw(st.sampled_from(files)).read_text())
    for _ in range(draw(st.integers(1, 2))):
        values = replaced(values, draw)
    return values


def _load(load: Any, folder: Path, values: Any) -> Any:
    path = folder / "file.yaml"
    try:
        path.write_text(yaml.safe_dump(values, allow_unicode=False), encoding="utf-8")
    except ValueError:  # an integer that Python does not write
        return None
    try:
        return load(path)
    except ValueError as error:
        assert is_named(error), error
        return None


@given(st.one_of(*(damaged(files).map(lambda values, load=load: (load, values))
                   for load, files in FILES.items())))
@bounded(300)
def test_records(tmp_path: Path, drawn: tuple[Any, Any]) -> None:
    load, values = drawn
    found = _load(load, tmp_path, values)
    if isinstance(found, Cluster):
        for row in predict_table(found, [found.ranks], [1, 1 << 30]):
            assert math.isfinite(row["ms"]), row
    if isinstance(found, Device):
        assert math.isfinite(found.matmul_s(1e6, 1e15)) and math.isfinite(found.copy_s(1e12))


@given(damaged(FILES[load_model]))
@bounded(40)
def test_searches(tmp_path: Path, values: Any) -> None:
    model = _load(load_model, tmp_path, values)
    if model is None:
        return
    cluster = dataclasses.replace(Cluster(), nodes=2, ranks_per_node=4)
    try:
        found = search(model, cluster, Device(memory_bytes=1e15))
    except ValueError as error:
        assert is_named(error), error
    else:
        assert all(math.isfinite(plan.seconds) for plan in found.plans)

"""Files of a run of any content: they are read, shown and reported, or refused by name."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from moe_plugin.observe.history import read_run
from moe_plugin.observe.report.page import render
from moe_plugin.observe.watch import Watch
from tests.fuzz.hostile import VALUES, bounded, is_named, replaced

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

"""The pictures of layouts show what a layer does."""

from __future__ import annotations

import importlib
import re
import xml.etree.ElementTree as ET
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
import torch

from moe_plugin.comm.placement import Placement
from moe_plugin.dispatch.base import expand
from moe_plugin.records import Routing
from tests.packaging.test_imports import LEVELS

pytestmark = pytest.mark.fast

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(ROOT / "scripts"))
    return importlib.import_module("draw_layouts")


def test_every_token_is_computed_once_by_its_expert(script: ModuleType) -> None:
    for panel in script.panels():
        band = next(band for band in panel.bands if band.label == "computes")
        pairs = [(token, rank) for rank, tokens in enumerate(band.tokens) for token in tokens]
        assert sorted(token for token, _ in pairs) == list(range(8)), panel.title
        for token, rank in pairs:
            assert panel.expert_of[token] in band.experts[rank], panel.title
        assert panel.bands[0].tokens == panel.bands[-1].tokens or "spill" in panel.setting


@pytest.mark.parametrize("r", [1, 2, 4])
def test_shards_and_rows_are_those_of_the_dispatchers(script: ModuleType, r: int) -> None:
    """Rows of one expert go to the ranks that the picture shows, with the shards that it shows."""
    place = Placement(SimpleNamespace(size=8, rank=0), 2, None, copies=r)
    tokens = 4
    routing = Routing(torch.zeros(tokens, 1, dtype=torch.int64), torch.ones(tokens, 1),
                      torch.zeros(tokens), {}, torch.zeros(()), torch.tensor(tokens))
    ids, _ = expand(place, routing, torch.arange(tokens)[:, None])
    for slot, ranks in enumerate(ids.tolist()):  # with one expert a rank, a shard's id is its rank
        part = slot % place.token_shards
        shown = [rank for rank in range(4)
                 if script.used(r, rank)[1].start == part * script.SHARDS // place.token_shards]
        assert ranks == shown
        shards = sorted(cell for rank in ranks for cell in script.used(r, rank)[0])
        assert shards == list(range(script.SHARDS))  # all of the expert, each shard once


def test_rooms_are_in_the_order_of_their_imports() -> None:
    """A row of the picture is a level, bottom to top."""
    text = (DOCS / "architecture.svg").read_text(encoding="utf-8").split("Packages: ")[1]
    boxes = re.findall(r'<text class="b" x="[\d.]+" y="(\d+)">([\w.]+)<', text)
    rows: dict[int, set[str]] = {}
    for height, name in boxes:
        rows.setdefault(int(height), set()).add(name.removesuffix(".py"))
    shown = [rows[height] for height in sorted(rows, reverse=True)]
    assert shown == [set(level) for level in LEVELS]


@pytest.mark.parametrize("name", [path.name for path in DOCS.glob("*.svg")])
def test_pictures_are_files_of_their_kind_with_a_description(name: str) -> None:
    root = ET.parse(DOCS / name).getroot()
    assert root.tag.endswith("svg") and root.get("viewBox")
    pages = "".join(page.read_text(encoding="utf-8") for page in DOCS.glob("*.md"))
    assert re.search(rf"!\[[^\]]{{20,}}\]\({name}\)", pages), f"{name} is on no page"

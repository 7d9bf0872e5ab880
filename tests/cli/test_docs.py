"""The documentation agrees with the code: generated pages, the worked example of the capacity,
links, files of settings, pages of benchmarks; and it wraps at 100 columns. Its code blocks are in
test_examples.py.
"""

from __future__ import annotations

import importlib
import json
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch

from moe_plugin import MoEConfig, MoELayer
from moe_plugin.comm import LocalComm
from moe_plugin.config import DispatchConfig, from_dict, from_yaml, register_hydra
from moe_plugin.records import Routing
from moe_plugin.routing.capacity import capacity

ROOT = Path(__file__).resolve().parents[2]
BENCHMARKS = ROOT / "docs" / "benchmarks"
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
ALL_PAGES = [*PAGES, *sorted(BENCHMARKS.glob("*.md"))]
SCRIPTS = sorted((ROOT / "scripts").glob("benchmark_*.py"))
COLUMNS = 100
MOE_FILES = sorted((ROOT / "configs" / "moe").glob("*.yaml"))


def test_generated_pages_are_up_to_date() -> None:
    done = subprocess.run(
        [sys.executable, str(ROOT / "scripts" / "generate_docs.py"), "--check"],
        capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_lists_of_names_have_complete_sentences() -> None:
    text = (ROOT / "docs" / "flags.md").read_text(encoding="utf-8").split("## Registered names")[1]
    entries = re.findall(r"^- `\w+`: (.*(?:\n  .*)*)", text, re.MULTILINE)
    assert len(entries) > 30
    assert not [entry for entry in entries if not entry.endswith((".", ")"))]


def example_rows() -> list[tuple[int, int, int, float, int, int]]:
    text = (ROOT / "docs" / "capacity.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| (\d+) \| (\d+) \| (\d+) \| (-?[\d.]+) \| (\d+) \| (\d+) \|", text,
                      re.MULTILINE)
    return [(int(t), int(e), int(k), float(f), int(load), int(c)) for t, e, k, f, load, c in rows]


def test_the_worked_example_has_its_rows() -> None:
    assert len(example_rows()) == 7


@pytest.mark.parametrize(("tokens", "experts", "k", "factor", "load", "wanted"), example_rows())
def test_worked_example_of_the_capacity(tokens: int, experts: int, k: int, factor: float, load: int,
                                        wanted: int) -> None:
    """A routing whose expert 0 has exactly `load` choices and no other has more."""
    others = [1 + i % (experts - 1) for i in range(tokens * k - load)]
    ids_TK = torch.tensor([0] * load + others).view(k, tokens).t()
    assert ids_TK.flatten().bincount().max() == max(load, -(-len(others) // (experts - 1))) == load
    routing = Routing(ids_TK, torch.ones(tokens, k), torch.zeros(tokens), {}, torch.zeros(()),
                      torch.tensor(tokens))
    assert capacity(DispatchConfig(capacity_factor=factor), routing, experts, LocalComm(),
                    training=True) == wanted


@pytest.mark.parametrize("page", PAGES, ids=lambda path: path.name)
def test_links_into_the_repository_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", page.read_text(encoding="utf-8")):
        assert (page.parent / target).exists(), f"{page.name} links to {target}"


@pytest.mark.parametrize("page", PAGES, ids=lambda path: path.name)
def test_links_to_headings_lead_somewhere(page: Path) -> None:
    links = re.findall(r"\]\(([^)#:]*)#([^)]+)\)", page.read_text(encoding="utf-8"))
    for target, anchor in links:
        found = headings(page.parent / target if target else page)
        assert anchor in found, f"{page.name} links to {target}#{anchor}; there are {found}"


def headings(page: Path) -> list[str]:
    """Anchors of a page's headings, as GitHub makes them."""
    titles = re.findall(r"^#+ (.*)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    return [re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles]


def too_long(text: str) -> list[str]:
    """Lines above `COLUMNS` that can be shorter: not tables, headings or lines with a link."""
    return [
        line for line in text.splitlines() if len(line) > COLUMNS
        and not line.lstrip().startswith(("|", "#")) and "://" not in line
    ]


@pytest.mark.parametrize("page", ALL_PAGES, ids=lambda path: path.name)
def test_pages_wrap_at_100_columns(page: Path) -> None:
    assert not too_long(page.read_text(encoding="utf-8"))


@pytest.mark.parametrize("name", ["page.css", "page.js"])
def test_the_report_s_files_wrap_at_100_columns(name: str) -> None:
    text = (ROOT / "moe_plugin" / "observe" / "report" / name).read_text(encoding="utf-8")
    assert not [line for line in text.splitlines() if len(line) > COLUMNS]


def test_too_long_lines_are_found() -> None:
    words = "word " * 30
    text = f"{words}\n| {words} |\n# {words}\nhttps://a.b/{words}\n```\n{words}\n```\nshort"
    assert too_long(text) == [words, words]


@pytest.fixture
def script(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """A script of scripts/ as a module."""
    monkeypatch.syspath_prepend(str(ROOT / "scripts"))
    return importlib.import_module(request.param)


@pytest.mark.parametrize("script", [path.stem for path in SCRIPTS], indirect=True)
def test_benchmark_scripts_import(script: ModuleType) -> None:
    assert script.main.__doc__


@pytest.mark.parametrize("script", ["benchmark_adaptive", "benchmark_spill"], indirect=True)
def test_page_is_made_from_its_numbers(script: ModuleType) -> None:
    name = script.__name__.removeprefix("benchmark_")
    report = json.loads((BENCHMARKS / f"{name}.json").read_text(encoding="utf-8"))
    assert script.markdown(report) == (BENCHMARKS / f"{name}.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("script", ["calibrate_predicted"], indirect=True)
def test_predicted_layouts_are_close_to_the_best_measured_ones(script: ModuleType) -> None:
    """In every shape of both hosts; the page shows today's predictions."""
    found = script.compare(script.cells())
    assert len({cell["shape"] for cell in found["cells"]}) == 6
    assert [cell for cell in found["cells"] if round(cell["behind"], 2) > script.MOST_BEHIND] == []
    assert script.page(found) == (BENCHMARKS / "predicted.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("script", ["benchmark_overlap"], indirect=True)
def test_overlap_page_is_made_from_its_numbers(script: ModuleType) -> None:
    report = json.loads((BENCHMARKS / "overlap.json").read_text(encoding="utf-8"))
    page = (BENCHMARKS / "overlap.md").read_text(encoding="utf-8")
    assert script.markdown(report) == page


@pytest.mark.parametrize("script", ["benchmark_plan"], indirect=True)
def test_plan_page_is_made_from_its_numbers(script: ModuleType) -> None:
    cells = json.loads((BENCHMARKS / "plan.json").read_text(encoding="utf-8"))
    page = (BENCHMARKS / "plan.md").read_text(encoding="utf-8")
    assert script.page(cells, steps=15, most=0.1) == page


@pytest.mark.parametrize("page", PAGES, ids=lambda path: path.name)
def test_files_named_in_the_text_exist(page: Path) -> None:
    for name in re.findall(r"`((?:scripts|configs|docs|tests|moe_plugin|kernels)/[\w./-]+)`",
                           page.read_text(encoding="utf-8")):
        assert (ROOT / name).exists(), f"{page.name} names {name}"


@pytest.mark.parametrize("path", MOE_FILES, ids=lambda path: path.stem)
def test_settings_files_build_a_layer_that_runs(path: Path) -> None:
    config = from_yaml(str(path))
    config.model_dim, config.experts.hidden_dim, config.experts.shared_hidden_dim = 16, 32, min(
        config.experts.shared_hidden_dim, 32)
    out = MoELayer(config)(torch.randn(64, 16))
    assert out.output.isfinite().all() and set(
        out.losses) == {name for name, weight in config.losses.items() if weight}


def test_settings_files_are_found() -> None:
    assert len(MOE_FILES) >= 4


@pytest.mark.parametrize("path", MOE_FILES, ids=lambda path: path.stem)
def test_settings_files_are_a_hydra_group_over_the_base(path: Path) -> None:
    from hydra import compose, initialize_config_dir
    from omegaconf import OmegaConf

    register_hydra()
    with initialize_config_dir(str(ROOT / "configs"), version_base=None):
        tree = compose(overrides=[f"+moe={path.stem}", "moe.num_experts=128"])
        base = compose(overrides=["+moe=base"])
    assert from_dict(OmegaConf.to_container(tree.moe)).num_experts == 128
    assert from_dict(OmegaConf.to_container(base.moe)) == MoEConfig()

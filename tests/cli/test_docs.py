"""The documentation agrees with the code: generated pages, the worked example of the capacity,
links, files of settings, pages of benchmarks; pages are short and wrap at 100 columns. Their code
blocks are in test_examples.py.
"""

from __future__ import annotations

import importlib
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from moe_plugin import MoEConfig, MoELayer
from moe_plugin.cli.doctor.packages import import_everything
from moe_plugin.comm import LocalComm
from moe_plugin.config import (
    DispatchConfig,
    RunConfig,
    from_dict,
    from_yaml,
    of_layer,
    of_run,
    register_hydra,
    run_from_dict,
)
from moe_plugin.config.flags import flag_specs
from moe_plugin.records import Routing
from moe_plugin.routing.capacity import capacity
from moe_plugin.utils.registry import KINDS
from scripts.bench.study import read_numbers
from scripts.bench.train.results import newest, reports
from tests.faults.cases import Row
from tests.faults.disks import Seen
from tests.faults.disks import page as disks_page
from tests.faults.table import pages as fault_pages

ROOT = Path(__file__).resolve().parents[2]
BENCHMARKS = ROOT / "docs" / "benchmarks"
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
ALL_PAGES = [*PAGES, *sorted(BENCHMARKS.rglob("*.md"))]
COLUMNS = 100
LINES = 260
WORDS = 1500
MOST_PAGES = 58
NATIVE = {"--moe-router-topk"}  # Megatron's own flags on the page of what is not proved
MOE_FILES = sorted((ROOT / "configs" / "moe").glob("*.yaml"))


def test_generated_pages_are_up_to_date() -> None:
    done = subprocess.run(
        [sys.executable, str(ROOT / "scripts" / "generate_docs.py"), "--check"],
        capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_there_are_few_pages() -> None:
    pages = sorted(page.name for page in (ROOT / "docs").glob("*.md"))
    assert len(pages) <= MOST_PAGES, f"{len(pages)} pages, above {MOST_PAGES}: join some of {pages}"


def test_every_registered_name_is_on_a_page(monkeypatch: pytest.MonkeyPatch) -> None:
    """With a complete sentence; those that config.md does not list are on the page to which it
    leads.
    """
    monkeypatch.syspath_prepend(str(ROOT / "scripts"))
    generator = importlib.import_module("generate_docs")
    import_everything()
    assert set(generator.NAMES_ON) <= set(KINDS)
    text = (ROOT / "docs" / "config.md").read_text(encoding="utf-8")
    listed = re.findall(r"^\| `\w+` \| [\w ]+: (.*) \|$", text.split("## Registered names")[1],
                        re.MULTILINE)
    assert len(listed) > 10 and not [words for words in listed if not words.endswith((".", ")"))]
    for kind, place in generator.NAMES_ON.items():
        page = (ROOT / "docs" / place.partition("#")[0]).read_text(encoding="utf-8")
        names = [entry.name for entry in KINDS[kind]]
        assert names and [name for name in names if f"`{name}`" not in page] == [], place


def test_every_setting_is_on_a_page() -> None:
    text = "".join(page.read_text(encoding="utf-8")
                   for page in (ROOT / "docs").glob("config*.md"))
    paths = [spec.path for spec in flag_specs() if spec.path]
    assert len(paths) > 100
    assert [path for path in paths if f"`{path}`" not in text] == []


@pytest.mark.parametrize("page", ALL_PAGES, ids=lambda path: path.stem)
def test_pages_are_short(page: Path) -> None:
    lines = page.read_text(encoding="utf-8").count("\n")
    assert lines <= LINES, f"{page.name} has {lines} lines, above {LINES}: make it two pages"


@pytest.mark.parametrize("page", PAGES[1:], ids=lambda path: path.stem)
def test_pages_are_read_in_minutes(page: Path) -> None:
    """Marks of tables and fences are not words. Generated tables are looked up, not read."""
    written, _, generated = page.read_text(encoding="utf-8").partition("<!-- from here on by")
    generated = re.sub(r"^\|.*", "", generated, flags=re.MULTILINE)
    words = [word for word in (written + generated).split()
             if any(letter.isalnum() for letter in word)]
    assert len(words) <= WORDS, f"{page.name} has {len(words)} words, above {WORDS}: make it two"


def example_rows() -> list[tuple[int, int, int, float, int, int]]:
    text = (ROOT / "docs" / "balance.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| (\d+) \| (\d+) \| (\d+) \| (-?[\d.]+) \| (\d+) \| (\d+) \|", text,
                      re.MULTILINE)
    return [(int(t), int(e), int(k), float(f), int(load), int(c)) for t, e, k, f, load, c in rows]


def test_the_worked_example_has_its_rows() -> None:
    assert len(example_rows()) == 8


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
    """Lines above `COLUMNS` that can be shorter: not tables, headings, single words or lines with a
    link.
    """
    return [
        line for line in text.splitlines() if len(line) > COLUMNS and len(line.split()) > 1
        and not line.lstrip().startswith(("|", "#")) and "://" not in line
    ]


@pytest.mark.parametrize("page", ALL_PAGES, ids=lambda path: path.name)
def test_pages_wrap_at_100_columns(page: Path) -> None:
    assert not too_long(page.read_text(encoding="utf-8"))


@pytest.mark.parametrize("page", PAGES, ids=lambda path: path.name)
def test_commands_that_install_work_without_an_index(page: Path) -> None:
    """The package is on no index: extras are those of the repository."""
    assert not re.findall(r"pip\s+install\s+[\"']?moe-plugin", page.read_text(encoding="utf-8"))


def test_the_change_log_says_everything_once() -> None:
    text = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    entries = [" ".join(entry.split()) for entry in re.findall(r"^\* ((?:.+\n(?!\* ))*.+)$", text,
                                                               re.MULTILINE)]
    assert len(entries) > 20
    assert sorted({entry[:50] for entry in entries}) == sorted(entry[:50] for entry in entries)


@pytest.mark.parametrize("name", [
    "page.css", "page.js", "plots.js", "numbers.js", "bands.js", "templates/document.html",
    "templates/figures.html", "templates/report.html"])
def test_the_report_s_files_wrap_at_100_columns(name: str) -> None:
    text = (ROOT / "moe_plugin" / "observe" / "report" / name).read_text(encoding="utf-8")
    assert not [line for line in text.splitlines() if len(line) > COLUMNS]


def test_too_long_lines_are_found() -> None:
    words = "word " * 30
    text = f"{words}\n| {words} |\n# {words}\nhttps://a.b/{words}\n```\n{words}\n```\nshort"
    assert too_long(text) == [words, words]


def test_half_the_memory_takes_no_longer_than_recomputing_or_swapping_everything() -> None:
    """In the committed measurement."""
    found = json.loads((BENCHMARKS / "data" / "activations.json").read_text(encoding="utf-8"))
    seconds = found["seconds"]
    others = sorted((seconds["recompute"], seconds["swap"]))
    assert seconds["auto"] <= others[0] and others[1] >= 1.2 * seconds["auto"]
    assert found["memory"]["auto"]["ledger_bytes"] <= found["limit_bytes"] == (
        found["keep_bytes"] // 2)


def test_pages_of_faults_are_made_from_their_rows() -> None:
    rows = [Row(**json.loads(line)) for line in
            (BENCHMARKS / "data" / "faults.jsonl").read_text(encoding="utf-8").splitlines()]
    made = fault_pages(rows, BENCHMARKS / "faults.md")
    assert made == {page: page.read_text(encoding="utf-8")
                    for page in BENCHMARKS.glob("faults*.md")}


def test_the_page_of_disks_is_made_from_its_rows() -> None:
    rows = [Seen(**json.loads(line)) for line in
            (BENCHMARKS / "data" / "disks.jsonl").read_text(encoding="utf-8").splitlines()]
    assert (BENCHMARKS / "disks.md").read_text(encoding="utf-8") == disks_page(rows)


@pytest.mark.parametrize("page", PAGES, ids=lambda path: path.name)
def test_files_named_in_the_text_exist(page: Path) -> None:
    for name in re.findall(r"`((?:scripts|configs|docs|tests|moe_plugin|kernels)/[\w./-]+)`",
                           page.read_text(encoding="utf-8")):
        assert (ROOT / name).exists(), f"{page.name} names {name}"


@pytest.mark.parametrize("page", PAGES, ids=lambda path: path.name)
def test_modules_named_in_the_text_exist(page: Path) -> None:
    named = re.findall(r"`(moe_plugin(?!\.json)(?:\.\w+)+)`", page.read_text(encoding="utf-8"))
    for name in named:
        assert found(name), f"{page.name} names {name}"


def found(name: str) -> bool:
    """Whether a dotted name is a module, or is defined or imported in one."""
    parts = name.replace("moe_plugin.kernels", "kernels").split(".")
    for count in range(len(parts), 0, -1):
        path = ROOT.joinpath(*parts[:count])
        module = path.with_suffix(".py") if path.with_suffix(".py").exists() else (
            path / "__init__.py")
        if module.exists():
            return count == len(parts) or bool(
                re.search(rf"\b{parts[count]}\b", module.read_text(encoding="utf-8")))
    return False


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
        tree = compose(overrides=[f"+moe={path.stem}"])
        base = compose(overrides=["+moe=base"])
    assert from_dict(of_layer(OmegaConf.to_container(tree.moe))) == from_yaml(str(path))
    values = OmegaConf.to_container(base.moe)
    assert from_dict(of_layer(values)) == MoEConfig()
    assert run_from_dict(of_run(values)) == RunConfig()


def test_the_table_of_readme_is_that_of_the_measurement() -> None:
    """Times of a layer and its peers, relative to the matmuls alone."""
    rows = re.findall(r"^\| ([\d,]+), ([\d,]+), ([\d,]+), (\d+), (\d+) \| (\w+) \| (.*) \|$",
                      (ROOT / "README.md").read_text(encoding="utf-8"), re.MULTILINE)
    page = (BENCHMARKS / "layer.md").read_text(encoding="utf-8")
    assert len(rows) == 4
    for *sizes, dtype, numbers in rows:
        tokens, width, inner, experts, k = (size.replace(",", "") for size in sizes)
        title = f"T{tokens} D{width} F{inner} E{experts} k{k} gated " + {
            "fp32": "float32", "bf16": "bfloat16"}[dtype] + ", cpu"
        table = page.split(title)[1].split("\nT")[0]
        for name, shown in zip(["moe-plugin", "megatron", "deepspeed", "transformers_grouped_mm",
                                "grouped_mm", "einsum"], numbers.split(" | "), strict=True):
            [ratio] = re.findall(rf"^\| {name} +\|[^|]+\|[^|]+\| +([\d.]+)", table,
                                 re.MULTILINE)
            assert abs(float(ratio) - float(shown)) <= (0.051 if name == "einsum" else 1e-9), (
                title, name, ratio, shown)


def measured(what: str, peer: str = "") -> str:
    """The comparison and the result of the only row of README's tables that holds both texts."""
    rows = re.findall(r"^\| (.*) \| (.*) \| (.*) \|$", (ROOT / "README.md").read_text("utf-8"),
                      re.MULTILINE)
    [(_, against, result)] = [row for row in rows if what in row[0] and peer in row[1]]
    return f"{against}: {result}"


def table_of(name: str) -> list[list[str]]:
    """The cells of all tables of a benchmark's page."""
    lines = (BENCHMARKS / f"{name}.md").read_text(encoding="utf-8").splitlines()
    return [[cell.strip() for cell in line.strip("|").split("|")]
            for line in lines if line.startswith("|")]


@pytest.mark.parametrize(("host", "peer", "sizes"), [
    ("megatron", "Megatron-core's own", ("one machine, ten shapes", "2x2 emulated nodes, six")),
    ("fairseq", "`moe` branch", ("one machine, eight shapes", "2x2 emulated nodes, four"))])
def test_training_steps_of_readme_are_those_of_the_measurement(host: str, peer: str,
                                                               sizes: tuple[str, str]) -> None:
    every = newest(reports(read_numbers(BENCHMARKS / "data" / "train.json")))
    found_reports = [one for one in every if one.host == host]
    said = [(float(low), float(high)) for size in sizes
            for low, high in re.findall(r"([\d.]+) to ([\d.]+)", measured(size, peer))]
    found = []
    for place in ("one machine", "2x2"):
        ratios = [one.ratio()[0] for one in found_reports if one.place.startswith(place)]
        found.append((round(min(ratios), 2), round(max(ratios), 2)))
    assert said == found


def test_other_numbers_of_readme_are_those_of_the_measurements() -> None:
    host = [row[4] for row in table_of("host") if row[0] == "moe-plugin"]
    theirs, _ = [row[4] for row in table_of("host") if row[0] == "transformers_grouped_mm"]
    assert measured("16 tokens, one rank").endswith(
        f": {host[0]} of its time, gated {host[2]}. transformers' `grouped_mm` is faster: {theirs}")
    assert measured("16 tokens, two ranks").endswith(f": {host[1]} of its time; gated {host[3]}")
    overlap = [row[-1] for row in table_of("overlap") if row[0].isdecimal()]
    first = [float(re.search(r"\((.*)\)", row[4])[1])
             for row in table_of("overlap") if row[0].isdecimal()]
    best = [float(cell.split()[0]) for cell in overlap]
    assert (f"at most {max(best[:-6]):.2f} times as long, and {max(best[-6:]):.2f} times with "
            f"Parm's schedule S2. With one piece, up to {max(first):.2f} times"
            ) in measured("overlap")
    spill = {row[0]: float(row[1]) for row in table_of("spill")[:5] if row[0].startswith("`")}
    assert measured("half of the tokens") == (
        f"our layer without borrowed experts: {spill['`never`']:.0f} ms per step: "
        f"{spill['`least_loaded`']:.0f} ms per step")
    offload = {row[0]: row for row in table_of("offload")}["pre-gated"]
    for peer, ratio in (("on demand", offload[5]), ("resident", offload[4])):
        assert measured("ten times as large", peer).endswith(f": {ratio} times the tokens/s")
    # the first of a name: those in plain PyTorch, Megatron's are below them
    weights = {row[0]: float(row[5]) for row in reversed(table_of("weights"))
               if row[1] in ("", "full speed")}
    share = weights["streamed"] / weights["resident"]
    assert f"{share:.2f} times" in measured("third of the weights")
    auto = [row[1] for row in table_of("adaptive") if row[0] == "auto, exploring included"]
    assert f"{float(auto[3]):.0f} ms" in measured("chosen during training")
    plan = max(float(row[7]) for row in table_of("plan") if row[0] in ("4x1", "2x2"))
    assert f"within {100 * (plan - 1):.0f} % in all 18 cells" in measured("planner")
    with_plan, without = ([float(row[column].strip("%")) for row in table_of("routing")[1:]
                           if row[2].startswith("`")] for column in (3, 1))
    assert measured("recorded routing").endswith(
        f"{min(with_plan):.0f} to {max(with_plan):.0f} % of its speed. Without a policy, "
        f"{min(without):.0f} to {max(without):.0f} %")


def test_quality_in_readme_is_that_of_the_measurements() -> None:
    rows = [row for row in table_of("quality") if len(row) == 3]
    text = [-float(row[2].split()[0]) for row in rows
            if row[0] in ("fairseq", "megatron") and row[1] == "dense, equal active FLOPs"]
    digits = next(-float(row[2].split()[0]) for row in rows
                  if row[0] == "dense, equal active FLOPs")
    assert measured("held-out loss").endswith(
        f"{text[0]:.2f} and {text[1]:.2f} nats per byte lower")
    assert measured("images of digits").endswith(f"{digits:.1f} points worse")


def test_readme_counts_what_is_registered() -> None:
    from moe_plugin.checkpoint.formats.huggingface.families import FAMILIES
    from moe_plugin.checkpoint.formats.huggingface.kept_families import KEPT, REFUSED
    from moe_plugin.routing import losses, routers

    text = (ROOT / "README.md").read_text(encoding="utf-8")
    swapped = sum(family.block is not None for family in FAMILIES.values()) + len(KEPT)
    for said in (f"{len(routers.names())} [routers]", f"{len(losses.names())} [balance losses]",
                 f"[{swapped} of {swapped + len(REFUSED)} families]"):
        assert said in text, said


def test_what_works_names_what_ci_installs() -> None:
    """Rows of CI in index.md, and the versions that set-up and CI pin."""
    setup = (ROOT / "scripts" / "setup.sh").read_text(encoding="utf-8")
    ci = (ROOT / ".ci" / "run").read_text(encoding="utf-8")
    rows = [line for line in (ROOT / "docs" / "index.md").read_text("utf-8").splitlines()
            if line.startswith("|") and "CI" in line]
    for what, pinned in {
            "torch ": re.search(r"torch==([\d.]+\d)", setup),
            "| fairseq | ": re.search(r"fairseq==([\d.]+\d)", setup),
            "its own loop | ": re.search(r"megatron-core==([\d.]+\d)", setup),
            "`swap_moe` | ": re.search(r"test_megatron_versions\.sh ([\d.]+\d)", ci)}.items():
        assert pinned is not None
        assert any(f"{what}{pinned[1]} " in row for row in rows), (what, pinned[1])


def test_the_oldest_torch_is_the_same_everywhere() -> None:
    """The dependency, the README, the script that tries versions, and the page of versions."""
    read = {name: (ROOT / name).read_text(encoding="utf-8") for name in (
        "pyproject.toml", "README.md", "scripts/test_torch_versions.sh", "docs/index.md")}
    [oldest] = re.findall(r'"torch>=([\d.]+)"', read["pyproject.toml"])
    assert f"torch {oldest} or" in read["README.md"]
    [tried] = re.findall(r"\|\| VERSIONS=\(([\d. ]+)\)", read["scripts/test_torch_versions.sh"])
    assert tried.split()[0].rpartition(".")[0] == oldest
    assert f"(default: {tried}," in read["scripts/test_torch_versions.sh"]
    for version in tried.split():
        assert re.search(rf"\| torch {re.escape(version)} \|.*by hand", read["docs/index.md"])
    named = re.findall(r"torch (\d+)\.(\d+)", read["docs/index.md"])
    first = tuple(map(int, oldest.split(".")))
    assert [(int(a), int(b)) for a, b in named if (int(a), int(b)) < first] == []


def test_what_is_not_proved_has_a_command() -> None:
    """Each row names commands whose scripts, modules, tests and options exist."""
    text = (ROOT / "docs" / "not_proved.md").read_text(encoding="utf-8")
    options = (ROOT / "tests" / "packaging" / "abilities.txt").read_text(encoding="utf-8")
    rows = [line.split(" | ")[-1] for line in text.splitlines() if line.startswith("| ")][1:]
    assert len(rows) > 20
    for row in rows:
        commands = re.findall(r"`([^`]+)`", row)
        assert commands, row
        for command in commands:
            paths = re.findall(r"[\w/]+/[\w/]+\.(?:py|sh)", command)
            modules = re.findall(r"-m ([\w.]+)", command)
            studies = re.findall(r"bench ([\w-]+)", command)
            own = re.findall(r"(--(?:moe|weights|pipeline-schedule)[\w-]*)", command)
            assert paths or modules or command.startswith("moe-plugin"), command
            for path in [*paths, *(f"{name.replace('.', '/')}.py" for name in modules
                                   if name != "pytest")]:
                assert (ROOT / path).is_file(), command
            for flag in own:
                assert f"megatron: {flag}\n" in options or flag in NATIVE, command
            assert all(f"command: bench {study}\n" in options for study in studies), command


def test_what_the_page_of_places_names_is_there() -> None:
    """Files and folders below the package or its neighbours, and `symbol` in `file`."""
    text = (ROOT / "docs" / "where.md").read_text(encoding="utf-8")
    package = ROOT / "moe_plugin"
    skipped = {".git", ".venv", "runs"}  # below the checkout, which may itself lie in such a folder
    every = {str(path.relative_to(base)) for base in (package, ROOT) for path in base.rglob("*")
             if not skipped & set(path.relative_to(ROOT).parts)}
    ends = {path for one in every for path in (one, one.rpartition("/")[2])}
    named = [name for name in re.findall(r"`([\w./]+(?:\.py|/[\w/]+))`", text)]
    assert len(named) > 80
    assert [name for name in named if name not in ends and f"{name}.py" not in ends
            and not any(one.endswith(f"/{name}") for one in every)] == []
    places = re.findall(r"`(\w+)` in `([\w./]+\.py)`", text)
    assert len(places) >= 6
    for symbol, path in places:
        source = (package / path).read_text(encoding="utf-8")
        assert re.search(rf"\b(def|class) {symbol}\b", source), (symbol, path)

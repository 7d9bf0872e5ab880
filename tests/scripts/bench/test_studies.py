"""Studies: listed, run and written by one mechanism; pages come from committed numbers."""

from __future__ import annotations

import argparse
import gc
import json
import os
from pathlib import Path
from typing import Any

import pytest

from moe_plugin.cli.main import main, parse
from scripts.bench import images
from scripts.bench.studies import STUDIES
from scripts.bench.study import NEEDS, NEEDS_SAID, Option, Study, read_numbers, write_numbers

ROOT = Path(__file__).resolve().parents[3]
BENCHMARKS = ROOT / "docs" / "benchmarks"
COMMITTED = [study for study in STUDIES.values() if (BENCHMARKS / study.numbers_name).exists()]
QUICK = ("invariant", "layers", "operations", "scaling", "headlines")


def test_they_are_listed_with_what_they_measure(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench"]) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert len(STUDIES) >= 30
    for study in STUDIES.values():
        assert f"{study.name} {study.about}" in said


def test_all_committed_numbers_have_a_page() -> None:
    names = {f"data/{path.name}" for path in (BENCHMARKS / "data").glob("*.json")}
    assert names - {study.numbers_name for study in COMMITTED} == {"data/mutants.json"}


@pytest.mark.parametrize("study", COMMITTED, ids=lambda study: study.name)
def test_a_page_is_made_from_its_numbers(study: Study) -> None:
    found = read_numbers(BENCHMARKS / study.numbers_name)
    made = {study.page_name: study.page(found), **getattr(study.code, "pages", lambda _: {})(found)}
    for name, text in made.items():
        assert text == (BENCHMARKS / name).read_text(encoding="utf-8")


@pytest.mark.parametrize("study", STUDIES.values(), ids=lambda study: study.name)
def test_options_have_quick_values_of_their_kind(study: Study) -> None:
    assert set(study.needs) <= set(NEEDS) == set(NEEDS_SAID)
    required = [name for name, option in study.options.items() if option.required]
    words = [word for name in required for word in (f"--{name}", study.options[name].default)]
    for name, option in study.options.items():
        quick = study.fill(parse(["bench", study.name, "--quick", *words]))
        given = getattr(quick, name.replace("-", "_"))
        assert type(given) is type(option.default), name
        if option.choices is not None:
            assert set(given if isinstance(given, tuple) else [given]) <= set(option.choices)


@pytest.mark.parametrize("study", STUDIES.values(), ids=lambda study: study.name)
def test_they_replace_regular_files_only_and_say_so_before_they_measure(
        study: Study, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
        capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(Study, "measure", lambda *_: pytest.fail("measured"))
    pipe = tmp_path / study.page_name
    pipe.parent.mkdir(exist_ok=True)
    os.mkfifo(pipe)
    words = ["--host", "megatron"] if study.name in ("losses", "train") else []
    assert main(["bench", study.name, *words, "--out", str(tmp_path)]) == 2
    assert f"{pipe} cannot be written (it is a pipe" in capsys.readouterr().err


@pytest.mark.parametrize("name", QUICK)
def test_it_runs_and_writes(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    gc.freeze()  # collections before memory is measured take seconds among all modules
    study = STUDIES[name]
    assert main(["bench", name, "--quick", "--out", str(tmp_path)]) == 0
    page = (tmp_path / study.page_name).read_text(encoding="utf-8")
    assert capsys.readouterr().out.rstrip() == page.rstrip() and page.startswith("# ")
    found = read_numbers(tmp_path / study.numbers_name)
    (tmp_path / study.page_name).unlink()
    assert main(["bench", name, "--redraw", "--out", str(tmp_path)]) == 0
    assert (tmp_path / study.page_name).read_text(encoding="utf-8") == page
    assert read_numbers(tmp_path / study.numbers_name) == found


def test_what_is_needed_is_named(monkeypatch: pytest.MonkeyPatch,
                                 capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setitem(NEEDS, "nodes", lambda: "no root here")
    assert main(["bench", "overlap"]) == 2
    said = capsys.readouterr().err
    assert "bench overlap needs an emulated cluster (Linux, root): no root here" in said


def test_numbers_that_are_not_there_are_named(tmp_path: Path,
                                              capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "spill", "--redraw", "--out", str(tmp_path)]) == 2
    assert "contains no results of a study" in capsys.readouterr().err
    assert main(["bench", "spill", "--redraw"]) == 2
    assert "--redraw needs --out" in capsys.readouterr().err


class OfTests:
    """A study of two parts, of which one is measured."""

    TITLE = "Of tests"
    OPTIONS = {"size": Option(8, "rows", quick=2), "names": Option(("a", "b"), "of rows"),
               "fast": Option(False, "skip"), "part": Option("one", "of the page")}

    @staticmethod
    def measure(args: argparse.Namespace) -> dict[str, Any]:
        return {args.part: args.size}

    @staticmethod
    def merge(old: dict[str, Any], new: dict[str, Any]) -> dict[str, Any]:
        return {**old, **new}

    @staticmethod
    def body(found: dict[str, Any]) -> list[str]:
        return [f"{sorted(set(found) - {'load', 'cores', 'versions'})}"]

    @staticmethod
    def failures(found: dict[str, Any]) -> list[str]:
        return ["too many"] if found.get("two", 0) > 8 else []


def test_parts_stay_and_failures_are_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
                                          capsys: pytest.CaptureFixture[str]) -> None:
    study = Study("of-tests", "parts")
    monkeypatch.setattr(Study, "code", OfTests)

    def run(*words: str) -> int:
        parser = argparse.ArgumentParser()
        study.add_arguments(parser)
        return study.run(parser.parse_args([*words, "--out", str(tmp_path)]))

    assert run("--quick") == 0
    assert run("--part", "two", "--size", "9") == 1
    assert capsys.readouterr().err == "too many\n"
    page = (tmp_path / "of_tests.md").read_text()
    assert page.startswith("# Of tests\n\n['one', 'two']\n\n"
                           "This page is written by `moe-plugin bench of-tests`. Measured on ")
    assert "load average" in page
    found = json.loads((tmp_path / "data" / "of_tests.json").read_text())
    assert (found["one"], found["two"]) == (2, 9)
    assert len(found["load"]) == 2 and "torch" in found["versions"]


@pytest.mark.parametrize("value", [{}, [], {"a": [1, {"b": 2}], "c": None}, [[1], {"x": "y"}]])
def test_numbers_are_written_a_line_for_each_entry(value: Any, tmp_path: Path) -> None:
    write_numbers(tmp_path / "n.json", value)
    assert read_numbers(tmp_path / "n.json") == value
    assert len((tmp_path / "n.json").read_text().splitlines()) == len(value) + 2 + (not value)


def test_results_of_other_images_stay() -> None:
    digits, newer, photographs = {"accuracy": 1}, {"data": "digits"}, {"data": "cifar10"}
    both = images.merge(digits, photographs)
    assert both == {"accuracy": 1, "cifar10": photographs}
    assert images.merge(photographs, newer) == {"data": "digits", "cifar10": photographs}
    assert images.merge(both, newer) == {"data": "digits", "cifar10": photographs}
    assert images.merge(photographs, {"data": "cifar10", "seeds": 2})["seeds"] == 2  # noqa: PLR2004

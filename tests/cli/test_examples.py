"""Every code block of README and docs is tested: Python and YAML as printed, shell commands at
small sizes or word by word (see examples.py).
"""

from __future__ import annotations

from pathlib import Path

import pytest

from moe_plugin.config import MoEConfig, both_from_yaml
from scripts.emulate import why_not
from tests import text
from tests.cli.examples import FENCES, ROOT, Block, Shell, blocks, commands, indented
from tests.cli.python_block import printed
from tests.preloaded import Server

PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
_server = Server("tests.cli.python_block")
BLOCKS = [block for page in PAGES for block in blocks(page)]


def blocks_of(language: str) -> list[Block]:
    return [block for block in BLOCKS if block.fence.split()[:1] == [language]]


def with_shell() -> list[Path]:
    return [page for page in PAGES if any(block.page == page for block in blocks_of("bash"))]


def test_every_block_is_marked() -> None:
    unmarked = [block.name for block in BLOCKS if block.fence not in FENCES]
    assert not unmarked, f"use one of {FENCES} (see tests/cli/examples.py): {unmarked}"
    for page in PAGES:
        assert not indented(page.read_text(encoding="utf-8")), f"{page.name}: give it a fence"


def test_blocks_are_found() -> None:
    assert {language: len(blocks_of(language)) >= least for language, least in [
        ("python", 6), ("yaml", 4), ("bash", 10), ("text", 1)]} == dict.fromkeys(
            ("python", "yaml", "bash", "text"), True)
    page = "a\n\n    code\n    more\n\n* list\n    of two\n\n```bash\n\n    fenced\n```\n"
    assert indented(page) == ["    code"]
    assert commands("a b \\\n  --c ...  # why\n\n\"$(which d)\" 'e f'\n") == [
        ["a", "b", "--c", "..."], ["d", "e f"]]


@pytest.mark.parametrize("block", blocks_of("python"), ids=lambda block: block.name)
def test_python_runs(block: Block) -> None:
    if "EmulatedCluster" in block.text and why_not():
        pytest.skip(why_not())
    done = _server.run(1, printed, block.text)
    assert done.code == 0, done.log
    assert done.results[0]


@pytest.mark.parametrize("mark", ["-", "+"], ids=["before", "after"])
@pytest.mark.parametrize("block", blocks_of("diff"), ids=lambda block: block.name)
def test_both_sides_of_a_change_run(block: Block, mark: str, tmp_path: Path) -> None:
    if "transformers" in block.text:
        pytest.importorskip("transformers")
    kept = [line[1:] for line in block.text.splitlines() if line[:1] in ("", " ", mark)]
    done = _server.run(1, printed, "\n".join(kept), cwd=tmp_path)
    assert done.code == 0, done.log
    assert float(done.results[0]) > 0
    assert (tmp_path / "runs" / "mine" / "stats.jsonl").is_file() == (mark == "+")


@pytest.mark.parametrize("block", blocks_of("yaml"), ids=lambda block: block.name)
def test_yaml_is_read_as_settings(block: Block, tmp_path: Path) -> None:
    (tmp_path / "settings.yaml").write_text(block.text, encoding="utf-8")
    layer, _ = both_from_yaml(str(tmp_path / "settings.yaml"))
    assert isinstance(layer, MoEConfig)


@pytest.mark.distributed
@pytest.mark.parametrize("page", with_shell(), ids=lambda page: page.name)
def test_shell_commands_run(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the order of the page, in one folder with a text under the names that the pages use."""
    for name in ("corpus.txt", "text.txt", "train.txt", "valid.txt"):
        (tmp_path / name).write_text(text.documents(10))
    (tmp_path / "configs").symlink_to(ROOT / "configs")
    monkeypatch.chdir(tmp_path)
    shell = Shell(tmp_path)
    for block in blocks(page):
        if block.fence.startswith("bash"):
            for command in commands(block.text):
                shell(command, runs=block.fence == "bash")


@pytest.mark.parametrize("words", [
    "moe-plugin reprot runs/first", "moe-plugin plan --modell x", "torchrun --nprocs 2 x.py",
    "bash scripts/quickstart.sh --fersh",
    "python -m moe_plugin.hosts.megatron.train --num-exprts 2",
    "fairseq-train data --user-dir moe_plugin --moe-expert-cuont 2", "pip install -e '.[fairsec]'",
    "make all"])
def test_a_wrong_word_is_found(words: str, tmp_path: Path) -> None:
    [command] = commands(words)
    with pytest.raises((AssertionError, SystemExit)):
        Shell(tmp_path)(command, runs=False)

"""The two commands at the top of README, in a copy of exactly the files that git has: they start
what they say with words that its parsers take. Setup is left out: it needs a network.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cli.examples import ROOT, blocks, commands

# the environment that setup makes; its Python writes down how it was called
SETUP = """#!/usr/bin/env bash
set -euo pipefail
[ "$*" = "" ] || [ "$*" = --training ] || { echo "setup.sh was given $*" >&2; exit 1; }
ROOT="$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.." && pwd)"
mkdir -p "$ROOT/.venv/bin"
printf '#!/usr/bin/env bash\\npwd >"%s/where"\\nprintf "%%s\\\\n" "$@" >"%s/words"\\n' \\
    "$ROOT" "$ROOT" >"$ROOT/.venv/bin/python"
chmod +x "$ROOT/.venv/bin/python"
"""


@pytest.fixture
def clone(tmp_path: Path) -> Path:
    """The files that git has, with a setup that installs nothing; in a path with a blank."""
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, check=False)
    if listed.returncode:
        pytest.skip("not a git checkout")
    home = tmp_path / "a clone"
    for name in listed.stdout.decode().strip("\0").split("\0"):
        if (ROOT / name).is_file():
            (home / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, home / name)
    subprocess.run(["bash", str(home / "scripts" / "setup.sh"), "--help"], check=True,
                   capture_output=True)
    (home / "scripts" / "setup.sh").write_text(SETUP)
    return home


def words_of(clone: Path, command: list[str]) -> list[str]:
    """The words that the environment's Python gets from a command started in the clone."""
    subprocess.run(command, cwd=clone, check=True, capture_output=True)
    return (clone / "words").read_text().splitlines()


def two_commands(home: Path) -> list[list[str]]:
    """Of README: the second of its blocks."""
    return commands(blocks(home / "README.md")[1].text)


def test_readme_begins_with_the_set_up_the_quick_start_and_the_tests() -> None:
    assert commands(blocks(ROOT / "README.md")[0].text)[2] == ["bash", "scripts/setup.sh"]
    assert two_commands(ROOT) == [["bash", "scripts/quickstart.sh"], ["bash", "scripts/test.sh"]]


def test_the_quick_start(clone: Path) -> None:
    quickstart, _ = two_commands(clone)
    [program, *words] = words_of(clone, quickstart)
    assert Path(program) == clone / "scripts" / "quickstart.py"
    code = (f"import runpy; made = runpy.run_path({program!r}); args = made['parse']({words});"
            "s = made['settings'](made['ROOT'] / 'configs' / 'quickstart.yaml', args.steps);"
            "print(args.hosts, args.out, s['steps'] > 1)")
    done = subprocess.run([sys.executable, "-c", code], cwd=clone, capture_output=True, text=True,
                          check=False)
    out = clone / "runs" / "quickstart"
    assert done.stdout.strip() == f"['fairseq', 'megatron'] {out} True", done.stderr
    ignored = subprocess.run(["git", "check-ignore", "runs/x", ".venv/x"], cwd=ROOT,
                             capture_output=True, text=True, check=False)
    assert ignored.stdout.split() == ["runs/x", ".venv/x"]


def test_the_tests(clone: Path) -> None:
    """Alone the fast ones; `--most`, or with arguments, all except the slow ones; `--all`."""
    _, test = two_commands(clone)
    words = words_of(clone, test)
    assert words[:2] == ["-m", "pytest"] and words[-1] == "--fast"
    assert words_of(clone, [*test, "--most"])[-2:] == ["-m", "not slow"]
    assert words_of(clone, [*test, "tests/comm"])[-3:] == ["-m", "not slow", "tests/comm"]
    assert words_of(clone, [*test, "--all"]) == words[:-1]
    assert Path((clone / "where").read_text().strip()) == clone
    # pytest reads all its words before it lists markers
    done = subprocess.run([sys.executable, *words, "--markers"], cwd=clone, capture_output=True,
                          text=True, check=False)
    assert done.returncode == 0 and "@pytest.mark.slow" in done.stdout, done.stderr

"""`scripts/bench_gpu.sh` runs to its end whichever step fails, and needs torch and Triton alone."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from moe_plugin.cli.main import main

ROOT = Path(__file__).resolve().parents[3]
PARTS = [f"{name}_{n}" for name in ("layer", "operations", "peers") for n in range(3)]
CHECKS = ["checks", "check_take_rows", "check_layer"]
# in python3's place: notes its arguments, and fails or hangs where they name the step that should
STUB = """#!/usr/bin/env bash
echo "$*" >> "{folder}/calls"
case "$*" in
    -c*) exit {missing} ;;
    *{step}) echo "the last line of {step}"; {does} ;;
    *"--parts steps"*) {page} > "{folder}/page" ;;
    *--list) printf 'a warning: 1\\ntake_rows\\nlayer\\n' ;;
esac
"""
FAKE_GPU = """#!/usr/bin/env bash
case "$*" in
    -c* | *"--parts steps"*) exec "{python}" "$@" ;;
    *"--parts layer_2"*) exit 0 ;;
esac
exec "{python}" -m tests.scripts.bench.counting_gpu {fails} "$@"
"""
FORBIDDEN = ("yaml", "numpy", "hydra", "omegaconf")
# a hook of Python's own start
HOOK = f"""
import sys
class Forbid:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {FORBIDDEN}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)
sys.meta_path.insert(0, Forbid())
"""


def run(folder: Path, step: str, does: str, missing: int = 0,
        page: str = "true") -> subprocess.CompletedProcess[str]:
    """The script with a stub for Python, in which one step does something else."""
    words = {"checks": "on_gpu --list", "check_take_rows": "--quick take_rows",
             "check_layer": "--quick layer"}
    stub = folder / "bin" / "python3"
    stub.parent.mkdir(parents=True)
    pattern = words.get(step, f"--parts {step} *") if step else "nothing"
    stub.write_text(STUB.format(folder=folder, step=pattern.replace(" ", "\\ "), does=does,
                                missing=missing, page=page.format(folder=folder)))
    stub.chmod(0o755)
    return subprocess.run(["bash", str(ROOT / "scripts/bench_gpu.sh"), str(folder / "out")],
                          env={**os.environ, "PATH": f"{folder}/bin:{os.environ['PATH']}"},
                          capture_output=True, text=True, timeout=60)


@pytest.mark.parametrize("step", ["", *PARTS, *CHECKS])
def test_it_runs_to_its_end_whichever_step_fails(step: str, tmp_path: Path) -> None:
    done = run(tmp_path, step, "exit 7")
    said = (tmp_path / "out/gpu_logs/steps.txt").read_text().splitlines()
    assert done.returncode == int(bool(step)), done.stderr
    left = set(CHECKS[1:]) if step == "checks" else set()  # it says which there are
    assert {line.partition(":")[0] for line in said} == {*PARTS, *CHECKS} - left
    assert [line for line in said if not line.endswith(": passed")] == (
        [f"{step}: failed with status 7"] if step else [])
    calls = (tmp_path / "calls").read_text().splitlines()
    pages = [n for n, call in enumerate(calls) if "--parts steps" in call]
    parts = [n for n, call in enumerate(calls) if "--rounds" in call]
    checked = [n for n, call in enumerate(calls) if "--quick" in call]
    if step in PARTS:  # else the part has written the page
        assert parts[PARTS.index(step)] + 1 in pages
    if checked:  # of those that ended meanwhile at once
        assert [n for n in pages if checked[-1] < n < parts[3]]
    assert pages[-1] == len(calls) - 1
    assert len(pages) <= 1 + (step in PARTS) + (step == "checks") + len(checked)
    if step:
        assert "the last line" in (tmp_path / f"out/gpu_logs/{step}.log").read_text()


def test_a_step_has_a_limit(tmp_path: Path) -> None:
    """The stub ends as `timeout` does at a limit, which would take minutes here."""
    done = run(tmp_path, "operations_1", "exit 124")
    said = (tmp_path / "out/gpu_logs/steps.txt").read_text()
    assert done.returncode == 1 and "operations_1: over its limit of 180 s\n" in said


def test_the_page_tells_of_a_check_while_others_run(tmp_path: Path) -> None:
    """The page of the stub is what the script has told when it is written."""
    wait = f'until grep -q take_rows "{tmp_path}/page"; do sleep 0.1; done'
    done = run(tmp_path, "check_layer", wait, page='cat "{folder}/out/gpu_logs/steps.txt"')
    assert done.returncode == 0, done.stderr


def test_a_kernel_that_fails_on_the_gpu(tmp_path: Path) -> None:
    """Real steps, on a fake GPU. The page has what did not fail, and the end of what did."""
    pytest.importorskip("triton", reason="triton is not installed")
    from tests.scripts.bench.counting_gpu import ERROR

    python = tmp_path / "bin" / "python3"
    python.parent.mkdir()
    python.write_text(FAKE_GPU.format(python=sys.executable, fails="layer_1"))
    python.chmod(0o755)
    out = tmp_path / "out"
    done = subprocess.run(
        ["bash", str(ROOT / "scripts/bench_gpu.sh"), str(out), "--device", "cuda", "--quick"],
        env={**os.environ, "PATH": f"{python.parent}:{os.environ['PATH']}", "STEPS": "layer"},
        capture_output=True, text=True, timeout=300)
    assert done.returncode == 1 and done.stdout.splitlines() == [
        "layer_0: passed", "layer_1: failed with status 1", "layer_2: passed"], done.stderr
    page = (out / "gpu.md").read_text()
    assert page.count("| moe-plugin ") == 1 and f"RuntimeError: {ERROR}" in page


def test_what_is_missing_is_said_before_anything_runs(tmp_path: Path) -> None:
    assert run(tmp_path, "", "", missing=1).returncode == 2
    assert len((tmp_path / "calls").read_text().splitlines()) == 3, "the lines of one call"


def test_parts_join_one_page_without_more_than_torch(tmp_path: Path) -> None:
    """Each part in a process of its own, in which yaml, numpy and Hydra cannot be imported."""
    (tmp_path / "sitecustomize.py").write_text(HOOK)
    logs = tmp_path / "gpu_logs"
    logs.mkdir()
    (logs / "steps.txt").write_text("layer_0: passed\ncheck_take_rows: failed with status 1\n")
    (logs / "check_take_rows.log").write_text("first\nAssertionError: off by 3\n")
    for parts in (["layer_0", "operations_2"], ["steps"]):
        subprocess.run(
            [sys.executable, "-m", "moe_plugin.cli.main", "bench", "gpu", "--device", "cpu",
             "--quick", "--out", str(tmp_path), "--parts", *parts], check=True,
            env={**os.environ, "PYTHONPATH": f"{tmp_path}:{ROOT}"}, stdout=subprocess.DEVNULL)
    page = (tmp_path / "gpu.md").read_text()
    for words in ("written by `bash scripts/bench_gpu.sh`", "GEMM bound", "route_top_k",
                  "check_take_rows: failed with status 1", "AssertionError: off by 3"):
        assert words in page
    assert main(["bench", "gpu", "--redraw", "--out", str(tmp_path)]) == 0
    assert (tmp_path / "gpu.md").read_text() == page

"""What gets installed: a wheel from the tree and one from the sdist hold the same files, and work
without the tree.
"""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = ROOT / "docs" / "examples"
STARTUP = ROOT / "moe_plugin" / "hosts" / "fairseq" / "compat" / "startup.py"
FAIRSEQ_STARTUP = {"moe_plugin_fairseq_compat.py", "moe_plugin_fairseq_compat.pth"}


def pip(*args: str) -> None:
    done = subprocess.run([sys.executable, "-m", "pip", *args, "--disable-pip-version-check"],
                          capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.fixture(scope="module")
def wheels(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """By origin: the wheel built from the tree, and the one built from the sdist."""
    folder = tmp_path_factory.mktemp("dist")
    code = f"import hatchling.build as b; print(b.build_sdist({str(folder)!r}))"
    sdist = subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True, capture_output=True,
                           text=True).stdout.split()[-1]
    for origin, source in (("tree", ROOT), ("sdist", folder / sdist)):
        pip("wheel", "--no-deps", "--no-build-isolation", "-w", str(folder / origin), str(source))
    return {origin: next((folder / origin).glob("*.whl")) for origin in ("tree", "sdist")}


def test_both_wheels_hold_the_whole_package(wheels: dict[str, Path]) -> None:
    names = {origin: set(zipfile.ZipFile(path).namelist()) for origin, path in wheels.items()}
    assert names["tree"] == names["sdist"]
    wanted = {f"moe_plugin/kernels/{path.name}" for path in (ROOT / "kernels").glob("*.py")}
    wanted |= {
        f"moe_plugin/{path.relative_to(ROOT).as_posix()}"
        for path in (ROOT / "configs").rglob("*.yaml")
    }
    wanted |= {path.relative_to(ROOT).as_posix() for path in (ROOT / "moe_plugin").rglob("*.py")}
    sources = [path for path in (ROOT / "kernels" / "cpu" / "native").iterdir()
               if path.suffix in (".c", ".h")]
    assert len(sources) >= 5
    wanted |= {f"moe_plugin/{path.relative_to(ROOT).as_posix()}" for path in sources}
    startup = STARTUP.relative_to(ROOT).as_posix()  # installed at the top instead
    wanted = wanted - {startup} | FAIRSEQ_STARTUP
    # templates, style and scripts of the report, uPlot among them
    assets = [path for path in (ROOT / "moe_plugin" / "observe" / "report").rglob("*")
              if path.suffix in (".css", ".html", ".js") or path.name == "LICENSE"]
    assert len(assets) >= 10
    wanted |= {path.relative_to(ROOT).as_posix() for path in assets}
    wanted.add("moe_plugin/py.typed")
    assert wanted <= names["tree"], wanted - names["tree"]
    for license in ("LICENSE", "moe_plugin/observe/report/uplot/LICENSE"):
        assert any(name.endswith(f".dist-info/licenses/{license}") for name in names["tree"])
    assert not any(name.startswith(("tests/", "scripts/", "runs/")) for name in names["tree"])
    laboratory = re.compile(r"(?:^|/)(?:lab|bench|emulate|audit)/|switch\.c$|/studies/")
    assert [name for name in names["tree"] if laboratory.search(name)] == []


def test_an_editable_install_has_fairseqs_startup_files(tmp_path: Path) -> None:
    code = f"import hatchling.build as b; b.build_editable({str(tmp_path)!r})"
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True, capture_output=True)
    wheel = zipfile.ZipFile(next(tmp_path.glob("*.whl")))
    top = {name for name in wheel.namelist() if "/" not in name}
    assert FAIRSEQ_STARTUP < top
    paths = [wheel.read(name).decode() for name in top - FAIRSEQ_STARTUP if name.endswith(".pth")]
    assert [Path(path.strip()) for path in paths] == [ROOT]
    assert wheel.read("moe_plugin_fairseq_compat.py") == STARTUP.read_bytes()


@pytest.fixture(scope="module")
def installed(wheels: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Python of a fresh environment with the wheel, and what it needs from this environment.

    Dependencies are found by a `.pth` file, through which no other one is read: nothing leads to
    the tree.
    """
    folder = tmp_path_factory.mktemp("fresh") / "venv"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(folder)], check=True)
    python = folder / "bin" / "python"
    pip("--python", str(python), "install", "--no-deps", "--no-index", str(wheels["sdist"]))
    [site] = folder.glob("lib/python*/site-packages")
    (site / "dependencies.pth").write_text("\n".join(
        path for path in sys.path if Path(path).name == "site-packages"), encoding="utf-8")
    return python


def run(command: list[str], cwd: Path, **variables: str) -> str:
    """What a command prints, in an environment that does not know the tree."""
    env = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(command, cwd=cwd, env={**env, "OMP_NUM_THREADS": "1", **variables},
                          capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture
def examples(tmp_path: Path) -> Path:
    """The examples alone, in a folder of their own."""
    return Path(shutil.copytree(EXAMPLES, tmp_path / "examples"))


def test_examples_run_with_the_wheel_alone(installed: Path, examples: Path) -> None:
    names = ["replace_ffn.py", "own_router.py", *(
        ["hugging_face.py", "transformers_experts.py"] if importlib.util.find_spec("transformers")
        else [])]
    code = ("import moe_plugin, runpy; print(moe_plugin.__file__); "
            f"[runpy.run_path(name, run_name='__main__') for name in {names}]")
    printed = run([str(installed), "-c", code], examples)
    assert printed.startswith(str(installed.parents[1]))
    assert all(f"{Path(name).stem}: " in printed for name in names), printed
    folders = sorted((examples / "runs").iterdir())
    code = ("import sys; from moe_plugin.cli.main import main; "
            "assert not any(main(['report', folder]) for folder in sys.argv[1:])")
    run([str(installed), "-c", code, *map(str, folders)], examples)
    for folder in folders:
        page = (folder / "report.html").read_text(encoding="utf-8")
        assert all(f'id="{curve}"' in page for curve in ("loss", "max-mean")), folder


@pytest.mark.parametrize("words", [
    pytest.param("doctor --json", marks=pytest.mark.slow), "recommend --help", "calibrate --help",
    "profile-device --help", "reshard --help", "watch --help",
    "plan --model configs/plans/small.yaml --cluster configs/clusters/a100_ib.yaml "
    "--device configs/devices/h100.yaml --nodes 1 --ranks-per-node 2",
    "schedule --topology ring:4 --size 1MiB",
    "simulate all-to-all --cluster configs/clusters/a100_ib.yaml --ranks 16"])
def test_commands_run_with_the_wheel_alone(installed: Path, tmp_path: Path, words: str) -> None:
    if words.startswith("schedule"):
        pytest.importorskip("igraph")
    assert run([str(installed.with_name("moe-plugin")), *words.split()], tmp_path)


@pytest.mark.distributed
def test_calibrate_runs_with_the_wheel_alone(installed: Path, tmp_path: Path) -> None:
    run([str(installed), "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2",
         "-m", "moe_plugin.cli.main", "calibrate", "--sizes", "4KiB,16KiB,64KiB,256KiB",
         "--repeats", "1", "--out", "mine.yaml"], tmp_path)
    assert "Fitted by" in (tmp_path / "mine.yaml").read_text(encoding="utf-8")


@pytest.mark.parametrize("words", ["bench", "bench layer --help", "emulate 2x2 -- true",
                                   "fault kill -- true", "audit plain"])
def test_the_laboratory_says_how_to_get_it(installed: Path, tmp_path: Path, words: str) -> None:
    """Also where a folder `scripts` lies around, which is somebody else's."""
    (tmp_path / "scripts" / "bench").mkdir(parents=True)
    (tmp_path / "scripts" / "bench" / "__init__.py").write_text("raise SystemExit('foreign')")
    done = subprocess.run([str(installed.with_name("moe-plugin")), *words.split()], cwd=tmp_path,
                          env={name: value for name, value in os.environ.items()
                               if name != "PYTHONPATH"}, capture_output=True, text=True,
                          check=False)
    [line] = done.stderr.splitlines()
    assert done.returncode == 2 and not done.stdout
    assert line.startswith(f"moe-plugin {words.split()[0]}: ") and "git clone" in line


@pytest.mark.distributed
def test_the_example_of_two_ranks_runs_with_the_wheel_alone(installed: Path, examples: Path,
                                                            ) -> None:
    """It reads an installed example of settings by its name."""
    printed = run([str(installed), "-m", "torch.distributed.run", "--standalone",
                   "--nproc_per_node", "2", "two_ranks.py"], examples)
    # two processes write, and a line of one may begin before that of the other has ended
    lines = re.findall(r"two_ranks: rank (\d): .*?norm (\d+\.\d{3})", printed)
    assert sorted(rank for rank, _ in lines) == ["0", "1"] and len({n for _, n in lines}) == 1


def test_the_vision_example_runs_with_the_wheel_alone(installed: Path, examples: Path) -> None:
    folder = Path(sys.prefix, "torchvision")  # see scripts/setup.sh
    there = folder.is_dir() or importlib.util.find_spec("torchvision")
    if not there or not importlib.util.find_spec("timm"):
        pytest.skip("needs timm and torchvision")
    printed = run([str(installed), "vision_model.py"], examples, PYTHONPATH=str(folder))
    assert "vision_model: loss" in printed


def test_every_example_is_run() -> None:
    hosts = ROOT / "tests" / "hosts"
    text = "".join(path.read_text(encoding="utf-8") for path in (
        Path(__file__), hosts / "transformers" / "test_transformers_trainer.py",
        hosts / "plain" / "test_fairseq2.py"))
    assert [name for name in sorted(path.name for path in EXAMPLES.glob("*.py"))
            if f'"{name}"' not in text] == []

"""What gets installed: a wheel from the tree and one from the sdist hold the same files, and work
without the tree.
"""

from __future__ import annotations

import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
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
    startup = STARTUP.relative_to(ROOT).as_posix()  # installed at the top instead
    wanted = wanted - {startup} | FAIRSEQ_STARTUP
    # style and script of the report
    wanted |= {
        path.relative_to(ROOT).as_posix()
        for path in (ROOT / "moe_plugin" / "observe").glob("report/page.*s")
    }
    assert wanted <= names["tree"], wanted - names["tree"]
    assert not any(name.startswith(("tests/", "scripts/", "runs/")) for name in names["tree"])


def test_an_editable_install_has_fairseqs_startup_files(tmp_path: Path) -> None:
    code = f"import hatchling.build as b; b.build_editable({str(tmp_path)!r})"
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True, capture_output=True)
    wheel = zipfile.ZipFile(next(tmp_path.glob("*.whl")))
    top = {name for name in wheel.namelist() if "/" not in name}
    assert FAIRSEQ_STARTUP < top
    paths = [wheel.read(name).decode() for name in top - FAIRSEQ_STARTUP if name.endswith(".pth")]
    assert [Path(path.strip()) for path in paths] == [ROOT]
    assert wheel.read("moe_plugin_fairseq_compat.py") == STARTUP.read_bytes()


def test_an_installed_wheel_works_without_the_tree(wheels: dict[str, Path], tmp_path: Path) -> None:
    pip("install", "--no-deps", "--target", str(tmp_path / "site"), str(wheels["sdist"]))
    code = (
        "import moe_plugin, torch; from moe_plugin import MoEConfig, MoELayer; "
        "layer = MoELayer(MoEConfig(model_dim=8)); assert layer(torch.randn(3, 8)).output.shape == "
        "(3, 8); print(moe_plugin.__file__)"
    )
    env = {**os.environ, "PYTHONPATH": str(tmp_path / "site")}
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, env=env, check=True,
                          capture_output=True, text=True)
    assert done.stdout.strip() == str(tmp_path / "site" / "moe_plugin" / "__init__.py")

"""Importing the package and building a layer stays light: no host, no Triton, no plotting."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.packaging.loaded import modules_after
from tests.preloaded import Server

ROOT = Path(__file__).parents[2]
HEAVY = ("fairseq", "megatron", "triton", "tensorboard", "matplotlib", "hydra", "scipy", "tqdm",
         "apex", "transformer_engine", "rich", "transformers", "peft", "timm")


# forked from processes that have imported nothing of ours: json, and torch
PLAIN, WITH_TORCH = Server("json"), Server("torch")


def loaded(server: Server, code: str) -> set[str]:
    done = server.run(1, modules_after, code)
    assert done.code == 0, done.log
    return done.results[0]


def test_import_alone_loads_not_even_torch() -> None:
    found = loaded(PLAIN, "import moe_plugin")
    assert "moe_plugin" in found and not {*HEAVY, "torch", "numpy"} & found


@pytest.mark.parametrize("code", [
    "from moe_plugin import MoEConfig, MoELayer",
    "import torch; from moe_plugin import MoEConfig, MoELayer; "
    "MoELayer(MoEConfig(model_dim=8))(torch.randn(4, 8)).output.sum().backward()",
    "from moe_plugin.observe import StatsRecorder", "import moe_plugin.config.flags",
    # what training imports, and what reads a run
    "import moe_plugin.observe.features, moe_plugin.training.run, moe_plugin.observe.history",
])
def test_using_the_layer_loads_no_heavy_module(code: str) -> None:
    # torch may load tqdm, say
    found = loaded(WITH_TORCH, code)
    assert "moe_plugin" in found and not set(HEAVY) & (found - loaded(WITH_TORCH, "import torch"))


def test_converting_checkpoints_loads_no_symbolic_algebra() -> None:
    # with torch.distributed.tensor, a third of the time until a conversion begins
    found = loaded(WITH_TORCH, "import moe_plugin.checkpoint.conversion, "
                               "moe_plugin.checkpoint.formats.all")
    assert "sympy" not in found - loaded(WITH_TORCH, "import torch")


def test_starting_python_costs_one_small_module(tmp_path: Path) -> None:
    """The `.pth` file runs at every start, also of programs that never see fairseq."""
    shutil.copy(ROOT / "moe_plugin" / "hosts" / "fairseq" / "compat" / "startup.py",
                tmp_path / "moe_plugin_fairseq_compat.py")  # as it is installed
    before = f"import sys; sys.path.insert(0, {str(tmp_path)!r}); known = set(sys.modules)"
    code = (f"{before}; import moe_plugin_fairseq_compat as m; m.boot(); "
            "print(sorted(set(sys.modules) - known))")
    done = subprocess.run([sys.executable, "-S", "-c", code], capture_output=True, text=True,
                          check=True)
    assert done.stdout.strip() in ("['__future__', 'moe_plugin_fairseq_compat']",
                                   "['moe_plugin_fairseq_compat']")


@pytest.mark.fairseq
def test_looking_for_fairseq_leaves_its_import_as_it_is(tmp_path: Path) -> None:
    """`find_spec`, as many programs call it to see what is installed, before the import."""
    pytest.importorskip("fairseq")
    shutil.copy(ROOT / "moe_plugin" / "hosts" / "fairseq" / "compat" / "startup.py",
                tmp_path / "moe_plugin_fairseq_compat.py")
    # the installed finder steps aside for the one of this tree
    code = (
        f"import sys; sys.path[:0] = {[str(tmp_path), str(ROOT)]!r}; import importlib.util as u; "
        "sys.meta_path[:] = [f for f in sys.meta_path if type(f).__name__ != '_Finder']; "
        "sys.modules.pop('moe_plugin_fairseq_compat', None); "
        "import moe_plugin_fairseq_compat as m; m.boot(); u.find_spec('fairseq'); "
        "import fairseq; print('imported')")
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True,
                          check=False)
    assert done.stdout.strip().endswith("imported"), done.stderr
    assert "install tensorboardX" not in done.stderr

"""Importing the package and building a layer stays light: no host, no Triton, no plotting."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
HEAVY = ("fairseq", "megatron", "triton", "tensorboard", "matplotlib", "hydra", "scipy", "tqdm",
         "apex", "transformer_engine")


def modules_after(code: str) -> set[str]:
    done = subprocess.run(
        [sys.executable, "-c", f"{code}; import sys; print('\\n'.join(sys.modules))"],
        capture_output=True, text=True, check=True)
    return {name.split(".")[0] for name in done.stdout.split()}


def test_import_alone_loads_not_even_torch() -> None:
    assert not {*HEAVY, "torch", "numpy"} & modules_after("import moe_plugin")


@pytest.mark.parametrize("code", [
    "from moe_plugin import MoEConfig, MoELayer",
    "import torch; from moe_plugin import MoEConfig, MoELayer; "
    "MoELayer(MoEConfig(model_dim=8))(torch.randn(4, 8)).output.sum().backward()",
    "from moe_plugin.observe import StatsRecorder", "import moe_plugin.config.flags",
])
def test_using_the_layer_loads_no_heavy_module(code: str) -> None:
    # torch may load tqdm, say
    assert not set(HEAVY) & (modules_after(code) - modules_after("import torch"))


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

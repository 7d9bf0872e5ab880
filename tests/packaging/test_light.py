"""What importing the package, building a layer and calling it cost."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from moe_plugin import MoEConfig, MoELayer
from tests.distributed import run_gloo
from tests.packaging.loaded import modules_after
from tests.preloaded import Server

# Importing the package and building a layer stays light: no host, no Triton, no plotting.


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


def test_the_rules_of_tuning_load_no_torch() -> None:
    """tests/packaging/test_imports.py has the same of the planner."""
    assert "torch" not in loaded(PLAIN, "import moe_plugin.tuning.engine, moe_plugin.planner")


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


# What a call of the default layer runs through: calls of Python functions, functions and files.
# They are counted forward, after warm-up. A bound is what the code takes; who lowers the one
# lowers the other.


ROOMS = (str(ROOT / "moe_plugin"), str(ROOT / "kernels"))


def counted(run: Callable[[], Any]) -> tuple[int, int, int]:
    """(calls, functions, files) of this package in a run."""
    calls: Counter[tuple[str, int]] = Counter()

    def on_event(frame: Any, event: str, _: Any) -> None:
        code = frame.f_code
        if event == "call" and code.co_filename.startswith(ROOMS):
            calls[code.co_filename, code.co_firstlineno] += 1

    sys.setprofile(on_event)
    try:
        run()
    finally:
        sys.setprofile(None)
    return calls.total(), len(calls), len({file for file, _ in calls})


def _a_call() -> tuple[int, int, int]:
    layer = MoELayer(MoEConfig(model_dim=64, num_experts=8))
    x_TD = torch.randn(32, 64)
    for _ in range(4):  # in calls 2, 4, 8, ... ranks compare samples of their experts
        layer(x_TD).output.sum().backward()
    return counted(lambda: layer(x_TD))


def test_a_call_on_one_rank() -> None:
    calls, functions, files = _a_call()
    assert calls <= 125 and functions <= 100 and files <= 25, (calls, functions, files)


@pytest.mark.distributed
def test_a_call_on_two_ranks() -> None:
    calls, functions, files = map(max, zip(*run_gloo(2, _a_call), strict=True))
    assert calls <= 155 and functions <= 125 and files <= 31, (calls, functions, files)


def test_building_a_layer() -> None:
    MoELayer(MoEConfig(model_dim=64, num_experts=8))
    calls, _, _ = counted(lambda: MoELayer(MoEConfig(model_dim=64, num_experts=8)))
    assert calls <= 675, calls

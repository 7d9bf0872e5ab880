"""Rollouts replayed on Megatron's own loop: in every layout the losses are those of one rank."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("megatron.core",
                    reason="needs megatron-core: pip install 'moe-plugin[megatron]'")

from tests.hosts.megatron import test_megatron_layouts as layouts
from tests.hosts.megatron.ranks import ROOT
from tests.hosts.megatron.training import own_loop

pytestmark = [pytest.mark.megatron, pytest.mark.distributed, own_loop]
SCRIPT = str(Path(ROOT, "tests", "hosts", "megatron", "rollout_script.py"))
LAYOUTS = {
    "CP2 TP2": (4, """--context-parallel-size 2 --tensor-model-parallel-size 2 --sequence-parallel
        --expert-model-parallel-size 2 --make-vocab-size-divisible-by 4"""),
    "TP2": (2, "--tensor-model-parallel-size 2 --make-vocab-size-divisible-by 4"),
    "PP2, recomputed": (2, """--pipeline-model-parallel-size 2 --recompute-granularity full
        --recompute-method uniform --recompute-num-layers 1"""),
}


@pytest.fixture(scope="module")
def start(data: str, tmp_path_factory: pytest.TempPathFactory
          ) -> tuple[Path, layouts.Steps, layouts.Steps]:
    folder, plain = layouts.begin(tmp_path_factory.mktemp("rollouts"), data)
    replayed = layouts.steps(1, "", folder, script=SCRIPT)
    assert abs(replayed[0][0] - plain[0][0]) > 1e-3  # other experts
    return folder, plain, replayed


@pytest.mark.parametrize("layout", [
    "CP2 TP2", *(pytest.param(name, marks=pytest.mark.slow) for name in [*LAYOUTS][1:])])
def test_losses_are_those_of_one_rank(layout: str,
                                      start: tuple[Path, layouts.Steps, layouts.Steps]) -> None:
    world, flags = LAYOUTS[layout]
    layouts.same(layouts.steps(world, flags, start[0], script=SCRIPT), start[2])

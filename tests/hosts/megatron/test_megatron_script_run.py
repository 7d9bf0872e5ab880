"""What a run on Megatron's own loop shows and writes, how it ends, and what its ranks check, on
CPU: the launcher, as users start it.
"""

from __future__ import annotations

import json
import os
import re
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("megatron.core",
                    reason="needs megatron-core: pip install 'moe-plugin[megatron]'")
from tests.hosts.megatron.ranks import ROOT
from tests.hosts.megatron.test_megatron_script import FLAGS, launch, train
from tests.hosts.megatron.training import SCRIPT, VERSION
from tests.hosts.stopped import own_lines, stopped

pytestmark = [pytest.mark.megatron, pytest.mark.distributed, pytest.mark.slow]
EP2 = ["--expert-model-parallel-size", "2", "--train-iters", "5"]
# of published scripts: what a machine without CUDA lacks
GPU = """--moe-permute-fusion --moe-router-fusion --moe-grouped-gemm --cross-entropy-loss-fusion
--cross-entropy-fusion-impl te --use-flash-attn --moe-token-dispatcher-type flex
--moe-enable-deepep --attention-backend flash --tp-comm-overlap
--transformer-impl transformer_engine --distributed-backend nccl""".split()
BOUNDED = """--moe-dispatch bounded --moe-max-rows-factor 0.4 --moe-on-overflow repeat
--moe-parallel fixed""".split()


def records(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def by_step(path: Path) -> dict[int, tuple[float, float]]:
    """(loss, gradient norm) by iteration."""
    return {row["iteration"]: (row["lm_loss"], row["grad_norm"])
            for row in records(path) if "lm_loss" in row}


@pytest.fixture(scope="module")
def quiet_run(tmp_path_factory: pytest.TempPathFactory) -> tuple[list[str], Path]:
    """Lines and folder of a run of a script for GPUs, whose rows do not fit at first."""
    folder = tmp_path_factory.mktemp("quiet")
    done = launch(2, *FLAGS, *EP2, *GPU, *BOUNDED, "--save", str(folder), "--save-interval", "2",
                  "--eval-interval", "4", "--eval-iters", "1", options=())
    assert done.returncode == 0, (done.stdout + done.stderr)[-6000:]
    return (done.stdout + done.stderr).splitlines(), folder


def test_a_run_shows_megatrons_log_and_our_lines(quiet_run: tuple[list[str], Path]) -> None:
    lines, folder = quiet_run
    steps = [line for line in lines if re.search(r"iteration +\d/ +5 .* lm loss: ", line)]
    assert len(steps) == 5  # Megatron's, and no others
    assert f"all 5 iterations are done; losses and balance: {folder}/log.jsonl" in lines
    assert sum("arguments ignored on CPU, because" in line and "--moe-permute-fusion" in line
               and "--transformer-impl transformer_engine (local)" in line for line in lines) == 1
    assert any("validation loss at iteration 4" in line for line in lines)
    assert any(line.startswith("first step: ") for line in lines)
    for checkpoint in (folder / f"iter_{number:07d}" for number in (2, 4, 5)):
        meta = json.loads((checkpoint / "moe_plugin.json").read_text())
        written = {path.name for path in checkpoint.iterdir() if path.is_file()}
        written.discard("moe_plugin.json")
        assert set(meta["checksums"]) == set(meta["files"]) == written
    assert not list(folder.glob("*.part"))


def test_the_log_has_every_step_and_rows_that_do_not_fit_are_repeated(
        quiet_run: tuple[list[str], Path], tmp_path: Path) -> None:
    """The losses are those of native Megatron's line in a run without a bound."""
    lines, folder = quiet_run
    assert any("the row limit was raised, and the step is repeated" in line for line in lines)
    plain = train(2, *EP2, "--log-file", str(tmp_path / "plain.jsonl"))
    for path in (folder / "log.jsonl", tmp_path / "plain.jsonl"):
        seen = by_step(path)
        assert sorted(seen) == [1, 2, 3, 4, 5]
        for step, (loss, norm) in plain.losses.items():
            assert seen[step] == (pytest.approx(loss, rel=2e-5), pytest.approx(norm, rel=2e-3))
    rows = records(folder / "log.jsonl")
    assert [row["valid_loss"] for row in rows if "valid_loss" in row]
    native = float(re.findall(r"load_balancing_loss: (\S+)", plain.log)[4])
    row = next(row for row in rows if row["iteration"] == 5)
    # megatron-core 0.17 prints the last rank's
    assert sum(row["aux_losses"]["load_balancing_loss"]) / 2 == pytest.approx(
        native, rel=1e-5 if VERSION >= (0, 18) else 1e-2)
    assert set(row["balance"]) == {"layer1", "layer2"} and row["consumed_samples"] == 40
    settings = json.loads((folder / "settings.json").read_text())
    assert settings["settings"]["num_experts"] == 4
    assert settings["changed"]["num-experts"][0] == "4"


def test_a_run_goes_on_from_the_newest_whole_checkpoint_and_says_where_it_stopped(
        quiet_run: tuple[list[str], Path], tmp_path: Path) -> None:
    _, folder = quiet_run
    damaged = next((folder / "iter_0000005").glob("*.distcp"))
    content = bytearray(damaged.read_bytes())
    content[len(content) // 2] ^= 1
    damaged.write_bytes(content)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node",
               "2", "-m", "moe_plugin.hosts.megatron.launch", "--moe-cpu", SCRIPT, *FLAGS,
               *EP2[:2], "--train-iters", "100000", "--save", str(folder), "--load", str(folder),
               "--save-interval", "5", "--override-opt_param-scheduler"]
    log = stopped(command, "iteration       12/", tmp_path / "log", {
        **os.environ, "OMP_NUM_THREADS": "1",
        "PYTHONPATH": os.pathsep.join([os.environ.get("PYTHONPATH", ""), ROOT])})
    assert f"the checksum of {damaged.name} has changed since the file was written" in log
    assert f"Training resumes from the older checkpoint {folder}/iter_0000004" in log
    assert f"continuing from iteration 4 of {folder}" in log
    [(step, saved)] = re.findall(rf"^stopped at step (\d+), last checkpoint (\d+) in {folder}; "
                                 "the same command resumes the run$", log, re.M)
    assert int(step) - 5 <= int(saved) <= int(step) and 10 <= int(saved)
    assert not [line for line in own_lines(log) if "Traceback" in line], log[-3000:]


RUN = f'''
import sys
sys.path[:0] = [{ROOT!r}, {str(Path(SCRIPT).parent)!r}]
import os
import pretrain_gpt_moe as example
RANK = int(os.environ["RANK"])
'''
FAILS = RUN + '''
step = example.forward_step
def failing(*args, **kwargs):
    if RANK == 1 and example.get_args().curr_iteration == 1:
        raise ModuleNotFoundError("No module named 'nothing_of_this_name'")
    return step(*args, **kwargs)
example.forward_step = failing
example.main()
'''


def test_the_error_of_one_rank_is_said_by_the_others(tmp_path: Path) -> None:
    script = tmp_path / "pretrain.py"
    script.write_text(FAILS)
    done = launch(2, *FLAGS, *EP2, script=str(script), options=())
    assert done.returncode == 1
    said = [line for line in done.stderr.splitlines() if line.startswith("pretrain.py: error: ")]
    assert len(said) == 1, done.stderr[-4000:]
    assert "rank 0 of 2 in group" in said[0]
    assert "rank 1 of the job gave up: ModuleNotFoundError: No module named 'nothing_of_" in said[0]


# votes over all ranks, of which one answers wrongly; twins, of which one flips a bit at step 3

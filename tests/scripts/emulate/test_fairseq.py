"""Real `fairseq-train` on two emulated nodes: every all-to-all algorithm trains the same model, and
it is the one that runs.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable
from pathlib import Path

import pytest

from scripts.emulate import EmulatedCluster, why_not

pytest.importorskip("fairseq", reason="fairseq is not installed (see docs/fairseq.md)")

from tests.hosts.fairseq.conftest import DROPLESS, LANGUAGE_MODEL, run
from tests.scripts.emulate import host_faults, jobs
from tests.text import sentences

pytestmark = [pytest.mark.distributed, pytest.mark.fairseq]
Make = Callable[..., EmulatedCluster]
STEPS = 20
MOE = ("--user-dir moe_plugin --moe-freq 1 --moe-expert-count 4 --criterion moe_cross_entropy "
       "--moe-gate-loss-wt 0.01")
LINKS = {"rate_bit_s": 1e9, "delay_s": 2e-4}  # fast: what is proved here needs no slow link


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Preprocessed sentences, enough for all steps in one epoch; fairseq is loaded here, so that
    forked ranks have it.
    """
    if why_not():
        pytest.skip(why_not())
    import torch._dynamo  # noqa: F401 - 2 s; otherwise every forked rank imports it
    from fairseq import utils

    home, lines = tmp_path_factory.mktemp("data"), sentences(1320)
    (home / "train.txt").write_text("\n".join(lines[:1300]) + "\n")
    (home / "valid.txt").write_text("\n".join(lines[1300:]) + "\n")
    run("fairseq-preprocess",
        "--only-source --trainpref train.txt --validpref valid.txt --destdir lm", cwd=home).ok()
    utils.import_user_module(argparse.Namespace(user_dir="moe_plugin"))
    return home / "lm"


def arguments(data: Path, folder: Path, flags: str) -> str:
    return (
        f"{data} {LANGUAGE_MODEL} {MOE} {DROPLESS} --max-update {STEPS} --no-epoch-checkpoints "
        f"--disable-validation --save-dir {folder} "
        f"--moe-stats-jsonl {folder}/stats.jsonl --moe-stats-interval 5 {flags}")


def train(cluster: EmulatedCluster, data: Path, folder: Path, flags: str) -> jobs.Job:
    folder.mkdir(exist_ok=True)
    jobs.finish(cluster, jobs.fairseq, arguments(data, folder, flags).split(), f"{folder}/log")
    return jobs.read(folder, jobs.fairseq_losses((folder / "log0").read_text()))


@pytest.fixture(scope="module")
def one_machine(data: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, jobs.Job]:
    """Four ranks on one machine, linear: what all others must equal."""
    folder = tmp_path_factory.mktemp("one_machine")
    with EmulatedCluster(1, 4, **LINKS) as cluster:
        job = train(cluster, data, folder, "--moe-parallel fixed --moe-all-to-all linear")
    assert sorted(job.losses) == list(range(1,
                                            STEPS + 1)) and job.losses[STEPS] < job.losses[1] - 0.5
    assert job.topologies == {jobs.ALL: jobs.ONE_NODE}
    return folder, job


SLOW = pytest.mark.slow


@pytest.mark.parametrize("name", jobs.algorithms(slow=("linear", "native", "leader")))
def test_every_algorithm_trains_the_same_model(cluster: Make, data: Path,
                                               one_machine: tuple[Path, jobs.Job], tmp_path: Path,
                                               name: str) -> None:
    """Equal losses as printed, and equal parameters after 20 steps to the last bit: an all-to-all
    only moves rows.
    """
    job = train(cluster(2, 2, **LINKS), data, tmp_path / "run",
                f"--moe-parallel fixed --moe-all-to-all {name}")
    assert job.losses == one_machine[1].losses
    jobs.same_parameters(one_machine[0], tmp_path / "run", 4)
    jobs.ran_on_two_nodes(job, name, STEPS, layers=2)


def test_layouts_chosen_while_it_trains_give_the_curve_of_a_fixed_one(cluster: Make, data: Path,
                                                                      tmp_path: Path) -> None:
    """Two experts on four ranks, so r is 0, 1 or 2; each layer explores, settles, and says so;
    gradients are summed in other orders. Both are those of the defaults over several nodes.
    """
    made, flags = cluster(2, 2, **LINKS), "--moe-expert-count 2"
    wanted = train(made, data, tmp_path / "fixed", f"{flags} --moe-parallel-r 1")
    job = train(made, data, tmp_path / "auto",
                f"{flags} --moe-overlap-max 2 --moe-parallel-samples 1")
    assert "all-to-all auto over ranks" in job.log and "layouts of layers over ranks" in job.log
    assert job.losses == pytest.approx(wanted.losses, abs=2.1e-3)
    jobs.same_parameters(tmp_path / "fixed", tmp_path / "auto", 4, atol=2e-3)
    jobs.settled_on_a_layout(tmp_path / "auto", layers=2)


@SLOW
def test_groups_inside_nodes_say_that_linear_runs(cluster: Make, data: Path,
                                                  one_machine: tuple[Path, jobs.Job],
                                                  tmp_path: Path) -> None:
    """Two copies of the experts, one a node: the same curve but for rounding, since gradients are
    summed in another order.
    """
    job = train(cluster(2, 2, **LINKS), data, tmp_path / "run",
                "--moe-parallel fixed --moe-all-to-all 2dh --moe-expert-parallel-size 2")
    assert job.losses == pytest.approx(one_machine[1].losses, abs=2.1e-3)
    # fairseq shows the log of rank 0 alone
    assert job.topologies == {
        "[0, 1]": "1 node(s) of 2 rank(s) (detected); it runs as linear, because all 2 ranks are "
                  "on one node"
    }
    assert set(job.exchanges) == {"linear"}


@pytest.mark.slow
def test_groups_that_span_part_of_nodes(cluster: Make, data: Path, tmp_path: Path) -> None:
    """Groups of three ranks over nodes of two: uneven nodes, the same parameters as linear."""
    made, flags = cluster(3, 2, **LINKS), "--moe-expert-count 6 --moe-expert-parallel-size 3"
    flags += " --moe-parallel fixed"
    wanted = train(made, data, tmp_path / "linear", f"{flags} --moe-all-to-all linear")
    for name in ("2dh", "leader"):
        job = train(made, data, tmp_path / name, f"{flags} --moe-all-to-all {name}")
        assert job.losses == wanted.losses
        jobs.same_parameters(tmp_path / "linear", tmp_path / name, 6)
        assert job.topologies == {"[0, 1, 2]": "2 node(s) of 1 to 2 rank(s) (detected)"}
        assert set(job.exchanges) == {name}


def _long(data: Path, folder: Path) -> list[str]:
    return arguments(data, folder, "--no-save").replace(f"--max-update {STEPS}",
                                                        "--max-update 400").split()


def _steps(log: Path) -> int:
    return max(jobs.fairseq_losses(log.read_text()), default=0) if log.exists() else 0


def test_a_rank_dies_in_an_exchange(cluster: Make, data: Path, tmp_path: Path) -> None:
    host_faults.dies_in_an_exchange(cluster(2, 2, **LINKS), jobs.fairseq, _long(data, tmp_path),
                                    f"{tmp_path}/log")


@SLOW
def test_a_node_falls_silent(cluster: Make, data: Path, tmp_path: Path) -> None:
    host_faults.falls_silent(cluster(2, 2, **LINKS), jobs.fairseq, _long(data, tmp_path),
                             f"{tmp_path}/log", lambda: _steps(tmp_path / "log0"))


@SLOW
def test_torchrun_restarts_it_from_the_checkpoint(cluster: Make, data: Path,
                                                  one_machine: tuple[Path, jobs.Job],
                                                  tmp_path: Path) -> None:
    """At most the steps since the checkpoint are lost; losses as printed and final parameters are
    those of the uninterrupted run.
    """
    save = ("--moe-parallel fixed --keep-interval-updates 1 --save-interval-updates "
            f"{host_faults.SAVE_EVERY}")
    program, out = ["fairseq-train", *arguments(data, tmp_path, save).split()], tmp_path / "out"
    killed = host_faults.is_restarted(cluster(2, 2, **LINKS), program, out, lambda: _steps(out),
                                      STEPS)
    resumed = [
        int(step) for step in re.findall(r"Loaded checkpoint .*@ (\d+) updates", out.read_text())
    ]
    assert resumed and set(resumed) == {resumed[0]}  # each rank says so
    assert killed - host_faults.SAVE_EVERY <= resumed[0]
    assert resumed[0] % host_faults.SAVE_EVERY == 0
    assert jobs.fairseq_losses(out.read_text()) == one_machine[1].losses
    # sums over memory that lies elsewhere may round otherwise
    jobs.same_parameters(one_machine[0], tmp_path, 4, atol=1e-6)

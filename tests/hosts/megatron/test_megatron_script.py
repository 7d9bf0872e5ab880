"""Megatron's own training code, `megatron.training.pretrain`, started by the launcher on CPU: our
example script as users start it, what a run shows and writes, and how it ends.
"""

from __future__ import annotations

import importlib.util
import json
import os
import re
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.hosts.megatron.ranks import ROOT, run_main
from tests.hosts.megatron.training import EP2, PP2, SCRIPT, VERSION
from tests.hosts.stopped import own_lines, stopped

FLAGS = """--num-layers 2 --hidden-size 32 --num-attention-heads 4 --seq-length 32
--max-position-embeddings 32 --micro-batch-size 2 --global-batch-size 8 --lr 1e-2 --min-lr 1e-2
--lr-decay-iters 100 --lr-decay-style constant --vocab-size 256 --make-vocab-size-divisible-by 8
--mock-data --log-interval 1 --eval-iters 0 --num-workers 0 --seed 3 --disable-bias-linear
--attention-dropout 0 --hidden-dropout 0 --num-experts 4 --moe-router-topk 2
--moe-router-load-balancing-type aux_loss --moe-aux-loss-coeff 0.01""".split()
RESUME = "--no-load-rng --override-opt_param-scheduler --ckpt-step 2 --train-iters 5".split()


@dataclass(frozen=True)
class Trained:
    """losses: (loss, gradient norm) by iteration, as Megatron logs them; log: all that was said."""

    losses: dict[int, tuple[float, float]]
    log: str


def launch(world: int, *flags: str, script: str = SCRIPT, timeout_s: float = 300,
           options: Sequence[str] = ()) -> subprocess.CompletedProcess[str]:
    """Run the launcher on CPU on `world` ranks, as a user does."""
    return torchrun("--standalone", "--nproc_per_node", str(world), "-m",
                    "moe_plugin.hosts.megatron.launch", "--moe-cpu", *options, script, *flags,
                    timeout_s=timeout_s)


def torchrun(*argv: str, timeout_s: float = 300) -> subprocess.CompletedProcess[str]:
    """`torchrun` with those arguments, from this project's root."""
    path = os.pathsep.join([*filter(None, [os.environ.get("PYTHONPATH")]), ROOT])
    return subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", *argv], cwd=ROOT, capture_output=True,
        check=False, text=True, timeout=timeout_s,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore", "PYTHONPATH": path})


def train(world: int, *flags: str, script: str = SCRIPT) -> Trained:
    """Train with `FLAGS` and these."""
    done = launch(world, *FLAGS, *flags, script=script)
    log = done.stdout + done.stderr
    assert done.returncode == 0, log[-6000:]
    rows = re.findall(r"iteration\s+(\d+)/.*?lm loss: (\S+) .*?grad norm: (\S+)", done.stdout)
    losses = [float(loss) for _, loss, _ in rows]
    if len(rows) > 1:  # 0.17 to 0.19: the second line has the mean of the first two steps
        losses[1] = 2 * losses[1] - losses[0]
    return Trained({int(step): (loss, float(norm))
                    for (step, _, norm), loss in zip(rows, losses, strict=True)}, log)


def same(run: Trained, reference: Trained, steps: range) -> None:
    """Losses and gradient norms of these steps are the reference's, up to rounding."""
    for step in steps:
        assert run.losses[step] == pytest.approx(reference.losses[step], rel=2e-5), (
            step, run.losses, reference.losses)


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> tuple[Trained, str]:
    """Five steps on two ranks that share the experts, and the folder of its checkpoints."""
    folder = str(tmp_path_factory.mktemp("reference"))
    run = train(2, "--expert-model-parallel-size", "2", "--train-iters", "5", "--save", folder,
                "--save-interval", "2")
    assert sorted(run.losses) == [1, 2, 3, 4, 5] and run.losses[5][0] < run.losses[1][0]
    return run, folder


@pytest.mark.slow
def test_launcher_brings_settings_records_and_routers_to_an_unmodified_script(
        tmp_path: Path) -> None:
    settings = tmp_path / "moe.yaml"
    settings.write_text("dispatch: {name: padded, capacity_factor: 2.0}\n"
                        "router: {name: hash, hash: {vocabulary: 264}}\n")
    records, events = tmp_path / "moe.jsonl", tmp_path / "events"
    train(2, "--pipeline-model-parallel-size", "2", "--train-iters", "4",
          "--moe-config", str(settings), "--moe-router-load-balancing-type", "none",
          "--moe-router-topk", "1", "--moe-router-pre-softmax",
          "--moe-stats-jsonl", str(records), "--moe-stats-interval", "2",
          "--moe-stats-timeline", "3", "--moe-stats-tensorboard", str(events))
    first, second = (
        [json.loads(line) for line in Path(f"{records}{stage}").read_text().splitlines()]
        for stage in ("", ".stage1"))
    for rows, layer in ((first, "layer1"), (second, "layer2")):
        balance = [row for row in rows if "max_over_mean" in row]
        assert [(row["step"], row["layer"]) for row in balance] == [(2, layer), (4, layer)]
        assert all(row["capacity"] == 32 for row in balance)  # 2 * T / E slots
    assert any("timeline" in json.dumps(row) for row in first)
    assert list(events.rglob("events.out.*"))


CONFIG_SCRIPT = f'''
import sys
sys.path.insert(0, {str(Path(SCRIPT).parent)!r})
import pretrain_gpt_moe as example
from megatron.core.enums import ModelType
from megatron.training import argument_utils, arguments, pretrain
args = arguments.parse_and_validate_args(extra_args_provider=example.own_defaults)
container = argument_utils.pretrain_cfg_container_from_args(
    args, argument_utils.gpt_config_from_args(args))
pretrain(container, example.datasets, model_type=ModelType.encoder_or_decoder,
         forward_step_func=example.forward_step)
'''


@pytest.mark.slow
@pytest.mark.skipif(VERSION < (0, 19), reason="scripts of 0.19 have a GPTModelConfig")
def test_spec_serves_a_script_that_asks_for_it_before_there_are_groups(
        reference: tuple[Trained, str], tmp_path: Path) -> None:
    straight, folder = reference
    script = tmp_path / "pretrain.py"
    script.write_text(CONFIG_SCRIPT)
    same(train(4, *PP2, *EP2, "--load", folder, *RESUME, script=str(script)), straight,
         range(3, 6))
    predicting = ["--mtp-num-layers", "1", "--position-embedding-type", "rope", "--train-iters",
                  "3"]
    same(train(2, *PP2, *predicting, script=str(script)), train(2, *PP2, *predicting), range(1, 4))


PARSING_SCRIPT = '''
from megatron.training import arguments, global_vars
def mine(parser):
    parser.add_argument("--mine")
    return parser
args = arguments.parse_args(mine)
global_vars.set_args(args)
from moe_plugin.hosts.megatron.compat.settings import script_arguments
from moe_plugin.hosts.megatron.translate import settings_from_flags
import megatron.core
print(args.num_experts, args.mine, args.distributed_backend, args.masked_softmax_fusion)
print(settings_from_flags(script_arguments()))
print(megatron.core.__file__)
print(arguments.__file__)
'''


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A folder like a source checkout: a script, and Megatron next to it."""
    folder = tmp_path / "a checkout"
    folder.mkdir()
    spec = importlib.util.find_spec("megatron.training")
    assert spec is not None and spec.origin is not None
    (folder / "megatron").symlink_to(Path(spec.origin).parents[1])
    (folder / "pretrain_gpt.py").write_text(PARSING_SCRIPT)
    return folder


def _launch_alone(*argv: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-W", "ignore", "-m", "moe_plugin.hosts.megatron.launch", *argv], cwd=ROOT,
        capture_output=True, check=False, text=True, timeout=300)


def test_launcher_adds_our_arguments_to_the_scripts_own(checkout: Path, tmp_path: Path) -> None:
    settings = tmp_path / "moe.yaml"
    settings.write_text("megatron: {num_experts: 4, mine: in the file}\n"
                        "dispatch: {name: padded}\nlosses: {gshard: 0.5}\n")
    done = _launch_alone("--moe-cpu", str(checkout / "pretrain_gpt.py"), "megatron.num_experts=8",
                         "--mine", "x", "--moe-config", str(settings),
                         "--moe-capacity-factor", "1.5")
    assert done.returncode == 0, done.stderr
    said = done.stdout.splitlines()[-4:]
    assert said[0] == "8 x gloo False"
    assert said[1] == ("{'dispatch.name': 'padded', 'losses': {'gshard': 0.5}, "
                       "'dispatch.capacity_factor': 1.5}")
    # megatron.core and megatron.training are those next to the script, not the installed ones
    assert [Path(line).parents[2] for line in said[2:]] == [checkout, checkout]


def test_launcher_offers_no_second_name_for_native_arguments(checkout: Path) -> None:
    said = run_main("moe_plugin.hosts.megatron.launch",
                    ["--moe-cpu", str(checkout / "pretrain_gpt.py"), "--moe-top-k", "3",
                     "--moe-capacity-facto", "1.0"], 1, checkout, fails=True)
    assert "unrecognized arguments: --moe-top-k" in said
    assert "use --moe-router-topk instead of --moe-top-k" in said
    assert "--moe-capacity-facto" in said and "did you mean --moe-capacity-factor" in said
    assert said.count("\n") == 1, "the script has a thousand lines of usage"


FIVE_STEPS = ["--expert-model-parallel-size", "2", "--train-iters", "5"]
# of published scripts: what a machine without CUDA lacks
GPU = """--moe-permute-fusion --moe-router-fusion --moe-grouped-gemm --cross-entropy-loss-fusion
--cross-entropy-fusion-impl te --use-flash-attn --moe-token-dispatcher-type flex
--moe-enable-deepep --attention-backend flash --tp-comm-overlap
--transformer-impl transformer_engine --distributed-backend nccl""".split()
BOUNDED = """--moe-dispatch bounded --moe-max-rows-factor 0.4 --moe-on-overflow repeat
--moe-parallel fixed""".split()


def _records(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def _by_step(path: Path) -> dict[int, tuple[float, float]]:
    """(loss, gradient norm) by iteration."""
    return {row["iteration"]: (row["lm_loss"], row["grad_norm"])
            for row in _records(path) if "lm_loss" in row}


@pytest.fixture(scope="module")
def quiet_run(tmp_path_factory: pytest.TempPathFactory) -> tuple[list[str], Path]:
    """Lines and folder of a run of a script for GPUs, whose rows do not fit at first."""
    folder = tmp_path_factory.mktemp("quiet")
    done = launch(2, *FLAGS, *FIVE_STEPS, *GPU, *BOUNDED, "--save", str(folder),
                  "--save-interval", "2", "--eval-interval", "4", "--eval-iters", "1", options=())
    assert done.returncode == 0, (done.stdout + done.stderr)[-6000:]
    return (done.stdout + done.stderr).splitlines(), folder


@pytest.mark.slow
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


@pytest.mark.slow
def test_the_log_has_every_step_and_rows_that_do_not_fit_are_repeated(
        quiet_run: tuple[list[str], Path], tmp_path: Path) -> None:
    """The losses are those of native Megatron's line in a run without a bound."""
    lines, folder = quiet_run
    assert any("the row limit was raised, and the step is repeated" in line for line in lines)
    plain = train(2, *FIVE_STEPS, "--log-file", str(tmp_path / "plain.jsonl"))
    for path in (folder / "log.jsonl", tmp_path / "plain.jsonl"):
        seen = _by_step(path)
        assert sorted(seen) == [1, 2, 3, 4, 5]
        for step, (loss, norm) in plain.losses.items():
            assert seen[step] == (pytest.approx(loss, rel=2e-5), pytest.approx(norm, rel=2e-3))
    rows = _records(folder / "log.jsonl")
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


@pytest.mark.slow
def test_a_run_goes_on_from_the_newest_whole_checkpoint_and_says_where_it_stopped(
        quiet_run: tuple[list[str], Path], tmp_path: Path) -> None:
    _, folder = quiet_run
    damaged = next((folder / "iter_0000005").glob("*.distcp"))
    content = bytearray(damaged.read_bytes())
    content[len(content) // 2] ^= 1
    damaged.write_bytes(content)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node",
               "2", "-m", "moe_plugin.hosts.megatron.launch", "--moe-cpu", SCRIPT, *FLAGS,
               *FIVE_STEPS[:2], "--train-iters", "100000", "--save", str(folder), "--load",
               str(folder), "--save-interval", "5", "--override-opt_param-scheduler"]
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


@pytest.mark.slow
def test_the_error_of_one_rank_is_said_by_the_others(tmp_path: Path) -> None:
    script = tmp_path / "pretrain.py"
    script.write_text(FAILS)
    done = launch(2, *FLAGS, *FIVE_STEPS, script=str(script), options=())
    assert done.returncode == 1
    said = [line for line in done.stderr.splitlines() if line.startswith("pretrain.py: error: ")]
    assert len(said) == 1, done.stderr[-4000:]
    assert "rank 0 of 2 in group" in said[0]
    assert "rank 1 of the job gave up: ModuleNotFoundError: No module named 'nothing_of_" in said[0]

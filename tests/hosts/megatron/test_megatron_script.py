"""Megatron's own training code, `megatron.training.pretrain`, started by the launcher on CPU: our
example script, started as users start it.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

pytest.importorskip("megatron.core",
                    reason="needs megatron-core: pip install 'moe-plugin[megatron]'")
from tests.hosts.megatron.ranks import ROOT
from tests.hosts.megatron.training import SCRIPT, own_loop

VERSION = tuple(int(part) for part in importlib.metadata.version("megatron-core").split(".")[:2])
pytestmark = [
    pytest.mark.megatron, pytest.mark.distributed, own_loop
]

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
           options: Sequence[str] = ("--moe-verbose",)) -> subprocess.CompletedProcess[str]:
    """Run the launcher on CPU on `world` ranks, as a user does; Megatron's lines are shown."""
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


LAYOUTS = {
    "1 rank": (1, ""),
    "EP2": (2, "--expert-model-parallel-size 2"),
    "TP2": (2, "--tensor-model-parallel-size 2"),
    "TP2, sequence parallelism": (2, "--tensor-model-parallel-size 2 --sequence-parallel"),
    "PP2": (2, "--pipeline-model-parallel-size 2"),
    "EP2, recompute of layers": (
        2, "--expert-model-parallel-size 2 --recompute-granularity full "
        "--recompute-method uniform --recompute-num-layers 1"),
    "EP2, grouped GEMM": (2, "--expert-model-parallel-size 2 --moe-grouped-gemm"),
    "EP2, recompute of activations": (
        2, "--expert-model-parallel-size 2 --moe-grouped-gemm --recompute-granularity selective "
        "--recompute-modules moe_act"),
    "TP2, recompute of experts": (
        2, "--tensor-model-parallel-size 2 --sequence-parallel "
        "--recompute-granularity selective --recompute-modules moe"),
    "PP2 x EP2": (4, "--pipeline-model-parallel-size 2 --expert-model-parallel-size 2"),
}


@pytest.mark.slow
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_checkpoint_continues_in_every_layout(layout: str,
                                                reference: tuple[Trained, str]) -> None:
    straight, folder = reference
    world, flags = LAYOUTS[layout]
    run = train(world, *flags.split(), "--load", folder, *RESUME)
    assert sorted(run.losses) == [3, 4, 5]
    same(run, straight, range(3, 6))


@pytest.mark.slow
def test_virtual_stages_over_two_ranks_continue_a_run_without_them(tmp_path: Path) -> None:
    layers = ["--num-layers", "4"]
    straight = train(2, *layers, "--expert-model-parallel-size", "2", "--train-iters", "5",
                     "--save", str(tmp_path), "--save-interval", "2")
    stages = "--pipeline-model-parallel-size 2 --num-layers-per-virtual-pipeline-stage 1".split()
    same(train(2, *layers, *stages, "--load", str(tmp_path), *RESUME), straight, range(3, 6))


@pytest.mark.slow
def test_pipeline_schedules_reach_the_script() -> None:
    flags = ["--pipeline-model-parallel-size", "2", "--train-iters", "4", "--pipeline-schedule"]
    native, eager, auto = (train(2, *flags, name) for name in ("1f1b", "eager-1f1b", "auto"))
    assert native.losses == eager.losses == auto.losses
    slices = [*flags, "terapipe", "--pipeline-slices", "14,10,8"]
    plain = ["--moe-aux-loss-coeff", "0"]  # a balance loss is that of a slice
    same(train(2, *slices, *plain), train(2, *flags, "1f1b", *plain), range(1, 5))
    done = launch(2, *FLAGS, *flags, "eager-1f1b", "--num-layers-per-virtual-pipeline-stage", "1",
                  "--num-layers", "4")
    assert done.returncode and "does not fit virtual stages" in done.stderr


@pytest.mark.slow
def test_overlapped_exchanges_train_the_same_model() -> None:
    """In bf16, as Megatron demands, so that a step's rounding shows in the next ones."""
    flags = ["--expert-model-parallel-size", "2", "--bf16", "--train-iters", "4",
             "--moe-token-dispatcher-type", "alltoall"]
    plain, overlapped = (train(2, *flags, *more)
                         for more in ([], ["--overlap-moe-expert-parallel-comm"]))
    assert overlapped.losses[1] == plain.losses[1]
    for step in range(2, 5):
        (loss, norm), (other, other_norm) = overlapped.losses[step], plain.losses[step]
        assert loss == pytest.approx(other, rel=1e-3)
        assert norm == pytest.approx(other_norm, rel=0.03)


@pytest.mark.slow
def test_distributed_optimizer_saves_and_resumes_across_layouts(
        reference: tuple[Trained, str], tmp_path: Path) -> None:
    straight, _ = reference
    sharded = ["--use-distributed-optimizer", "--dist-ckpt-optim-fully-reshardable"]
    run = train(2, *sharded, "--train-iters", "5", "--save", str(tmp_path), "--save-interval", "2")
    same(run, straight, range(1, 6))
    for layout in ("EP2", "TP2, sequence parallelism", "PP2"):
        world, flags = LAYOUTS[layout]
        same(train(world, *sharded, *flags.split(), "--load", str(tmp_path), *RESUME), straight,
             range(3, 6))


@pytest.mark.slow
def test_the_documented_command_trains() -> None:
    page = Path(ROOT, "docs", "megatron.md").read_text()
    found = re.search(r"torchrun( [^`]*?scripts/pretrain_gpt_moe\.py[^`]*)```", page)
    assert found is not None
    done = torchrun(*shlex.split(found[1].replace("\\\n", " ")))
    assert done.returncode == 0, done.stderr[-6000:]
    assert re.search(r"iteration\s+20/.*lm loss", done.stdout)


@pytest.mark.slow
def test_launcher_brings_settings_records_and_routers_to_an_unmodified_script(
        tmp_path: Path) -> None:
    settings = tmp_path / "moe.yaml"
    settings.write_text("dispatch: {name: padded, capacity_factor: 2.0}\n"
                        "router: {name: hash, hash: {vocabulary: 256}}\n")
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
    world, flags = LAYOUTS["PP2 x EP2"]
    same(train(world, *flags.split(), "--load", folder, *RESUME, script=str(script)), straight,
         range(3, 6))
    done = launch(1, *FLAGS, "--train-iters", "1", "--mtp-num-layers", "1",
                  "--position-embedding-type", "rope", script=str(script))
    assert "mtp_num_layers=1 cannot be used with --spec" in done.stderr, done.stderr[-3000:]


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
    done = _launch_alone(str(checkout / "pretrain_gpt.py"), "--moe-top-k", "3")
    assert done.returncode == 2 and "unrecognized arguments: --moe-top-k" in done.stderr
    assert done.stderr.count("\n") == 1, "the script has a thousand lines of usage"


@pytest.mark.slow
def test_experts_elsewhere_evaluate_alike(tmp_path: Path) -> None:
    from moe_plugin.checkpoint.expert_file import write_experts
    from moe_plugin.checkpoint.formats.base import open_source
    from moe_plugin.checkpoint.formats.megatron import format as _registers  # noqa: F401

    flags = [*FLAGS, "--expert-model-parallel-size", "2", "--moe-parallel", "fixed",
             "--train-iters", "2", "--eval-iters", "2"]
    folder, file = str(tmp_path / "run"), tmp_path / "experts.safetensors"
    done = launch(2, *flags, "--save", folder, "--save-interval", "2")
    assert done.returncode == 0, (done.stdout + done.stderr)[-6000:]
    with open_source(Path(folder, "iter_0000002")) as source:
        write_experts(source, file)
    seen = []
    for more in ([], ["--moe-experts-on", "host", "--moe-experts-cache", "64KiB"],
                 ["--moe-experts-on", "disk", "--moe-experts-store-path", str(file)]):
        done = launch(2, *flags, "--load", folder, "--skip-train", *more)
        log = done.stdout + done.stderr
        assert done.returncode == 0, log[-6000:]
        seen.append(re.findall(r"on (\w+) set \| lm loss value: (\S+)", log))
    assert len(seen[0]) == 2 and seen[0] == seen[1] == seen[2]

"""A tiny synthetic corpus through the real `fairseq-preprocess`, and ways to start the real command
lines.
"""

from __future__ import annotations

import json
import os
import random
import re
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.distributed import free_port
from tests.hosts.fairseq.commands import run_command, run_spawning
from tests.preloaded import Server
from tests.text import sentence

pytest.importorskip("fairseq", reason="fairseq is not installed (see docs/fairseq.md)")
pytestmark = pytest.mark.fairseq

server = Server("tests.hosts.fairseq.preload")
stock_server = Server("fairseq_cli.train")
BIN = Path(sys.executable).parent
LANGUAGE_MODEL = (
    "--task language_modeling --arch transformer_lm --decoder-embed-dim 32 --decoder-ffn-embed-dim "
    "64 --decoder-layers 2 "
    "--decoder-attention-heads 2 --decoder-input-dim 32 --decoder-output-dim 32 --dropout 0 "
    "--optimizer sgd --momentum 0.9 --lr 0.1 "
    "--lr-scheduler fixed --tokens-per-sample 32 --batch-size 4 --log-format json --log-interval 1 "
    "--no-progress-bar --cpu "
    "--num-workers 0 --seed 3 --clip-norm 0.5")
MOE = ("--user-dir moe_plugin --moe-freq 2 --moe-expert-count 4 --criterion moe_cross_entropy "
       "--moe-gate-loss-wt 0.01")
DROPLESS = "--moe-dispatch ragged --moe-capacity-factor none --moe-second-expert-policy all"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.fairseq)


@dataclass(frozen=True)
class Corpus:
    """Preprocessed data: `lm` for language modelling, `mt` for translation (the target is the
    source reversed).
    """

    lm: Path
    mt: Path


@dataclass(frozen=True)
class Result:
    """What a command left: exit code and everything it printed."""

    code: int
    log: str

    @property
    def steps(self) -> list[dict[str, float]]:
        """One entry a training step: the numbers of fairseq's log line."""
        found = [
            json.loads(m.group(1))
            for m in re.finditer(r"train_inner(?: \||\]\[INFO\] -) (\{.*\})", self.log)
        ]
        # null: a figure that an earlier step had and this one has not (second choices, where a list
        # of routers takes turns)
        return [{key: float(value) for key, value in entry.items() if value is not None}
                for entry in found]

    @property
    def losses(self) -> list[float]:
        return [entry["loss"] for entry in self.steps]

    def ok(self) -> Result:
        assert self.code == 0, self.log[-6000:]
        return self

    def failed_with(self, *texts: str) -> None:
        assert self.code != 0, "the command succeeded:\n" + self.log[-3000:]
        for text in texts:
            assert text in self.log, f"{text!r} is not in:\n{self.log[-6000:]}"


def environment() -> dict[str, str]:
    quiet = {
        name: value for name, value in os.environ.items()
        if name not in ("MASTER_ADDR", "MASTER_PORT", "WORLD_SIZE", "RANK", "LOCAL_RANK")
    }
    return {**quiet, "OMP_NUM_THREADS": "1", "TORCHDYNAMO_DISABLE": "1"}


def command(tool: str, arguments: str, ranks: int = 1) -> list[str]:
    """`fairseq-...` as a user starts it: alone, or by torchrun on several ranks."""
    program = tool if tool.endswith(".py") else str(BIN / tool)
    start = [sys.executable] if tool.endswith(".py") else []
    if ranks > 1:
        start = [
            sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node",
            str(ranks)
        ]
    return [*start, program, *arguments.split()]


def run(tool: str, arguments: str, ranks: int = 1, cwd: Path | None = None,
        attack: Callable[[], None] | None = None) -> Result:
    """A command in processes that are forked with fairseq imported (saves 5 s of CPU time a rank).
    attack: called in each of them before the command.
    """
    return fork(ranks, run_command, tool, arguments.split(), attack, cwd=cwd)


def train(corpus: Corpus, home: Path, flags: str, ranks: int = 1, *, save: bool = False,
          model: str = f"{MOE} {DROPLESS}", attack: Callable[[], None] | None = None) -> Result:
    """`fairseq-train` of the small language model. save: write checkpoints to `home`."""
    shape = LANGUAGE_MODEL
    if "--optimizer" in flags:
        shape = shape.replace("--optimizer sgd --momentum 0.9 --lr 0.1 ", "")
    return run("fairseq-train", f"{corpus.lm} {shape} {model} {flags} --save-dir {home} "
               f"{'' if save else '--no-save'}", ranks=ranks, attack=attack)


def run_stock(arguments: str, tool: str = "fairseq-train") -> Result:
    """A command where nothing has imported a user directory yet."""
    return fork(1, run_command, tool, arguments.split(), source=stock_server)


def run_on_its_own_ranks(tool: str, arguments: str) -> Result:
    """A command that starts its ranks itself."""
    return fork(1, run_spawning, tool, arguments.split())


def fork(ranks: int, function: Callable[..., None], *args: Any, cwd: Path | None = None,
         source: Server = server) -> Result:
    """`function(*args)` in each of these processes."""
    variables = environment()
    if ranks > 1:
        variables |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    done = source.run(ranks, function, *args, environment=variables, cwd=cwd, timeout_s=600)
    return Result(done.code, done.log)


def run_alone(tool: str, arguments: str, ranks: int = 1, cwd: Path | None = None) -> Result:
    """The same in processes of their own, as a user starts them."""
    done = subprocess.run(command(tool, arguments, ranks), cwd=cwd, env=environment(),
                          stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=600,
                          check=False)
    return Result(done.returncode, done.stdout)


def make_corpus(home: Path) -> Corpus:
    """Sentences of a small grammar through `fairseq-preprocess`."""
    generator = random.Random(0)
    for name, size in (("train", 300), ("valid", 40), ("test", 20)):
        sentences = [sentence(generator) for _ in range(size)]
        (home / f"{name}.src").write_text("\n".join(sentences) + "\n")
        (home / f"{name}.tgt").write_text("\n".join(" ".join(reversed(s.split()))
                                                    for s in sentences) + "\n")
    run(
        "fairseq-preprocess",
        "--only-source --trainpref train.src --validpref valid.src --testpref test.src --destdir "
        "lm",
        cwd=home).ok()
    run(
        "fairseq-preprocess",
        "-s src -t tgt --trainpref train --validpref valid --testpref test --destdir mt "
        "--joined-dictionary",
        cwd=home).ok()
    return Corpus(home / "lm", home / "mt")


@pytest.fixture(scope="session", autouse=True)
def registered() -> None:
    """The user dir as fairseq itself imports it."""
    import argparse

    from fairseq import utils

    utils.import_user_module(argparse.Namespace(user_dir="moe_plugin"))


@pytest.fixture(scope="session")
def ep2(corpus: Corpus, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Result]:
    """A 2-rank run of 12 steps, with its checkpoints; several tests read it."""
    home = tmp_path_factory.mktemp("ep2")
    result = run(
        "fairseq-train",
        f"{corpus.lm} {LANGUAGE_MODEL} {MOE} {DROPLESS} --max-update 12 --save-interval-updates 4 "
        f"--save-dir {home}",
        ranks=2)
    return home, result.ok()


@pytest.fixture(scope="session")
def mt2(corpus: Corpus, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Result]:
    """A 2-rank run of a translation model with experts in encoder and decoder."""
    home = tmp_path_factory.mktemp("mt2")
    flags = (
        "--task translation -s src -t tgt --arch transformer_tiny --dropout 0 --optimizer adam "
        "--lr 0.005 --lr-scheduler fixed --batch-size 16 "
        "--max-update 12 --log-format json --log-interval 1 --no-progress-bar --cpu --num-workers "
        "0 --seed 3 --user-dir moe_plugin "
        "--criterion moe_label_smoothed_cross_entropy --label-smoothing 0.1 --moe-gate-loss-wt "
        "0.01 --moe-expert-count 4 "
        "--encoder-moe-freq 2 --decoder-moe-freq 2 --use-moe-pad-mask")
    return home, run("fairseq-train", f"{corpus.mt} {flags} --save-dir {home}", ranks=2).ok()

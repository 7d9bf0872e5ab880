"""The code blocks of the documentation, and what becomes of their shell commands in the tests.

The first word of a fence is the block's language, a second one its mark:

| fence | in the tests |
|---|---|
| `python` | runs as printed |
| `diff` | of Python: runs without its changes, and with them |
| `yaml` | is read as settings |
| `bash` | every command runs, at small sizes, in one folder per page |
| `bash check` | cannot run here (network, cluster, hours): the real parsers check every word |
| `text` | output and formulas, not run |
"""

from __future__ import annotations

import importlib.util
import re
import runpy
import shlex
import shutil
import subprocess
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.cli import megatron_flags

ROOT = Path(__file__).resolve().parents[2]
FENCES = ("python", "diff", "yaml", "bash", "bash check", "text")
_FENCE = re.compile(r"^```([^\n]*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
# appended to the printed flags, so that they win
FAIRSEQ_SMALL = (
    "--decoder-layers 2 --decoder-embed-dim 32 --decoder-input-dim 32 --decoder-output-dim 32 "
    "--decoder-ffn-embed-dim 64 --decoder-attention-heads 2 --tokens-per-sample 32 --batch-size 2 "
    "--max-update 2 --optimizer adam --lr 0.001 --cpu --distributed-backend gloo --num-workers 0")
SCRIPT_SMALL = (
    "--num-layers 2 --hidden-size 32 --num-attention-heads 2 --seq-length 32 --micro-batch-size 2 "
    "--train-iters 2 --expert-model-parallel-size 2 --num-workers 0 --eval-iters 0 "
    "--split 100,0,0")
SMALL = {
    "bench layer": "--tokens 64 --model-dim 16 --hidden-dim 32 --experts 4 --rounds 1 --peers none",
    "bench kernels": "--tokens 64 --model-dim 16 --hidden-dim 32 --experts 4 --rounds 1",
    "corpus": "--size 120000",
    "watch": "--once",
    "schedule": "--chunks 1",
}


@dataclass(frozen=True)
class Block:
    """A fenced block: where it begins, the words of its fence, its lines."""

    page: Path
    line: int
    fence: str
    text: str

    @property
    def name(self) -> str:
        """Page and line, for messages."""
        return f"{self.page.name}:{self.line}"


def blocks(page: Path) -> list[Block]:
    """All fenced blocks of a page."""
    text = page.read_text(encoding="utf-8")
    return [Block(page, text.count("\n", 0, found.start()) + 1, found[1], found[2])
            for found in _FENCE.finditer(text)]


def indented(text: str) -> list[str]:
    """Lines of code blocks that have no fence: indented by four columns after an empty line."""
    lines = ["", *_FENCE.sub("", text).splitlines()]
    return [line for before, line in zip(lines, lines[1:], strict=False)
            if line.startswith("    ") and not before.strip()]


def commands(text: str) -> list[list[str]]:
    """The words of each command; `...` is one that stands for more."""
    text = re.sub(r'"\$\(which (\S+)\)"', r"\1", text.replace("\\\n", " "))
    found = [shlex.split(line, comments=True) for line in text.splitlines()]
    return [words for words in found if words]


class Shell:
    """Runs (`runs`) or only checks commands; everything they read and write is in `folder`."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.runs = True
        self.whole = True  # no word is left out
        self.ranks = 1

    def __call__(self, words: Sequence[str], runs: bool) -> None:
        """Run or check one command; `AssertionError` if it fails or no parser knows it."""
        self.runs, self.whole, self.ranks = runs, "..." not in words, 1
        self._program([word for word in words if word != "..."])

    def _program(self, words: list[str]) -> None:
        name = Path(words[0]).name
        assert name in PROGRAMS, f"{name} is not a program that the tests know: {words}"
        PROGRAMS[name](self, words[1:])

    def pip(self, words: list[str]) -> None:
        """`pip install`: requirements parse; fairseq's version is the one that setup.sh installs;
        an extra exists.
        """
        from packaging.requirements import Requirement

        assert words[0] == "install"
        project = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
        for word in words[1:]:
            if word in ("-e", "--no-deps", "--ignore-requires-python"):
                continue
            wanted = Requirement(f"moe-plugin{word[1:]}" if word.startswith(".") else word)
            assert all(re.search(rf"^{extra} = \[", project, re.MULTILINE)
                       for extra in wanted.extras), word
            if wanted.name == "fairseq" or "==" in word:
                assert word in (ROOT / "scripts" / "setup.sh").read_text(encoding="utf-8")

    def shell(self, words: list[str]) -> None:
        """`git clone`, `cd` and `source` of the environment: only where nothing runs."""
        assert not self.runs, words

    def script(self, words: list[str]) -> None:
        """`bash` or `sbatch` with a script of the repository: the commands that it starts."""
        path = ROOT / words[0]
        subprocess.run(["bash", "-n", str(path)], check=True)
        usage = path.read_text(encoding="utf-8").split("\nset -euo")[0]
        assert words[0] in usage, f"{words[0]} does not say how it is called"
        if path.name.startswith(("train_", "slurm_")):
            for started in started_by(path, words[1:], self.folder):
                self._program(started)
        else:
            assert all(word in usage for word in words[1:] if word.startswith("-")), words

    def python(self, words: list[str]) -> None:
        """`python -m MODULE ...`, after options of Python itself; or an example, which
        tests/packaging/test_wheel.py runs.
        """
        if words[0].startswith("docs/examples/"):
            assert (ROOT / words[0]).is_file() and not self.runs, words[0]
            return
        while words[0] != "-m":
            words = words[2:] if words[0] == "-W" else words[1:]
        assert words[1] in MODULES, f"{words[1]} is not a module that the tests know"
        MODULES[words[1]](self, words[2:])

    def torchrun(self, words: list[str]) -> None:
        """The words after torchrun's own are a program, or with `-m` a module, for each rank."""
        from torch.distributed.run import get_args_parser

        args = get_args_parser().parse_args(words)
        self.ranks = int(args.nproc_per_node) if args.nproc_per_node.isdecimal() else 1
        program = [args.training_script, *args.training_script_args]
        self._program(["python", "-m", *program] if args.module else program)

    def vision_train(self, words: list[str]) -> None:
        """Image training; checked alone."""
        from moe_plugin.hosts.timm.arguments import parser

        assert not self.runs
        parser(None).parse_args(words)

    def train_plain(self, words: list[str]) -> None:
        """scripts/train_plain.py; checked alone."""
        assert not self.runs
        script = runpy.run_path(str(ROOT / "scripts" / "train_plain.py"))
        script["parse"](words)

    def preprocess(self, words: list[str]) -> None:
        """`fairseq-preprocess`."""
        self._fairseq("fairseq-preprocess", words, "get_preprocessing_parser", "")

    def fairseq_train(self, words: list[str]) -> None:
        """`fairseq-train`, on at most two ranks."""
        data = self.folder / words[0]
        if self.runs and not data.exists():
            sides = [f"--{side}pref {side}.txt" for side in ("train", "valid")]
            self.preprocess(f"--only-source {' '.join(sides)} --destdir {words[0]}".split())
        self._fairseq("fairseq-train", words, "get_training_parser", FAIRSEQ_SMALL)

    def fairseq_eval_lm(self, words: list[str]) -> None:
        """`fairseq-eval-lm`."""
        self._fairseq("fairseq-eval-lm", words, "get_eval_lm_parser", "")

    def _fairseq(self, tool: str, words: list[str], parser: str, small: str) -> None:
        pytest.importorskip("fairseq", reason="fairseq is not installed (see docs/fairseq.md)")
        from tests.hosts.fairseq import commands as fairseq
        from tests.hosts.fairseq.conftest import fork

        if self.runs:
            fork(min(self.ranks, 2), fairseq.run_command, tool, [*words, *small.split()],
                 cwd=self.folder).ok()
        else:
            fork(1, fairseq.parse, parser, words, cwd=self.folder).ok()

    def megatron_data(self, words: list[str]) -> None:
        """`python -m moe_plugin.hosts.megatron.data`."""
        self._megatron("data", words, "")

    def fairseq_average(self, words: list[str]) -> None:
        """`python -m moe_plugin.hosts.fairseq.average`."""
        from moe_plugin.hosts.fairseq import average

        assert not self.runs, "tests/hosts/fairseq/test_named_checkpoints.py runs it"
        average.options().parse_args(words)

    def megatron_train(self, words: list[str]) -> None:
        """`python -m moe_plugin.hosts.megatron.train`, on two ranks."""
        pytest.importorskip("megatron.core", reason="needs megatron-core")
        if self.runs:
            self._megatron("train", words, SCRIPT_SMALL)
        else:
            megatron_flags.read([word for word in words if word != "--cpu"])

    def _megatron(self, module: str, words: list[str], small: str) -> None:
        pytest.importorskip("megatron.core", reason="needs megatron-core")
        from tests.hosts.megatron.ranks import run_main

        run_main(f"moe_plugin.hosts.megatron.{module}", [*words, *small.split()],
                 min(self.ranks, 2), self.folder)

    def megatron_launch(self, words: list[str]) -> None:
        """The launcher of Megatron's training code, on two ranks; checked alone: Megatron's flags
        and ours.
        """
        words = words[1:] if words[0] == "--moe-cpu" else words
        ours = words[0] == "pretrain_gpt_moe"
        assert ours or Path(words[0]).name == "pretrain_gpt.py", words[0]
        if not self.runs:
            megatron_flags.read(words[1:])
            return
        if importlib.util.find_spec("megatron.training") is None:
            pytest.skip("needs megatron-core 0.17 or newer")
        self._megatron("launch", words, SCRIPT_SMALL)

    def moe_plugin(self, words: list[str]) -> None:
        """`moe-plugin`, in this process; what a command runs itself is only checked."""
        from moe_plugin.cli.main import parse

        args = parse(words)
        if words[0] in ("emulate", "fault"):
            assert not self.runs, "a cluster needs privileges, a fault another process"
            program = args.program
            self._program(["python", *program] if program[0].startswith("-") else program)
        elif self.runs and words[0] != "doctor":  # tests/cli/test_doctor.py runs it
            self._recorded_run(words)
            flags = SMALL.get(" ".join(words[:2]), SMALL.get(words[0], ""))
            small = parse([*words, *flags.split()])
            assert small.run(small) == 0, words

    def _recorded_run(self, words: list[str]) -> None:
        """The folder that `report` and `watch` read, where no command before has made it."""
        if words[0] in ("report", "watch") and not (self.folder / words[1]).exists():
            shutil.copytree(ROOT / "tests" / "observe" / "data" / "megatron",
                            self.folder / words[1])


def started_by(script: Path, words: list[str], folder: Path) -> list[list[str]]:
    """The `python` commands that a script starts, found by running it with programs that only write
    down their arguments.
    """
    home, calls = folder / "stub", folder / "stub" / "calls"
    shutil.rmtree(home, ignore_errors=True)
    for place in ("scripts", ".venv/bin"):
        (home / place).mkdir(parents=True)
    copy = shutil.copy(script, home / "scripts")
    shutil.copy(script.with_name("lib.sh"), home / "scripts")
    # one after another: scripts start several at a time
    noted = (f'case "$1" in -c) echo 0;; *) exec 9>>"{calls}"; flock 9; '
             'printf "%s\\n" "$@" "" >&9;; esac')
    for name, body in {"python": noted, "fairseq-train": noted, "scontrol": "echo 127.0.0.1",
                       "srun": 'exec "$@"', "torchft_lighthouse": "exec sleep 60"}.items():
        path = home / ".venv" / "bin" / name
        path.write_text(f"#!/usr/bin/env bash\n{body}\n")
        path.chmod(0o755)
    if not words[0].startswith("-"):
        (folder / words[0]).mkdir(exist_ok=True)
        (folder / words[0] / "dict.txt").touch()
    subprocess.run(["bash", str(copy), *words], check=True, cwd=folder, env={
        "PATH": f"{home}/.venv/bin:/usr/bin:/bin", "VENV": f"{home}/.venv", "SLURM_NNODES": "2",
        "SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "n[1-2]", "SLURM_GPUS_ON_NODE": "8"})
    return [["python", *call.split("\n")] for call in calls.read_text().strip("\n").split("\n\n")]


PROGRAMS: dict[str, Callable[[Shell, list[str]], None]] = {
    "pip": Shell.pip,
    **dict.fromkeys(("git", "cd", "source"), Shell.shell),
    "bash": Shell.script,
    "sbatch": Shell.script,
    "python": Shell.python,
    "torchrun": Shell.torchrun,
    "fairseq-preprocess": Shell.preprocess,
    "fairseq-train": Shell.fairseq_train,
    "fairseq-eval-lm": Shell.fairseq_eval_lm,
    "moe-plugin": Shell.moe_plugin,
    "train_plain.py": Shell.train_plain,
}
MODULES: dict[str, Callable[[Shell, list[str]], None]] = {
    "torch.distributed.run": Shell.torchrun,
    "moe_plugin.cli.main": Shell.moe_plugin,
    "moe_plugin.hosts.fairseq.average": Shell.fairseq_average,
    "moe_plugin.hosts.megatron.data": Shell.megatron_data,
    "moe_plugin.hosts.megatron.train": Shell.megatron_train,
    "moe_plugin.hosts.megatron.launch": Shell.megatron_launch,
    "moe_plugin.hosts.timm.train": Shell.vision_train,
}

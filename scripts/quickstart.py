#!/usr/bin/env python3
"""Prepare data, train in fairseq and Megatron, and print the results (scripts/quickstart.sh)."""

from __future__ import annotations

import argparse
import json
import os
import shlex
import shutil
import signal
import statistics
import subprocess
import sys
import time
from collections import deque
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from moe_plugin.cli import figures
from moe_plugin.cli.corpus import CorpusInfo, build_corpus, read_info
from moe_plugin.cli.planning.launch import BYTES
from moe_plugin.observe.history import read_run
from moe_plugin.observe.history.records import StepRecord
from moe_plugin.observe.report.page import write_report
from moe_plugin.utils.messages import progress
from moe_plugin.utils.regular_files import check_output, make_folder, open_append, write_regular
from moe_plugin.utils.yaml_file import read_yaml

ROOT = Path(__file__).resolve().parents[1]
SCRIPT = """#!/usr/bin/env bash
# The command of the quick start. Copy and edit it, and run it with `bash command.sh [OUT]`.
# OUT is the folder for all files (default: a new folder). If OUT contains a run, the run continues.
set -euo pipefail
. {lib}
begin_run {here} "$@"
{command}
"""


class Failed(Exception):
    """Raised if a step of the quick start fails. The message names the step and its log file."""


@dataclass(frozen=True)
class Run:
    """One training run: its framework, folder, command and number of steps. later: total number of
    training steps in all later runs.
    """

    host: str
    folder: Path
    command: list[str]
    steps: int
    later: int = 0

    @property
    def log(self) -> Path:
        """The file that contains the standard output and error of the command."""
        return self.folder / "train.log"

    def seconds_left(self, step: int, seconds: float) -> float:
        """Estimate the seconds until all runs end, if startup and `step` steps took `seconds`."""
        return seconds / step * (self.steps - step + self.later)

    def losses(self) -> list[StepRecord]:
        """Return the logged steps that contain a training loss."""
        return [r for r in steps_of(self.folder) if r.loss is not None]


def steps_of(folder: Path) -> list[StepRecord]:
    """Return the logged steps of the run in a folder. Losses are in nats per token."""
    try:
        return read_run(folder).steps
    except ValueError:  # no record yet
        return []


def fairseq_command(s: dict[str, Any], data: Path, folder: Path, gpu: bool) -> list[str]:
    """Return a `fairseq-train` command that uses our `--user-dir` and flags."""
    cpu = [] if gpu else ["--cpu", "--distributed-backend", "gloo"]
    program = Path(sys.executable).with_name("fairseq-train")
    return [
        *_torchrun(s), str(program), str(data), "--user-dir", "moe_plugin", *_flags({
            "task": "language_modeling",
            "arch": "moe_lm_tiny", "decoder-layers": s["layers"], "decoder-embed-dim": s["width"],
            "decoder-ffn-embed-dim": s["hidden"], "decoder-attention-heads": s["heads"],
            "moe-freq": 2, "moe-expert-count": s["experts"], "moe-second-expert-policy": "all",
            "moe-capacity-factor": "none", "criterion": "moe_cross_entropy",
            "moe-gate-loss-wt": s["balance_weight"], "dropout": 0, "tokens-per-sample": s["length"],
            "batch-size": s["batch"], "max-update": s["steps"], "optimizer": "adam",
            "adam-betas": "(0.9, 0.98)", "lr": s["learning_rate"],
            "lr-scheduler": "polynomial_decay", "warmup-updates": s["warmup"],
            "total-num-update": s["steps"], "clip-norm": 1.0, "seed": s["seed"],
            "save-dir": folder / "checkpoints", "save-interval-updates": max(1, s["steps"] // 2),
            "keep-interval-updates": 1, "max-valid-steps": 25, "log-format": "json",
            "log-interval": s["log_interval"], "moe-stats-jsonl": folder / "stats.jsonl",
            "moe-stats-interval": s["log_interval"], "moe-stats-timeline": s["timeline_step"]
        }), "--no-epoch-checkpoints", "--ddp-backend", "legacy_ddp", *cpu,
    ]


def megatron_command(s: dict[str, Any], prefix: Path, folder: Path, gpu: bool) -> list[str]:
    """Return a command that runs Megatron's own training loop with our launcher."""
    return [
        *_torchrun(s), "-m", "moe_plugin.hosts.megatron.launch", *([] if gpu else ["--moe-cpu"]),
        "pretrain_gpt_moe", *_flags({
            "data-path": prefix, "split": "90,10,0", "data-cache-path": folder / "cache",
            "vocab-size": BYTES, "num-workers": 0, "max-position-embeddings": s["length"],
            "num-layers": s["layers"], "hidden-size": s["width"], "num-attention-heads": s["heads"],
            "ffn-hidden-size": s["hidden"], "seq-length": s["length"],
            "position-embedding-type": "rope", "num-experts": s["experts"],
            "moe-ffn-hidden-size": s["hidden"], "moe-layer-freq": 2, "moe-router-topk": s["top_k"],
            "moe-aux-loss-coeff": s["balance_weight"], "expert-model-parallel-size": s["ranks"],
            "micro-batch-size": s["batch"], "train-iters": s["steps"], "lr": s["learning_rate"],
            "lr-warmup-iters": s["warmup"], "lr-decay-style": "linear", "clip-grad": 1.0,
            "hidden-dropout": 0, "attention-dropout": 0, "seed": s["seed"], "save": folder /
            "checkpoints", "load": folder / "checkpoints", "save-interval": max(1, s["steps"] // 2),
            # Megatron also validates at the end, so no earlier validation is needed
            "eval-interval": 2 * s["steps"], "eval-iters": 25, "log-interval": s["log_interval"],
            "log-file": folder / "log.jsonl", "moe-stats-jsonl": folder / "stats.jsonl",
            "moe-stats-interval": s["log_interval"], "moe-stats-timeline": s["timeline_step"]
        }), "--disable-bias-linear",
    ]


def _torchrun(s: dict[str, Any]) -> list[str]:
    return [
        sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node",
        str(s["ranks"])
    ]


def _flags(values: dict[str, Any]) -> list[str]:
    return [text for name, value in values.items() for text in (f"--{name}", str(value))]


def balance(folder: Path) -> float | None:
    """Return the ratio of the largest expert load to the mean load in the last record."""
    try:
        last = read_run(folder).last_records.values()
    except ValueError:
        return None
    return max((r.max_over_mean for r in last if r.max_over_mean is not None), default=None)


def train(run: Run) -> tuple[dict[str, Any], bool]:
    """Train, unless the run is finished. Return the result and whether it already existed."""
    done, started = run.folder / "result.json", run.folder / "command.sh"
    script = script_of(run)
    if started.is_file() and started.read_text() != script:
        _rename_old(run, started)
    if done.is_file():
        return json.loads(done.read_text()), True
    make_folder(run.folder)
    check_output(done)
    write_regular(started, script)
    begin = time.monotonic()
    _follow(run, begin)
    losses = run.losses()
    if not losses or losses[-1].step < run.steps:
        raise Failed(f"{run.host} ended before step {run.steps}. See the log {run.log}")
    steps = steps_of(run.folder)
    result = {
        "host": run.host, "command": " ".join(run.command), "steps": losses[-1].step,
        "first_loss": losses[0].loss, "last_loss": losses[-1].loss,
        "valid_loss": next((r.valid_loss for r in reversed(steps) if r.valid_loss is not None),
                           None),
        "tokens_per_s": statistics.median(r.tokens_per_s for r in steps if r.tokens_per_s),
        "balance": balance(run.folder), "seconds": round(time.monotonic() - begin),
        "checkpoints": str(run.folder / "checkpoints"),
    }
    write_regular(done, json.dumps(result, indent=1) + "\n")
    return result, False


def script_of(run: Run) -> str:
    """Return the text of `command.sh`, which writes to a different folder than this run."""
    here = str(run.folder)
    words = [f'"$OUT"{shlex.quote(word.removeprefix(here))}' if word.startswith(here)
             else shlex.quote(word) for word in run.command]
    return SCRIPT.format(lib=shlex.quote(str(ROOT / "scripts" / "lib.sh")), here=shlex.quote(here),
                         command=" ".join(words))


def _rename_old(run: Run, started: Path) -> None:
    """Rename the folder of an earlier run with other settings."""
    date = time.localtime(started.stat().st_mtime)
    kept = run.folder.with_name(f"{run.folder.name}-{time.strftime('%Y%m%d-%H%M%S', date)}")
    run.folder.rename(kept)
    print(f"  {run.host}: the settings changed; the run with the old settings is now in {kept}")


def _follow(run: Run, begin: float) -> None:
    """Start the training command and show its progress until it ends."""
    # one thread per rank, because two ranks share two cores; a separate session, so that Ctrl-C
    # reaches only this process, which then ends the processes of the run
    env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}
    seen = 0
    with open_append(run.log) as log, progress(run.steps, f"  {run.host}") as bar:
        process = subprocess.Popen(run.command, stdout=log, stderr=subprocess.STDOUT, env=env,
                                   cwd=ROOT, start_new_session=True)
        try:
            while process.poll() is None:
                time.sleep(0.5)
                losses = run.losses()
                if losses and losses[-1].step > seen:
                    bar.update(losses[-1].step - seen)
                    left = run.seconds_left(losses[-1].step, time.monotonic() - begin)
                    bar.set_postfix_str(f"loss {losses[-1].loss:.3f}, all ends in {left:.0f} s")
                    _print_quarter(run, seen, losses[-1], begin)
                    seen = losses[-1].step
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGTERM)
                process.wait()
    if process.returncode:
        raise Failed(f"{run.host} ended with status {process.returncode}. The log {run.log} ends "
                     f"with:\n\n{_tail(run.log)}")


def _print_quarter(run: Run, before: int, record: StepRecord, begin: float) -> None:
    """If there is no terminal for the progress bar, print one line for each quarter of the run."""
    if not sys.stderr.isatty() and record.step * 4 // run.steps > before * 4 // run.steps:
        left = run.seconds_left(record.step, time.monotonic() - begin)
        print(f"  {run.host}: step {record.step} of {run.steps}, loss {record.loss:.3f}; all ends "
              f"in about {left:.0f} s", flush=True)


def _tail(path: Path) -> str:
    with open(path, encoding="utf-8", errors="replace") as stream:
        return "".join(f"    {line}" for line in deque(stream, 25))


def prepare(command: Sequence[str], made: Path, log: Path, what: str) -> None:
    """Run a command, and create the marker file `made` on success. Do nothing if `made` exists."""
    if made.exists():
        print(f"  {what}: already exists")
        return
    make_folder(log.parent)
    begin = time.monotonic()
    with open(check_output(log), "wb") as stream:
        rc = subprocess.run(command, stdout=stream, stderr=stream, cwd=ROOT, check=False).returncode
    if rc:
        raise Failed(f"{what} ended with status {rc}. The log {log} ends with:\n\n{_tail(log)}")
    made.touch()
    print(f"  {what}: {time.monotonic() - begin:.0f} s")


def prepare_fairseq(corpus: Path) -> Path:
    """Create fairseq's binary data with `fairseq-preprocess`, and return the data folder."""
    data = corpus / "fairseq"
    command = [
        str(Path(sys.executable).with_name("fairseq-preprocess")), "--only-source", "--srcdict",
        str(corpus / "dict.txt"), "--destdir", str(data), "--workers", "2",
        *(t for s in ("train", "valid", "test") for t in (f"--{s}pref", str(corpus / f"{s}.tok")))
    ]
    prepare(command, data / "complete", corpus / "fairseq-preprocess.log", "fairseq-preprocess")
    return data


def prepare_megatron(corpus: Path) -> Path:
    """Create Megatron's indexed dataset, and return the path prefix of its files."""
    prefix = corpus / "megatron" / "train"
    command = [
        sys.executable, "-m", "moe_plugin.hosts.megatron.data", "--input",
        str(corpus / "train.txt"), "--output-prefix", str(prefix)
    ]
    prepare(command, prefix.with_name("complete"), corpus / "megatron-data.log",
            "Megatron's indexed dataset")
    return prefix


def table(results: list[dict[str, Any]]) -> str:
    """Return a table of the results with one row per framework."""
    head = ("host", "first loss", "last loss", "valid loss", "tokens/s", "busiest expert / mean",
            "seconds")
    return figures.table(head, [
        (r["host"], _number(r["first_loss"]), _number(r["last_loss"]), _number(r["valid_loss"]),
         f"{r['tokens_per_s']:,.0f}", _number(r["balance"], 2), str(r["seconds"]))
        for r in results])


def _number(value: float | None, digits: int = 3) -> str:
    return "-" if value is None else f"{value:.{digits}f}"


def summary(out: Path, results: list[dict[str, Any]], info: CorpusInfo) -> str:
    """Return the table of results, the paths of the reports, and suggestions of next steps."""
    hosts = [r["host"] for r in results]
    return "\n".join([
        "", table(results), "",
        "Losses are in nats per byte, without the balance loss. A model that knows only the",
        f"frequency of each byte has a loss of {info.unigram_entropy:.3f}.", "",
        "Reports with curves of the loss and of each expert's load, to open in a browser:",
        *(f"  {out / host / 'report.html'}" for host in hosts),
        "", "Next steps:",
        f"  - change a setting: copy {out / hosts[0] / 'command.sh'}, edit the copy and run it",
        "    with bash (docs/config.md lists all settings and flags)",
        "  - train on your own text: bash scripts/train_megatron.sh TEXT OUT, where TEXT is any "
        "text file",
        "  - run the tests: bash scripts/test.sh"
    ])


def settings(path: Path, steps: int | None) -> dict[str, Any]:
    """Return the sizes in configs/quickstart.yaml. `steps` overrides the number of steps."""
    values = read_yaml(path)
    if steps is not None:
        if steps < 1:
            raise ValueError(f"--steps {steps} is out of bounds. The number of steps must be >= 1")
        values["steps"], values["warmup"] = steps, min(values["warmup"], steps // 2)
    values["log_interval"] = max(1, values["steps"] // 50)
    return {**values, "timeline_step": max(1, values["steps"] * 3 // 4)}


def make_corpus(folder: Path, size: int) -> CorpusInfo:
    """Create the sample text in `folder`, after deleting any other text and its data."""
    before = read_info(folder)
    info = build_corpus(folder, size=size)
    if before is not None and before != info:
        shutil.rmtree(folder)
        info = build_corpus(folder, size=size)
    print(f"  corpus: {info.tokens['train']:,} bytes to train on, unigram entropy "
          f"{info.unigram_entropy:.3f} nats per byte")
    return info


def check_hosts(hosts: Sequence[str]) -> None:
    """Raise a `ValueError` before training if a framework cannot train."""
    if "megatron" in hosts and find_spec("megatron") and find_spec("megatron.training") is None:
        raise ValueError(
            "The Megatron host requires Megatron's own training loop, which needs megatron-core "
            "0.17 or newer and Python 3.11 or newer. Set up an environment with this Python (bash "
            "scripts/setup.sh --venv DIR --python python3.11), or use --hosts fairseq")


def quickstart(args: argparse.Namespace) -> int:
    """Create the sample text, train in each framework, write the reports, and print the summary."""
    import torch

    check_hosts(args.hosts)
    s = settings(ROOT / "configs" / "quickstart.yaml", args.steps)
    out, gpu = args.out.resolve(), torch.cuda.device_count() >= s["ranks"]
    few = (f", because {s['ranks']} ranks need as many GPUs and this machine has 1"
           if torch.cuda.device_count() == 1 else "")
    print(f"training on {s['ranks']} {'GPUs (NCCL)' if gpu else 'CPU processes (gloo)'}{few}; "
          f"all files go to {out}")
    if args.fresh:
        for host in args.hosts:
            shutil.rmtree(out / host, ignore_errors=True)
    corpus = out / "corpus"
    info = make_corpus(corpus, s["corpus_bytes"])
    results = []
    with ThreadPoolExecutor() as pool:  # both hosts' data is made at once
        data = {host: pool.submit(HOST_STEPS[host][0], corpus) for host in args.hosts}
        for number, host in enumerate(args.hosts, 1):
            folder, later = out / host, s["steps"] * (len(args.hosts) - number)
            command = HOST_STEPS[host][1](s, data[host].result(), folder, gpu)
            result, reused = train(Run(host, folder, command, s["steps"], later))
            print(f"  {host}: " + ("already finished (--fresh trains again)"
                                   if reused else f"trained in {result['seconds']} s"), flush=True)
            write_report(read_run(folder), folder / "report.html")
            results.append(result)
    print(summary(out, results, info))
    return 0


# For each host, a function that prepares its data and a function that returns its command.
HOST_STEPS = {"fairseq": (prepare_fairseq, fairseq_command),
              "megatron": (prepare_megatron, megatron_command)}


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Parse the options. By default, parses the arguments of the command line."""
    parser = argparse.ArgumentParser(
        prog="scripts/quickstart.sh",
        description="Train a small MoE language model through fairseq and Megatron-core.")
    parser.add_argument("--fresh", action="store_true", help="train again from the beginning")
    parser.add_argument("--steps", type=int, default=None,
                        help="training steps (default: the number in configs/quickstart.yaml)")
    parser.add_argument("--hosts", type=lambda text: text.split(","), default=list(HOST_STEPS),
                        help="fairseq,megatron or one of them")
    parser.add_argument("--out", type=Path, default=ROOT / "runs" / "quickstart",
                        help="folder for the corpus, logs and checkpoints")
    args = parser.parse_args(argv)
    if unknown := set(args.hosts) - set(HOST_STEPS):
        names = ", ".join(HOST_STEPS)
        parser.error(f"--hosts {','.join(sorted(unknown))} is unknown. Use one or more of {names}")
    return args


def main() -> int:
    """Run the command line, and return the exit status."""
    # print lines immediately, also if standard output is a log file
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    try:
        return quickstart(parse())
    except (Failed, ValueError) as error:
        print(f"\nerror: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("\nstopped; run the same command again to continue from the last checkpoint",
              file=sys.stderr)
        return 130


if __name__ == "__main__":
    sys.exit(main())

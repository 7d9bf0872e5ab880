#!/usr/bin/env python3
"""The training part of scripts/quickstart.sh: corpus, data of both hosts, two training runs, a
table.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import shlex
import shutil
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from moe_plugin.bench.corpus import CorpusInfo, build_corpus
from moe_plugin.observe import progress
from moe_plugin.observe.history import read_run
from moe_plugin.observe.report import write_report

ROOT = Path(__file__).resolve().parents[1]
LN2 = math.log(2)
HOSTS = ("fairseq", "megatron")


class Failed(Exception):
    """A step did not succeed; the message says which and where its log is."""


@dataclass(frozen=True)
class Record:
    """One logged training step. loss: nats a token, without the balance loss. valid: of the
    validation set, where it was measured.
    """

    step: int
    loss: float | None = None
    tokens_per_s: float | None = None
    valid: float | None = None


@dataclass
class Run:
    """One training run: what to start, where, how to read its log, and what it left."""

    host: str
    folder: Path
    command: list[str]
    steps: int
    read: Callable[[Path], list[Record]]
    log: Path = field(init=False)

    def __post_init__(self) -> None:
        self.log = self.folder / "train.log"


def fairseq_command(s: dict[str, Any], data: Path, folder: Path, gpu: bool) -> list[str]:
    """Stock `fairseq-train`, with our `--user-dir` and flags."""
    where = ["--ddp-backend", "legacy_ddp"
             ] + ([] if gpu else ["--cpu", "--distributed-backend", "gloo"])
    return [
        *_torchrun(s),
        str(Path(sys.executable).with_name("fairseq-train")),
        str(data), "--user-dir", "moe_plugin", "--task", "language_modeling", *_flags({
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
            "log-interval": _interval(s), "moe-stats-jsonl": folder / "stats.jsonl",
            "moe-stats-interval": _interval(s), "moe-stats-timeline": _timeline_step(s)
        }), "--no-epoch-checkpoints", *where,
    ]


def megatron_command(s: dict[str, Any], prefix: Path, folder: Path, gpu: bool) -> list[str]:
    """Megatron-core through our training script; the flags are Megatron's own."""
    return [
        *_torchrun(s), "-m", "moe_plugin.hosts.megatron.train", *_flags({
            "data-path": prefix, "split": "90,10,0", "data-cache-path": folder / "cache",
            "num-layers": s["layers"], "hidden-size": s["width"], "num-attention-heads": s["heads"],
            "ffn-hidden-size": s["hidden"], "seq-length": s["length"],
            "position-embedding-type": "rope", "num-experts": s["experts"],
            "moe-ffn-hidden-size": s["hidden"], "moe-layer-freq": 2, "moe-router-topk": s["top_k"],
            "moe-aux-loss-coeff": s["balance_weight"], "expert-model-parallel-size": s["ranks"],
            "micro-batch-size": s["batch"], "train-iters": s["steps"], "lr": s["learning_rate"],
            "lr-warmup-iters": s["warmup"], "lr-decay-style": "linear", "clip-grad": 1.0,
            "hidden-dropout": 0, "attention-dropout": 0, "seed": s["seed"], "save": folder /
            "checkpoints", "load": folder / "checkpoints", "save-interval": max(1, s["steps"] // 2),
            "eval-interval": s["steps"], "eval-iters": 25, "log-interval": _interval(s),
            "log-file": folder / "log.jsonl", "moe-stats-jsonl": folder / "stats.jsonl",
            "moe-stats-interval": _interval(s), "moe-stats-timeline": _timeline_step(s)
        }), "--disable-bias-linear", *([] if gpu else ["--cpu"]),
    ]


def _torchrun(s: dict[str, Any]) -> list[str]:
    return [
        sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node",
        str(s["ranks"])
    ]


def _interval(s: dict[str, Any]) -> int:
    return max(1, s["steps"] // 50)


def _timeline_step(s: dict[str, Any]) -> int:
    return max(1, s["steps"] * 3 // 4)


def _flags(values: dict[str, Any]) -> list[str]:
    return [text for name, value in values.items() for text in (f"--{name}", str(value))]


def read_fairseq(folder: Path) -> list[Record]:
    """Records of fairseq's JSON log lines; its losses are in bits."""
    found = []
    for line in _lines(folder / "train.log"):
        _, mark, text = line.partition("| train_inner | ")
        if mark:
            r = json.loads(text)
            found.append(
                Record(int(r["num_updates"]),
                       float(r["inner_loss"]) * LN2, float(r["wps"])))
        _, mark, text = line.partition("| valid | ")
        if mark:
            r = json.loads(text)
            found.append(
                Record(int(r["valid_num_updates"]), valid=float(r["valid_inner_loss"]) * LN2))
    return found


def read_megatron(folder: Path) -> list[Record]:
    """Records of the training script's JSONL log."""
    rows = [json.loads(line) for line in _lines(folder / "log.jsonl") if line.endswith("}\n")]
    return [
        Record(r["iteration"], r.get("lm_loss"), r.get("tokens_per_s"), r.get("valid_loss"))
        for r in rows
    ]


def _lines(path: Path) -> Iterator[str]:
    if path.is_file():
        with open(path, encoding="utf-8", errors="replace") as stream:
            yield from stream


def balance(folder: Path) -> float | None:
    """The largest load of an expert over the mean load, worst layer, in the last statistics record.
    """
    rows = [json.loads(line) for line in _lines(folder / "stats.jsonl") if line.endswith("}\n")]
    last = max((row["step"] for row in rows), default=None)
    return max((row["max_over_mean"] for row in rows if row["step"] == last), default=None)


def train(run: Run) -> tuple[dict[str, Any], bool]:
    """Train, unless this very run is finished. Returns (result, whether it was there already)."""
    key = " ".join(run.command)
    done = run.folder / "result.json"
    started = run.folder / "command.sh"
    script = ("#!/usr/bin/env bash\n# what the quick start ran; change it and run it\ncd "
              f"{shlex.quote(str(ROOT))}\nexport OMP_NUM_THREADS=1\n{shlex.join(run.command)}\n")
    if started.is_file() and started.read_text() != script:
        kept = run.folder.with_name(
            f"{run.folder.name}-{time.strftime('%Y%m%d-%H%M%S', time.localtime(started.stat().st_mtime))}"
        )
        run.folder.rename(kept)
        print(f"  {run.host}: the settings changed; the run with the old ones is now {kept}")
    if done.is_file():
        return json.loads(done.read_text()), True
    run.folder.mkdir(parents=True, exist_ok=True)
    started.write_text(script)
    begin = time.monotonic()
    _follow(run, begin)
    records = run.read(run.folder)
    losses, speeds = [r for r in records
                      if r.loss is not None], [r.tokens_per_s for r in records if r.tokens_per_s]
    if not losses or losses[-1].step < run.steps:
        raise Failed(f"{run.host} ended before step {run.steps}; log: {run.log}")
    result = {
        "host": run.host, "command": key, "steps": losses[-1].step, "first_loss": losses[0].loss,
        "last_loss": losses[-1].loss, "valid_loss": next(
            (r.valid for r in reversed(records) if r.valid is not None),
            None), "tokens_per_s": statistics.median(speeds), "balance": balance(run.folder),
        "seconds": round(time.monotonic() - begin), "checkpoints": str(run.folder / "checkpoints"),
    }
    done.write_text(json.dumps(result, indent=1) + "\n")
    return result, False


def _follow(run: Run, begin: float) -> None:
    """Start the run and show its progress until it ends."""
    # one thread a rank: two ranks on two cores; a session of its own, so that Ctrl-C reaches all
    # its processes through us
    env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}
    seen, told = 0, 0
    with open(run.log, "ab") as log, progress(run.steps, f"  {run.host}") as bar:
        process = subprocess.Popen(run.command, stdout=log, stderr=subprocess.STDOUT, env=env,
                                   cwd=ROOT, start_new_session=True)
        try:
            while process.poll() is None:
                time.sleep(0.5)
                losses = [r for r in run.read(run.folder) if r.loss is not None]
                if losses and losses[-1].step > seen:
                    bar.update(losses[-1].step - seen)
                    bar.set_postfix_str(
                        f"loss {losses[-1].loss:.3f}, {losses[-1].tokens_per_s:,.0f} tokens/s")
                    seen = losses[-1].step
                    if not sys.stderr.isatty() and seen * 4 // run.steps > told:
                        told = seen * 4 // run.steps
                        print(
                            f"  {run.host}: step {seen} of {run.steps}, loss "
                            f"{losses[-1].loss:.3f}, {time.monotonic() - begin:.0f} s",
                            flush=True)
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGTERM)
                process.wait()
    if process.returncode:
        raise Failed(
            f"{run.host} ended with status {process.returncode}; the end of "
            f"{run.log}:\n\n{_tail(run.log)}"
        )


def _tail(path: Path, count: int = 25) -> str:
    return "".join(f"    {line}" for line in list(_lines(path))[-count:])


def prepare(command: Sequence[str], made: Path, log: Path, what: str) -> None:
    """Run a command that makes the folder or file `made`, unless it is there; it appears complete
    or not at all.
    """
    if made.exists():
        print(f"  {what}: there already")
        return
    log.parent.mkdir(parents=True, exist_ok=True)
    begin = time.monotonic()
    with open(log, "wb") as stream:
        rc = subprocess.run(command, stdout=stream, stderr=subprocess.STDOUT, cwd=ROOT,
                            check=False).returncode
    if rc:
        raise Failed(f"{what} ended with status {rc}; the end of {log}:\n\n{_tail(log)}")
    made.touch()
    print(f"  {what}: {time.monotonic() - begin:.0f} s")


def prepare_fairseq(corpus: Path) -> Path:
    """fairseq's binary data, by `fairseq-preprocess`."""
    data = corpus / "fairseq"
    command = [
        str(Path(sys.executable).with_name("fairseq-preprocess")), "--only-source", "--srcdict",
        str(corpus / "dict.txt"), "--destdir",
        str(data), "--workers", "2",
        *(t for s in ("train", "valid", "test") for t in (f"--{s}pref", str(corpus / f"{s}.tok")))
    ]
    prepare(command, data / "complete", corpus / "fairseq-preprocess.log", "fairseq-preprocess")
    return data


def prepare_megatron(corpus: Path) -> Path:
    """Megatron's indexed dataset."""
    prefix = corpus / "megatron" / "train"
    command = [
        sys.executable, "-m", "moe_plugin.hosts.megatron.data", "--input",
        str(corpus / "train.txt"), "--output-prefix",
        str(prefix)
    ]
    prepare(command, prefix.with_name("complete"), corpus / "megatron-data.log",
            "Megatron's indexed dataset")
    return prefix


def table(results: list[dict[str, Any]], entropy: float) -> str:
    """The results, one line a host."""
    head = ("host", "tokens/s", "first loss", "last loss", "valid loss", "unigram entropy",
            "busiest expert / mean", "seconds")
    rows = [(r["host"], f"{r['tokens_per_s']:,.0f}", _number(r["first_loss"]),
             _number(r["last_loss"]), _number(r["valid_loss"]), f"{entropy:.3f}",
             _number(r["balance"], 2), str(r["seconds"])) for r in results]
    widths = [max(len(row[i]) for row in (head, *rows)) for i in range(len(head))]
    lines = [
        "  ".join(
            cell.rjust(w) if i else cell.ljust(w)
            for i, (cell, w) in enumerate(zip(row, widths, strict=True))) for row in (head, *rows)
    ]
    return "\n".join([lines[0], "-" * len(lines[0]), *lines[1:]])


def _number(value: float | None, digits: int = 3) -> str:
    return "-" if value is None else f"{value:.{digits}f}"


def summary(out: Path, results: list[dict[str, Any]], info: CorpusInfo) -> str:
    """Table, where things lie, how to go on."""
    lines = [
        "",
        table(results, info.unigram_entropy), "",
        "Losses are nats a byte, without the balance loss. The unigram entropy is what a model "
        "reaches that knows only how",
        "often each byte occurs: what lies below it was learned.", ""
    ]
    for r in results:
        files = {
            "report": "report.html", "log": "train.log", "experts": "stats.jsonl",
            "command": "command.sh"
        }
        lines += [f"{r['host']}:", f"  checkpoints  {r['checkpoints']}"]
        lines += [
            f"  {what:<12} {out / r['host'] / name}" for what, name in files.items()
            if (out / r["host"] / name).exists()
        ]
    lines += [
        "", "Go on:",
        "  - change a setting: copy a command.sh, edit, run it; all settings: docs/flags.md, "
        "docs/config.md",
        "  - train on your own text:",
        "      bash scripts/train_fairseq.sh DATA SAVE      (DATA from fairseq-preprocess "
        "--only-source)",
        "      bash scripts/train_megatron.sh TEXT OUT      (TEXT: any text file)",
        "  - look at a run while it trains: moe-plugin watch DIR; its report as a page: moe-plugin "
        "report DIR",
        "  - what this machine has: moe-plugin doctor"
    ]
    return "\n".join(lines)


def settings(path: Path, steps: int | None) -> dict[str, Any]:
    """The sizes of configs/quickstart.yaml."""
    values = yaml.safe_load(path.read_text(encoding="utf-8"))
    if steps is not None:
        if steps < 1:
            raise ValueError(f"--steps {steps} is out of bounds: must be >= 1")
        values["steps"], values["warmup"] = steps, min(values["warmup"], steps // 2)
    return values


def quickstart(args: argparse.Namespace) -> int:
    """All of it."""
    import torch

    s = settings(ROOT / "configs" / "quickstart.yaml", args.steps)
    out, gpu = args.out.resolve(), torch.cuda.device_count() >= s["ranks"]
    few = f", because {s['ranks']} ranks need as many GPUs and this machine has 1" if torch.cuda.device_count(
    ) == 1 else ""
    print(
        f"training on {s['ranks']} {'GPUs (NCCL)' if gpu else 'CPU processes (gloo)'}{few}; "
        f"everything goes to {out}"
    )
    if args.fresh:
        for host in args.hosts:
            shutil.rmtree(out / host, ignore_errors=True)
    corpus = out / "corpus"
    if (before := build_info(corpus)) != (info := build_corpus(
            corpus, size=s["corpus_bytes"])) and before is not None:
        shutil.rmtree(corpus)  # another text: the hosts' data of the old one goes with it
        info = build_corpus(corpus, size=s["corpus_bytes"])
    print(
        f"  corpus: {info.tokens['train']:,} bytes to train on, unigram entropy "
        f"{info.unigram_entropy:.3f} nats a byte"
    )
    results = []
    for host in args.hosts:
        data = prepare_fairseq(corpus) if host == "fairseq" else prepare_megatron(corpus)
        make, read = (fairseq_command, read_fairseq) if host == "fairseq" else (megatron_command,
                                                                                read_megatron)
        run = Run(host, out / host, make(s, data, out / host, gpu), s["steps"], read)
        result, reused = train(run)
        print(
            f"  {host}: " + ("finished before (--fresh trains again)"
                             if reused else f"trained in {result['seconds']} s"), flush=True)
        write_report(read_run(out / host), out / host / "report.html")
        results.append(result)
    print(summary(out, results, info))
    return 0


def build_info(corpus: Path) -> CorpusInfo | None:
    """What is there already."""
    from moe_plugin.bench.corpus import read_info

    return read_info(corpus)


def main() -> int:
    """Command line."""
    sys.stdout.reconfigure(
        line_buffering=True)  # type: ignore[union-attr]  # a log shows what happens when it happens
    parser = argparse.ArgumentParser(
        prog="scripts/quickstart.sh",
        description="Train a small MoE language model through fairseq and Megatron-core.")
    parser.add_argument("--fresh", action="store_true", help="train again from the beginning")
    parser.add_argument("--steps", type=int, default=None,
                        help="training steps (default: that of configs/quickstart.yaml)")
    parser.add_argument("--hosts", type=lambda text: text.split(","), default=list(HOSTS),
                        help="fairseq,megatron or one of them")
    parser.add_argument("--out", type=Path, default=ROOT / "runs" / "quickstart",
                        help="where corpus, logs and checkpoints go")
    args = parser.parse_args()
    if unknown := set(args.hosts) - set(HOSTS):
        parser.error(f"--hosts {','.join(sorted(unknown))} is unknown; known: {', '.join(HOSTS)}")
    try:
        return quickstart(args)
    except (Failed, ValueError) as error:
        print(f"\nerror: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("\nstopped; run the same command again to go on from the last checkpoint",
              file=sys.stderr)
        return 130


if __name__ == "__main__":
    sys.exit(main())

"""Tries full and foreign disks, small limits, starts at one moment and long runs, and writes the
page of what was seen: `python -m tests.faults.disks` (as root, for the disks).
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path

from scripts.bench.report import paragraph
from tests.faults.hosts import HOSTS, Host, Ran
from tests.faults.long_runs import changing, soak, streaming, streaming_alone
from tests.faults.seen import NAMES, ROOT, Seen, last_line, other_losses

PAGE = ROOT / "docs" / "benchmarks" / "disks.md"
DATA = PAGE.parent / "data" / "disks.jsonl"
HEAD = """# Full disks, small limits and long runs

This page shows what users see if a disk is full or read-only, if a limit of the system is small, if
many runs start at the same moment, and if a run takes many minutes. Each case trains a small MoE
model on the CPU, on two ranks that share the experts.

The column "after the fault" states what was left, and from which step a second start on a healthy
disk continued. "The same losses" means the losses of an uninterrupted run. Long runs are killed at
the end. Their memory, open files and threads are counted after a fifth of the time and at the end.

To reproduce the page, run `python -m tests.faults.disks` as root, because it mounts small disks.
Other faults are on the page [injected faults](faults.md).
"""
SIZES = {"plain": 1000, "fairseq": 1000, "megatron": 1400}  # KiB: of one checkpoint, not of two
STEPS = 9


@contextlib.contextmanager
def disk(folder: Path, kib: int, options: str = "") -> Iterator[Path]:
    """A disk of so many KiB."""
    folder.mkdir(parents=True, exist_ok=True)
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={kib}k{options}", "tmpfs", str(folder)],
                   check=True)
    try:
        yield folder
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True)


def _resumed(host: Host, folder: Path, whole: Ran, ran: Ran) -> tuple[str, str]:
    saved, again = host.saved(folder), host.train(folder, steps=STEPS)
    wrong = "" if again.code == 0 else f"status {again.code}: {last_line(again.log, folder)}"
    wrong = wrong or other_losses({**ran.losses, **again.losses}, whole.losses, host.tolerance)
    return f"resumed after step {saved} with the same losses", wrong


def full_disk(name: str, home: Path) -> Iterator[Seen]:
    """The second checkpoint does not fit; then there is room."""
    host = HOSTS[name](home / name)
    whole = host.train(home / "whole" / name, steps=STEPS)
    with disk(home / "disk" / name, SIZES[name]) as folder:
        ran = host.train(folder, steps=STEPS)
        left = [path.name for path in folder.rglob("*") if path.suffix in (
            ".new", ".part", ".tmp", ".lock", ".writing")
            or (path.is_dir() and not any(path.iterdir()))]
        wrong = "the run went on" if not ran.code else f"left: {left}" if left else ""
        wrong = wrong or ("pages of output" if "Traceback" in ran.log else "")
        subprocess.run(["mount", "-o", "remount,size=9m", str(folder)], check=True)
        kept, other = _resumed(host, folder, whole, ran)
        yield Seen("disk full in the second checkpoint", NAMES[name], last_line(ran.log, folder),
                   kept, wrong or other)


def read_only(name: str, home: Path) -> Iterator[Seen]:
    """A folder that cannot be written, and one whose lock another host has."""
    host = HOSTS[name](home / name)
    with disk(home / "disk" / name, SIZES[name]) as folder:
        (folder / "run").mkdir()
        subprocess.run(["mount", "-o", "remount,ro", str(folder)], check=True)
        # the test's own notes lie in the folder of a run
        ran = host.train(home / "notes" / name, steps=1, more=_into(name, folder / "run"))
        yield Seen("folder that is read-only", NAMES[name], last_line(ran.log, folder),
                   "nothing was there", "" if ran.code else "the run went on")


def _into(name: str, folder: Path) -> list[str]:
    """Arguments that let a run save in another folder."""
    return {"plain": [], "fairseq": ["--save-dir", str(folder)],
            "megatron": ["--save", str(folder), "--load", str(folder)]}[name]


def statistics(name: str, home: Path) -> Iterator[Seen]:
    """The disk of the layers' statistics is full: training goes on."""
    host = HOSTS[name](home / name)
    whole = host.train(home / "whole" / name, steps=STEPS)
    with disk(home / "disk" / name, 4) as folder:
        ran = host.train(home / "run" / name, steps=STEPS, more=[
            "--moe-stats-jsonl", str(folder / "stats.jsonl"), "--moe-stats-interval", "1"])
        warned = [line for line in ran.log.splitlines() if "records are lost" in line]
        said = re.sub(r".*observe\.jsonl", "observe.jsonl", warned[0]) if warned else "nothing"
        wrong = "" if ran.code == 0 and warned else last_line(ran.log, folder)
        yield Seen("disk of `--moe-stats-jsonl` full", NAMES[name],
                   said.replace(str(folder), "DISK"), "the run ended normally with the same losses",
                   wrong or other_losses(ran.losses, whole.losses, host.tolerance))


_ADAPTERS = """
import sys, torch
from moe_plugin.hosts.plain.adapters.add import add_lora
from moe_plugin.hosts.plain.adapters.files import save_adapter
from moe_plugin.hosts.plain.huggingface import swap_moe_blocks
from tests.checkpoint.hf_models import tiny
model = tiny("qwen3_moe")
swap_moe_blocks(model)
add_lora(model, 8, 16)
save_adapter(model, sys.argv[1])
"""
_SWARM = """
import time
from moe_plugin.training.resilience.swarm.trainer import Swarm
Swarm(1)
time.sleep(60)
"""
# Python imports it where its folder is in PYTHONPATH
_SLOW = """
import os, time
_fsync = os.fsync
def slow(file):
    time.sleep(float(os.environ["SLOW_S"]) * (os.environ.get("RANK") == "1"))
    _fsync(file)
os.fsync = slow
"""
_STORE = """
import sys, torch
from moe_plugin import MoEConfig, MoELayer
from moe_plugin.config import with_overrides
config = with_overrides(MoEConfig(model_dim=64, num_experts=8), {
    "experts.store": "disk", "experts.store_path": sys.argv[1]})
MoELayer(config).eval()(torch.randn(4, 64))
"""


def programs(home: Path) -> Iterator[Seen]:
    """Experts on a disk that is full, and a report that does not fit."""
    with disk(home / "disk" / "experts", 64) as folder:
        yield _ran("disk of experts full (`experts.store: disk`)", "plain PyTorch",
                   [sys.executable, "-c", _STORE, str(folder)], folder)
    with disk(home / "disk" / "adapters", 4) as folder:
        yield _ran("disk of adapters full (`save_adapter`)", "plain PyTorch",
                   [sys.executable, "-c", _ADAPTERS, str(folder)], folder)
    host = HOSTS["megatron"](home / "megatron")
    run = home / "run" / "report"
    host.train(run, steps=3)
    with disk(home / "disk" / "report", 4) as folder:
        yield _ran("disk of a report full", "`moe-plugin report`", [
            sys.executable, "-m", "moe_plugin.cli.main", "report", str(run), "--output",
            str(folder / "report.html")], folder)


def _ran(what: str, host: str, command: Sequence[str], folder: Path) -> Seen:
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT,
                          env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"})
    left = sorted(path.name for path in folder.rglob("*") if path.is_file())
    return Seen(what, host, last_line(done.stdout + done.stderr, folder),
                "nothing half-written is left", "it ended normally" if not done.returncode else
                f"left: {left}" if left else "")


def shared_memory(home: Path) -> Iterator[Seen]:
    """`/dev/shm` of 64 KiB, in a space of mounts of its own."""
    folder = home / "run" / "shm"
    command = (f"mount -t tmpfs -o size=64k tmpfs /dev/shm && exec {sys.executable} -m "
               f"torch.distributed.run --standalone --nproc_per_node 2 scripts/train_plain.py "
               f"{folder} --steps 3 --save-every 3")
    done = subprocess.run(["unshare", "-m", "bash", "-c", command], capture_output=True, text=True,
                          check=False, cwd=ROOT, env={**os.environ, "OMP_NUM_THREADS": "1"})
    yield Seen("`/dev/shm` of 64 KiB, two ranks", "plain PyTorch",
               last_line(done.stdout + done.stderr, home), "the run ended normally",
               "" if done.returncode == 0 else f"status {done.returncode}")


def loaders(name: str, home: Path) -> Iterator[Seen]:
    """The same with workers that read batches, which travel through it: one cannot wait forever.
    """
    host = HOSTS[name](home / name)
    words = [word for word in host.arguments(home / "run" / "loaders", 3) if word != "--cpu"]
    program = {"fairseq": "fairseq-train --cpu", "megatron": f"{sys.executable} -m "
               "torch.distributed.run --standalone --nproc_per_node 2 -m "
               "moe_plugin.hosts.megatron.launch --moe-cpu pretrain_gpt_moe"}[name]
    command = (f"mount -t tmpfs -o size=64k tmpfs /dev/shm && exec timeout -k 5 200 {program} "
               + " ".join([*words, "--num-workers", "2"]))
    done = subprocess.run(["unshare", "-m", "bash", "-c", command], capture_output=True, text=True,
                          check=False, cwd=ROOT, env={**os.environ, "OMP_NUM_THREADS": "1"})
    said = [line for line in done.stderr.splitlines()
            if ": error: " in line and "/dev/shm" in line and "--num-workers 0" in line]
    yield Seen("`/dev/shm` of 64 KiB, two workers that read (`--num-workers 2`)", NAMES[name],
               last_line(said[0] if said else done.stdout + done.stderr, home),
               "nothing was trained", "" if said and done.returncode not in (0, 124)
               else f"status {done.returncode}")


def slow_disk(home: Path) -> Iterator[Seen]:
    """Of one of two ranks every file takes seconds longer to be on disk: less than the time-out of
    the ranks, and more.
    """
    hook = home / "slow"
    hook.mkdir()
    (hook / "sitecustomize.py").write_text(_SLOW)
    for seconds in (2, 8):
        folder = home / "run" / f"slow-{seconds}"
        done = subprocess.run(
            [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2",
             "scripts/train_plain.py", str(folder), "--steps", "3", "--save-every", "3",
             "--timeout", "5"], capture_output=True, text=True, check=False, cwd=ROOT,
            env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(hook),
                 "SLOW_S": str(seconds)})
        said = [line for line in done.stderr.splitlines()
                if "CommError: " in line and "raise comm.timeout_s" in line]
        seen = last_line(said[0] if said else done.stdout, home)
        well = seconds < 5
        yield Seen(f"disk on which each file takes {seconds} s, time-out 5 s", "plain PyTorch",
                   re.sub(r"^\[rank0\]: ", "", seen),
                   "the run ended normally" if well else "no checkpoint was there",
                   "" if well == (done.returncode == 0) and well != bool(said)
                   else f"status {done.returncode}: {last_line(done.stderr, home)}")


def others_folder(home: Path) -> Iterator[Seen]:
    """A folder of another user, without the right of root to write everywhere."""
    folder = home / "other"
    folder.mkdir(mode=0o755)
    os.chown(folder, 1000, 1000)
    yield _ran("folder of another user", "plain PyTorch", [
        "setpriv", "--bounding-set=-dac_override,-dac_read_search", sys.executable,
        "scripts/train_plain.py", str(folder / "run"), "--steps", "2"], folder)


def starts(home: Path, count: int = 50) -> Iterator[Seen]:
    """So many runs with one cache begin at one moment."""
    host = HOSTS["plain"](home / "plain")
    host.ranks = 1
    os.environ["XDG_CACHE_HOME"] = str(home / "cache")
    with ThreadPoolExecutor(count) as pool:
        ran = list(pool.map(lambda i: host.train(home / "starts" / str(i), steps=2), range(count)))
    del os.environ["XDG_CACHE_HOME"]
    bad = [one for one in ran if one.code or one.losses != ran[0].losses]
    yield Seen(f"{count} starts at one moment with one cache (`XDG_CACHE_HOME`)", "plain PyTorch",
               ran[0].log.splitlines()[-1].replace(str(home), "DISK"),
               f"all {count} have the same losses",
               f"{len(bad)} differ: {last_line(bad[0].log, home)}" if bad else "")


def descriptors(home: Path) -> Iterator[Seen]:
    """`ulimit -n 64` before Megatron's ranks."""
    host = HOSTS["megatron"](home / "megatron")
    folder = home / "run" / "files"
    words = [word for word in host.arguments(folder, 2) if word != "--cpu"]
    command = (f"ulimit -n 64; exec {sys.executable} -m torch.distributed.run --standalone "
               "--nproc_per_node 2 -m moe_plugin.hosts.megatron.launch --moe-cpu pretrain_gpt_moe "
               + " ".join(words))
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, check=False,
                          cwd=ROOT, env={**os.environ, "OMP_NUM_THREADS": "1"})
    said = [line for line in done.stderr.splitlines() if "may open 64 files" in line]
    yield Seen("`ulimit -n 64`", "Megatron", (said or [last_line(done.stderr, home)])[0],
               "nothing was trained", "" if said and done.returncode else "no remedy")


def ports(home: Path) -> Iterator[Seen]:
    """What commands listen on while they run."""
    torchrun = [sys.executable, "-m", "torch.distributed.run"]
    train = ["scripts/train_plain.py", "--steps", "100000", "--save-every", "100000"]
    for what, command in {
        "`torchrun --standalone`, two ranks":
            [*torchrun, "--standalone", "--nproc_per_node", "2", *train, str(home / "a")],
        "`scripts/train_elastic.sh`, two replicas":
            ["bash", "scripts/train_elastic.sh", "plain", str(home / "b"), *train[1:]],
        "`scripts/train_plain.py` alone": [sys.executable, *train, str(home / "c")],
        "the trainer of a swarm": [sys.executable, "-c", _SWARM],
        "`moe-plugin doctor`": [sys.executable, "-m", "moe_plugin.cli.main", "doctor"],
    }.items():
        found = _listening(command)
        yield Seen("ports that are opened", what, "; ".join(found) or "none", "–")


def _listening(command: Sequence[str], seconds: float = 25.0) -> list[str]:
    """Address and program of each port that a command and its processes listen on, of all that are
    seen until it ends or the time is over.
    """
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.DEVNULL,
                               stderr=subprocess.DEVNULL, start_new_session=True,
                               env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)})
    found, until = dict[str, set[str]](), time.monotonic() + seconds
    while process.poll() is None and time.monotonic() < until:
        shown = subprocess.run(["ss", "-ltnpH"], capture_output=True, text=True, check=True).stdout
        for line in shown.splitlines():
            for name, pid in re.findall(r'\("([^"]+)",pid=(\d+)', line):
                with contextlib.suppress(ProcessLookupError):
                    if os.getsid(int(pid)) == process.pid:
                        address, _, port = line.split()[3].rpartition(":")
                        found.setdefault(f"{name} on {address}", set()).add(port)
        time.sleep(0.2)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    return [f"{where}: {len(ports)} port{'s' * (len(ports) > 1)}"
            for where, ports in sorted(found.items())]


def cases(home: Path, minutes: float) -> dict[str, Callable[[], Iterator[Seen]]]:
    """All by name."""
    found: dict[str, Callable[[], Iterator[Seen]]] = {}
    for name in NAMES:
        found[f"full-{name}"] = lambda name=name: full_disk(name, home)
        found[f"soak-{name}"] = lambda name=name: iter([soak(name, home, minutes)])
    for name in ("fairseq", "megatron"):
        found[f"read-only-{name}"] = lambda name=name: read_only(name, home)
        found[f"statistics-{name}"] = lambda name=name: statistics(name, home)
        found[f"loaders-{name}"] = lambda name=name: loaders(name, home)
    for name, long in {"changing": changing, "streaming": streaming,
                       "streaming-alone": streaming_alone}.items():
        found[name] = lambda long=long: iter([long(home, minutes)])
    return {**found, "programs": lambda: programs(home), "shm": lambda: shared_memory(home),
            "slow": lambda: slow_disk(home), "other-user": lambda: others_folder(home),
            "starts": lambda: starts(home), "files": lambda: descriptors(home),
            "ports": lambda: ports(home)}


def page(rows: Sequence[Seen]) -> str:
    """The page of the rows that were seen."""
    wrong = sum(bool(row.wrong) for row in rows)
    return "\n".join([
        HEAD, paragraph(f"{len(rows)} cases were tried. {wrong or 'None'} of them ended in "
                        "another way than it should."), "",
        "| case | host or command | what the user sees | after the fault |", "|---|---|---|---|",
        *(f"| {row.what} | {row.host} | {row.seen} | {row.wrong or row.kept} |" for row in rows)
    ]) + "\n"


def main(argv: Sequence[str] | None = None) -> int:
    """Command line; 1 if anything is not as it must be."""
    p = argparse.ArgumentParser(description=__doc__)
    p.add_argument("--only", default="", help="names of cases, comma-separated (default: all)")
    p.add_argument("--minutes", type=float, default=20.0, help="of each long run")
    args = p.parse_args(argv)
    wrong = False
    with tempfile.TemporaryDirectory() as home:
        for name, case in cases(Path(home), args.minutes).items():
            if args.only and name not in args.only.split(","):
                continue
            for row in case():
                print(f"{name}: {row}", flush=True)
                _enter(row)
                wrong |= bool(row.wrong)
    return int(wrong)


def _enter(row: Seen) -> None:
    """Write a row, also while other cases run, which write theirs."""
    rows = [Seen(**json.loads(line)) for line in DATA.read_text().splitlines()
            ] if DATA.exists() else []
    rows = [*(one for one in rows if (one.what, one.host) != (row.what, row.host)), row]
    DATA.write_text("".join(json.dumps(asdict(one)) + "\n" for one in rows))
    PAGE.write_text(page(rows))


if __name__ == "__main__":
    sys.exit(main())

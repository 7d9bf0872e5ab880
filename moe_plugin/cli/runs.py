"""Commands for runs: `configs` (settings files), `corpus` (training data), `report`, and `watch`
(live view).
"""

from __future__ import annotations

import argparse
import gc
import json
import re
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from moe_plugin.utils.messages import aligned, did_you_mean, printable, short, similar_names
from moe_plugin.utils.yaml_file import bundled

if TYPE_CHECKING:
    from moe_plugin.observe.history import RunRecord

# `moe-plugin configs`: the YAML files that are installed with the package
TOP = "configs"
_SENTENCE = re.compile(r"(.*?)(?<! al)\.(?: |$)")


def configs_options(p: argparse.ArgumentParser) -> None:
    """Add the options of `moe-plugin configs`."""
    p.description = ("Lists the installed files of settings, models, clusters, devices and "
                     "networks, or prints one of them. Every option that expects such a file also "
                     "accepts these names, from any folder, unless a file of that name exists: "
                     "`--moe-config configs/moe/switch.yaml`.")
    p.add_argument("name", metavar="NAME", nargs="?",
                   help="name of a file or folder as listed; a file is printed")
    p.add_argument("--json", action="store_true",
                   help="print one JSON object with each file's description, or the file's text")


def configs(args: argparse.Namespace) -> int:
    """List the installed settings files, or print one of these files."""
    requested = str(Path(TOP, (args.name or "").removeprefix(f"{TOP}/").removeprefix(TOP)))
    matches = {name: path for name, path in _files().items()
               if name == requested or name.startswith(f"{requested}/")}
    if not matches:
        raise ValueError(f"there is no file {short(args.name)}; {did_you_mean(_near(requested))}"
                         "`moe-plugin configs` lists all files")
    texts = {name: path.read_text(encoding="utf-8") for name, path in matches.items()}
    if requested in texts:
        print(json.dumps(texts, indent=1) if args.json else texts[requested].rstrip("\n"))
        return 0
    about = {name: summary(text) for name, text in texts.items()}
    print(json.dumps(about, indent=1) if args.json else aligned(list(about.items())))
    return 0


def _files() -> dict[str, Path]:
    folder = Path(bundled(Path(TOP, "moe"))).parent
    return {str(Path(TOP, path.relative_to(folder))): path
            for path in sorted(folder.rglob("*.*")) if path.suffix in (".yaml", ".json")}


def _near(name: str) -> list[str]:
    names = list(_files())
    ends = [path for path in names if Path(path).stem == Path(name).stem]
    return ends or similar_names(name, names)


def summary(text: str) -> str:
    """Return the first sentence of the comment at the top of a settings file. A command in the
    comment is skipped. For a JSON file, return its `name`.
    """
    if text.startswith("{"):
        return str(json.loads(text).get("name", ""))
    lines: list[str] = []
    for line in text.splitlines():
        if not line.startswith("#") or lines and lines[-1].endswith(":"):
            break
        if not line.startswith("# @"):
            lines.append(line.lstrip("# "))
    comment = " ".join(lines)
    sentence = _SENTENCE.match(comment)
    return sentence[1] if sentence else comment.rstrip(":")


def corpus_options(p: argparse.ArgumentParser) -> None:
    """Add the options of `moe-plugin corpus`."""
    p.add_argument("--out", type=Path, required=True, metavar="DIR", help="folder to write to")
    p.add_argument("--size", type=int, default=4_000_000, metavar="BYTES",
                        help="total number of bytes of all splits (default: %(default)s)")
    p.add_argument("--source", type=Path, default=None, metavar="DIR",
                        help="folder of Python files (default: the standard library)")


def corpus(args: argparse.Namespace) -> int:
    """Write a text corpus and print what it contains."""
    from moe_plugin.cli.corpus import SPLITS, build_corpus

    info = build_corpus(args.out, size=args.size, source=args.source)
    for split in SPLITS:
        print(f"{args.out / (split + '.txt')}: {info.tokens[split]:,} bytes from "
              f"{info.files[split]} files")
    print(f"unigram entropy {info.unigram_entropy:.3f} nats per byte")
    return 0


def report_options(p: argparse.ArgumentParser) -> None:
    """Add the options of `moe-plugin report`."""
    p.description = ("Reads the files of a run of either host (layer statistics and training log) "
                     "and writes one HTML page that needs no network access. The files are "
                     "recognized by their content, and runs without this plugin work too. Several "
                     "folders are compared: their curves are drawn in the same plots, and the "
                     "settings that differ are listed. For a folder of runs the page shows their "
                     "history: a table with the best run last, and a comparison of the best runs.")
    p.add_argument("run_dir", type=Path, metavar="RUN_DIR", nargs="+",
                   help="folder of a run or of many runs; several folders are compared")
    p.add_argument("--output", type=Path, default=None, metavar="FILE",
                   help="file to write (default: report.html in RUN_DIR, or comparison.html in the "
                   "first of several folders)")


def report(args: argparse.Namespace) -> int:
    """Write the page. Print the path of the report, and a note about each problem in the run's
    files.
    """
    # a long log has many records and no reference cycles: collection would take a third of the time
    collects = gc.isenabled()
    gc.disable()
    try:
        return _report(args)
    finally:
        if collects:
            gc.enable()


def _report(args: argparse.Namespace) -> int:
    from moe_plugin.observe.history import read_runs
    from moe_plugin.observe.report.page import write_comparison, write_history, write_report

    folders = args.run_dir
    runs = [run for folder in folders for run in read_runs(folder)]
    for run_ in runs:
        for note in run_.notes:
            print(printable(f"note: {note}" if len(runs) == 1 else f"note: {run_.name}: {note}"))
    if len(runs) == 1:
        page = write_report(runs[0], args.output or folders[0] / "report.html")
    elif len(folders) == 1:
        page = write_history(runs, args.output or folders[0] / "report.html")
    else:
        page = write_comparison(runs, args.output or folders[0] / "comparison.html")
    print(printable(str(page)))
    return 0


def watch_options(p: argparse.ArgumentParser) -> None:
    """Add the options of `moe-plugin watch`."""
    p.description = ("Shows loss, throughput and the balance of every layer, and updates them as "
                     "the run's files grow. Ends when the run has finished, or with Ctrl-C; the "
                     "job is not affected.")
    p.add_argument("run_dir", type=Path, metavar="RUN_DIR", help="folder of the run")
    p.add_argument("--once", action="store_true", help="show the current state and exit")
    p.add_argument("--json", action="store_true",
                   help="print the current state as one JSON object and exit")
    p.add_argument("--interval", type=float, default=2.0, metavar="S",
                   help="seconds between two updates (default: %(default)s)")


def watch(args: argparse.Namespace) -> int:
    """Show the current state of a run, once or continuously."""
    if args.json:
        from moe_plugin.observe.history import read_run

        print(json.dumps(_state(read_run(args.run_dir)), indent=1))
        return 0
    try:
        from moe_plugin.observe.watch import Watch
    except ModuleNotFoundError as error:
        raise ValueError("watch needs rich, which is not installed. Run: pip install "
                         "'moe-plugin[observe]'") from error
    if not args.run_dir.is_dir():
        raise ValueError(f"{args.run_dir} is not a directory. Pass the folder of a run")
    watch = Watch(args.run_dir, args.interval)
    if args.once:
        watch.once()
    else:
        watch.follow()
    return 0


def _state(run: RunRecord) -> dict[str, Any]:
    """Return the current state of a run as plain values for JSON. The state consists of the last
    records and the findings.
    """
    from moe_plugin.observe.findings import findings

    return {
        "name": run.name, "host": run.host, "step": run.last_step, "steps": run.total_steps,
        "seconds": run.seconds, "remaining_s": run.remaining_s, "finished": run.finished,
        "training": asdict(run.steps[-1]) if run.steps else None,
        "layers": {name: asdict(record) | {"load": list(record.load)}
                   for name, record in run.last_records.items()},
        "findings": [asdict(finding) for finding in findings(run)], "notes": run.notes}

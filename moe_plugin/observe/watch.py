"""A live view of a running job that is updated whenever the files of the run grow.

If the output is not a terminal, the view is printed as plain text without control codes.
"""

from __future__ import annotations

import io
import math
import os
import sys
import textwrap
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import TextIO

from rich.console import Console, Group, RenderableType
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from moe_plugin.observe.findings import findings
from moe_plugin.observe.history import LayerRecord, RunRecord, read_run
from moe_plugin.observe.history.reader import candidates
from moe_plugin.observe.report.text import HOSTS, number, shortened
from moe_plugin.planner.units import show_time
from moe_plugin.utils.messages import printable

BARS, PLAIN = "▁▂▃▄▅▆▇█", "_.-=+*#@"
NAMES, SPARK, DECISIONS = 28, 60, 4
FILE_SIZE = (120, 200)  # columns and lines where the output is not a terminal
POLL_S = 0.2


def view(run: RunRecord, console: Console, age_s: float | None = None) -> Group:
    """Return the live view of a run, fitted to the height of the console.

    age_s: the time in seconds since the run's files last grew. Optional.
    """
    bars = PLAIN if console.options.ascii_only else BARS
    training = _training(run, console.width, bars)
    head: list[RenderableType] = [_title(run, age_s), _progress(run),
                                  *(_text(f"note: {note}", "yellow") for note in run.notes),
                                  *_findings(run, console.width)]
    decisions = [
        _text(f"  step {d.step:,}  {d.layer}  {d.event}  {d.choice}  {d.why}")
        for d in run.decisions[-DECISIONS:]
    ]
    foot = [Text(), _text("last decisions of the tuner", "bold"), *decisions] if decisions else []
    room = console.height - len(head) - training.row_count - len(foot) - 4
    return Group(*head, Text(), training, Text(), *_layers(run, console.width, room, bars), *foot)


def _title(run: RunRecord, age_s: float | None) -> Text:
    title = _text(run.name, "bold")
    title.append(f"  {printable(HOSTS.get(run.host, run.host))}", "cyan")
    if run.finished:
        title.append("  finished", "bold green")
    elif age_s is not None:
        title.append(f"  (last record {show_time(max(0.0, round(age_s)))} ago)", "dim")
    return title


def _findings(run: RunRecord, width: int) -> list[RenderableType]:
    """Return all findings with their remedies, wrapped to the width of the console."""
    parts = [(text, style, indent) for found in findings(run) for text, style, indent in (
        (f"! {found.title}", "bold red", "  "), (f"  try: {found.remedy}", "red", "       "))]
    return [_text(line, style) for text, style, indent in parts for line in textwrap.wrap(
        printable(text), max(width, 20), subsequent_indent=indent, break_on_hyphens=False)]


def _progress(run: RunRecord) -> RenderableType:
    """Return the progress of the run. The elapsed and remaining time are included if known."""
    total, parts = run.total_steps, [f"step {run.last_step:,}"]
    if total:
        parts[0] += f" of {total:,} ({100 * run.last_step / total:.0f} %)"
    if run.seconds is not None:
        parts.append(show_time(run.seconds))
    if run.remaining_s and math.isfinite(run.remaining_s) and not run.finished:
        parts.append(f"ETA {show_time(round(run.remaining_s))}")
    text = _text("  ".join(parts))
    if not total:
        return text
    row = Table.grid(padding=(0, 2))
    row.add_row(text, ProgressBar(total=total, completed=run.last_step, width=30))
    return row


def _training(run: RunRecord, width: int, bars: str) -> Table:
    table = Table.grid(padding=(0, 2))
    for name, values, unit in (("loss", [r.loss for r in run.steps], ""),
                               ("valid loss", [r.valid_loss for r in run.steps], ""),
                               ("tokens/s", [r.tokens_per_s for r in run.steps], "count"),
                               ("grad norm", [r.grad_norm for r in run.steps], "")):
        known = [v for v in values if v is not None]
        if known:
            line = spark(known, min(SPARK, width - 24), bars)
            table.add_row(name, Text(number(known[-1], unit), "bold", justify="right"),
                          Text(line, "cyan", no_wrap=True))
    if not table.row_count:
        table.add_row("no training log yet; only layer statistics")
    return table


def spark(values: Sequence[float], width: int, bars: str = BARS) -> str:
    """Draw a series of values as one line of bars. Values that are not finite are shown as `?`."""
    count = max(1, min(width, len(values)))
    parts = [values[i * len(values) // count : (i + 1) * len(values) // count]
             for i in range(count)]
    means = [sum(p) / len(p) if p else math.nan for p in parts]
    known = [v for v in means if math.isfinite(v)]
    if not known:
        return "?" * len(means)
    low, size = min(known), (max(known) - min(known)) or 1.0
    return "".join(bars[round((len(bars) - 1) * (v - low) / size)] if math.isfinite(v) else "?"
                   for v in means)


def load_bars(record: LayerRecord, width: int, bars: str = BARS) -> Text:
    """Draw the loads of experts as one line of bars, with one bar per expert. A half-height bar
    represents the mean load, and a full-height bar represents twice the mean load.

    If there are more than `width` experts, each bar shows the busiest expert of a group of experts.
    """
    shares = [0.0 if math.isnan(s) else s for s in record.shares]
    count = min(width, len(shares))
    text = Text(no_wrap=True)
    for i in range(count):
        peak = max(shares[i * len(shares) // count : (i + 1) * len(shares) // count])
        bar = bars[round((len(bars) - 1) * min(peak, 2.0) / 2)]
        text.append(bar, "blue" if peak < 0.5 else _warning(peak, 1.5, 2.0))
    return text


def _warning(value: float | None, high: float, very_high: float) -> str:
    """Return the colour that highlights a large value."""
    if value is None:
        return ""
    return "red" if value >= very_high else "yellow" if value >= high else "green"


def _layers(run: RunRecord, width: int, room: int, bars: str) -> list[RenderableType]:
    last = run.last_records
    if not last:
        return [_text("no layer statistics (the hosts write them with --moe-stats-jsonl FILE)")]
    names = min(NAMES, max(len(name) for name in last))
    shown = last
    if len(last) > max(room, 3):  # show the least balanced layers, in the order of the model
        worst = sorted(last, key=lambda name: -(last[name].max_over_mean or 0.0))[:max(room - 1, 3)]
        shown = {name: record for name, record in last.items() if name in worst}
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    table.add_column("layer", no_wrap=True)
    for title in ("max/mean", "dropped", "entropy", "unused"):
        table.add_column(title, justify="right", no_wrap=True, min_width=8)
    table.add_column("load by expert", no_wrap=True)
    for name, r in shown.items():
        table.add_row(
            _text(shortened(name, names)),
            Text(number(r.max_over_mean), _warning(r.max_over_mean, 1.5, 2.0)),
            Text(number(r.drop_fraction, "%"), _warning(r.drop_fraction, 1e-9, 0.05)),
            number(r.entropy),
            Text(number(r.unused_experts, "count"), _warning(r.unused_experts, 1, math.inf)),
            load_bars(r, max(8, width - names - 44), bars))
    hidden = len(last) - len(shown)
    return [table, _text(f"and {hidden} better balanced layers", "dim")] if hidden else [table]


def _text(text: str, style: str = "") -> Text:
    # names from a log must not send control codes to the terminal
    return Text(printable(text), style, no_wrap=True, overflow="ellipsis")


class Watch:
    """Show the live view of a run until the run has finished.

    Args:
        interval: the time in seconds between checks for new data in the run's files.
        stream: the output. Control codes and colours are used only if the output is a terminal.
        sleep: a function that waits for the given number of seconds. Tests replace it.
    Raises:
        ValueError: If `interval` is not positive.
    """

    def __init__(self, folder: Path, interval: float = 2.0, stream: TextIO | None = None,
                 sleep: Callable[[float], None] = time.sleep) -> None:
        if not interval > 0:
            raise ValueError(f"--interval {interval} must be > 0. For example, use 2")
        self.folder, self.interval, self.sleep = folder, interval, sleep
        self.stream = stream if stream is not None else sys.stdout
        if isinstance(self.stream, io.TextIOWrapper):
            self.stream.reconfigure(errors="replace")  # for an ASCII terminal
        self.console = Console(file=self.stream, highlight=False)
        self.terminal = self.stream.isatty() and not self.console.is_dumb_terminal
        if not self.terminal:
            self.console = Console(file=self.stream, highlight=False, force_terminal=False,
                                   color_system=None, width=FILE_SIZE[0], height=FILE_SIZE[1])
        self.run: RunRecord | None = None
        self.why = ""
        self.signature: object = None

    def once(self) -> None:
        """Print the current state of the run once. Raise `ValueError` if the folder does not
        contain a run.
        """
        self.run = read_run(self.folder)
        self._print()

    def follow(self) -> None:
        """Show the live view until the run finishes, Ctrl-C is pressed, or the reader of a pipe
        exits.
        """
        try:
            self._follow()
            self._print(f"{self.folder.resolve().name} finished")
        except KeyboardInterrupt:
            if self.terminal:
                self._print()
        except BrokenPipeError:
            # without this the interpreter would fail when it flushes the closed pipe at exit
            os.dup2(os.open(os.devnull, os.O_WRONLY), self.stream.fileno())

    def _follow(self) -> None:
        with self.console.screen() if self.terminal else nullcontext() as screen:
            while True:
                changed = self._look()
                if screen is not None:
                    screen.update(self._view())
                elif changed:
                    self._print()
                # a final validation follows the last step, so wait until the files stop growing
                if not changed and self.run is not None and self.run.finished:
                    return
                self._wait()

    def _look(self) -> bool:
        """Read the files of the run if they have changed. Return whether they have changed."""
        now = self._signature()
        if now == self.signature:
            return False
        self.signature = now
        try:
            self.run, self.why = read_run(self.folder), ""
        except ValueError as error:
            self.run, self.why = None, str(error)
        return True

    def _signature(self) -> tuple[tuple[str, int, int], ...]:
        found = []
        for path in candidates(self.folder):
            try:
                status = path.stat()
            except OSError:
                continue  # deleted in the meantime
            found.append((str(path), status.st_size, status.st_mtime_ns))
        return tuple(found)

    def _view(self) -> Group:
        if self.run is None:
            return Group(_text("waiting for the first record"), _text(self.why, "dim"))
        times = [path.stat().st_mtime for name in self.run.files
                 if (path := self.folder / name).exists()]
        return view(self.run, self.console, time.time() - max(times) if times else None)

    def _print(self, last: str | None = None) -> None:
        """Print the live view as plain text, or print a final line below the view."""
        if last is None or self.terminal:
            with self.console.capture() as captured:
                self.console.print(self._view())
            lines = [line.rstrip() for line in captured.get().splitlines()]
            self.stream.write("\n".join([*lines, "", ""]))
        if last is not None:
            self.stream.write(f"{printable(last)}\n")
        self.stream.flush()

    def _wait(self) -> None:
        """Wait until the update interval has passed or the window has been resized."""
        size, left = self.console.size, self.interval
        while left > 0 and not (self.terminal and self.console.size != size):
            part = min(POLL_S, left)
            self.sleep(part)
            left -= part

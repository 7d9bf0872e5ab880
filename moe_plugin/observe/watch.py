"""The live view of a running job: one screen of text, made anew whenever the run's files grow."""

from __future__ import annotations

import math
import os
import shutil
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TextIO

from moe_plugin.observe.history import LayerRecord, Run, read_run
from moe_plugin.observe.history.reader import candidates
from moe_plugin.observe.report.text import number, seconds

BARS, PLAIN = "▁▂▃▄▅▆▇█", "_.-=+*#@"
NAMES, SPARK, DECISIONS = 28, 60, 4
HOME, CLEAR_LINE, CLEAR_REST = "\x1b[H", "\x1b[K", "\x1b[J"
POLL_S = 0.2


@dataclass(frozen=True)
class Style:
    """Size of the screen in characters; bars: the characters of bars, low to high."""

    columns: int = 100
    lines: int = 40
    bars: str = BARS


def screen(run: Run, style: Style = Style(), age_s: float | None = None) -> list[str]:
    """The view as lines of text, none longer than the screen is wide. age_s: since the files last
    grew.
    """
    head = [
        _title(run, age_s), *(f"note: {note}" for note in run.notes), "", *_training(run, style), ""
    ]
    made = run.decisions[-DECISIONS:]
    foot = [
        "", "last decisions of the tuner",
        *(f"  step {d.step:,}  {d.layer}  {d.event}  {d.choice}  {d.why}" for d in made)
    ] if made else []
    room = style.lines - len(head) - len(foot) - 3
    return [_clean(line)[: style.columns] for line in (*head, *_layers(run, style, room), *foot)]


def _title(run: Run, age_s: float | None) -> str:
    done = f"step {run.last_step:,}"
    if run.total_steps:
        done += f" of {run.total_steps:,} ({100 * run.last_step / run.total_steps:.0f} %)"
    parts = [run.name, {"megatron": "Megatron-core"}.get(run.host, run.host), done]
    if run.seconds is not None:
        parts.append(seconds(run.seconds))
    return "  ".join(parts) + (f"  (last record {seconds(max(0.0, round(age_s)))} ago)"
                               if age_s is not None else "")


def _training(run: Run, style: Style) -> list[str]:
    rows = []
    for name, field, unit in (("loss", "loss", ""), ("valid loss", "valid_loss", ""),
                              ("tokens/s", "tokens_per_s", "count"), ("grad norm", "grad_norm",
                                                                      "")):
        values = [v for r in run.steps if (v := getattr(r, field)) is not None]
        if values:
            rows.append(
                f"{name:<11}{number(values[-1], unit):>10}  "
                f"{spark(values, min(SPARK, style.columns - 24), style.bars)}"
            )
    return rows or ["no training log yet; layer statistics alone"]


def spark(values: Sequence[float], width: int, bars: str = BARS) -> str:
    """Values over time as a line of bars, from their lowest to their highest; `?` where one is not
    finite.
    """
    count = max(1, min(width, len(values)))
    parts = [values[i * len(values) // count:(i + 1) * len(values) // count] for i in range(count)]
    means = [sum(p) / len(p) if p else math.nan for p in parts]
    known = [v for v in means if math.isfinite(v)]
    if not known:
        return "?" * len(means)
    low, size = min(known), (max(known) - min(known)) or 1.0
    return "".join(bars[round((len(bars) - 1) * (v - low) / size)] if math.isfinite(v) else "?"
                   for v in means)


def load_bars(record: LayerRecord, width: int, bars: str = BARS) -> str:
    """A bar an expert: half height is the mean load, full height twice the mean or more. Of too
    many experts the busiest of each group.
    """
    shares = [0.0 if math.isnan(s) else s for s in record.shares]
    count = max(1, min(width, len(shares)))
    peaks = [
        max(shares[i * len(shares) // count:(i + 1) * len(shares) // count]) for i in range(count)
    ] if shares else []
    return "".join(bars[min(len(bars) - 1, round((len(bars) - 1) * min(p, 2.0) / 2))]
                   for p in peaks)


def _layers(run: Run, style: Style, room: int) -> list[str]:
    last = {name: records[-1] for name, records in run.layers.items() if records}
    if not last:
        return ["no layer statistics (the hosts write them with --moe-stats-jsonl FILE)"]
    width = min(NAMES, max(len(name) for name in last))
    bars = min(max(1, run.experts), max(8, style.columns - width - 46))
    rows = [
        f"{'layer':<{width}}  {'max/mean':>8}  {'dropped':>8}  {'entropy':>8}  {'unused':>6}  load "
        "by expert"
    ]
    shown = last
    if len(last) > max(room, 3):  # those that matter: the least balanced, in the model's order
        worst = sorted(last, key=lambda name: -(last[name].max_over_mean or 0.0))[:max(room - 1, 3)]
        shown = {name: record for name, record in last.items() if name in worst}
    for name, r in shown.items():
        label = name if len(name) <= width else "…" + name[-(width - 1):]
        rows.append(
            f"{label:<{width}}  {number(r.max_over_mean):>8}  {number(r.drop_fraction, '%'):>8}  "
            f"{number(r.entropy):>8}  "
            f"{number(r.unused_experts, 'count'):>6}  {load_bars(r, bars, style.bars)}")
    if len(shown) < len(last):
        rows.append(f"and {len(last) - len(shown)} better balanced layers")
    return rows


def _clean(text: str) -> str:
    # names from a log must not steer the terminal
    return "".join(c if c.isprintable() else "?" for c in text)


class Watch:
    """Shows a run until it is told to stop.

    Args:
        folder: the run's. interval: seconds between two looks at its files. stream: where to write;
            escape codes only where it is a terminal.
        sleep: waits (for tests).
    """

    def __init__(self, folder: Path, interval: float = 2.0, stream: TextIO | None = None,
                 sleep: Callable[[float], None] = time.sleep) -> None:
        if not interval > 0:
            raise ValueError(f"--interval {interval} is out of bounds: must be > 0; use 2")
        self.folder, self.interval, self.sleep = folder, interval, sleep
        self.stream = stream if stream is not None else sys.stdout
        self.terminal = self.stream.isatty()
        self.run: Run | None = None
        self.why = ""
        self.seen: object = None

    def once(self) -> None:
        """One view. `ValueError` where there is no run."""
        self.run = read_run(self.folder)
        self._write(self._lines(), plain=True)

    def forever(self) -> None:
        """Views until Ctrl-C, or until nobody reads the output any more."""
        try:
            while True:
                changed = self._look()
                if changed or self.terminal:
                    self._write(self._lines())
                self._wait()
        except KeyboardInterrupt:
            self.stream.write("\n" if self.terminal else "")
        except BrokenPipeError:
            # nothing more can be written, not even by the interpreter when it ends
            os.dup2(os.open(os.devnull, os.O_WRONLY), self.stream.fileno())

    def _look(self) -> bool:
        """Read the files where they changed."""
        now = self._signature()
        if now == self.seen:
            return False
        self.seen = now
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
                continue  # gone in between
            found.append((str(path), status.st_size, status.st_mtime_ns))
        return tuple(found)

    def _lines(self) -> list[str]:
        style = self._style()
        if self.run is None:
            return [
                _clean(line)[:style.columns] for line in ("waiting for the first record", self.why)
            ]
        newest = max(((self.folder / name).stat().st_mtime
                      for name in self.run.files if (self.folder / name).exists()), default=None)
        return screen(self.run, style, None if newest is None else time.time() - newest)

    def _style(self) -> Style:
        bars = BARS if (getattr(self.stream, "encoding", None) or "").lower().replace(
            "-", "") == "utf8" else PLAIN
        if not self.terminal:
            return Style(columns=120, lines=200, bars=bars)
        size = shutil.get_terminal_size()
        return Style(size.columns, size.lines, bars)

    def _write(self, lines: list[str], plain: bool = False) -> None:
        if self.terminal and not plain:
            # no line end after the last line: the screen would scroll
            text = HOME + "\n".join(
                line + CLEAR_LINE for line in lines[:shutil.get_terminal_size().lines]) + CLEAR_REST
        else:
            text = "\n".join(lines) + "\n" + ("" if plain else "\n")
        encoding = getattr(self.stream, "encoding", None) or "utf-8"
        self.stream.write(text.encode(encoding, "replace").decode(encoding))
        self.stream.flush()

    def _wait(self) -> None:
        """The interval, or less where the window's size changes."""
        size, left = shutil.get_terminal_size(), self.interval
        while left > 0 and not (self.terminal and shutil.get_terminal_size() != size):
            part = min(POLL_S, left)
            self.sleep(part)
            left -= part

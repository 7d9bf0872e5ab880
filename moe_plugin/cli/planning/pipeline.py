"""Functions that describe pipeline schedules in a table, and print the timeline of one schedule as
text.
"""

from __future__ import annotations

from typing import Any

from moe_plugin.planner.events import Timeline
from moe_plugin.planner.pipeline.choice import StageProfile, choose, groups, predict
from moe_plugin.planner.units import show_size, show_time

COLUMNS = 88  # width of a lane


def explain(profile: StageProfile) -> str:
    """Describe the time of each schedule, the chosen schedule, and the timeline of this schedule.
    """
    every, best = predict(profile), choose(profile)
    stages = len(profile.forward_s)
    lines = [f"{profile.name}: {stages} stages, {profile.micro_batches} micro-batches,",
             f"transfers of {show_time(profile.transfer_s)} over {profile.transport}"]
    if profile.memory_bytes:
        lines.append(f"{show_size(profile.memory_bytes)} for activations")
    lines += ["", f"{'schedule':<14}{'step':>10}{'idle':>8}  micro-batches kept by stage"]
    for one in every:
        kept = " ".join(f"{count:.3g}" for count in one.alive)
        kept += "" if one.fits else "  does not fit"
        lines.append(f"{one.schedule:<14}{show_time(one.seconds):>10}{one.bubble:>8.1%}  {kept}")
    cut = f", slices {','.join(map(str, best.slices))}" if best.slices else ""
    if best.sequences:
        cut = f", micro-batches of {best.sequences} sequences{cut}"
    if profile.batch:
        found = groups(profile)
        lines += ["", "groups that do not overlap, of any sizes (TeraPipe's own cut): " + "; ".join(
            f"{size} in {','.join(map(str, one.slices))}" for size, one in found.groups)
            + f": {show_time(found.seconds)}"]
    return "\n".join([*lines, "", f"best: {best.schedule}{cut}", "",
                      *lanes(best.timeline, stages), "",
                      "digits: forward of this micro-batch (last digit), letters: backward (a is "
                      "0), dots: idle"])


def lanes(timeline: Timeline, stages: int) -> list[str]:
    """For each stage, return one line that shows what the stage computes over time."""
    cells = [["."] * COLUMNS for _ in range(stages)]
    for span in timeline.spans:
        if span.task.phase == "send":
            continue
        kind, stage, unit = span.task.name.split()
        batch = unit.split(".")[0]  # a slice is named by its micro-batch and its own number
        first, last = (round(COLUMNS * at / timeline.seconds) for at in (span.start, span.end))
        mark = (chr(ord("a") + int(batch) % 26) if kind in ("backward", "weights")
                else batch[-1])
        cells[int(stage)][first:last] = mark * (last - first)
    return [f"stage {stage:<3} {''.join(row)}" for stage, row in enumerate(cells)]


def as_dict(profile: StageProfile) -> dict[str, object]:
    """Return the comparison as plain values for JSON."""
    return {"best": choose(profile).schedule, "schedules": [{
        "schedule": one.schedule, "seconds": one.seconds, "bubble": one.bubble,
        "micro_batches_kept": list(one.alive), "fits": one.fits, "slices": list(one.slices),
        **({"sequences": one.sequences} if one.sequences else {})
    } for one in predict(profile)], **({} if not profile.batch else {
        "groups": [[size, list(one.slices)] for size, one in groups(profile).groups]})}


def trace(timeline: Timeline) -> dict[str, Any]:
    """Return the timeline of the stages and links in the trace event format of Chrome and Perfetto.
    """
    rows = sorted({span.task.resource for span in timeline.spans},
                  key=lambda name: (name.startswith("link"), *map(int, name.split()[1:])))
    return timeline.trace(rows)

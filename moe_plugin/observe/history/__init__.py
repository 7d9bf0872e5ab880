"""Read a finished or running job from its files.

`read_run(folder)` returns a `RunRecord`, and `read_runs(folder)` returns those of all runs in a
folder.
"""

from moe_plugin.observe.history.reader import read_run, read_runs
from moe_plugin.observe.history.records import (
    CopyRecord,
    DecisionRecord,
    LayerRecord,
    RunRecord,
    SpanRecord,
    StepRecord,
)

__all__ = ["CopyRecord", "DecisionRecord", "LayerRecord", "RunRecord", "SpanRecord", "StepRecord",
           "read_run", "read_runs"]

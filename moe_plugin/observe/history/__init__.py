"""Read the files of a finished or running training job.

`read_run(folder)` returns the `RunRecord` of a run, and `read_runs(folder)` returns the records of
all runs in a folder.
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

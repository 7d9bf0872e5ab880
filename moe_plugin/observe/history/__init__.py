"""A finished or running job, read from its files: `read_run(folder)` gives a `RunRecord`,
`read_runs` those of all runs in a folder."""

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

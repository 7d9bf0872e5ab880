"""A finished or running job, read from its files: `read_run(folder)` gives a `RunRecord`."""

from moe_plugin.observe.history.reader import read_run
from moe_plugin.observe.history.records import (
    CopyRecord,
    DecisionRecord,
    LayerRecord,
    RunRecord,
    SpanRecord,
    StepRecord,
)

__all__ = ["CopyRecord", "DecisionRecord", "LayerRecord", "RunRecord", "SpanRecord", "StepRecord",
           "read_run"]

"""A finished or running job, read from its files: `read_run(folder)` gives a `Run`."""

from moe_plugin.observe.history.reader import read_run
from moe_plugin.observe.history.records import (
    CopyRecord,
    Decision,
    LayerRecord,
    Run,
    Span,
    StepRecord,
)

__all__ = ["CopyRecord", "Decision", "LayerRecord", "Run", "Span", "StepRecord", "read_run"]

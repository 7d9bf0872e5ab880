"""One self-contained HTML page of a run, or of several side by side."""

from moe_plugin.observe.report.page import (
    render,
    render_comparison,
    write_comparison,
    write_report,
)

__all__ = ["render", "render_comparison", "write_comparison", "write_report"]

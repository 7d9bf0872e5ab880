"""One self-contained HTML page of a run."""

from moe_plugin.observe.report.page import render, write_report

__all__ = ["render", "write_report"]

"""One self-contained HTML page of a run, and the same plots as PNG files."""

from moe_plugin.observe.report.page import render, write_report
from moe_plugin.observe.report.png import write_png

__all__ = ["render", "write_png", "write_report"]

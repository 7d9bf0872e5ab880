"""Reports: self-contained HTML pages that show a run, or several runs side by side."""

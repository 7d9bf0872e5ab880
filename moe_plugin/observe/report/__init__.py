"""Reports, which are self-contained HTML pages that show one run, or several runs side by side."""

"""Write one self-contained HTML page that shows a run, or several runs side by side."""

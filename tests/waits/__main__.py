"""python -m tests.waits: write docs/synchronization.md."""

from tests.waits import page

page.PAGE.write_text(page.text(), encoding="utf-8")

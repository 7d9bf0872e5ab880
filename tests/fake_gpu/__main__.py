"""python -m tests.fake_gpu: write docs/synchronization.md."""

from tests.fake_gpu import page

page.PAGE.write_text(page.text(), encoding="utf-8")

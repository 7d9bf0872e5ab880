#!/usr/bin/env python3
"""Take the screenshots in docs/pictures from the HTML reports of two runs, with headless Chromium.

    bash scripts/quickstart.sh
    python scripts/report_pictures.py runs/quickstart/fairseq runs/quickstart/megatron \
        [--out docs/pictures]

The screenshots show the report of the first run and the comparison of both runs, at widths of 1,280
and 400 pixels, in light and dark mode. This script requires Chromium and the packages of the test
suite.
"""

from __future__ import annotations

import argparse
import base64
import io
import sys
import tempfile
from pathlib import Path

import pytest
from PIL import Image

from moe_plugin.observe.history import RunRecord, read_run
from moe_plugin.observe.report.page import render, render_comparison
from moe_plugin.utils.regular_files import output_folder, write_regular

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
from tests.observe.chromium import Browser, Page  # noqa: E402

WIDE, PHONE = 1280, 400
FILES = ("report_light.png", "report_dark.png", "report_phone_light.png", "report_phone_dark.png",
         "comparison_light.png")
MARGIN, COLORS = 12, 256


def main() -> int:
    """Run the command line, and return the exit status."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("run", type=Path, help="folder of the run with the report to show")
    parser.add_argument("other", type=Path, help="folder of the run for the comparison")
    parser.add_argument("--out", type=Path, default=ROOT / "docs" / "pictures",
                        help="folder to write to (default: %(default)s)")
    args = parser.parse_args()
    try:
        output_folder(args.out, FILES)
        runs = [read_run(args.run), read_run(args.other)]
    except ValueError as error:
        parser.error(str(error))
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        try:
            browser = Browser(Path(folder))
        except pytest.skip.Exception as error:
            parser.error(str(error))
        try:
            take(browser, runs, args.out)
        finally:
            browser.close()
    return 0


def take(browser: Browser, runs: list[RunRecord], out: Path) -> None:
    """Save all screenshots in `FILES`."""
    report = render(runs[0])
    end = runs[0].step_range[1]

    page = opened(browser, report, WIDE, "light")
    do(page, "loss", "p.smooth()")
    do(page, "loss", "p.at = Math.floor(0.62 * p.steps.length); p.move(0)")
    save(page, out / FILES[0], "header", "#loss, #speed")

    page = opened(browser, report, WIDE, "dark")
    heat = "section:has(.scale)"
    save(page, out / FILES[1], f"{heat} h2", f"{heat} figure:nth-of-type(-n+3)")

    page = opened(browser, report, PHONE, "light")
    do(page, "loss", "p.smooth()")
    do(page, "loss", "p.at = Math.floor(0.62 * p.steps.length); p.move(0)")
    save(page, out / FILES[2], "section:has(#loss) h2", "#speed")

    page = opened(browser, report, PHONE, "dark")
    do(page, "max-mean", "p.toggleLog()")
    save(page, out / FILES[3], "section:has(#max-mean) h2",
         "section:has(#max-mean) figure:nth-of-type(-n+2)")

    page = opened(browser, render_comparison(runs), WIDE, "light")
    do(page, "loss", "p.toggleLog()")
    do(page, "loss", f"p.show([{end // 6}, {end * 5 // 6}])")
    do(page, "loss", "p.at = Math.floor(0.46 * p.steps.length); p.move(0)")
    save(page, out / FILES[4], "section:has(#loss) h2",
         "section:has(#loss) figure:nth-of-type(-n+4)")


def opened(browser: Browser, html: str, width: int, scheme: str) -> Page:
    """Open a page and collapse its long lists."""
    page = browser.open(html, width, scheme)
    page.call("Emulation.setScrollbarsHidden", hidden=True)
    page.value("document.querySelectorAll('details').forEach((d) => { d.open = false; })")
    return page


def do(page: Page, figure: str, action: str) -> None:
    """Run JavaScript code on a plot object, which the code refers to as `p`."""
    page.value(f"((p) => {{ {action}; }})"
               f"(plots.all.find((p) => p.figure.id === '{figure}'))")
    page.value("new Promise((done) => requestAnimationFrame(() => setTimeout(done, 100)))")


def save(page: Page, path: Path, first: str, last: str) -> None:
    """Save a screenshot of part of the page.

    Args:
        page: the page.
        path: the file to write.
        first: CSS selector of the topmost element in the screenshot.
        last: CSS selector of elements. The screenshot ends below the lowest element that matches
            `last`.
    """
    top, bottom, width = page.value(f"""(() => {{
        const box = (element) => element.getBoundingClientRect();
        const ends = [...document.querySelectorAll(`{last}`)].map((e) => box(e).bottom);
        return [box(document.querySelector(`{first}`)).top + scrollY, Math.max(...ends) + scrollY,
                document.documentElement.clientWidth]; }})()""")
    begin = max(0, round(top) - MARGIN)
    shot = page.call("Page.captureScreenshot", format="png", captureBeyondViewport=True, clip={
        "x": 0, "y": begin, "width": width, "height": round(bottom) + MARGIN - begin, "scale": 1})
    picture = Image.open(io.BytesIO(base64.b64decode(shot["data"]))).convert("RGB")
    small = io.BytesIO()
    picture.quantize(COLORS, Image.Quantize.MAXCOVERAGE).save(small, "PNG", optimize=True)
    write_regular(path, small.getvalue())
    print(f"{path}: {picture.width} x {picture.height}")


if __name__ == "__main__":
    sys.exit(main())

"""The page in a real browser, without a screen: the script runs, nothing complains, the plots are
there, fit a phone, and can be saved.
"""

from __future__ import annotations

import base64
import re
import struct

import pytest

from moe_plugin.observe.history import RunRecord, StepRecord, read_run
from moe_plugin.observe.report.page import render, render_comparison
from tests.observe.chromium import Browser
from tests.observe.test_report import DATA, embedded, hostile_run

FIGURES = ("loss", "speed", "max-mean", "entropy", "bytes", "layers", "experts-0",
           "experts-1", "decisions", "timeline-0")


def test_the_browser_reports_errors_and_requests(browser: Browser) -> None:
    page = browser.open("<!doctype html><script>noSuchThing()</script>"
                        "<img src='http://127.0.0.1:9/x.png'>")
    assert any("noSuchThing is not defined" in text for text in page.complaints)
    assert page.requests == ["http://127.0.0.1:9/x.png"]


@pytest.mark.parametrize("host", ["fairseq", "megatron"])
def test_plots_are_there_and_the_console_is_silent(browser: Browser, host: str) -> None:
    run = read_run(DATA / host)
    text = render(run)
    page = browser.open(text)
    assert page.value("document.documentElement.dataset.ready") == str(len(embedded(text)))
    shown = page.value("[...document.querySelectorAll('figure')].map((f) => f.id)")
    assert set(FIGURES) <= set(shown)
    last = run.steps[-1]
    page.point("#loss .u-over", 0.999, 0.1)
    tip = page.value("document.querySelector('#loss .tip').innerText")
    assert f"step {last.step}" in tip and f"training: {last.loss:.5g}"[:14] in tip
    page.value("document.querySelector('#loss .live').focus()")
    page.press("ArrowLeft")
    tip = page.value("document.querySelector('#loss .tip').innerText")
    assert f"step {run.steps[-2].step}" in tip
    page.point("#experts-0 .area", 0.999, 0.1)
    tip = page.value("document.querySelector('#experts-0 .tip').innerText")
    assert f"step {last.step}" in tip and "expert 0: " in tip
    width, height = page.value(
        "(({width, height}) => [width, height])"
        "(document.querySelector('#loss canvas').getBoundingClientRect())")
    assert width > 300 and height > 50
    assert page.complaints == [] and page.requests == []


def test_cells_of_a_heat_map_have_the_colours_of_their_loads(browser: Browser) -> None:
    page = browser.open(render(read_run(DATA / "fairseq")))
    strokes = dict(page.value(
        "[...document.querySelectorAll('#experts-0 path')].map((path) => "
        "[path.className.baseVal + path.style.getPropertyValue('--share'), "
        "getComputedStyle(path).stroke])"))
    reds = {share: [float(v) for v in re.findall(r"[\d.]+", colour)[-3:]]
            for share, colour in strokes.items()}
    under = [reds[share] for share in reds if share.startswith("under")]
    over = [reds[share] for share in reds if share.startswith("over")]
    assert len(under) > 2 and len(over) > 2 and len({tuple(c) for c in reds.values()}) == len(reds)
    assert all(r <= b for r, _, b in under[:1]) and all(r > b for r, _, b in over)


@pytest.mark.parametrize("width", [360, 500])
def test_a_phone_needs_no_sideways_scrolling(browser: Browser, width: int) -> None:
    page = browser.open(render(read_run(DATA / "fairseq")), width)
    assert page.value("innerWidth") == width >= page.value("document.documentElement.scrollWidth")


def test_dark_where_the_reader_prefers_it(browser: Browser) -> None:
    text = render(read_run(DATA / "fairseq"))
    shades = [
        sum(map(int, re.findall(r"\d+", browser.open(text, scheme=scheme).value(
            "getComputedStyle(document.body).backgroundColor"))))
        for scheme in ("dark", "light")
    ]
    assert shades[0] < 150 and shades[1] > 600


@pytest.mark.parametrize("figure", ["loss", "experts-0", "timeline-0"])
def test_a_plot_is_saved_as_a_png_file(browser: Browser, figure: str) -> None:
    page = browser.open(render(read_run(DATA / "fairseq")))
    name, data, colours = page.value(f"""new Promise((resolve) => {{
        HTMLAnchorElement.prototype.click = async function () {{
            const image = new Image();
            image.src = this.href;
            await image.decode();
            const canvas = new OffscreenCanvas(image.width, image.height);
            const context = canvas.getContext("2d");
            context.drawImage(image, 0, 0);
            const pixels = context.getImageData(0, 0, image.width, image.height).data;
            resolve([this.download, this.href, new Set(new Uint32Array(pixels.buffer)).size]);
        }};
        document.querySelector("#{figure} button.save").click();
    }})""")
    image = base64.b64decode(data.removeprefix("data:image/png;base64,"))
    box = page.value(f"document.querySelector('#{figure}').getBoundingClientRect().width")
    width, height = struct.unpack(">II", image[16:24])
    assert name == f"{figure}.png" and image.startswith(b"\x89PNG") and height > 200
    assert width == int(2 * box) and colours > 20  # drawn, at twice the size on the screen
    assert page.complaints == []


def test_hostile_text_runs_nothing(browser: Browser) -> None:
    page = browser.open(render(hostile_run()))
    assert page.complaints == [] and page.requests == []
    assert int(page.value("document.documentElement.dataset.ready")) > 0
    assert page.value("document.querySelectorAll('[onerror]').length") == 0


def test_a_finding_leads_to_its_steps_in_the_plot(browser: Browser) -> None:
    losses = [3.0] * 60 + [5.0] * 2 + [3.0] * 60
    run = RunRecord(name="jumps", host="megatron", steps=[
        StepRecord(step=s, loss=loss) for s, loss in enumerate(losses, start=1)])
    page = browser.open(render(run))
    assert page.value("document.querySelector('#findings a').innerText") == (
        "Steps 61 to 62 in the plot")
    page.value("document.querySelector('#findings a').click()")
    begin, end = page.value("(({begin, end}) => [Number(begin), Number(end)])"
                            "(document.querySelector('#loss .live').dataset)")
    assert 50 < begin < 61 and 62 < end < 73 and page.complaints == []


@pytest.mark.parametrize("width", [390, 1280])
def test_a_comparison_shows_curves_first_and_every_run(browser: Browser, width: int) -> None:
    """The first curve begins on the first screen; no column of a run is out of view."""
    runs = [read_run(DATA / name) for name in ("fairseq", "megatron")]
    page = browser.open(render_comparison(runs), width)
    assert page.value("document.querySelector('#loss .live').getBoundingClientRect().top") < 600
    assert page.value("""[...document.querySelectorAll(":is(#facts, #differences) .scroll")].map(
        (one) => one.scrollWidth - one.clientWidth)""") == [0, 0]


@pytest.mark.parametrize("width", [390, 1280])
def test_rows_are_full_and_labels_are_inside_their_axis(browser: Browser, width: int) -> None:
    page = browser.open(render(read_run(DATA / "megatron")), width)
    # the free space at the end of each row of figures and of facts
    assert page.value("""[...document.querySelectorAll(".figures, .facts")].map((all) => {
        const { right } = all.getBoundingClientRect(), ends = {};
        for (const one of all.children) {
            const box = one.getBoundingClientRect();
            ends[box.top] = Math.max(ends[box.top] ?? 0, box.right);
        }
        return Math.max(...Object.values(ends).map((end) => right - end));
    }).every((free) => free < 3)""")
    assert page.value("""[...document.querySelectorAll(".heat .x")].flatMap((axis) => {
        const { left, right } = axis.getBoundingClientRect();
        return [...axis.querySelectorAll("span")].map((mark) => mark.getBoundingClientRect())
            .filter((box) => box.width && (box.left < left - 1 || box.right > right + 1));
    }).length""") == 0

"""Plots of curves in a real browser: zoom, scales, smoothing, legend, keyboard, paper."""

from __future__ import annotations

import math
from typing import Any

import pytest

from moe_plugin.observe.history import LayerRecord, RunRecord, SpanRecord, StepRecord
from moe_plugin.observe.report.page import render, render_comparison
from tests.observe.chromium import Browser, Page

STEPS = 200


def made(name: str, first: float = 6.0, every: int = 1) -> RunRecord:
    """A run of 200 steps whose loss falls from `first` and swings by 0.3 from step to step."""
    steps = [StepRecord(step=s, loss=first * math.exp(-s / 80) + 0.3 * (s % 2),
                        valid_loss=first / s if s % 50 == 0 else None, tokens_per_s=900.0 + s)
             for s in range(1, STEPS + 1, every)]
    layers = {f"layer{i}": [
        LayerRecord(step=s, layer=f"layer{i}", load=(1, 2, 1, 1 + s % 3), drop_fraction=0.0,
                    max_over_mean=1.2 + i + s / 1000, losses={"debt": -1.0 - s / STEPS})
        for s in range(1, STEPS + 1, 10)
    ] for i in range(2)}
    return RunRecord(name=name, host="megatron", steps=steps, layers=layers, files=["log.jsonl"])


def plot(page: Page, figure: str, expression: str) -> Any:
    """A value of the uPlot object `u` or of ours, `p`, after what it does later is done."""
    page.value("new Promise((done) => requestAnimationFrame(() => setTimeout(done)))")
    return page.value(f"((p) => {{ const u = p.plot; return {expression}; }})"
                      f"(plots.all.find((p) => p.figure.id === '{figure}'))")


def seen(page: Page, figure: str = "loss") -> tuple[float, float]:
    """The stretch of steps that a plot shows."""
    low, high = plot(page, figure, "[u.scales.x.min, u.scales.x.max]")
    return low, high


@pytest.fixture(scope="module")
def page(browser: Browser) -> Page:
    return browser.open(render(made("one")))


@pytest.fixture(autouse=True)
def fresh(request: pytest.FixtureRequest) -> None:
    """Undo what the test before did, and hold that nothing complains."""
    if "page" in request.fixturenames:
        page = request.getfixturevalue("page")
        page.value("plots.all.forEach((p) => { p.log = false; p.smoothing = 0; p.hidden.clear(); "
                   "p.range = p.full; p.at = p.steps.length - 1; p.build(); p.hide(); })")
        assert page.complaints == [] and page.requests == []


def tip(page: Page, figure: str = "loss") -> str | None:
    """The values that a plot shows; None if it shows none."""
    return plot(page, figure, "p.tip.hidden ? null : p.tip.innerText")


def test_dragging_zooms_and_a_double_click_resets(page: Page) -> None:
    assert seen(page) == (1, STEPS)
    tall = plot(page, "loss", "u.scales.y.max")
    page.drag("#loss .u-over", 0.5, 0.75)
    low, high = seen(page)
    assert low == pytest.approx(100.5, abs=2) and high == pytest.approx(150, abs=2)
    assert plot(page, "loss", "u.scales.y.max") < tall / 2  # the height fits what is shown
    page.double_click("#loss .u-over")
    assert seen(page) == (1, STEPS) and plot(page, "loss", "u.scales.y.max") == tall


def test_a_stretch_has_two_steps_or_more_and_stays_inside_the_run(page: Page) -> None:
    page.drag("#loss .u-over", 0.5, 0.52)
    for _ in range(12):
        page.value("plots.all[0].zoom(0.5)")
    low, high = seen(page)
    assert high - low == pytest.approx(2) and 90 < low < 110
    assert plot(page, "loss", "Number.isFinite(u.scales.y.min) && u.scales.y.max > u.scales.y.min")
    for _ in range(12):
        page.value("plots.all[0].zoom(2)")
    assert seen(page) == (1, STEPS)


def test_the_scale_becomes_logarithmic(page: Page) -> None:
    below = "u.valToPos(1, 'y') - u.valToPos(2, 'y') - (u.valToPos(2, 'y') - u.valToPos(4, 'y'))"
    assert abs(plot(page, "loss", below)) > 10
    page.value("document.querySelector('#loss .tools button').click()")
    assert plot(page, "loss", below) == pytest.approx(0, abs=0.01)
    marks = plot(page, "loss", "u.axes[1]._values")
    assert len(marks) > 2 and {"1", "2", "5"} <= set(marks)
    assert plot(page, "loss", "p.logButton.getAttribute('aria-pressed')") == "true"
    # nothing is above zero: there is no such scale
    assert plot(page, "loss-0", "p.logButton.disabled")


def largest_step(values: list[float]) -> float:
    return max(abs(a - b) for a, b in zip(values[1:], values, strict=False))


def test_smoothing_shows_the_mean_of_neighbours_over_pale_points(page: Page) -> None:
    raw = plot(page, "loss", "u.data[1]")
    page.value("plots.all[0].smoothButton.click()")
    assert plot(page, "loss", "p.smoothButton.textContent") == "Smooth: 5 points"
    # training: points and mean; validation
    assert plot(page, "loss", "u.series.slice(1).map((s) => s.alpha)") == [0.35, 1, 1]
    assert plot(page, "loss", "u.data[1]") == raw
    means = plot(page, "loss", "u.data[2]")
    assert means[2:-2] == pytest.approx([sum(raw[i - 2:i + 3]) / 5 for i in range(2, STEPS - 2)])
    assert [means[0], means[-1]] == [raw[0], raw[-1]]
    assert largest_step(means[1:-1]) < 0.2 < 0.29 < largest_step(raw)
    page.point("#loss .u-over", 0.5, 0.5)
    assert "mean" in (tip(page) or "")
    for size in ("15", "51"):
        page.value("plots.all[0].smoothButton.click()")
        assert plot(page, "loss", "p.box.dataset.smooth") == size
    page.value("plots.all[0].smoothButton.click()")
    assert plot(page, "loss", "p.smoothButton.textContent") == "Smooth: off"
    assert plot(page, "loss", "u.series.length") == 3


def test_a_name_of_the_legend_hides_its_curve(page: Page) -> None:
    names = "u.series.slice(1).map((s) => s.label)"
    assert plot(page, "max-mean", names) == ["layer0", "layer1", "perfect balance"]
    page.value("document.querySelector('#max-mean .legend button').click()")
    assert plot(page, "max-mean", names) == ["layer1", "perfect balance"]
    page.point("#max-mean .u-over", 0.5, 0.5)
    assert "layer0" not in (tip(page, "max-mean") or "layer0")
    page.value("document.querySelectorAll('#max-mean .legend button')[1].click();"
               "document.querySelectorAll('#max-mean .legend button')[2].click()")
    assert plot(page, "max-mean", names) == []  # and nothing complains
    page.value("document.querySelectorAll('#max-mean .legend button').forEach((b) => b.click())")
    assert plot(page, "max-mean", names) == ["layer0", "layer1", "perfect balance"]


def test_the_keyboard_does_all_of_it(page: Page) -> None:
    page.value("document.querySelector('#loss .tools button').focus()")
    page.press("Tab")  # the tools are one stop, the plot is the next
    assert page.value("document.activeElement === plots.all[0].box")
    outline = page.value("getComputedStyle(document.activeElement).outlineStyle")
    assert outline == "solid"
    page.press("ArrowLeft")
    assert (tip(page) or "").startswith(f"step {STEPS - 1}\n")
    page.press("ArrowRight")
    assert (tip(page) or "").startswith(f"step {STEPS}\n")
    page.press("PageUp", "PageUp", "+", "+")
    low, high = seen(page)
    assert high - low == pytest.approx((STEPS - 1) / 4) and low < STEPS - 20 < high
    for _ in range(6):  # the stretch follows the cursor
        page.press("PageUp")
    assert (tip(page) or "").startswith("step 120\n") and seen(page)[0] <= 120 <= seen(page)[1]
    page.press("-")
    assert seen(page)[1] - seen(page)[0] == pytest.approx((STEPS - 1) / 2)
    page.press("0")
    assert seen(page) == (1, STEPS)
    page.press("+", "Home")
    assert seen(page) == (1, STEPS)
    page.press("l", "s")
    assert plot(page, "loss", "[p.box.dataset.log, p.box.dataset.smooth]") == ["true", "5"]
    page.press("Escape")
    assert tip(page) is None


def test_arrows_move_within_a_bar_and_enter_presses(page: Page) -> None:
    page.value("document.querySelector('#loss .tools button').focus()")
    page.press("ArrowRight", "Enter")
    assert plot(page, "loss", "p.box.dataset.smooth") == "5"
    page.press("ArrowLeft", "ArrowLeft")
    assert page.value("document.activeElement.textContent") == "Reset"
    stops = page.value("[...document.querySelectorAll('#loss button')]"
                       ".filter((b) => b.tabIndex === 0).map((b) => b.textContent)")
    assert stops == ["PNG", "training", "Reset"]


def test_plots_have_names_descriptions_and_numbers(page: Page) -> None:
    for box in page.value("""[...document.querySelectorAll(".live")].map((box) => ({
            name: document.getElementById(box.getAttribute("aria-labelledby"))?.textContent,
            about: box.getAttribute("aria-describedby").split(" ")
              .map((id) => document.getElementById(id)?.textContent ?? ""),
            rows: box.closest("figure").querySelectorAll("tbody tr").length}))"""):
        assert box["name"] and all(len(text) > 10 for text in box["about"]) and box["rows"] > 1


def test_paper_and_readers_without_scripts_get_drawings(browser: Browser, page: Page) -> None:
    shown = ("['.plot svg', '.live'].map((name) => "
             "document.querySelector('#loss ' + name).getBoundingClientRect().height > 50)")
    assert page.value(shown) == [False, True]
    page.call("Emulation.setEmulatedMedia", media="print")
    assert page.value(shown) == [True, False]
    page.call("Emulation.setEmulatedMedia", media="screen")
    plain = browser.open(render(made("one")), scripts=False)
    # the protocol's own expressions run all the same
    assert plain.value("document.querySelectorAll('canvas, .live').length") == 0
    assert plain.value("document.documentElement.dataset.ready ?? null") is None
    assert plain.value("document.getElementById('help').hidden")
    assert plain.value("document.querySelector('#loss .plot svg').getBoundingClientRect().height")


def test_all_plots_show_the_same_steps(browser: Browser) -> None:
    run = made("one")
    for record, layout in zip(run.layers["layer0"], "ab" * STEPS, strict=False):
        record.layouts[layout] = 1.0
    page = browser.open(render(run))
    bands = ("((b) => b.range.map((x) => b.full[0] + x / 1000 * (b.full[1] - b.full[0])))"
             "(bands.all[0])")
    others = [name for name in page.value("plots.all.map((p) => p.figure.id)") if name != "loss"]
    assert len(others) > 2
    page.drag("#speed .u-over", 0.5, 0.75)
    zoomed = seen(page, "speed")
    assert zoomed[1] - zoomed[0] < 60
    assert {seen(page, name) for name in [*others, "loss"]} == {zoomed}
    assert page.value(bands) == pytest.approx(zoomed)
    page.value("bands.all[0].plot.focus()")
    page.press("Home")
    assert {seen(page, name) for name in others} == {(1, STEPS)}
    page.point("h1", 0.5, 0.5)
    page.value("bands.all[0].plot.blur(); plots.all[0].box.focus({ preventScroll: true })")
    page.press("ArrowLeft", "+")  # from the keyboard, too
    low, high = seen(page)
    assert (low, high) != (1, STEPS) and {seen(page, name) for name in others} == {(low, high)}
    # the line of the cursor is in all of them, values in one
    step = plot(page, "loss", "u.posToVal(u.cursor.left, 'x')")
    lines = [plot(page, name, "[u.posToVal(u.cursor.left, 'x'), p.tip.hidden]") for name in others]
    assert all(x == pytest.approx(step, abs=0.6) and hidden for x, hidden in lines)
    assert tip(page) is not None
    page.press("Escape")
    assert all(plot(page, name, "u.cursor.left") < 0 for name in others)
    assert page.complaints == [] and page.requests == []


def test_runs_are_compared_in_plots_that_zoom(browser: Browser) -> None:
    page = browser.open(render_comparison([made("one"), made("two", 9.0, every=7)]))
    assert plot(page, "loss", "u.series.slice(1).map((s) => s.label)") == ["one", "two"]
    page.drag("#loss .u-over", 0.2, 0.4)
    low, high = seen(page)
    assert low == pytest.approx(41, abs=2) and high == pytest.approx(81, abs=2)
    page.point("#loss .u-over", 0.5, 0.5)
    shown = tip(page) or ""
    assert "one: " in shown and "two: " in shown
    # between two of the second run's steps no line is broken
    gaps = plot(page, "loss", "u.data[2].filter((y) => y === null).length")
    assert gaps == 0 and page.complaints == [] and page.requests == []


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_curves_have_the_colours_of_the_scheme(browser: Browser, scheme: str) -> None:
    page = browser.open(render(made("one")), 400, scheme)
    wanted = {"light": "#2a78d6", "dark": "#4a94ea"}[scheme]
    assert plot(page, "loss", "u.series[1].stroke()") == wanted
    assert page.value("document.documentElement.scrollWidth") <= 400
    other = {"light": "dark", "dark": "light"}[scheme]
    page.call("Emulation.setEmulatedMedia",
              features=[{"name": "prefers-color-scheme", "value": other}])
    page.until(f"plots.all[0].plot.series[1].stroke() !== '{wanted}'")
    # the labels of the vertical axis have room
    assert plot(page, "speed", """(() => {
        u.ctx.font = u.axes[1].font[0];
        const widest = Math.max(...u.axes[1]._values.map((v) => u.ctx.measureText(v).width));
        return widest / devicePixelRatio < u.axes[1]._size; })()""")


def test_one_point_and_points_between_gaps_are_drawn(browser: Browser) -> None:
    losses = [None, 3.0, None, 4.0, 5.0]
    run = RunRecord(name="gaps", host="megatron", steps=[
        StepRecord(step=s, loss=math.nan if loss is None else loss, tokens_per_s=1.0 if s == 3
                         else None) for s, loss in enumerate(losses)], files=[])
    page = browser.open(render(run))
    alone = "[...u.series[1].points.filter(u, 1, true, null)].map((i) => u.data[0][i])"
    assert page.complaints == []
    assert plot(page, "speed", alone) == [3]


def test_timelines_zoom_and_have_keys(browser: Browser) -> None:
    run = made("one")
    run.timelines = {(9, 0): [SpanRecord("layers", "a forward", 0.0, 0.5),
                              SpanRecord("layers", "a backward", 0.5, 1.0),
                              SpanRecord("matmuls", "mm", 0.6, 0.60001)]}
    page = browser.open(render(run))
    drawn = "(() => { const b = bands.all[0], t = b.tip; return %s; })()"
    text = drawn % "t.hidden ? null : t.innerText"
    box = drawn % "b.svg.getAttribute('viewBox').split(' ').map(Number)"
    page.value("bands.all[0].plot.focus()")
    page.press("ArrowRight")
    assert page.value(text) == "a forward, 500 ms\nfrom 0 s"
    page.press("ArrowRight")
    assert page.value(text) == "a backward, 500 ms\nfrom 500 ms"
    page.press("ArrowRight", "ArrowDown")  # the row ends; the other row
    assert page.value(text) == "mm, 10 us\nfrom 600 ms"
    wide = drawn % "b.stretches[b.at].rect.getBoundingClientRect().width"
    before = page.value(wide)
    page.press(*"+" * 12)
    left, _, size, _ = page.value(box)
    assert size == pytest.approx(1000 / 2 ** 12) and left < 600 < left + size
    assert page.value(wide) > before  # its own width, not the least that is drawn
    marks = page.value(drawn % "[...b.plot.querySelectorAll('.x span')].map((m) => m.innerText)")
    assert 3 <= len(marks) <= 8 and len(set(marks)) == len(marks)
    page.press("Home", "Escape")
    assert page.value(box)[:3] == [0, 0, 1000] and page.value(text) is None
    page.drag("#timeline-0 .area", 0.25, 0.75)
    left, _, size, _ = page.value(box)
    assert left == pytest.approx(250, abs=3) and size == pytest.approx(500, abs=5)
    page.double_click("#timeline-0 .area")
    assert page.value(box)[:3] == [0, 0, 1000]
    page.point("#timeline-0 .area", 0.2, 0.25)
    assert page.value(text).startswith("a forward")
    assert page.complaints == [] and page.requests == []

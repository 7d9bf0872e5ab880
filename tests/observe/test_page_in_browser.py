"""The page in a real browser, without a screen: the script runs, nothing complains, the plots are
there and lie within a phone's width.
"""

from __future__ import annotations

import re
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

import pytest

from moe_plugin.observe.history import read_run
from moe_plugin.observe.report import render
from tests.observe.test_report import DATA, embedded, hostile_run

BROWSER = next((path for name in ("chromium", "chromium-browser", "google-chrome", "chrome")
                if (path := shutil.which(name))), None)
FLAGS = ("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run",
         "--disable-background-networking", "--disable-component-update", "--disable-sync",
         "--disable-extensions", "--disable-default-apps", "--enable-logging=stderr")
pytestmark = pytest.mark.skipif(BROWSER is None,
                                reason="no Chromium here (Debian: apt-get install chromium)")

# measures the page from inside, as a person's actions would find it
PROBE = """<script>
addEventListener("load", () => {
  const out = document.createElement("pre"), area = document.querySelector("#loss .area"), heat = document.querySelector("#experts-0 .area");
  out.id = "probe";
  const told = (a) => { if (!a) return ""; const box = a.getBoundingClientRect();
    a.dispatchEvent(new PointerEvent("pointermove", {clientX: box.left + box.width * 0.999, clientY: box.top + 1})); return a.querySelector(".tip").innerText; };
  const key = document.querySelector("#loss .plot");
  const tip = told(area), cell = told(heat);
  key.focus(); key.dispatchEvent(new KeyboardEvent("keydown", {key: "ArrowLeft", cancelable: true}));
  const box = document.querySelector("#loss path.line").getBoundingClientRect();
  out.textContent = JSON.stringify({tip, cell, left: key.querySelector(".tip").innerText, wide: document.documentElement.scrollWidth, window: innerWidth,
    curve: [box.width, box.height], images: [...document.images].filter((i) => i.complete && i.naturalWidth > 0).length, all: document.images.length,
    requests: performance.getEntriesByType("resource").filter((r) => !r.name.startsWith("data:")).length,
    handlers: document.querySelectorAll("[onerror]").length, light: getComputedStyle(document.body).backgroundColor});
  document.body.append(out);
});
</script>"""


@dataclass(frozen=True)
class Seen:
    """What the browser made of a page."""

    dom: str
    complaints: list[str]

    @property
    def probe(self) -> dict:
        import html
        import json

        return json.loads(
            html.unescape(re.search(r'<pre id="probe">(.*?)</pre>', self.dom, re.DOTALL)[1]))


def look(page: str, folder: Path, width: int = 1200, *more: str) -> Seen:
    file = folder / "page.html"
    file.write_text(page, encoding="utf-8")
    command = [
        BROWSER, *FLAGS, *more, f"--user-data-dir={folder / 'profile'}",
        f"--window-size={width},900", "--dump-dom",
        file.as_uri()
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=180, check=False)
    assert done.returncode == 0, done.stderr
    return Seen(done.stdout, [line for line in done.stderr.splitlines() if "CONSOLE" in line])


def test_the_browser_would_tell_of_errors(tmp_path: Path) -> None:
    seen = look("<!doctype html><script>noSuchThing()</script>", tmp_path)
    assert any("noSuchThing is not defined" in line for line in seen.complaints)


@pytest.mark.parametrize("host", ["fairseq", "megatron"])
def test_plots_are_there_and_the_console_is_silent(tmp_path: Path, host: str) -> None:
    run = read_run(DATA / host)
    page = render(run)
    seen = look(page.replace("</body>", PROBE + "</body>"), tmp_path)
    assert seen.complaints == []
    assert f'data-ready="{len(embedded(page))}"' in seen.dom
    for id in ("loss", "speed", "max-mean", "drops", "entropy", "bytes", "layers", "experts-0",
               "experts-1", "decisions", "timeline-0"):
        assert f'<figure id="{id}"' in seen.dom, id
    probe, last = seen.probe, run.steps[-1]
    assert f"step {last.step}" in probe["tip"] and f"training: {last.loss:.5g}"[:14] in probe["tip"]
    assert f"step {run.steps[-2].step}" in probe["left"]
    assert f"step {last.step}" in probe["cell"] and "expert 0: " in probe["cell"]
    assert probe["curve"][0] > 300 and probe["curve"][1] > 50
    assert probe["images"] == probe["all"] > 0 and probe["requests"] == 0


def test_a_phone_needs_no_sideways_scrolling(tmp_path: Path) -> None:
    page = render(read_run(DATA / "fairseq")).replace("</body>", PROBE + "</body>")
    probe = look(page, tmp_path, 500).probe  # the narrowest window that Chromium opens
    assert probe["window"] <= 500 and probe["wide"] <= probe["window"]


def test_dark_where_the_reader_prefers_it(tmp_path: Path) -> None:
    page = render(read_run(DATA / "fairseq")).replace("</body>", PROBE + "</body>")
    shades = [
        sum(
            map(
                int,
                re.findall(
                    r"\d+",
                    look(page, tmp_path, 1200,
                         f"--blink-settings=preferredColorScheme={scheme}").probe["light"])))
        for scheme in (0, 1)
    ]
    assert shades[0] < 150 and shades[1] > 600


def test_hostile_text_runs_nothing(tmp_path: Path) -> None:
    seen = look(render(hostile_run()).replace("</body>", PROBE + "</body>"), tmp_path)
    assert seen.complaints == [] and "data-ready=" in seen.dom and seen.probe["handlers"] == 0

"""The built documentation (runs/site) in Chromium, on a desk and on a phone: no word of a table is
broken, no code is cut, the console is silent; its search finds flags, messages and terms. Beside
the pages are their texts for language models.
"""

from __future__ import annotations

import functools
import html
import http.server
import json
import re
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.observe.chromium import Browser, Page

ROOT = Path(__file__).resolve().parents[2]
DOCS, SITE = ROOT / "docs", ROOT / "runs" / "site"
WIDTHS = (1280, 390)
FAULTS = """(() => {
    const found = [], seen = new Set(), width = document.documentElement.clientWidth;
    const say = (what, text) => found.push(`${what}: ${text.slice(0, 60)}`);
    const content = document.querySelector(".md-content");
    if (content.scrollWidth > content.clientWidth) say("wider than the screen", location.pathname);
    const range = document.createRange();
    for (const cell of document.querySelectorAll(".md-content table :is(td, th)")) {
        const texts = document.createTreeWalker(cell, NodeFilter.SHOW_TEXT);
        while (texts.nextNode()) {
            for (const word of texts.currentNode.data.matchAll(/\\w{2,}/g)) {
                range.setStart(texts.currentNode, word.index);
                range.setEnd(texts.currentNode, word.index + word[0].length);
                const tops = [...range.getClientRects()].map((box) => Math.round(box.top));
                if (new Set(tops).size > 1) say("broken word", word[0]);
            }
        }
    }
    for (const code of document.querySelectorAll(".md-content code")) {
        const box = code.getBoundingClientRect();
        let around = code;
        while (around && getComputedStyle(around).overflowX === "visible") {
            around = around.parentElement;
        }
        const end = around ? around.getBoundingClientRect().right : width;
        const scrolls = around && /auto|scroll/.test(getComputedStyle(around).overflowX);
        if (!scrolls && box.right > end + 1) say("cut code", code.textContent);
    }
    return found;
})()"""


@pytest.fixture(scope="module")
def site() -> Path:
    """The folder of the built site, which is newer than its sources."""
    sources = [ROOT / "mkdocs.yml", *DOCS.rglob("*.md"), *DOCS.glob("*.css")]
    built = SITE / "llms.txt"
    if not built.is_file() or built.stat().st_mtime < max(s.stat().st_mtime for s in sources):
        pytest.skip("the site is not built from these sources: python -m mkdocs build")
    return SITE


class _Served(http.server.SimpleHTTPRequestHandler):
    """Without its log; where `searched` is off the index of the search is empty, as the browser
    would read all of it with every page.
    """

    searched = False
    empty = b""  # such an index

    def do_GET(self) -> None:
        if not self.path.endswith("search_index.json") or _Served.searched:
            return super().do_GET()
        self.send_response(200)
        self.send_header("Content-Length", str(len(_Served.empty)))
        self.end_headers()
        self.wfile.write(_Served.empty)
        return None

    def end_headers(self) -> None:
        if "index.json" in self.path:
            self.send_header("Cache-Control", "no-store")
        super().end_headers()

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture(scope="module")
def address(site: Path) -> Iterator[str]:
    """Where the site is served."""
    index = json.loads((site / "search" / "search_index.json").read_text("utf-8"))
    _Served.empty = json.dumps({**index, "docs": []}).encode()
    handler = functools.partial(_Served, directory=str(site))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}/"
        server.shutdown()


@pytest.fixture(scope="module")
def page(site: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Page]:
    browser = Browser(tmp_path_factory.mktemp("browser"))
    yield browser.open("<!doctype html><title>empty</title>")
    browser.close()


# another page's content in the place of this one's, with tables wrapped as the theme's script does
SHOW = """fetch(%s).then((answer) => answer.text()).then((text) => {
    const shown = document.querySelector(".md-content");
    const other = new DOMParser().parseFromString(text, "text/html").querySelector(".md-content");
    for (const table of other.querySelectorAll("table:not([class])")) {
        const outer = document.createElement("div"), inner = document.createElement("div");
        outer.className = "md-typeset__scrollwrap";
        inner.className = "md-typeset__table";
        table.replaceWith(outer);
        outer.append(inner);
        inner.append(table);
    }
    shown.replaceWith(other);
    return other.querySelectorAll("td, code").length;
})"""


def resize(page: Page, width: int) -> None:
    """Another width of the window."""
    page.call("Emulation.setDeviceMetricsOverride", width=width, height=900, deviceScaleFactor=1,
              mobile=False)


def loaded(page: Page, address: str, name: str) -> list[str]:
    """What is wrong with a page that is loaded with its scripts."""
    page.go(f"{address}{name}")
    assert all(url.startswith(address) for url in page.requests), page.requests
    found = page.complaints
    for width in WIDTHS:
        resize(page, width)
        found += page.value(FAULTS)
    return found


def addresses(site: Path) -> list[str]:
    """Of all pages, in the site."""
    return sorted(str(path.parent.relative_to(site)) + "/" for path in site.rglob("index.html"))


def test_faults_are_seen(page: Page, site: Path, address: str, tmp_path: Path) -> None:
    """A page with each fault."""
    style = "<style>td { width: 40px; overflow-wrap: anywhere } p { overflow: hidden }</style>"
    text = ("<div class=md-content><table><td>unbreakable</table>"
            f"<p><code>{'x' * 900}</code></p><script>noSuchThing()</script></div>")
    path = tmp_path / "faulty.html"
    path.write_text(f"<!doctype html>{style}{text}", encoding="utf-8")
    page.go(path)
    assert len(page.complaints) == 1
    found = page.value(FAULTS)
    assert found == ["broken word: unbreakable", f"cut code: {'x' * 60}"]


def test_pages_are_whole_on_a_desk_and_on_a_phone(page: Page, site: Path, address: str) -> None:
    """All of them, in one page that is loaded."""
    names, found, parts = addresses(site), {}, 0
    page.go(address)
    for name in names:
        parts += page.value(SHOW % json.dumps(f"{address}{name}"))
        for width in WIDTHS:
            resize(page, width)
            if seen := page.value(FAULTS):
                found[width, name] = seen
    assert found == {} and len(names) > 90 and parts > 10_000


@pytest.mark.parametrize("name", ["", "config/", "api/", "observability/", "troubleshooting/"])
def test_pages_with_their_scripts_are_silent(page: Page, address: str, name: str) -> None:
    assert loaded(page, address, name) == []


@pytest.mark.slow
def test_all_pages_with_their_scripts_are_silent(page: Page, site: Path, address: str) -> None:
    found = {name: seen for name in addresses(site) if (seen := loaded(page, address, name))}
    assert found == {}


SEARCH = """new Promise((done) => {
    const box = document.querySelector("[data-md-component=search-query]");
    const results = () => [...document.querySelectorAll(".md-search-result__link")];
    const list = document.querySelector(".md-search-result__list");
    const meta = document.querySelector(".md-search-result__meta");
    box.focus();
    box.value = %s;
    list.replaceChildren();
    meta.textContent = "";
    box.dispatchEvent(new KeyboardEvent("keyup", { bubbles: true }));
    const look = () => meta.textContent && results().length
        ? done(results().map((one) => new URL(one.href)).map((url) => url.pathname + url.hash))
        : setTimeout(look, 20);
    setTimeout(() => done([]), 5000);
    look();
})"""
FOUND = {
    "--moe-stats-jsonl": "config_runs/#row-observe.jsonl",
    "moe-top-k": "config_routing/#row-router.top_k",
    "--moe-max-rows": "config_routing/#row-dispatch.max_rows_factor",  # half typed
    "router.fp32": "config_routing/#row-router.fp32",
    "max_over_mean": "observability/#row-max_over_mean",
    "dead_experts": "observability/#row-dead_experts",
    "dropless": "api/#row-dropless",
    "num_experts=7 does not fit 3 expert-parallel ranks":
        "troubleshooting/#num_experts6-does-not-fit-4-expert-parallel-ranks",
    "rank 3 of the job gave up: RuntimeError: no":
        "troubleshooting/#rank-1-of-the-job-gave-up-at-the-end-of-another-ranks-error",
    "has experts, which fairseq alone does not support":
        "troubleshooting/#model-has-experts-which-fairseq-alone-does-not-support",
}


def test_the_search_finds_flags_messages_and_terms(page: Page, address: str) -> None:
    _Served.searched = True
    resize(page, WIDTHS[0])
    page.go(address)
    page.value("document.querySelector('[data-md-component=search-query]').focus()")
    page.until("document.querySelector('.md-search-result__meta').textContent.includes('Type')")
    for query, place in FOUND.items():
        seen = page.value(SEARCH % json.dumps(query))[:5]
        assert f"/{place}" in seen, (query, seen)
    assert page.complaints == []


def test_every_message_is_found_by_its_heading(site: Path) -> None:
    """And every row that the search has is on its page, once."""
    index = json.loads((site / "search" / "search_index.json").read_text("utf-8"))
    titles = {doc["title"] for doc in index["docs"] if "troubleshooting/#" in doc["location"]}
    headings = re.findall(r"^### (.*)$", (DOCS / "troubleshooting.md").read_text("utf-8"), re.M)
    assert len(headings) > 20 and {name.replace("`", "") for name in headings} <= {
        html.unescape(re.sub(r"<[^>]*>", "", title)) for title in titles}
    places = [doc["location"] for doc in index["docs"]]
    rows = [place.split("#") for place in places if "#row-" in place]
    assert len(rows) > 150 and len(places) == len(set(places))
    for folder, mark in rows:
        text = (site / folder / "index.html").read_text("utf-8")
        assert len(re.findall(rf'id="?{re.escape(mark)}"?[ >]', text)) == 1, mark


def test_pages_have_texts_for_language_models(site: Path) -> None:
    listed = re.findall(r"\]\(([\w./]+\.md)\)", (site / "llms.txt").read_text("utf-8"))
    assert sorted(listed) == sorted(str(path.relative_to(DOCS)) for path in DOCS.rglob("*.md"))
    assert all((site / name).is_file() for name in listed)
    source = (DOCS / "troubleshooting.md").read_text("utf-8")  # has no links out
    assert (site / "troubleshooting.md").read_text("utf-8").strip() == source.strip()
    api = (site / "api.md").read_text("utf-8")
    assert "MoELayer(config: MoEConfig | int" in api and ":::" not in api

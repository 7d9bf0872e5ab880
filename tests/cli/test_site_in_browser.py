"""The site's style in a real browser: no word of a table is broken, no page needs sideways
scrolling, and no code is cut at the edge; on a desk and on a phone.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.observe.chromium import Browser, executable

ROOT = Path(__file__).resolve().parents[2]
PAGES = ("checkpoints", "config_routing", "fairseq", "flags", "forest", "kernels", "pains",
         "pipeline", "routers", "streaming")
DESK, PHONE = 1280, 390
FOUND = """(() => {
    const found = {beyond: document.documentElement.scrollWidth - innerWidth, cut: [], broken: []};
    for (const code of document.querySelectorAll(".md-content pre > code"))
        if (code.scrollWidth > code.clientWidth + 1)
            found.cut.push([code.closest(".language-text") !== null, code.innerText]);
    const texts = document.createTreeWalker(
        document.querySelector(".md-content"), NodeFilter.SHOW_TEXT);
    const line = (text, at) => {
        const range = document.createRange();
        range.setStart(text, at);
        range.setEnd(text, at + 1);
        return Math.round(range.getBoundingClientRect().top);
    };
    while (texts.nextNode()) {
        const text = texts.currentNode, inside = text.parentElement.closest("td, th");
        for (const word of inside ? text.data.matchAll(/\\S+/g) : [])
            for (let at = word.index + 1; at < word.index + word[0].length; at++)
                if (line(text, at) !== line(text, at - 1) && (
                        text.parentElement.closest("code") || !/[-–—\\/]/.test(text.data[at - 1])))
                    found.broken.push(word[0]);
    }
    return found;
})()"""


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A site of `PAGES` alone, with the settings of the whole one."""
    from mkdocs.commands.build import build
    from mkdocs.config import load_config

    executable()
    home = tmp_path_factory.mktemp("site")
    (home / "docs").mkdir()
    for name in ("site.css", *(f"{page}.md" for page in PAGES)):
        shutil.copy(ROOT / "docs" / name, home / "docs")
    settings: dict[str, Any] = yaml.safe_load((ROOT / "mkdocs.yml").read_text(encoding="utf-8"))
    (home / "mkdocs.yml").write_text(yaml.safe_dump({
        "theme": {**settings["theme"], "palette": []}, "extra_css": settings["extra_css"],
        "markdown_extensions": settings["markdown_extensions"], "site_name": "pages",
        "hooks": [str(ROOT / hook) for hook in settings["hooks"]]}), encoding="utf-8")
    build(load_config(str(home / "mkdocs.yml")))
    return home / "site"


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    running = Browser(tmp_path_factory.mktemp("browser"))
    yield running
    running.close()


@pytest.mark.parametrize("width", [DESK, PHONE])
@pytest.mark.parametrize("name", PAGES)
def test_a_page_fits(site: Path, browser: Browser, name: str, width: int) -> None:
    """On a phone, output (`text`) keeps its columns and scrolls."""
    page = browser.open("", width)
    page.go(site / name / "index.html")
    found = page.value(FOUND)
    cut = [text for output, text in found["cut"] if width == DESK or not output]
    assert found["beyond"] <= 0 and cut == [] and found["broken"] == []


def test_broken_words_and_cut_code_are_found(browser: Browser) -> None:
    page = browser.open(
        "<div class='md-content'><table><tr><td style='width: 40px; word-break: break-all'>"
        "unbreakable</td></tr></table><div style='width: 2000px'>wide</div>"
        "<pre style='width: 90px; overflow: auto'><code style='display: block; overflow: auto'>"
        f"{'long ' * 20}</code></pre></div>", PHONE)
    found = page.value(FOUND)
    assert "unbreakable" in found["broken"] and found["beyond"] > 0 and len(found["cut"]) == 1

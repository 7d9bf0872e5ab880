"""Hook of mkdocs.yml: links out of the folder of the documentation become names of files, and
fences lose the mark that is for the tests (tests/cli/examples.py). The search finds the rows of
tables that explain settings, flags, fields, findings and words. Beside the pages the site gets
`llms.txt`, a list of them for language models, and each page as Markdown under the name of its
source.
"""

from __future__ import annotations

import json
import posixpath
import re
from html import escape
from pathlib import Path
from typing import Any

_LINK = re.compile(r"\[([^\]]*)\]\(((?:\.\./)+[^)#]*)(#[^)]*)?\)")
_API = re.compile(r"^::: ([\w.]+)$", re.MULTILINE)
_FIRST = re.compile(r"^# [^\n]*\n\n([A-Za-z`\[][^\n]*(?:\n[^\n]+)*)", re.MULTILINE)
# rows of tables that are found by what their first cell names
_EXPLAINED = re.compile(r"(?:config\w*|api|observability)\.md")
_ROW = re.compile(r"^\| ([^|]+) \| ([^|\n]+) \|(?=$| )(?!\n\|-)", re.MULTILINE)
# against pages with the same words
_BOOST = {"api": 0.2, "benchmarks": 0.5, "config": 2.0, "troubleshooting": 4.0}
_rows: dict[str, dict[str, str]] = {}  # entries of the search by address
_pages: dict[str, tuple[str, str]] = {}  # section of the menu and text, by source


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """The text of a page as MkDocs renders it; see its documentation of hooks."""
    source = page.file.src_uri
    folder = posixpath.dirname(source)

    def name(link: re.Match[str]) -> str:
        target = posixpath.normpath(posixpath.join("docs", folder, link[2]))
        return link[0] if target.startswith("docs/") else link[1]

    text = _LINK.sub(name, markdown.replace("```bash check\n", "```bash\n"))
    text = re.sub(r"\A(?:<!--.*?-->\s*)+", "", text, flags=re.DOTALL)  # the title comes first
    section = page.ancestors[-1].title if page.ancestors else "Optional"
    _pages[source] = section, text
    for begin, boost in _BOOST.items():
        if source.startswith(begin):
            page.meta["search"] = {"boost": boost}
    return _ROW.sub(lambda row: _found_by_search(row, page.url), text
                    ) if _EXPLAINED.fullmatch(source) else text


def _found_by_search(row: re.Match[str], url: str) -> str:
    """A row of a table with an anchor, of which the search gets an entry."""
    cell, meaning = row[1].split("<br>default")[0], row[2]
    names = re.findall(r"`([^`]+)`", cell) or [cell]
    place = "row-" + re.sub(r"[^\w.]+", "-", names[0]).strip("-").lower()
    words = re.sub(r"\[([^\]]*)\]\([^)]*\)|`", r"\1", meaning)
    _rows[f"{url}#{place}"] = {"title": ", ".join(names), "text": f"<p>{escape(words)}</p>"}
    return f'| <span id="{place}"></span>{row[0][2:]}'


def on_nav(nav: Any, **_: Any) -> None:
    """The order of the menu is that of the list."""
    _pages.clear()
    _rows.clear()
    _pages.update({page.file.src_uri: ("", "") for page in nav.pages})


def on_post_build(config: Any, **_: Any) -> None:
    """Write the list and the pages; complete the search."""
    site, api = Path(config["site_dir"]), config["plugins"]["mkdocstrings"].get_handler("python")
    for source, (_, text) in _pages.items():
        (site / source).write_text(_API.sub(lambda found: documented(api, found[1]), text),
                                   encoding="utf-8")
    index = site / "search" / "search_index.json"  # the plugin has written it
    found = json.loads(index.read_text(encoding="utf-8"))
    found["docs"] += [{"location": place, **row} for place, row in _rows.items()]
    index.write_text(json.dumps(found, separators=(",", ":")), encoding="utf-8")
    (site / "llms.txt").write_text(
        listed(config["site_name"], config["site_description"], _pages), encoding="utf-8")


def listed(name: str, about: str, pages: dict[str, tuple[str, str]]) -> str:
    """The list of pages by section, as of https://llmstxt.org. pages: (section, text) by source."""
    sections: dict[str, list[str]] = {}
    for source, (section, text) in pages.items():
        title, about_page = _head(text)
        sections.setdefault(section, []).append(
            f"- [{title}]({source})" + f": {about_page}" * bool(about_page))
    return "\n\n".join([f"# {name}", f"> {about}", *(
        "\n".join([f"## {section}", "", *links]) for section, links in sections.items())]) + "\n"


def _head(text: str) -> tuple[str, str]:
    """A page's title, and the first sentence of its first paragraph, without links."""
    title = re.search(r"^# (.*)$", text, re.MULTILINE)
    first = _FIRST.search(text)
    words = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", " ".join(first[1].split())) if first else ""
    return title[1] if title else "", re.split(r"(?<=\.) ", words)[0].rstrip(":")


def documented(api: Any, name: str) -> str:
    """What stands for a name of the API pages: its signature and its words. api: mkdocstrings'
    handler, which has read the package.
    """
    item = api.collect(name, api.get_options({}))
    code = item.signature() if item.is_function or item.is_class else item.name
    words = item.docstring.value if item.docstring else ""
    return f"### {name}\n\n```python\n{code}\n```\n\n{words}\n"

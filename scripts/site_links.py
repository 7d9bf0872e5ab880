"""A hook in mkdocs.yml that prepares the pages and the search index of the documentation site.

Links that leave the documentation folder are replaced with plain file names, and the marks for
tests (tests/cli/examples.py) are removed from code fences. Rows of tables that explain settings,
flags, fields, findings or terms become search entries. The site also contains each page as Markdown
under the name of its source file, and `llms.txt`, which lists these Markdown files for language
models.
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
# pages with tables, where the search finds each row by the names in its first cell
_EXPLAINED = re.compile(r"(?:config\w*|api|observability)\.md")
_ROW = re.compile(r"^\| ([^|]+) \| ([^|\n]+) \|(?=$| )(?!\n\|-)", re.MULTILINE)
# weights in the search, relative to other pages that contain the same words
_BOOST = {"api": 0.2, "benchmarks": 0.5, "config": 2.0, "troubleshooting": 4.0}
_rows: dict[str, dict[str, str]] = {}  # search entries by address
_pages: dict[str, tuple[str, str]] = {}  # section of the menu and text, by source


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Return the Markdown text that MkDocs renders for a page (see the documentation of MkDocs
    hooks).
    """
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
    """Return a table row with an anchor, and record a search entry for the row."""
    cell, meaning = row[1].split("<br>default")[0], row[2]
    names = re.findall(r"`([^`]+)`", cell) or [cell]
    place = "row-" + re.sub(r"[^\w.]+", "-", names[0]).strip("-").lower()
    words = re.sub(r"\[([^\]]*)\]\([^)]*\)|`", r"\1", meaning)
    _rows[f"{url}#{place}"] = {"title": ", ".join(names), "text": f"<p>{escape(words)}</p>"}
    return f'| <span id="{place}"></span>{row[0][2:]}'


def on_nav(nav: Any, **_: Any) -> None:
    """Record the pages in the order of the menu, which is also their order in `llms.txt`."""
    _pages.clear()
    _rows.clear()
    _pages.update({page.file.src_uri: ("", "") for page in nav.pages})


def on_post_build(config: Any, **_: Any) -> None:
    """Write `llms.txt` and the Markdown pages, and add the table rows to the search index."""
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
    """Return the text of `llms.txt`, which lists the pages by section (https://llmstxt.org).

    Args:
        name: name of the documentation site.
        about: description of the documentation site.
        pages: section and text of each page, by source file.
    """
    sections: dict[str, list[str]] = {}
    for source, (section, text) in pages.items():
        title, about_page = _head(text)
        sections.setdefault(section, []).append(
            f"- [{title}]({source})" + f": {about_page}" * bool(about_page))
    return "\n\n".join([f"# {name}", f"> {about}", *(
        "\n".join([f"## {section}", "", *links]) for section, links in sections.items())]) + "\n"


def _head(text: str) -> tuple[str, str]:
    """Return a page's title and the first sentence of its first paragraph, without links."""
    title = re.search(r"^# (.*)$", text, re.MULTILINE)
    first = _FIRST.search(text)
    words = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", " ".join(first[1].split())) if first else ""
    return title[1] if title else "", re.split(r"(?<=\.) ", words)[0].rstrip(":")


def documented(api: Any, name: str) -> str:
    """Return the entry for a name on the API page, with its signature and docstring.

    Args:
        api: mkdocstrings' handler, after it has read the package.
        name: full name of a class or function.
    """
    item = api.collect(name, api.get_options({}))
    code = item.signature() if item.is_function or item.is_class else item.name
    words = item.docstring.value if item.docstring else ""
    return f"### {name}\n\n```python\n{code}\n```\n\n{words}\n"

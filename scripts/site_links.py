"""Hook of mkdocs.yml: links out of the folder of the documentation become names of files, and
fences lose the mark that is for the tests (tests/cli/examples.py).
"""

from __future__ import annotations

import posixpath
import re
from typing import Any

_LINK = re.compile(r"\[([^\]]*)\]\(((?:\.\./)+[^)#]*)(#[^)]*)?\)")


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """The text of a page as MkDocs renders it; see its documentation of hooks."""
    folder = posixpath.dirname(page.file.src_uri)

    def name(link: re.Match[str]) -> str:
        target = posixpath.normpath(posixpath.join("docs", folder, link[2]))
        return link[0] if target.startswith("docs/") else link[1]

    return _LINK.sub(name, markdown.replace("```bash check\n", "```bash\n"))

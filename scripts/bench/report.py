"""Pages in Markdown."""

from __future__ import annotations

import textwrap

NOT_PROSE = ("#", "|", "!", "```", "* ")  # begins of parts of a page that are not wrapped


def document(*parts: str) -> str:
    """A page: its parts with empty lines between them, prose wrapped at 100 columns."""
    return "\n\n".join(part if part.startswith(NOT_PROSE) else paragraph(part)
                       for part in parts if part) + "\n"


def paragraph(text: str) -> str:
    """Text in lines of at most 100 columns, as the pages of docs/ have them."""
    return textwrap.fill(" ".join(text.split()), 100, break_long_words=False,
                         break_on_hyphens=False)

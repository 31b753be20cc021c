"""What the theme is told about single pages. In their front matter it would be a table on GitHub."""

from __future__ import annotations

from typing import Any

OPTIONS: dict[str, dict[str, Any]] = {
    "contract.md": {"search": {"boost": 4}},  # the id of a rule finds the rule first, then who mentions it
    "index.md": {"hide": ["navigation", "toc"]},  # one screen
    "affected.md": {"hide": ["toc"]},  # the room is for the table
    "conformance.md": {"hide": ["toc"]},  # the room is for the table
}


def on_page_markdown(markdown: str, page: Any, **_: Any) -> None:
    """Add them to what the page itself says."""
    page.meta = {**OPTIONS.get(page.file.src_uri, {}), **page.meta}

"""Links that leave the site are listed once, in docs/external-links.md, and the build compares.

python docs/hooks/external_links.py            prints them, each with the pages that have it
python docs/hooks/external_links.py --write    renews the list
"""

from __future__ import annotations

import logging
import subprocess
import sys
import tempfile
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
LIST = ROOT / "docs/external-links.md"
ITEM = "- <"
log = logging.getLogger("mkdocs.hooks.external_links")


def on_post_build(config: Any) -> None:
    """Warn, which fails a strict build, where the list and the pages differ."""
    pages, listed = used_in(Path(config.site_dir)), listed_in(LIST)
    problems = [
        f"{url} is not listed, but linked from {', '.join(pages[url])}" for url in pages.keys() - set(listed)
    ]
    problems += [f"{url} is listed, but not linked from any page" for url in set(listed) - pages.keys()]
    problems += [f"{url} is listed twice" for url in set(listed) if listed.count(url) > 1]
    for problem in sorted(problems):
        log.warning("docs/external-links.md: %s", problem)
    if problems:
        log.info("To renew the list: python docs/hooks/external_links.py --write")


def used_in(site: Path) -> dict[str, list[str]]:
    """External link -> pages of a built site that have it."""
    found: dict[str, list[str]] = {}
    for path in sorted(site.rglob("*.html")):
        if path.stem != LIST.stem:
            links = Links()
            links.feed(path.read_text(encoding="utf-8"))
            for url in sorted(links.found):
                found.setdefault(url, []).append(path.relative_to(site).as_posix())
    return dict(sorted(found.items()))


def listed_in(path: Path) -> list[str]:
    """The links of the list."""
    lines = path.read_text(encoding="utf-8").splitlines()
    return [line.removeprefix(ITEM).removesuffix(">") for line in lines if line.startswith(ITEM)]


class Links(HTMLParser):
    """Collects the targets of `<a href="http...">`."""

    def __init__(self) -> None:
        super().__init__()
        self.found: set[str] = set()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Note an external link."""
        target = dict(attrs).get("href") or ""
        if tag == "a" and target.startswith(("http://", "https://")):
            self.found.add(target)


def main() -> None:
    """Build the site into a temporary folder and look."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "mkdocs", "build", "--quiet", "--site-dir", folder]
        subprocess.run(command, cwd=ROOT, check=True)
        pages = used_in(Path(folder))
    if "--write" in sys.argv[1:]:
        kept = LIST.read_text(encoding="utf-8").partition(f"\n{ITEM}")[0].rstrip("\n")
        LIST.write_text("\n".join([kept, "", *(f"{ITEM}{url}>" for url in pages), ""]), encoding="utf-8")
    else:
        for url, names in pages.items():
            sys.stdout.write(f"{url}  ({', '.join(names)})\n")


if __name__ == "__main__":
    main()

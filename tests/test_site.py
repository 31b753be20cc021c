"""The built site: its links hold, and in a real browser it is legible and asks no other machine."""

from __future__ import annotations

import functools
import os
import re
import shutil
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from html.parser import HTMLParser
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

import pytest
import rules
from playwright.sync_api import sync_playwright

ROOT = Path(__file__).parent.parent
NOTEBOOK_PAGE_BYTES = 150_000
EXTERNAL = ("http://", "https://", "//")
LOADED = {"script": "src", "img": "src", "iframe": "src", "source": "src", "link": "href", "object": "data"}
CHROMIUM = ("chromium", "chromium-browser", "google-chrome")
FLAGS = ["--headless", "--no-sandbox", "--disable-gpu", "--disable-background-networking"]
LOOKS = [
    (1280, "light", "default"),
    (1280, "dark", "slate"),
    (390, "dark", "slate"),
    (390, "light", "default"),
]


@pytest.fixture(scope="module")
def build(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, subprocess.CompletedProcess[str]]:
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)]
    environment = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    return folder, subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)


@pytest.fixture(scope="module")
def site(build: tuple[Path, subprocess.CompletedProcess[str]]) -> Path:
    folder, run = build
    if run.returncode:
        pytest.skip("the site does not build: see test_it_builds")
    return folder


def test_it_builds(build: tuple[Path, subprocess.CompletedProcess[str]]) -> None:
    _, run = build
    if run.returncode:
        pytest.fail(run.stdout + run.stderr, pytrace=False)


@dataclass
class Html(HTMLParser):
    """What the static checks want to know of a page."""

    path: Path
    tags: list[tuple[str, dict[str, str]]] = field(default_factory=list)
    text: dict[str, list[str]] = field(default_factory=lambda: {"title": [], "h1": [], "p": []})

    def __post_init__(self) -> None:
        super().__init__()
        self.open: str | None = None
        self.feed(self.path.read_text(encoding="utf-8"))

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, {name: value or "" for name, value in attrs}))
        if tag in self.text:
            self.open = tag
            self.text[tag].append("")

    def handle_endtag(self, tag: str) -> None:
        if tag == self.open:
            self.open = None

    def handle_data(self, data: str) -> None:
        if self.open:
            self.text[self.open][-1] += data

    @functools.cached_property
    def ids(self) -> Counter[str]:
        return Counter(attrs["id"] for _, attrs in self.tags if "id" in attrs)


@pytest.fixture(scope="module")
def pages(site: Path) -> dict[str, Html]:
    found = {path.relative_to(site).as_posix(): Html(path) for path in sorted(site.rglob("*.html"))}
    del found["404.html"]  # for servers; its links begin at their root
    return found


def test_nothing_is_loaded_from_elsewhere(site: Path, pages: dict[str, Html]) -> None:
    loaded = [
        (name, attrs.get(LOADED[tag], ""))
        for name, page in pages.items()
        for tag, attrs in page.tags
        if tag in LOADED
    ]
    assert [each for each in loaded if each[1].startswith(EXTERNAL)] == []
    styles = {path.name: path.read_text(encoding="utf-8") for path in site.rglob("*.css")}
    styles |= {name: page.path.read_text(encoding="utf-8") for name, page in pages.items()}
    assert {
        name: found
        for name, css in styles.items()
        if (found := re.findall(r"(?:url\(|@import)\s*['\"]?(?:https?:)?//[^)]*", css))
    } == {}


def test_every_page_says_what_it_is(pages: dict[str, Html]) -> None:
    for name, page in pages.items():
        assert [len(page.text["title"]), len(page.text["h1"])] == [1, 1], name
        assert all(page.text["title"] + page.text["h1"]), name
        assert [attrs for tag, attrs in page.tags if tag == "img" and not attrs.get("alt")] == [], name


def test_notebook_pages_are_light(pages: dict[str, Html]) -> None:
    sizes = {name: page.path.stat().st_size for name, page in pages.items() if name.startswith("notebooks/")}
    assert len(sizes) == len(list((ROOT / "notebooks").glob("*.ipynb"))) > 0
    assert {name: size for name, size in sizes.items() if size > NOTEBOOK_PAGE_BYTES} == {}


def test_every_link_inside_leads_somewhere(site: Path, pages: dict[str, Html]) -> None:
    """MkDocs checks what is written in Markdown; this, what comes from docstrings and the theme too."""
    broken = []
    for name, page in pages.items():
        assert [each for each, count in page.ids.items() if count > 1] == [], name
        for target in {attrs["href"] for tag, attrs in page.tags if tag == "a" and "href" in attrs}:
            parts = urlsplit(target)
            if parts.scheme or target in ("#", "."):
                continue
            path = (page.path.parent / unquote(parts.path)).resolve() if parts.path else page.path
            to = pages.get(path.relative_to(site.resolve()).as_posix()) if path.is_file() else None
            if not path.exists() or (parts.fragment and to and unquote(parts.fragment) not in to.ids):
                broken.append((name, target))
    assert broken == []


def test_lists_and_tables_are_not_swallowed_by_a_paragraph(pages: dict[str, Html]) -> None:
    """Jupyter and GitHub start a list without an empty line before it, the site does not."""
    swallowed = re.compile(r"\n([-*+]|1\.) |\n\|")
    assert [
        (name, text) for name, page in pages.items() for text in page.text["p"] if swallowed.search(text)
    ] == []


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    path = next(filter(None, map(shutil.which, CHROMIUM)), None)
    if path is None:
        message = f"no browser here: none of {', '.join(CHROMIUM)} is on the path"
        pytest.fail(message) if os.environ.get("CI") else pytest.skip(message)
    with sync_playwright() as playwright:
        chromium = playwright.chromium.launch(executable_path=path, args=FLAGS)
        yield chromium
        chromium.close()


class Quiet(SimpleHTTPRequestHandler):
    def log_message(self, *_: Any) -> None:
        pass


@pytest.fixture(scope="module", params=["file", "http"])
def base(request: pytest.FixtureRequest, site: Path) -> Iterator[str]:
    if request.param == "file":
        yield site.as_uri()
        return
    server = ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(Quiet, directory=str(site)))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()


@pytest.fixture
def tab(browser: Any, base: str) -> Iterator[Any]:
    """A tab that notes what goes wrong in `tab.problems`."""
    page = browser.new_context(viewport={"width": 1280, "height": 800}).new_page()
    page.problems = problems = []
    page.on(
        "request", lambda each: each.url.startswith((base, "data:", "blob:")) or problems.append(each.url)
    )
    page.on("requestfailed", lambda each: "ABORTED" in each.failure or problems.append(f"failed: {each.url}"))
    page.on("console", lambda each: each.type in ("error", "warning") and problems.append(each.text))
    page.on("pageerror", lambda each: problems.append(str(each)))
    yield page
    page.context.close()
    if problems:
        pytest.fail("\n".join([f"{len(problems)} problems", *problems[:50]]), pytrace=False)


LOOK = """() => {
  const problems = [];
  document.getAnimations().forEach(each => each.finish());
  const width = document.documentElement.scrollWidth;
  if (width > innerWidth) problems.push(`${width} pixels wide`);
  for (const image of document.images)
    if (!(image.complete && image.naturalWidth > 0)) problems.push("not loaded: " + image.src);

  // WCAG: colours over each other, relative luminance, and the ratio that level AA asks for
  const rgba = text => { const n = text.match(/[\\d.]+/g).map(Number); return n.length < 4 ? [...n, 1] : n; };
  const over = (top, under) => under.map((u, i) => i < 3 ? top[i] * top[3] + u * (1 - top[3]) : 1);
  const known = new Map();
  const ground = element => {
    if (!element) return [255, 255, 255, 1];
    if (!known.has(element)) {
      const colour = rgba(getComputedStyle(element).backgroundColor);
      known.set(element, colour[3] === 1 ? colour : over(colour, ground(element.parentElement)));
    }
    return known.get(element);
  };
  const luminance = colour => [0.2126, 0.7152, 0.0722].reduce((sum, weight, i) => {
    const c = colour[i] / 255;
    return sum + weight * (c <= 0.04045 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4);
  }, 0);
  const texts = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  const seen = new Set();
  while (texts.nextNode()) {
    const element = texts.currentNode.parentElement;
    if (!texts.currentNode.data.trim() || seen.has(element)) continue;
    seen.add(element);
    if (!element.checkVisibility({ opacityProperty: true, visibilityProperty: true })) continue;
    const style = getComputedStyle(element), size = parseFloat(style.fontSize), behind = ground(element);
    const colour = over(rgba(style.color), behind);
    const [high, low] = [luminance(colour), luminance(behind)].sort((a, b) => b - a);
    const ratio = (high + 0.05) / (low + 0.05);
    const large = size >= 24 || size >= 18.66 && style.fontWeight >= 700;
    if (ratio < (large ? 3 : 4.5)) {
      const what = `${element.className || element.tagName} "${element.innerText.slice(0, 40)}"`;
      problems.push(`contrast ${ratio.toFixed(2)}: ${what}`);
    }
  }
  return problems;
}"""


def test_every_page_wide_and_narrow_light_and_dark(pages: dict[str, Html], base: str, tab: Any) -> None:
    looks = LOOKS if base.startswith("file") else LOOKS[::2]  # both widths, both palettes
    for name in pages:
        tab.goto(f"{base}/{name}")
        for width, colours, scheme in looks:
            tab.set_viewport_size({"width": width, "height": 800})
            tab.emulate_media(color_scheme=colours)
            tab.wait_for_selector(f"body[data-md-color-scheme={scheme}]", state="attached")
            found = dict.fromkeys(tab.evaluate(LOOK))
            tab.problems += [f"{name}, {width}, {colours}: {each}" for each in found]


def test_search_finds_a_rule_by_its_id(base: str, tab: Any) -> None:
    for rule_id in ("block.restart", "refuse.unsharded-gradient", "override.by-name", "padding.inert"):
        assert rule_id in rules.contract_ids()
        tab.goto(f"{base}/index.html")
        tab.keyboard.press("/")
        tab.keyboard.type(rule_id)
        tab.wait_for_selector(".md-search-result__item")
        tab.keyboard.press("Enter")
        tab.wait_for_url(lambda url, rule_id=rule_id: url.endswith(f"#{rule_id}"), timeout=5000)
        assert "/contract.html?" in tab.url


def test_search_finds_a_rule_by_a_part_of_its_id(base: str, tab: Any) -> None:
    tab.goto(f"{base}/index.html")
    tab.keyboard.press("/")
    tab.keyboard.type("unsharded")
    tab.wait_for_selector(
        '.md-search-result__item a[href*="contract.html"][href$="#refuse.unsharded-gradient"]'
    )


def test_the_keyboard_reaches_the_text_and_the_search(base: str, tab: Any) -> None:
    tab.goto(f"{base}/contract.html")
    reached = []
    for _ in range(6):
        tab.keyboard.press("Tab")
        reached.append(tab.evaluate("document.activeElement.className"))
        style = "(({ outlineStyle, outlineWidth }) => outlineStyle + outlineWidth)"
        outline = tab.evaluate(f"{style}(getComputedStyle(document.activeElement))")
        assert not outline.startswith("none"), reached
        assert not outline.endswith("e0px"), reached
    assert reached[0].startswith("md-skip")
    assert any(each.startswith("md-search__input") for each in reached)

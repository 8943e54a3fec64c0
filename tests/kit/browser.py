"""A real browser that looks at a real dashboard.

Rules:

1. It is Debian's Chromium, or what `TENSORCAST_TESTS_CHROMIUM` names; where there is none, or no
   Playwright, tests skip and say so.
2. An error of the page, a failed script or a dialog that opens is an error of the test.
3. What is compared is what the browser has: the sources of its figures, and the text in its DOM.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from tests.kit.eventually import eventually

__all__ = ["PATIENCE_S", "READY", "Browser", "Look", "browser"]

PATIENCE_S = 40.0
_NAMES = ("chromium", "chromium-browser", "google-chrome", "chrome")
#: What is true in a page, or frame, that is drawn.
READY = "window.Bokeh?.documents?.length > 0 && Bokeh.documents[0].is_idle"
_COLUMNS = """name => {
  const source = Bokeh.documents[0].get_model_by_name(name);
  return Object.fromEntries(Object.entries(source.data).map(([k, v]) => [k, Array.from(v)]));
}"""
_TEXT = "name => Bokeh.documents[0].get_model_by_name('text-' + name).text"
_ALL_TEXT = """() => {
  const found = [];
  const walk = (node) => {
    if (node.shadowRoot) walk(node.shadowRoot);
    for (const one of node.childNodes) {
      if (one.nodeType === Node.TEXT_NODE && !["STYLE", "SCRIPT"].includes(node.nodeName))
        found.push(one.textContent);
      else walk(one);
    }
  };
  walk(document.body);
  return found.join("\\n");
}"""
_EVERYTHING = """() => JSON.stringify(
  [...Bokeh.documents[0].all_models].map((one) => one.data ?? one.text ?? null)
)"""
#: Where a point of a figure lies on the screen.
_POINT = """([figure, x, y]) => {
  const model = Bokeh.documents[0].get_model_by_name("figure-" + figure);
  const view = Bokeh.index.find_one(model);
  const frame = view.frame.bbox, box = view.el.getBoundingClientRect();
  return [
    box.x + frame.x0 + view.frame.x_scale.compute(x) - frame.x0,
    box.y + frame.y0 + view.frame.y_scale.compute(y) - frame.y0,
  ];
}"""


class Look:
    """One page that is open."""

    def __init__(self, page: Any) -> None:
        self.page = page

    def columns(self, name: str) -> dict[str, list[Any]]:
        """What one part of the page shows."""
        found: dict[str, list[Any]] = self.page.evaluate(_COLUMNS, name)
        return found

    def rows(self, name: str) -> list[dict[str, Any]]:
        """The same, line by line."""
        found = self.columns(name)
        return [
            dict(zip(found, one, strict=True))
            for one in zip(*found.values(), strict=True)
        ]

    def text(self, name: str) -> str:
        """The HTML of one place."""
        return str(self.page.evaluate(_TEXT, name))

    def all_text(self) -> str:
        """What stands in the page, shadow roots and all."""
        return str(self.page.evaluate(_ALL_TEXT))

    def everything(self) -> str:
        """All that the browser was given, as JSON."""
        return str(self.page.evaluate(_EVERYTHING))

    def until(self, predicate: Any, what: str = "") -> Any:
        """Wait until the page shows something."""
        return eventually(predicate, within_s=PATIENCE_S, what=what)

    def fill(self, name: str, value: str) -> None:
        """Write into a field, or choose from a list."""
        model = f"Bokeh.documents[0].get_model_by_name('{name}')"
        self.page.evaluate(f"value => {{ {model}.value = value }}", value)

    def press(self, name: str) -> None:
        """Click on a button."""
        at = f"Bokeh.index.find_one(Bokeh.documents[0].get_model_by_name('{name}'))"
        self.page.evaluate_handle(f"() => {at}.el").as_element().click()

    def point(self, figure: str, x: float, y: float) -> tuple[float, float]:
        """Where a point of a figure is."""
        found = self.page.evaluate(_POINT, [figure, x, y])
        return found[0], found[1]

    def close(self) -> None:
        """Close it."""
        self.page.close()


class Browser:
    """All pages of one test."""

    def __init__(self, context: Any, base: str) -> None:
        self._context = context
        self.base = base
        self.wrong: list[str] = []
        context.on("page", self._watch)

    def _watch(self, page: Any) -> None:
        page.on("pageerror", lambda error: self.wrong.append(f"error: {error}"))
        page.on("dialog", self._dialog)
        page.on("console", self._console)

    def _dialog(self, dialog: Any) -> None:
        self.wrong.append(f"dialog: {dialog.message}")
        dialog.dismiss()

    def _console(self, message: Any) -> None:
        if message.type == "error" and "favicon" not in message.text:
            self.wrong.append(f"console: {message.text}")

    def open(self, address: str) -> Look:
        """Open a page of the dashboard."""
        page = self._context.new_page()
        page.goto(f"{self.base}/{address}", timeout=PATIENCE_S * 1000)
        return self.ready(page)

    def framed(self, address: str, *, scheme: str) -> Any:
        """Open a page of another origin that has an address in a frame, in a sandbox."""
        page = self._context.new_page()
        page.emulate_media(color_scheme=scheme)
        allowed = "allow-scripts allow-same-origin"
        body = (
            f'<body style="margin:0"><iframe src="{address}" sandbox="{allowed}" '
            'style="border:0;width:900px;height:600px"></iframe>'
        )
        # A real page of this machine: one that is made up may not have such a frame.
        outer = self.base.replace("127.0.0.1", "localhost")
        page.goto(f"{outer}/health", timeout=PATIENCE_S * 1000)
        page.set_content(body)
        return page

    def close_all(self) -> None:
        """Close what is open."""
        for page in self._context.pages:
            page.close()

    def ready(self, page: Any) -> Look:
        """Wait until a page is drawn."""
        page.wait_for_function(READY, timeout=PATIENCE_S * 1000)
        return Look(page)

    def popup(self, act: Any) -> Look:
        """The page that something opens."""
        with self._context.expect_page(timeout=PATIENCE_S * 1000) as opened:
            act()
        return self.ready(opened.value)


@contextmanager
def browser(base: str, **options: Any) -> Iterator[Browser]:
    """Start a browser for the dashboard at `base`."""
    playwright = pytest.importorskip(
        "playwright.sync_api", reason="Playwright is not installed (group browser)"
    )
    named = os.environ.get("TENSORCAST_TESTS_CHROMIUM")
    path = named or next(filter(None, map(shutil.which, _NAMES)), None)
    if path is None:
        pytest.skip("no Chromium: apt-get install chromium (.ci/install-chromium)")
    with playwright.sync_playwright() as driver:
        # As root, and in containers, Chromium's own sandbox does not work.
        started = driver.chromium.launch(executable_path=path, args=["--no-sandbox"])
        try:
            context = started.new_context(
                viewport={"width": 1440, "height": 1000}, **options
            )
            yield Browser(context, base)
        finally:
            started.close()

"""A real browser for the tests of pages: Debian's chromium, driven by Playwright."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from playwright.sync_api import Browser, Page, sync_playwright

FLAGS = (
    *("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run"),
    *("--disable-background-networking", "--disable-component-update", "--disable-sync"),
)
NAMES = ("chromium", "chromium-browser", "google-chrome")


def chromium() -> str:
    """The browser's path; without one the test is skipped, in CI it fails."""
    found = next((path for name in NAMES if (path := shutil.which(name))), None)
    if found is None:
        message = "no chromium here; `make browser` installs it, or says how"
        if os.environ.get("CI") == "true":
            pytest.fail(message)
        pytest.skip(message)
    return found


@contextmanager
def open_browser() -> Iterator[Browser]:
    path = chromium()
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path, args=list(FLAGS))
        yield browser
        browser.close()


@dataclass
class Watched:
    """A page, and everything it complained about."""

    page: Page
    complaints: list[str] = field(default_factory=list)


@contextmanager
def open_page(
    browser: Browser, url: str | Path, width: int = 1280, height: int = 900, scheme: str = "light"
) -> Iterator[Watched]:
    """Open a page and wait until its figures are drawn; console errors and failed requests are kept."""
    context = browser.new_context(
        viewport={"width": width, "height": height},
        color_scheme="dark" if scheme == "dark" else "light",
        accept_downloads=True,
    )
    page = context.new_page()
    watched = Watched(page)
    page.on("console", lambda message: _keep(watched, message.type, message.text))
    page.on("pageerror", lambda error: watched.complaints.append(f"error: {error}"))
    page.on("requestfailed", lambda request: watched.complaints.append(f"request: {request.url[:200]}"))
    page.goto(url if isinstance(url, str) else url.as_uri(), timeout=60_000)
    page.wait_for_selector("html[data-drawn]", timeout=60_000)
    yield watched
    context.close()


def wait_until(page: Page, expression: str, seconds: float = 60.0) -> None:
    """Wait until an expression is true. Playwright's own way evaluates text in the page, which the page forbids."""
    deadline = time.monotonic() + seconds
    while not page.evaluate(expression):
        assert time.monotonic() < deadline, f"never came true: {expression}"
        page.wait_for_timeout(50)


def _keep(watched: Watched, kind: str, text: str) -> None:
    if kind in ("error", "warning"):
        watched.complaints.append(f"{kind}: {text}")

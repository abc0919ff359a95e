"""The live page in a real browser: new rows appear, zooms stay, a server that stops is said."""

from __future__ import annotations

import json
import threading
from pathlib import Path

import pytest

from megabatch.report.live import LiveServer
from tests.report.folders import make_run, row
from tests.system.browser import open_browser, open_page, wait_until

LAST = "megabatchReport.data.figures.find(one => one.key === 'loss').series[0].x.at(-1)"


@pytest.mark.timeout(300)
def test_the_page_follows_the_run(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "run", num_steps=30, finished=False)
    server = LiveServer([folder])
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        with open_browser() as browser, open_page(browser, server.url) as watched:
            page = watched.page
            assert page.evaluate(LAST) == 30 / 25
            assert page.inner_text("#live") == "live"
            page.locator("#table-loss summary").click()
            with open(folder / "metrics.jsonl", "a") as file:
                for step in range(31, 61):
                    file.write(json.dumps(row(step)) + "\n")
            wait_until(page, f"{LAST} > 2")
            assert page.evaluate(LAST) == 60 / 25
            assert page.inner_text("h1").replace("\u2011", "-") == "resnet8 after 2.40 epochs"
            assert page.locator("#table-loss[open]").count() == 1  # what the reader opened stays open
            with open(folder / "metrics.jsonl", "a") as file:
                file.write(json.dumps(row(61, noise_scale=500.0)) + "\n")
            page.wait_for_selector(
                "#plot-noise_scale svg.drawing", timeout=30_000
            )  # a figure that was not there before
            assert watched.complaints == []
            server.shutdown()
            server.server_close()
            wait_until(page, "document.getElementById('live').textContent.includes('stopped')")
    finally:
        if thread.is_alive():
            server.shutdown()
            server.server_close()
        thread.join(10)

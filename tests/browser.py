"""A real browser without a window, for tests of pages, and the site that it opens."""
import fcntl
import functools
import http.server
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.launching import ROOT
from tools.chromium import find_chromium

PHONE, DESK = {"width": 390, "height": 844}, {"width": 1280, "height": 900}


@contextmanager
def open_browser() -> Iterator:
    """Start a browser. Skips the test if this machine has none."""
    playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    program = find_chromium()
    if program is None:
        pytest.skip("this machine has neither Chromium nor Chrome")
    with playwright.sync_playwright() as control:
        browser = control.chromium.launch(executable_path=program, args=["--no-sandbox", "--disable-gpu"])
        yield browser
        browser.close()


@contextmanager
def serve(folder: Path) -> Iterator[str]:
    """Serve a folder on a free port of this machine, and yield its address."""
    handler = functools.partial(QuietHandler, directory=str(folder))
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def built_site(run: str) -> Path:
    """Build the site, without a warning, and return its folder. The first of a run's workers builds it for all."""
    tools = pytest.importorskip("tools.build_site", reason="the site's tools are not installed: pip install '.[docs]'")
    folder = tools.BUILD
    folder.mkdir(exist_ok=True)
    with (folder / "run-of-tests").open("a+") as mark:
        fcntl.flock(mark, fcntl.LOCK_EX)
        mark.seek(0)
        if mark.read() != run:
            mark.truncate(0)
            build = subprocess.run([sys.executable, "tools/build_site.py"], cwd=ROOT, capture_output=True, text=True)
            assert build.returncode == 0 and "WARNING" not in build.stderr, build.stderr
            mark.write(run)
    return folder / "html"


class QuietHandler(http.server.SimpleHTTPRequestHandler):
    """A handler that logs nothing."""

    def log_message(self, *_):
        pass


def complaints_of(page) -> list[str]:
    """Return a list that fills with what goes wrong on a page: errors, and requests that fail or leave the machine."""
    found: list[str] = []
    page.on("console", lambda message: message.type == "error" and found.append(message.text))
    page.on("pageerror", lambda error: found.append(str(error)))
    page.on("requestfailed", lambda request: found.append(f"{request.url} failed"))
    page.on("response", lambda answer: answer.status >= 400 and found.append(f"{answer.url}: {answer.status}"))
    page.on("request", lambda request: request.url.startswith(("http://127.0.0.1", "file:", "data:", "blob:"))
            or found.append(f"{request.url} is not on this machine"))
    return found


# Of each text that is seen: the contrast with what is behind it, as WCAG 2 defines it; and the text.
CONTRASTS = """() => {
    const light = c => { c /= 255; return c <= 0.03928 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4; };
    const luminance = ([r, g, b]) => 0.2126 * light(r) + 0.7152 * light(g) + 0.0722 * light(b);
    const parse = text => (text.match(/[\\d.]+/g) || [0, 0, 0, 0]).map(Number);
    const behind = element => {
        for (let at = element; at; at = at.parentElement) {
            const colour = parse(getComputedStyle(at).backgroundColor);
            if (colour.length < 4 || colour[3] > 0.9) return colour;
        }
        return [255, 255, 255];
    };
    const found = [], walker = document.createTreeWalker(document.querySelector('article'), NodeFilter.SHOW_TEXT);
    while (walker.nextNode()) {
        const text = walker.currentNode.textContent.trim(), element = walker.currentNode.parentElement;
        const drawn = element.closest('mjx-container, svg, .headerlink, button, script');
        if (!text || drawn || !element.getClientRects().length) continue;
        const [a, b] = [luminance(parse(getComputedStyle(element).color)), luminance(behind(element))];
        found.push([(Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05), text.slice(0, 60)]);
    }
    return found;
}"""

"""The site is built without a warning, and every page of it opens in a browser, from this machine alone."""

from __future__ import annotations

import functools
import http.server
import importlib.util
import json
import os
import queue
import shutil
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
FLAGS = [
    *("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-sync"),
    *("--disable-background-networking", "--disable-component-update", "--disable-dev-shm-usage"),
]

OPENS_ALL = """<!doctype html><title>all pages</title><body><script>
(async () => {
  const found = {};
  for (const page of PAGES) {
    const frame = document.createElement("iframe");
    const loaded = new Promise(resolve => { frame.onload = resolve; });
    frame.width = 1200; frame.height = 800; frame.src = page;
    document.body.append(frame);
    await loaded;
    const inside = frame.contentDocument, view = frame.contentWindow;
    found[page] = {
      heading: inside.querySelector("h1")?.innerText ?? "",
      letters: inside.querySelector("article")?.innerText.length ?? 0,
      broken: [...inside.images].filter(image => !image.naturalWidth).map(image => image.src),
      elsewhere: view.performance.getEntriesByType("resource").map(entry => entry.name)
        .filter(name => !name.startsWith(location.origin) && !name.startsWith("data:")),
    };
    frame.remove();
  }
  await fetch("found", {method: "POST", body: JSON.stringify(found)});
})();
</script>"""


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if importlib.util.find_spec("mkdocs") is None or importlib.util.find_spec("material") is None:
        pytest.skip("mkdocs-material is not installed: `make docs` installs it")
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300, check=False)
    assert result.returncode == 0, result.stderr[-4000:]
    return folder


class Server(http.server.ThreadingHTTPServer):
    """Serves a folder, and keeps what a page of it posts."""

    def __init__(self, folder: Path) -> None:
        super().__init__(("127.0.0.1", 0), functools.partial(Handler, directory=str(folder)))
        self.posted: queue.Queue[str] = queue.Queue()
        threading.Thread(target=self.serve_forever, daemon=True).start()


class Handler(http.server.SimpleHTTPRequestHandler):
    server: Server

    def do_POST(self) -> None:
        self.server.posted.put(self.rfile.read(int(self.headers["Content-Length"])).decode())
        self.send_response(204)
        self.end_headers()

    def log_message(self, *_: object) -> None: ...


def test_every_page_is_built(site: Path) -> None:
    sources = {path.relative_to(ROOT / "docs").with_suffix(".html") for path in (ROOT / "docs").rglob("*.md")}
    assert sources <= {path.relative_to(site) for path in site.rglob("*.html")}


def test_every_page_opens_in_a_browser(site: Path, tmp_path: Path) -> None:
    if CHROMIUM is None:
        pytest.skip("there is no Chromium on this machine")
    pages = sorted(str(path.relative_to(site)) for path in site.rglob("*.html") if path.name != "404.html")
    (site / "all-pages.html").write_text(OPENS_ALL.replace("PAGES", json.dumps(pages)))
    with Server(site) as server:
        url = f"http://127.0.0.1:{server.server_port}/all-pages.html"
        command = [CHROMIUM, *FLAGS, f"--user-data-dir={tmp_path / 'profile'}", url]
        browser = subprocess.Popen(
            command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True
        )
        try:
            found = json.loads(server.posted.get(timeout=200))
        finally:
            os.killpg(browser.pid, signal.SIGKILL)
            browser.wait()
            server.shutdown()
    assert list(found) == pages
    assert [page for page, seen in found.items() if not seen["heading"] or seen["letters"] < 100] == []
    assert {page: seen["broken"] for page, seen in found.items() if seen["broken"]} == {}
    assert {page: seen["elsewhere"] for page, seen in found.items() if seen["elsewhere"]} == {}

"""The site is built without a warning, and every page of it opens in a browser, from this machine alone."""

from __future__ import annotations

import functools
import http.server
import importlib.util
import json
import re
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
FLAGS = [
    *("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-sync"),
    *("--disable-background-networking", "--disable-component-update", "--disable-dev-shm-usage"),
    *("--dump-dom", "--virtual-time-budget=300000"),
]

OPENS_ALL = """<!doctype html><title>all pages</title><pre id="found">not finished</pre><script>
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
  document.getElementById("found").textContent = JSON.stringify(found);
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


@pytest.fixture(scope="module")
def address(site: Path) -> Iterator[str]:
    class Quiet(http.server.SimpleHTTPRequestHandler):
        def log_message(self, *_: object) -> None: ...

    handler = functools.partial(Quiet, directory=str(site))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


def test_every_page_is_built(site: Path) -> None:
    sources = {path.relative_to(ROOT / "docs").with_suffix(".html") for path in (ROOT / "docs").rglob("*.md")}
    assert sources <= {path.relative_to(site) for path in site.rglob("*.html")}


def test_every_page_opens_in_a_browser(site: Path, address: str, tmp_path: Path) -> None:
    if CHROMIUM is None:
        pytest.skip("there is no Chromium on this machine")
    pages = sorted(str(path.relative_to(site)) for path in site.rglob("*.html") if path.name != "404.html")
    (site / "all-pages.html").write_text(OPENS_ALL.replace("PAGES", json.dumps(pages)))
    command = [CHROMIUM, *FLAGS, f"--user-data-dir={tmp_path / 'profile'}", f"{address}/all-pages.html"]
    result = subprocess.run(command, capture_output=True, text=True, timeout=400, check=False)
    written = re.search(r'<pre id="found">(.*?)</pre>', result.stdout, re.DOTALL)
    assert written is not None and written[1] != "not finished", result.stderr[-2000:]
    found = json.loads(written[1].replace("&amp;", "&").replace("&lt;", "<").replace("&gt;", ">"))
    assert list(found) == pages
    assert [page for page, seen in found.items() if not seen["heading"] or seen["letters"] < 100] == []
    assert {page: seen["broken"] for page, seen in found.items() if seen["broken"]} == {}
    assert {page: seen["elsewhere"] for page, seen in found.items() if seen["elsewhere"]} == {}

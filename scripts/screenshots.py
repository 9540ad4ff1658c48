"""The pictures of the report and of the served page, of a demo made now: `python scripts/screenshots.py docs/figures`.

Writes report.png (light and wide beside dark and narrow), page.png and page-dark-narrow.png. Needs chromium (`apt-get install
chromium`) and the extras `dev` and `serve`.
"""

import base64
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from playwright.sync_api import sync_playwright

WIDE = {"viewport": {"width": 1040, "height": 1080}, "color_scheme": "light"}
NARROW = {"viewport": {"width": 390, "height": 1080}, "color_scheme": "dark"}
HISTORY = ("The Harbour Mysteries, vol. 1", "The Harbour Mysteries, vol. 2")


def main(figures: Path) -> None:
    browser_path = shutil.which("chromium") or shutil.which("google-chrome")
    if browser_path is None:
        sys.exit("no chromium: apt-get install chromium")
    with tempfile.TemporaryDirectory() as temporary, sync_playwright() as driver:
        demo = Path(temporary) / "demo"
        subprocess.run([sys.executable, "-m", "dpformer", "demo", "-o", demo], check=True, stdout=subprocess.DEVNULL)
        browser = driver.chromium.launch(executable_path=browser_path, args=["--no-sandbox"])
        report(browser, demo / "report.html", figures / "report.png")
        page(browser, demo / "run", figures)


def report(browser: Any, path: Path, out: Path) -> None:
    """The report, light and wide beside dark and narrow."""
    images = []
    for look in (WIDE, NARROW):
        tab = browser.new_context(**look).new_page()
        tab.goto(path.as_uri())
        images.append(base64.b64encode(tab.screenshot()).decode())
    both = browser.new_context(viewport={"width": 1454, "height": 1080}).new_page()
    tags = "".join(f'<img src="data:image/png;base64,{image}" style="margin-right:24px">' for image in images)
    both.set_content(f'<body style="margin:0;white-space:nowrap;font-size:0">{tags}</body>')
    both.screenshot(path=out)


def page(browser: Any, run: Path, figures: Path) -> None:
    """The served page with a history of two items."""
    command = [sys.executable, "-m", "dpformer", "serve", run, "--port", "0"]
    server = subprocess.Popen(command, stderr=subprocess.STDOUT, stdout=subprocess.PIPE, text=True)
    try:
        assert server.stdout is not None
        address = next(match[0] for line in server.stdout if (match := re.search(r"http://[\d.]+:\d+", line)))
        looks = {"page.png": WIDE | {"viewport": {"width": 1280, "height": 800}}, "page-dark-narrow.png": NARROW}
        for name, look in looks.items():
            tab = browser.new_context(**look).new_page()
            tab.goto(address)
            for title in HISTORY:
                tab.fill("#search", title)
                tab.locator("#found [role=option]").first.click()
            tab.wait_for_selector("#ranked li button")
            tab.wait_for_timeout(300)
            tab.screenshot(path=figures / name)
    finally:
        server.terminate()
        server.wait()


if __name__ == "__main__":
    main(Path(sys.argv[1]))

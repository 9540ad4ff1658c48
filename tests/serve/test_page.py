"""The page in a real browser: Debian's chromium, driven by playwright.

`apt-get install chromium` is all that it needs beside the `dev` extra; where there is no chromium the tests are skipped.
"""

import shutil
from collections.abc import Iterator

import pytest

from tests.serve.conftest import Served, start

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
playwright = pytest.importorskip("playwright.sync_api", reason="needs playwright")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(CHROMIUM is None, reason="needs chromium: apt-get install chromium"),
]


@pytest.fixture(scope="module")
def browser() -> Iterator[object]:
    with playwright.sync_playwright() as driver:
        opened = driver.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield opened
        opened.close()


@pytest.fixture(scope="module")
def shared(run, tmp_path_factory) -> Iterator[Served]:
    found = start(run, tmp_path_factory.mktemp("shared") / "log")
    yield found
    found.process.kill()
    found.process.wait()


def open_page(browser, url: str, **context):
    page = browser.new_context(**context).new_page()
    page.problems = []
    page.on("console", lambda message: page.problems.append(message.text))
    page.on("pageerror", lambda error: page.problems.append(str(error)))
    page.asked = []
    page.on("request", lambda request: page.asked.append(request.url))
    page.goto(url)
    page.wait_for_selector("#ranked li button")
    return page


def names(page, where: str) -> list[str]:
    return page.eval_on_selector_all(f"{where} .id", "rows => rows.map(row => row.textContent)")


def changes(page, act) -> None:
    """Do something that asks for new recommendations, and wait for them."""
    with page.expect_response("**/recommend"):
        act()
    page.wait_for_timeout(50)


def test_a_history_is_built_by_keyboard_alone(browser, shared):
    page = open_page(browser, shared.url)
    assert "ranked by the released popularity" in page.inner_text("#by")
    before = names(page, "#ranked")
    page.keyboard.press("Tab")  # the link that skips
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.id") == "search"
    page.keyboard.type("title 7")
    page.wait_for_selector("#found [role=option]")
    assert page.get_attribute("#search", "aria-expanded") == "true"
    page.keyboard.press("ArrowDown")
    assert page.get_attribute("#search", "aria-activedescendant") == "option-0"
    changes(page, lambda: page.keyboard.press("Enter"))
    assert names(page, "#history") == ["i07"]
    assert page.get_attribute("#search", "aria-expanded") == "false"
    assert "Added Title 7" in page.inner_text("#status")
    after = names(page, "#ranked")
    assert after != before
    assert "i07" not in after
    page.keyboard.press("Tab")
    assert page.evaluate("getComputedStyle(document.activeElement).outlineStyle") == "solid"
    changes(page, lambda: page.keyboard.press("Enter"))  # on the button that removes it
    assert names(page, "#history") == []
    assert names(page, "#ranked") == before
    assert page.evaluate("document.activeElement.id") == "search"
    page.keyboard.type("no such thing")
    page.wait_for_selector("#found .note")
    page.keyboard.press("Escape")
    assert page.is_hidden("#found")
    assert page.problems == []
    assert {url.split("/")[2] for url in page.asked if not url.startswith("data:")} == {shared.url.split("/")[2]}


def test_clicks_add_hide_and_show(browser, shared):
    page = open_page(browser, shared.url)
    first, second = names(page, "#ranked")[:2]
    changes(page, lambda: page.click("#ranked li:nth-child(1) .add"))
    assert names(page, "#history") == [first]
    hidden = names(page, "#ranked")[0]
    changes(page, lambda: page.click("#ranked li:nth-child(1) .icon"))
    assert hidden not in names(page, "#ranked")
    changes(page, lambda: page.click("#unhide"))
    assert names(page, "#ranked")[0] == hidden
    changes(page, lambda: page.select_option("#k", "5"))
    assert len(names(page, "#ranked")) == 5
    changes(page, lambda: page.click("#clear"))
    assert second in names(page, "#ranked")
    assert page.problems == []


def test_filters_and_which_model_is_served(browser, shared):
    page = open_page(browser, shared.url)
    assert page.inner_text("#served").startswith("run: ")
    page.click("#recommendations summary")
    assert "item_id, title" in page.inner_text("#where-help")
    page.fill("#where", "item_id in ('i07', 'i09')")
    changes(page, lambda: page.press("#where", "Enter"))
    assert set(names(page, "#ranked")) == {"i07", "i09"}
    assert "Only 2 items are left." in page.inner_text("#by")
    page.fill("#where", "colour = 'red'")
    changes(page, lambda: page.press("#where", "Enter"))
    assert "there is no column 'colour'" in page.inner_text("#warning")


def test_the_statement_stands_beside(browser, shared):
    page = open_page(browser, shared.url)
    assert page.inner_text("#budget").startswith("ε = ")
    assert "is not covered" in page.inner_text("#served-users")
    page.click("aside summary")
    assert "Assumed public" in page.inner_text("#statement")


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [320, 390, 800, 1280])
def test_it_fits_and_can_be_read(browser, shared, scheme, width):
    page = open_page(browser, shared.url, color_scheme=scheme, viewport={"width": width, "height": 800})
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    # Contrast of text against its card, as WCAG counts it.
    ratio = page.evaluate("""() => {
        const light = (text) => text.match(/[0-9.]+/g).slice(0, 3).map(Number).map(c => c / 255)
            .map(c => c <= .03928 ? c / 12.92 : ((c + .055) / 1.055) ** 2.4)
            .reduce((sum, c, n) => sum + c * [.2126, .7152, .0722][n], 0);
        const card = light(getComputedStyle(document.querySelector(".card")).backgroundColor);
        return Math.min(...[".quiet", ".name", ".add", ".id"].map(where => {
            const ink = light(getComputedStyle(document.querySelector("main " + where)).color);
            return (Math.max(ink, card) + .05) / (Math.min(ink, card) + .05);
        }));
    }""")
    assert ratio >= 4.5


def test_a_server_that_stops_is_said(browser, served):
    page = open_page(browser, served.url)
    assert served.stop() == 0
    page.click("#ranked li:nth-child(1) .add")
    page.wait_for_selector("#warning:not([hidden])")
    assert "No recommendations" in page.inner_text("#warning")

"""The page in a real headless Chromium: stream an answer, see what was cached, keep and drop prefixes; on a phone and by keyboard."""

import os
import re
import shutil

import pytest

playwright = pytest.importorskip("playwright.sync_api")
for package in ("fastapi", "uvicorn", "httptools", "jinja2", "prometheus_client"):
    pytest.importorskip(package)

from serving import SYSTEM, ask, scratch, server_here, slow_steps

from tinyloop_py.serve.tenants import add_key

CHROMIUM = next((path for name in ("chromium", "chromium-browser", "google-chrome") if (path := shutil.which(name))), None)
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium on the PATH")


@pytest.fixture(scope="module")
def browser():
    with playwright.sync_playwright() as running:
        browser = running.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"] if os.geteuid() == 0 else [])
        yield browser
        browser.close()


@pytest.fixture(scope="module")
def url():
    with server_here(auto_prefix=10_000, max_seq_len=1024) as (url, _):
        yield url


@pytest.fixture
def page(browser, url):
    page = browser.new_page(viewport={"width": 1280, "height": 900})
    problems = []
    page.on("pageerror", lambda error: problems.append(str(error)))
    page.on(
        "console",
        lambda message: problems.append(message.text) if message.type == "error" and "Failed to load resource" not in message.text else None,
    )
    page.on("request", lambda request: problems.append(request.url) if not request.url.startswith((url, "data:")) else None)
    page.set_default_timeout(60_000)
    page.goto(url)
    page.get_by_text("ready", exact=True).wait_for()
    yield page
    page.close()
    assert problems == []


def talk(page, text):
    page.get_by_label("Message (").fill(text)
    page.get_by_role("button", name="Send").click()
    cost = page.locator("#talk li.assistant").last.locator(".cost")
    playwright.expect(cost).to_contain_text("cached", timeout=60_000)
    return cost.inner_text()


def test_an_answer_streams_with_its_cost_and_the_next_one_hits(page):
    page.get_by_label("System message").fill(SYSTEM)
    page.get_by_label("Most tokens").fill("12")
    first = talk(page, "Hello")
    assert re.search(r"^0 of \d+ prompt tokens cached · first token after \d+ ms( · [\d.]+ tokens/s)? · (length|stop)$", first), first
    second = talk(page, "And then?")
    assert int(second.split()[0]) > 70
    assert page.locator("#talk li").count() == 4 and page.locator("#pool tr").count() >= 2
    assert page.locator("#pool tr", has_text="automatic").count() >= 2


def test_the_depth_is_sent(page):
    page.get_by_label("Depth").fill("3")
    assert page.locator("#depth").inner_text() == "3"
    page.get_by_label("Most tokens").fill("3")
    with page.expect_request("**/v1/chat/completions") as sent:
        talk(page, "deep")
    assert sent.value.post_data_json["loops"] == 3


def test_prefixes_are_registered_pinned_and_dropped(page, url):
    page.get_by_label("System message").fill("A pinned message of the page's test.")
    page.get_by_role("button", name="Register and pin it").click()
    row = page.locator("#pool tr", has_text="A pinned message")
    row.wait_for()
    assert "pinned" in row.inner_text()
    row.get_by_role("button", name="Drop").click()
    row.wait_for(state="detached")
    assert not [item for item in ask(url, "/v1/prefixes").json["data"] if item["pinned"]]


def test_a_refresh_of_the_table_keeps_a_press_and_the_focus(page, url):
    keep = ask(url, "/v1/prefixes", {"text": "The row under the mouse, held through a refresh."}).json
    row = page.locator("#pool tr", has_text="The row under the mouse")
    button = row.get_by_role("button", name="Drop")
    button.focus()
    button.hover()
    page.mouse.down()
    other = ask(url, "/v1/prefixes", {"text": "Another row, which makes the table change."}).json
    page.locator("#pool tr", has_text="Another row").wait_for()
    assert page.evaluate("[...rows].find(([, row]) => row.contains(document.activeElement))[0]") == keep["id"]
    page.mouse.up()
    row.wait_for(state="detached")
    assert [item["id"] for item in ask(url, "/v1/prefixes").json["data"] if item["id"] in (keep["id"], other["id"])] == [other["id"]]
    assert ask(url, f"/v1/prefixes/{other['id']}", method="DELETE").status == 200


def never_ending(page, monkeypatch):
    """Answers that stop by nobody's will but the reader's, at a pace that leaves time for it."""
    slow_steps(monkeypatch)
    page.route("**/v1/chat/completions", lambda route: route.continue_(post_data={**route.request.post_data_json, "ignore_eos": True}))


def test_everything_can_be_done_by_keyboard_on_a_phone(page, monkeypatch):
    never_ending(page, monkeypatch)
    page.set_viewport_size({"width": 360, "height": 740})
    assert page.evaluate("document.documentElement.scrollWidth") <= 360
    seen = []
    page.evaluate("document.activeElement.blur()")
    for _ in range(40):
        page.keyboard.press("Tab")
        seen.append(page.evaluate("document.activeElement.id || document.activeElement.className"))
    order = [name for name in seen if name in ("skip", "system", "loops", "temperature", "most", "talk", "say", "send", "clear", "keep", "pin")]
    assert list(dict.fromkeys(order))[:7] == ["skip", "system", "loops", "temperature", "most", "talk", "say"] and "keep" in order
    page.get_by_label("Most tokens").fill("900")
    page.get_by_label("Message (").focus()
    page.keyboard.type(["one", "two"][0])
    page.keyboard.press("Shift+Enter")
    page.keyboard.type("two")
    page.keyboard.press("Enter")
    assert page.locator("#talk li.user").inner_text() == "one\ntwo"
    playwright.expect(page.locator("#talk li.assistant")).to_have_text(re.compile(r".{3}", re.DOTALL), timeout=60_000)
    page.keyboard.press("Escape")
    playwright.expect(page.locator("#talk li.assistant .cost")).to_contain_text("stopped")
    assert page.evaluate("document.documentElement.scrollWidth") <= 360
    assert page.evaluate("document.activeElement.id") == "say"
    heights = "[...document.querySelectorAll('button')].filter(b => b.checkVisibility()).map(b => b.getBoundingClientRect().height)"
    assert min(page.evaluate(heights)) >= 28


def test_an_error_is_shown_and_the_page_goes_on(page):
    page.get_by_label("Most tokens").fill("5000")
    page.get_by_label("Message (").fill("too much")
    page.get_by_role("button", name="Send").click()
    playwright.expect(page.locator("#talk .cost.error")).to_contain_text("maximum context length")
    page.get_by_label("Most tokens").fill("3")
    talk(page, "again")


def test_with_keys_the_page_asks_for_one(browser):
    path = scratch("page-keys.json")
    key = add_key(path, "page", {})
    with server_here(key_file=str(path)) as (url, _):
        page = browser.new_page()
        page.goto(url)
        page.get_by_label("API key").fill(key)
        page.keyboard.press("Tab")
        page.get_by_text("ready", exact=True).wait_for()
        page.get_by_label("Most tokens").fill("3")
        talk(page, "hi")
        page.close()

"""What the tests of pages share: a real browser, and no page may make it complain."""

import itertools
import shutil

import pytest


def _driver():
    """A headless Chromium; skips the test, with the reason, where there is none."""
    selenium = pytest.importorskip("selenium.webdriver", reason="selenium is not installed")
    programs = [shutil.which("chromium"), shutil.which("chromedriver")]
    if not all(programs):
        pytest.skip("chromium or chromedriver is not installed")
    options = selenium.ChromeOptions()
    options.binary_location = programs[0]
    for flag in ("--headless=new", "--no-sandbox", "--disable-dev-shm-usage", "--disable-gpu"):
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    # with both paths given, selenium looks for no driver and downloads none
    service = selenium.ChromeService(executable_path=programs[1])
    return selenium.Chrome(options=options, service=service)


@pytest.fixture(scope="session")
def chromium():
    """One browser for all tests of a process."""
    driver = _driver()
    yield driver
    driver.quit()


@pytest.fixture
def browser(chromium):
    """A selenium driver; what its console was told during a test fails the test."""
    chromium.get("about:blank")
    chromium.get_log("browser")  # empties it
    yield chromium
    complaints = [entry["message"] for entry in chromium.get_log("browser")]
    assert not complaints, complaints


@pytest.fixture
def open_page(tmp_path):
    """(browser, page, width=1200, dark=False) -> nothing; the page is open and loaded."""
    numbers = itertools.count()

    def show(browser, page, width=1200, dark=False):
        path = tmp_path / f"page{next(numbers)}.html"
        page.save(path)
        metrics = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": False}
        browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": [scheme]})
        browser.get(path.as_uri())

    return show

"""The page in a real browser: Debian's Chromium, without a network, driven by selenium."""

import base64
import dataclasses
import json
import re
import shutil

import numpy as np
import pytest

import paxtrain
import planner
from paxtrain.config import to_dict
from planner.cost.step_time import Problem
from planner.planning import to_plan
from planner.planning.planning import REPORT
from tests.planner.examples import cluster

BROWSER, DRIVER = shutil.which("chromium"), shutil.which("chromedriver")
pytestmark = [
    pytest.mark.skipif(
        not (BROWSER and DRIVER), reason="no chromium and chromedriver: apt-get install chromium-driver"
    ),
    pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::ResourceWarning"),  # of selenium
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]
FLAGS = (
    "headless no-sandbox disable-gpu disable-quic no-first-run disable-background-networking disable-component-update"
)
EVIL = """<script>document.title='evil'</script>"'&<img src=http://evil.example/x>"""
SMALL = {"layers": 8, "hidden": 256, "heads": 4, "sequence": 128, "vocab_size": 1000}


@pytest.fixture(scope="module")
def found():
    """Return plans for hosts with hostile names whose links differ."""
    made = cluster(4, 4)
    samples = made.samples.repeat(2, axis=0) * np.array([1, 1.1])[:, None, None]
    hosts = tuple(f"{EVIL}{i}" for i in range(4))
    some = dataclasses.replace(made, hosts=hosts, name=EVIL, samples=samples)
    options = planner.PlanOptions(memory_margin=False, top=4, placed=1, oracle="no", micro_batch=(1, 2))
    return planner.plan(config(), some, options).named(EVIL)


@pytest.fixture(scope="module")
def browser(found, tmp_path_factory):
    """Return a browser that shows the page once its charts are drawn."""
    from selenium import webdriver

    folder, options = tmp_path_factory.mktemp("page"), webdriver.ChromeOptions()
    found.save(folder)
    options.binary_location = BROWSER
    for flag in [*FLAGS.split(), f"user-data-dir={folder / 'profile'}"]:
        options.add_argument(f"--{flag}")
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    driver = webdriver.Chrome(options=options, service=webdriver.ChromeService(DRIVER))
    driver.set_script_timeout(60)
    driver.get(f"file://{folder / REPORT}")
    done = "const f = () => document.documentElement.dataset.ready ? arguments[0]() : setTimeout(f, 50); f()"
    driver.execute_async_script(done)
    yield driver
    driver.quit()


def config():
    return paxtrain.load_config("tiny", {f"model.{name}": value for name, value in SMALL.items()})


def simulated(report, f) -> float:
    """Return the seconds of a plan that was ranked, simulated as a configuration."""
    step = Problem(report.cluster, report.model, f.candidate).step(report.fabric, f.placement.hosts[None])
    given = report.cluster, f.candidate, f.placement.hosts, step, report.model, report.global_batch
    plan = to_plan.decide(*given, config().compress, {})
    return planner.simulate(plan.apply(to_dict(config())), report.cluster, f.placement.hosts).seconds


def choose(browser, name: str, words: str) -> None:
    """Choose an option of a filter by its words."""
    from selenium.webdriver.support.select import Select

    Select(browser.find_element("name", name)).select_by_visible_text(words)


def counted(browser) -> list[int]:
    """Return how many match, of how many, and of these how many fit, were simulated and are ranked."""
    words = browser.find_element("id", "count").text.replace(",", "")
    return [int(number) for number in re.findall(r"\d+", words)]


def test_nothing_fails_and_nothing_is_asked_of_the_network(browser):
    assert browser.get_log("browser") == []
    sent = [json.loads(entry["message"])["message"] for entry in browser.get_log("performance")]
    sent = [one["params"] for one in sent if one["method"] == "Network.requestWillBeSent"]
    asked = [one["request"]["url"] for one in sent if one["documentURL"].startswith("file:")]
    assert asked and all(url.startswith(("file:", "data:", "blob:")) for url in asked)
    names = browser.execute_script("return [...document.querySelectorAll('[data-chart]')].map(x => x.dataset.chart)")
    drawn = browser.execute_script(
        "return [...document.querySelectorAll('[data-chart]')].filter(x => x.querySelector('svg, canvas')).length"
    )
    assert drawn == len(names) == 6
    # A control: the page's policy refuses what would leave it.
    ask = "fetch('http://127.0.0.1:9/').then(() => arguments[0]('sent'), () => arguments[0]('refused'))"
    assert browser.execute_async_script(ask) == "refused"
    assert any("Content Security Policy" in entry["message"] for entry in browser.get_log("browser"))


def test_hostile_names_are_text(browser):
    assert browser.title.startswith("A plan for <script>document.title")
    assert EVIL in browser.find_element("tag name", "h1").text
    assert browser.execute_script("return document.querySelectorAll('main script, img').length") == 0
    labels = browser.execute_script(
        "return [...document.querySelectorAll('[data-chart=links_before] svg text')].map(x => x.textContent)"
    )
    assert any(label.startswith("<script>") for label in labels)


def test_filters_narrow_to_the_numbers_of_the_plans_json(browser, found):
    from selenium.webdriver.common.keys import Keys

    told = found.json()
    space, report = found.report.outcome.space, found.report
    outcome = report.outcome
    assert counted(browser) == [told["candidates"]] * 2 + [told["fitting"], told["simulated"], len(told["ranked"])]
    simulated = np.isin(np.arange(len(space.data)), outcome.points[:, 0].astype(int))
    ranked = np.isin(np.arange(len(space.data)), [f.index for f in outcome.ranked])
    where = (space.tensor == 2) & (space.micro_batch == 1)
    choose(browser, "tensor", "2")
    choose(browser, "micro_batch", "1")
    fits = outcome.bytes <= report.limit
    kinds = [int((where & some).sum()) for some in (fits, simulated, ranked)]
    assert counted(browser) == [where.sum(), len(fits), *kinds]
    known = {int(i): float(x) for i, x, *_ in outcome.points} | {f.index: f.seconds for f in outcome.ranked}
    for some in (where, np.ones_like(where)):
        quickest = min((x for i, x in known.items() if some[i] and fits[i]), default=np.inf)
        rest = some & fits & ~simulated & (np.array(outcome.bounds, float) < quickest)
        said = browser.find_element("id", "open").text.replace(",", "")
        assert int(re.search(r"fit (\d+) were not simulated", said)[1]) == rest.sum() if rest.any() else not said
        choose(browser, "tensor", "any")
        choose(browser, "micro_batch", "any")
    choose(browser, "tensor", "2")
    choose(browser, "micro_batch", "1")
    box, half = browser.find_element("name", "limit"), float(np.median(outcome.bytes[where])) / 1e9
    box.send_keys(f"{half:.6f}")
    assert counted(browser)[0] == pytest.approx((where & (outcome.bytes <= half * 1e9)).sum(), abs=2)
    box.send_keys(Keys.CONTROL + "a", Keys.BACKSPACE)
    choose(browser, "tensor", "any")
    choose(browser, "micro_batch", "any")
    assert counted(browser)[0] == told["candidates"]


def test_hovering_shows_the_plan_its_terms_and_its_command(browser, found):
    from selenium.webdriver import ActionChains

    place = browser.find_element("css selector", "[data-chart=candidates] canvas")
    chosen = found.report.chosen
    at = browser.execute_script(
        "const view = window.reportViews.candidates, [x, y] = view.origin();"
        "return [x + view.scale('x')(arguments[0]), y + view.scale('y')(arguments[1])]",
        chosen.seconds,
        chosen.memory / 1e9,
    )
    browser.execute_script("arguments[0].scrollIntoView({block: 'center'})", place)
    size = place.size
    off = at[0] - size["width"] / 2, at[1] - size["height"] / 2
    ActionChains(browser).move_to_element_with_offset(place, *off).perform()
    words = browser.find_element("id", "vg-tooltip-element").text
    c = chosen.candidate
    assert f"{c.data}x{c.pipe}x{c.tensor}" in words and "forward" in words
    assert f"--data={c.data}" in words and f"--saves={c.save}" in words
    ActionChains(browser).click().perform()  # and not only with the buttons of the table
    assert f"A: {c.data}x{c.pipe}x{c.tensor}" in browser.find_element("id", "compared").text
    ActionChains(browser).click().perform()
    assert not browser.find_element("id", "compared").text


def test_two_plans_are_compared_as_the_simulation_says(browser, found):
    ranked = found.report.outcome.ranked
    for index in (ranked[0].index, ranked[1].index):
        browser.find_element("css selector", f"#quickest tr[data-i='{index}'] button").send_keys("\n")
        held = browser.switch_to.active_element  # the button is drawn anew, and the keyboard stays at it
        assert held.get_attribute("aria-pressed") == "true" and held.text in ("is A", "is B")
    lines = [row.text for row in browser.find_elements("css selector", "#compared tr")]
    seconds = [simulated(found.report, f) for f in ranked[:2]]
    shown = re.findall(r"([\d.]+) (m?s)\b(?! to)", next(line for line in lines if line.startswith("step")))
    assert shown and seconds[0] == pytest.approx(float(shown[0][0]) * (1e-3 if shown[0][1] == "ms" else 1), rel=1e-3)
    reason = browser.find_element("id", "reason").text
    gained = float(re.search(r"by ([\d.]+)% of its step", reason)[1])
    assert gained == pytest.approx(100 * (max(seconds) / min(seconds) - 1), rel=0.06, abs=0.01)
    parts = re.findall(r"([\d.]+)% (more|less) ", reason.partition(":")[2])
    total = sum(float(x) * (1 if word == "more" else -1) for x, word in parts)
    assert total == pytest.approx(gained, abs=0.06 * len(parts) + 0.05)


def test_an_op_says_what_it_waits_for(browser):
    from selenium.webdriver import ActionChains

    bars = browser.find_elements("css selector", "[data-chart=step] svg .mark-rect path")
    browser.execute_script("arguments[0].scrollIntoView({block: 'center'})", bars[0])
    wide = [bar for bar in bars if bar.size["width"] > 8]
    seen = set()
    for bar in wide[:12]:
        ActionChains(browser).move_to_element(bar).perform()
        seen.add(browser.find_element("id", "vg-tooltip-element").text.replace("\n", " "))
    assert any(re.search(r"op (forward|backward).* micro-batch \d.* waits for \w+ of micro-batch \d", x) for x in seen)
    low, high = browser.execute_script("return reportViews.step.scale('x').domain()")
    browser.find_element("css selector", "button[data-of=step][data-factor='.5']").click()
    browser.execute_async_script("reportViews.step.runAsync().then(() => arguments[0]())")
    closer = browser.execute_script("return reportViews.step.scale('x').domain()")
    assert closer == pytest.approx([low + (high - low) / 4, high - (high - low) / 4])


def test_print_has_every_section_and_a_phone_shows_the_page_whole(browser):
    sections = [head.text for head in browser.find_elements("tag name", "h2")]
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"media": "print"})
    shown = [head.text for head in browser.find_elements("tag name", "h2") if head.is_displayed()]
    assert shown == sections and len(shown) > 6
    assert len(base64.b64decode(browser.print_page())) > 50_000
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"media": ""})
    phone = {"width": 390, "height": 844, "deviceScaleFactor": 1, "mobile": True}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", phone)
    assert browser.execute_script("return document.documentElement.scrollWidth") == 390
    browser.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})


def test_without_scripts_the_tables_are_there(browser):
    browser.execute_cdp_cmd("Emulation.setScriptExecutionDisabled", {"value": True})
    browser.refresh()
    shown = [table for table in browser.find_elements("tag name", "table") if table.is_displayed()]
    assert len(shown) >= 5 and "Charts need scripts" in browser.find_element("tag name", "main").text
    browser.execute_cdp_cmd("Emulation.setScriptExecutionDisabled", {"value": False})

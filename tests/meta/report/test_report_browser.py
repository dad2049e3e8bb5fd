"""The HTML report in a real browser: it looks, filters and sorts as it should, and runs nothing that it shows."""

import shutil
from pathlib import Path

import pytest

from parity.report.entries import COMPARED
from parity.report.page import write
from tests.meta.report.test_report import HOSTILE, RUN, entry

playwright = pytest.importorskip("playwright.sync_api")

CHROMIUMS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")


@pytest.fixture(scope="module")
def browser():
    with playwright.sync_playwright() as started:
        here = next(filter(None, map(shutil.which, CHROMIUMS)), None) or started.chromium.executable_path
        if not Path(here).exists():
            pytest.skip("no Chromium is installed here: playwright install --only-shell chromium")
        launched = started.chromium.launch(
            executable_path=here, args=["--no-first-run", "--disable-background-networking"]
        )
        yield launched
        launched.close()


@pytest.fixture(scope="module")
def report(tmp_path_factory):
    folder = tmp_path_factory.mktemp("report")
    entries = [
        entry(0, case="matmul-hidden-s0", reason="G3: the needle"), entry(1, side="gpu"),
        entry(2, COMPARED, "WIN"), entry(3, COMPARED, "LOSS"), entry(4, side="gpu", op="other", outcome="EXACT"),
        entry(5, outcome="LOGIC FAULT", case=f"matmul-{HOSTILE}-s0"), entry(10), entry(9, epsilon={}, measured=()),
    ]  # fmt: skip
    return write(folder / "report.html", entries, RUN, {".": folder}).path


@pytest.fixture
def open_page(browser, report):
    """Opens the report; afterwards nothing may have been asked of the network, or said on the console."""
    opened = []

    def open_page(anchor="", **options):
        context = browser.new_context(**options)
        page = context.new_page()
        noise, asked = [], []
        page.on("console", lambda message: noise.append(message.text))
        page.on("pageerror", lambda error: noise.append(str(error)))
        page.on("request", lambda request: asked.append(request.url))
        page.goto(report.as_uri() + anchor)
        opened.append((context, noise, asked))
        return page

    yield open_page
    for context, noise, asked in opened:
        context.close()
        assert noise == []
        assert {url.partition("#")[0] for url in asked} == {report.as_uri()}


ROWS = "#list > details:visible"


def shown(page):
    return [text.strip() for text in page.locator(f"{ROWS} > summary > span:nth-child(2)").all_inner_texts()]


def test_what_is_hostile_is_shown_and_not_run(open_page):
    page = open_page()
    assert page.title() == "kernel parity: 6 passed, 2 failed"
    assert page.locator("img").count() == 0
    assert any(HOSTILE in text for text in shown(page))


def test_the_filters_narrow_the_list_and_say_how_far(open_page):
    page = open_page()
    assert len(shown(page)) == 8
    page.fill("#text", "NEEDLE g3")
    assert shown(page) == ["matmul-hidden-s0"]
    assert page.inner_text("#shown") == "1 of 8"
    page.fill("#text", "")
    page.select_option("#outcome", "✗")
    assert len(shown(page)) == 2
    page.select_option("#outcome", "AGREES")
    assert len(shown(page)) == 4
    page.select_option("#side", "gpu")
    assert len(shown(page)) == 1
    page.select_option("#outcome", "")
    page.select_option("#op", "other")
    assert len(shown(page)) == 1
    assert page.inner_text("#shown") == "1 of 8"


def test_a_click_on_a_column_sorts_by_it_a_second_reverses(open_page):
    page = open_page()

    def values():
        return [text.split(" ")[0] for text in page.locator(f"{ROWS} > summary > span:nth-child(4)").all_inner_texts()]

    page.click("#head >> text=/^ε$/")
    up = values()
    assert up[-1] == "–"
    assert [float(value) for value in up[:-1]] == sorted(float(value) for value in up[:-1])
    assert len(set(up)) > 3
    page.click("#head >> text=/^ε$/")
    down = values()
    assert down[-1] == "–"
    assert [float(value) for value in down[:-1]] == sorted((float(value) for value in down[:-1]), reverse=True)
    page.click("#head >> text=case")
    names = shown(page)
    numbers = [int(name.split("-M")[1].split("_")[0]) for name in names if "-M" in name and name.startswith("matmul")]
    assert numbers == sorted(numbers)  # 10 after 9, as numbers
    page.click("#provenance th >> text=backend")
    column = page.locator("#provenance tbody td:nth-child(2)").all_inner_texts()
    assert column == sorted(column)
    assert len(set(column)) == 2


def test_a_point_of_the_scatter_leads_to_its_case(open_page):
    page = open_page()
    page.select_option("#op", "other")
    page.locator(".plot a", has=page.locator(".win")).click()
    case = page.locator("#list > details[open]")
    case.wait_for()  # the page hears of its new anchor after the click; of two cases this is an error
    assert "matmul-M2_" in case.inner_text()
    assert case.locator("figure svg").first.is_visible()
    assert open_page(anchor="#c1").locator("#c1[open]").count() == 1


def test_without_javascript_everything_but_the_controls_is_there(open_page):
    page = open_page(java_script_enabled=False)
    assert len(shown(page)) == 8
    assert not page.locator("#filter").is_visible()
    assert page.locator("button:enabled").count() == 0
    for section in ("verdicts", "scatter", "cases", "history", "schedules", "provenance"):
        assert page.locator(f"#{section} h2").is_visible()
    page.locator("#list summary").first.click()
    assert page.locator("#list > details[open] code").first.is_visible()


def luminance(color):
    channels = [int(c) / 255 for c in color[color.index("(") + 1 : -1].split(",")[:3]]
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


@pytest.mark.parametrize("scheme", ["light", pytest.param("dark", marks=pytest.mark.full)])
@pytest.mark.parametrize("width", [1400, pytest.param(390, marks=pytest.mark.full)])
def test_text_is_legible_and_nothing_overlaps(open_page, scheme, width):
    page = open_page(color_scheme=scheme, viewport={"width": width, "height": 900})
    page.evaluate("document.querySelectorAll('details').forEach(d => d.open = true)")
    ground = luminance(page.evaluate("getComputedStyle(document.body).backgroundColor"))
    assert (ground < 0.05) == (scheme == "dark")
    for selector, style in (
        ("body", "color"), (".ok", "color"), (".bad", "color"), ("figcaption", "color"), ("nav a", "color"),
        (".plot text", "fill"), (".histogram text", "fill"),
    ):  # fmt: skip
        color = page.evaluate("([s, p]) => getComputedStyle(document.querySelector(s))[p]", [selector, style])
        light, dark = sorted((luminance(color), ground), reverse=True)
        assert (light + 0.05) / (dark + 0.05) >= 4.5, selector  # WCAG AA
    assert page.evaluate("document.documentElement.scrollWidth") == width
    smallest = page.evaluate(
        "Math.min(...Array.from(document.querySelectorAll('svg text'), t => t.getBoundingClientRect().height))"
    )
    assert smallest > 10
    overlapping = page.evaluate("""
        Array.from(document.querySelectorAll(".plot, .histogram, summary, dl"), (of) => {
          const parts = Array.from(of.querySelectorAll("text, span, dt, dd"));
          const boxes = parts.flatMap((part) => Array.from(part.getClientRects(), (box) => [part, box]));
          return boxes.flatMap(([one, a], n) => boxes.slice(n + 1).filter(([other, b]) => one !== other &&
            a.left < b.right - 1 && b.left < a.right - 1 && a.top < b.bottom - 2 && b.top < a.bottom - 2)
            .map(([other]) => `${one.textContent} | ${other.textContent}`));
        }).flat()""")
    assert overlapping == []

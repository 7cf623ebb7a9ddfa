"""Reports in a real browser: charts are drawn, read by mouse and keys, on any screen, of hostile folders."""

import base64
import json
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

import ssfl
from ssfl.report import page
from ssfl.runs import folder as runs

if TYPE_CHECKING:
    from selenium.webdriver import Chrome

pytestmark = pytest.mark.slow
EVIL = "</script><img src=x onerror=alert(1)>\"'&amp;<b>bold</b>"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Real runs on images whose class names are hostile."""
    home = tmp_path_factory.mktemp("runs")
    generator = np.random.default_rng(0)
    labels = np.arange(200) % 4
    images = (generator.integers(0, 60, (200, 12, 12)) + 60 * labels[:, None, None]).astype(np.uint8)
    np.savez(home / "data.npz", x_train=images, y_train=labels, x_test=images[:40], y_test=labels[:40])
    given = [f"data.path={home / 'data.npz'}", "federation.rounds=6", "federation.period=3", "split.users=5",
             "split.server_labels=20", "train.batch_size=16", "run.threads=1", "run.eval_every=1",
             "run.device=cpu"]  # fmt: skip
    sure = "method.threshold=0.1"
    for name, more in {
        "grouping": ["method.name=grouping", "run.diversity_every=1", sure],
        "alternate-1": ["run.diversity_every=2", sure],
        "alternate-2": ["run.diversity_every=2", "run.seed=2", sure],
        "alone": ["method.name=server-only"],
    }.items():
        ssfl.run(ssfl.load_config("own", [*given, *more]), home / name)
    return home


@pytest.fixture
def opened(browser: "Chrome") -> Any:
    """Opens a report of some runs at a width; afterwards nothing may have gone wrong."""

    def open_(paths: list[Path], out: Path, width: int = 1000, dark: bool = False) -> "Chrome":
        page.write(paths, out)
        size = {"width": width, "height": 800, "deviceScaleFactor": 1, "mobile": False}
        browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
        scheme = [{"name": "prefers-color-scheme", "value": "dark" if dark else "light"}]
        browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": scheme})
        browser.get_log("performance")
        browser.get_log("browser")
        browser.get(out.as_uri())
        return browser

    yield open_
    assert browser.get_log("browser") == []  # no console error
    for entry in browser.get_log("performance"):
        message = json.loads(entry["message"])["message"]
        if message["method"] == "Network.requestWillBeSent":
            assert message["params"]["request"]["url"].startswith(("file:", "data:", "about:"))


def script(browser: "Chrome", code: str) -> Any:
    return browser.execute_script(code)


def test_charts_are_drawn_and_tell_their_values(opened: Any, folder: Path, tmp_path: Path) -> None:
    from selenium.webdriver import ActionChains, Keys

    browser = opened([folder / "grouping"], tmp_path / "a.html")
    shapes = script(
        browser, "return [...document.querySelectorAll('svg.drawing')].map(s => s.childElementCount)"
    )
    assert len(shapes) >= 7
    assert min(shapes) > 5
    assert script(browser, "return document.querySelectorAll('.images img').length") >= 16
    assert script(browser, "return [...document.images].every(i => i.complete && i.naturalWidth > 0)")

    drawing = browser.find_element("css selector", "#accuracy svg.drawing")
    ActionChains(browser).move_to_element(drawing).perform()
    tip = browser.find_element("css selector", "#accuracy .tip")
    assert tip.is_displayed()
    assert "round" in tip.text
    assert "%" in tip.text
    ActionChains(browser).move_to_element(browser.find_element("css selector", "h1")).perform()
    assert not tip.is_displayed()

    script(browser, "document.querySelector('#accuracy svg.drawing').focus()")
    ActionChains(browser).send_keys(Keys.HOME).perform()
    values = [e for e in runs.read_events(folder / "grouping") if e["event"] == "eval"]
    assert f"test images {100 * values[0]['accuracy']:.1f} %" in drawing.get_attribute("aria-valuetext")
    ActionChains(browser).send_keys(Keys.ARROW_RIGHT).perform()
    assert f"test images {100 * values[1]['accuracy']:.1f} %" in drawing.get_attribute("aria-valuetext")
    assert tip.is_displayed()
    ActionChains(browser).send_keys(Keys.ESCAPE).perform()
    assert not tip.is_displayed()

    script(browser, "document.querySelector('#mistakes svg.drawing').focus()")
    ActionChains(browser).send_keys(Keys.ARROW_RIGHT, Keys.ARROW_DOWN).perform()
    assert "predicted" in browser.find_element("css selector", "#mistakes .tip").text


def test_every_chart_has_its_data_as_a_table(opened: Any, folder: Path, tmp_path: Path) -> None:
    browser = opened([folder / "grouping"], tmp_path / "a.html")
    rows = script(
        browser,
        "return [...document.querySelectorAll('figure.chart')].map(f => {"
        " f.querySelector('summary').click(); return f.querySelector('details').open; })",
    )
    assert all(rows)
    rows = script(
        browser,
        "return new Promise(done => setTimeout(() => done([...document.querySelectorAll('figure.chart')]"
        ".map(f => f.querySelectorAll('tbody tr').length)), 200))",
    )
    assert min(rows) >= 1
    told = browser.find_element("css selector", "#accuracy figure.chart tbody").text
    last = [e for e in runs.read_events(folder / "grouping") if e["event"] == "eval"][-1]
    assert f"{100 * last['accuracy']:.1f} %" in told


def test_every_chart_can_be_reached_by_keyboard(opened: Any, folder: Path, tmp_path: Path) -> None:
    from selenium.webdriver import ActionChains, Keys

    browser = opened([folder / "grouping"], tmp_path / "a.html")
    seen = set()
    for _ in range(80):
        ActionChains(browser).send_keys(Keys.TAB).perform()
        seen.add(script(browser, "return document.activeElement.getAttribute('aria-label') || ''"))
    charts = script(browser, "return [...document.querySelectorAll('svg.drawing')].map(s => s.ariaLabel)")
    assert set(charts) <= seen


def test_lines_differ_in_more_than_colour_and_carry_their_names(
    opened: Any, folder: Path, tmp_path: Path
) -> None:
    paths = [folder / name for name in ("grouping", "alternate-1", "alternate-2", "alone")]
    browser = opened(paths, tmp_path / "a.html")
    dashes = script(
        browser,
        "return [...document.querySelectorAll('#accuracy svg.drawing path.line')]"
        ".map(p => p.getAttribute('stroke-dasharray'))",
    )
    assert len(dashes) == len(set(dashes)) == 3
    names = script(
        browser, "return [...document.querySelectorAll('#accuracy text.end')].map(t => t.firstChild.data)"
    )
    assert sorted(names) == ["alone", "alternate, 2 seeds", "grouping"]
    assert script(browser, "return document.querySelectorAll('#accuracy polygon.band').length") == 1
    assert "method.name" in browser.find_element("css selector", "#differences").text
    assert "±" in browser.find_element("css selector", "#verdict").text


@pytest.mark.parametrize("width", [320, 400, 768])
def test_nothing_sticks_out_of_a_narrow_screen(opened: Any, folder: Path, tmp_path: Path, width: int) -> None:
    browser = opened([folder / "grouping", folder / "alternate-1"], tmp_path / "a.html", width)
    assert script(browser, "return document.documentElement.scrollWidth") <= width
    assert script(browser, "return document.querySelectorAll('#accuracy path.line').length") >= 2
    narrow = script(browser, "return document.querySelector('#accuracy .legend').innerText")
    assert ("alternate-1" in narrow) == (width < 520)


def test_a_dark_theme_is_dark_and_legible(opened: Any, folder: Path, tmp_path: Path) -> None:
    def colours(dark: bool) -> tuple[float, float]:
        browser = opened([folder / "grouping"], tmp_path / "a.html", dark=dark)
        found = script(
            browser,
            "return ['backgroundColor', 'color'].map(k => getComputedStyle(document.body)[k].match(/[0-9]+/g)"
            ".slice(0, 3).reduce((a, b) => a + Number(b) / 765, 0))",
        )
        return found[0], found[1]

    paper, ink = colours(dark=False)
    night, light = colours(dark=True)
    assert paper - ink > 0.7
    assert light - night > 0.7


def test_it_prints(opened: Any, folder: Path, tmp_path: Path) -> None:
    browser = opened([folder / "grouping"], tmp_path / "a.html", dark=True)
    printed = browser.execute_cdp_cmd("Page.printToPDF", {"printBackground": False})
    assert base64.b64decode(printed["data"]).startswith(b"%PDF")


def test_a_hostile_folder_stays_text(opened: Any, folder: Path, tmp_path: Path) -> None:
    run = tmp_path / "<img src=x onerror=alert(1)>"
    shutil.copytree(folder / "grouping", run)
    split = json.loads((run / "split.json").read_text())
    split["classes"] = [f"{EVIL}{k}" for k in range(4)]
    split["sites"] = [EVIL]
    (run / "split.json").write_text(json.dumps(split))
    summary = json.loads((run / "summary.json").read_text())
    summary |= {"data": EVIL, "device": EVIL, "commit": EVIL, "versions": {EVIL: EVIL}}
    (run / "summary.json").write_text(json.dumps(summary))
    strange = [
        {"event": "round", "round": 7, "mask_rate": EVIL, "loss": 10**400, "groups": EVIL, "phases": [EVIL]},
        {"event": "round", "round": 8, "participants": 3, "returned": [EVIL, 1, None], "seconds": True},
        {"event": "round", "round": 9, "returned": [1], "groups": [EVIL, [[]]], "refused": {EVIL: EVIL}},
        {"event": "eval", "round": 9, "accuracy": 0.5, "class_accuracy": EVIL, "stream_accuracy": [EVIL, []]},
        {"event": "eval", "round": 10, "accuracy": EVIL, "memory": {"cpu": EVIL}},
        {"event": "diversity", "round": 10, "gradient_l2_squared": EVIL},
        {"event": "round", "round": 10**400, "returned": {}},
        {"event": [EVIL], "round": -5},
    ]
    with (run / "events.jsonl").open("a") as file:
        for event in strange:
            file.write(json.dumps(event) + "\n")
    browser = opened([run, folder / "alone"], tmp_path / "a.html")
    assert script(browser, "return document.querySelectorAll('main b, img[onerror]').length") == 0
    assert EVIL in browser.find_element("css selector", "main").text
    browser = opened([run], tmp_path / "a.html")
    assert script(browser, "return document.querySelectorAll('img[onerror], main script').length") == 0
    assert len(script(browser, "return [...document.querySelectorAll('h2')].map(h => h.innerText)")) >= 7

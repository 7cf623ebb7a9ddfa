"""The board as a process of its own on real and hostile run folders, and in a real browser."""

import http.client
import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest

import ssfl as library
from conftest import Call
from ssfl.board import describe, follow, untrusted
from ssfl.config.loading import load_config
from ssfl.errors import SsflError
from ssfl.runs import folder as runs
from waiting import ended, wait_until

EVIL = "<img src=x onerror=alert(1)>"
Get = Callable[..., tuple[int, dict[str, str], bytes]]


def play(path: Path, *more: str) -> None:
    short = ["federation.rounds=4", "federation.period=2", "train.batch_size=8", "run.threads=1",
             "run.device=cpu", "run.eval_every=1", "run.diversity_every=2",
             "method.threshold=0.3"]  # fmt: skip
    library.run(load_config("quickstart", [*short, *more]), path)


@contextmanager
def served(root: Path) -> Iterator[int]:
    """`ssfl board` in a process of its own, on a free port."""
    command = [sys.executable, "-m", "ssfl", "board", str(root), "--port", "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        line = process.stdout.readline()
        assert "http://127.0.0.1:" in line
        try:
            yield int(line.split("http://127.0.0.1:")[1].split()[0])
        finally:
            process.send_signal(signal.SIGINT)
            assert ended(process) == 0


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Runs in every state, and folders that somebody made to do harm."""
    root = tmp_path_factory.mktemp("board") / "runs"
    play(root / "finished")
    shutil.copytree(root / "finished", root / "deep/er/stopped")
    (root / "deep/er/stopped/summary.json").unlink()
    with pytest.raises(SsflError):
        play(
            root / "failed",
            "train.lr=1000",
            "model.norm=none",
            "train.cycles=0",
            "federation.rounds=50",
            "federation.period=16",
        )
    shutil.copytree(root / "deep/er/stopped", root / "running")

    outside = root.parent / "outside"
    shutil.copytree(root / "finished", outside)
    (root / "linked").symlink_to(outside)
    (root / "swapped").mkdir()
    (root / "swapped/config.toml").symlink_to(outside / "config.toml")

    for name in (EVIL, "fifo", "garbage", "nested", "long", "folders", "huge"):
        (root / name).mkdir()
        (root / name / "config.toml").write_text(f"[method]\nname = '{EVIL}'\n[federation]\nrounds = 3\n")
    os.mkfifo(root / "fifo/events.jsonl")
    os.mkfifo(root / "fifo/summary.json")
    (root / "garbage/events.jsonl").write_bytes(bytes(range(256)) * 4096 + b"\n")
    (root / "garbage/config.toml").write_bytes(b"\xff\x00[[[")
    (root / "nested/events.jsonl").write_bytes(b"[" * 100_000 + b"\n")
    (root / "nested/summary.json").write_bytes(b'{"a":' * 100_000)
    with (root / "long/events.jsonl").open("wb") as file:
        file.truncate(200 << 20)  # one line without an end
    (root / "folders/events.jsonl").mkdir()
    (root / "folders/summary.json").mkdir()
    shutil.copytree(root / "folders", root / "letters")
    (root / "letters/failed.json").write_text(r'{"error": "\ud800\u0000\u001b[31m"}')
    number = '{"event": "eval", "round": %s, "accuracy": %s}\n'
    lines = [
        number % (1, "1e999"),
        number % (2, "9" * 4000),
        number % (3, f'"{EVIL}"'),
        number % ("9" * 400, 1),
    ]
    (root / "huge/events.jsonl").write_text("".join(lines))
    return root


@pytest.fixture(scope="module")
def get(root: Path) -> Iterator[Get]:
    with served(root) as port:

        def call(path: str, method: str = "GET", **headers: str) -> tuple[int, dict[str, str], bytes]:
            connection = http.client.HTTPConnection("127.0.0.1", port, timeout=600)
            try:
                given = {name.replace("_", "-"): value for name, value in headers.items()}
                connection.request(method, path, headers=given)
                answer = connection.getresponse()
                return answer.status, dict(answer.headers), answer.read()
            finally:
                connection.close()

        yield call


def looked_at(get: Get, name: str) -> dict[str, Any]:
    status, _, body = get(f"/run?name={quote(name)}")
    assert status == 200
    told = json.loads(body)
    assert isinstance(told, dict)
    return told


def test_the_list_tells_every_run_and_its_state(get: Get, root: Path) -> None:
    with runs.locked(root / "running"):
        status, _, body = get("/runs")
    assert status == 200
    found = {run["name"]: run for run in json.loads(body)["runs"]}
    states = {name: run["state"] for name, run in found.items()}
    assert states == {
        "finished": "finished", "deep/er/stopped": "stopped", "failed": "failed", "running": "running",
        "letters": "failed",
        **dict.fromkeys((EVIL, "fifo", "garbage", "nested", "long", "folders", "huge"), "stopped"),
    }  # fmt: skip
    assert found["finished"]["round"] == found["finished"]["rounds"] == 4
    assert (
        found["finished"]["accuracy"] == json.loads((root / "finished/summary.json").read_text())["accuracy"]
    )
    assert found["running"]["accuracy"] == found["finished"]["accuracy"]
    assert found["running"]["left"] == 0
    assert "training diverged" in found["failed"]["error"]
    assert (found["finished"]["method"], found["finished"]["data"]) == ("anchored", "digits")


def test_until_the_test_images_come_the_list_has_the_validation_accuracy(tmp_path: Path) -> None:
    (tmp_path / "config.toml").write_text("[federation]\nrounds = 3\n")
    evals = [{"event": "eval", "round": at, "validation_accuracy": at / 10} for at in (1, 2)]
    (tmp_path / "events.jsonl").write_text("".join(json.dumps(event) + "\n" for event in evals))
    handle = os.open(tmp_path, os.O_RDONLY)
    try:
        told = describe.run(handle, "run")
    finally:
        os.close(handle)
    assert (told["accuracy"], told["validation"], told["round"]) == (None, 0.2, 2)


def test_a_finished_run_that_never_looked_at_test_images_has_the_validation_accuracy(tmp_path: Path) -> None:
    (tmp_path / "config.toml").write_text("[federation]\nrounds = 3\n")
    (tmp_path / "summary.json").write_text(json.dumps({"validation_accuracy": 0.25, "rounds": 3}))
    handle = os.open(tmp_path, os.O_RDONLY)
    try:
        told = describe.run(handle, "run")
    finally:
        os.close(handle)
    assert (told["state"], told["accuracy"], told["validation"]) == ("finished", None, 0.25)


def test_a_run_gives_its_curves_and_settings(get: Get, root: Path) -> None:
    told = looked_at(get, "deep/er/stopped")
    events = list(runs.read_events(root / "finished"))
    evals = [[event["round"], event["accuracy"]] for event in events if event["event"] == "eval"]
    assert told["curves"]["accuracy"] == evals
    assert [at for at, _ in told["curves"]["mask_rate"]] == [1, 2, 3, 4]
    measured = [event for event in events if event["event"] == "diversity"]
    defined = [e["round"] for e in measured if e["gradient_l2_squared"]["definition"] is not None]
    assert [at for at, _ in told["curves"]["diversity"]] == defined != []
    assert told["settings"]["federation.period"] == "2"
    assert not told["damaged"]


@pytest.mark.parametrize(
    "name",
    ["", ".", "..", "../outside", "%2e%2e/outside", "finished/../../outside", "/etc", "linked", "linked/x",
     "swapped", "deep", "deep/er", "finished/", "finished/checkpoints", "finished%00", "%ff", "nowhere",
     "finished%2f..%2f..%2foutside", "a/b/c/d/e/f", "x" * 5000],
)  # fmt: skip
def test_what_is_not_a_run_under_the_folder_is_refused(get: Get, name: str) -> None:
    for path in (f"/run?name={name}", f"/report?run={name}"):
        status, _, body = get(path)
        assert status == 404, path
        assert b"outside" not in body
    assert get(f"/{name}")[0] in (200, 404) if name == "" else get(f"/{name}")[0] == 404


def test_no_outside_path_is_listed(get: Get) -> None:
    names = [run["name"] for run in json.loads(get("/runs")[2])["runs"]]
    assert not [name for name in names if "linked" in name or "swapped" in name or "outside" in name]


@pytest.mark.parametrize("name", [EVIL, "fifo", "garbage", "nested", "long", "folders", "huge"])
def test_a_hostile_run_neither_hangs_nor_breaks_the_board(get: Get, name: str) -> None:
    told = looked_at(get, name)
    assert told["state"] == "stopped"
    assert told["curves"] == {}
    assert told["damaged"] == (name in ("garbage", "nested", "long", "huge"))


def test_no_report_is_made_of_a_hostile_run(get: Get) -> None:
    for name, told in (("fifo", b"summary.json"), (quote(EVIL), b"no report: ")):
        status, headers, body = get(f"/report?run={name}")
        assert (status, headers["content-type"]) == (422, "text/plain; charset=utf-8")
        assert told in body


def test_only_looking_is_answered_and_only_for_this_machine(get: Get) -> None:
    for method in ("POST", "PUT", "DELETE", "PATCH", "OPTIONS"):
        assert get("/runs", method)[0] == 405
    status, headers, body = get("/", "HEAD")
    assert (status, body) == (200, b"")
    for host in ("evil.example", "evil.example:80", "127.0.0.1.evil.example", "", "[::1]"):
        assert get("/runs", Host=host)[0] in (400, 421)
    assert get("/runs", Host="localhost:1")[0] == 200
    for site in ("cross-site", "same-site"):
        assert get("/runs", Sec_Fetch_Site=site)[0] == 403
        assert get("/", Sec_Fetch_Site=site)[0] == 200
    assert get("/runs", Sec_Fetch_Site="same-origin")[0] == 200
    policy = headers["content-security-policy"]
    assert "script-src 'self';" in policy
    assert "unsafe" not in policy
    assert headers["x-content-type-options"] == "nosniff"
    assert "access-control-allow-origin" not in headers


def test_a_report_is_made_in_memory_and_may_run_its_own_scripts_alone(get: Get, root: Path) -> None:
    before = {path: path.lstat().st_mtime_ns for path in root.rglob("*")}
    status, headers, body = get("/report?run=finished&run=deep/er/stopped")
    assert status == 200
    assert b"2 runs compared" in body
    assert headers["content-security-policy"].startswith(
        "sandbox allow-scripts; default-src 'none'; script-src 'sha256-"
    )
    assert get("/report")[0] == 400
    assert get("/report?" + "&".join(["run=finished"] * 9))[0] == 400
    assert {path: path.lstat().st_mtime_ns for path in root.rglob("*")} == before


def test_curves_grow_are_cut_and_stay_small(tmp_path: Path) -> None:
    def line(round: int, accuracy: float) -> str:
        return json.dumps({"event": "eval", "round": round, "accuracy": accuracy}) + "\n"

    (tmp_path / "config.toml").write_text("")
    events = tmp_path / "events.jsonl"
    follower = follow.Follower()

    def look() -> list[tuple[int, float]]:
        with untrusted.opened(tmp_path.parent, tmp_path.name) as run:
            follower.look(run)
        return follower.shown().get("accuracy", [])

    assert look() == []
    events.write_text(line(1, 0.1) + line(2, 0.2)[:20])
    assert look() == [(1, 0.1)]
    events.write_text(line(1, 0.1) + line(2, 0.2))
    assert look() == [(1, 0.1), (2, 0.2)]
    runs.write_atomic(events, (line(1, 0.3) + line(2, 0.4) + line(3, 0.5)).encode())  # as a resumed run does
    assert look() == [(1, 0.3), (2, 0.4), (3, 0.5)]
    events.write_text(line(1, 0.6))
    assert look() == [(1, 0.6)]
    runs.write_atomic(events, "".join(line(k, k / 10_000) for k in range(10_000)).encode())
    found = look()
    assert len(found) <= follow.KEPT
    assert (found[0], found[-1]) == ((0, 0.0), (9_999, 0.9999))
    assert [at for at, _ in found] == sorted({at for at, _ in found})
    with events.open("a") as file:
        file.write("torn\n" + line(20_000, 1.0))
    assert look() == found
    assert follower.damaged


def test_a_failure_is_kept_until_the_run_goes_on(quick: Callable[..., Any], tmp_path: Path) -> None:
    class Crash(Exception):
        pass

    def crash(event: dict[str, Any]) -> None:
        if event["round"] == 2:
            raise Crash("the lights\nwent out")

    with pytest.raises(Crash):
        library.run(quick(), tmp_path / "a", crash)
    assert json.loads((tmp_path / "a/failed.json").read_text()) == {
        "error": "the lights went out",
        "kind": "Crash",
    }
    library.resume(tmp_path / "a")
    assert not (tmp_path / "a/failed.json").exists()


def test_a_board_that_cannot_be_says_why(ssfl: Call) -> None:
    import socket

    code, _, err = ssfl("board", "nowhere")
    assert code == 2
    assert "there is no folder nowhere" in err
    Path("runs").mkdir()
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        code, _, err = ssfl("board", "--port", str(taken.getsockname()[1]))
    assert code == 2
    assert "choose another --port" in err


# In a real browser


def wait_for(what: Callable[[], Any]) -> Any:
    """What `what` gives once it gives something."""
    return wait_until(what, "it did not come", every=0.1)


@pytest.fixture
def page(browser: Any, root: Path) -> Iterator[Any]:
    """The board of these runs in the browser; nothing may be wrong on its console."""
    browser.get_log("browser")
    with served(root) as port:
        browser.execute_cdp_cmd(
            "Emulation.setDeviceMetricsOverride",
            {"width": 1300, "height": 900, "deviceScaleFactor": 1, "mobile": False},
        )
        browser.board = f"http://127.0.0.1:{port}/"
        yield browser
        assert browser.get_log("browser") == []
        browser.get("about:blank")


def texts(page: Any, selector: str) -> list[str]:
    found = page.execute_script(
        "return [...document.querySelectorAll(arguments[0])].map((e) => e.textContent)", selector
    )
    return [str(text) for text in found]


def press(page: Any, selector: str, key: str) -> None:
    """A key on an element of the list, which may be drawn anew at any moment."""
    from selenium.common.exceptions import StaleElementReferenceException

    def pressed() -> bool:
        try:
            page.find_element("css selector", selector).send_keys(key)
            return True
        except StaleElementReferenceException:
            return False

    wait_for(pressed)


@pytest.mark.slow
def test_a_run_is_chosen_drawn_and_read_by_mouse_and_keyboard(page: Any) -> None:
    from selenium.webdriver import ActionChains, Keys

    page.get(page.board + "?run=finished")
    wait_for(lambda: page.find_elements("css selector", "#charts path.line"))
    assert texts(page, "#detail-title") == ["finished"]
    assert texts(page, "figcaption") == [
        "Accuracy", "Pseudo-labels", "Loss", "Gradient diversity", "Time of a round"
    ]  # fmt: skip
    assert EVIL in texts(page, "#list button")
    drawing = page.find_element("css selector", "#charts svg.drawing")
    ActionChains(page).move_to_element(drawing).perform()
    tip = wait_for(lambda: texts(page, ".tip:not([hidden])"))[0]
    assert "round" in tip
    assert "test images" in tip
    assert "%" in tip
    page.execute_script("arguments[0].focus()", drawing)
    drawing.send_keys(Keys.HOME)
    assert "round 1" in texts(page, ".tip:not([hidden])")[0]
    drawing.send_keys(Keys.ARROW_RIGHT)
    assert "round 2" in texts(page, ".tip:not([hidden])")[0]
    # by keyboard alone: another run, then a second one to compare
    press(page, "tr[data-run='deep/er/stopped'] button", Keys.ENTER)
    wait_for(lambda: texts(page, "#detail-title") == ["deep/er/stopped"])
    press(page, "tr[data-run=finished] input", Keys.SPACE)
    wait_for(lambda: texts(page, "#detail-title") == ["2 runs compared"])
    page.back()
    wait_for(lambda: texts(page, "#detail-title") == ["deep/er/stopped"])


@pytest.mark.slow
def test_runs_are_compared_and_their_report_opens(page: Any, root: Path) -> None:
    play(root / "other", "method.name=grouping")
    try:
        page.get(page.board + "?run=finished&run=other")
        wait_for(lambda: len(page.find_elements("css selector", "#charts figure:first-child path.line")) == 2)
        assert texts(page, "#charts figure:first-child text.end title") == ["finished", "other"]
        rows = texts(page, "#settings tbody th")
        assert "method.name" in rows
        assert "split.users" not in rows
        page.find_element("css selector", "a.action").click()
        wait_for(lambda: len(page.window_handles) == 2)
        first, second = page.window_handles
        page.switch_to.window(second)
        wait_for(lambda: page.find_elements("css selector", "main path.line"))
        assert texts(page, "h1") == ["2 runs compared"]
        page.close()
        page.switch_to.window(first)
    finally:
        page.get("about:blank")  # the board would ask for the removed run, and the browser would log a 404
        shutil.rmtree(root / "other")


@pytest.mark.slow
def test_a_run_that_goes_on_grows_before_ones_eyes(page: Any, root: Path) -> None:
    out = root / "live"
    command = [sys.executable, "-m", "ssfl", "run", "--quiet", "--out", str(out), "--set", "run.eval_every=1",
               "--set", "federation.rounds=100000", "--set", "run.threads=1"]  # fmt: skip
    with subprocess.Popen(command) as process:
        try:
            wait_for(lambda: (out / "events.jsonl").exists() and (out / "events.jsonl").stat().st_size)
            page.get(page.board)  # by itself it shows what runs
            wait_for(lambda: texts(page, "#detail-title") == ["live"])

            def length() -> int:  # asked in one go: the line is drawn anew with every round
                script = "return document.querySelector('#charts path.line')?.getAttribute('d') ?? ''"
                return str(page.execute_script(script)).count("L")

            before = wait_for(length)
            wait_for(lambda: length() > before + 2)
            assert texts(page, "#about .tile dd")[0] == "running"
        finally:
            process.send_signal(signal.SIGINT)
            ended(process)
    wait_for(lambda: texts(page, "#about .tile dd")[0] == "stopped")
    shutil.rmtree(out)
    wait_for(lambda: "live no longer exists." in texts(page, "#about p"))
    page.get("about:blank")  # it would ask again
    page.get_log("browser")  # the 404 of the removed run


@pytest.mark.slow
def test_narrow_dark_and_hostile(page: Any) -> None:
    page.execute_cdp_cmd(
        "Emulation.setDeviceMetricsOverride",
        {"width": 400, "height": 800, "deviceScaleFactor": 1, "mobile": True},
    )
    page.execute_cdp_cmd(
        "Emulation.setEmulatedMedia", {"features": [{"name": "prefers-color-scheme", "value": "dark"}]}
    )
    try:
        page.get(f"{page.board}?run=finished&run={quote(EVIL)}&run=huge")
        wait_for(lambda: page.find_elements("css selector", "#charts path.line"))
        assert page.execute_script("return document.documentElement.scrollWidth") <= 400
        assert page.execute_script("return document.querySelectorAll('img, iframe, form').length") == 0
        colour = page.execute_script("return getComputedStyle(document.body).backgroundColor")
        assert max(int(part) for part in colour.strip("rgb()").split(",")) < 60
        box = page.find_element("id", "filter")
        box.send_keys("digits finished")
        wait_for(lambda: texts(page, "#list tbody button") == ["finished"])
    finally:
        page.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})
        page.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": []})

"""What goes wrong in a real federation: each fault is provoked by a real process, over TLS."""

import json
import os
import re
import resource
import shlex
import shutil
import signal
import socket
import ssl
import subprocess
import sys
import threading
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from sklearn.datasets import load_digits

from ssfl.cli import main
from ssfl.deploy import certificates, connection, keys
from ssfl.deploy.port import LOG
from ssfl.errors import DataError, SsflError
from ssfl.report import gather
from ssfl.runs import folder as runs
from ssfl.simulate.simulation import evaluated_row
from stage import NAMES, Stage, arrivals, checkpoint, config_of, free_port, same, sets, simulated, simulation
from waiting import command_of, descendants, wait_until

FAULTS = {
    "quirk-a": ("nan", "large", "infinite"),
    "quirk-b": ("shape", "infinite", "norm"),
    "quirk-c": ("name", "round", "altered"),
    "quirk-d": ("bomb", "infinite", "nan"),
}
REASONS = {
    "nan": "not finite", "infinite": "not finite", "shape": "a model of float32 (", "name": "model/",
    "round": "an answer to round 100", "norm": "times as long", "large": "too large",
    "twice": "a second answer", "altered": "a truncated or altered part",
    "bomb": "10000 chunks",
}  # fmt: skip


def refusals(run: Path) -> list[dict[str, Any]]:
    return [event for event in runs.read_events(run) if event["event"] == "refused"]


def continuing(line: str) -> list[str]:
    """The words of the command that a message names at its end, after `ssfl`."""
    [command] = re.findall("then continue with `ssfl ([^`]*)`$", line)
    return shlex.split(command)


def closed(port: int) -> bool:
    """Whether nothing listens on a port (any more)."""

    def refused() -> bool:
        try:
            socket.create_connection(("127.0.0.1", port), 1).close()
        except OSError:
            return True
        return False

    return wait_until(refused, f"something still listens on {port}", every=0.2)


@pytest.mark.slow
def test_flowers_process_ends_with_a_centre_that_was_killed_at_once(tmp_path: Path) -> None:
    """Also where the centre was started by a script, in the background: what a shell starts so ignores
    SIGINT."""
    script = """
import os, pathlib, signal, sys
from ssfl.deploy import link
signal.signal(signal.SIGINT, signal.SIG_IGN)
folder, port = pathlib.Path(sys.argv[1]), int(sys.argv[2])
with link.listening("127.0.0.1", port) as public, link.own_socket(folder) as (own, _):
    print(link.start(folder, None, public, own, "secret", 1000, 0, print).pid, flush=True)
os._exit(1)
"""
    command = [sys.executable, "-c", script, str(tmp_path), str(free_port())]
    pid = subprocess.run(command, capture_output=True, text=True).stdout.strip()

    def over() -> bool:
        state = subprocess.run(["ps", "-o", "stat=", "-p", pid], capture_output=True, text=True).stdout
        return not state or state[0] == "Z"

    try:
        wait_until(over, "it goes on, and keeps the port", every=0.5)
    finally:
        if not over():
            os.kill(int(pid), signal.SIGKILL)


@pytest.mark.slow
def test_whatever_a_site_does_wrong_is_refused_and_the_others_go_on(folders: Path, stage: Stage) -> None:
    ring, port, script = stage.folder / "keys", free_port(), Path(__file__).parent / "bad_site.py"
    keys.init(ring, [])
    # connections that break and second answers are not held against a site
    shaky = {"shaky": ("truncated",) * 4, "doubled": ("twice",) * 4}
    for name in (*NAMES, *FAULTS, *shaky):
        keys.add(ring, name)
    serve = stage.serve(folders, ring, port, "--deadline", 60, *sets("federation.rounds=5"))
    for name in NAMES:
        stage.join(name, port, folders, ring)
    for name, faults in (FAULTS | shaky).items():
        place = [f"127.0.0.1:{port}", ring / f"{name}.site", folders / "bonn", ",".join(faults)]
        stage.start(name, sys.executable, script, *place)
    assert stage.ended(serve) == 0, stage.said("serve")
    told = refusals(stage.folder / "run")
    for name, faults in FAULTS.items():
        own = [event["reason"] for event in told if event["site"] == name]
        assert len(own) == 3, (own, stage.said(name))
        for reason, fault in zip(own, faults, strict=True):
            assert REASONS[fault] in reason
            assert f"refused: {name} sent {reason}" in stage.said("serve")
        assert f"{name} is excluded" in stage.said("serve")
        assert "excluded" in stage.said(name)
    second = [event["reason"] for event in told if event["site"] == "doubled"]
    assert len(second) == 4
    assert all(REASONS["twice"] in reason for reason in second)
    assert {event["site"] for event in told} == {"doubled", *FAULTS}
    rounds = [event for event in runs.read_events(stage.folder / "run") if event["event"] == "round"]
    assert [len(event["participants"]) for event in rounds] == [9, 9, 9, 5, 5]
    assert all(set(event["returned"]) >= {0, 1, 2, 3} for event in rounds)
    assert [8 in event["returned"] for event in rounds] == [False] * 4 + [True]
    assert checkpoint(stage.folder / "run").average.isfinite().all()
    assert "Traceback" not in stage.said("serve")


@pytest.mark.slow
def test_one_of_four_sites_that_increases_the_loss_is_cut_dropped_and_named(
    folders: Path, stage: Stage
) -> None:
    ring, port, script, out = stage.folder / "keys", free_port(), Path(__file__).parent / "bad_site.py", "run"
    keys.init(ring, [])
    for name in (*NAMES, "quirk"):
        keys.add(ring, name)
    settings = ["federation.rounds=20", "federation.period=10", "method.threshold=0.6"]
    serve = stage.serve(folders, ring, port, "--deadline", 60, *sets(*settings))
    for name in NAMES:
        stage.join(name, port, folders, ring)
    place = [f"127.0.0.1:{port}", ring / "quirk.site", folders / "bonn", ",".join(["ascent"] * 40)]
    stage.start("quirk", sys.executable, script, *place)
    assert stage.ended(serve) == 0, stage.said("serve")
    assert "quirk sent an update" in stage.said("serve")
    assert "quirk sent updates" in stage.said("serve")
    told = [event for event in runs.read_events(stage.folder / out) if event["event"] == "limited"]
    assert {event["site"] for event in told} == {"quirk"}
    assert len(told) <= 10  # the 1st, 2nd, 4th, ... time
    rounds = [event for event in runs.read_events(stage.folder / out) if event["event"] == "round"]
    assert all(event["returned"] == [0, 1, 2, 3] for event in rounds)
    assert any(event.get("against", {}).keys() == {"3"} for event in rounds)
    assert all(event.get(key, {}).keys() <= {"3"} for event in rounds for key in ("cut", "against"))
    assert refusals(stage.folder / out) == []
    # the three honest sites alone, on images that nobody has seen
    config = config_of(folders, settings)
    sim, clean = simulation(config, folders), simulated(config, folders)
    digits = load_digits()
    unseen = torch.from_numpy(np.rint(digits.images[400:] * (255 / 16)).astype(np.uint8))[:, None]
    labels = torch.from_numpy(digits.target[400:])
    scores = [
        sim.score(evaluated_row(state), unseen, labels).accuracy
        for state in (clean, checkpoint(stage.folder / out))
    ]
    assert scores[0] > 0.8
    assert scores[1] > scores[0] - 0.02


@pytest.mark.slow
def test_strangers_are_kept_out_and_the_federation_does_not_notice(
    folders: Path, ring: Path, stage: Stage
) -> None:
    port, other = free_port(), stage.folder / "other"
    serve = stage.serve(folders, ring, port, *sets())
    keys.init(other, [])
    keys.add(other, "aachen")
    forged = stage.folder / "forged.site"  # a stranger's key, and the certificate that the centre shows
    true, false = (folder / "aachen.site" for folder in (ring, other))
    forged.write_text(
        false.read_text().split("authority")[0] + "authority" + true.read_text().split("authority")[1]
    )
    stage.until("serve", "listening")
    strangers = {
        name: stage.ssfl(name, "join", f"127.0.0.1:{port}", "--data", folders / "aachen", "--key", file,
                         "--patience", 5)
        for name, file in (("other", other / "aachen.site"), ("forged", forged))
    }  # fmt: skip
    with pytest.raises(httpx.HTTPError):
        httpx.post(f"http://127.0.0.1:{port}/v1/fleet/activate-node")
    with httpx.Client(verify=False) as anybody:
        for path in ("control/register-node", "control/start-run", "runtime/acquire-task"):
            assert anybody.post(f"https://127.0.0.1:{port}/v1/{path}").status_code == 403
        assert anybody.post(f"https://127.0.0.1:{port}/docs").status_code == 403
        huge = anybody.post(f"https://127.0.0.1:{port}/v1/fleet/activate-node", content=b"x" * 10**6)
        assert huge.status_code == 401  # nobody signed it: its headers are all that was looked at
    for process in strangers.values():
        assert stage.ended(process) == 2
    assert "certificate" in stage.said("other")
    assert "key" in stage.said("forged")
    for name in NAMES:
        stage.join(name, port, folders, ring)
    assert stage.ended(serve) == 0, stage.said("serve")
    told = refusals(stage.folder / "run")
    assert {event["site"] for event in told} == {None}
    assert {event["from"] for event in told} == {"127.0.0.1"}
    reasons = " ".join(event["reason"] for event in told)
    for reason in ("plain HTTP", "the centre's certificate", "an unknown key",
                   "a request without a signature", "only the centre may"):  # fmt: skip
        assert reason in reasons
        assert reason in stage.said("serve")
    assert same(checkpoint(stage.folder / "run"), simulated(config_of(folders, []), folders))
    assert "Traceback" not in stage.said("serve") + stage.said("other") + stage.said("forged")
    assert closed(port)


@pytest.mark.slow
def test_a_federation_ends_as_if_1200_strangers_held_no_connections(
    folders: Path, ring: Path, stage: Stage
) -> None:
    """The centre may open 1,024 files, as is common, and the sites share the strangers' address."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard < 2048:
        pytest.skip(f"needs 2,048 open files for the strangers, and {hard} are allowed")
    port, rounds, strangers = free_port(), ["federation.rounds=6"], list[socket.socket]()
    place = ["--data", folders / "labelled", "--keys", ring, "--port", port, "--out", stage.folder / "run"]
    few = ["sh", "-c", 'ulimit -n 1024; exec "$@"', "sh", sys.executable, "-m", "ssfl", "serve"]
    serve = stage.start("serve", *few, *place, *sets(*rounds))
    stage.until("serve", "listening")

    def knock(many: int, said: bytes) -> None:
        for _ in range(many):
            strangers.append(socket.socket())
            strangers[-1].settimeout(30)
            with suppress(OSError):
                strangers[-1].connect(("127.0.0.1", port))
                strangers[-1].sendall(said)

    resource.setrlimit(resource.RLIMIT_NOFILE, (min(4096, hard), hard))
    try:
        knock(600, b"")
        for name in NAMES:
            stage.join(name, port, folders, ring)
        stage.until("serve", "round 1/6")
        knock(600, bytes.fromhex("160301020001"))  # the first bytes of a ClientHello
        assert stage.ended(serve) == 0, stage.said("serve")
    finally:
        for one in strangers:
            one.close()
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert not any("asked_again" in event for event in runs.read_events(stage.folder / "run"))
    assert same(checkpoint(stage.folder / "run"), simulated(config_of(folders, rounds), folders))
    assert "Traceback" not in stage.said("serve") + "".join(map(stage.said, NAMES))
    assert len(stage.said("serve").splitlines()) < 100
    assert (stage.folder / "run" / "flower" / "link.log").stat().st_size < LOG


@pytest.fixture
def expired(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A keys folder whose certificates held until some years ago."""

    class Past(datetime):
        @classmethod
        def now(cls, tz: Any = None) -> "Past":
            return cls(2015, 1, 1, tzinfo=UTC)

    with monkeypatch.context() as changed:
        changed.setattr(certificates, "datetime", Past)
        keys.init(tmp_path / "expired", [])
        keys.add(tmp_path / "expired", "aachen")
    return tmp_path / "expired"


def test_an_expired_certificate_is_refused_at_both_ends(folders: Path, expired: Path) -> None:
    with pytest.raises(SsflError, match="2019-12-30"):
        main.app(
            ["serve", "--data", str(folders / "labelled"), "--keys", str(expired)], standalone_mode=False
        )
    server = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    server.load_cert_chain(expired / "centre.crt", expired / "centre.key")
    with socket.create_server(("127.0.0.1", 0)) as listening:

        def accept() -> None:
            with pytest.raises(OSError, match="expired"):
                server.wrap_socket(listening.accept()[0], server_side=True)

        threading.Thread(target=accept, daemon=True).start()
        place = f"127.0.0.1:{listening.getsockname()[1]}"
        with (
            pytest.raises(SsflError, match="expired"),
            connection.connected(place, keys.read_site(expired / "aachen.site"), 5),
        ):
            pass


def test_a_site_without_usable_images_stops_before_it_joins(tmp_path: Path, ring: Path) -> None:
    asked = ["join", "127.0.0.1:9", "--key", str(ring / "aachen.site"), "--data", str(tmp_path)]
    with pytest.raises(DataError):
        main.app(asked, standalone_mode=False)
    (tmp_path / "scan.png").write_bytes(b"no image")
    with pytest.raises(DataError):
        main.app(asked, standalone_mode=False)


@pytest.mark.slow
def test_a_killed_centre_goes_on_to_the_same_bytes(folders: Path, ring: Path, stage: Stage) -> None:
    port, out, long = free_port(), stage.folder / "run", ["federation.rounds=8"]
    for name in NAMES:
        stage.join(name, port, folders, ring)
    first = stage.serve(folders, ring, port, *sets(*long))
    stage.until("serve", "round 3/8  accuracy")
    first.send_signal(signal.SIGKILL)
    first.wait()
    assert closed(port)  # Flower's process does not outlive it
    last = max((out / "checkpoints").glob("round-*"))  # as if torch had been another
    with safe_open(last, "pt") as opened:
        tensors, header = {name: opened.get_tensor(name) for name in opened.keys()}, opened.metadata()  # noqa: SIM118
    header["conditions"] = json.dumps(json.loads(header["conditions"]) | {"torch": "2.0"})
    save_file(tensors, last, header)
    second = stage.ssfl("second", "serve", "--resume", out, "--keys", ring, "--port", port)
    assert stage.ended(second) == 0, stage.said("second")
    assert "torch was 2.0 and is now" in stage.said("second")
    assert same(checkpoint(out), simulated(config_of(folders, long), folders))


@pytest.mark.slow
def test_a_killed_site_does_not_hold_up_the_others_and_may_come_back(
    folders: Path, ring: Path, stage: Stage
) -> None:
    port, out, long = free_port(), stage.folder / "run", ["federation.rounds=60"]
    serve = stage.serve(folders, ring, port, "--sites", 2, "--deadline", 5, *sets(*long))
    joins = {name: stage.join(name, port, folders, ring) for name in NAMES}

    def rounds() -> list[dict[str, Any]]:
        return [event for event in runs.read_events(out) if event["event"] == "round"]

    def kill(name: str) -> int:
        """Returns how many rounds were played by then."""
        joins[name].send_signal(signal.SIGKILL)
        joins[name].wait()
        return len(rounds())

    def until_round_with(*numbers: int, after: int) -> None:
        wait_until(
            lambda: serve.poll() is not None or any(e["returned"] == [*numbers] for e in rounds()[after:]),
            lambda: f"there was no round with {numbers}: {stage.said('serve')}", 120, stage.logs, every=0.2,
        )  # fmt: skip

    stage.until("serve", "3 of 3 sites")
    before = kill("bonn")
    until_round_with(0, 2, after=before)
    stage.join("bonn", port, folders, ring)
    until_round_with(0, 1, 2, after=len(rounds()))
    kill("calais")
    assert stage.ended(serve) == 0, stage.said("serve")
    told = rounds()
    assert len(told) == 60
    lonely = [event for event in told if event["returned"] == [0, 2]]
    assert any(event.get("missing") == ["bonn"] for event in lonely), lonely
    assert "bonn" in stage.said("serve").partition("3 of 3 sites")[2]
    back = told.index(lonely[-1]) + 1
    assert any(event["returned"] == [0, 1, 2] for event in told[back:])  # it came back
    assert told[-1]["returned"] == [0, 1]
    assert told[-1]["missing"] == ["calais"]
    assert refusals(out) == []
    assert "Traceback" not in stage.said("serve")
    assert same(checkpoint(out), simulated(config_of(folders, long), folders, arrivals(out)))


@pytest.mark.slow
def test_keys_that_come_or_go_while_the_run_is_stopped_count_when_it_goes_on(
    folders: Path, ring: Path, stage: Stage
) -> None:
    port, out = free_port(), stage.folder / "run"
    own = Path(shutil.copytree(ring, stage.folder / "keys"))
    again = ["serve", "--resume", out, "--port", port, "--keys", own]

    def interrupted(name: str, serve: "subprocess.Popen[bytes]", until: str) -> int:
        """Returns the rounds that are saved."""
        stage.until(name, until)
        serve.send_signal(signal.SIGINT)
        assert stage.ended(serve) == 130, stage.said(name)
        return checkpoint(out).round

    # aachen has no key yet
    (own / "aachen.pub").rename(own / "aachen.later")
    serve = stage.serve(folders, own, port, *sets("federation.rounds=12"))
    for name in ("bonn", "calais"):
        stage.join(name, port, folders, ring)
    alone, begun = interrupted("serve", serve, "round 2/12  accuracy"), (out / "config.toml").read_bytes()
    # then it has one
    (own / "aachen.later").rename(own / "aachen.pub")
    second = stage.ssfl("second", *again)
    stage.until("second", "new sites since this run began: aachen")
    stage.join("aachen", port, folders, ring)
    all_three = interrupted("second", second, f"round {alone + 1}/12  accuracy")
    assert json.loads((out / "split.json").read_text())["sites"] == ["bonn", "calais", "aachen"]
    assert len(checkpoint(out).strikes) == 3
    # the keys of other sites are not those of this run
    for name in NAMES:
        (own / f"{name}.pub").rename(own / f"other-{name}.pub")
    assert stage.ended(stage.ssfl("other", *again)) == 2
    assert "other sites (bonn, calais, aachen)" in stage.said("other")
    # bonn has no key any more
    for name in ("aachen", "calais"):
        (own / f"other-{name}.pub").rename(own / f"{name}.pub")
    (own / "other-bonn.pub").unlink()
    last = stage.ssfl("last", *again)
    assert stage.ended(last) == 0, stage.said("last")
    assert "no key: bonn" in stage.said("last")
    assert "new sites since" not in stage.said("last")
    rounds = [event["returned"] for event in runs.read_events(out) if event["event"] == "round"]
    assert rounds == [[0, 1]] * alone + [[0, 1, 2]] * (all_three - alone) + [[1, 2]] * (12 - all_three)
    assert all_three > alone
    assert all_three < 12
    assert gather.read(out, "run").users == 3
    assert (out / "config.toml").read_bytes() == begun


@pytest.mark.slow
def test_keys_are_revoked_and_replaced_while_the_federation_runs(
    folders: Path, ring: Path, stage: Stage
) -> None:
    port, out = free_port(), stage.folder / "run"
    own = Path(shutil.copytree(ring, stage.folder / "keys"))
    serve = stage.serve(folders, own, port, "--deadline", 10, *sets("federation.rounds=25"))
    joins = {name: stage.join(name, port, folders, ring) for name in NAMES}
    stage.until("serve", "round 2/25")
    keys.revoke(own, "bonn")
    stage.until("serve", "bonn is excluded")
    keys.replace(own, "calais")
    stage.until("serve", "the key of calais was replaced")
    joins["calais"].terminate()  # its key is of no use any more
    stage.ended(joins["calais"])
    place = [f"127.0.0.1:{port}", "--data", folders / "calais", "--device", "cpu", "--threads", 1]
    old = stage.ssfl("old", "join", *place, "--key", ring / "calais.site", "--patience", 5)
    stage.ssfl("new", "join", *place, "--key", own / "calais.site")
    assert stage.ended(serve) == 0, stage.said("serve")
    assert stage.ended(old) == 2
    assert "round" not in stage.said("old")
    assert any(event["event"] == "refused" and event["site"] is None for event in runs.read_events(out))
    came = [sorted(event["returned"]) for event in runs.read_events(out) if event["event"] == "round"]
    assert len(came) == 25
    assert came[0] == [0, 1, 2]
    assert came[-1] == [0, 2]
    assert "round 25" in stage.said("new")
    assert "Traceback" not in stage.said("serve")


@pytest.mark.slow
def test_a_round_in_which_all_sites_are_late_is_repeated(folders: Path, ring: Path, stage: Stage) -> None:
    port, out, rounds = free_port(), stage.folder / "run", ["federation.rounds=8"]
    serve = stage.serve(folders, ring, port, "--deadline", 5, *sets(*rounds))
    joins = {name: stage.join(name, port, folders, ring) for name in NAMES}
    stage.until("serve", "round 2/8")
    for process in joins.values():
        process.send_signal(signal.SIGSTOP)
    stage.until("serve", "asking again")
    for process in joins.values():
        process.send_signal(signal.SIGCONT)
    assert stage.ended(serve) == 0, stage.said("serve")
    assert "did not answer within 5 s" in stage.said("serve")
    assert [len(came) for _, came in arrivals(out)] == [3] * 8
    assert any("asked_again" in event for event in runs.read_events(out))
    assert same(checkpoint(out), simulated(config_of(folders, rounds), folders))
    assert "Traceback" not in stage.said("serve") + "".join(map(stage.said, NAMES))


@pytest.mark.slow
def test_if_flowers_process_is_killed_the_centre_stops_at_once_with_a_checkpoint(
    folders: Path, ring: Path, stage: Stage
) -> None:
    port, out, rounds = free_port(), stage.folder / "run", ["federation.rounds=12"]
    serve = stage.serve(folders, ring, port, *sets(*rounds))
    for name in NAMES:
        stage.join(name, port, folders, ring)
    stage.until("serve", "round 2/12  accuracy")
    [flower] = [pid for pid in descendants(serve.pid) if b"ssfl.deploy.port" in command_of(pid)]
    os.kill(flower, signal.SIGKILL)
    assert stage.ended(serve) == 2, stage.said("serve")
    last = stage.said("serve").splitlines()[-1]
    assert "Flower's process was killed" in last
    assert "Traceback" not in stage.said("serve")
    again = stage.ssfl("again", *continuing(last))  # as it is printed
    assert stage.ended(again) == 0, stage.said("again")  # the sites waited and connected again
    assert same(checkpoint(out), simulated(config_of(folders, rounds), folders))


@pytest.mark.slow
def test_a_centre_to_which_nobody_comes_says_so(folders: Path, stage: Stage) -> None:
    place = ["--data", folders / "labelled", "--insecure", "--sites", 2, "--port", free_port()]
    serve = stage.ssfl("serve", "serve", *place, "--out", stage.folder / "run", "--patience", 1, *sets())
    assert stage.ended(serve) == 2, stage.said("serve")
    assert "0 of 2 sites" in stage.said("serve").splitlines()[-1]
    assert "Traceback" not in stage.said("serve")
    command = continuing(stage.said("serve").splitlines()[-1])
    assert {"--insecure", "--sites"} < set(command)
    assert stage.ended(stage.ssfl("again", *command)) == 2  # as it is printed
    assert "0 of 2 sites" in stage.said("again").splitlines()[-1]
    assert continuing(stage.said("again").splitlines()[-1]) == command


@pytest.mark.slow
def test_too_few_sites_stop_the_centre_with_a_checkpoint(folders: Path, ring: Path, stage: Stage) -> None:
    port, out, place = free_port(), stage.folder / "run", ["--keys", ring]
    serve = stage.serve(folders, ring, port, "--deadline", 5, "--patience", 5, *sets("federation.rounds=40"))
    joins = {name: stage.join(name, port, folders, ring) for name in NAMES}
    stage.until("serve", "round 2/40")
    for name in ("aachen", "calais"):
        joins[name].send_signal(signal.SIGKILL)
        joins[name].wait()
    assert stage.ended(serve) == 2, stage.said("serve")
    said = stage.said("serve").partition("round 2/40")[2]  # they are asked again, or known to be away
    assert re.search(r"asking again: (aachen|calais)|missing: (aachen|calais)", said)
    assert re.search(r"(for|after) 5 s: ", said)
    assert f"ssfl serve --resume {out}" in stage.said("serve")
    before = checkpoint(out).round
    assert before >= 2
    again = stage.ssfl(
        "again", "serve", "--resume", out, "--port", port, *place, "--sites", 1, "--deadline", 30
    )
    stage.until("again", f"round {before + 2}/40")
    again.send_signal(signal.SIGINT)
    assert stage.ended(again) == 130, stage.said("again")
    assert checkpoint(out).round >= before + 2
    assert closed(port)

"""Real federations: centre and sites in one process, keys, and one whole federation of processes with TLS.

What goes wrong between processes is in test_deploy_faults.py.
"""

import dataclasses
import io
import json
import ssl
import stat
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Error, Message, MetricRecord, RecordDict
from flwr.app.message import make_message
from PIL import Image
from rich.console import Console

from conftest import Call
from ssfl.cli import main
from ssfl.config.loading import load_config
from ssfl.config.settings import Config, FederationSettings
from ssfl.core import outside
from ssfl.deploy import centre, certificates, fleet, images, key_changes, keys, site, view, wire
from ssfl.deploy import sites as deploy_sites
from ssfl.deploy.images import ImageFiles
from ssfl.deploy.internals import NodeInfo, identity
from ssfl.errors import ConfigError, DataError, RunError, SsflError
from ssfl.federation import State
from ssfl.report import page
from ssfl.runs import assemble, roster
from ssfl.runs import folder as runs
from ssfl.runs.predict import load_model, predict
from ssfl.runs.surroundings import reproducible
from ssfl.simulate.simulation import Simulation
from stage import METHODS, NAMES, Stage, checkpoint, config_of, files, free_port, same, sets, simulated


@dataclass
class Hall:
    """Flower's grid without Flower's processes: sites answer in this one."""

    sites: dict[int, site.Site]
    absent: set[int] = field(default_factory=set)
    spoil: Callable[[int, Message], Message | None] = lambda node, reply: reply
    waiting: dict[str, Message] = field(default_factory=dict)

    def get_nodes(self) -> list[NodeInfo]:
        return [
            NodeInfo(node_id=node, name=one.name)
            for node, one in self.sites.items()
            if node not in self.absent
        ]

    def push_messages(self, messages: Iterable[Message]) -> list[str]:
        messages = list(messages)
        for message in messages:
            name = message.metadata.__dict__["_message_id"] = message.object_id
            node = message.metadata.dst_node_id
            app = site.client_app(lambda context: self.sites[context.node_id])
            reply = self.spoil(node, app(message, Context(1, node, {}, RecordDict(), {})))
            if reply is not None:
                self.waiting[name] = reply
        return [message.metadata.message_id for message in messages]

    def pull_messages(self, message_ids: Iterable[str]) -> list[Message]:
        return [self.waiting.pop(name) for name in message_ids if name in self.waiting]


Open = Callable[..., tuple[centre.Centre, Hall, list[str]]]


@pytest.fixture
def hall(folders: Path) -> Iterator[Open]:
    """A centre and three sites in one process."""
    identity(1, 1, 1)

    def make(config: Config, **times: Any) -> tuple[centre.Centre, Hall, list[str]]:
        lines: list[str] = []
        there = {
            number: site.Site(name, ImageFiles(files(folders, name)), "cpu", 1, lambda line: None)
            for number, name in zip((77, 55, 66), NAMES, strict=True)
        }
        sim, terms = centre.prepare(config)
        grid = Hall(there)
        settings = {"needed": 3, "deadline": 1.0, "patience": 0.5} | times
        reached = fleet.Fleet(grid=grid, names=list(NAMES), tell=lines.append, **settings)
        return centre.with_sites(sim, terms, reached), grid, lines

    with reproducible():
        yield make


def played(sim: Simulation) -> tuple[State, list[Any]]:
    state, events = sim.initial(), []
    while state.round < sim.rounds:
        state, told = sim.play(state)
        events += told
    return state, events


@pytest.mark.parametrize("method", METHODS)
def test_sites_do_what_simulated_users_do(method: str, folders: Path, hall: Open) -> None:
    config = config_of(folders, METHODS[method])
    state, told = played(hall(config)[0])
    events = [event for event in told if event["event"] == "round"]  # an update that is cut has another one
    assert same(state, simulated(config, folders))
    assert 0.05 < np.mean([event["mask_rate"] for event in events]) < 1
    size = 4 * state.average.numel()
    numbers = 4 if method == "relative" else 0  # bytes with each model
    for event in events:
        users = len(event["participants"])
        assert (event["bytes_up"], event["bytes_down"]) == (size * users, (size + numbers) * users)


def test_a_site_that_does_not_answer_is_left_out(folders: Path, hall: Open) -> None:
    made, grid, lines = hall(config_of(folders, METHODS["grouping"]))
    grid.spoil = lambda node, reply: None if node == 55 and "model" in reply.content else reply
    _, [event] = made.play(made.initial())
    assert (event["participants"], event["returned"]) == ([0, 1, 2], [0, 2])
    assert sorted(user for group in event["groups"] for user in group) == [0, 2]
    assert event["bytes_down"] == 3 * made.message_bytes()
    assert event["bytes_up"] == 2 * made.message_bytes()
    assert "bonn did not answer within 1 s" in lines


def reply_with(reply: Message, row: np.ndarray, **told: Any) -> Message:
    """A site's answer with another model, and with other numbers."""
    reply.content["model"] = ArrayRecord({"row": Array(row)})
    reply.content["metrics"] = MetricRecord(dict(reply.content.metric_records["metrics"]) | told)
    return reply


def row_of(reply: Message) -> np.ndarray:
    row: np.ndarray = reply.content.array_records["model"]["row"].numpy()
    return row


def renamed(reply: Message) -> Message:
    reply.content["model"] = ArrayRecord({"weights": Array(row_of(reply))})
    return reply


def cut_short(reply: Message) -> Message:
    array = reply.content.array_records["model"]["row"]
    array.data = array.data[:-100]
    return reply


def boasting(reply: Message) -> Message:
    """An array that claims to be of the right shape, and whose header claims terabytes."""
    array = reply.content.array_records["model"]["row"]
    array.data = Array(np.zeros(1, np.float32)).data.replace(b"(1,)", b"(9" + b"0" * 12 + b",)")
    return reply


def talkative(reply: Message) -> Message:
    reply.content["pictures"] = ConfigRecord({"first": b"..."})
    return reply


WRONG: dict[str, tuple[Callable[[Message], Message], str]] = {
    "not a number": (lambda reply: reply_with(reply, row_of(reply) * np.float32("nan")), "not finite"),
    "infinite": (lambda reply: reply_with(reply, row_of(reply) + np.float32("inf")), "not finite"),
    "too short": (lambda reply: reply_with(reply, row_of(reply)[:-1]), "a model of float32 ("),
    "another kind": (
        lambda reply: reply_with(reply, row_of(reply).astype(np.float64)),
        "a model of float64 (",
    ),
    "another name": (renamed, "model/weights"),
    "truncated": (cut_short, "truncated"),
    "boasting": (boasting, "truncated or altered"),
    "another round": (lambda reply: reply_with(reply, row_of(reply), round=7), "round 8"),
    "loss not finite": (lambda reply: reply_with(reply, row_of(reply), loss=float("nan")), "not finite"),
    "beyond all lengths": (
        lambda reply: reply_with(reply, row_of(reply) * 0 + np.float32(3e38)),
        "1e+15",
    ),
    "loss in the mean": (lambda reply: reply_with(reply, row_of(reply), loss=1e5), "'loss': 100000.0"),
    "loss beyond": (lambda reply: reply_with(reply, row_of(reply), loss=1e39), "'loss': 1e+39"),
    "sure of too much": (
        lambda reply: reply_with(reply, row_of(reply), mask_rate=7.0),
        "'mask_rate': 7.0",
    ),
    "loss a list": (lambda reply: reply_with(reply, row_of(reply), loss=[1.0]), "list"),
    "more than asked for": (talkative, "pictures"),
    "far too long": (lambda reply: reply_with(reply, row_of(reply) * np.float32(50)), "times as long as"),
}


WITHOUT_BONN: list[torch.Tensor] = []


@pytest.mark.parametrize("wrong", WRONG)
def test_what_is_wrong_is_refused_told_and_counted(wrong: str, folders: Path, hall: Open) -> None:
    made, grid, lines = hall(config_of(folders, ["method.name=crl-gn"]))
    spoilt, reason = WRONG[wrong]
    grid.spoil = lambda node, reply: spoilt(reply) if node == 55 and "model" in reply.content else reply
    state, [event, refused] = made.play(made.initial())
    assert list(event["refused"]) == ["1"]
    assert reason in event["refused"]["1"]
    assert refused == {"event": "refused", "round": 1, "site": "bonn", "reason": event["refused"]["1"]}
    assert any(line.startswith("refused: bonn sent ") and reason in line for line in lines)
    assert state.strikes.tolist() == [0, 1, 0]
    # the average is that of the others, the same in all cases
    if not WITHOUT_BONN:
        other, grid, _ = hall(config_of(folders, ["method.name=crl-gn"]))
        grid.spoil = lambda node, reply: None if node == 55 and "model" in reply.content else reply
        WITHOUT_BONN.append(other.play(other.initial())[0].average)
    assert torch.allclose(state.average, WITHOUT_BONN[0], atol=1e-7)


def test_who_is_refused_three_times_is_left_out(folders: Path, hall: Open) -> None:
    made, grid, lines = hall(config_of(folders, ["federation.rounds=5"]))
    spoilt = WRONG["not a number"][0]
    grid.spoil = lambda node, reply: spoilt(reply) if node == 55 and "model" in reply.content else reply
    state, events = played(made)
    told = [event for event in events if event["event"] == "round"]
    assert [event["participants"] for event in told] == [[0, 1, 2]] * 3 + [[0, 2]] * 2
    assert state.strikes.tolist() == [0, 3, 0]
    assert sum("bonn is excluded" in line for line in lines) == 1
    assert grid.sites[55].done  # and it knows
    assert not grid.sites[66].done
    # also after the centre was started anew
    again, grid, lines = hall(config_of(folders, ["federation.rounds=6"]))
    _, [event] = again.play(state)
    assert event["participants"] == [0, 2]


def test_only_refused_answers_count_against_a_site(folders: Path, hall: Open) -> None:
    """Not the port's summaries of refused requests, second answers, or connections that are too many."""
    made, grid, lines = hall(config_of(folders, ["federation.rounds=4"]))
    answer = grid.spoil

    def told(node: int, reply: Message) -> Message | None:
        summary = {"node": 55, "from": "10.0.0.1", "reason": "55 more refused requests", "lost": False}
        made.fleet.notes.put(summary)
        return answer(node, reply)

    grid.spoil = told
    state, events = played(made)
    rounds = [event for event in events if event["event"] == "round"]
    assert [event["returned"] for event in rounds] == [[0, 1, 2]] * 4
    assert state.strikes.tolist() == [0, 0, 0]
    assert all(not event["refused"] for event in rounds)
    assert any(event["event"] == "refused" and event["site"] == "bonn" for event in events)
    assert "refused: bonn sent 55 more refused requests" in lines


@pytest.mark.parametrize("wrong", [None, "not a number"])
def test_where_nobody_that_was_drawn_can_count_the_server_goes_on_alone(
    wrong: str | None, folders: Path, hall: Open
) -> None:
    config = config_of(folders, ["method.name=alternate", "federation.participants=1"])
    made, grid, _ = hall(config)
    (drawn,) = made.plan.cohort(0).users
    start = made.initial()
    if wrong is None:  # it was left out before
        strikes = start.strikes.clone()
        strikes[drawn] = 3
        start = replace(start, strikes=strikes)
    else:
        grid.spoil = lambda node, reply: WRONG[wrong][0](reply) if "model" in reply.content else reply
    state, [event, *_] = made.play(start)
    assert event["participants"] == ([] if wrong is None else [drawn])
    assert event["returned"] == []
    assert not torch.equal(state.average, start.average)
    assert int(state.strikes[drawn]) == (3 if wrong is None else 1)


def test_sites_get_the_same_terms_when_a_run_goes_on(folders: Path, tmp_path: Path) -> None:
    sim, terms = centre.prepare(config_of(folders, []))
    runs.create(tmp_path / "run", sim.config, {})
    assert centre.prepare(runs.read_config(tmp_path / "run"))[1] == terms


def test_new_sites_get_the_next_numbers_and_a_wrong_keys_folder_is_refused(
    folders: Path, tmp_path: Path
) -> None:
    config = centre.prepare(config_of(folders, []))[0].config
    runs.create(tmp_path / "run", config, {"sites": ["bonn", "calais", "dover"]})
    assert roster.going_on(tmp_path / "run", config, ["bonn", "dover"], 2) == (
        config,
        ["bonn", "calais", "dover"],
    )
    more, names = roster.going_on(tmp_path / "run", config, ["aachen", "bonn", "calais", "dover"], 4)
    assert names == ["bonn", "calais", "dover", "aachen"]
    assert (more.split.users, more.federation.participants) == (4, 4)
    some = replace(config, federation=replace(config.federation, participants=2))
    assert roster.joined(some, 4).federation.participants == 2
    with pytest.raises(RunError, match="bonn, calais, dover"):
        roster.going_on(tmp_path / "run", config, ["essen", "fulda", "gent"], 3)
    private = replace(config, privacy=replace(config.privacy, clip=1.0, noise=1.0))
    with pytest.raises(RunError, match="aachen"):
        roster.going_on(tmp_path / "run", private, ["aachen", "bonn"], 2)


def test_terms_are_not_filled_up_with_a_sites_own_idea_of_the_method(folders: Path) -> None:
    _, terms = centre.prepare(config_of(folders, ["method.name=anchored"]))
    assert wire.read_terms(terms).config.federation.slow_average == 0.99
    older = terms.replace("slow_average = 0.99\\n", "")
    assert older != terms
    assert wire.read_terms(older).config.federation.slow_average == FederationSettings.slow_average == 0
    # the method's own settings have no other defaults than its own
    older = terms.replace('pace = \\"classes\\"\\n', "")
    assert older != terms
    with pytest.raises(DataError, match=r"method\.pace"):
        wire.read_terms(older)


def test_who_comes_back_before_it_was_missed_is_let_in_later(
    folders: Path, hall: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(deploy_sites, "SOON", 0.1)
    made, grid, lines = hall(config_of(folders, []))
    assert len(made.fleet.gather()) == 3
    grid.sites[99] = grid.sites[55]  # bonn again, as a node of its own, while the old one still counts
    made.fleet.asked = True
    made.fleet.connected()
    assert any(line.startswith("bonn may not join") for line in lines)
    del grid.sites[55]
    time.sleep(0.2)
    made.fleet.connected()
    assert made.fleet.connected()[1] == 99


def test_what_a_site_says_of_its_images_weighs_nothing(folders: Path, hall: Open) -> None:
    honest, _ = played(hall(config_of(folders, METHODS["grouping"]))[0])
    made, grid, _ = hall(config_of(folders, METHODS["grouping"]))

    def boast(node: int, reply: Message) -> Message:
        if node == 55:
            told = dict(reply.content.metric_records["metrics"]) | {"images": 10**12}
            reply.content["metrics"] = MetricRecord(told)
        return reply

    grid.spoil = boast
    lied, _ = played(made)
    assert made.fleet.images["bonn"] == 10**12
    assert same(lied, honest)


def test_a_site_that_fails_says_why(folders: Path, hall: Open) -> None:
    made, grid, lines = hall(config_of(folders, []))

    def spoil(node: int, reply: Message) -> Message:
        if node != 66 or "model" not in reply.content:
            return reply
        return make_message(metadata=reply.metadata, error=Error(0, "no disk"))

    grid.spoil = spoil
    _, [event] = made.play(made.initial())
    assert event["returned"] == [0, 1]
    assert any("calais" in line and "no disk" in line for line in lines)


@pytest.mark.parametrize("error", [
    OSError(28, "No space left", "/home/a/ward-7/cache"), ValueError("ward-7 is odd"),
    DataError("ward-7/scan.png: damaged"), None,
])  # fmt: skip
def test_what_a_site_calls_its_files_stays_there(
    error: Exception | None, folders: Path, hall: Open, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    made, grid, lines = hall(config_of(folders, []))
    own = tmp_path / "ward-7"
    own.mkdir()
    for number in range(3):
        Image.new("L", (8, 8), number).save(own / f"{number}.png")
    grid.sites[55].images = ImageFiles(sorted(own.iterdir()))
    made.fleet.gather()  # it has joined
    (own / "1.png").write_bytes(b"no image any more")
    if error is not None:

        def fail(*args: Any) -> Any:
            raise error

        monkeypatch.setattr(grid.sites[55], "train", fail)
    _, events = made.play(made.initial())
    [event] = events
    assert event["returned"] == [0, 2]
    assert "ward-7" not in "\n".join(lines) + json.dumps(events)
    [line] = [line for line in lines if line.startswith("bonn answered with an error")]
    kind = "1 of its 3 images" if error is None else type(error).__name__
    assert kind in line
    assert "ward-7" in capsys.readouterr().out  # the site itself says which file


def test_a_round_goes_on_with_a_quorum_and_names_who_is_missing(folders: Path, hall: Open) -> None:
    made, grid, lines = hall(config_of(folders, []))
    state, _ = made.play(made.initial())
    grid.absent = {66}
    state, [event] = made.play(state)
    assert event["participants"] == event["returned"] == [0, 1]
    assert event["missing"] == ["calais"]
    assert sum("calais" in line and "not in this round" in line for line in lines) == 1
    lines.clear()
    state, _ = made.play(state)
    assert not any("calais" in line for line in lines)  # once is enough
    grid.absent = set()
    _, [event] = made.play(state)
    assert event["returned"] == [0, 1, 2]
    assert "missing" not in event


@pytest.mark.parametrize(("quorum", "sites", "least"), [
    (None, 1, 1), (None, 2, 2), (None, 3, 2), (None, 4, 3), (None, 10, 7), (1, 10, 1), (5, 3, 3),
])  # fmt: skip
def test_the_quorum_is_two_thirds_and_at_least_two(quorum: int | None, sites: int, least: int) -> None:
    made = fleet.Fleet(
        grid=Hall({}), names=[], needed=10, deadline=1.0, patience=1.0, tell=print, quorum=quorum
    )
    assert made.least(sites) == least
    # whoever begins with fewer sites goes on with as few
    assert dataclasses.replace(made, needed=1, quorum=None).least(3) == 1


def test_too_few_sites_are_waited_for_but_not_for_ever(folders: Path, hall: Open) -> None:
    made, grid, lines = hall(config_of(folders, []))
    state, _ = made.play(made.initial())
    grid.absent = {55, 66}
    with pytest.raises(RunError, match="bonn, calais"):
        made.play(state)
    assert any(line.startswith("waiting: 1 of 2 sites") and "bonn, calais" in line for line in lines)
    made.fleet.quorum = 1
    _, [event] = made.play(state)
    assert event["participants"] == event["returned"] == [0]


def test_before_the_first_round_everybody_is_waited_for_as_long_as_there_is_patience(
    folders: Path, hall: Open
) -> None:
    made, grid, lines = hall(config_of(folders, []))
    grid.absent = {66}
    assert list(made.fleet.gather(first=True)) == [0, 1]
    assert any(line.startswith("waiting: 2 of 3 sites") and "calais" in line for line in lines)
    grid.absent = {55, 66}
    with pytest.raises(RunError):
        made.fleet.gather(first=True)


def test_an_unchanged_line_is_repeated_ever_more_seldom(
    folders: Path, hall: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Clock:
        passed = 0.0

        def monotonic(self) -> float:
            return self.passed

        def sleep(self, seconds: float) -> None:
            self.passed += seconds

    monkeypatch.setattr(fleet, "time", Clock())
    made, grid, lines = hall(config_of(folders, []), patience=4000.0)
    grid.absent = {55, 66, 77}
    with pytest.raises(RunError):
        made.fleet.gather(first=True)
    waiting = [line for line in lines if line.startswith("waiting: ")]
    assert 5 < len(waiting) < 15


def test_sites_that_name_themselves_may_come_one_after_another(folders: Path, hall: Open) -> None:
    made, grid, _ = hall(config_of(folders, []))
    made.fleet.names, made.fleet.asked = [], True
    grid.absent = {55, 66}
    with pytest.raises(RunError):
        made.fleet.gather(first=True)  # one of three is not enough, though no other name is known
    grid.absent = set()
    assert list(made.fleet.gather(first=True)) == [0, 1, 2]


@pytest.mark.parametrize(("name", "needed"), [("dover", 2), ("a b", 3), ("x" * 64, 3), ("bonn", 3)])
def test_a_site_without_a_key_is_told_that_it_may_not_join(
    name: str, needed: int, folders: Path, hall: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    made, grid, lines = hall(config_of(folders, []), needed=needed)
    dropped: list[int] = []
    made.fleet.names, made.fleet.asked, made.fleet.exclude = [], True, dropped.extend
    grid.sites[66].name = name
    made.fleet.connected()
    if name == "bonn":  # the other bonn may be gone without the centre knowing it yet
        assert grid.sites[66].unfit is None
        monkeypatch.setattr(deploy_sites, "TAKEN", 0.0)
        monkeypatch.setattr(made.fleet, "_rejected", {})
        made.fleet.connected()
    assert made.fleet.names == ["aachen", "bonn"]
    assert dropped == [66]
    one = grid.sites[66]
    assert one.done
    assert one.unfit is not None
    assert name in str(one.unfit)
    told = [line for line in lines if "may not join" in line]
    made.fleet.connected()
    assert [line for line in lines if "may not join" in line] == told  # it is not asked again
    assert not grid.sites[55].done


@pytest.mark.parametrize("late", [{55, 66, 77}, {55, 66}])
def test_a_round_in_which_sites_are_late_is_repeated(late: set[int], folders: Path, hall: Open) -> None:
    config = config_of(folders, METHODS["grouping"])
    made, grid, lines = hall(config, patience=60)
    calls: dict[int, int] = dict.fromkeys(late, 0)

    def spoil(node: int, reply: Message) -> Message | None:
        if node in late and "model" in reply.content:
            calls[node] += 1
            return None if calls[node] == 2 else reply  # in the second round
        return reply

    grid.spoil = spoil
    state, events = played(made)
    numbers = sorted({77: 0, 55: 1, 66: 2}[node] for node in late)
    assert [event.get("asked_again", []) for event in events] == [[], numbers, []]
    assert all(event["returned"] == event["participants"] == [0, 1, 2] for event in events)
    assert same(state, simulated(config, folders))
    assert any(line.startswith("round 2: ") for line in lines)


def test_trouble_on_the_way_is_waited_out(folders: Path, hall: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    config = config_of(folders, [])
    made, grid, lines = hall(config, patience=60)
    for name in ("get_nodes", "push_messages", "pull_messages"):
        stock, left = getattr(grid, name), [1, 4]

        def shaky(*given: Any, stock: Any = stock, left: list[int] = left) -> Any:
            """Fails once, works four times, fails once."""
            left[0] -= 1
            if left[0] == 0:
                left[0] = left[1] + 1
                left[1] = 10**9
                raise httpx.ConnectTimeout("timed out")
            return stock(*given)

        monkeypatch.setattr(grid, name, shaky)
    monkeypatch.setattr(deploy_sites, "SOON", 0.1)
    assert len(made.fleet.gather(first=True)) == 3
    state, _ = played(made)
    assert same(state, simulated(config, folders))
    assert any("(timed out): trying again" in line for line in lines)
    assert any(line.endswith("could not be sent: timed out") for line in lines)


def test_nobody_at_all_stops_the_run_after_the_patience(folders: Path, hall: Open) -> None:
    made, grid, _ = hall(config_of(folders, []), deadline=0.5)
    grid.spoil = lambda node, reply: None if "model" in reply.content else reply
    with pytest.raises(RunError, match="round 1"):
        made.play(made.initial())


def test_sites_check_what_they_are_asked(folders: Path, hall: Open) -> None:
    made, _, _ = hall(config_of(folders, []))
    good = json.loads(made.terms)
    assert str(folders) not in made.terms  # where the centre keeps its images is its own affair
    for key, value in [("shape", [1, 8, 10**6]), ("mean", [float("nan")]), ("std", [0.0]), ("classes", 1),
                       ("shape", "8"), ("config", "[run]\nseed = -1"), ("config", "x")]:  # fmt: skip
        with pytest.raises(SsflError):
            wire.read_terms(json.dumps(good | {key: value}))
    with pytest.raises(DataError):
        wire.read_terms("hello")
    one = site.Site("aachen", ImageFiles(files(folders, "aachen")), "cpu", 1)
    with pytest.raises(SsflError):
        one.simulation(made.terms, 3)


@pytest.mark.parametrize("setting", ["method.name=supervised", "train.momentum_policy=user",
                                     "train.precision=float64", "federation.dropout=0.5",
                                     "method.name=semifl", "method.name=fl2", "method.name=rscfed",
                                     "method.name=cbafed", "method.name=fedmatch",
                                     "method.name=server-only"])  # fmt: skip
def test_what_real_sites_cannot_do_is_refused(setting: str, folders: Path) -> None:
    config = load_config("own", [f"data.path={folders / 'labelled'}", setting])
    key, _, value = setting.partition("=")
    with pytest.raises(ConfigError) as caught:
        centre.prepare(config)
    assert (caught.value.key, str(caught.value.value)) == (key, value)
    # and doing what it says helps
    assert caught.value.fix is not None
    assert caught.value.fix.partition("=")[0] == key
    centre.prepare(load_config("own", [f"data.path={folders / 'labelled'}", caught.value.fix]))


# Keys


def test_keys_are_private_and_never_overwritten(tmp_path: Path) -> None:
    folder = tmp_path / "keys"
    keys.init(folder, ["fl.example.org", "10.1.2.3"])
    handed = keys.add(folder, "aachen")
    for file in folder.iterdir():
        assert stat.S_IMODE(file.stat().st_mode) == 0o600, file
    before = {file: file.read_bytes() for file in folder.iterdir()}
    with pytest.raises(SsflError, match="keys"):
        keys.init(folder, [])
    with pytest.raises(SsflError, match="keys"):
        keys.add(folder, "aachen")
    assert {file: file.read_bytes() for file in folder.iterdir()} == before
    read = keys.read_site(handed)
    assert read.name == "aachen"
    assert read.private.public_key() == keys.sites(folder)["aachen"]
    from cryptography import x509

    certificate = x509.load_pem_x509_certificate((folder / "centre.crt").read_bytes())
    names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    assert names.get_values_for_type(x509.DNSName) == ["fl.example.org", "localhost"]
    assert [str(a) for a in names.get_values_for_type(x509.IPAddress)] == ["10.1.2.3", "127.0.0.1"]


def test_a_host_is_added_to_the_certificate_and_site_files_stay_valid(tmp_path: Path, ssfl: Call) -> None:
    code, out, _ = ssfl("keys", "init")
    assert code == 0
    assert "localhost" in out  # for other machines it must be made with --host
    assert "--host" in out
    folder = tmp_path / "keys"
    keys.add(folder, "aachen")
    before = {file: file.read_bytes() for file in folder.iterdir()}
    code, _, err = ssfl("keys", "init")
    assert code == 2
    assert "--host" in err  # the certificate alone, or everything
    assert "ssfl keys add" in err
    for host in ("localhost", "127.0.0.1", "fl.example.org", "::1"):
        code, out, _ = ssfl("keys", "init", "--host", host)
        assert code == 0
        assert host in out
    (folder / "aachen.pub").rename(tmp_path / "aachen.pub")
    code, out, _ = ssfl("keys", "list")
    assert (code, "ssfl keys add" in out) == (0, True)
    (tmp_path / "aachen.pub").rename(folder / "aachen.pub")
    keys.add(folder, "bonn")
    (folder / "aachen.site").rename(tmp_path / "sent")
    code, out, _ = ssfl("keys", "list")
    first, second, certificate = out.splitlines()
    assert code == 0
    assert first == "aachen"
    assert second.startswith("bonn ")
    assert ".site" in second
    assert all(host in certificate for host in ("localhost", "127.0.0.1", "fl.example.org", "::1"))
    from cryptography import x509

    made = x509.load_pem_x509_certificate((folder / "ca.crt").read_bytes())
    assert f"{made.not_valid_after_utc:%Y-%m-%d}" in certificate
    keys.revoke(folder, "bonn")
    (tmp_path / "sent").rename(folder / "aachen.site")
    after = {file: file.read_bytes() for file in folder.iterdir()}
    assert [file.name for file in after if before.get(file) != after[file]] == ["centre.crt"]
    assert stat.S_IMODE((folder / "centre.crt").stat().st_mode) == 0o600
    authority = keys.read_site(folder / "aachen.site").authority.decode()
    for host, good in {"localhost": True, "fl.example.org": True, "::1": True, "example.org": False}.items():
        assert shakes_hands(folder, authority, host) == good
    with pytest.raises(SsflError, match="https://"):
        keys.add_hosts(folder, ["https://fl.example.org"])
    (folder / "ca.key").write_text("nonsense")
    with pytest.raises(SsflError, match=r"ca\.key"):
        keys.add_hosts(folder, ["other.example.org"])
    assert (folder / "centre.crt").read_bytes() == after[folder / "centre.crt"]


def shakes_hands(folder: Path, authority: str, host: str) -> bool:
    """Whether a site with this authority trusts the centre with this keys folder under this name."""
    server = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    server.load_cert_chain(folder / "centre.crt", folder / "centre.key")
    trust = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    trust.load_verify_locations(cadata=authority)
    there, back = ssl.MemoryBIO(), ssl.MemoryBIO()
    ends = (
        trust.wrap_bio(back, there, server_hostname=host),
        server.wrap_bio(there, back, server_side=True),
    )
    for _ in range(3):
        for end in ends:
            try:
                end.do_handshake()
            except ssl.SSLWantReadError:
                continue
            except ssl.SSLCertVerificationError:
                return False
    return True


def test_a_certificate_that_expires_soon_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    keys.init(tmp_path / "keys", [])
    assert keys.check_dates(tmp_path / "keys") == ""
    expires = datetime.now(UTC) + timedelta(days=365 * certificates.YEARS - 1)

    class Later(datetime):
        @classmethod
        def now(cls, tz: Any = None) -> "Later":
            return cls.fromtimestamp((expires - timedelta(days=29)).timestamp(), tz)

    monkeypatch.setattr(keys, "datetime", Later)
    warning = keys.check_dates(tmp_path / "keys")
    assert f"{expires:%Y-%m-%d}" in warning
    assert "ssfl keys init" in warning


def test_without_a_keys_folder_the_advice_is_to_make_one(folders: Path, ssfl: Call) -> None:
    code, _, err = ssfl("serve", "--data", str(folders / "labelled"), "--keys", "keys")
    assert code == 2
    assert "ssfl keys init" in err


def test_a_key_is_revoked_or_replaced(tmp_path: Path) -> None:
    folder = tmp_path / "keys"
    keys.init(folder, [])
    for name in ("aachen", "bonn"):
        keys.add(folder, name)
    lines: list[str] = []
    renewed: list[tuple[str, Any]] = []
    there = fleet.Fleet(
        grid=Hall({}), names=["aachen", "bonn"], needed=2, deadline=1.0, patience=1.0, tell=lines.append
    )
    before = keys.sites(folder)
    watch = key_changes.Watch(folder, before, set(), there, lambda *given: renewed.append(given))
    watch.look()
    assert (renewed, lines) == ([], [])
    keys.revoke(folder, "bonn")
    keys.replace(folder, "aachen")
    keys.add(folder, "calais")
    watch.look()
    now = keys.sites(folder)
    assert now["aachen"] != before["aachen"]
    assert renewed == [("aachen", now["aachen"]), ("bonn", None)]
    assert there.left_out == {"bonn"}
    assert sum("calais" in line for line in lines) == 1
    keys.revoke(folder, "calais")  # it was never in the run
    watch.look()
    assert sum("calais" in line for line in lines) == 1
    keys.add(folder, "bonn")  # and given back
    watch.look()
    assert there.left_out == set()
    with pytest.raises(SsflError, match="dover"):
        keys.revoke(folder, "dover")


def test_wrong_names_and_files_are_told_in_one_line(tmp_path: Path) -> None:
    with pytest.raises(SsflError, match="ssfl keys init"):
        keys.add(tmp_path / "none", "aachen")
    with pytest.raises(SsflError, match=r"https://fl\.example\.org"):
        keys.init(tmp_path / "keys", ["https://fl.example.org"])
    keys.init(tmp_path / "keys", [])
    for name in ("../aachen", "ca", "", "a b"):
        with pytest.raises(SsflError):
            keys.add(tmp_path / "keys", name)
    (tmp_path / "x.site").write_text("name = 'x'")
    with pytest.raises(SsflError, match=r"x\.site"):
        keys.read_site(tmp_path / "x.site")
    (tmp_path / "keys" / "x.pub").write_text("ssh-rsa nonsense")
    with pytest.raises(SsflError, match=r"x\.pub"):
        keys.sites(tmp_path / "keys")


# Real processes


def test_a_federation_ends_with_the_bytes_of_a_simulation(folders: Path, ring: Path, stage: Stage) -> None:
    port, out = free_port(), stage.folder / "run"
    serve = stage.serve(folders, ring, port, "--share-model", *sets(*METHODS["grouping"]))
    joins = {
        name: stage.join(name, port, folders, ring, "--keep", f"{name}-model") for name in reversed(NAMES)
    }
    assert stage.ended(serve) == 0, stage.said("serve")
    for name, process in joins.items():
        assert stage.ended(process) == 0, stage.said(name)
        assert "all 3 rounds" in stage.said(name)
    state = checkpoint(out)
    assert same(state, simulated(config_of(folders, METHODS["grouping"]), folders))
    # the run folder is like any other
    summary, parts = (json.loads((out / name).read_text()) for name in ("summary.json", "split.json"))
    assert parts["sites"] == list(NAMES)
    assert parts["sizes"] == [len(files(folders, name)) for name in NAMES]
    assert summary["bytes_up"] == summary["bytes_down"] == 3 * 3 * 4 * state.average.numel()
    assert len(predict(out, [folders / "bonn"])) == parts["sizes"][1]
    [page_file] = page.write([out])
    assert page_file.stat().st_size > 10_000
    with pytest.raises(ConfigError, match="ssfl serve --resume"):
        assemble.make(runs.read_config(out))
    # what travelled is the models, and little else
    for event in runs.read_events(out):
        if event["event"] == "round":
            for way in ("up", "down"):
                assert 0 <= event[f"wire_{way}"] - event[f"bytes_{way}"] < 3 * 8192
    # each site has the same model, and its card does not tell where the centre keeps its images
    for name in NAMES:
        kept = stage.folder / f"{name}-model.safetensors"
        model = load_model(kept)
        own = load_model(out)
        assert all(torch.equal(a, b) for a, b in zip(model.parameters(), own.parameters(), strict=True))
        card = json.loads(kept.with_suffix(".json").read_text())
        assert card["classes"] == list(own.classes)
        assert str(folders) not in json.dumps(card)
        assert len(predict(kept, [folders / name])) == len(files(folders, name))


def test_insecure_is_for_this_machine_alone(folders: Path) -> None:
    asked = ["join", "127.0.0.1:8443", "--insecure", "--data", str(folders / "Klinik Ä")]
    with pytest.raises(ConfigError, match=r"'Klinik Ä'.*--name"):
        main.app(asked, standalone_mode=False)
    asked = ["join", "10.0.0.1:8443", "--insecure", "--data", str(folders / "bonn")]
    with pytest.raises(ConfigError, match=r"10\.0\.0\.1.*--key"):
        main.app(asked, standalone_mode=False)
    with pytest.raises(ConfigError, match="--insecure"):
        main.app(["serve", "--data", str(folders / "labelled")], standalone_mode=False)


def test_a_site_names_what_it_cannot_read_and_goes_on_with_the_rest(folders: Path, tmp_path: Path) -> None:
    good, broken, empty = (tmp_path / name for name in ("good.png", "broken.png", "empty.jpg"))
    Image.new("L", (8, 8), 7).save(good)
    broken.write_bytes(good.read_bytes()[:40])
    empty.write_bytes(b"")
    lines: list[str] = []
    assert images.usable([broken, empty, good], lines.append) == [good]
    assert len(lines) == 2
    assert str(broken) in lines[0]
    assert str(empty) in lines[1]
    with pytest.raises(DataError):
        images.usable([broken, empty], lines.append)
    lines.clear()
    with pytest.raises(DataError, match="nope"):
        images.usable([tmp_path / "nope"], lines.append)
    assert lines == []


def test_a_site_says_that_its_images_are_brighter_than_the_centres(tmp_path: Path) -> None:
    deep = np.random.default_rng(1).integers(0, 4_000, (12, 8, 8), dtype=np.uint16)
    deep[11, 0, 0] = 60_000
    names = [*(f"labelled/{'ab'[number % 2]}/{number}.png" for number in range(10)), "10.png", "11.png"]
    for name, pixels in zip(names, deep, strict=True):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(pixels).save(tmp_path / name)
    lines: list[str] = []
    there = site.Site(
        "aachen", ImageFiles([tmp_path / "10.png", tmp_path / "11.png"]), "cpu", 1, lines.append
    )
    there.simulation(centre.prepare(config_of(tmp_path, []))[1], 0)
    [line] = lines
    assert line.startswith("1 of 2 images")


def test_the_live_view_says_when_the_centre_plays_alone(folders: Path, hall: Open) -> None:
    made, _, _ = hall(config_of(folders, ["federation.head_start=0.4"]))
    console = Console(file=io.StringIO(), width=150)
    shown, state = view.FederationView(console), made.initial()
    for _ in range(2):
        state, events = made.play(state)
        for event in events:
            shown.report(event | {"seconds": 1.0})
    first, second = console.file.getvalue().splitlines()[:2]  # type: ignore[attr-defined]
    assert "round 1/0  the centre alone  1.0 s" in first
    assert "round 2/0  3 of 3 sites  loss " in second


def test_the_live_view_shows_sites_round_accuracy_and_refusals(folders: Path, hall: Open) -> None:
    made, grid, _ = hall(config_of(folders, []))
    spoilt = WRONG["not a number"][0]
    grid.spoil = lambda node, reply: spoilt(reply) if node == 55 and "model" in reply.content else reply
    console = Console(record=True, width=150, file=io.StringIO(), force_terminal=True)
    shown = view.FederationView(console)
    shown.watch(made.fleet, made.rounds)
    made.fleet.tell = shown.tell
    state, events = made.play(made.initial())
    for event in [*events, made.evaluate(state)]:
        shown.report(event | {"seconds": 1.0})
    grid.absent = {66}
    made.fleet.connected()
    shown.tell("a stranger's \x1b[31mcolours")
    console.print(shown.table())
    text = console.export_text()
    assert "round 1 of 3" in text
    assert "on held-out labels" in text
    assert "refused: bonn sent " in text
    rows = {name: [line for line in text.splitlines() if line.startswith(f"│ {name}")] for name in NAMES}
    assert "answered" in rows["aachen"][0]
    assert "not finite" in rows["bonn"][0]
    assert "disconnected" in rows["calais"][0]
    assert "?[31mcolours" in text


OWN = """
from torch import nn
def make():
    frozen = nn.Conv2d(1, 4, 3).requires_grad_(False)
    return nn.Sequential(frozen, nn.ReLU(), nn.Dropout(0.1), nn.Flatten(), nn.LazyLinear(10))
"""


def test_sites_bring_the_same_network_or_none(
    folders: Path, hall: Open, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(outside, "_trusted", set())
    Path("mine.py").write_text(OWN)
    config = config_of(folders, ["method.name=alternate", "model.name=mine.py:make", "federation.rounds=2"])
    made, grid, _ = hall(config)
    state, events = played(made)
    assert same(state, simulated(config, folders))
    assert events[0]["bytes_up"] == 3 * 4 * 1450  # 10 × (4 × 6 × 6) weights and 10 biases; no frozen one
    one = grid.sites[55]
    one._ready.clear()
    monkeypatch.setattr(outside, "_trusted", set())
    with pytest.raises(SsflError, match="--with"):
        one.simulation(made.terms, 1)
    outside.supply(["mine.py"])
    Path("mine.py").write_text(OWN + "# another\n")
    with pytest.raises(DataError, match=r"mine\.py:make"):
        one.simulation(made.terms, 1)
    monkeypatch.setattr(outside, "digest", lambda name: json.loads(made.terms)["outside"]["model.digest"])
    Path("mine.py").write_text(OWN.replace("make():", "make():\n    nn.Conv2d(1, 1, 1)"))
    monkeypatch.setattr(outside, "_loaded", {})
    with pytest.raises(DataError, match="frozen"):
        one.simulation(made.terms, 1)

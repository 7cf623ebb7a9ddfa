"""A round, with trainers simple enough to follow by hand."""

from dataclasses import replace

import pytest
import torch

from hand_rounds import play
from ssfl.core.cohort import Cohort, draw_cohort
from ssfl.engines.work import TrainedRows
from ssfl.federation import Method, State
from ssfl.methods.alternate import Alternate
from ssfl.methods.anchored import Anchored
from ssfl.methods.grouping import Grouping
from ssfl.simulate.scoring import ModelScore


def state(streams: list[float], momentum: int = 0) -> State:
    rows = torch.tensor(streams, dtype=torch.float64)[:, None]
    return State(5, rows, rows.mean(0), torch.zeros(momentum, 1, dtype=torch.float64))


def add(amounts: list[float], sent: list[float] | None = None):  # type: ignore[no-untyped-def]
    """A trainer that adds to each row and notes what it was sent; momentum counts the visits."""

    def train(rows: torch.Tensor, momentum: torch.Tensor, part: slice) -> TrainedRows:
        if sent is not None:
            sent.extend(rows.flatten().tolist())
        more = torch.tensor(amounts, dtype=torch.float64)[part, None]
        return TrainedRows(rows + more, momentum + 1, {"loss": more.flatten()})

    return train


GROUPED = Cohort((0, 1, 2, 3), (0, 1, 2, 3), ((0, 2), (1, 3)), (0, 1, 0, 1), (3, 2, 1, 0))
PAIR = Cohort((0, 1), (0, 1), ((0, 1),), (0, 0), (0, 1))
SERVERS: dict[str, tuple[Method, bool]] = {
    "parallel": (Grouping(), True),
    "alternate": (Alternate(), True),
    "none": (Grouping(), False),
    "alternate, none": (Alternate(), False),
}
"""When the server trains: the method, and whether it has labels."""


def test_users_start_from_their_groups_stream_and_the_server_from_the_mean() -> None:
    sent: list[float] = []
    new, fed = play(Grouping(), state([10, 20]), GROUPED, add([1, 2, 3, 4], sent), add([30]))
    assert sent == [10, 20, 10, 20]
    assert fed.log.server_sent is not None
    assert fed.log.server_sent.item() == 15
    # w_s = 45; stream 1 = (45 + 11 + 13) / 3; stream 2 = (45 + 22 + 24) / 3
    assert new.streams.flatten().tolist() == pytest.approx([23, 91 / 3])
    assert new.average.item() == pytest.approx((23 + 91 / 3) / 2)
    assert new.round == 6


def test_a_groups_members_are_whoever_is_dealt_there() -> None:
    moved = Cohort((0, 1), (0, 1), ((1,), (0,)), (1, 0))
    sent: list[float] = []
    play(Grouping(), state([10, 20]), moved, add([0, 0], sent), add([0]))
    assert sent == [20, 10]


@pytest.mark.parametrize("server", SERVERS)
def test_users_may_train_a_few_at_a_time(server: str) -> None:
    start = state([10, 20], momentum=5)
    method, labels = SERVERS[server]
    (whole, told), (parts, told_in_parts) = (
        play(
            method, start, GROUPED, add([1, 2, 3, 4]), add([30]) if labels else None, at_once=at_once,
            keep=True,
        )
        for at_once in (None, 3)
    )  # fmt: skip
    assert torch.allclose(whole.streams, parts.streams)
    assert torch.equal(whole.momentum, parts.momentum)
    assert told.log.users is not None
    assert told_in_parts.log.users is not None
    losses = [fed.log.users.metrics["loss"].tolist() for fed in (told, told_in_parts) if fed.log.users]
    assert losses == [[1, 2, 3, 4], [1, 2, 3, 4]]
    for moved in (told.log.users, told_in_parts.log.users):
        assert moved.updates is not None
        assert moved.updates.flatten().tolist() == moved.norms.tolist() == [1, 2, 3, 4]


def test_alternate_averages_users_and_then_trains_the_average() -> None:
    new, fed = play(Alternate(), state([10]), PAIR, add([2, 4]), add([100]))
    assert fed.log.server_sent is not None
    assert fed.log.server_sent.item() == 13
    assert new.average.item() == 113
    assert new.streams.tolist() == [[113]]


@pytest.mark.parametrize(("best", "average", "alone"), [(0.9, 113, False), (0.91, 110, True)])
def test_a_guarded_server_goes_on_without_users_who_would_undo_its_labels(
    best: float, average: float, alone: bool
) -> None:
    start = replace(
        state([10], momentum=3),
        memory={"best": torch.tensor([best]), "velocity": torch.zeros(1, 1, dtype=torch.float64)},
    )
    new, fed = play(
        Anchored(momentum=0.5), start, PAIR, add([2, 4]), add([100]),
        judged=lambda row: ModelScore(0.95, 0.0, [0.95, 0.95]),  # 0.45 above chance
    )  # fmt: skip
    assert bool(fed.log.metrics["alone"]) is alone
    assert new.momentum.flatten().tolist() == (
        [0, 0, 1] if alone else [1, 1, 1]
    )  # nobody trained but the server
    assert new.average.item() == average
    assert new.memory["best"].item() == pytest.approx(best)
    assert new.memory["velocity"].item() == (0 if alone else 3)


def test_without_a_server_the_mean_is_over_users_alone() -> None:
    new, fed = play(Grouping(), state([10, 20]), GROUPED, add([1, 2, 3, 4]))
    assert fed.log.server is None
    assert new.streams.flatten().tolist() == [12, 23]


@pytest.mark.parametrize(
    ("server", "expected"), [("parallel", 16), ("alternate", 16), ("none", 15), ("alternate, none", 15)]
)
def test_a_round_in_which_nobody_comes_back(server: str, expected: float) -> None:
    gone = Cohort((0, 1), (), ((), ()), ())
    method, labels = SERVERS[server]
    new, fed = play(method, state([10, 20]), gone, add([]), add([1]) if labels else None)
    assert fed.log.users is None
    assert new.average.item() == expected


def test_the_servers_share_can_be_given() -> None:
    new, _ = play(Grouping(server_weight=0.25), state([0]), PAIR, add([1, 3]), add([10]))
    assert new.average.item() == pytest.approx(0.25 * 10 + 0.75 * 2)


def test_momentum_is_kept_in_its_slots_and_resets_without_any() -> None:
    cohort = Cohort((1, 3), (1, 3), ((0, 1),), (0, 0), (1, 3))
    kept = state([0], momentum=5)
    for _ in range(2):
        kept, _ = play(Grouping(), kept, cohort, add([1, 1]), add([1]))
    assert kept.momentum.flatten().tolist() == [0, 2, 0, 2, 2]
    # nothing kept: trainers see zeros of the weights' length
    seen: list[torch.Tensor] = []

    def look(rows: torch.Tensor, momentum: torch.Tensor, part: slice) -> TrainedRows:
        seen.append(momentum)
        return TrainedRows(rows, momentum + 1, {})

    once = state([0])
    for _ in range(2):
        once, _ = play(Grouping(), once, cohort, look, look)
    assert [m.flatten().tolist() for m in seen] == [[0, 0], [0], [0, 0], [0]]


def test_statistics_can_be_the_servers_own() -> None:
    cohort = Cohort((0,), (0,), ((0,),), (0,))
    rows = torch.tensor([[1.0, 2.0, 3.0]])
    start = State(0, rows, rows[0], torch.zeros(0, 2))

    def move(by: float):  # type: ignore[no-untyped-def]
        return lambda rows, momentum, part: TrainedRows(rows + by, momentum, {})

    new, _ = play(Grouping(), start, cohort, move(10), move(20), weights=2, norm_statistics="server")
    assert new.average.tolist() == [16, 17, 23]
    assert new.streams.tolist() == [[16, 17, 23]]


def test_a_round_leaves_its_state_alone() -> None:
    before = state([10, 20], momentum=5)
    copies = [t.clone() for t in (before.streams, before.average, before.momentum)]
    play(Grouping(), before, GROUPED, add([1, 2, 3, 4]), add([3]), norm_statistics="server")
    for kept, now in zip(copies, (before.streams, before.average, before.momentum), strict=True):
        assert torch.equal(kept, now)


def cohort(round: int, **changes: float) -> Cohort:
    settings = {"seed": 1, "users": 20, "participants": 7, "groups": 3, "dropout": 0.0} | changes
    return draw_cohort(round, **settings)  # type: ignore[arg-type]


def test_cohorts_are_drawn_without_replacement_and_dealt_evenly() -> None:
    seen = [0] * 20
    partners = set()
    for round in range(400):
        drawn = cohort(round)
        assert len(set(drawn.users)) == 7
        assert sorted(len(group) for group in drawn.groups) == [2, 2, 3]
        for user in drawn.users:
            seen[user] += 1
        partners.add(drawn.groups)
    assert min(seen) > 100
    assert max(seen) < 180
    assert len(partners) > 100


def test_everybody_takes_part_when_c_is_k_but_groups_still_change() -> None:
    everybody = [cohort(round, participants=20) for round in range(5)]
    assert all(drawn.users == tuple(range(20)) for drawn in everybody)
    assert len({drawn.groups for drawn in everybody}) == 5


def test_a_slot_stays_in_its_group_and_is_nobodys_own() -> None:
    rounds = [cohort(round, participants=20, dropout=0.2) for round in range(20)]
    for drawn in rounds:
        assert [slot % 3 for slot in drawn.slots] == list(drawn.streams)
        assert len(set(drawn.slots)) == len(drawn.slots)
    assert len({drawn.slots[0] for drawn in rounds if drawn.users[0] == 0}) > 5


def test_some_do_not_come_back() -> None:
    rounds = [cohort(round, participants=20, dropout=0.3) for round in range(200)]
    returned = sum(len(drawn.users) for drawn in rounds) / 4000
    assert abs(returned - 0.7) < 0.03
    assert all(len(drawn.drawn) == 20 for drawn in rounds)
    assert cohort(0, dropout=1.0).users == ()
    # who else drops out changes nobody's group
    whole, part = cohort(3, participants=20), rounds[3]
    assert all(
        whole.streams[whole.users.index(user)] == stream
        for user, stream in zip(part.users, part.streams, strict=True)
    )

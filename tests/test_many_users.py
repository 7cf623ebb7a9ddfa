"""Any number of users: the quick dealing is the plain one, and what is stored does not grow with K."""

import hashlib
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import plain_split as plain
from benchmarks.users import generate
from ssfl.config.loading import Config, load_config
from ssfl.core.cohort import draw_cohort
from ssfl.data import apportion, inventory, split
from ssfl.data.hands import Hands, gather
from ssfl.errors import ConfigError
from ssfl.runs import assemble, resolve, text

LISTS = st.lists(st.lists(st.integers(0, 30), max_size=6), max_size=8)
MANY = 20_000


def labels_of(sizes: list[int]) -> np.ndarray:
    return np.random.default_rng(0).permutation(np.repeat(np.arange(len(sizes)), sizes))


def same(parts: split.Parts, server: np.ndarray, users: list[np.ndarray]) -> bool:
    hands, plainly = Hands.of(parts.users), Hands.of(users)
    return all(
        ours.tolist() == theirs.tolist()
        for ours, theirs in ((parts.server, server), (hands.flat, plainly.flat), (hands.edges, plainly.edges))
    )


@given(lists=LISTS)
def test_hands_read_like_a_list_of_arrays(lists: list[list[int]]) -> None:
    hands = Hands.of(lists)
    assert len(hands) == len(lists)
    assert [owned.tolist() for owned in hands] == lists
    assert [hands[place - len(lists)].tolist() for place in range(len(lists))] == lists
    assert [owned.tolist() for owned in hands[1::2]] == lists[1::2]
    assert hands.sizes.tolist() == [len(owned) for owned in lists]
    assert Hands.of(hands) is hands
    for outside in (len(lists), -len(lists) - 1):
        with pytest.raises(IndexError):
            hands[outside]


@given(lists=LISTS, kept=st.sets(st.integers(0, 30)))
def test_hands_are_filtered_renamed_and_gathered_owner_by_owner(
    lists: list[list[int]], kept: set[int]
) -> None:
    hands = Hands.of(lists)
    wanted = np.isin(np.arange(31), list(kept))
    assert [o.tolist() for o in hands.where(wanted)] == [[i for i in o if i in kept] for o in lists]
    assert [o.tolist() for o in hands.renamed(np.arange(31) * 7)] == [[7 * i for i in o] for o in lists]
    again = gather(hands.flat[::-1], hands.owners[::-1], len(lists))
    assert [o.tolist() for o in again] == [sorted(o) for o in lists]


@settings(max_examples=50)
@given(
    sizes=st.lists(st.integers(20, 60), min_size=2, max_size=6),
    users=st.integers(6, 70),
    server=st.integers(0, 12),
    seed=st.integers(0, 3),
    each=st.integers(1, 6),
)
def test_every_scheme_deals_as_the_plain_reading_does(
    sizes: list[int], users: int, server: int, seed: int, each: int
) -> None:
    labels, each = labels_of(sizes), min(each, len(sizes))
    at_server, pools = plain.pools_of(labels, server, seed)
    assert same(
        split.skewed(labels, users, 0.4, server, seed), *plain.skewed(labels, users, 0.4, server, seed)
    )
    assert same(split.iid(labels, users, server, seed), at_server, plain.deal(np.concatenate(pools), users))
    assert same(
        split.shards(labels, users, each, server, seed), *plain.shards(labels, users, each, server, seed)
    )
    table = np.random.default_rng(seed).integers(1, 5, (3, len(sizes)))
    weights = table[np.arange(users) % 3]
    shares = weights / weights.sum(0)
    assert same(
        split.mixture(labels, users, table.tolist(), server, seed), at_server, plain.hand_out(pools, shares)
    )


@pytest.mark.slow
def test_twenty_thousand_users_are_dealt_as_the_plain_reading_does() -> None:
    labels = labels_of([6000, 5000, 7000, 6001, 5999, 6000, 4000, 8000, 6000, 6000])
    at_server, pools = plain.pools_of(labels, 1000, 5)
    assert same(split.skewed(labels, MANY, 0.4, 1000, 5), *plain.skewed(labels, MANY, 0.4, 1000, 5))
    assert same(split.iid(labels, MANY, 1000, 5), at_server, plain.deal(np.concatenate(pools), MANY))
    assert same(split.shards(labels, MANY, 4, 1000, 5), *plain.shards(labels, MANY, 4, 1000, 5))
    assert same(split.dirichlet(labels, 900, 1.5, 1000, 5), *plain.dirichlet(labels, 900, 1.5, 1000, 5))


# Of the first code that dealt user by user; a seed in a paper must go on meaning the same images.
DEALT = {
    "skew": "b311f7dda2b9e8a6",
    "few": "88efc3239af093a6",
    "iid": "76ec3982ed092bf0",
    "dirichlet": "3b615ea186b95faa",
    "shards": "1b714f9297e64766",
    "mixture": "76e0a5e43f1edeaa",
    "labelled": "3dc64c8385e60737",
    "unlabelled": "5205b4b9159c4a5f",
}


@pytest.mark.parametrize("name", DEALT)
def test_a_seed_deals_what_it_always_dealt(name: str) -> None:
    labels = labels_of([90, 80, 130, 70, 60, 101, 69])
    mixtures = [[1, 0, 2, 1, 1, 0, 1], [0, 3, 1, 1, 0, 1, 1]]
    even = split.iid(labels, 23, 35, 2019)
    parts = {
        "skew": lambda: split.skewed(labels, 23, 1.0, 35, 2019),
        "few": lambda: split.skewed(labels, 3, 1.0, 35, 2019),
        "iid": lambda: even,
        "dirichlet": lambda: split.dirichlet(labels, 23, 1.0, 35, 2019),
        "shards": lambda: split.shards(labels, 23, 3, 35, 2019),
        "mixture": lambda: split.mixture(labels, 23, mixtures, 35, 2019),
        "labelled": lambda: split.label_some(labels, even, 50, 3),
        "unlabelled": lambda: split.deal_unlabelled(even, np.arange(600, 700), 3),
    }[name]()
    digest = hashlib.sha256()
    for owned in [parts.server, *parts.users, *(parts.labelled or [])]:
        digest.update(f"{owned.tolist()}".encode())
    assert digest.hexdigest()[:16] == DEALT[name]


@given(sizes=st.lists(st.integers(1, 3000), min_size=1, max_size=12), more=st.integers(0, 400))
def test_users_go_to_classes_one_after_another_by_deans_rule(sizes: list[int], more: int) -> None:
    users = len(sizes) + more
    assert apportion.main_classes(np.array(sizes), users)[1] == plain.dean(np.array(sizes), users)


@pytest.mark.parametrize(("users", "participants"), [(1, 1), (10, 10), (37, 5), (100_000, 100)])
def test_participants_are_those_of_the_least_hashes(users: int, participants: int) -> None:
    for round in range(5):
        drawn = draw_cohort(round, seed=3, users=users, participants=participants, groups=1, dropout=0).drawn
        assert list(drawn) == plain.cohort(3, round, users, participants)


def test_a_hopeless_dirichlet_is_refused() -> None:
    with pytest.raises(ConfigError) as caught:
        split.dirichlet(labels_of([10_000] * 4), MANY, 0.01)
    assert (caught.value.key, caught.value.value) == ("split.alpha", 0.01)


# Federations


@pytest.fixture(scope="module")
def many(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Config]:
    path = generate(tmp_path_factory.mktemp("many") / "many.npz", 3 * MANY)

    def make(*overrides: str) -> Config:
        settings = [f"data.path={path}", f"split.users={MANY}", "federation.participants=10",
                    "federation.rounds=1", "federation.period=1", "train.batch_size=4", "run.threads=1",
                    "run.device=cpu"]  # fmt: skip
        return load_config(None, [*settings, *overrides])

    return make


def test_a_simulation_of_many_users_holds_the_plain_split(many: Callable[..., Config]) -> None:
    sim = assemble.make(many())
    labels = sim.dataset.labels.numpy()
    server, users = plain.skewed(labels, MANY, 0.4, sim.config.split.server_labels or 0, 2019)
    assert same(sim.parts, server, users)
    for user in (0, 1, 777, MANY - 1):
        images = sim.plan.users.at(torch.tensor([user]), torch.arange(len(users[user]))[None])[0]
        assert images.tolist() == users[user].tolist()


def test_split_json_lists_some_users_and_tells_of_all(many: Callable[..., Config]) -> None:
    config = many("split.labels_at=both", "split.user_labels=200")
    dataset = resolve.load_data(config)
    config = resolve.resolve(config, dataset)
    parts, held = resolve.make_parts(config, dataset)
    told = inventory.describe_split(dataset, parts, held)
    counts = split.class_counts(dataset.labels.numpy(), parts.users)
    assert told["users"] == MANY
    assert told["listed"] == len(told["sizes"]) == len(told["user_classes"]) == inventory.LISTED
    assert len(told["user_labelled"]) == inventory.LISTED
    assert told["user_labelled_total"] == 200
    assert told["user_classes"] == counts[: inventory.LISTED].tolist()
    assert told["class_totals"] == counts.sum(0).tolist()
    assert told["size_quartiles"][0] == min(len(user) for user in parts.users)
    assert told["size_quartiles"][4] == max(len(user) for user in parts.users)
    assert told["measured_skew"] == split.measured_skew(dataset.labels.numpy(), list(parts.users))
    shown = text.split(config, told)
    assert shown.startswith(f"{MANY:,} users by skew R = 0.4")
    assert f"and {MANY - text.MOST_USERS} more users" in shown
    assert "users have 200 labelled images" in shown


@pytest.mark.slow
def test_a_hundred_thousand_users_of_a_million_images(tmp_path: Path) -> None:
    path = generate(tmp_path / "million.npz", 1_000_000)
    words = [f"data.path={path}", "split.users=100000", "federation.participants=100", "federation.rounds=2",
             "federation.period=2", "train.batch_size=8", "train.momentum_policy=slot",
             "train.warmup=0", "run.checkpoint_every=1"]  # fmt: skip
    sets = [word for setting in words for word in ("--set", setting)]
    out = tmp_path / "run"
    ssfl = [sys.executable, "-m", "ssfl"]
    done = subprocess.run([*ssfl, "run", *sets, "--out", out, "--quiet"], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    parts = json.loads((out / "split.json").read_text())
    assert (parts["users"], parts["listed"]) == (100_000, inventory.LISTED)
    assert sum(parts["class_totals"]) + sum(parts["server"]) == 1_000_000
    assert parts["size_quartiles"][0] >= 9
    assert parts["size_quartiles"][4] <= 11
    events = [json.loads(line) for line in (out / "events.jsonl").read_text().splitlines()]
    rounds = [event for event in events if event["event"] == "round"]
    assert [len(set(event["participants"])) for event in rounds] == [100, 100]
    assert max(max(event["participants"]) for event in rounds) > 10_000
    # nothing is stored for users that did not take part: momentum has 101 rows of 10,026 numbers, and there
    # are the stream, the average, the slow one and the movement
    for file in (out / "checkpoints").iterdir():
        assert file.stat().st_size < 105.5 * 10_026 * 4
    assert sum(file.stat().st_size for file in out.iterdir()) < 1_000_000
    model = (out / "model.safetensors").read_bytes()
    for name in ("summary.json", "model.safetensors", "checkpoints/round-0000002.safetensors"):
        (out / name).unlink()
    again = subprocess.run([*ssfl, "resume", out, "--quiet"], capture_output=True, text=True)
    assert (again.returncode, again.stderr) == (0, "")
    assert (out / "model.safetensors").read_bytes() == model

"""FedMatch: its steps by hand, who moves what, who helps whom, and whole runs in both scenarios."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.func import functional_call

import ssfl
from hand_rounds import Adding
from ssfl.config.sections import GONE
from ssfl.config.settings import Config
from ssfl.core import draws
from ssfl.core.cohort import Cohort
from ssfl.core.rows import layout_of, row_of
from ssfl.data import sources
from ssfl.engines import loop, memory, spread
from ssfl.engines.choice import make
from ssfl.engines.contract import Engine
from ssfl.engines.local import Returned
from ssfl.engines.work import Optimizer, Pool, Work, make_batch, round_keys
from ssfl.errors import ConfigError
from ssfl.federation import Users
from ssfl.methods import fedmatch
from ssfl.models import networks
from ssfl.runs import assemble, folder
from ssfl.simulate.aggregation import Aggregation
from ssfl.simulate.rounds import Round

Make = Callable[..., Config]
Named = dict[str, Tensor]

RATE, DECAY = 0.004, 0.01
NETWORK = networks.build("small", 3, (1, 8, 8), "none").double()
NAMES = [name for name, _ in NETWORK.named_parameters()]


def small_pool() -> Pool:
    generator = torch.Generator().manual_seed(3)
    images = torch.randint(256, (40, 1, 8, 8), generator=generator, dtype=torch.uint8)
    labels = torch.randint(3, (40,), generator=generator)
    return Pool(images, labels, torch.tensor([0.5]), torch.tensor([0.3]), False, torch.float64)


POOL = small_pool()


def random_weights(seed: int) -> Named:
    generator = torch.Generator().manual_seed(seed)
    return {
        name: weight.detach() * 2 + 0.05 * torch.randn(weight.shape, generator=generator, dtype=torch.float64)
        for name, weight in NETWORK.named_parameters()
    }


def flat(*halves: Named) -> Tensor:
    return torch.cat([half[name].flatten() for half in halves for name in NAMES])


def named(row: Tensor) -> tuple[Named, Named]:
    model = fedmatch.Decomposed(NETWORK)
    tensors = layout_of(model).unflatten(row)
    return {n: tensors[f"sigma.{n}"] for n in NAMES}, {n: tensors[f"psi.{n}"] for n in NAMES}


def answers(sigma: Named, psi: Named, images: Tensor) -> Tensor:
    return functional_call(NETWORK, {n: sigma[n] + psi[n] for n in NAMES}, (images,)).softmax(-1)  # type: ignore[no-any-return]


def stepped(weights: Named, loss: Callable[[Named], Tensor]) -> Named:
    """w - rate · (gradient + decay · w)."""
    moving = {name: weight.clone().requires_grad_() for name, weight in weights.items()}
    loss(moving).backward()
    slopes = {name: weight.grad for name, weight in moving.items()}
    assert all(slope is not None for slope in slopes.values())
    return {n: w - RATE * (slopes[n] + DECAY * w) for n, w in weights.items()}  # type: ignore[operator]


def work(role: str = "user", labelled: bool = False, helpers: Tensor | None = None) -> Work:
    keys = round_keys(1, 0, torch.tensor([4]))
    images, marked = torch.arange(12).reshape(1, 1, 12), torch.arange(20, 32).reshape(1, 1, 12)
    views = ("weak",) if role == "server" else ("weak", "strong")
    sent = {} if helpers is None else {"helpers": helpers}
    return Work(role, views, keys, images, marked if labelled else None, (RATE,), sent=sent)


def engine(threshold: float = 0.0, name: str = "loop") -> Engine:
    model, method = fedmatch.Decomposed(NETWORK), fedmatch.FedMatch(threshold=threshold)
    return make(name, model, layout_of(model), POOL, Optimizer(0.0, False, DECAY), method, False)


def supervised_loss(sigma: Named, psi: Named, images: Tensor, labels: Tensor) -> Tensor:
    own = answers(sigma, psi, images)
    return -10 * own[torch.arange(len(own)), labels].log().mean()


def unlabelled_loss(
    sigma: Named,
    psi: Named,
    helpers: list[Named],
    weak: Tensor,
    strong: Tensor,
    threshold: float,
    sparse: float,
) -> tuple[Tensor, list[int], list[int]]:
    """Image by image, as the paper writes it; with the confident images and their labels."""
    own, hard = answers(sigma, psi, weak), answers(sigma, psi, strong)
    others = [answers(sigma, helper, weak).detach() for helper in helpers]
    sure = [i for i in range(len(own)) if own[i].max() >= threshold]
    loss, voted = torch.zeros((), dtype=torch.float64), []
    for i in sure:
        votes = [int(p[i].argmax()) for p in (own, *others)]
        label = max(range(3), key=votes.count)
        voted.append(label)
        for other in others:
            loss = loss + 0.01 * (other[i] * (other[i] / own[i]).log()).sum() / len(others) / len(sure)
        loss = loss - 0.01 * hard[i, label].log() / len(sure)
    for name in NAMES:
        loss = loss + 10 * ((sigma[name] - psi[name]) ** 2).sum() + sparse * psi[name].abs().sum()
    return loss, sure, voted


SIGMA, PSI = random_weights(1), random_weights(2)


def between(confidences: Tensor) -> float:
    """A threshold that some images pass and others do not."""
    return float(confidences.sort().values[3:5].mean())


ENGINES = pytest.mark.parametrize("name", ["loop", "vmap"])


@ENGINES
def test_the_servers_step_moves_sigma_alone(name: str) -> None:
    given = work("server")
    kept = torch.zeros(1, 2 * len(flat(SIGMA)), dtype=torch.float64)
    trained = engine(name=name).train(flat(SIGMA, PSI)[None], kept, given)
    batch = make_batch(POOL, given, 0)
    assert batch.weak is not None
    weak = batch.weak[0]
    expected = stepped(SIGMA, lambda sigma: supervised_loss(sigma, PSI, weak, batch.labels[0]))
    torch.testing.assert_close(trained.rows[0], flat(expected, PSI), rtol=1e-10, atol=1e-13)
    assert torch.equal(trained.rows[0].chunk(2)[1], flat(PSI))
    assert torch.equal(trained.momentum, kept)
    told = {name: float(value) for name, value in trained.metrics.items()}
    told_loss = float(supervised_loss(SIGMA, PSI, weak, batch.labels[0]))
    assert told["loss"] == pytest.approx(told_loss)
    assert (told["mask_rate"], told["known_rate"], told["correct_rate"]) == (1, 1, 1)


@pytest.mark.parametrize("count", [0, 1, 2])
@pytest.mark.parametrize("labels_at", ["server", "users"])
@ENGINES
def test_a_users_step_by_hand(count: int, labels_at: str, name: str) -> None:
    helpers, labelled = [random_weights(10 + seed) for seed in range(count)], labels_at == "users"
    rows = [flat(helper) for helper in helpers] + [torch.zeros(len(flat(SIGMA)))] * (2 - count)
    batch, sigma, first = make_batch(POOL, work(labelled=labelled), 0), SIGMA, torch.zeros(())
    assert batch.weak is not None
    assert batch.strong is not None
    if batch.own is not None and batch.own_labels is not None:
        marked = (PSI, batch.own[0], batch.own_labels[0])
        sigma, first = stepped(SIGMA, lambda s: supervised_loss(s, *marked)), supervised_loss(SIGMA, *marked)
        # the helpers keep the σ that was received; shift their ψ, as the formula adds the present σ
        helpers = [{n: h[n] + SIGMA[n] - sigma[n] for n in NAMES} for h in helpers]
    threshold = between(answers(sigma, PSI, batch.weak[0]).max(-1).values)
    given = work(labelled=labelled, helpers=torch.stack(rows)[None] if count else None)
    kept = torch.zeros(1, 2 * len(flat(SIGMA)), dtype=torch.float64)
    trained = engine(threshold, name).train(flat(SIGMA, PSI)[None], kept, given)
    views = (batch.weak[0], batch.strong[0], threshold, 1e-4 if labels_at == "users" else 1e-5)
    expected = stepped(PSI, lambda psi: unlabelled_loss(sigma, psi, helpers, *views)[0])
    torch.testing.assert_close(trained.rows[0], flat(sigma, expected), rtol=1e-10, atol=1e-13)
    if labels_at == "server":
        assert torch.equal(trained.rows[0].chunk(2)[0], flat(SIGMA))
    assert torch.equal(trained.momentum, kept)
    loss, sure, voted = unlabelled_loss(sigma, PSI, helpers, *views)
    assert 0 < len(sure) < 12
    right = sum(int(batch.labels[0, i]) == label for i, label in zip(sure, voted, strict=True))
    told = {name: float(value) for name, value in trained.metrics.items()}
    assert told["loss"] == pytest.approx(float(first + loss))
    assert told["mask_rate"] == told["known_rate"] == pytest.approx(len(sure) / 12)
    assert told["correct_rate"] == pytest.approx(right / 12)


def test_the_label_is_voted_for_and_helpers_pull_the_answer() -> None:
    sure = 9.0 * torch.eye(3, dtype=torch.float64)
    own, strong = sure[[0, 0, 2, 0]].requires_grad_(), sure[[0, 0, 0, 0]]
    own_sure = torch.tensor([[1.0], [1.0], [1.0], [0.01]])
    helpers, there = [sure[None, [1, 0, 1, 1]], sure[None, [1, 2, 0, 1]]], torch.tensor([True])
    method = fedmatch.FedMatch(threshold=0.9)
    found = method.unlabelled((own * own_sure)[None], strong[None], helpers, [there, there])
    # two against one, two for it, all different, two against one
    assert found.label.tolist() == [[1, 0, 0, 1]]
    assert found.mask.tolist() == [[1, 1, 1, 0]]
    (slope,) = torch.autograd.grad(found.loss.sum(), own)
    assert slope[0, 1] < 0 < slope[0, 0]
    assert not slope[3].any()


def test_a_helper_that_does_not_exist_has_no_vote_and_no_pull() -> None:
    logits = torch.randn(1, 4, 3, dtype=torch.float64)
    strong, first, second = torch.randn(3, 1, 4, 3, dtype=torch.float64)
    method, yes, no = fedmatch.FedMatch(threshold=0.0), torch.tensor([True]), torch.tensor([False])
    for helpers, exist, without in [
        ([first, second], [yes, no], [first]),
        ([first, second], [no, yes], [second]),
        ([first, second], [no, no], []),
    ]:
        found = method.unlabelled(logits, strong, helpers, exist)
        expected = method.unlabelled(logits, strong, without, [yes] * len(without))
        assert torch.equal(found.label, expected.label)
        torch.testing.assert_close(found.loss, expected.loss)


@ENGINES
def test_a_user_without_labels_leaves_sigma_alone(name: str) -> None:
    given = work(labelled=True)
    assert given.labelled is not None
    row = flat(SIGMA, PSI)[None]
    alone = engine(name=name).train(row, row * 0, replace(given, labelled=given.labelled * 0 - 1))
    assert torch.equal(alone.rows[0].chunk(2)[0], flat(SIGMA))


def test_a_decomposed_network_is_the_sum_of_its_halves() -> None:
    network = networks.build("small", 3, (1, 8, 8), "group").double()
    model = fedmatch.Decomposed(network)
    layout = layout_of(model)
    sigma, psi = row_of(model, layout).chunk(2)
    torch.testing.assert_close(psi, 0.2 * sigma)
    images = POOL.normalised(POOL.images[:4])
    tensors = fedmatch.composed(layout.unflatten(row_of(model, layout)))
    assert list(tensors) == [name for name, _ in network.named_parameters()]
    assert torch.equal(model(images), functional_call(network, tensors, (images,)))


@pytest.mark.parametrize("name", ["small", "cnn", "resnet9", "resnet18", "vgg11", "wide_resnet"])
def test_any_network_takes_a_step(name: str) -> None:
    images = torch.randint(256, (8, 1, 16, 16), dtype=torch.uint8)
    pool = Pool(images, torch.arange(8) % 3, torch.tensor([0.5]), torch.tensor([0.3]), False, torch.float32)
    model = fedmatch.Decomposed(networks.build(name, 3, (1, 16, 16), "none"))
    row = row_of(model, layout_of(model))[None]
    given = Work("user", ("weak", "strong"), round_keys(1, 0, torch.tensor([4])), torch.arange(2)[None, None],
                 torch.arange(2, 4)[None, None], (0.001,))  # fmt: skip
    method, optimizer = fedmatch.FedMatch(threshold=0.0), Optimizer(0.0, False, 1e-4)
    trained = loop.Loop(model, layout_of(model), pool, optimizer, method).train(row, row * 0, given)
    assert trained.rows.isfinite().all()
    assert all((new != old).any() for new, old in zip(trained.rows[0].chunk(2), row[0].chunk(2), strict=True))


def test_users_with_labels_at_the_server_move_psi_and_the_mean_leaves_sigma(
    quick: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    sim = assemble.make(quick("method.name=fedmatch", "federation.participants=6"))
    state, (cohort, *_) = sim.initial(), sim.plan.prepare(0)
    ended, served, train_server = [], [], Round.train_server

    def averaged(self: Aggregation, *parts: Any) -> Users:
        ended.append(usual(self, *parts))
        return ended[-1]

    def started(self: Round, row: Tensor) -> object:
        served.append(row)
        return train_server(self, row)

    usual = Aggregation.averaged
    monkeypatch.setattr(Aggregation, "averaged", averaged)
    monkeypatch.setattr(Round, "train_server", started)
    new, _ = sim.play(state)
    half = sim.layout.weights // 2
    rows = ended[0].rows
    before, after = state.average[:half], rows[:, :half]
    assert torch.equal(after, before.expand_as(after))
    # the server starts from the users' mean
    torch.testing.assert_close(served[0][:half], before, rtol=1e-6, atol=1e-8)
    torch.testing.assert_close(served[0][half:], rows[:, half:].mean(0), rtol=1e-5, atol=1e-7)
    assert torch.equal(new.average[half:], served[0][half:])
    assert not torch.equal(new.average[:half], before)
    # what a user sent is kept, and nothing of who was not there
    assert torch.equal(new.memory["last"][list(cohort.users)], rows)
    absent = [user for user in range(10) if user not in cohort.users]
    assert len(absent) == 4
    assert not new.memory["last"][absent].any()


def test_helpers_are_the_nearest_of_those_seen() -> None:
    answers = torch.tensor([[0.9, 0.1], [0.5, 0.5], [0.85, 0.15], [0.1, 0.9], [0.6, 0.4]])
    seen = torch.tensor([1, 4, 5, 7, 9])
    near = fedmatch.nearest(answers, seen, [1, 2, 7, 9], 2)
    assert near.tolist() == [[5, 9], [-1, -1], [4, 9], [4, 5]]
    assert fedmatch.nearest(answers, seen, [1, 2], 3).tolist() == [[5, 9, 4], [-1, -1, -1]]
    assert fedmatch.nearest(answers[:2], seen[:2], [1, 3], 2).tolist() == [[4, -1], [-1, -1]]
    assert fedmatch.nearest(answers[:1], seen[:1], [1], 2).tolist() == [[-1, -1]]
    assert fedmatch.nearest(answers[:0], seen[:0], [0], 2).tolist() == [[-1, -1]]


def test_nearness_is_of_answers_to_noise(quick: Make) -> None:
    sim = assemble.make(quick("method.name=fedmatch", "split.users=8", "train.precision=float64"))
    method, half = sim.method, sim.layout.weights // 2
    assert isinstance(method, fedmatch.FedMatch)
    state = sim.initial()
    cohort = Cohort((0, 3, 5, 6), (0, 3, 5, 6), ((0, 1, 2, 3),), (0,) * 4, (0, 1, 2, 3))
    fed = Round(sim, state, cohort, Adding(), keep=False)
    last = torch.zeros(8, sim.layout.length, dtype=torch.float64)
    for user in (0, 1, 3, 4, 5):
        generator = torch.Generator().manual_seed(user)
        shift = torch.randn(len(state.average), generator=generator, dtype=torch.float64)
        last[user] = state.average + 0.05 * shift
    noise = fedmatch.noise(torch.tensor(draws.key(sim.config.run.seed, "noise")), (1, 8, 8))
    mean, std = (torch.tensor(numbers).view(-1, 1, 1) for numbers in (sim.dataset.mean, sim.dataset.std))
    image = (noise.double() / 255 - mean) / std
    network = networks.build("small", 10, (1, 8, 8), "none").double()
    names = [name for name, _ in network.named_parameters()]
    vectors = {}
    for user in (0, 1, 3, 4, 5):
        whole = last[user, :half] + last[user, half:]
        pieces = whole.split([weight.numel() for weight in network.parameters()])
        shapes = [weight.shape for weight in network.parameters()]
        weights = {n: p.reshape(s) for n, p, s in zip(names, pieces, shapes, strict=True)}
        vectors[user] = functional_call(network, weights, (image,)).softmax(-1)[0]
    expected = [
        sorted((u for u in vectors if u != user), key=lambda u: float((vectors[u] - vectors[user]).norm()))[
            :2
        ]
        for user in (0, 3, 5)
    ]
    assert method.helpers_of(last, fed).tolist() == [*expected, [-1, -1]]


def test_the_noise_is_gaussian_cut_and_named() -> None:
    one, two = (torch.tensor(draws.key(seed, "noise")) for seed in (1, 2))
    noise = fedmatch.noise(one, (3, 64, 64))
    assert noise.dtype == torch.uint8
    assert noise.shape == (1, 3, 64, 64)
    # a normal of mean and deviation 125, cut at one deviation either side
    assert abs(float(noise.double().mean()) - 126.5) < 2.5
    assert abs(float(noise.double().std()) - 68) < 2.5
    assert torch.equal(noise, fedmatch.noise(one, (3, 64, 64)))
    assert not torch.equal(noise, fedmatch.noise(two, (3, 64, 64)))


class Standing(Adding):
    """Workers that leave every row as it is."""

    def train(self, rows: Tensor, momentum: Tensor, part: slice, given: dict[str, Tensor]) -> Returned:
        self.users = [0.0] * len(rows)
        return super().train(rows, momentum, slice(None), given)


def test_only_every_tenth_round_has_helpers(quick: Make) -> None:
    sim = assemble.make(quick("method.name=fedmatch", "federation.participants=4", "federation.rounds=40"))
    state, (cohort, *_) = sim.initial(), sim.plan.prepare(0)
    last, half = state.memory["last"].clone(), sim.layout.weights // 2
    last[list(cohort.users[:3])] = state.average * torch.tensor([[1.0], [1.1], [1.5]])
    state = replace(state, memory={"last": last})
    sent = []
    for number in range(40):
        now, workers = replace(state, round=number), Standing(server=[0.0])
        sim.method.round(now, Round(sim, now, cohort, workers, keep=False))
        sent.append(workers.tensors[0])
    assert [number for number in range(40) if sent[number]] == [9, 19, 29, 39]
    psi = sent[9]["helpers"]
    assert psi.shape == (4, 2, half)
    others = {tuple(last[user, half : half + 50].tolist()) for user in cohort.users[1:3]}
    assert {tuple(one[:50].tolist()) for one in psi[0]} == others
    assert not psi[3].any()  # who was never seen has nobody
    state, (cohort, *_) = replace(state, round=9), sim.plan.prepare(9)
    assert isinstance(sim.method, fedmatch.FedMatch)
    fed = Round(sim, state, cohort, Adding(), keep=False)
    assert int((sim.method.helpers_of(last, fed) >= 0).sum()) > 0
    down = sim.play(state)[1][0]["bytes_down"]
    assert down == sim.message_bytes() * (4 + 4 * 2 / 2)  # a helper is half a row


@pytest.mark.parametrize("change", ["method.helpers=0", "method.interval=20"])
def test_helpers_are_as_many_and_as_often_as_said(quick: Make, change: str) -> None:
    sim = assemble.make(quick("method.name=fedmatch", "federation.participants=4", change))
    start = replace(sim.initial(), round=9)
    assert sim.play(start)[1][0]["bytes_down"] == 4 * sim.message_bytes()


SCENARIOS = {
    "server": [],
    "users": ["split.labels_at=users", "split.user_labels=200"],
}


@pytest.mark.slow
@pytest.mark.parametrize("labels_at", ["server", "users"])
def test_a_run_trains_resumes_to_the_same_bytes_and_predicts(
    quick: Make, tmp_path: Path, labels_at: str
) -> None:
    config = quick("method.name=fedmatch", *SCENARIOS[labels_at], "federation.rounds=11", "run.eval_every=5",
                   "federation.participants=6", "run.checkpoint_every=9", "run.engine=vmap")  # fmt: skip
    path = ssfl.run(config, tmp_path / "run").path
    assert folder.read_config(path).run.engine == "vmap"
    events = [{k: v for k, v in e.items() if k not in folder.WALL_CLOCK} for e in folder.read_events(path)]
    rounds = [event for event in events if event["event"] == "round"]
    key = "server_loss" if labels_at == "server" else "loss"
    assert rounds[-1][key] < 0.75 * rounds[0][key]
    assert {"loss", "mask_rate", "pseudo_accuracy", "update_norm"} <= set(rounds[0])
    model = (path / "model.safetensors").read_bytes()
    for left in ("round-0000009.safetensors", None):  # round 10, with helpers, is played again
        for name in ("summary.json", "model.safetensors"):
            (path / name).unlink()
        for file in (path / "checkpoints").iterdir():
            if file.name != left:
                file.unlink()
        ssfl.resume(path)
        assert (path / "model.safetensors").read_bytes() == model
        again = [{k: v for k, v in e.items() if k not in folder.WALL_CLOCK} for e in folder.read_events(path)]
        assert again == events
    loaded, digits = ssfl.load_model(path), sources.load("digits", root=Path("data"))
    with torch.no_grad():
        right = (loaded(digits.test_images).argmax(1) == digits.test_labels).double().mean()
    assert float(right) == json.loads((path / "summary.json").read_text())["accuracy"] > 0.3
    tensors, _ = folder.read_model(path / "model.safetensors")
    assert set(tensors) == {name for name, _ in NETWORK.named_parameters()}


def test_processes_train_the_same(quick: Make) -> None:
    sim = assemble.make(quick("method.name=fedmatch", "federation.participants=4"))
    state, (cohort, users, _) = sim.initial(), sim.plan.prepare(0)
    rows, half = state.streams.repeat(4, 1), sim.layout.weights // 2
    helpers = torch.stack([state.average[half:] * scale for scale in (1.1, 0.9)]).repeat(4, 1, 1)
    given = replace(users, sent={"helpers": helpers})
    alone = sim.engine.train(rows, rows * 0, given)
    many = spread.Spread(sim.engine, 2)
    try:
        together = many.train(rows, rows * 0, given)
    finally:
        many.close()
    assert torch.equal(alone.rows, together.rows)
    assert torch.equal(alone.momentum, together.momentum)
    assert len(cohort.users) == 4


@pytest.mark.parametrize(
    ("override", "fix"),
    [
        ("model.norm=batch", "model.norm=none"),
        ("federation.groups=2", "federation.groups=1"),
        ("train.momentum=0.9", "train.momentum=0"),
        ("train.clip=1", "train.clip=0"),
        ("train.lr=0.1", "train.lr=0.001"),
        ("run.diversity_every=5", "run.diversity_every=0"),
        ("federation.combine=median", "federation.combine=mean"),
        ("federation.median_fallback=true", "federation.median_fallback=false"),
        ("run.engine=dist", "run.engine=auto"),
        ("method.views=joint", None),
        ("method.server=none", GONE["method.server"]),
        ("method.averaging=grouping", GONE["method.averaging"]),
    ],
)
def test_what_makes_no_sense_is_named(quick: Make, override: str, fix: str | None) -> None:
    with pytest.raises(ConfigError) as caught:
        quick("method.name=fedmatch", override)
    assert caught.value.key == override.partition("=")[0]
    assert caught.value.fix == fix
    assert "\n" not in str(caught.value)


def test_what_users_sent_is_refused_where_it_does_not_fit(
    quick: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(memory, "free", lambda device: 1 << 20)
    with pytest.raises(ConfigError) as caught:
        assemble.make(quick("method.name=fedmatch", "train.momentum_policy=reset"))
    assert (caught.value.key, caught.value.value) == ("method.name", "fedmatch")

"""FedMatch: its steps by hand, who moves what, who helps whom, and whole runs in both scenarios."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.func import functional_call

import ssfl
from ssfl import assemble, fedmatch, memory, models, runs
from ssfl.data import sources
from ssfl.engines import spread
from ssfl.errors import ConfigError
from ssfl.federation import play_round
from ssfl.rows import layout_of, row_of
from ssfl.settings import Config
from ssfl.work import Objective, Optimizer, Pool, Work, make_batch, round_keys

Make = Callable[..., Config]
Named = dict[str, Tensor]

RATE, DECAY = 0.004, 0.01
NETWORK = models.build("small", 3, (1, 8, 8), "none").double()
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


def work(name: str, labelled: bool = False, helpers: Tensor | None = None, threshold: float = 0.0) -> Work:
    keys = round_keys(1, 0, torch.tensor([4]))
    images, marked = torch.arange(12).reshape(1, 1, 12), torch.arange(20, 32).reshape(1, 1, 12)
    return Work(Objective(name, threshold), keys, images, marked if labelled else None, (RATE,), 1, helpers)


def engine(labels_at: str = "server") -> fedmatch.FedMatch:
    return fedmatch.FedMatch(fedmatch.Decomposed(NETWORK), POOL, Optimizer(0.0, False, DECAY), labels_at)


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


def test_the_servers_step_moves_sigma_alone() -> None:
    given = work("supervised")
    kept = torch.zeros(1, 2 * len(flat(SIGMA)), dtype=torch.float64)
    trained = engine().train(flat(SIGMA, PSI)[None], kept, given)
    batch = make_batch(POOL, given, 0)
    expected = stepped(SIGMA, lambda sigma: supervised_loss(sigma, PSI, batch.weak[0], batch.labels[0]))
    torch.testing.assert_close(trained.rows[0], flat(expected, PSI), rtol=1e-10, atol=1e-13)
    assert torch.equal(trained.rows[0].chunk(2)[1], flat(PSI))
    assert torch.equal(trained.momentum, kept)
    told = {name: float(value) for name, value in trained.stats.items()}
    told_loss = float(supervised_loss(SIGMA, PSI, batch.weak[0], batch.labels[0]))
    assert told["loss"] == pytest.approx(told_loss)
    assert (told["masked"], told["told"], told["right"]) == (1, 1, 1)


@pytest.mark.parametrize("count", [0, 1, 2])
@pytest.mark.parametrize("labels_at", ["server", "users"])
def test_a_users_step_by_hand(count: int, labels_at: str) -> None:
    helpers, labelled = [random_weights(10 + seed) for seed in range(count)], labels_at == "users"
    rows = [flat(helper) for helper in helpers] + [torch.zeros(len(flat(SIGMA)))] * (2 - count)
    batch, sigma, first = make_batch(POOL, work("fedmatch", labelled), 0), SIGMA, torch.zeros(())
    assert batch.strong is not None
    if batch.own is not None and batch.own_labels is not None:
        marked = (PSI, batch.own[0], batch.own_labels[0])
        sigma, first = stepped(SIGMA, lambda s: supervised_loss(s, *marked)), supervised_loss(SIGMA, *marked)
        # the helpers keep the σ that was received; shift their ψ, as the formula adds the present σ
        helpers = [{n: h[n] + SIGMA[n] - sigma[n] for n in NAMES} for h in helpers]
    threshold = between(answers(sigma, PSI, batch.weak[0]).max(-1).values)
    given = work("fedmatch", labelled, torch.stack(rows)[None] if count else None, threshold)
    trained = engine(labels_at).train(flat(SIGMA, PSI)[None], torch.zeros(1), given)
    views = (batch.weak[0], batch.strong[0], threshold, 1e-4 if labels_at == "users" else 1e-5)
    expected = stepped(PSI, lambda psi: unlabelled_loss(sigma, psi, helpers, *views)[0])
    torch.testing.assert_close(trained.rows[0], flat(sigma, expected), rtol=1e-10, atol=1e-13)
    if labels_at == "server":
        assert torch.equal(trained.rows[0].chunk(2)[0], flat(SIGMA))
    # what the user sends is kept in place of momentum
    assert torch.equal(trained.momentum, trained.rows)
    loss, sure, voted = unlabelled_loss(sigma, PSI, helpers, *views)
    assert 0 < len(sure) < 12
    right = sum(int(batch.labels[0, i]) == label for i, label in zip(sure, voted, strict=True))
    assert float(trained.stats["loss"]) == pytest.approx(float(first + loss))
    assert float(trained.stats["masked"]) == float(trained.stats["told"]) == pytest.approx(len(sure) / 12)
    assert float(trained.stats["right"]) == pytest.approx(right / 12)


def test_the_label_is_voted_for_and_helpers_pull_the_answer() -> None:
    sure = 9.0 * torch.eye(3, dtype=torch.float64)
    own, strong = sure[[0, 0, 2, 0]].requires_grad_(), sure[[0, 0, 0, 0]]
    own_sure = torch.tensor([[1.0], [1.0], [1.0], [0.01]])
    found = fedmatch.unlabelled(own * own_sure, strong, [sure[[1, 0, 1, 1]], sure[[1, 2, 0, 1]]], 0.9)
    assert found.label.tolist() == [1, 0, 0, 1]  # two against one, two for it, all different, two against one
    assert found.mask.tolist() == [1, 1, 1, 0]
    (slope,) = torch.autograd.grad(found.loss.sum(), own)
    assert slope[0, 1] < 0 < slope[0, 0]
    assert not slope[3].any()


def test_a_user_without_labels_leaves_sigma_alone() -> None:
    given = work("fedmatch", labelled=True)
    assert given.labelled is not None
    alone = engine("users").train(
        flat(SIGMA, PSI)[None], torch.zeros(1), replace(given, labelled=given.labelled * 0 - 1)
    )
    assert torch.equal(alone.rows[0].chunk(2)[0], flat(SIGMA))


def test_a_decomposed_network_is_the_sum_of_its_halves() -> None:
    network = models.build("small", 3, (1, 8, 8), "group").double()
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
    model = fedmatch.Decomposed(models.build(name, 3, (1, 16, 16), "none"))
    row = row_of(model, layout_of(model))[None]
    given = Work(Objective("fedmatch", 0.0), round_keys(1, 0, torch.tensor([4])), torch.arange(2)[None, None],
                 torch.arange(2, 4)[None, None], (0.001,))  # fmt: skip
    trained = fedmatch.FedMatch(model, pool, Optimizer(0.0, False, 1e-4), "users").train(row, row, given)
    assert trained.rows.isfinite().all()
    assert all((new != old).any() for new, old in zip(trained.rows[0].chunk(2), row[0].chunk(2), strict=True))


def test_users_with_labels_at_the_server_move_psi_and_the_mean_leaves_sigma(quick: Make) -> None:
    sim = assemble.make(quick("method.name=fedmatch"))
    state, (cohort, users, _) = sim.initial(), sim.plan.prepare(0)
    ended = []

    def train(rows: Tensor, kept: Tensor, part: slice) -> ssfl.work.Trained:
        ended.append(sim.engine.train(rows, kept, users.of(part)))
        return ended[-1]

    new, _ = play_round(
        state, cohort, train_users=train, train_server=train, server="none", slots=cohort.users
    )
    half = sim.layout.weights // 2
    before, after = state.average[:half], ended[0].rows[:, :half]
    assert torch.equal(after, before.expand_as(after))
    torch.testing.assert_close(new.average[:half], before, rtol=1e-6, atol=1e-8)
    torch.testing.assert_close(new.average[half:], ended[0].rows[:, half:].mean(0), rtol=1e-5, atol=1e-7)
    assert torch.equal(new.momentum[:-1], ended[0].rows)
    assert not new.momentum[-1].any()


def test_helpers_are_the_nearest_of_those_seen() -> None:
    answers = torch.tensor([[0.9, 0.1], [0.5, 0.5], [0.85, 0.15], [0.1, 0.9], [0.6, 0.4]])
    seen = torch.tensor([1, 4, 5, 7, 9])
    near = fedmatch.nearest(answers, seen, [1, 2, 7, 9])
    assert near.tolist() == [[5, 9], [-1, -1], [4, 9], [4, 5]]
    assert fedmatch.nearest(answers[:2], seen[:2], [1, 3]).tolist() == [[4, -1], [-1, -1]]
    assert fedmatch.nearest(answers[:1], seen[:1], [1]).tolist() == [[-1, -1]]
    assert fedmatch.nearest(answers[:0], seen[:0], [0]).tolist() == [[-1, -1]]


def test_nearness_is_of_answers_to_noise() -> None:
    model = fedmatch.Decomposed(NETWORK)
    halves = {user: (random_weights(user), random_weights(user + 50)) for user in (0, 1, 3, 4, 5)}
    kept = torch.zeros(8, 2 * len(flat(SIGMA)), dtype=torch.float64)
    for user, pair in halves.items():
        kept[user] = flat(*pair)
    noise = fedmatch.noise(7, (1, 8, 8))
    image = ((noise.double() / 255) - 0.5) / 0.3
    vectors = {user: answers(*pair, image)[0] for user, pair in halves.items()}
    expected = [
        sorted((u for u in halves if u != user), key=lambda u: float((vectors[u] - vectors[user]).norm()))[:2]
        for user in (0, 3, 5)
    ]
    assert fedmatch.helpers_of(model, POOL, kept, [0, 3, 5, 6], 7).tolist() == [*expected, [-1, -1]]


def test_the_noise_is_gaussian_cut_and_named() -> None:
    noise = fedmatch.noise(1, (3, 64, 64))
    assert noise.dtype == torch.uint8
    assert noise.shape == (1, 3, 64, 64)
    # a normal of mean and deviation 125, cut at one deviation either side
    assert abs(float(noise.double().mean()) - 126.5) < 2.5
    assert abs(float(noise.double().std()) - 68) < 2.5
    assert torch.equal(noise, fedmatch.noise(1, (3, 64, 64)))
    assert not torch.equal(noise, fedmatch.noise(2, (3, 64, 64)))


def test_only_every_tenth_round_has_helpers(quick: Make) -> None:
    sim = assemble.make(quick("method.name=fedmatch", "federation.participants=4"))
    state, (cohort, *_) = sim.initial(), sim.plan.prepare(0)
    kept = state.momentum.clone()
    kept[list(cohort.users[:3])] = state.average * torch.tensor([[1.0], [1.1], [1.5]])
    state = replace(state, momentum=kept)
    with_helpers = [r for r in range(40) if sim._helpers(replace(state, round=r), cohort) is not None]
    assert with_helpers == [9, 19, 29, 39]
    found = sim._helpers(replace(state, round=9), cohort)
    assert found is not None
    assert sorted(found[0].tolist()) == list(cohort.users[1:3])
    assert found[3].tolist() == [-1, -1]
    state, (cohort, *_) = replace(state, round=9), sim.plan.prepare(9)
    helped = sim._helpers(state, cohort)
    assert helped is not None
    count = int((helped >= 0).sum())
    assert count > 0
    down = sim.play(state)[1][0]["bytes_down"]
    assert down == sim.message_bytes() * (4 + count / 2)  # a helper is half a row


SCENARIOS = {
    "server": [],
    "users": ["split.labels_at=users", "method.server=none", "split.user_labels=200"],
}


@pytest.mark.slow
@pytest.mark.parametrize("labels_at", ["server", "users"])
def test_a_run_trains_resumes_to_the_same_bytes_and_predicts(
    quick: Make, tmp_path: Path, labels_at: str
) -> None:
    config = quick("method.name=fedmatch", *SCENARIOS[labels_at], "federation.rounds=11", "run.eval_every=5",
                   "federation.participants=6", "run.checkpoint_every=9", "run.engine=vmap")  # fmt: skip
    path = ssfl.run(config, tmp_path / "run").path
    assert runs.read_config(path).run.engine == "loop"
    events = [{k: v for k, v in e.items() if k not in runs.WALL_CLOCK} for e in runs.read_events(path)]
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
        again = [{k: v for k, v in e.items() if k not in runs.WALL_CLOCK} for e in runs.read_events(path)]
        assert again == events
    loaded, digits = ssfl.load_model(path), sources.load("digits", root=Path("data"))
    with torch.no_grad():
        right = (loaded(digits.test_images).argmax(1) == digits.test_labels).double().mean()
    assert float(right) == json.loads((path / "summary.json").read_text())["accuracy"] > 0.3
    tensors, _ = runs.read_model(path / "model.safetensors")
    assert set(tensors) == {name for name, _ in NETWORK.named_parameters()}


def test_processes_train_the_same(quick: Make) -> None:
    sim = assemble.make(quick("method.name=fedmatch", "federation.participants=4"))
    state, (cohort, users, _) = sim.initial(), sim.plan.prepare(0)
    rows, half = state.streams.repeat(4, 1), sim.layout.weights // 2
    helpers = torch.stack([state.average[half:] * scale for scale in (1.1, 0.9)]).repeat(4, 1, 1)
    given = replace(users, helpers=helpers)
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
    ("override", "words"),
    [
        ("model.norm=batch", "model.norm = 'batch': set model.norm=none"),
        ("method.averaging=grouping", "set method.averaging=fedavg"),
        ("method.views=joint", "set method.views=separate"),
        ("train.momentum=0.9", "set train.momentum=0"),
        ("train.lr=0.1", "set train.lr below 0.1"),
        ("run.diversity_every=5", "set run.diversity_every=0"),
        ("method.server=parallel", "set method.server=alternate"),
        ("method.server=none", "method.server=none and split.labels_at=users"),
        ("split.labels_at=users", "add method.server = 'none'"),
    ],
)
def test_what_makes_no_sense_is_named(quick: Make, override: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words) as caught:
        quick("method.name=fedmatch", override)
    assert "\n" not in str(caught.value)


def test_what_users_sent_is_refused_where_it_does_not_fit(
    quick: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(memory, "free", lambda device: 1 << 20)
    with pytest.raises(ConfigError, match=r"'fedmatch' keeps a row for each of 10 users.*lower split.users"):
        assemble.make(quick("method.name=fedmatch", "train.momentum_policy=reset"))

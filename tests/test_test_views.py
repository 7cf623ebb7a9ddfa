"""data.test_views: predictions are averaged over an image and gentle views of it, in the same way
everywhere."""

import time
from pathlib import Path

import numpy as np
import pytest
import torch

import ssfl
from image_files import write_image
from ssfl.core import draws
from ssfl.data import gentle
from ssfl.data.views import KINDS
from ssfl.engines.features import Features
from ssfl.runs import assemble, evaluate, forecast
from ssfl.runs.predict import export, predict
from ssfl.simulate import scoring
from test_backbones import Divided
from test_backbones import data as pictures

VIEWS = "data.test_views=4"


def test_views_come_in_opposite_pairs() -> None:
    images = torch.from_numpy(np.random.default_rng(0).integers(0, 256, (3, 3, 20, 20), dtype=np.uint8))
    for number in (1, 3):
        drawn = draws.bits(torch.tensor([draws.key(0, "test", number // 2)]), gentle.GENTLE_DRAWS)
        steps, opposite = draws.below(drawn, gentle.STEPS), draws.below(~drawn, gentle.STEPS)
        assert (steps + opposite == gentle.STEPS - 1).all()
        assert (draws.below(drawn[:, 0], 2) != draws.below(~drawn[:, 0], 2)).all()  # one of two is mirrored
        for place, bits in ((number, drawn), (number + 1, ~drawn)):
            view = gentle.test_view(images, place, True)
            assert torch.equal(view, gentle.gentle_views(images, bits.expand(3, -1), True))
    one, other = (gentle.test_view(images, number, False) for number in (1, 3))
    assert not torch.equal(one, other)


def test_the_logits_of_a_run_are_the_mean_over_the_views() -> None:
    config = ssfl.load_config("quickstart", [VIEWS, "run.device=cpu", "data.flip=true"])
    sim = assemble.make(config)
    images = sim.dataset.test_images[:7]
    sim.model.eval()
    with torch.no_grad():
        each = [
            sim.model(sim.pool.normalised(view, sim.pool.wide))
            for view in (images, *(gentle.test_view(images, number, True) for number in (1, 2, 3, 4)))
        ]
    together = scoring.logits(sim.model, sim.pool, images)
    assert torch.allclose(together, torch.stack(each).mean(0), atol=1e-6)
    assert not torch.allclose(together, each[0], atol=1e-3)


def test_cached_features_give_the_same_average(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SSFL_CACHE", str(tmp_path / "cache"))
    wanted = ["split.users=2", "split.server_labels=6", "run.device=cpu", "train.batch_size=8", VIEWS]
    outcomes = []
    for views in ("model.cached_views=2", "model.cached_views=0"):
        sim = assemble.make(ssfl.load_config("quickstart", [*wanted, views]), Divided, pictures())
        outcomes.append(scoring.logits(sim.model, sim.pool, sim.dataset.test_images))
        if sim.pool.features is not None:
            features = sim.pool.features
            assert features.left_to_evaluate(sim.dataset.test_images, 4) == 0
            assert features.left_to_evaluate(sim.dataset.test_images, 6) > 0
    cached, made = outcomes
    assert torch.allclose(cached, made, rtol=0.02, atol=0.02)  # features are stored in half precision


def test_features_of_test_views_are_stored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SSFL_CACHE", str(tmp_path))
    images = torch.from_numpy(np.random.default_rng(0).integers(0, 256, (2, 1, 32, 32), dtype=np.uint8))
    network, seen, computed = Divided(), [], []
    for _ in range(2):
        features = Features.of(network, 1, [0.5], [0.5], False, *KINDS["gentle"], 1)
        seen.append(torch.stack([features.plain(images, torch.float32, number) for number in range(3)]))
        computed.append(features.computed)
    first, again = seen
    assert torch.equal(first, again)
    assert computed == [6, 0]


def test_predict_and_evaluate_agree_with_the_run(tmp_path: Path) -> None:
    config = ssfl.load_config(
        "quickstart", [VIEWS, "federation.rounds=3", "federation.period=8", "run.threads=1", "run.device=cpu"]
    )
    result = ssfl.run(config, tmp_path / "run")
    dataset = assemble.make(config).dataset
    images, labels = dataset.test_images, dataset.test_labels
    for place in range(60):
        file = tmp_path / "held" / str(int(labels[place])) / f"{place}.png"
        write_image(file, images[place, 0].numpy())
    judged = evaluate.evaluate(tmp_path / "run", tmp_path / "held")
    model = ssfl.load_model(tmp_path / "run")
    assert model.card["test_views"] == 4
    with torch.no_grad():
        expected = model.averaged(images[:60]).softmax(-1)
    assert judged.correct == int((expected.argmax(-1) == labels[:60]).sum())
    program = torch.export.load(export(tmp_path / "run", tmp_path / "model")[2]).module()
    for count in (1, 9):
        assert torch.allclose(program(images[:count]), model.averaged(images[:count]), atol=1e-5)
    for row in predict(tmp_path / "run", [tmp_path / "held"]):
        shares = expected[int(Path(row["file"]).stem)]
        assert row["confidence"] == pytest.approx(float(shares.max()), abs=1e-4)
    with torch.no_grad():
        hits = int((model.averaged(images).argmax(-1) == labels).sum())
    assert result.accuracy == pytest.approx(hits / len(labels))


class Slow(Divided):
    """A network whose frozen part takes long."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk.register_forward_pre_hook(lambda *_: time.sleep(0.05))


def test_the_forecast_does_not_count_features_as_part_of_every_round(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SSFL_CACHE", str(tmp_path))
    wanted = ["split.users=2", "split.server_labels=6", "run.device=cpu", "train.batch_size=8", VIEWS]
    config = ssfl.load_config("quickstart", [*wanted, "model.cached_views=1"])
    sim = assemble.make(config, Slow, pictures())
    features = sim.pool.features
    assert features is not None
    before = features.seconds
    took = forecast._timed(sim, lambda: sim.score(sim.initial().average, *sim.server_images()))
    assert 0 <= took < features.seconds - before

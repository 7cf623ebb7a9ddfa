"""Any nn.Module as a network: engines agree on it, frozen weights stay, and every mistake is one line."""

import json
import random
import re
import shlex
import shutil
import warnings
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.nn import functional as F

import ssfl
from ssfl.config.settings import Config
from ssfl.core import outside
from ssfl.errors import ConfigError, RunError, SsflWarning
from ssfl.models import external, networks
from ssfl.models.replaced import replaced_functions
from ssfl.runs import assemble, predict
from test_engines_agree import both, relative, unequal, warmed

Make = Callable[..., Config]
Call = Callable[..., tuple[int, str, str]]


class Convolutional(nn.Module):
    """Convolution, LayerNorm and three kinds of dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(1, 12, 3, 2, 1)
        self.norm = nn.LayerNorm([12, 4, 4])
        self.drop, self.channels, self.alpha = nn.Dropout(0.1), nn.Dropout2d(0.1), nn.AlphaDropout(0.05)
        self.fc = nn.Linear(192, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = self.channels(F.relu(self.norm(self.conv(x))))
        return self.fc(self.alpha(self.drop(x).flatten(1)))  # type: ignore[no-any-return]


class BatchNormed(nn.Module):
    """BatchNorm2d, whose count of batches is an integer, and another buffer that is no statistic."""

    shift: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("shift", torch.tensor(0.01))
        self.conv1, self.norm1 = nn.Conv2d(1, 12, 3, padding=1), nn.BatchNorm2d(12)
        self.conv2, self.norm2 = nn.Conv2d(12, 16, 3, 2, 1), nn.BatchNorm2d(16, affine=False)
        self.fc = nn.Linear(256, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.norm1(self.conv1(x + self.shift)))
        return self.fc(F.relu(self.norm2(self.conv2(x))).flatten(1))  # type: ignore[no-any-return]


class Attentive(nn.Module):
    """A ViT of one layer: nn.MultiheadAttention inside nn.TransformerEncoderLayer, with dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.patches = nn.Conv2d(1, 24, 2, 2)
        self.places = nn.Parameter(0.02 * torch.randn(1, 16, 24))
        self.block = nn.TransformerEncoderLayer(24, 2, 48, 0.05, batch_first=True, norm_first=True)
        self.fc = nn.Linear(24, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = self.patches(x).flatten(2).mT + self.places
        return self.fc(self.block(x).mean(1))  # type: ignore[no-any-return]


def frozen_trunk() -> nn.Module:
    """A frozen trunk with batch normalisation and dropout, and a trained head."""
    trunk = nn.Sequential(nn.Conv2d(1, 24, 3, padding=1), nn.BatchNorm2d(24), nn.ReLU(), nn.Dropout(0.5))
    return nn.Sequential(trunk.requires_grad_(False), nn.Flatten(), nn.Linear(24 * 64, 10))


class Tied(nn.Module):
    """Two layers that share their weights."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.fc = nn.Linear(64, 64), nn.Linear(64, 64), nn.Linear(64, 10)
        self.second.weight = self.first.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(F.relu(self.second(F.relu(self.first(x.flatten(1))))))  # type: ignore[no-any-return]


NETWORKS: dict[str, Callable[[], nn.Module]] = {
    "tied weights": Tied,
    "LayerNorm and dropout": Convolutional,
    "BatchNorm2d": BatchNormed,
    "attention": Attentive,
    "frozen trunk": frozen_trunk,
}
SHORT = ["method.name=alternate", "method.threshold=0.6", "federation.rounds=30"]


@pytest.mark.parametrize("network", NETWORKS)
def test_float64_over_five_rounds(quick: Make, network: str) -> None:
    sure = 0.3 if network == "attention" else 0.6
    config = quick(*SHORT, "train.precision=float64", "split.users=4", "train.lr=0.05",
                   f"method.threshold={sure}")  # fmt: skip
    make = NETWORKS[network]
    with warnings.catch_warnings():
        warnings.simplefilter("error", SsflWarning)
        sims = both(config, make)
    before = [held(sim.model, sim.layout.names) for sim in sims]
    start = warmed(sims[0], 10)
    states, masks = [start, start], []
    for _ in range(5):
        told = []
        for i, sim in enumerate(sims):
            states[i], events = sim.play(states[i])
            told.append(events[0])
        assert told[0]["user_mask_rate"] == told[1]["user_mask_rate"]
        assert told[0]["bytes_up"] == 4 * 8 * sims[0].layout.length
        masks.append(told[0]["mask_rate"])
        assert relative(states[1].streams, states[0].streams) < 1e-9
    assert 0.2 < sum(masks) / 5 < 0.95
    assert all(after(sim.model, was) for sim, was in zip(sims, before, strict=True))


def held(model: nn.Module, moved: tuple[str, ...]) -> dict[str, Tensor]:
    tensors = dict(model.named_parameters()) | dict(model.named_buffers())
    return {name: tensor.detach().clone() for name, tensor in tensors.items() if name not in moved}


def after(model: nn.Module, before: dict[str, Tensor]) -> bool:
    now = dict(model.named_parameters()) | dict(model.named_buffers())
    return all(torch.equal(now[name], value) for name, value in before.items())


def test_only_what_is_trained_is_in_the_row(quick: Make) -> None:
    frozen = assemble.make(quick(), frozen_trunk)
    assert frozen.layout.names == ("2.weight", "2.bias")
    normed = assemble.make(quick(), BatchNormed)
    statistics = ("norm1.running_mean", "norm1.running_var", "norm2.running_mean", "norm2.running_var")
    assert normed.layout.names[normed.layout.trained :] == statistics


def test_one_user_equals_many(quick: Make) -> None:
    config = quick(*SHORT, "train.precision=float64", "run.engine=vmap", "split.users=4")
    for make in (Attentive, BatchNormed):
        together = unequal(assemble.make(config, make))
        start = warmed(together, 4)
        alone = unequal(assemble.make(replace(config, run=replace(config.run, users_at_once=1)), make))
        assert relative(alone.play(start)[0].streams, together.play(start)[0].streams) < 1e-12


@pytest.mark.parametrize("engine", ["loop", "vmap"])
def test_users_spread_over_processes(quick: Make, engine: str) -> None:
    config = quick(*SHORT, "train.precision=float64", f"run.engine={engine}", "split.users=4")
    here = assemble.make(config, Attentive)
    spread = assemble.make(replace(config, run=replace(config.run, threads=2)), Attentive)
    try:
        start = here.initial()
        assert relative(spread.play(start)[0].streams, here.play(start)[0].streams) < 1e-12
    finally:
        spread.engine.close()


def test_bfloat16_on_both_engines(quick: Make) -> None:
    for make in (BatchNormed, Attentive, frozen_trunk):
        one, two = both(quick(*SHORT, "train.precision=bfloat16", "federation.period=1"), make)
        start = one.initial()
        first, second = (sim.play(start)[0] for sim in (one, two))
        assert first.streams.dtype == torch.float32
        assert relative(second.streams - start.streams, first.streams - start.streams) < 0.1


@pytest.mark.parametrize("engine", ["loop", "vmap"])
def test_frozen_layers_of_the_package_stay(quick: Make, engine: str) -> None:
    def make() -> nn.Module:
        network = networks.Small(10, (1, 8, 8), "group")
        network.conv1.requires_grad_(False)
        return network

    sim = assemble.make(quick(*SHORT, f"run.engine={engine}"), make)
    assert not isinstance(sim.model, external.External)
    before, state = held(sim.model, sim.layout.names), sim.initial()
    state, _ = sim.play(state)
    assert "conv1.weight" not in sim.layout.names
    assert after(sim.model, before)
    assert relative(state.average, sim.initial().average) > 0


def test_statistics_recomputed_as_by_hand(quick: Make) -> None:
    sim = assemble.make(quick("model.norm_statistics=recompute", "train.precision=float64"), BatchNormed)
    found = sim.layout.unflatten(sim.final_row(sim.initial()))
    plain = external.plain(sim.model)
    batches = [sim.pool.normalised(sim.pool.images[p]) for p in sim.plan.server.images.split(16)]
    plain.eval()
    with torch.no_grad():
        means = [plain.conv1(images + plain.shift).mean((0, 2, 3)) for images in batches]  # type: ignore[operator]
    torch.testing.assert_close(found["norm1.running_mean"], torch.stack(means).mean(0))


def test_a_run_is_a_function_of_its_seed_and_leaves_generators_alone(quick: Make) -> None:
    torch.manual_seed(3), random.seed(3), np.random.seed(3)  # noqa: NPY002
    expected = torch.rand(1), random.random(), np.random.rand()  # noqa: NPY002
    torch.manual_seed(3), random.seed(3), np.random.seed(3)  # noqa: NPY002
    first, again, other = (
        assemble.make(quick(f"run.seed={seed}"), Attentive).initial().average for seed in (1, 1, 2)
    )
    assert torch.equal(first, again)
    assert not torch.equal(first, other)
    assert (torch.rand(1), random.random(), np.random.rand()) == expected  # noqa: NPY002


def test_names_are_those_of_the_module_and_load_into_it(quick: Make, tmp_path: Path) -> None:
    result = ssfl.run(quick("federation.rounds=1"), tmp_path / "run", model=frozen_trunk)
    tensors = load_file(result.path / "model.safetensors")
    assert set(tensors) == {"2.weight", "2.bias"}
    plain = frozen_trunk()
    assert not plain.load_state_dict(tensors, strict=False).unexpected_keys
    model = ssfl.load_model(result.path, model=frozen_trunk)
    assert model(torch.zeros(3, 1, 8, 8)).shape == (3, 10)
    image = np.zeros((1, 8, 8), np.uint8)
    assert ssfl.predict(result.path, image, model=frozen_trunk)[0]["class"] in model.classes
    for refused in (ssfl.load_model, lambda path: ssfl.predict(path, image)):
        with pytest.raises(RunError, match="model=make") as caught:
            refused(result.path)
        assert "model.name=FILE.py:make" in str(caught.value)
    with pytest.raises(RunError) as caught:
        ssfl.load_model(result.path, model=Attentive)
    assert caught.value.key == "model.name"


def test_tied_weights_from_a_file_are_saved_as_trained(quick: Make, tmp_path: Path) -> None:
    """With model.weights, the saved model has both names of a tied weight."""
    save_file({name: t.clone() for name, t in Tied().state_dict().items()}, tmp_path / "start.safetensors")
    config = quick("federation.rounds=2", f"model.weights={tmp_path / 'start.safetensors'}")
    ssfl.run(config, out=tmp_path / "run", model=Tied)
    tensors = load_file(tmp_path / "run/model.safetensors")
    assert torch.equal(tensors["first.weight"], tensors["second.weight"])
    assert not torch.equal(tensors["first.weight"], load_file(tmp_path / "start.safetensors")["first.weight"])
    network = ssfl.load_model(tmp_path / "run", model=Tied).network
    assert all(torch.equal(tensor, tensors[name]) for name, tensor in network.state_dict().items())
    exported = predict.export(tmp_path / "run", tmp_path / "exported", model=Tied)
    assert load_file(exported[0]).keys() == tensors.keys()


def test_dropout_is_that_of_the_module() -> None:
    """Rates and scales of every kind, by counting."""
    x, key = torch.ones(200, 50, 4, 4), torch.tensor(3)
    for name, shape in {"dropout": x.shape, "dropout2d": (200, 50, 1, 1)}.items():
        with replaced_functions(key):
            dropped = getattr(F, name)(x, 0.3, True)
            other = getattr(F, name)(x, 0.3, True)
        assert not torch.equal(dropped, other)
        assert dropped.unique().tolist() == pytest.approx([0, 1 / 0.7])
        assert float((dropped == 0).double().mean()) == pytest.approx(0.3, abs=0.02)
        assert torch.equal(dropped, dropped[tuple(slice(size) for size in shape)].expand_as(x))
    x = torch.randn(100_000, generator=torch.Generator().manual_seed(0))
    with replaced_functions(key):
        kept = F.alpha_dropout(x, 0.2, True)
        assert F.dropout(x, 0.5, False) is x
    assert float(kept.mean()) == pytest.approx(0, abs=0.02)
    assert float(kept.std()) == pytest.approx(1, abs=0.02)


def test_attention_is_that_of_torch() -> None:
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(2, 4, 5, 8, generator=generator, dtype=torch.float64) for _ in range(3))
    mask = torch.rand(5, 5, generator=generator) < 0.7
    cases = [{}, {"is_causal": True}, {"attn_mask": mask | torch.eye(5, dtype=torch.bool)}, {"scale": 0.3},
             {"attn_mask": torch.randn(5, 5, generator=generator, dtype=torch.float64)}]  # fmt: skip
    for case in cases:
        expected = F.scaled_dot_product_attention(q, k, v, **case)  # type: ignore[arg-type]
        with replaced_functions(None):
            torch.testing.assert_close(F.scaled_dot_product_attention(q, k, v, **case), expected)  # type: ignore[arg-type]


class Looping(nn.Module):
    """Something that torch cannot batch: a choice that depends on the numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(64, 10)

    def forward(self, x: Tensor) -> Tensor:
        logits = self.fc(x.flatten(1))
        return logits if float(logits.detach().sum()) > 0 else 2 * logits  # type: ignore[no-any-return]


def test_what_cannot_be_batched_is_trained_one_after_another(quick: Make) -> None:
    config = quick(*SHORT, "train.precision=float64", "split.users=4")
    with pytest.warns(SsflWarning):
        one, two = both(config, Looping)
    start = warmed(one, 2)
    assert relative(two.play(start)[0].streams, one.play(start)[0].streams) < 1e-12


def linear(outputs: int = 10) -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(64, outputs))


class Drawing(nn.Module):
    """Noise in training, from a generator of one's choice."""

    def __init__(self, draw: Callable[[], float]) -> None:
        super().__init__()
        self.fc, self.draw = nn.Linear(64, 10), draw

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(x.flatten(1)) + (self.draw() if self.training else 0)  # type: ignore[no-any-return]


class Wrong(nn.Module):
    """Something else than logits."""

    def __init__(self, change: Callable[[Tensor], object]) -> None:
        super().__init__()
        self.fc, self.change = nn.Linear(64, 10), change

    def forward(self, x: Tensor) -> object:
        return self.change(self.fc(x.flatten(1)))


def raising() -> nn.Module:
    raise ValueError("no weights here")


class Centred(nn.Module):
    """Subtracts a moving average, which is a buffer; `assign` says whether it is replaced or written into."""

    centre: Tensor

    def __init__(self, assign: bool) -> None:
        super().__init__()
        self.register_buffer("centre", torch.zeros(64))
        self.assign = assign

    def forward(self, x: Tensor) -> Tensor:
        x = x.flatten(1)
        if self.training and self.assign:
            self.centre = 0.5 * self.centre + 0.5 * x.detach().mean(0)
        elif self.training:
            self.centre.mul_(0.5).add_(x.detach().mean(0), alpha=0.5)
        return x - self.centre


class KeyedCentre(networks.Small):
    """Only layers of the package have parameters, so this network is not wrapped."""

    def __init__(self) -> None:
        super().__init__(10, (1, 8, 8), "none")
        self.centre = Centred(False)

    def forward(self, x: Tensor, key: Tensor | None = None) -> Tensor:
        return super().forward(self.centre(x).view_as(x), key)


def spectral() -> nn.Module:
    layer = nn.utils.parametrizations.spectral_norm(nn.Linear(64, 10))
    return nn.Sequential(nn.Flatten(), layer)


OWN = np.random.default_rng(1)


class Twice(nn.Module):
    """Has its layer under two names."""

    def __init__(self) -> None:
        super().__init__()
        self.first = linear()
        self.parts = nn.ModuleList([self.first])

    def forward(self, x: Tensor) -> Tensor:
        return self.first(x)  # type: ignore[no-any-return]


class Scaled(nn.Module):
    """Multiplies the logits by a single trained number without dimensions."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.scale = linear(), nn.Parameter(torch.ones([]))

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x) * self.scale  # type: ignore[no-any-return]


MISTAKES: dict[str, tuple[object, object]] = {
    "raises": (raising, ValueError),
    "not a function": (linear(), nn.Sequential),
    "not a module": (lambda: 3, 3),
    "too few logits": (lambda: linear(7), (2, 7)),
    "too many dimensions": (lambda: Wrong(lambda y: y[:, None]), (2, 1, 10)),
    "a tuple": (lambda: Wrong(lambda y: (y, y)), "a value of type tuple"),
    "probabilities": (lambda: Wrong(lambda y: y.softmax(1)), "softmax"),
    "integers": (lambda: Wrong(lambda y: y.long()), "a tensor of torch.int64"),
    "other images": (lambda: nn.Conv2d(3, 10, 3), RuntimeError),
    "all frozen": (lambda: linear().requires_grad_(False), 0),
    "RReLU": (lambda: nn.Sequential(linear(), nn.RReLU()), "torch (rrelu)"),
    "torch.rand": (lambda: Drawing(lambda: float(torch.rand(()))), "torch (rand)"),
    "random": (lambda: Drawing(random.random), "Python's random"),
    "numpy": (lambda: Drawing(lambda: np.random.random()), "numpy.random"),  # noqa: NPY002
    "a generator": (lambda: Drawing(OWN.random), "a generator of its own"),
    "dropout always on": (lambda: Wrong(F.dropout), Exception),
    "cumulative statistics": (lambda: nn.Sequential(nn.BatchNorm2d(1, momentum=None), linear()), "0"),
    "a centre in place": (lambda: nn.Sequential(Centred(False), nn.Linear(64, 10)), "0.centre"),
    "a centre replaced": (lambda: nn.Sequential(Centred(True), nn.Linear(64, 10)), "0.centre"),
    "a centre of the package's layers": (KeyedCentre, "centre.centre"),
    "spectral norm": (spectral, "1.parametrizations.weight.0._u"),
    "two names for a part": (Twice, "parts.0"),
}
"""What is wrong with a network, and the value of the error: what it gave, raised or drew from."""


@pytest.mark.parametrize("mistake", MISTAKES)
def test_every_mistake_is_one_line(quick: Make, mistake: str) -> None:
    make, value = MISTAKES[mistake]
    for engine in ("loop", "vmap"):
        with pytest.raises(ConfigError) as caught:
            assemble.make(quick(f"run.engine={engine}"), make)  # type: ignore[arg-type]
        error = caught.value
        assert error.key == "model.name"
        assert isinstance(error.value, value) if isinstance(value, type) else error.value == value
        assert str(error).startswith("model")  # the argument, not a setting that nobody wrote
        assert "in memory" not in str(error)
        assert "\n" not in str(error)


@pytest.mark.parametrize("engine", ["loop", "vmap"])
def test_a_parameter_may_have_no_dimensions(quick: Make, engine: str) -> None:
    sim = assemble.make(quick(f"run.engine={engine}"), Scaled)
    state, _ = sim.play(sim.initial())
    assert float(sim.layout.unflatten(state.average)["scale"]) != 1


def test_log_probabilities_are_logits(quick: Make) -> None:
    """A softmax of them gives the same probabilities as of the logits."""
    assemble.make(quick("run.engine=loop"), lambda: Wrong(lambda y: y.log_softmax(1)))


def test_a_frozen_layer_may_have_such_buffers(quick: Make) -> None:
    """It stays in evaluation mode, so its buffers do not change."""
    trunk = nn.Sequential(nn.Flatten(), nn.Linear(64, 64), Centred(False)).requires_grad_(False)
    assemble.make(quick(), lambda: nn.Sequential(trunk, nn.Linear(64, 10)))


def test_a_module_for_float32_alone_says_so(quick: Make) -> None:
    with pytest.raises(ConfigError) as caught:
        assemble.make(
            quick("train.precision=bfloat16"),
            lambda: nn.Sequential(Wrong(lambda y: y.float()), nn.Linear(10, 10)),
        )
    assert (caught.value.key, caught.value.fix) == ("train.precision", "train.precision=float32")


FILE = """
from torch import nn
def make():
    frozen = nn.Conv2d(1, 4, 3).requires_grad_(False)
    return nn.Sequential(frozen, nn.ReLU(), nn.Dropout(0.2), nn.Flatten(), nn.Linear(144, 10))
"""
SETS = [word for s in ("federation.rounds=3", "federation.period=2", "train.batch_size=8", "run.threads=1",
                       "run.checkpoint_every=1") for word in ("--set", s)]  # fmt: skip


@pytest.fixture
def forgetful(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """Makes this process forget what was typed, as a new one would."""

    def forget() -> None:
        monkeypatch.setattr(outside, "_trusted", set())

    forget()
    return forget


def test_a_file_from_the_command_line_to_the_export(
    ssfl: Call, forgetful: Callable[[], None], folders: Path
) -> None:
    Path("mine.py").write_text(FILE)
    assert ssfl("run", *SETS, "--set", "model.name=mine.py:make", "--out", "run")[0] == 0
    image = str(next((folders / "labelled").rglob("*.png")))
    Path("elsewhere").mkdir()
    shutil.move("mine.py", "elsewhere/mine.py")
    for words in (["predict", "run", image], ["export", "run", "digits"]):
        forgetful()
        code, _, err = ssfl(*words)
        assert (code, err.count("\n")) == (2, 1)
        assert "add --with FILE.py" in err
        code, out, err = ssfl(*words, "--with", "elsewhere/mine.py")
        assert (code, err) == (0, ""), err
        assert out
    assert set(load_file("digits.safetensors")) == {"4.weight", "4.bias"}
    program = torch.export.load("digits.pt2").module()
    assert program(torch.zeros(5, 1, 8, 8, dtype=torch.uint8)).shape == (5, 10)
    forgetful()
    assert "add --with FILE.py" in ssfl("report", "run")[2]
    assert ssfl("report", "run", "--with", "elsewhere/mine.py")[2] == ""
    forgetful()
    Path("elsewhere/mine.py").write_text(FILE + "# changed\n")
    assert "has changed since" in ssfl("predict", "run", image, "--with", "elsewhere/mine.py")[2]


def test_a_config_file_does_not_import_code(ssfl: Call, forgetful: Callable[[], None]) -> None:
    Path("mine.py").write_text("from pathlib import Path\nPath('ran').touch()\n" + FILE)
    Path("own.toml").write_text(
        "[data]\nname = 'digits'\n[federation]\nrounds = 1\n[model]\nname = 'mine.py:make'\n"
    )
    code, _, err = ssfl("run", "own.toml", "--out", "run")
    assert (code, Path("ran").exists(), Path("run").exists()) == (2, False, False)
    assert "add --with" in err
    assert (
        ssfl("run", "own.toml", "--out", "run", "--with", "mine.py", "--set", "federation.period=2")[0] == 0
    )


def test_the_option_that_a_message_names_works_in_that_command(
    ssfl: Call, forgetful: Callable[[], None]
) -> None:
    """A config that names a network and data: every command that takes a config asks for the file, and takes
    it."""
    Path("my code.py").write_text(
        FILE + "\ndef digits():\n    import numpy, ssfl\n"
        "    x, y = numpy.arange(60 * 64).reshape(60, 8, 8) % 251, numpy.arange(60) % 10\n"
        "    return ssfl.Data(x.astype('uint8'), y, x[:20].astype('uint8'), y[:20])\n"
    )
    Path("own.toml").write_text(
        "[data]\nname = 'my code.py:digits'\n[split]\nusers = 2\n[federation]\nrounds = 2\nperiod = 1\n"
        "[train]\nbatch_size = 4\n[model]\nname = 'my code.py:make'\n"
    )
    contest = ["contest", "own.toml", "--no-tune", "--methods", "server-only", "--seeds", "1", "--quiet",
               "--set", "data.validation=0.3"]  # fmt: skip
    for words in (["split", "own.toml"], contest, ["run", "own.toml", "--quiet"]):
        forgetful()
        code, _, err = ssfl(*words)
        assert (code, err.count("\n")) == (2, 1), err
        option = re.findall("--with '[^']*'", err)[0]
        forgetful()
        code, _, err = ssfl(*words, *shlex.split(option))
        assert code == 0, err


def stop_after(out: Path, rounds: int) -> None:
    """As if a kill had come between two checkpoints: the run's later files are gone."""
    for file in ("summary.json", "model.safetensors"):
        (out / file).unlink()
    kept = [
        line
        for line in (out / "events.jsonl").read_text().splitlines()
        if json.loads(line)["round"] <= rounds
    ]
    (out / "events.jsonl").write_text("\n".join(kept) + "\n")
    for saved in (out / "checkpoints").iterdir():
        if int(saved.stem.removeprefix("round-")) > rounds:
            saved.unlink()


def test_stopped_and_resumed_to_the_same_bytes(ssfl: Call, forgetful: Callable[[], None]) -> None:
    Path("mine.py").write_text(FILE)
    assert ssfl("run", *SETS, "--set", "model.name=mine.py:make", "--out", "run")[0] == 0
    expected = Path("run/model.safetensors").read_bytes()
    shutil.copytree("run", "changed")
    stop_after(Path("run"), 2)
    forgetful()
    code, _, err = ssfl("resume", "run", "--quiet")
    assert (code, err.count("\n")) == (2, 1)
    assert "--with" in err
    assert ssfl("resume", "run", "--quiet", "--with", "mine.py")[0] == 0
    assert Path("run/model.safetensors").read_bytes() == expected
    stop_after(Path("changed"), 2)
    Path("changed/outside.json").rename("away")
    assert "outside.json" in ssfl("resume", "changed", "--with", "mine.py")[2]
    Path("away").rename("changed/outside.json")
    Path("mine.py").write_text(FILE.replace("0.2", "0.3"))
    assert "has changed since changed was started" in ssfl("resume", "changed", "--with", "mine.py")[2]


def test_resuming_what_is_in_memory(quick: Make, tmp_path: Path) -> None:
    config, out = quick("federation.rounds=3", "run.checkpoint_every=1"), tmp_path / "run"
    expected = (ssfl.run(config, out, model=frozen_trunk).path / "model.safetensors").read_bytes()
    stop_after(out, 2)
    with pytest.raises(RunError, match=r"ssfl.resume\('.*run', model=make\)"):
        ssfl.resume(out)

    def other() -> nn.Module:
        made = frozen_trunk()
        nn.init.zeros_(made[0][0].bias)  # type: ignore[index]
        return made

    with pytest.raises(RunError) as caught:
        ssfl.resume(out, model=other)
    assert (caught.value.key, caught.value.value) == ("model.name", "in memory")
    ssfl.resume(out, model=frozen_trunk)
    assert (out / "model.safetensors").read_bytes() == expected


@pytest.mark.parametrize("engine", ["loop", "vmap"])
def test_the_example(quick: Make, engine: str, tmp_path: Path) -> None:
    path = Path(__file__).parents[1] / "examples" / "own" / "vit.py"
    short = quick("federation.rounds=1", "federation.period=1", "train.batch_size=4", "split.users=2",
                  "data.size=32", f"run.engine={engine}")  # fmt: skip
    result = ssfl.run(short, tmp_path / "run", model=f"{path}:make")
    assert 0 <= result.accuracy <= 1
    assert 0.8e6 < json.loads((result.path / "summary.json").read_text())["parameters"] < 1.2e6

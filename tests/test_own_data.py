"""Data from Python: owners, validation, normalisation and augmentations are respected, whatever trains."""

import json
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from sklearn.datasets import load_digits
from torch import Tensor

import ssfl
import ssfl as library  # where the fixture of that name is the command
from conftest import Call
from ssfl.config.loading import Config
from ssfl.core import outside
from ssfl.data import augment, inventory, sources
from ssfl.errors import ConfigError, RunError, SsflWarning, warn_user
from ssfl.runs import assemble

Quick = Callable[..., Config]
ROOT = Path(__file__).resolve().parent.parent
DIGITS = load_digits()
X = np.rint(DIGITS.images * (255 / 16)).astype(np.uint8)
Y = DIGITS.target
NAMES = np.array([f"d{label}" for label in Y[:400]])
TEST = (X[1500:], Y[1500:])
SERVER = np.arange(60)
USERS = [np.arange(60, 160), np.arange(160, 300), np.arange(300, 350)]
FIXED: dict[str, Any] = {"mean": [0.3], "std": [0.37], "classes": tuple("0123456789")}


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    """Images that belong to nobody are told as a warning."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


@pytest.fixture
def short(quick: Quick) -> Quick:
    def make(*overrides: str) -> Config:
        return quick("federation.rounds=2", "method.threshold=0.2", *overrides)

    return make


def data(images: np.ndarray = X[:400], labels: np.ndarray = Y[:400], **more: Any) -> ssfl.Data:
    """Digits of three users and a server; fifty belong to nobody."""
    given: dict[str, Any] = {"server": SERVER, "users": USERS} | FIXED | more
    return ssfl.Data(images, labels, *TEST, **given)


def tensors(path: Path) -> dict[str, Tensor]:
    return dict(ssfl.load_model(path).network.state_dict())


def equal(one: Path, other: Path) -> bool:
    first, second = tensors(one), tensors(other)
    return all(torch.equal(first[name], second[name]) for name in first)


def rounds(result: ssfl.Result) -> list[dict[str, Any]]:
    return [event for event in result.history if event["event"] == "round"]


def test_owners_are_those_that_were_given(short: Quick, tmp_path: Path) -> None:
    made = data(users={"anna": USERS[0], "bert": USERS[1], "cleo": USERS[2]})
    ssfl.run(short("split.users=7"), tmp_path / "run", data=made)
    told = json.loads((tmp_path / "run/split.json").read_text())
    assert (told["users"], told["sizes"], told["names"]) == (3, [100, 140, 50], ["anna", "bert", "cleo"])
    assert told["server"] == np.bincount(Y[SERVER], minlength=10).tolist()
    assert told["user_classes"] == [np.bincount(Y[owned], minlength=10).tolist() for owned in USERS]
    config = ssfl.load_config(tmp_path / "run/config.toml")
    assert (config.data.name, config.split.users, config.split.scheme) == ("in memory", 3, "given")
    assert config.split.server_labels == 60
    sim = assemble.make(short(), data=made)
    for chosen, owned in zip(sim.parts.users, USERS, strict=True):
        assert np.array_equal(chosen, owned)


def test_images_that_belong_to_nobody_are_told_with_a_way_out(short: Quick) -> None:
    with pytest.warns(SsflWarning, match=r"\b50 .*server= or users="):
        assemble.make(short(), data=data())
    with pytest.warns(SsflWarning, match=r"\b100 .*split\.server_labels"):
        assemble.make(short("split.server_labels=10"), data=data(server=None))
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        sim = assemble.make(short("split.server_labels=110"), data=data(server=None))
    assert len(sim.parts.server) == 110
    assert not [one for one in told if "owner" in str(one.message)]


def test_nobody_trains_on_an_image_of_somebody_else(short: Quick, tmp_path: Path) -> None:
    """What an image, or a user's label, is changed to shows where it is used and nowhere else."""
    config = short("run.engine=loop")
    plain = ssfl.run(config, tmp_path / "plain", data=data())
    images, labels = X[:400].copy(), Y[:400].copy()
    images[350:], labels[60:] = 255 - images[350:], labels[60:][::-1]  # nobody's images, and users' labels
    ssfl.run(config, tmp_path / "unused", data=data(images, labels))
    assert equal(tmp_path / "plain", tmp_path / "unused")
    images[160:300] = 255 - images[160:300]  # the second user's
    other = ssfl.run(config, tmp_path / "second", data=data(images))
    first, changed = (rounds(result)[0]["user_update_norm"] for result in (plain, other))
    assert [a == b for a, b in zip(first, changed, strict=True)] == [True, False, True]
    assert not equal(tmp_path / "plain", tmp_path / "second")


def test_arrays_in_memory_are_an_npz_file(short: Quick, tmp_path: Path) -> None:
    """Without owners [split] deals them, as it does those of a file."""
    np.savez(tmp_path / "digits.npz", x_train=X[:400], y_train=Y[:400], x_test=TEST[0], y_test=TEST[1],
             x_unlabelled=X[400:600])  # fmt: skip
    settings = ["data.validation=0.1", "split.users=4", "split.scheme=iid"]
    given: dict[str, Any] = {
        "server": None,
        "users": None,
        "mean": None,
        "std": None,
        "unlabelled": torch.tensor(X[400:600]),
    }
    memory = ssfl.run(short(*settings), tmp_path / "memory", data=data(**given))
    file = ssfl.run(short(*settings, f"data.path={tmp_path / 'digits.npz'}"), tmp_path / "file")
    assert equal(tmp_path / "memory", tmp_path / "file")
    assert memory.accuracy == file.accuracy
    floats = ssfl.Data(X[:400] / np.float32(255), Y[:400], *TEST)
    assert torch.equal(floats.dataset.images, torch.from_numpy(X[:400])[:, None])


@pytest.mark.parametrize("missing", [-1, None])
def test_labels_may_be_names_with_gaps(missing: int | None) -> None:
    mixed = [*NAMES[:350].tolist(), *[missing] * 50]
    test = (X[1500:], [f"d{label}" for label in Y[1500:]])
    given: dict[str, Any] = {"server": SERVER, "users": USERS}
    expected = np.r_[Y[:350], [-1] * 50]
    for labels in (mixed, np.array(mixed, object), np.array(mixed, object)[:, None]):
        made = ssfl.Data(X[:400], labels, *test, **given).dataset
        assert made.classes == tuple(f"d{k}" for k in range(10))
        assert np.array_equal(made.labels, expected)
    items = list(zip(X[:400], mixed, strict=True))
    assert np.array_equal(ssfl.Data.of(items, list(zip(*test, strict=True))).dataset.labels, expected)
    numbers = np.array([*Y[:350].tolist(), *[missing] * 50], object)
    assert np.array_equal(data(labels=numbers).dataset.labels, expected)


def test_text_that_looks_like_no_label_may_be_a_class() -> None:
    names = np.where(Y == 9, "-1", Y.astype(str))
    classes = (*"012345678", "-1")
    made = ssfl.Data(X[:400], names[:400], X[1500:], names[1500:], classes=classes).dataset
    assert np.array_equal(made.labels, Y[:400])


def test_a_boolean_mask_selects_as_its_numbers_do() -> None:
    mask = np.isin(np.arange(400), SERVER)
    server = data(server=mask).dataset.server
    assert server is not None
    assert np.array_equal(server, SERVER)


def test_what_is_missing_of_the_owners_is_dealt(short: Quick) -> None:
    sim = assemble.make(short("split.users=4"), data=data(users=None))
    assert np.array_equal(sim.parts.server, SERVER)
    assert sorted(np.concatenate(list(sim.parts.users))) == list(range(60, 400))
    assert sim.config.split.server_labels == 60
    sim = assemble.make(short("split.server_labels=20"), data=data(server=None))
    assert set(sim.parts.server) <= {*range(60), *range(350, 400)}
    assert np.bincount(Y[sim.parts.server]).tolist() == [2] * 10
    whole = ssfl.load_config("own", ["run.device=cpu", "run.threads=1", "data.name=digits"])
    sim = assemble.make(whole, data=data(server=None))
    assert sorted(sim.parts.server) == [*range(60), *range(350, 400)]


def test_own_validation_images_are_looked_at_and_never_trained_on(short: Quick, tmp_path: Path) -> None:
    config = short("run.test=last", "data.validation=0.1")
    by_number = ssfl.run(config, tmp_path / "number", data=data(validation=np.arange(350, 400)))
    pair = (X[350:400], Y[350:400])
    by_array = ssfl.run(config, tmp_path / "array", data=data(X[:350], Y[:350], validation=pair))
    assert equal(tmp_path / "number", tmp_path / "array")
    scores = [result.summary["validation_accuracy"] for result in (by_number, by_array)]
    assert scores[0] == scores[1]
    model = ssfl.load_model(tmp_path / "number")
    right = model(torch.tensor(pair[0])[:, None]).argmax(-1) == torch.tensor(pair[1])
    assert scores[0] == pytest.approx(float(right.float().mean()))
    dealt = assemble.make(short(), data=data(users=None, server=None, validation=np.arange(350, 400)))
    owned = np.concatenate([dealt.parts.server, *dealt.parts.users])
    assert sorted(owned) == list(range(350))


def test_normalisation_and_size(short: Quick) -> None:
    sim = assemble.make(short("data.size=16"), data=data())
    assert (sim.dataset.shape, sim.dataset.mean, sim.dataset.std) == ((1, 16, 16), (0.3,), (0.37,))
    assert ssfl.Data(X[:400], Y[:400], *TEST).dataset.mean[0] == pytest.approx((X[:400] / 255).mean())


def own_weak(images: Tensor, draws: Tensor) -> Tensor:
    return augment.weak_views(images, draws[:, : augment.WEAK_DRAWS], False)


def own_strong(images: Tensor, draws: Tensor) -> Tensor:
    return augment.strong_views(images, draws[:, : augment.STRONG_DRAWS], False)


@pytest.mark.parametrize("how", ["run.engine=loop", "run.engine=vmap", "run.threads=2"])
def test_own_augmentations_are_called_as_the_packages_own(short: Quick, tmp_path: Path, how: str) -> None:
    """The package's augmentations passed as one's own give the same bytes; others do not."""
    ssfl.run(short(how), tmp_path / "plain", data=data())
    ssfl.run(short(how), tmp_path / "own", data=data(weak=own_weak, strong=own_strong))
    assert equal(tmp_path / "plain", tmp_path / "own")
    ssfl.run(
        short(how), tmp_path / "other", data=data(weak=own_weak, strong=lambda images, draws: 255 - images)
    )
    assert not equal(tmp_path / "plain", tmp_path / "other")


def test_engines_agree_on_own_data(short: Quick) -> None:
    states = []
    for engine in ("loop", "vmap"):
        sim = assemble.make(
            short(f"run.engine={engine}", "train.precision=float64"), data=data(weak=own_weak)
        )
        state = sim.initial()
        while state.round < sim.rounds:
            state, _ = sim.play(state)
        states.append(state.average)
    assert torch.allclose(states[0], states[1], rtol=1e-6, atol=1e-9)


def test_a_run_goes_on_with_the_same_data_and_no_others(short: Quick, tmp_path: Path, ssfl: Call) -> None:
    config = short("federation.rounds=4")
    library.run(config, tmp_path / "straight", data=data(strong=own_strong))
    stopped = library.Federation(config, data=data(strong=own_strong), out=tmp_path / "stopped")
    next(stopped)
    stopped.stop()
    with pytest.raises(RunError, match=r"ssfl\.resume\(.*stopped', data=data\)"):
        library.resume(tmp_path / "stopped")
    code, _, err = ssfl("resume", str(tmp_path / "stopped"))
    assert (code, err.count("\n")) == (2, 1)
    images = X[:400].copy()
    images[0] += 1
    for other in (
        data(images, strong=own_strong),
        data(users=[USERS[0], USERS[1], USERS[2][1:]], strong=own_strong),
        data(server=SERVER[:-1], strong=own_strong),
        data(mean=[0.4], strong=own_strong),
        data(validation=[399], strong=own_strong),
        data(),
    ):
        with pytest.raises(RunError) as changed:
            library.resume(tmp_path / "stopped", data=other)
        assert changed.value.key == "data"
    with pytest.raises(ConfigError) as caught:
        library.resume(tmp_path / "stopped", data=data(users=USERS[:2], strong=own_strong))
    assert (caught.value.key, caught.value.value, caught.value.fix) == ("split.users", 3, "split.users=2")
    library.resume(tmp_path / "stopped", data=data(strong=own_strong))
    assert equal(tmp_path / "straight", tmp_path / "stopped")
    with warnings.catch_warnings():
        warnings.simplefilter("default")
        code, _, err = ssfl("report", str(tmp_path / "stopped"))
    assert code == 0
    assert "the report has no confusion matrix, test images and training views of" in err
    for text in ((tmp_path / "stopped/report.html").read_text(), err):
        assert "cannot load what was passed from Python, here the images (data=...)" in text
        assert "train with data.name=FILE.py:function; then `ssfl report RUN --with FILE.py`" in text
        assert "pass them again" not in text


MINE = """
import numpy as np, ssfl
from sklearn.datasets import load_digits
def load():
    x, y = load_digits(return_X_y=True)
    x = (x * 15).astype("uint8").reshape(-1, 8, 8)
    users = [range(60, 200), range(200, 400)]
    return ssfl.Data(x[:400], y[:400], x[400:], y[400:], server=range(60), users=users)
def wrong(): return [1, 2]
def raises(): raise KeyError("a column")
def bad(): return ssfl.Data(1, 2, 3, 4)
number = 3
"""


def test_a_function_of_a_file_gives_the_data(ssfl: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(outside, "_trusted", set())
    Path("mine.py").write_text(MINE)
    settings = ["federation.rounds=1", "federation.period=2", "run.threads=1", "train.warmup=0"]
    sets = [word for setting in settings for word in ("--set", setting)]
    code, _, err = ssfl("run", "--set", "data.name=mine.py:load", *sets, "--out", "run", "--quiet")
    assert (code, err) == (0, "")
    assert json.loads(Path("run/split.json").read_text())["sizes"] == [140, 200]
    assert ssfl("split", "own", "--set", "data.name=mine.py:load")[0] == 0
    library.run(library.load_config("own", settings), "again", data="mine.py:load")
    assert equal(Path("run"), Path("again"))
    for name, told in (
        ("wrong", "list"),
        ("raises", "KeyError: 'a column'"),
        ("bad", "images"),
        ("number", "int"),
        ("lod", "did you mean load?"),
    ):
        code, _, err = ssfl("split", "own", "--set", f"data.name=mine.py:{name}")
        assert (code, err.count("\n")) == (2, 1), err
        assert told in err


def test_code_that_a_run_folder_names_is_not_imported(ssfl: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(outside, "_trusted", set())
    Path("mine.py").write_text("raise SystemExit('imported')")
    Path("other.toml").write_text('[data]\nname = "mine.py:load"\n[federation]\nrounds = 1\n')
    code, _, err = ssfl("run", "other.toml")
    assert (code, err.count("\n")) == (2, 1)
    assert "--with" in err


class Features(dict[str, Any]):
    """As a Hugging Face data set has them: features["label"].names."""


class ClassLabel:
    names = tuple("0123456789")


class HuggingFace:
    """The interface of datasets.Dataset as far as it is used: len, [i] -> dict, features."""

    features = Features(img=None, label=ClassLabel())

    def __init__(self, images: np.ndarray, labels: np.ndarray) -> None:
        self.images, self.labels = images, labels

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, place: int) -> dict[str, Any]:
        return {"img": Image.fromarray(self.images[place]), "label": int(self.labels[place])}


def test_data_sets_of_torch_and_hugging_face_are_arrays() -> None:
    plain = data().dataset
    scaled = torch.from_numpy(X[:400] / np.float32(255))[:, None]
    tests = [(image, label) for image, label in zip(*TEST, strict=True)]
    for train in (
        HuggingFace(X[:400], Y[:400]),
        torch.utils.data.TensorDataset(scaled, torch.from_numpy(Y[:400])),
        [(image, str(label)) for image, label in zip(X[:400], Y[:400], strict=True)],
    ):
        test = [(i, str(n)) for i, n in tests] if isinstance(train, list) else tests
        made = ssfl.Data.of(
            train, test, server=SERVER, users=USERS, unlabelled=HuggingFace(X[400:410], Y)
        ).dataset
        assert torch.equal(made.images[:400], plain.images)
        assert torch.equal(made.labels, torch.cat([plain.labels, torch.full((10,), -1)]))
        assert torch.equal(made.test_images, plain.test_images)
        assert made.classes == plain.classes
    colour = [(np.zeros((8, 6, 3), np.uint8), 0), (Image.new("L", (6, 8)), 1), (torch.zeros(3, 8, 6), 0)]
    assert ssfl.Data.of(colour, colour).dataset.shape == (3, 8, 6)


def other_size(images: Tensor, draws: Tensor) -> Tensor:
    return images[..., :4]


BAD: dict[str, tuple[dict[str, Any], str, Any]] = {
    "overlapping users": ({"users": [[70, 71], [71, 72]]}, "users[1]", 71),
    "user and server": ({"users": {"a": [5]}}, "users['a']", 5),
    "twice": ({"users": [[70, 70]]}, "users[0]", 70),
    "user and validation": ({"validation": [70]}, "users[0]", 70),
    "empty user": ({"users": [[70], []]}, "users[1]", None),
    "no user": ({"users": []}, "users", None),
    "index out of range": ({"users": [[70], [400]]}, "users[1]", 400),
    "short mask": ({"server": [True] * 4}, "server", [4]),
    "long mask of a user": ({"users": [[70], np.ones(401, bool)]}, "users[1]", [401]),
    "negative index": ({"server": [-1]}, "server", -1),
    "no index": ({"server": [0.5]}, "server", "float64"),
    "label out of range": ({"labels": Y[:400] + 1}, "labels", 10),
    "label below": ({"labels": Y[:400] - 2}, "labels", -2),
    "float labels": ({"labels": Y[:400] / 2}, "labels", "float64"),
    "missing class": ({"labels": np.where(Y[:400] == 3, 2, Y[:400])}, "labels", "3"),
    "text -1": ({"labels": [*NAMES[:399].tolist(), "-1"], "classes": None}, "labels", "-1"),
    "empty text": ({"labels": np.r_[NAMES[:399], [""]], "classes": None}, "labels", ""),
    "names and numbers": ({"labels": [*NAMES[:399].tolist(), 3]}, "labels", 3),
    "too large a number": ({"labels": [*Y[:399], 2**70]}, "labels", 2**70),
    "too few labels": ({"labels": Y[:399]}, "images", 399),
    "unlabelled at the server": ({"labels": np.r_[-1, Y[1:400]]}, "server", -1),
    "classes twice": ({"classes": ["a"] * 10}, "classes", "a"),
    "wrong shape": ({"images": X[:400, :, 0]}, "images", None),
    "five channels": ({"images": np.zeros((400, 8, 8, 5), np.uint8)}, "images", None),
    "bright floats": ({"images": X[:400].astype(float)}, "images", None),
    "no images": ({"images": X[:0]}, "images", 0),
    "test size": ({"test_images": X[1500:, :6]}, "test_images", "1x6x8"),
    "test label": ({"test_labels": np.full(297, -1)}, "test_labels", -1),
    "validation size": ({"validation": (X[:9, :6], Y[:9])}, "validation", "1x6x8"),
    "mean": ({"mean": [0.1, 0.2]}, "mean", [0.1, 0.2]),
    "std": ({"std": [0.0]}, "std", [0.0]),
    "augmentation of other size": ({"weak": other_size}, "weak", "torch.uint8 [4, 1, 8, 4]"),
    "augmentation of other type": ({"strong": lambda x, d: x / 255}, "strong", "torch.float32 [4, 1, 8, 8]"),
    "augmentation that raises": ({"strong": lambda x, d: 1 / 0}, "strong", ZeroDivisionError),
    "augmentation in place": ({"weak": lambda x, d: x.fill_(1)}, "weak", None),
    "own randomness": ({"weak": lambda x, d: torch.randint_like(x, 255)}, "weak", None),
    "draws of another image": ({"strong": lambda x, d: x // 2 + (d[0, 0] % 120).byte()}, "strong", None),
    "mean of grey levels": ({"mean": [127.0]}, "mean", [127.0]),
    "others of the batch": ({"weak": lambda x, d: 255 - x.flip(0)}, "weak", None),
}  # fmt: skip


@pytest.mark.parametrize("what", BAD)
def test_bad_input_is_one_clear_line(what: str) -> None:
    changed, key, value = BAD[what]
    given = {"images": X[:400], "labels": Y[:400], "test_images": TEST[0], "test_labels": TEST[1]}
    given |= {"server": SERVER, "users": USERS} | FIXED | changed
    with pytest.raises(ConfigError) as caught:
        ssfl.Data(**given)
    error = caught.value
    assert error.key == key
    assert isinstance(error.value, value) if isinstance(value, type) else error.value == value
    assert str(error).startswith(key.partition("[")[0]) or str(value) in str(error)
    assert "\n" not in str(error)


@pytest.mark.parametrize(
    ("train", "key", "value"),
    [
        (iter([]), "train", None),
        ([], "train", 0),
        ([{"pixels": X[0]}], "train[0]", ["pixels"]),
        ([X[0]], "train[0]", None),
        ([(X[0], 0), (X[0][:4], 1)], "train[1]", "8x4"),
        ([(np.zeros(5), 0)], "train[0]", [5]),
        ([(Image.new("I;16", (8, 8)), 0)], "train[0]", "I;16"),
    ],
)
def test_bad_data_sets_are_one_clear_line(train: Any, key: str, value: Any) -> None:
    with pytest.raises(ConfigError) as caught:
        ssfl.Data.of(train, train)
    assert (caught.value.key, caught.value.value) == (key, value)
    assert key in str(caught.value)


def test_owners_need_data_that_name_them(short: Quick) -> None:
    with pytest.raises(ConfigError) as caught:
        assemble.make(short("split.scheme=given"))
    assert (caught.value.key, caught.value.value) == ("split.scheme", "given")
    with pytest.raises(ConfigError) as caught:
        assemble.make(short("federation.participants=5"), data=data())
    assert (caught.value.key, caught.value.fix) == ("federation.participants", "federation.participants=3")


def test_the_example_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "examples/own"))
    import data as example

    result = example.main(tmp_path / "run", rounds=2)
    assert json.loads((tmp_path / "run/split.json").read_text())["sizes"] == [100] * 13
    assert result.accuracy > 0.2


def test_owners_can_be_named_image_by_image(short: Quick) -> None:
    sites: list[str | None] = [None] * 400
    for site, numbers in zip("abc", USERS, strict=True):
        for number in numbers:
            sites[number] = site
    expected = data(users=dict(zip("abc", USERS, strict=True))).dataset
    for users in (sites, np.array(sites, object)):
        found = data(users=users).dataset
        assert found.names == expected.names == ("a", "b", "c")
        assert [u.tolist() for u in found.users or ()] == [u.tolist() for u in expected.users or ()]
    assert found_users(data(users=(numbers for numbers in USERS))) == [u.tolist() for u in USERS]
    with pytest.raises(ConfigError, match="users has 399 names"):
        data(users=sites[1:])
    for wrong in ([True] * 400, [0.5] * 400, [np.inf] * 400):
        with pytest.raises(ConfigError) as caught:
            data(users=np.array(wrong))
        assert caught.value.key == "users"


@pytest.mark.parametrize("where", ["elsewhere/a.py", "{package}_experiments/a.py"])
def test_a_warning_names_the_line_that_called_ssfl(where: str) -> None:
    path = where.format(package=Path(ssfl.__file__).parent)
    with pytest.warns(SsflWarning) as told:
        exec(compile("\n\nwarn('told')", path, "exec"), {"warn": warn_user})
    assert (told[0].filename, told[0].lineno) == (path, 3)


def found_users(given: ssfl.Data) -> list[list[int]]:
    return [user.tolist() for user in given.dataset.users or ()]


@pytest.mark.parametrize("missing", [None, float("nan"), np.nan, -1])
@pytest.mark.parametrize("names", [(4, 7, 10), (4.0, 7.0, 10.0), ("4", "7", "a")])
def test_images_may_have_no_owner_and_no_group(missing: Any, names: tuple[Any, ...]) -> None:
    """Their order does not matter."""
    owners = [missing] * 60 + [names[2]] * 100 + [names[0]] * 140 + [names[1]] * 50 + [missing] * 50
    given = data(users=owners)
    assert given.dataset.names == (("4", "7", "10") if names[2] != "a" else names)
    assert found_users(given) == [list(range(160, 300)), list(range(300, 350)), list(range(60, 160))]
    assert given.dataset.groups is None
    groups = data(groups=owners).dataset.groups
    assert groups is not None
    assert len(set(groups.tolist())) == 3 + 60 + 50
    assert len(set(groups[60:350].tolist())) == 3


def test_images_of_one_group_are_held_out_together(short: Quick) -> None:
    """Also if some images without a label lie between the labelled ones."""
    patients = np.arange(400) // 4
    labels = Y[:400].copy()
    labels[100:120] = -1
    given = ssfl.Data(X[:400], labels, *TEST, groups=[f"patient {number}" for number in patients])
    config = short("data.validation=0.2", "split.server_labels=100", "train.server_held_out=0.3")
    sim = assemble.make(config, data=given)
    rest = np.concatenate([sim.parts.server, *sim.parts.users])
    assert not set(patients[sim.validation]) & set(patients[rest])
    assert 50 <= len(sim.validation) <= 100
    assert (labels[sim.validation] >= 0).all()
    assert sim.plan.judges is not None
    judges = set(patients[sim.plan.judges.numpy()].tolist())
    assert not judges & set(patients[sim.plan.server.images.numpy()].tolist())
    alone = ssfl.Data(X[:400], labels, *TEST)
    assert inventory.fingerprint(given.dataset) != inventory.fingerprint(alone.dataset)
    with pytest.raises(ConfigError, match="groups is an array"):
        data(groups=[1, 2, 3])


def test_server_and_users_need_images(quick: Quick) -> None:
    owner = np.arange(400) % 3
    for given, key in (
        ({"server": range(400), "users": None}, "server"),
        ({"server": None, "users": owner}, "users"),
    ):
        with pytest.raises(ConfigError) as caught:
            assemble.make(quick(), data=data(**given))
        assert caught.value.key == key


def test_a_class_that_the_server_has_not_is_named_with_its_remedy(quick: Quick) -> None:
    some = np.flatnonzero(Y[:60] != 3)
    with pytest.warns(SsflWarning, match="server= of ssfl.Data"):
        assemble.make(quick(), data=data(server=some))


def test_test_images_that_are_also_training_images_are_counted(tmp_path: Path) -> None:
    draw = np.random.default_rng(3)
    x, t = (draw.integers(0, 255, (count, 30, 30, 3), np.uint8) for count in (40, 20))
    y, labels = np.arange(40) % 2, np.arange(20) % 2
    t[3, :15] = x[7, :15]  # half of an image is no copy
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        ssfl.Data(x, y, t, labels)
    t[5], t[6], t[19] = x[7], x[7], x[12]
    x[20] = x[7]  # a copy of a copy counts once
    np.savez(
        tmp_path / "mine.npz", x_train=x[:10], y_train=y[:10], x_unlabelled=x[10:], x_test=t, y_test=labels
    )
    for make in (
        lambda: ssfl.Data(x, y, t, labels),
        lambda: ssfl.Data(x[:10], y[:10], t, labels, unlabelled=x[10:]),
        lambda: sources.load(path=tmp_path / "mine.npz", root=tmp_path),
    ):
        with pytest.warns(SsflWarning, match=r"\b3 of 20 test images.* number 5 .* number 7 "):
            make()


def test_validation_images_are_not_all_that_the_server_has(short: Quick) -> None:
    labels, site = np.where(np.arange(1500) < 100, Y[:1500], -1), np.arange(1500) % 4
    users = [np.arange(100, 700), np.arange(700, 1500)]
    left, refused = [], []
    for group in range(4):
        server = np.flatnonzero((site == group) & (labels >= 0))
        data = ssfl.Data(X[:1500], labels, *TEST, server=server, users=users, groups=site)
        try:
            left.append(len(assemble.make(short("data.validation=0.25"), data=data).parts.server))
        except ConfigError as error:
            refused.append((error.key, error.value))
    assert set(left) == {25}  # a group is set aside completely or not at all
    assert set(refused) == {("data.validation", 0.25)}

"""Sources of images: the right pixels from small files in the real formats."""

import gzip
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from image_files import (
    cifar_files,
    emnist_files,
    random_images,
    refusal,
    same,
    stl_files,
    write_files,
    write_folder,
    write_image,
    write_npz,
    write_svhn,
    write_tar,
    write_zip,
)
from ssfl.data import formats
from ssfl.data.dataset import Dataset
from ssfl.data.sources import EMNIST_CLASSES, load, read_image_files
from ssfl.errors import DataError


def test_digits_have_a_fixed_stratified_test_set(tmp_path: Path) -> None:
    data = load("digits", root=tmp_path)
    torch.manual_seed(5)
    np.random.seed(5)  # noqa: NPY002
    again = load("digits", root=tmp_path)
    assert data.images.shape == (1437, 1, 8, 8)
    assert data.test_images.shape == (360, 1, 8, 8)
    assert torch.bincount(data.test_labels).tolist() == [36] * 10
    assert torch.equal(data.test_images, again.test_images)
    assert data.images.max() == 255
    assert data.classes == tuple("0123456789")
    assert (data.flip, data.labelled, data.shape) == (False, 1437, (1, 8, 8))
    values = data.images.double() / 255
    assert data.mean[0] == pytest.approx(values.mean().item())
    assert data.std[0] == pytest.approx(values.std(correction=0).item())
    rows = {image.numpy().tobytes() for image in data.images}
    assert sum(image.numpy().tobytes() in rows for image in data.test_images) < 3


@pytest.mark.parametrize("layout", ["tar", "root/tar", "folder", "root/folder", "loose"])
def test_cifar10(tmp_path: Path, layout: str) -> None:
    files, pixels, labels = cifar_files()
    if layout.endswith("tar"):
        folder = tmp_path / ("cifar10" if "root" in layout else "")
        folder.mkdir(exist_ok=True)
        write_tar(folder / "cifar-10-binary.tar.gz", "cifar-10-batches-bin", files)
    elif layout == "loose":
        write_files(tmp_path / "cifar10", files)
    else:
        folder = tmp_path / ("cifar10" if "root" in layout else "")
        write_files(folder / "cifar-10-batches-bin", files)
    data = load("cifar10", root=tmp_path)
    assert same(data.images, pixels[:20])
    assert same(data.test_images, pixels[20:])
    assert data.labels.tolist() == labels[:20].tolist()
    assert data.labels.dtype == data.test_labels.dtype == torch.int64
    assert data.classes[3] == "class 3"
    assert data.flip
    assert data.mean == (0.4914, 0.4822, 0.4465)


def test_cifar10_knows_its_classes_without_the_meta_file(tmp_path: Path) -> None:
    files, _, _ = cifar_files()
    del files["batches.meta.txt"]
    write_files(tmp_path / "cifar-10-batches-bin", files)
    data = load("cifar10", root=tmp_path, size=16)
    assert data.classes[::9] == ("airplane", "truck")
    assert data.shape == (3, 16, 16)


def test_svhn(tmp_path: Path) -> None:
    pixels = write_svhn(tmp_path)
    data = load("svhn", root=tmp_path)
    assert same(data.images, pixels)
    assert data.labels.tolist() == [0, 1, 9]
    assert not data.flip
    expected = pixels.mean((0, 2, 3)) / 255, pixels.std((0, 2, 3)) / 255
    assert data.mean == pytest.approx(expected[0])
    assert data.std == pytest.approx(expected[1])


@pytest.mark.parametrize("layout", ["gz", "plain", "zip", "unpacked zip"])
def test_emnist_is_upright(tmp_path: Path, layout: str) -> None:
    files, pixels = emnist_files()
    if layout == "zip":
        write_zip(tmp_path / "gzip.zip", files)
    elif layout == "plain":
        write_files(tmp_path / "emnist", files)
    else:
        packed = {f"{name}.gz": gzip.compress(data) for name, data in files.items()}
        write_files(tmp_path / ("emnist/gzip" if layout == "unpacked zip" else ""), packed)
    data = load("emnist", root=tmp_path)
    assert same(data.images, pixels[:4, None])
    assert same(data.test_images, pixels[4:, None])
    assert [data.classes[i] for i in data.labels.tolist()] == ["0", "A", "t", "0"]
    assert data.classes == EMNIST_CLASSES
    assert (len(data.classes), data.flip, data.mean) == (47, False, (0.1307,))


@pytest.mark.parametrize("layout", ["tar", "folder"])
@pytest.mark.parametrize("order", [1, -1])
def test_stl10(tmp_path: Path, layout: str, order: int) -> None:
    files, pixels = stl_files()
    names = ("plane", *"bcdefghi", "truck")
    files = dict(list(files.items())[::order]) | {"class_names.txt": "\n".join(names).encode()}
    if layout == "tar":
        write_tar(tmp_path / "stl10_binary.tar.gz", "stl10_binary", files)
    else:
        write_files(tmp_path / "stl10" / "stl10_binary", files)
    data = load("stl10", root=tmp_path)
    assert same(data.images, np.concatenate([pixels["train_X.bin"], pixels["unlabeled_X.bin"]]))
    assert same(data.test_images, pixels["test_X.bin"])
    assert data.labels.tolist() == [0, 9, 1, 9, -1, -1, -1, -1]
    assert data.test_labels.tolist() == [9, 1, 0, 0]
    assert data.classes == names
    assert (data.labelled, data.flip) == (4, True)
    values = data.images.double() / 255
    assert data.mean == pytest.approx(values.mean((0, 2, 3)).tolist())
    assert data.std == pytest.approx(values.std((0, 2, 3), correction=0).tolist())


def test_stl10_resized_in_several_batches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files, pixels = stl_files()
    write_files(tmp_path / "stl10_binary", files)
    monkeypatch.setattr(formats, "_BATCH", 3)
    data = load("stl10", root=tmp_path, size=32)
    assert data.images.shape == (8, 3, 32, 32)
    upright = Image.fromarray(pixels["unlabeled_X.bin"][3].transpose(1, 2, 0))
    expected = np.asarray(upright.resize((32, 32), Image.Resampling.BILINEAR)).astype(int)
    assert np.abs(data.images[7].numpy().transpose(1, 2, 0) - expected).max() <= 1
    assert data.classes[::9] == ("airplane", "truck")


def test_npz_grey(tmp_path: Path) -> None:
    path = write_npz(tmp_path / "own.npz")
    data = load(path=path, root=tmp_path)
    assert same(data.images, random_images(6, 8, 8)[:, None])
    assert (data.name, data.classes, data.flip) == ("own", ("0", "1", "2"), False)
    assert data.test_labels.tolist() == [2, 1, 0]
    wide = load(path=str(path), root=tmp_path, size=12)
    assert wide.shape == (1, 12, 12)


def test_npz_colour_and_unlabelled(tmp_path: Path) -> None:
    train, test, more = (random_images(n, 8, 6, 3, seed=n) for n in (6, 3, 5))
    for spelling in ("x_unlabelled", "x_unlabeled"):
        path = write_npz(tmp_path / "c.npz", x_train=train, x_test=test, **{spelling: more})
        data = load(path=path, root=tmp_path)
        assert same(data.images, np.concatenate([train, more]).transpose(0, 3, 1, 2))
        assert data.images.is_contiguous()
        assert data.labels.tolist() == [0, 1, 2, 0, 1, 2] + [-1] * 5
        assert (data.flip, data.labelled) == (True, 6)
        assert data.shape == (3, 8, 6)


@pytest.mark.parametrize(("dtype", "scale"), [("int64", 1), (">i2", 1), ("float32", 255), ("float16", 255)])
def test_npz_other_numbers(tmp_path: Path, dtype: str, scale: int) -> None:
    pixels = random_images(6, 8, 8, 1)
    path = write_npz(
        tmp_path / "n.npz",
        x_train=(pixels / scale).astype(dtype),
        x_test=np.zeros((3, 8, 8), bool),
        y_train=np.array([[7], [-3], [7], [-3], [40], [40]], "int16"),
        y_test=np.array([40, 7, -3], "int32"),
    )
    data = load(path=path, root=tmp_path)
    assert same(data.images, pixels.transpose(0, 3, 1, 2))
    assert data.classes == ("-3", "7", "40")
    assert data.labels.tolist() == [1, 0, 1, 0, 2, 2]
    assert data.test_labels.tolist() == [2, 1, 0]


def test_npz_true_is_white(tmp_path: Path) -> None:
    pixels = random_images(6, 8, 8) > 99
    data = load(path=write_npz(tmp_path / "b.npz", x_train=pixels), root=tmp_path)
    assert same(data.images, pixels[:, None] * np.uint8(255))


def test_npz_strings_and_names(tmp_path: Path) -> None:
    words = np.array(["cat", "ant", "bee"] * 2)
    for kind in ("U", "S"):
        path = write_npz(tmp_path / "s.npz", y_train=words.astype(kind), y_test=["bee", "cat", "ant"])
        data = load(path=path, root=tmp_path)
        assert data.classes == ("ant", "bee", "cat")
        assert data.labels[:3].tolist() == [2, 0, 1]
        assert data.test_labels.tolist() == [1, 2, 0]
    path = write_npz(tmp_path / "o.npz", y_train=words, y_test=words[:3], classes=["cat", "bee", "ant"])
    data = load(path=path, root=tmp_path)
    assert data.classes == ("cat", "bee", "ant")
    assert data.labels[:3].tolist() == [0, 2, 1]
    data = load(path=write_npz(tmp_path / "i.npz", classes=["x", "y", "z"]), root=tmp_path)
    assert data.classes == ("x", "y", "z")
    assert data.labels[:3].tolist() == [0, 1, 2]


def test_a_channel_that_never_changes_can_be_divided_by(tmp_path: Path) -> None:
    path = write_npz(tmp_path / "k.npz", x_train=np.full((6, 8, 8), 51, np.uint8))
    data = load(path=path, root=tmp_path)
    assert (data.mean, data.std) == ((0.2,), (1.0,))


@pytest.mark.parametrize("spelling", ["unlabelled", "unlabeled"])
def test_folder_with_train_and_test(tmp_path: Path, spelling: str) -> None:
    folder = write_folder(
        tmp_path / "set",
        *("train/dog/1.png", "train/cat/2.png", "train/cat/deeper/1.PNG", "train/loose.png"),
        *("test/cat/1.png", "test/dog/1.png", f"{spelling}/a/b/1.png", f"{spelling}/0.bmp"),
        *("over.png", "train/.hidden.png", "train/.git/x.png", ".cache/y.png"),
    )
    (folder / "train" / "cat" / "notes.txt").write_text("not an image")
    data = load(path=folder, root=tmp_path)
    assert (data.name, data.classes, data.flip) == ("set", ("cat", "dog"), False)
    assert data.images[:, 0, 0, 0].tolist() == [10, 20, 0, 30, 80, 70, 60]
    assert data.labels.tolist() == [0, 0, 1, -1, -1, -1, -1]
    assert data.test_images[:, 0, 0, 0].tolist() == [40, 50]
    assert data.test_labels.tolist() == [0, 1]


def test_unlabelled_in_capitals_is_no_class(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "set", "cat/1.png", "dog/1.png", "Unlabelled/1.png")
    with pytest.raises(DataError, match=r"/Unlabelled: .*\bunlabelled\b"):
        load(path=folder, root=tmp_path)


@pytest.mark.parametrize("inside", ["", "train/"])
def test_folder_without_test_holds_some_out(tmp_path: Path, inside: str) -> None:
    names = [f"{inside}{label}/{i}.png" for label in ("a", "b") for i in range(10)]
    folder = write_folder(tmp_path / "f", *names, f"{inside}c/0.png", f"{inside}c/1.png", "u.png")

    def held_out(**options: float) -> tuple[list[int], list[int], Dataset]:
        data = load(path=folder, root=tmp_path, **options)  # type: ignore[arg-type]
        test = data.test_images[:, 0, 0, 0].tolist()
        train = data.images[:, 0, 0, 0].tolist()
        assert sorted(train + test) == list(range(0, 230, 10))
        assert train[-1] == 220
        return test, torch.bincount(data.test_labels).tolist(), data

    test, counts, data = held_out()
    assert counts == [2, 2, 1]
    assert data.labels.tolist() == [0] * 8 + [1] * 8 + [2, -1]
    assert held_out()[0] == test
    assert held_out(test_fraction=0.5)[1] == [5, 5, 1]
    assert held_out(test_fraction=0.01)[1] == [1, 1, 1]
    assert held_out(test_fraction=0.99)[1] == [9, 9, 1]


def test_folder_may_hold_a_class_called_train(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "v", "bus/1.png", "bus/2.png", "train/1.png", "train/2.png")
    assert load(path=folder, root=tmp_path).classes == ("bus", "train")


def test_folder_is_colour_if_one_image_is(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "f", "a/1.png", "a/2.png", "b/1.png")
    colours = random_images(1, 8, 8, 3)[0]
    write_image(folder / "b" / "2.png", colours)
    data = load(path=folder, root=tmp_path)
    assert data.shape == (3, 8, 8)
    assert not data.flip  # most images are grey
    both = torch.cat([data.images, data.test_images]).numpy()
    assert any(np.array_equal(image, colours.transpose(2, 0, 1)) for image in both)


def test_folder_of_photographs_resized(tmp_path: Path) -> None:
    for place, (height, width) in enumerate(((40, 30), (1100, 20), (16, 16), (50, 60))):
        smooth = np.linspace(0, 255, height * width * 3).reshape(height, width, 3).astype(np.uint8)
        write_image(tmp_path / "f" / "ab"[place % 2] / f"{place}.jpg", smooth)
    assert load(path=tmp_path / "f", root=tmp_path, size=16).shape == (3, 16, 16)
    refusal(lambda: load(path=tmp_path / "f", root=tmp_path), "pixels", "--set data.size=N")


def test_read_image_files_of_every_kind(tmp_path: Path) -> None:
    grey = random_images(1, 8, 6)[0]
    colour = random_images(1, 8, 6, 3)[0]
    alpha = np.dstack([colour, np.full((8, 6), 255, np.uint8)])
    alpha[0, :, 3] = 0  # a transparent row becomes white
    deep = grey.astype(np.uint16) * 257
    turned = Image.fromarray(np.rot90(colour).copy())
    exif = Image.Exif()
    exif[0x0112] = 6  # turn by 90 degrees clockwise to see it upright
    Image.fromarray(grey).save(tmp_path / "grey.png")
    Image.fromarray(grey > 99).save(tmp_path / "bits.png")
    Image.fromarray(deep).save(tmp_path / "deep.png")
    Image.fromarray(deep).save(tmp_path / "deep.tiff")
    Image.fromarray(colour).save(tmp_path / "colour.bmp")
    Image.fromarray(colour).quantize(256).save(tmp_path / "palette.png")
    Image.fromarray(alpha).save(tmp_path / "alpha.png")
    Image.fromarray(alpha).convert("LA").save(tmp_path / "grey-alpha.png")
    turned.save(tmp_path / "turned.png", exif=exif)

    def one(name: str, channels: int) -> np.ndarray:
        read = read_image_files([tmp_path / name], channels, 8, 6)
        assert read.shape == (1, channels, 8, 6)
        assert read.dtype == torch.uint8
        return read[0].numpy()

    planes = colour.transpose(2, 0, 1)
    white = planes.copy()
    white[:, 0] = 255
    assert np.array_equal(one("grey.png", 1)[0], grey)
    assert np.array_equal(one("grey.png", 3), np.stack([grey] * 3))
    assert np.array_equal(one("bits.png", 1)[0], np.where(grey > 99, 255, 0))
    assert np.array_equal(one("deep.png", 1)[0], grey)
    assert np.array_equal(one("deep.tiff", 1)[0], grey)
    assert np.array_equal(one("colour.bmp", 3), planes)
    assert np.array_equal(one("palette.png", 3), planes)
    assert np.array_equal(one("alpha.png", 3), white)
    assert (one("grey-alpha.png", 1)[0, 0] == 255).all()
    assert np.array_equal(one("turned.png", 3), planes)
    assert np.array_equal(one("colour.bmp", 1)[0], np.asarray(Image.fromarray(colour).convert("L")))
    small = read_image_files([str(tmp_path / "colour.bmp")] * 2, 3, 4, 5)
    expected = Image.fromarray(colour).resize((5, 4), Image.Resampling.BILINEAR)
    assert same(small[1], np.asarray(expected).transpose(2, 0, 1))
    assert read_image_files([], 3, 4, 5).shape == (0, 3, 4, 5)


@pytest.mark.parametrize(
    ("largest", "white"), [(100, 255), (4_000, 4_095), (16_383, 16_383), (40_000, 65_535)]
)
def test_the_largest_value_of_a_folder_says_how_many_bits_there_are(
    largest: int, white: int, tmp_path: Path
) -> None:
    """Scans of 12 bits in files of 16: one scale for all of them, so that dark ones stay darker."""
    deep = np.random.default_rng(1).integers(0, largest // 4, (6, 8, 8), dtype=np.uint16)
    deep[5, 0, 0] = largest
    for number, pixels in enumerate(deep):
        file = tmp_path / "ab"[number % 2] / f"{number}.png"
        file.parent.mkdir(exist_ok=True)
        Image.fromarray(pixels).save(file)
    data = load(path=tmp_path, root=tmp_path)
    assert data.white == white
    read = torch.cat([data.images, data.test_images]).numpy()[:, 0]
    wanted = np.floor(deep * (255 / white) + 0.5).astype(np.uint8)
    assert sorted(image.tobytes() for image in read) == sorted(image.tobytes() for image in wanted)
    again = read_image_files([tmp_path / "b" / "5.png"], 1, 8, 8, data.white)
    assert same(again[:, 0], wanted[5:])


def test_read_image_files_refuses(tmp_path: Path) -> None:
    text = tmp_path / "text.png"
    text.write_text("no image")
    refusal(lambda: read_image_files([text], 1, 8, 8), text, "fresh copy")
    gone = tmp_path / "gone.png"
    refusal(lambda: read_image_files([gone], 1, 8, 8), gone, "check that it is there")
    real = tmp_path / "real.tiff"
    Image.fromarray(np.zeros((8, 8), np.float32)).save(real)
    refusal(lambda: read_image_files([real], 1, 8, 8), real, "8 bits")

"""Finds identical images: files with different labels, and copies of training or unlabelled images among the
test images, in folders and in arrays."""

import hashlib
from collections.abc import Callable, Container, Hashable, Iterable, Mapping
from pathlib import Path
from typing import NamedTuple

from torch import Tensor

from ssfl.core.plain_files import open_plain, read
from ssfl.core.words import count

SAMPLE = 4096
"""How many bytes in the middle of a file are compared before the whole file."""
FEW_PIXELS = 512
"""About how many values of an image in an array are compared before all of them."""


def warn_about(
    same: Iterable[list[Path]],
    train: Mapping[Path, str],
    test: Mapping[Path, str],
    unlabelled: Iterable[Path],
) -> list[str]:
    """Returns lines of text that warn of identical files. `same` are groups of identical files, as from
    `identical`; `train` and `test` map the labelled images to their classes. If there are no test images, a
    cross-validation tests on the labelled ones. Files that are in none of the three sets are ignored."""
    lines, classes, unknown = [], {**train, **test}, set(unlabelled)
    sides = [_Side.of(files, train, test, unknown) for files in same]
    labelled = [[*side.train, *side.test] for side in sides]
    differing = [files for files in labelled if len({classes[file] for file in files}) > 1]
    if differing:
        first, *others = differing[0]
        other = next(file for file in others if classes[file] != classes[first])
        lines.append(
            f"identical files are in the folders of different classes ({count(len(differing), 'image')}, for "
            f"example {first} and {other}): keep each image in one class only"
        )
    trained = [(side.train, side.test) for side in sides]
    if test:
        kind, seen = "test image", [(side.unlabelled, side.test) for side in sides]
    else:  # in a cross-validation, every labelled image is a test image of one fold
        kind, seen = "labelled image", [(side.unlabelled, side.train) for side in sides]
    for pairs, whose, how in ((trained, "training", "is"), (seen, "unlabelled", "may be")):
        shared = [(known, tested) for known, tested in pairs if known and tested]
        if shared:
            number, (known, tested) = sum(len(tested) for _, tested in shared), shared[0]
            lines.append(
                f"identical files are among the {whose} and the {kind}s ({count(number, kind)}, for example "
                f"{known[0]} and {tested[0]}), so the accuracy {how} too high: remove copies"
            )
    return lines


def of_test_images(images: Tensor, test: Tensor) -> str:
    """Returns a line of text that warns of images in `test` [M, ...] that are also among the training or
    unlabelled `images` [N, ...]; "" if there are none. Both are uint8."""
    known = _same_pixels(images, test)
    if not known:
        return ""
    tested, trained = next(iter(known.items()))
    return (
        f"{len(known):,} of {count(len(test), 'test image')} {'is' if len(known) == 1 else 'are'} also among "
        f"the training or unlabelled images (for example number {tested} of the test images and number "
        f"{trained} of the others), so the accuracy may be too high: remove copies"
    )


def _same_pixels(images: Tensor, test: Tensor) -> dict[int, int]:
    """Maps the number of each test image to that of an equal one in `images`. Only a few pixels of each image
    are compared at first, and then all pixels of those that agree."""
    if not len(test):
        return {}
    step = max(1, test[0].numel() // FEW_PIXELS)
    few, few_tested = (part.flatten(1)[:, ::step].contiguous().numpy() for part in (images, test))
    by_pixels: dict[bytes, list[int]] = {}
    for number, pixels in enumerate(few_tested):
        by_pixels.setdefault(pixels.tobytes(), []).append(number)
    found: dict[int, int] = {}
    for number, pixels in enumerate(few):
        left = by_pixels.get(pixels.tobytes(), [])
        equal = {tested for tested in left if images[number].equal(test[tested])}
        found |= dict.fromkeys(equal, number)
        left[:] = [tested for tested in left if tested not in equal]
    return dict(sorted(found.items()))


class _Side(NamedTuple):
    """A group of identical files, divided by their use."""

    train: list[Path]
    test: list[Path]
    unlabelled: list[Path]

    @classmethod
    def of(cls, files: Iterable[Path], *uses: Container[Path]) -> "_Side":
        return cls(*([file for file in files if file in use] for use in uses))


def identical(files: Iterable[Path]) -> list[list[Path]]:
    """Returns the groups of two or more files that have the same content. Few files are read completely: only
    those of the same size that are also equal in the middle. Empty files are left out."""
    groups = [list(files)]
    steps: tuple[Callable[[Path], Hashable], ...] = (
        lambda file: file.stat().st_size or file,  # an empty file is like no other
        _middle,
        _digest,
    )
    for key in steps:
        groups = [part for group in groups for part in _grouped(group, key) if len(part) > 1]
    return groups


def _grouped(files: Iterable[Path], key: Callable[[Path], Hashable]) -> list[list[Path]]:
    groups: dict[Hashable, list[Path]] = {}
    for file in files:
        try:
            groups.setdefault(key(file), []).append(file)
        except OSError:  # it cannot be read, which is reported when it is decoded
            continue
    return list(groups.values())


def _middle(file: Path) -> bytes:
    with open_plain(file) as opened:
        opened.seek(max(0, file.stat().st_size - SAMPLE) // 2)
        return hashlib.sha256(opened.read(SAMPLE)).digest()


def _digest(file: Path) -> bytes:
    return hashlib.sha256(read(file)).digest()

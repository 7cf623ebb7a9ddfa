"""Finds identical image files: copies with different labels, and copies of training or unlabelled images
among the test images."""

import hashlib
from collections.abc import Callable, Hashable, Iterable, Mapping
from pathlib import Path

from ssfl.core.plain_files import open_plain, read
from ssfl.core.words import count

SAMPLE = 4096
"""How many bytes in the middle of a file are compared before the whole file."""


def warn_about(
    same: Iterable[list[Path]],
    train: Mapping[Path, str],
    test: Mapping[Path, str],
    unlabelled: Iterable[Path],
) -> list[str]:
    """Returns lines of text that warn of identical files. `same` are groups of identical files, as from
    `identical`; `train` and `test` map the labelled images to their classes. Files that are in none of the
    three sets of images are ignored."""
    lines, classes, uses = [], {**train, **test}, (train, test, set(unlabelled))
    sides = [tuple([file for file in files if file in use] for use in uses) for files in same]
    differing = [[*trained, *tested] for trained, tested, _ in sides]
    differing = [files for files in differing if len({classes[file] for file in files}) > 1]
    if differing:
        first, *others = differing[0]
        other = next(file for file in others if classes[file] != classes[first])
        lines.append(
            f"identical files are in the folders of different classes ({count(len(differing), 'image')}, for "
            f"example {first} and {other}): keep each image in one class only"
        )
    for place, whose, how in ((0, "training", "is"), (2, "unlabelled", "may be")):
        shared = [(files[place], files[1]) for files in sides if files[place] and files[1]]
        if shared:
            number, (known, tested) = sum(len(tested) for _, tested in shared), shared[0]
            lines.append(
                f"identical files are among the {whose} and the test images ({count(number, 'test image')}, "
                f"for example {known[0]} and {tested[0]}), so the accuracy {how} too high: remove copies"
            )
    return lines


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
        except OSError:  # it was decoded earlier, and is now gone
            continue
    return list(groups.values())


def _middle(file: Path) -> bytes:
    with open_plain(file) as opened:
        opened.seek(max(0, file.stat().st_size - SAMPLE) // 2)
        return hashlib.sha256(opened.read(SAMPLE)).digest()


def _digest(file: Path) -> bytes:
    return hashlib.sha256(read(file)).digest()

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
    train: Mapping[Path, str], test: Mapping[Path, str], unlabelled: Iterable[Path] = ()
) -> list[str]:
    """Returns lines of text that warn of identical files. `train` and `test` map the labelled images to their
    classes."""
    classes = {**train, **test}
    lines = []
    same = identical([*classes, *unlabelled])
    labelled = [[file for file in files if file in classes] for files in same]
    differing = [files for files in labelled if len({classes[file] for file in files}) > 1]
    if differing:
        first, *others = differing[0]
        other = next(file for file in others if classes[file] != classes[first])
        lines.append(
            f"identical files are in the folders of different classes ({count(len(differing), 'image')}, for "
            f"example {first} and {other}): keep each image in one class only"
        )
    shared = [[[file for file in files if file in part] for part in (train, test)] for files in same]
    shared = [sides for sides in shared if all(sides)]
    if shared:
        number = sum(len(tested) for _, tested in shared)
        lines.append(
            f"identical files are among the training and the test images ({count(number, 'test image')}, for "
            f"example {shared[0][0][0]} and {shared[0][1][0]}), so the accuracy is too high: remove copies"
        )
    known = [
        (files, [file for file in files if file in test])
        for files in same
        if any(file not in classes for file in files)
    ]
    known = [(files, tested) for files, tested in known if tested]
    if known:
        files, tested = known[0]
        copy = next(file for file in files if file not in classes)
        number = sum(len(tested) for _, tested in known)
        lines.append(
            f"identical files are among the unlabelled and the test images ({count(number, 'test image')}, "
            f"for example {copy} and {tested[0]}), so the accuracy may be too high: remove copies"
        )
    return lines


def identical(files: Iterable[Path]) -> list[list[Path]]:
    """Returns the groups of two or more files that have the same content. Few files are read completely: only
    those of the same size that are also equal in the middle. Empty files are left out."""
    groups = [[file for file in files if not _is_empty(file)]]
    steps: tuple[Callable[[Path], Hashable], ...] = (lambda file: file.stat().st_size, _middle, _digest)
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


def _is_empty(file: Path) -> bool:
    try:
        return not file.stat().st_size
    except OSError:  # it was decoded earlier, and is now gone
        return True


def _middle(file: Path) -> bytes:
    with open_plain(file) as opened:
        opened.seek(max(0, file.stat().st_size - SAMPLE) // 2)
        return hashlib.sha256(opened.read(SAMPLE)).digest()


def _digest(file: Path) -> bytes:
    return hashlib.sha256(read(file)).digest()

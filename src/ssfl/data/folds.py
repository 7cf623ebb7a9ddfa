"""Folds for cross-validation, and images that are held out for testing or validation, without dividing the
images of one patient.

Images of one patient must not be both in the training set and in the held-out part, because the measured
accuracy would be too high. Sub-folders of a class, or numbers in file names, show which images belong to one
patient.
"""

import re
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch

from ssfl.core import draws
from ssfl.data.hands import Index
from ssfl.errors import ConfigError

GROUPS = "groups of images (such as one patient, or identical files)"
"""In messages: what is not divided between training and a held-out part."""
_DATE = re.compile(r"(19|20)\d\d((0\d|1[0-2])([0-2]\d|3[01]))?")
_NAMED = re.compile(r"(patient|pat|subject|subj|sub|case|person|pid|id)\d+|[ps]\d\d+", re.IGNORECASE)


def subject(name: str) -> str | None:
    """Returns the subject (such as a patient) that a file name suggests; None if it suggests none.

    Characters such as "_" divide the name into words. One word shows the subject: the first that has at least
    three digits or is like "patient7", and is not a date. The subject is the name up to the end of this word.
    For "16745_4_2.png" it is "16745".
    """
    words = re.split(r"([-_. ()]+)", Path(name).stem)
    for place in range(0, len(words), 2):
        word = words[place]
        if _DATE.fullmatch(word):
            continue
        if sum(letter.isdigit() for letter in word) >= 3 or _NAMED.fullmatch(word):
            return "".join(words[: place + 1])
    return None


def subjects(files: Sequence[tuple[Path, Path]]) -> Index | None:
    """Returns a group number for each labelled file, so that files of the same subject (such as a patient)
    have the same number. Each item of `files` is a file and the folder of its class. All files in one
    sub-folder of that folder belong to the same subject. For files outside sub-folders, the file name shows
    the subject. A file whose name shows none is a group of its own.

    Returns None if no two files belong together, or if one group would have more than half of all files. Also
    returns None if all files of each class would be one group, as in `CLASS/images/*.png`: then the
    sub-folder is probably not a patient.
    """
    names = []
    for file, home in files:
        inner = file.relative_to(home).parts
        names.append(f"{inner[0]}/" if len(inner) > 1 else subject(file.name) or str(file))
    counts = Counter(names)
    if max(counts.values(), default=0) < 2 or max(counts.values()) > len(names) / 2:
        return None  # no group has several images, or the "subject" is probably a camera
    homes = [home for _, home in files]
    if len(set(zip(homes, names, strict=True))) == len(set(homes)):
        return None
    order = {name: number for number, name in enumerate(counts)}
    return np.array([order[name] for name in names])


def hold_out(labels: Index, groups: Index, wanted: Index, order: Index) -> Index:
    """Returns the numbers of the images that are held out, sorted: about `wanted[k]` images of each class k.
    Images with the same number in `groups` [N] are held out together. A class always keeps an image in
    training. It has a held-out image if it is wanted and the groups allow it.

    Groups are taken in the order in which their first images stand in `order` [N]. So if each image is a
    group of its own, exactly the first `wanted[k]` images of class k in `order` are held out.
    """
    rank = np.empty(len(order), np.int64)
    rank[order] = np.arange(len(order))
    _, first, group_of = np.unique(groups, return_index=True, return_inverse=True)
    counts = np.zeros((len(first), len(wanted)), np.int64)  # images of each class in each group
    np.add.at(counts, (group_of, labels), 1)
    most = counts.sum(0) - 1
    wanted = np.minimum(wanted, most)
    held, taken = np.zeros_like(wanted), np.zeros(len(first), bool)
    for group in np.argsort(rank[first]):
        if (held + counts[group] <= wanted)[counts[group] > 0].all():
            held += counts[group]
            taken[group] = True
    while True:  # add groups that exceed the wanted number, if this is nearer to it or a class has no image
        missing = (held == 0) & (wanted > 0)
        after = held + counts
        allowed = ~taken & ((after <= most) | (counts == 0)).all(1)
        errors = np.abs(after - wanted).sum(1)
        useful = errors < np.abs(held - wanted).sum()
        for choice in (allowed & (counts[:, missing] > 0).any(1), allowed & useful):
            if choice.any():
                places = np.flatnonzero(choice)
                best = places[np.lexsort((rank[first][places], errors[places]))[0]]
                held, taken[best] = after[best], True
                break
        else:
            return np.flatnonzero(taken[group_of])


def assign(labels: Index, groups: Index | None, folds: int, seed: int) -> Index:
    """Returns the fold of each image, [N], from 0 to folds - 1. Images with the same number in `groups` [N]
    get the same fold; None means that there are no groups. Each class is spread over the folds as evenly as
    the groups allow. Raises ConfigError if there are fewer groups, or fewer images, than folds."""
    groups_of_images = np.arange(len(labels)) if groups is None else groups
    members: dict[int, list[int]] = {}
    for place, group in enumerate(groups_of_images.tolist()):
        members.setdefault(group, []).append(place)
    if len(members) < folds:
        of = "images" if groups is None else GROUPS
        raise ConfigError(
            f"run.folds = {folds} is more than the {len(members)} labelled {of}: lower run.folds",
            key="run.folds",
            value=folds,
            fix=f"run.folds={len(members)}" if len(members) > 1 else "run.folds=0",
        )
    base = torch.tensor(draws.key(seed, "split", -1_000_000))
    drawn = draws.fold(base, torch.arange(len(members))).tolist()
    # the largest groups first, so that small ones can balance the folds; equal ones by class, then at random
    order = sorted(
        zip(members.values(), drawn, strict=True),
        key=lambda one: (-len(one[0]), int(labels[one[0][0]]), one[1]),
    )
    classes = int(labels.max()) + 1
    held = np.zeros((folds, classes), np.int64)
    fold_of = np.zeros(len(labels), np.int64)
    for places, _ in order:
        counts = np.bincount(labels[places], minlength=classes)
        # the fold with the fewest images of these classes, then with the fewest at all
        fold = min(range(folds), key=lambda f: (int((held[f] * counts).sum()), int(held[f].sum()), f))
        held[fold] += counts
        fold_of[places] = fold
    return fold_of

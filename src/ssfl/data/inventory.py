"""Describes a split for the file split.json: who has how many images of which class, and a fingerprint (hash)
of the data."""

import hashlib
from typing import Any

import numpy as np
import torch

from ssfl.core import draws
from ssfl.data import split
from ssfl.data.dataset import Dataset
from ssfl.data.hands import Hands, Index
from ssfl.data.views import KINDS

LISTED = 5000
"""split.json lists at most this many users one by one, because a longer file would be slow to write and to
read."""
PROBED = 4
"""A user-defined augmentation is part of the fingerprint of the data. It is represented by its views of this
many images."""


def describe_split(dataset: Dataset, parts: split.Parts, validation: Index) -> dict[str, Any]:
    """Returns the content of split.json. It lists the first `LISTED` users one by one. Totals and quartiles
    are over all users."""
    labels = dataset.labels.numpy()
    sizes = Hands.of(parts.users).sizes
    counts = split.class_counts(labels, parts.users)
    described: dict[str, Any] = {
        "classes": list(dataset.classes),
        "users": len(sizes),
        "size_quartiles": np.quantile(sizes, [0, 0.25, 0.5, 0.75, 1]).tolist(),
        "class_totals": counts.sum(0).tolist(),
        "listed": min(len(sizes), LISTED),
        "sizes": sizes[:LISTED].tolist(),
        "server": split.class_counts(labels, [parts.server])[0].tolist(),
        "user_classes": counts[:LISTED].tolist(),
        "measured_skew": split.skew_of(counts) if counts.any() else None,
        "validation": len(validation),
        "test": len(dataset.test_labels),
        "test_classes": np.bincount(dataset.test_labels.numpy(), minlength=len(dataset.classes)).tolist(),
        "fingerprint": fingerprint(dataset),
    }
    if dataset.broken:
        described["broken"] = dataset.broken
    if dataset.names:
        described["names"] = list(dataset.names[:LISTED])
    if parts.labelled is not None:
        marked = Hands.of(parts.labelled).sizes
        described["user_labelled"] = marked[:LISTED].tolist()
        described["user_labelled_total"] = int(marked.sum())
    return described


def fingerprint(dataset: Dataset) -> str:
    """Returns a hash of all data that a run uses. Two runs with the same fingerprint used the same data.

    It covers images, labels, normalisation, owners, groups and validation images. User-defined augmentations
    are represented by their views of the first images.
    """
    digest = hashlib.sha256()
    for tensor in (dataset.images, dataset.labels, dataset.test_images, dataset.test_labels):
        digest.update(tensor.contiguous().numpy().data)
    digest.update(repr((dataset.classes, dataset.mean, dataset.std)).encode())
    users = dataset.users
    owners = (dataset.server, dataset.validation, *((users.flat, users.edges) if users is not None else ()))
    for what, numbers in (*((f"owners {number}", owned) for number, owned in enumerate(owners)),
                          ("groups", dataset.groups)):  # fmt: skip
        if numbers is not None:
            digest.update(f"{what} {len(numbers)}".encode() + np.ascontiguousarray(numbers).tobytes())
    images = dataset.images[:PROBED]
    for name, view in (("weak", dataset.weak), ("strong", dataset.strong)):
        if not any(view in pair for pair in KINDS.values()):
            drawn = draws.bits(torch.arange(len(images)), view.draws)
            views = view.make(images, drawn, dataset.flip).contiguous()
            digest.update(f"{name} {view.draws}".encode() + views.numpy().tobytes())
    return digest.hexdigest()

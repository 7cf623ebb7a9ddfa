"""Loads your own images from a folder that has a sub-folder for each class."""

import hashlib
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ssfl.data import copies, decoding, folds, pictures
from ssfl.data.dataset import UNLABELLED, Dataset, statistics
from ssfl.data.hands import Hands, Index
from ssfl.errors import DataError, warn_user

LOOSE = "loose files"  # the user with the images beside the sub-folders of "unlabelled"


@dataclass(frozen=True)
class Files:
    """The image files of a folder, sorted into labelled training images, unlabelled images and test
    images."""

    train: dict[str, list[Path]]  # class: its labelled images
    unlabelled: list[Path]
    test: dict[str, list[Path]]
    own_test: bool  # whether the folder has its own test images
    homes: list[str]  # for each unlabelled image, its sub-folder of "unlabelled", or ""
    together: dict[Path, int] = field(default_factory=dict)
    """A number for each labelled image that is not in a folder "test", equal for images of one patient and
    for identical files; empty if no two images belong together."""
    same: list[list[Path]] = field(default_factory=list)
    """Groups of identical files, also of files that cannot be read."""
    divided: list[Path] = field(default_factory=list)
    """One file of each of those groups whose files are not kept together, because most images of a class
    would then belong together."""
    patients: int | None = None
    """The number of patients, or other subjects, of the labelled images that are not in a folder "test". None
    if sub-folders and file names show none."""

    @property
    def users(self) -> dict[str, list[int]]:
        """Maps each user's name to its images, as positions in `unlabelled`. Each sub-folder of "unlabelled"
        is a user. If there are also files beside the sub-folders, they belong to one more user. The dict is
        empty without sub-folders."""
        names = sorted(set(self.homes) - {""})
        places: dict[str, list[int]] = {name: [] for name in [*names, *([LOOSE] if "" in self.homes else [])]}
        for place, home in enumerate(self.homes if names else []):
            places[home or LOOSE].append(place)
        return places if names else {}

    @property
    def everything(self) -> list[Path]:
        """All files in the order in which they are loaded: labelled training images, unlabelled images, test
        images."""
        train, test = ([f for files in part.values() for f in files] for part in (self.train, self.test))
        return train + self.unlabelled + test

    @property
    def labelled(self) -> dict[Path, str]:
        """The class of each labelled training image."""
        return {file: name for name, files in self.train.items() for file in files}

    @property
    def tested(self) -> dict[Path, str]:
        """The class of each test image."""
        return {file: name for name, files in self.test.items() for file in files}

    @property
    def groups(self) -> Index | None:
        """The numbers of the labelled training images in `together`; None if that is empty."""
        files = [file for part in self.train.values() for file in part]
        return np.array([self.together[file] for file in files]) if self.together else None

    def labels(self, part: dict[str, list[Path]]) -> list[int]:
        names = list(self.train)
        return [names.index(name) for name, files in part.items() for _ in files]


def sort_files(folder: Path, test_fraction: float) -> Files:
    """Returns the image files of a folder, sorted by their use. Each sub-folder except "unlabelled" is a
    class. Images in "unlabelled", and those outside sub-folders, have no label. Each sub-folder of
    "unlabelled" is a user.

    If there are sub-folders "train" and "test", these are not classes: the folders of the classes are inside
    them. "train" alone is enough if it has sub-folders. Without "test", about the part `test_fraction` of
    each class is held out for testing. Images of one patient, and identical files, stay together.
    """
    inner = {entry.name: entry for entry in pictures.list_folders(folder)}
    split = "train" in inner and ("test" in inner or bool(pictures.list_folders(inner["train"])))
    places = [inner["train"], folder] if split else [folder]
    if split:
        for name in inner:
            if name not in ("train", "test", *UNLABELLED):
                raise DataError(
                    f"{inner[name]}: must not be next to the folder train, where only test and unlabelled "
                    "are allowed; rename this folder, or move it away"
                )
    train = _classes(places[0])
    unlabelled, homes = _unlabelled(places)
    own_test = split and "test" in inner
    test = _own_test(inner["test"], places[0], train) if own_test else {}
    labelled = [(file, places[0] / name) for name, files in train.items() for file in files]
    tested = [file for files in test.values() for file in files]
    same = copies.identical([*(file for file, _ in labelled), *tested, *unlabelled])
    patients = folds.subjects(labelled)
    together, divided = _kept_together(labelled, same, patients)
    if not own_test:
        held = _held_out(train, together, test_fraction)
        test = {name: [file for file in files if file in held] for name, files in train.items()}
        train = {name: [file for file in files if file not in held] for name, files in train.items()}
    count = None if patients is None else len(np.unique(patients))
    return Files(train, unlabelled, test, own_test, homes, together, same, divided, count)


def _classes(place: Path) -> dict[str, list[Path]]:
    """Returns the images of each class in the folder `place`. Raises if there is no class, or if one has no
    images."""
    classes = [entry for entry in pictures.list_folders(place) if entry.name not in UNLABELLED]
    for entry in classes:
        if entry.name.lower() in UNLABELLED:
            raise DataError(
                f"{entry}: would be read as a class, because its name has capital letters; rename it to "
                f"{entry.name.lower()} if its images have no labels, or to another name if it is a class"
            )
    if not classes:
        raise DataError(f"{place}: has no sub-folders; put the images of each class into a sub-folder")
    train = {entry.name: pictures.list_images(entry) for entry in classes}
    for entry in classes:
        if not train[entry.name]:
            raise DataError(f"{pictures.nothing_in(entry)}; add some or remove the folder")
    return train


def _unlabelled(places: Sequence[Path]) -> tuple[list[Path], list[str]]:
    """Returns the images without labels in the folders `places`: those beside the sub-folders, and those in
    the sub-folder "unlabelled". The second result has, for each of them, its sub-folder of "unlabelled", or
    "". Raises if the sub-folder "unlabelled", or one in it, has no images."""
    found, homes = list[Path](), list[str]()
    for place in places:
        loose = pictures.list_images(place, nested=False)
        found += loose
        homes += [""] * len(loose)
        for base in (place / name for name in UNLABELLED):
            files = pictures.list_images(base)
            if base.is_dir() and not files and not pictures.list_folders(base):
                raise DataError(
                    f"{pictures.nothing_in(base)}; add images without labels, or remove the folder"
                )
            found += files
            homes += ["" if file.parent == base else file.relative_to(base).parts[0] for file in files]
            for entry in pictures.list_folders(base) if base.is_dir() else []:
                if not pictures.list_images(entry):
                    raise DataError(f"{pictures.nothing_in(entry)}; add some or remove the folder")
    return found, homes


def _own_test(place: Path, training: Path, train: dict[str, list[Path]]) -> dict[str, list[Path]]:
    """Returns the images of each class in `place`, the folder "test". `train` are the images in the folder
    `training`. Raises if there are no images, if one has no label, or if a class is not in `train`."""
    test = {entry.name: pictures.list_images(entry) for entry in pictures.list_folders(place)}
    for loose in pictures.list_images(place, nested=False):
        raise DataError(f"{loose}: this test image has no label; move it into the sub-folder of its class")
    for name in test:
        if name not in train:
            raise DataError(
                f"{place / name}: class {name} is not in {training}; add training images of it or remove the "
                "folder"
            )
    if not any(test.values()):
        raise DataError(f"{pictures.nothing_in(place)}; add some of each class")
    return test


def load_folder(folder: Path, size: int | None, test_fraction: float, broken: str = "skip") -> Dataset:
    """Returns the images of a folder as a data set. `sort_files` says how the folder must look, and what
    `test_fraction` means. The images are grey if all files are grey, otherwise RGB.

    Images are resized to size x size pixels. If `size` is None, all files must already have the same size.
    With `broken` = "skip", files that cannot be read are left out with a warning. With "stop", they cause an
    error that names them.
    """
    files = sort_files(folder, test_fraction)
    decoded = decoding.decoded(files.everything, None if size is None else (size, size))
    files = readable(files, decoded.broken, broken)
    for line in doubts(folder, files):
        warn_user(line)
    test_labels = torch.tensor(files.labels(files.test), dtype=torch.int64)
    first = len(decoded.images) - len(test_labels)
    images, test_images = decoded.images[:first], decoded.images[first:]
    return Dataset(
        folder.resolve().name,
        images,
        torch.tensor(files.labels(files.train) + [-1] * len(files.unlabelled)),
        test_images,
        test_labels,
        tuple(files.train),
        *statistics(images),
        flip=2 * decoded.grey <= len(decoded.images),
        white=decoded.white,
        deep=decoded.deep > 0,
        grey=decoded.grey,
        broken=len(decoded.broken),
        groups=files.groups,
        **owners(files),
    )


def readable(files: Files, broken: decoding.Broken, policy: str) -> Files:
    """Returns the files without the broken ones. The policy "skip" gives one warning that names the broken
    files, and "stop" raises an error instead. "silent" gives no warning, for callers that read the files
    again later."""
    if not broken:
        return files
    everything = files.everything
    line = decoding.describe_broken(broken, len(everything))
    if policy == "stop":
        raise DataError(f"{line}; replace them, or leave them out with --set data.broken=skip")
    if policy != "silent":
        line += "; they are left out (to stop instead, use --set data.broken=stop)"
        warn_user(line)
    left_out = {everything[number] for number in broken}

    def without_broken(part: dict[str, list[Path]]) -> dict[str, list[Path]]:
        return {
            name: [file for file in files_of_class if file not in left_out]
            for name, files_of_class in part.items()
        }

    train, test = without_broken(files.train), without_broken(files.test)
    for name, files_of_class in train.items():
        if not files_of_class:
            unread = files.train[name]
            raise DataError(
                f"class {name}: none of its {len(unread)} images can be read, for example {unread[0]}; "
                "replace them, or remove the folder of the class"
            )
    if any(files.test.values()) and not any(test.values()):
        tests = [file for part in files.test.values() for file in part]
        raise DataError(
            f"none of the {len(tests)} test images can be read, for example {tests[0]}; replace them"
        )
    places = [place for place, file in enumerate(files.unlabelled) if file not in left_out]
    return replace(
        files, train=train, test=test, unlabelled=[files.unlabelled[place] for place in places],
        homes=[files.homes[place] for place in places],
        divided=[file for file in files.divided if file not in left_out],
    )  # fmt: skip


def doubts(folder: Path, files: Files) -> list[str]:
    """Returns lines of text about what is probably wrong in a folder of images."""
    names: dict[str, list[str]] = {}
    for name in files.train:
        names.setdefault(name.strip().casefold(), []).append(name)
    alike = [" and ".join(f'"{name}"' for name in same) for same in names.values() if len(same) > 1]
    lines = [pictures.ignored(folder)]
    lines += [
        f"the classes {same} differ only in capital letters or in spaces at the ends: if they are the same "
        "class, move their images into one folder"
        for same in alike
    ]
    if files.divided:
        lines.append(
            f"the copies of {files.divided[0]} are most of its class, so they are not kept together when "
            "images are held out: one may be in training and another one held out, so the accuracy may be "
            "too high; remove the copies"
        )
    lines += copies.warn_about(files.same, files.labelled, files.tested, files.unlabelled)
    return [line for line in lines if line]


def owners(files: Files) -> dict[str, Any]:
    """Returns the keyword arguments of `Dataset` that say which images each user owns; empty if the folder
    has no sub-folders of users."""
    users = files.users
    if not users:
        return {}
    first = sum(map(len, files.train.values()))
    hands = Hands.of([np.array(places) + first for places in users.values()])
    return {"users": hands, "names": tuple(users), "loose": len(users.get(LOOSE, []))}


def _kept_together(
    homes: Sequence[tuple[Path, Path]], same: list[list[Path]], patients: Index | None
) -> tuple[dict[Path, int], list[Path]]:
    """Returns a number for each labelled image, equal for images that must not be divided between training
    and testing: those of one patient, and identical files. `homes` are the images, each with the folder of
    its class, and `same` are groups of identical files. `patients` has the number of the patient of each
    image (`folds.subjects`), or is None. The dict is empty if no two images belong together.

    Identical files are not joined if the joined group would have more than half of a class, and more of this
    class than each of its parts. The second result has one of each such set of identical files.
    """
    class_of = dict(homes)
    same = [copied for copied in ([f for f in each if f in class_of] for each in same) if len(copied) > 1]
    if patients is None and not same:
        return {}, []
    numbers = dict(zip(class_of, range(len(homes)) if patients is None else patients.tolist(), strict=True))
    members = {number: Counter[Path]() for number in numbers.values()}  # images of each class
    for file, number in numbers.items():
        members[number][class_of[file]] += 1
    class_sizes, joined_to, divided = Counter(class_of.values()), {number: number for number in members}, []

    def joined(number: int) -> int:
        while joined_to[number] != number:
            number = joined_to[number]
        return number

    for copied in sorted(same, key=len):
        parts = {joined(numbers[file]) for file in copied}
        whole = sum((members[number] for number in parts), Counter[Path]())
        largest = {home: max(members[number][home] for number in parts) for home in whole}
        if any(count > max(class_sizes[home] / 2, largest[home]) for home, count in whole.items()):
            divided.append(copied[0])
            continue
        joined_to |= dict.fromkeys(parts, min(parts))
        members[min(parts)] = whole
    if patients is None and len(divided) == len(same):
        return {}, divided
    return {file: joined(number) for file, number in numbers.items()}, divided


def _held_out(train: dict[str, list[Path]], together: dict[Path, int], fraction: float) -> set[Path]:
    """Returns the images that are held out for testing: about the part `fraction` of each class, but at least
    one, and never all. Images with the same number in `together` are not divided, so a class may have no test
    image. If `fraction` is 0, none is held out. The images are chosen by a hash of their file and folder
    names, so they are the same in every run."""
    if not fraction:
        return set()
    for files in train.values():
        if len(files) < 2:
            raise DataError(
                f"{files[0]}: is the only image of its class, but each class needs at least two, one of them "
                "for testing; add another image"
            )

    def draw(file: Path) -> bytes:
        return hashlib.sha256(
            f"2019 {file.parent.name}/{file.name}".encode(errors="surrogateescape")
        ).digest()

    everything = [file for files in train.values() for file in files]
    drawn = [draw(file) for file in everything]
    held = folds.hold_out(
        np.repeat(np.arange(len(train)), [len(files) for files in train.values()]),
        np.array([together.get(file, number) for number, file in enumerate(everything)]),
        np.array([max(round(len(files) * fraction), 1) for files in train.values()]),
        np.array(sorted(range(len(everything)), key=drawn.__getitem__)),
    )
    return {everything[number] for number in held}

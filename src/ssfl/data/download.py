"""The official files of public data sets: their addresses, their checksums, and how they are downloaded."""

import hashlib
import os
import urllib.request
from contextlib import suppress
from dataclasses import dataclass
from http.client import HTTPException
from pathlib import Path

from ssfl.data.formats import reading
from ssfl.errors import DataError, one_line

TIMEOUT = 30.0  # a connection is given up after this many seconds without a byte
_BLOCK = 1 << 20


@dataclass(frozen=True)
class Remote:
    """One file on the web, with its address, size and checksums."""

    file: str
    url: str
    md5: str
    size: int  # bytes
    sha256: str = ""
    """The SHA-256 of the file, as published by TensorFlow Datasets (url_checksums); "" if it is not known.
    Every file whose address is not HTTPS has one, because MD5 does not protect against manipulation."""

    @property
    def checksum(self) -> str:
        """The checksum that a download must match, as the text "sha256 VALUE", or "md5 VALUE" if no SHA-256
        is known."""
        return f"sha256 {self.sha256}" if self.sha256 else f"md5 {self.md5}"


@dataclass(frozen=True)
class Official:
    """A public data set: its files on the web and, if these are archives, which files inside are needed."""

    remotes: tuple[Remote, ...]
    folder: str = ""  # the folder that the archive unpacks to
    members: tuple[str, ...] = ()  # the files needed from the archive
    extras: tuple[str, ...] = ()  # files that may be missing


OFFICIAL: dict[str, Official] = {
    "cifar10": Official(
        remotes=(
            Remote(
                "cifar-10-binary.tar.gz",
                "https://www.cs.toronto.edu/~kriz/cifar-10-binary.tar.gz",
                "c32a1d4ab5d03f1284b67883e8d87530",
                170_052_171,
            ),
        ),
        folder="cifar-10-batches-bin",
        members=(*(f"data_batch_{i}.bin" for i in range(1, 6)), "test_batch.bin"),
        extras=("batches.meta.txt",),
    ),
    "svhn": Official(
        remotes=(
            Remote(
                "train_32x32.mat",
                "http://ufldl.stanford.edu/housenumbers/train_32x32.mat",
                "e26dedcc434d2e4c54c9b2d4a06d8373",
                182_040_794,
                "435e94d69a87fde4fd4d7f3dd208dfc32cb6ae8af2240d066de1df7508d083b8",
            ),
            Remote(
                "test_32x32.mat",
                "http://ufldl.stanford.edu/housenumbers/test_32x32.mat",
                "eb5a983be6a315427106f1b164d9cef3",
                64_275_384,
                "cdce80dfb2a2c4c6160906d0bd7c68ec5a99d7ca4831afa54f09182025b6a75b",
            ),
        ),
    ),
    "emnist": Official(
        remotes=(
            Remote(
                "gzip.zip",
                "https://biometrics.nist.gov/cs_links/EMNIST/gzip.zip",
                "58c8d27c78d21e728a6bc7b3cc06412e",
                561_753_746,
            ),
        ),
        folder="gzip",
        members=tuple(
            f"emnist-balanced-{split}-{part}-ubyte"
            for split in ("train", "test")
            for part in ("images-idx3", "labels-idx1")
        ),
    ),
    "stl10": Official(
        remotes=(
            Remote(
                "stl10_binary.tar.gz",
                "http://ai.stanford.edu/~acoates/stl10/stl10_binary.tar.gz",
                "91f7769df0f17e558f3565bffb0c7dfb",
                2_640_397_119,
                "f31fd99273a1acb8609c8db427cebb1de3f71de77758cdc0e22956e1289b9866",
            ),
        ),
        folder="stl10_binary",
        members=("train_X.bin", "train_y.bin", "test_X.bin", "test_y.bin", "unlabeled_X.bin"),
        extras=("class_names.txt",),
    ),
}


def obtain(name: str, root: Path, download: bool) -> list[Path]:
    """Returns where the files of a public data set are, in `root` or in `root`/`name`. If the archive is
    already unpacked there, this is its folder; otherwise it is the official files. Official files that are
    missing are downloaded if `download` is true; otherwise raises DataError."""
    official = OFFICIAL[name]
    folders = (root, root / name)
    for folder in folders:
        for place in (folder / official.folder, folder):
            for member in official.members:
                for file in (place / member, place / f"{member}.gz"):
                    with reading(file):
                        if file.exists():
                            return [place]
    return [_obtain_file(remote, folders, download) for remote in official.remotes]


def _obtain_file(remote: Remote, folders: tuple[Path, ...], download: bool) -> Path:
    """Returns the path of an official file in one of the folders. A missing file is downloaded into the last
    folder if `download` is true; otherwise raises DataError."""
    for folder in folders:
        with reading(folder / remote.file):
            if (folder / remote.file).exists():
                return folder / remote.file
    target = folders[-1] / remote.file
    if not download:
        raise DataError(
            f"{target}: this file is missing; download {remote.url} ({remote.checksum}) into "
            f"{target.parent}, or use --set data.download=true"
        )
    fetch(remote, target)
    return target


def fetch(remote: Remote, target: Path) -> None:
    """Downloads a file to `target`; raises DataError if that fails or the checksum is wrong. The download
    goes to a temporary file first, so that `target` is never incomplete."""
    by_hand = f"download it yourself ({remote.checksum}) and put {target.name} into {target.parent}"
    part = target.with_name(f".{target.name}.{os.getpid()}.part")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        digest = _stream(remote, part)
        if digest != remote.checksum:
            raise DataError(
                f"{remote.url}: the download has {digest} instead of {remote.checksum} and was "
                f"removed; try again, or {by_hand}"
            )
        part.replace(target)
    except (OSError, HTTPException) as error:
        reason = one_line(error)
        raise DataError(
            f"{remote.url}: cannot be downloaded to {target.parent} ({reason}); check the connection and "
            f"that folder, or {by_hand}"
        ) from error
    finally:
        with suppress(OSError):  # it was renamed, or never made
            part.unlink()


def _stream(remote: Remote, part: Path) -> str:
    """Downloads a file to the path `part`, with a progress bar on stderr. Returns the checksum of what was
    received, in the form of `Remote.checksum`."""
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn())
    request = urllib.request.Request(remote.url, headers={"User-Agent": "ssfl"})
    kind = "sha256" if remote.sha256 else "md5"
    digest = hashlib.new(kind, usedforsecurity=bool(remote.sha256))
    received = 0
    with (
        urllib.request.urlopen(request, timeout=TIMEOUT) as answer,
        part.open("wb") as out,
        Progress(*columns, TransferSpeedColumn(), console=Console(stderr=True)) as progress,
    ):
        announced = answer.headers.get("Content-Length", "")
        total = int(announced) if announced.isdecimal() else None
        bar = progress.add_task(remote.file, total=total or remote.size)
        while block := answer.read(_BLOCK):
            out.write(block)
            digest.update(block)
            received += len(block)
            progress.update(bar, completed=received)
    if total is not None and received < total:
        raise ConnectionError(f"it ended after {received} of {total} bytes")
    return f"{kind} {digest.hexdigest()}"

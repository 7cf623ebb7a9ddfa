"""Features: the output of a network's frozen layers, computed only once for a few views of every image, to
save time.

If the first part of a network (its `trunk`) is frozen, its output for a view never changes. So it is computed
once for V weak and V strong views of every image, and stored. Training draws from these stored features, and
runs only the rest of the network (its `tail`). The first view of each kind is computed before the first
round, the second before the second round, and so on. Round r (counted from 1) draws from the first r views,
at most V.

The random draws of a view depend only on the image's bytes, and each view passes through the trunk by itself.
So an image has the same features in every run, process and federation. They are kept on disk for later
commands, one file for each view, named after the image's checksum.
"""

import hashlib
import math
import mmap
import os
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

from ssfl.core import cache, draws, progress
from ssfl.data import augment, gentle
from ssfl.data.views import kind_of
from ssfl.models import external

FORMAT = 2
STORED = torch.float16
"""The number type of stored features. Half precision is enough: the rounding error is smaller than the
difference between two views."""


KINDS = ("weak", "strong")
PROBED = 4
"""The number of images that show what the trunk of a network from outside computes."""


class Tail(nn.Module):
    """Wraps the trained part of a network, so that its tensors have the same names as in the whole
    network."""

    def __init__(self, tail: nn.Module) -> None:
        super().__init__()
        self.tail = tail

    def forward(self, x: Tensor) -> Tensor:
        return self.tail(x)  # type: ignore[no-any-return]


def is_divided(module: nn.Module) -> bool:
    """Returns whether a network has a frozen part `trunk` and a trained part `tail`. Then the output of the
    trunk can be computed once and stored."""
    trunk, tail = getattr(module, "trunk", None), getattr(module, "tail", None)
    if not isinstance(trunk, nn.Module) or not isinstance(tail, nn.Module):
        return False
    weights = list(trunk.parameters())
    return bool(weights) and not any(weight.requires_grad for weight in weights)


def artificial_images(shape: tuple[int, int, int]) -> Tensor:
    """Returns a few uint8 images of random numbers, always the same, in the given shape (channels, height,
    width)."""
    numbers = draws.bits(torch.arange(PROBED), math.prod(shape)) & 255
    return numbers.to(torch.uint8).reshape(-1, *shape)


def tail_of(module: nn.Module) -> nn.Module:
    """Returns the trained part of a network that has a trunk and a tail. Its tensors have the same names as
    in the whole network."""
    tail = module.tail
    assert isinstance(tail, nn.Module)
    names = {name for name, _ in module.named_parameters()}
    return tail if {name for name, _ in tail.named_parameters()} <= names else Tail(tail)


@dataclass(eq=False)
class Features:
    """The features (outputs of a network's frozen layers) of all images of a run. They are computed as needed
    and stored in a folder on disk."""

    trunk: nn.Module
    count: int
    """V: the number of weak views of each image, and also of strong views, whose features are computed."""
    mean: Tensor
    std: Tensor
    flip: bool
    weak: augment.View = augment.WEAK
    strong: augment.View = augment.STRONG
    folder: Path | None = None
    """The folder on disk in which the features are stored; None if they are not stored."""
    threads: int = 1
    views: tuple[Tensor, ...] = ()
    """The features of all N images: a tensor [N, V, ...] for V weak views and, if strong views are used,
    another one for V strong views. If weak and strong views are made in the same way, both tensors are the
    same and hold all 2 V views."""
    seconds: float = 0.0
    """How many seconds it took to compute the views counted in `computed`. Views that were read from disk do
    not count."""
    computed: int = 0
    _available: Tensor = field(default_factory=lambda: torch.zeros((), dtype=torch.int64), repr=False)
    """How many views of each image may be drawn in this round, from each tensor of `views`. The number lies
    in memory that forked processes share, so that they see its changes."""
    _images: Tensor = field(default_factory=lambda: torch.empty(0), repr=False)
    _names: dict[int, bytes] = field(default_factory=dict, repr=False)
    """The checksums of the images for which `prepare` was called. The keys are the images' indices in the
    pool."""
    _room: Tensor = field(default_factory=lambda: torch.empty(0), repr=False)
    """The memory for the features of all views of N images, [N, V, kinds, ...]. There are one or two kinds:
    weak, and strong if strong views are used."""
    _first: float = 0.0
    """How many seconds the very first image took. Time estimates use it until more views are measured."""
    _done: int = 0
    """How many views of each kind (weak, strong) have been computed for every image so far."""
    _plain: dict[tuple[bytes, int], Tensor] = field(default_factory=dict, repr=False)
    """The features of images for evaluation, by the image's checksum and the number of the test view. Test
    views are augmented views over which a prediction is averaged; number 0 is the image without
    augmentation."""
    _lasting: dict[int, Tensor] = field(default_factory=dict, repr=False)
    """Images that are evaluated repeatedly, by the address of their memory. Holding them here keeps Python
    from using the same address for other images."""
    _checksums: dict[tuple[object, ...], list[bytes]] = field(default_factory=dict, repr=False)
    """The checksums of images that are evaluated repeatedly, by the memory address and shape of their tensor.
    So they need not be computed again."""

    @classmethod
    def of(
        cls, module: nn.Module, count: int, mean: Sequence[float], std: Sequence[float], flip: bool,
        weak: augment.View, strong: augment.View, threads: int, probe: Tensor | None = None,
    ) -> "Features":  # fmt: skip
        """Returns the features object of a network with a trunk and a tail. No features are computed yet;
        `prepare` does this.

        Features are stored on disk only for the package's own augmentations. Other augmentations have no name
        by which their stored features could be found again.

        `probe` are uint8 images [n, C, H, W] for a network from outside the package. The trunk's output for
        them becomes part of the folder's name, because the weights do not show what a trunk computes, such as
        its activation function. For the package's own networks it is None.
        """
        trunk = module.trunk
        assert isinstance(trunk, nn.Module)
        kind = kind_of(weak, strong)
        settings: tuple[object, ...] = (
            FORMAT, tuple(mean), tuple(std), flip, external.fingerprint(trunk),
        )  # fmt: skip
        if kind != "standard":
            settings += (kind,)
        features = cls(
            trunk.eval(), count, torch.tensor(mean), torch.tensor(std), flip, weak, strong, None, threads,
        )  # fmt: skip
        if kind is not None:
            if probe is not None:
                settings += (repr(trunk), *features._checksums_of_output(probe))
            name = hashlib.sha256(repr(settings).encode()).hexdigest()[:24]
            features.folder = cache.root() / "features" / name
        return features

    def prepare(self, images: Tensor, indices: Tensor, strong: bool = True) -> None:
        """Allocates memory for the features of the images at `indices`. Then computes the features of their
        first weak view, or reads them from disk. If `strong` is true, does the same for their first strong
        view."""
        began = time.perf_counter()
        shape = self._through(images[:1].cpu())[0].shape
        self._first = time.perf_counter() - began
        self._images, self._done = images, 0
        chosen = indices.unique().tolist()
        with ThreadPoolExecutor(self.threads) as workers:
            names = list(workers.map(lambda place: _checksum(images[place]), chosen))
        self._names = dict(zip(chosen, names, strict=True))
        self._room = _shared((len(images), self.count, 2 if strong else 1, *shape), STORED).to(images.device)
        self._available = _shared((), torch.int64).to(images.device)
        kinds = tuple(self._room.unbind(2))
        # made in the same way: all 2 V views serve as weak and as strong ones, in the order of their numbers
        self.views = (self._room.flatten(1, 2),) * 2 if strong and self.weak == self.strong else kinds
        self.use(0)

    def serves(self, images: Tensor, indices: Tensor, strong: bool) -> bool:
        """Returns whether `prepare` was called for the images at these indices, so that their features can be
        used. If `strong` is true, it must have been called for strong views too."""
        known = images is self._images and self._names.keys() >= set(indices.unique().tolist())
        return known and len(self.views) >= 1 + strong

    def use(self, round: int) -> None:
        """Computes, or reads from disk, the views that are new in a round, and makes them available. `round`
        is counted from 0: a round draws from the first `round` + 1 views of each kind, at most V."""
        wanted = min(self.count, round + 1)
        for number in range(self._done, wanted):
            self._add(number)
        self._done = max(self._done, wanted)
        self._available.fill_(wanted * self.views[0].shape[1] // self.count)

    def left(self) -> float:
        """Returns an estimate of how many seconds it takes to compute the views that are still missing. The
        forecast and the remaining time of a run include it."""
        if self._done == self.count:
            return 0.0
        kinds, kept = KINDS[: self._room.shape[2]], self._kept()
        missing = sum(
            _file(name, kind, number) not in kept
            for number in range(self._done, self.count)
            for name in self._names.values()
            for kind in kinds
        )
        return missing * self._each_takes

    def left_to_evaluate(self, images: Tensor, test_views: int) -> float:
        """Returns an estimate of how many seconds it takes to compute the missing features of images that
        will be evaluated. Each image is evaluated without augmentation and in `test_views` augmented test
        views."""
        kept, numbers = self._kept(), range(test_views + 1)
        missing = sum(
            (name, number) not in self._plain
            and _file(name, "test" if number else "plain", number) not in kept
            for name in (self._checksums_of(images) if len(images) else ())
            for number in numbers
        )
        return missing * self._each_takes

    @property
    def _each_takes(self) -> float:
        """About how many seconds it takes to compute the features of one view, for estimates."""
        return self.seconds / self.computed if self.computed else self._first

    def _add(self, number: int) -> None:
        """Computes, or reads from disk, the features of view `number` (counted from 0) of each kind, weak and
        strong, for every image."""
        room = self._room[:, number]
        target = room if room.device.type == "cpu" else torch.zeros(room.shape, dtype=STORED)
        kinds = KINDS[: room.shape[1]]

        def one(item: tuple[int, bytes, int]) -> None:
            place, name, kind = item
            image = self._images[place]
            target[place, kind] = self._stored(name, kinds[kind], number, image, partial(self._view, kind))

        items = [(place, name, kind) for place, name in self._names.items() for kind in range(len(kinds))]
        what = f", view {number + 1} of {self.count}" if self.count > 1 else ""
        self._each(one, items, f"features of images{what}")
        if target is not room:
            room.copy_(target)
        if self.folder is not None:
            with suppress(OSError):
                os.utime(self.folder)  # the cache deletes the least recently used entries
                cache.trim(keep=self.folder)

    def at(self, kind: int, places: Tensor, drawn: Tensor, dtype: torch.dtype) -> Tensor:
        """Returns the features of one random view of each image at the indices `places` in the pool. The
        random numbers `drawn` choose the view. `kind` is 0 for weak and 1 for strong views."""
        return self.views[kind][places, draws.below(drawn, self._available)].to(dtype)

    def plain(self, images: Tensor, dtype: torch.dtype, number: int = 0) -> Tensor:
        """Returns the features of uint8 images for evaluation: without augmentation if `number` is 0,
        otherwise of the test view with this number. They are computed once and then remembered."""
        if not len(images):  # with run.folds there are no test images
            return self._through(images.new_zeros(1, *images.shape[1:]).cpu())[:0].to(images.device, dtype)
        names = self._checksums_of(images)
        new = {name: place for place, name in enumerate(names) if (name, number) not in self._plain}
        kind, make = ("test", self._test_view) if number else ("plain", self._unchanged)

        def one(item: tuple[bytes, int]) -> None:
            name, place = item
            self._plain[name, number] = self._stored(name, kind, number, images[place], make)

        if new:
            what = f", view {number}" if number else ""
            self._each(one, list(new.items()), f"features of images for evaluation{what}")
        return torch.stack([self._plain[name, number] for name in names]).to(images.device, dtype)

    def remember(self, images: Tensor) -> None:
        """Declares that the images in this tensor, or in slices of it, will be evaluated often. So their
        checksums are computed only once."""
        self._lasting[images.untyped_storage().data_ptr()] = images

    def _checksums_of(self, images: Tensor) -> list[bytes]:
        memory = images.untyped_storage().data_ptr()
        if memory not in self._lasting:
            return [_checksum(image) for image in images]
        place = memory, images.storage_offset(), images.shape, images.stride()
        if place not in self._checksums:
            self._checksums[place] = [_checksum(image) for image in images]
        return self._checksums[place]

    def _unchanged(self, image: Tensor, name: bytes, number: int) -> Tensor:
        return self._through(image[None])[0]

    def _test_view(self, image: Tensor, name: bytes, number: int) -> Tensor:
        return self._through(gentle.test_view(image[None], number, self.flip))[0]

    def _view(self, kind: int, image: Tensor, name: bytes, number: int) -> Tensor:
        """Returns the features of weak (kind 0) or strong (kind 1) view `number` of an image. `name` is the
        image's checksum, on which the random draws depend."""
        view = (self.weak, self.strong)[kind]
        key = torch.tensor([draws.key(int.from_bytes(name[:7], "big"), "features", kind)])
        drawn = draws.bits(draws.fold(key, torch.tensor([number])), view.draws)
        return self._through(view.make(image[None], drawn, self.flip))[0]

    def _through(self, images: Tensor) -> Tensor:
        device = next(self.trunk.parameters()).device
        with torch.no_grad():
            x = augment.normalise(images, self.mean, self.std, torch.float32).to(device)
            return self.trunk(x.contiguous(memory_format=torch.channels_last)).to("cpu", STORED)  # type: ignore[no-any-return]

    def _checksums_of_output(self, images: Tensor) -> list[bytes]:
        """Returns the checksum of the trunk's output for each image. One thread computes it, as in `_each`,
        so that it does not depend on the number of threads."""
        before = torch.get_num_threads()
        torch.set_num_threads(1)
        try:
            return [_checksum(self._through(image[None])) for image in images]
        finally:
            torch.set_num_threads(before)

    def _stored(
        self, name: bytes, kind: str, number: int, image: Tensor, make: Callable[[Tensor, bytes, int], Tensor]
    ) -> Tensor:
        """Returns the features of view `number` of an image from disk. If they are not there, computes them
        with `make` and stores them. `name` is the image's checksum. `kind` is "weak" or "strong" for
        training, and "test" or "plain" (without augmentation) for evaluation."""
        file = None if self.folder is None else self.folder / _file(name, kind, number)
        if file is not None:
            with suppress(OSError, ValueError, EOFError):
                read = torch.from_numpy(np.load(file, allow_pickle=False))
                if read.dtype == STORED:
                    return read
        self.computed += 1
        # a copy, because a person's own augmentation may write into it
        copy = torch.empty(image.shape, dtype=image.dtype).copy_(image)
        features = make(copy, name, number).contiguous()
        if file is not None:
            _write(file, features.numpy())
        return features

    def _kept(self) -> set[str]:
        """Returns the names of the feature files that are already on disk."""
        try:
            return set() if self.folder is None else set(os.listdir(self.folder))
        except OSError:
            return set()

    def _each(self, work: Callable[..., None], items: Sequence[object], label: str) -> None:
        """Calls `work` for each item, on several threads, with a progress bar. Adds the time to `seconds` if
        features were computed. Each image is computed by a single thread, so that its features do not depend
        on the number of threads."""
        before, began, computed = torch.get_num_threads(), time.perf_counter(), self.computed
        with (
            ThreadPoolExecutor(self.threads, initializer=torch.set_num_threads, initargs=(1,)) as workers,
            progress.bar(label, len(items)) as advance,
        ):
            try:
                for _ in workers.map(work, items):
                    advance(1)
            except BaseException:
                workers.shutdown(cancel_futures=True)
                raise
            finally:
                torch.set_num_threads(before)
        if self.computed > computed:
            self.seconds += time.perf_counter() - began


def _file(name: bytes, kind: str, number: int) -> str:
    return f"{name.hex()}-{kind}-{number}.npy"


def _shared(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Returns a tensor of zeros in memory that forked processes share. torch's own shared memory is not used:
    it needs /dev/shm, which is small in containers."""
    count = math.prod(shape)
    if not count:
        return torch.zeros(shape, dtype=dtype)
    return torch.frombuffer(mmap.mmap(-1, count * dtype.itemsize), dtype=dtype).view(shape)


def _checksum(image: Tensor) -> bytes:
    """Returns a SHA-256 checksum of an image's shape and bytes, by which its features are found again."""
    digest = hashlib.sha256(repr(tuple(image.shape)).encode())
    digest.update(image.cpu().contiguous().numpy().data)
    return digest.digest()


def _write(file: Path, array: np.ndarray) -> None:
    """Writes an array to a file completely or not at all. If the disk cannot be written, it does nothing,
    since the features can be computed again."""
    with suppress(OSError):
        file.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        handle, name = tempfile.mkstemp(dir=file.parent)
        try:
            with os.fdopen(handle, "wb") as opened:
                np.save(opened, array, allow_pickle=False)
            os.replace(name, file)
        except OSError:
            with suppress(OSError):
                os.unlink(name)
            raise

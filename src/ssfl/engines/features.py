"""Features: the output of a network's frozen part, computed once for a few views of every image.

If the first part of a network (its `trunk`) is frozen, its output for a view never changes. So it is computed
only once, for V weak and V strong views of every image. Training draws from these outputs and runs only the
rest of the network (its `tail`). The first view of each kind is computed before round 1, the second before
round 2, and so on: round r draws from the first r views, at most V.

The random draws of a view depend only on the image's bytes, and each view goes through the trunk by itself.
So an image has the same features in every run, process and federation. They are kept on disk for the next
command, one file for each view, named by the image's checksum.
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
from ssfl.models import external

FORMAT = 2
STORED = torch.float16
"""Features are stored in half precision: the rounding is smaller than the difference between two views."""


KINDS = ("weak", "strong")


class Tail(nn.Module):
    """The part of a network that learns, with the names that its tensors have in the whole network."""

    def __init__(self, tail: nn.Module) -> None:
        super().__init__()
        self.tail = tail

    def forward(self, x: Tensor) -> Tensor:
        return self.tail(x)  # type: ignore[no-any-return]


def is_divided(module: nn.Module) -> bool:
    """Returns whether a network has a frozen `trunk` and a `tail`, so that the trunk's output can be
    stored."""
    trunk, tail = getattr(module, "trunk", None), getattr(module, "tail", None)
    if not isinstance(trunk, nn.Module) or not isinstance(tail, nn.Module):
        return False
    weights = list(trunk.parameters())
    return bool(weights) and not any(weight.requires_grad for weight in weights)


def tail_of(module: nn.Module) -> nn.Module:
    """Returns the part of a divided network that learns; its tensors keep their names."""
    tail = module.tail
    assert isinstance(tail, nn.Module)
    names = {name for name, _ in module.named_parameters()}
    return tail if {name for name, _ in tail.named_parameters()} <= names else Tail(tail)


@dataclass(eq=False)
class Features:
    """The features of all images, and the folder in which they are stored."""

    trunk: nn.Module
    count: int
    """V, the number of weak and of strong views of an image."""
    mean: Tensor
    std: Tensor
    flip: bool
    weak: augment.View = augment.WEAK
    strong: augment.View = augment.STRONG
    folder: Path | None = None
    """The folder of the features on disk; None: they are not stored."""
    threads: int = 1
    views: tuple[Tensor, ...] = ()
    """The features of all N images of the pool, [N, V, ...]: first for V weak views and then, if they are
    used, for V strong views. If weak and strong views are made in the same way, both are the same 2 V
    views."""
    seconds: float = 0.0
    """Seconds that it took to compute `computed` views. Views that were read from disk do not count."""
    computed: int = 0
    _available: Tensor = field(default_factory=lambda: torch.zeros((), dtype=torch.int64), repr=False)
    """How many views of each image may be drawn in this round. The number is in memory that forked processes
    share."""
    _images: Tensor = field(default_factory=lambda: torch.empty(0), repr=False)
    _names: dict[int, bytes] = field(default_factory=dict, repr=False)
    """The checksums of the images whose features are computed, by their place in the pool."""
    _room: Tensor = field(default_factory=lambda: torch.empty(0), repr=False)
    """The memory for the features of all views, [N, V, kinds, ...]. There are two kinds, weak and strong, or
    only weak."""
    _first: float = 0.0
    """Seconds that the very first view took. It is used for estimates until more views are measured."""
    _done: int = 0
    """How many views of each kind (weak, strong) have been computed so far."""
    _plain: dict[tuple[bytes, int], Tensor] = field(default_factory=dict, repr=False)
    """The features of images that are evaluated, by the image's checksum and the number of the test view (an
    augmented view for prediction). Number 0 is the image without augmentation."""
    _lasting: dict[int, Tensor] = field(default_factory=dict, repr=False)
    """Images that are evaluated repeatedly, by the address of their memory. Keeping them here ensures that
    the address is not used again."""
    _checksums: dict[tuple[object, ...], list[bytes]] = field(default_factory=dict, repr=False)
    """The checksums of images that are evaluated repeatedly, by the address and shape of their tensor."""

    @classmethod
    def of(
        cls, module: nn.Module, count: int, mean: Sequence[float], std: Sequence[float], flip: bool,
        weak: augment.View, strong: augment.View, threads: int,
    ) -> "Features":  # fmt: skip
        """Returns an object for the features of a divided network, with none computed yet. Features are
        stored on disk only for the package's own augmentations, since others have no name by which a file
        could be found."""
        trunk = module.trunk
        assert isinstance(trunk, nn.Module)
        kind = gentle.kind_of(weak, strong)
        settings: tuple[object, ...] = (
            FORMAT, tuple(mean), tuple(std), flip, external.fingerprint(trunk),
        )  # fmt: skip
        if kind != "standard":
            settings += (kind,)
        name = hashlib.sha256(repr(settings).encode()).hexdigest()[:24]
        return cls(
            trunk.eval(), count, torch.tensor(mean), torch.tensor(std), flip, weak, strong,
            cache.root() / "features" / name if kind is not None else None, threads,
        )  # fmt: skip

    def prepare(self, images: Tensor, indices: Tensor, strong: bool = True) -> None:
        """Computes, or reads from disk, the first weak view (and with `strong` the first strong view) of the
        images of the pool at `indices`."""
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
        # of one kind: all serve as weak and as strong views, the first of both first
        self.views = (self._room.flatten(1, 2),) * 2 if strong and self.weak == self.strong else kinds
        self.use(0)

    def serves(self, images: Tensor, indices: Tensor, strong: bool) -> bool:
        """Returns whether there are features for the images at these indices of the pool, with `strong` also
        for strong views."""
        known = images is self._images and self._names.keys() >= set(indices.unique().tolist())
        return known and len(self.views) >= 1 + strong

    def use(self, round: int) -> None:
        """Computes, or reads from disk, the views that a round draws from: one of each kind in round 0, and
        one more in each round until there are V."""
        wanted = min(self.count, round + 1)
        for number in range(self._done, wanted):
            self._add(number)
        self._done = max(self._done, wanted)
        self._available.fill_(wanted * self.views[0].shape[1] // self.count)

    def left(self) -> float:
        """Returns about how many seconds the computation of the remaining views will take."""
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
        """Returns about how many seconds it will take to compute the features of these images and of their
        test views, which happens when they are evaluated for the first time."""
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
        """Returns about how many seconds the computation of one view takes."""
        return self.seconds / self.computed if self.computed else self._first

    def _add(self, number: int) -> None:
        """Computes, or reads from disk, one more view of each kind for every image."""
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
                os.utime(self.folder)  # the cache deletes what was not used for longest
                cache.trim(keep=self.folder)

    def at(self, kind: int, places: Tensor, drawn: Tensor, dtype: torch.dtype) -> Tensor:
        """Returns the features of one view of each image at these `places` in the pool. The random numbers
        `drawn` choose the view. Kind 0 is weak and 1 is strong."""
        return self.views[kind][places, draws.below(drawn, self._available)].to(dtype)

    def plain(self, images: Tensor, dtype: torch.dtype, number: int = 0) -> Tensor:
        """Returns the features of uint8 images without augmentation (number 0), or of the test view with this
        number."""
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
            self._each(one, list(new.items()), f"features of test images{what}")
        return torch.stack([self._plain[name, number] for name in names]).to(images.device, dtype)

    def remember(self, images: Tensor) -> None:
        """Keeps the checksums of these images, and of parts of the tensor, because they will be evaluated
        often."""
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
        """Returns the features of one weak (kind 0) or strong (kind 1) view of an image. `name` is the
        image's checksum."""
        view = (self.weak, self.strong)[kind]
        key = torch.tensor([draws.key(int.from_bytes(name[:7], "big"), "features", kind)])
        drawn = draws.bits(draws.fold(key, torch.tensor([number])), view.draws)
        return self._through(view.make(image[None], drawn, self.flip))[0]

    def _through(self, images: Tensor) -> Tensor:
        device = next(self.trunk.parameters()).device
        with torch.no_grad():
            x = augment.normalise(images, self.mean, self.std, torch.float32).to(device)
            return self.trunk(x.contiguous(memory_format=torch.channels_last)).to("cpu", STORED)  # type: ignore[no-any-return]

    def _stored(
        self, name: bytes, kind: str, number: int, image: Tensor, make: Callable[[Tensor, bytes, int], Tensor]
    ) -> Tensor:
        """Returns features from the disk, or computes them with `make` and writes them there. `name` is the
        image's checksum."""
        file = None if self.folder is None else self.folder / _file(name, kind, number)
        if file is not None:
            with suppress(OSError, ValueError, EOFError):
                read = torch.from_numpy(np.load(file, allow_pickle=False))
                if read.dtype == STORED:
                    return read
        self.computed += 1
        copy = torch.empty(image.shape, dtype=image.dtype).copy_(image)  # a view of one's own may write to it
        features = make(copy, name, number).contiguous()
        if file is not None:
            _write(file, features.numpy())
        return features

    def _kept(self) -> set[str]:
        """Returns the names of the files that are already on disk."""
        try:
            return set() if self.folder is None else set(os.listdir(self.folder))
        except OSError:
            return set()

    def _each(self, work: Callable[..., None], items: Sequence[object], label: str) -> None:
        """Calls `work` for each item on several threads, and adds the time to `seconds`. Each image is
        computed by a single thread, so that its features do not depend on the number of threads."""
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
    """Returns zeros in memory that forked processes share. Torch's own shared memory would be in /dev/shm,
    which is small in containers."""
    count = math.prod(shape)
    if not count:
        return torch.zeros(shape, dtype=dtype)
    return torch.frombuffer(mmap.mmap(-1, count * dtype.itemsize), dtype=dtype).view(shape)


def _checksum(image: Tensor) -> bytes:
    """Returns a checksum of an image's shape and bytes."""
    digest = hashlib.sha256(repr(tuple(image.shape)).encode())
    digest.update(image.cpu().contiguous().numpy().data)
    return digest.digest()


def _write(file: Path, array: np.ndarray) -> None:
    """Writes a file completely or not at all. If the cache cannot be written, it does nothing."""
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

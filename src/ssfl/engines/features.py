"""The output of a frozen trunk, computed once for a few views of every image.

If the first part of a network (its `trunk`) is frozen, its output for a view never changes. So it is computed
for V weak and V strong views of every image, and training draws from those and runs only the rest of the
network (its `tail`). The random draws of a view depend on the image's bytes only, and each image goes through
the trunk by itself. So an image has the same features in every run, process and federation. They are kept on
disk for the next command, one file for each image, named by its checksum.
"""

import hashlib
import os
import tempfile
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

FORMAT = 1
STORED = torch.float16
"""Features are stored in half precision: the rounding is smaller than the difference between two views."""


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
    """The outputs of a frozen trunk, and where they are stored."""

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
    """[N, V, ...] for all images of the pool: weak views and, if they are used, strong views. If both are
    made in the same way, they are the same 2 V views."""
    _plain: dict[bytes, Tensor] = field(default_factory=dict, repr=False)
    """The features of images without augmentation, by their checksum."""

    @classmethod
    def of(
        cls, module: nn.Module, count: int, mean: Sequence[float], std: Sequence[float], flip: bool,
        weak: augment.View, strong: augment.View, threads: int,
    ) -> "Features":  # fmt: skip
        """Returns the features of a divided network. They are stored on disk only for the package's own
        views: other views have no name that a file could be found by."""
        trunk = module.trunk
        assert isinstance(trunk, nn.Module)
        kind = gentle.kind_of(weak, strong)
        settings: tuple[object, ...] = (
            FORMAT, count, tuple(mean), tuple(std), flip, external.fingerprint(trunk),
        )  # fmt: skip
        if kind != "standard":
            settings += (kind,)
        name = hashlib.sha256(repr(settings).encode()).hexdigest()[:24]
        return cls(
            trunk.eval(), count, torch.tensor(mean), torch.tensor(std), flip, weak, strong,
            cache.root() / "features" / name if kind is not None else None, threads,
        )  # fmt: skip

    def prepare(self, images: Tensor, indices: Tensor, strong: bool = True) -> None:
        """Computes or reads the features of some of the pool's images [N, C, H, W]."""
        shape = self._through(images[:1].cpu())[0].shape
        chosen, kinds = indices.unique().tolist(), ("weak", "strong") if strong else ("weak",)
        views = [torch.zeros(len(images), self.count, *shape, dtype=STORED) for _ in kinds]

        def one(item: tuple[int, int]) -> None:
            kind, place = item
            views[kind][place] = self._stored(kinds[kind], images[place], partial(self._views, kind))

        self._each(one, [(kind, place) for kind in range(len(kinds)) for place in chosen])
        if strong and self.weak == self.strong:  # of one kind: all serve as weak and as strong views
            self.views = (torch.cat(views, 1).to(images.device),) * 2
        else:
            self.views = tuple(features.to(images.device) for features in views)
        if self.folder is not None:
            with suppress(OSError):
                os.utime(self.folder)  # the cache deletes what was not used for longest
                cache.trim(keep=self.folder)

    def at(self, kind: int, places: Tensor, drawn: Tensor, dtype: torch.dtype) -> Tensor:
        """Returns the features of one of each image's views; kind 0 is weak and 1 is strong."""
        view = draws.below(drawn, self.views[kind].shape[1])
        return self.views[kind][places, view].to(dtype)

    def plain(self, images: Tensor, dtype: torch.dtype) -> Tensor:
        """Returns the features of uint8 images without augmentation."""
        if not len(images):  # with run.folds there are no test images
            return self._through(images.new_zeros(1, *images.shape[1:]).cpu())[:0].to(images.device, dtype)
        names = [_checksum(image) for image in images]
        new = {name: place for place, name in enumerate(names) if name not in self._plain}

        def one(item: tuple[bytes, int]) -> None:
            name, place = item
            self._plain[name] = self._stored("plain", images[place], self._unchanged, name)

        self._each(one, list(new.items()))
        return torch.stack([self._plain[name] for name in names]).to(images.device, dtype)

    def _unchanged(self, image: Tensor, name: bytes) -> Tensor:
        return self._through(image[None])[0]

    def _views(self, kind: int, image: Tensor, name: bytes) -> Tensor:
        """Returns the features [V, ...] of an image's weak or strong views, computed in one pass."""
        view = (self.weak, self.strong)[kind]
        key = torch.tensor([draws.key(int.from_bytes(name[:7], "big"), "features", kind)])
        drawn = draws.bits(draws.fold(key, torch.arange(self.count)), view.draws)
        return self._through(view.make(image.expand(self.count, *image.shape), drawn, self.flip))

    def _through(self, images: Tensor) -> Tensor:
        device = next(self.trunk.parameters()).device
        with torch.no_grad():
            x = augment.normalise(images, self.mean, self.std, torch.float32).to(device)
            return self.trunk(x.contiguous(memory_format=torch.channels_last)).to("cpu", STORED)  # type: ignore[no-any-return]

    def _stored(
        self, kind: str, image: Tensor, make: Callable[[Tensor, bytes], Tensor], name: bytes | None = None
    ) -> Tensor:
        """Returns features from the disk, or computes them and writes them there."""
        image = image.cpu().contiguous()
        name = name or _checksum(image)
        file = None if self.folder is None else self.folder / f"{name.hex()}-{kind}.npy"
        if file is not None:
            with suppress(OSError, ValueError, EOFError):
                read = torch.from_numpy(np.load(file, allow_pickle=False))
                if read.dtype == STORED:
                    return read
        features = make(image, name).contiguous()
        if file is not None:
            _write(file, features.numpy())
        return features

    def _each(self, work: Callable[..., None], items: Sequence[object]) -> None:
        """Does the work for each item on several threads. Each image is computed by one thread, so that its
        features do not depend on the number of threads."""
        before = torch.get_num_threads()
        with (
            ThreadPoolExecutor(self.threads, initializer=torch.set_num_threads, initargs=(1,)) as workers,
            progress.bar("features of images", len(items)) as advance,
        ):
            try:
                for _ in workers.map(work, items):
                    advance(1)
            except BaseException:
                workers.shutdown(cancel_futures=True)
                raise
            finally:
                torch.set_num_threads(before)


def _checksum(image: Tensor) -> bytes:
    """Returns a checksum of an image's shape and bytes."""
    digest = hashlib.sha256(repr(tuple(image.shape)).encode())
    digest.update(image.cpu().contiguous().numpy().data)
    return digest.digest()


def _write(file: Path, array: np.ndarray) -> None:
    """Writes a file completely or not at all; a cache that cannot be written is not used."""
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

"""The output of a frozen trunk, computed once for a few views of every image.

Where the first part of a network (its `trunk`) is frozen, what it makes of a view never changes. So it is
computed for V weak and V strong views of every image, and training draws from those and runs only the rest of
the network (its `tail`). Views are named by the image's own bytes, and each image goes through the trunk by
itself. So an image has the same features in every run, process and federation, and they are kept on this
machine's disk for the next command: one file for each image, named by its checksum.
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
from ssfl.data import augment
from ssfl.models import external

FORMAT = 1
STORED = torch.float16
"""Features are kept in half precision, which is closer to them than two views are to each other."""


class Tail(nn.Module):
    """The part of a network that learns, with the names that its tensors have in the whole network."""

    def __init__(self, tail: nn.Module) -> None:
        super().__init__()
        self.tail = tail

    def forward(self, x: Tensor) -> Tensor:
        return self.tail(x)  # type: ignore[no-any-return]


def is_divided(module: nn.Module) -> bool:
    """Whether a network has a frozen `trunk` and a `tail`, so that the trunk's output can be kept."""
    trunk, tail = getattr(module, "trunk", None), getattr(module, "tail", None)
    if not isinstance(trunk, nn.Module) or not isinstance(tail, nn.Module):
        return False
    weights = list(trunk.parameters())
    return bool(weights) and not any(weight.requires_grad for weight in weights)


def tail_of(module: nn.Module) -> nn.Module:
    """The part of a divided network that learns; its tensors have the names that they have in the whole."""
    tail = module.tail
    assert isinstance(tail, nn.Module)
    names = {name for name, _ in module.named_parameters()}
    return tail if {name for name, _ in tail.named_parameters()} <= names else Tail(tail)


@dataclass(eq=False)
class Features:
    """What a frozen trunk makes of images, and where that is kept."""

    trunk: nn.Module
    count: int
    """V, how many weak and how many strong views of an image there are."""
    mean: Tensor
    std: Tensor
    flip: bool
    weak: augment.View = augment.WEAK
    strong: augment.View = augment.STRONG
    folder: Path | None = None
    """Where they are kept on disk; None for nowhere."""
    threads: int = 1
    views: tuple[Tensor, ...] = ()
    """[N, V, ...] of every image of the pool: of weak views and, if they are needed, of strong ones."""
    _plain: dict[bytes, Tensor] = field(default_factory=dict, repr=False)
    """Of images as they are, by their checksum."""

    @classmethod
    def of(
        cls, module: nn.Module, count: int, mean: Sequence[float], std: Sequence[float], flip: bool,
        weak: augment.View, strong: augment.View, threads: int,
    ) -> "Features":  # fmt: skip
        """The features of a divided network. Views that are not the package's own are kept in memory only,
        because nothing names them."""
        trunk = module.trunk
        assert isinstance(trunk, nn.Module)
        settings = (FORMAT, count, tuple(mean), tuple(std), flip, external.fingerprint(trunk))
        name = hashlib.sha256(repr(settings).encode()).hexdigest()[:24]
        own = (weak, strong) == (augment.WEAK, augment.STRONG)
        return cls(
            trunk.eval(), count, torch.tensor(mean), torch.tensor(std), flip, weak, strong,
            cache.root() / "features" / name if own else None, threads,
        )  # fmt: skip

    def prepare(self, images: Tensor, wanted: Tensor, strong: bool = True) -> None:
        """Compute or read the views of the wanted images, indices into the pool's images [N, C, H, W]."""
        shape = self._through(images[:1].cpu())[0].shape
        chosen, kinds = wanted.unique().tolist(), ("weak", "strong") if strong else ("weak",)
        views = [torch.zeros(len(images), self.count, *shape, dtype=STORED) for _ in kinds]

        def one(item: tuple[int, int]) -> None:
            kind, place = item
            views[kind][place] = self._kept(kinds[kind], images[place], partial(self._views, kind))

        self._each(one, [(kind, place) for kind in range(len(kinds)) for place in chosen])
        self.views = tuple(each.to(images.device) for each in views)
        if self.folder is not None:
            with suppress(OSError):
                os.utime(self.folder)  # used now
                cache.trim(keep=self.folder)

    def at(self, kind: int, places: Tensor, drawn: Tensor, dtype: torch.dtype) -> Tensor:
        """The features of one view of each image, drawn from its V: kind 0 is weak and 1 is strong."""
        view = draws.below(drawn, self.count)
        return self.views[kind][places, view].to(dtype)

    def plain(self, images: Tensor, dtype: torch.dtype) -> Tensor:
        """The features of uint8 images as they are."""
        if not len(images):  # of folds there are no test images
            return self._through(images.new_zeros(1, *images.shape[1:]).cpu())[:0].to(images.device, dtype)
        names = [_checksum(image) for image in images]
        new = {name: place for place, name in enumerate(names) if name not in self._plain}

        def one(item: tuple[bytes, int]) -> None:
            name, place = item
            self._plain[name] = self._kept("plain", images[place], self._unchanged, name)

        self._each(one, list(new.items()))
        return torch.stack([self._plain[name] for name in names]).to(images.device, dtype)

    def _unchanged(self, image: Tensor, name: bytes) -> Tensor:
        return self._through(image[None])[0]

    def _views(self, kind: int, image: Tensor, name: bytes) -> Tensor:
        """[V, ...]: of an image's weak or strong views, in one pass."""
        view = (self.weak, self.strong)[kind]
        key = torch.tensor([draws.key(int.from_bytes(name[:7], "big"), "features", kind)])
        drawn = draws.bits(draws.fold(key, torch.arange(self.count)), view.draws)
        return self._through(view.make(image.expand(self.count, *image.shape), drawn, self.flip))

    def _through(self, images: Tensor) -> Tensor:
        device = next(self.trunk.parameters()).device
        with torch.no_grad():
            x = augment.normalise(images, self.mean, self.std, torch.float32).to(device)
            return self.trunk(x.contiguous(memory_format=torch.channels_last)).to("cpu", STORED)  # type: ignore[no-any-return]

    def _kept(
        self, what: str, image: Tensor, make: Callable[[Tensor, bytes], Tensor], name: bytes | None = None
    ) -> Tensor:
        """Features from the disk, or computed and written there."""
        image = image.cpu().contiguous()
        name = name or _checksum(image)
        file = None if self.folder is None else self.folder / f"{name.hex()}-{what}.npy"
        if file is not None:
            with suppress(OSError, ValueError, EOFError):
                read = torch.from_numpy(np.load(file, allow_pickle=False))
                if read.dtype == STORED:
                    return read
        made = make(image, name).contiguous()
        if file is not None:
            _write(file, made.numpy())
        return made

    def _each(self, work: Callable[..., None], items: Sequence[object]) -> None:
        """Do the work for each item, on so many threads; one image goes through one thread of torch, so that
        its features do not depend on their number."""
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
    """Of an image's shape and bytes."""
    digest = hashlib.sha256(repr(tuple(image.shape)).encode())
    digest.update(image.cpu().contiguous().numpy().data)
    return digest.digest()


def _write(file: Path, array: np.ndarray) -> None:
    """Write a file whole or not at all; a cache that cannot be written is done without."""
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

"""The images of a site: files in a folder, or arrays that a function of its own returns."""

from pathlib import Path
from typing import Protocol

from torch import Tensor

from ssfl.core import outside
from ssfl.data import arrays, decoding, formats, pictures
from ssfl.deploy import Tell
from ssfl.errors import DataError


class Images(Protocol):
    """What a site has to say how many images it holds, and to train on them."""

    def __len__(self) -> int: ...

    def read(self, shape: tuple[int, int, int], white: int, tell: Tell) -> Tensor:
        """uint8 [N, C, H, W] in the centre's shape; `white` is the largest value of the centre's images."""
        ...


class ImageFiles(list[Path]):
    """Image files. They are read when the centre has said which size and depth it uses."""

    def read(self, shape: tuple[int, int, int], white: int, tell: Tell) -> Tensor:
        """The files decoded, scaled to the centre's size."""
        decoded = decoding.decoded(self, shape[1:], shape[0], white)
        if decoded.broken:  # they were whole when this site joined
            raise DataError(decoding.describe_broken(decoded.broken, len(self)))
        if decoded.cut:
            tell(
                f"{decoded.cut:,} of {len(self):,} images have values above {white:,}, the largest that the "
                "centre's images have bits for: these are cut off"
            )
        return decoded.images


class Loaded:
    """Images that a function of this site's own file returned."""

    def __init__(self, name: str) -> None:
        outside.trust(name)  # a person typed it after --data
        self.name, self.images = name, arrays.unlabelled(outside.called(name, "--data"), name)

    def __len__(self) -> int:
        return len(self.images)

    def read(self, shape: tuple[int, int, int], white: int, tell: Tell) -> Tensor:
        """The images, scaled to the centre's size if that is square."""
        channels, height, width = shape
        if tuple(self.images.shape[1:]) == shape:
            return self.images
        if self.images.shape[1] != channels or height != width:
            here, there = ("x".join(map(str, one)) for one in (self.images.shape[1:], shape))
            raise DataError(
                f"{self.name} returns images of {here} (channels x height x width), and the centre trains on "
                f"{there}: return them in that shape"
            )
        return formats.resized(self.images, height)


def _try(file: Path) -> None:
    """Raises if an image file cannot be read."""
    pictures.decode(file, 1)


def usable(files: list[Path], tell: Tell) -> ImageFiles:
    """The image files that can be read; the others are named."""
    good = ImageFiles()
    for number, result in decoding.each(files, _try, "checking images"):
        if isinstance(result, DataError):
            tell(f"left out: {result}")
        else:
            good.append(files[number])
    if not good:
        raise DataError(f"none of {len(files)} image files can be read: repair them, or give another --data")
    return good

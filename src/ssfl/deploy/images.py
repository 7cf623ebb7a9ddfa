"""The images of a site: files in a folder, or arrays that a function in the site's own Python file
returns."""

from pathlib import Path
from typing import Protocol

from torch import Tensor

from ssfl.core import outside
from ssfl.data import arrays, decoding, formats, pictures
from ssfl.deploy import Tell
from ssfl.deploy.disclosure import PublicError
from ssfl.errors import DataError


class Images(Protocol):
    """What a site needs from its images: their number, and their pixels for training."""

    def __len__(self) -> int: ...

    def read(self, shape: tuple[int, int, int], white: int, tell: Tell) -> Tensor:
        """Returns all N images as uint8 [N, C, H, W], where `shape` is (C, H, W) of the centre's images.

        `white` is used only for image files with more than 8 bits per channel. It is the largest pixel value
        of the centre's images, and becomes 255. `tell` prints a line for the site's operator.
        """
        ...


class ImageFiles(list[Path]):
    """The image files of a site. Their pixels are read later, after the centre has said which image size and
    bit depth it uses."""

    def read(self, shape: tuple[int, int, int], white: int, tell: Tell) -> Tensor:
        """Returns the N decoded images, uint8 [N, C, H, W], resized to the centre's `shape` (C, H, W). In
        files with more than 8 bits per channel, values are scaled so that `white` becomes 255. Larger values
        become 255 too, and `tell` prints how many images have such values."""
        decoded = decoding.decoded(self, shape[1:], shape[0], white)
        if decoded.broken:  # these files could be read when this site joined
            raise PublicError(
                f"{decoding.describe_broken(decoded.broken, len(self))}; they could be read when this site "
                "joined: restore them, or stop with Ctrl-C and join again",
                public=f"{len(decoded.broken):,} of its {len(self):,} images can no longer be read",
            )
        if decoded.cut:
            tell(
                f"{decoded.cut:,} of {len(self):,} images have pixel values above {white:,}, the largest "
                "value of the centre's images: these pixels are set to that value"
            )
        return decoded.images


class Loaded:
    """The images that a function in the site's own Python file returns."""

    def __init__(self, name: str) -> None:
        outside.trust(name)  # safe: the user typed this name after --data
        self.name, self.images = name, arrays.unlabelled(outside.called(name, "--data"), name)

    def __len__(self) -> int:
        return len(self.images)

    def read(self, shape: tuple[int, int, int], white: int, tell: Tell) -> Tensor:
        """Returns the N images, uint8 [N, C, H, W], resized to the centre's `shape` (C, H, W) if necessary.
        `white` and `tell` are not used.

        Raises if the number of channels differs from the centre's. Also raises if the images have to be
        resized and the centre's images are not square.
        """
        channels, height, width = shape
        if tuple(self.images.shape[1:]) == shape:
            return self.images
        if self.images.shape[1] != channels or height != width:
            here, there = ("x".join(map(str, one)) for one in (self.images.shape[1:], shape))
            raise PublicError(
                f"{self.name} returns images of {here} (channels x height x width), but the centre trains on "
                f"{there}: return them in that shape",
                public=f"its images are {here} (channels x height x width), not {there}",
            )
        return formats.resized(self.images, height)


def _try(file: Path) -> None:
    """Raises if an image file cannot be decoded."""
    pictures.decode(file, 1)


def usable(files: list[Path], tell: Tell) -> ImageFiles:
    """Returns the image files that can be decoded, and reports each of the others with `tell`. Raises if no
    file can be decoded."""
    if len(files) == 1 and not files[0].exists():
        raise DataError(f"{files[0]}: there is no such file or folder; check the path after --data")
    good = ImageFiles()
    for number, result in decoding.each(files, _try, "checking images"):
        if isinstance(result, DataError):
            tell(f"this image is not used: {result}")
        else:
            good.append(files[number])
    if not good:
        raise DataError(
            f"none of the image files can be read ({len(files)} tried, see the reasons above): check the "
            "path after --data, or repair the files"
        )
    return good

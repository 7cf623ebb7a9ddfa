"""An example of your own data: a torch data set, and a partition that says who owns which image."""

from pathlib import Path
from typing import Any

import numpy as np
import torch
from sklearn.datasets import load_digits
from torch import Tensor
from torch.utils.data import Dataset

import ssfl


class Digits(Dataset[Any]):
    """A torch data set of digits. Any map-style data set works if its items are pairs (image, label)."""

    classes = tuple("0123456789")

    def __init__(self, first: int, last: int) -> None:
        digits = load_digits()
        self.images = torch.from_numpy(digits.images[first:last] / 16).float()
        self.labels = digits.target[first:last]

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, place: int) -> tuple[Tensor, int]:
        return self.images[place][None], int(self.labels[place])


def darker(images: Tensor, draws: Tensor) -> Tensor:
    """Returns strong views of the images: each image is multiplied by a random factor between 0.5 and 1."""
    share = 0.5 + 0.5 * ssfl.augment.uniform(draws[:, 0])
    return (images * share.view(-1, 1, 1, 1)).to(torch.uint8)


def load() -> ssfl.Data:
    """Returns the data of a whole simulated federation, for `ssfl run --set
    data.name=examples/own/data.py:load`."""
    train, test = Digits(0, 1400), Digits(1400, 1797)
    writers = np.array_split(np.arange(100, 1400), 13)  # images are ordered by writer
    return ssfl.Data.of(train, test, server=range(100), users=writers, strong=darker)


def labelled() -> ssfl.Data:
    """Returns the labelled images of the centre of a real federation.

    ssfl serve --data examples/own/data.py:labelled --keys keys
    """
    return ssfl.Data.of(Digits(0, 100), Digits(1400, 1797))


def unlabelled() -> Tensor:
    """Returns the unlabelled images of one site of a real federation.

    ssfl join HOST:8443 --data examples/own/data.py:unlabelled --key a.site
    """
    return Digits(100, 1400).images


def main(out: str | Path = "runs/own-data", rounds: int = 20) -> ssfl.Result:
    """Trains a simulated federation on this data and returns the result."""
    config = ssfl.load_config("own", [f"federation.rounds={rounds}", "train.batch_size=32", "train.warmup=0"])
    return ssfl.run(config, out, data=load())


if __name__ == "__main__":
    print(main())

"""An example of your own network: a small vision transformer with about a million parameters, for images of
32×32 pixels.

    ssfl run --set model.name=examples/own/vit.py:make --set data.size=32
    ssfl predict runs/quickstart scan.png --with examples/own/vit.py

Or run `python examples/own/vit.py`. ssfl needs a function without arguments that returns an `nn.Module`. The
module takes float images [B, C, H, W] and returns logits [B, classes]. Every user trains a copy of it.
Parameters with `requires_grad=False` would stay fixed and never be sent.
"""

import torch
from torch import Tensor, nn

import ssfl


class ViT(nn.Module):
    """A small vision transformer: patches of 4×4 pixels, position embeddings, five transformer layers, and a
    classifier on the mean over the patches."""

    def __init__(self, classes: int, channels: int = 1, size: int = 32, width: int = 128) -> None:
        super().__init__()
        self.patches = nn.Conv2d(channels, width, 4, 4)
        self.places = nn.Parameter(0.02 * torch.randn(1, (size // 4) ** 2, width))
        layer = nn.TransformerEncoderLayer(
            width, 4, 4 * width, 0.1, "gelu", batch_first=True, norm_first=True
        )
        self.layers = nn.TransformerEncoder(layer, 5, enable_nested_tensor=False)
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, classes)

    def forward(self, images: Tensor) -> Tensor:
        x = self.patches(images).flatten(2).mT + self.places
        return self.head(self.norm(self.layers(x)).mean(1))  # type: ignore[no-any-return]


def make() -> nn.Module:
    """Returns the network for ten classes of grey images, such as the digits. ssfl calls this function."""
    return ViT(classes=10)


if __name__ == "__main__":
    config = ssfl.load_config("quickstart", ["data.size=32", "federation.rounds=5"])
    result = ssfl.run(config, model=make)
    print(f"accuracy {result.accuracy:.3f} in {result.path}")
    model = ssfl.load_model(result.path, model=make)
    print(model(torch.zeros(1, 1, 32, 32)).softmax(-1))

"""Random numbers without a generator: each one is a hash of its name, such as (seed, purpose, round, user,
step, index).

So equal names give the same bits on every device, in every engine and process, and in any order of drawing.
The hash is splitmix64 (Steele et al. 2014), computed with 64-bit integers.
"""

import torch
from torch import Tensor

PURPOSES = {
    "participants": 1,  # which users take part in a round
    "groups": 2,  # which of them share a group
    "return": 3,  # whether a participant drops out
    "batches": 4,  # the order of a user's images
    "labelled": 5,  # the order of a trainer's labelled images
    "weak": 6,  # the weak view of an image
    "strong": 7,  # the strong view of an image
    "dropout": 8,  # dropout masks inside the model
    "diversity": 9,  # the views for gradients over all images of a user
    "split": 10,  # who gets which image
    "noise": 11,  # the noise image on which FedMatch compares models
    "attack": 12,  # which users are attackers, and what they send
    "privacy": 13,  # the noise on a simulated user's update
    "consensus": 14,  # which users RSCFed averages in each of its random halves
    "features": 15,  # the views whose features (output of the frozen layers) are stored
    "gate": 16,  # the views of labelled images that the gate compares updates with
    "test": 17,  # the views over which the prediction for an image is averaged
}
SERVER = -1  # stands for the server where a user's number is expected

_WORD = (1 << 64) - 1
GAMMA = 0x9E3779B97F4A7C15


def signed(value: int) -> int:
    """Returns an integer with the same 64 bits, read as a signed number, because torch and safetensors have
    no unsigned 64-bit integers."""
    value &= _WORD
    return value - (1 << 64) if value >> 63 else value


MULTIPLY_1 = signed(0xBF58476D1CE4E5B9)
MULTIPLY_2 = signed(0x94D049BB133111EB)


def _mix_int(x: int) -> int:
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & _WORD
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & _WORD
    return x ^ (x >> 31)


def _shift(x: Tensor, bits: int) -> Tensor:
    """Returns the 64-bit integers x shifted right, with zeros filled in from the left. torch's own shift
    would copy the sign bit instead."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)


def _mix(x: Tensor) -> Tensor:
    x = (x ^ _shift(x, 30)) * MULTIPLY_1
    x = (x ^ _shift(x, 27)) * MULTIPLY_2
    return x ^ _shift(x, 31)


def key(seed: int, purpose: str, *parts: int) -> int:
    """Returns the key, a 64-bit hash, from which random numbers are drawn. The arguments name the draws, such
    as `key(seed, "weak", round, user, step)`; equal names give equal random numbers."""
    state = _mix_int((int(seed) + GAMMA) & _WORD)  # a Python int, because numpy's integers would overflow
    for part in (PURPOSES.get(purpose) or number(purpose), *parts):
        state = _mix_int((state + (int(part) + 1) * GAMMA) & _WORD)
    return signed(state)


def number(name: str) -> int:
    """Returns the number that stands in keys for a name of a person's own method, such as a purpose that is
    not in `PURPOSES`. It is computed without a library, so that torch can compile a step that calls it."""
    result = 0
    for letter in name:
        result = (131 * result + ord(letter)) % 2**31
    return 1000 + result


def fold(keys: Tensor, parts: Tensor | int) -> Tensor:
    """Returns keys whose names have one more part: `fold(key(s, p, a), b) == key(s, p, a, b)`. So a tensor of
    keys can be made at once, on any device."""
    if isinstance(parts, int):
        return _mix(keys + signed((parts + 1) * GAMMA))
    # `| 0` keeps torch's compiler from computing the product of a range in narrower integers
    return _mix(keys + ((parts + 1) | 0) * signed(GAMMA))


def bits(keys: Tensor, count: int) -> Tensor:
    """Returns `count` random 64-bit numbers for each key, as int64 of shape [..., count]."""
    index = torch.arange(count, device=keys.device)
    return fold(keys.unsqueeze(-1), index)


def below(draw: Tensor, bound: Tensor | int) -> Tensor:
    """Returns random integers from 0 to `bound` - 1, one for each of the random 64-bit numbers in `draw`.
    `bound` is at most 2**31."""
    return (_shift(draw, 32) * bound) >> 32


def uniform(draw: Tensor) -> Tensor:
    """Returns random float32 numbers in [0, 1), one for each of the random 64-bit numbers in `draw`. They are
    multiples of 2**-24, which float32 represents exactly."""
    return _shift(draw, 40).to(torch.float32) * 2.0**-24


def normal(draw: Tensor) -> Tensor:
    """Returns n standard normal random numbers in float64, made from 2n random 64-bit numbers, `draw` [...,
    2n]. The method is that of Box and Muller (1958).

    Different devices may round the last digits differently.
    """
    first, second = (_shift(draw, 11).double() * 2.0**-53).chunk(2, -1)  # [0, 1) in 53 bits
    return (-2 * torch.log1p(-first)).sqrt() * torch.cos(2 * torch.pi * second)

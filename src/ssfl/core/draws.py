"""Named randomness: every random number is a hash of its name (seed, purpose, round, user, step, index).
There is no generator with a state.

So the same name gives the same bits on every device, in every engine and in every process, in whatever order
draws are made. The hash is splitmix64 (Steele et al. 2014), in 64-bit integer arithmetic.
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
    "diversity": 9,  # views for the full-data gradients
    "split": 10,  # who gets which image
    "noise": 11,  # the image by which FedMatch compares models
    "attack": 12,  # which users are attackers, and what they send
    "privacy": 13,  # the noise on a simulated user's update
    "consensus": 14,  # which users form a sub-consensus of RSCFed
    "features": 15,  # the views of an image whose features are computed once
    "gate": 16,  # the views of labelled images that the gate compares updates with
    "test": 17,  # the views over which the prediction for an image is averaged
}
SERVER = -1  # the server's number, in place of a user's

_WORD = (1 << 64) - 1
_GAMMA = 0x9E3779B97F4A7C15


def _signed(value: int) -> int:
    """Returns the same 64 bits, read as the signed integer that torch and safetensors hold."""
    value &= _WORD
    return value - (1 << 64) if value >> 63 else value


_MULTIPLY_1 = _signed(0xBF58476D1CE4E5B9)
_MULTIPLY_2 = _signed(0x94D049BB133111EB)


def _mix_int(x: int) -> int:
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & _WORD
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & _WORD
    return x ^ (x >> 31)


def _shift(x: Tensor, bits: int) -> Tensor:
    """Returns the logical shift to the right; torch's own shift would repeat the sign bit."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)


def _mix(x: Tensor) -> Tensor:
    x = (x ^ _shift(x, 30)) * _MULTIPLY_1
    x = (x ^ _shift(x, 27)) * _MULTIPLY_2
    return x ^ _shift(x, 31)


def key(seed: int, purpose: str, *parts: int) -> int:
    """Returns the key (a hash) of random draws, such as `key(seed, "weak", round, user, step)`. The arguments
    are the name of the draws: equal names give equal random numbers."""
    state = _mix_int((int(seed) + _GAMMA) & _WORD)  # int: numpy's would overflow
    for part in (PURPOSES[purpose], *parts):
        state = _mix_int((state + (int(part) + 1) * _GAMMA) & _WORD)
    return _signed(state)


def fold(keys: Tensor, parts: Tensor | int) -> Tensor:
    """Returns keys with one more part in their names: `fold(key(s, p, a), b) == key(s, p, a, b)`."""
    if isinstance(parts, int):
        return _mix(keys + _signed((parts + 1) * _GAMMA))
    # `| 0` keeps a compiler from folding a range of numbers into a narrower product
    return _mix(keys + ((parts + 1) | 0) * _signed(_GAMMA))


def bits(keys: Tensor, count: int) -> Tensor:
    """Returns `count` random 64-bit numbers for each key: shape [..., count], int64."""
    index = torch.arange(count, device=keys.device)
    return fold(keys.unsqueeze(-1), index)


def below(draw: Tensor, bound: Tensor | int) -> Tensor:
    """Maps random 64-bit numbers to integers from 0 to `bound` - 1; `bound` is at most 2**31."""
    return (_shift(draw, 32) * bound) >> 32


def uniform(draw: Tensor) -> Tensor:
    """Maps random 64-bit numbers to float32 in [0, 1), in steps of 2**-24, which float32 represents
    exactly."""
    return _shift(draw, 40).to(torch.float32) * 2.0**-24


def normal(draw: Tensor) -> Tensor:
    """Maps random 64-bit numbers [..., 2n] to n independent normal ones in float64 (Box and Muller 1958).

    Devices may round the last digits differently.
    """
    first, second = (_shift(draw, 11).double() * 2.0**-53).chunk(2, -1)  # [0, 1) in 53 bits
    return (-2 * torch.log1p(-first)).sqrt() * torch.cos(2 * torch.pi * second)

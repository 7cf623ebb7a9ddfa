"""The sites of a run that goes on: those it was begun with, and those that have got a key since."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from torch.nn import functional as F

from ssfl.config.settings import Config
from ssfl.core import plain_files
from ssfl.errors import RunError
from ssfl.federation import State


def begun_with(path: Path) -> list[str]:
    """The sites of a run that was stopped, in the order of their numbers; none where they had no keys."""
    try:
        return [str(name) for name in plain_files.parse_json(plain_files.read(path / "split.json"))["sites"]]
    except (OSError, ValueError, KeyError, TypeError):
        raise RunError(f"{path / 'split.json'} cannot be read: put it back, or start a new run") from None


def going_on(path: Path, config: Config, known: Sequence[str], count: int) -> tuple[Config, list[str]]:
    """The config and the sites of a run that goes on: new ones get the next numbers, whose key is gone
    stays away."""
    begun, users = begun_with(path), config.split.users
    others = not set(known) & set(begun) if known and begun else count != max(users, len(begun))
    if others:
        raise RunError(f"{path} was begun with other sites ({', '.join(begun)}): use the keys of these")
    names = [*begun, *(name for name in known if name not in begun)]
    if len(names) > users and config.privacy.clip is not None:
        new = ", ".join(names[len(begun) :])
        raise RunError(
            f"{path} counts privacy for {users} sites: take the key of {new} out, or start a new run"
        )
    return joined(config, len(names)), names


def joined(config: Config, sites: int) -> Config:
    """The config with so many sites, if they are more than it was begun with.

    config.toml stays as it was, since checkpoints belong to it; split.json names the sites.
    """
    users, federation = config.split.users, config.federation
    if sites <= users:
        return config
    if federation.participants == users:  # everybody
        federation = replace(federation, participants=sites)
    return replace(config, split=replace(config.split, users=sites), federation=federation)


def grown(state: State, users: int) -> State:
    """The state with a place for sites that are new: nobody has refused them anything."""
    return replace(state, strikes=F.pad(state.strikes, (0, users - len(state.strikes))))

"""The sites of a resumed federation of real sites: those with which the run was started, and those that got a
key later."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from torch.nn import functional as F

from ssfl.config.settings import Config
from ssfl.core import plain_files
from ssfl.errors import RunError
from ssfl.federation import State
from ssfl.simulate.aggregation import TRUST


def begun_with(path: Path) -> list[str]:
    """Returns the names of the sites with which the run in the folder `path` was started, in the order of
    their numbers. The list is empty if the sites had no keys, and therefore no names."""
    try:
        return [str(name) for name in plain_files.parse_json(plain_files.read(path / "split.json"))["sites"]]
    except (OSError, ValueError, KeyError, TypeError):
        raise RunError(f"{path / 'split.json'} cannot be read: restore it, or start a new run") from None


def going_on(path: Path, config: Config, known: Sequence[str], count: int) -> tuple[Config, list[str]]:
    """Returns the config and the names of the sites of a resumed run. `known` are the names of the sites that
    have keys now; it is empty if sites need no keys. `count` is the number of sites now.

    Sites that got a key after the run was started are added, with the next numbers. Sites whose key was
    revoked keep their numbers, but can no longer take part. Raises if the sites are those of another run, or
    if sites would be added to a run with differential privacy.
    """
    begun, users = begun_with(path), config.split.users
    others = not set(known) & set(begun) if known and begun else count != max(users, len(begun))
    if others:
        sites = max(users, len(begun))
        if not known:
            raise RunError(f"{path} was started with {sites} sites, not {count}: use --sites {sites}")
        raise RunError(
            f"{path} was started with other sites ({', '.join(begun) or sites}): use the keys folder that "
            "has their keys"
        )
    names = [*begun, *(name for name in known if name not in begun)]
    if len(names) > users and config.privacy.clip is not None:
        new = ", ".join(names[len(begun) :])
        raise RunError(
            f"the privacy that {path} promises was computed for {users} sites, so no site can be added: "
            f"take out {new} with `ssfl keys revoke NAME`, or start a new run"
        )
    return joined(config, len(names)), names


def joined(config: Config, sites: int) -> Config:
    """Returns the config for a federation of `sites` sites, each of which is one user. If the run was started
    with at least as many sites, the config is returned unchanged.

    The file config.toml stays unchanged, because checkpoints contain a hash of it. split.json names all
    sites.
    """
    users, federation = config.split.users, config.federation
    if sites <= users:
        return config
    if federation.participants == users:  # all sites take part
        federation = replace(federation, participants=sites)
    return replace(config, split=replace(config.split, users=sites), federation=federation)


def grown(state: State, users: int) -> State:
    """Returns the state, in which new sites have been added so that there are `users` sites in total. A new
    site starts with no refused updates. Its trust, by which the gate weights updates (see
    `simulate/gate.py`), starts at zero."""
    new = users - len(state.strikes)
    trust = {name: F.pad(kept, (0, new)) for name, kept in state.memory.items() if name == TRUST}
    return replace(state, strikes=F.pad(state.strikes, (0, new)), memory=state.memory | trust)

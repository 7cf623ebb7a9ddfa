"""From a config to a simulation: load, choose what was left open, split, build.

Every mistake in the input shows here, before anything is written.
"""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from ssfl import doubts, engines, external, memory, models, outside
from ssfl.checks import check
from ssfl.data import sources, split
from ssfl.data.dataset import Dataset
from ssfl.data.hands import Hands, Index
from ssfl.errors import ConfigError
from ssfl.kernels import convolution
from ssfl.plan import Owners, Plan
from ssfl.privacy import library
from ssfl.rows import Layout, layout_of
from ssfl.settings import Config, Run
from ssfl.simulation import Simulation, network_of
from ssfl.work import Optimizer, Pool

CORES = torch.get_num_threads()
"""What torch would use: all of the machine's cores, or what the environment says."""


def choose_device(name: str) -> torch.device:
    """The device of a name, checked to be there."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
        if device.type in ("cpu", "cuda"):
            torch.zeros(1, device=device)
            return device
    except (RuntimeError, AssertionError):
        pass
    raise ConfigError(f"run.device = {name!r} is not available on this machine: use 'cpu' or 'auto'")


def _has_bfloat16(device: torch.device) -> bool:
    """Whether a device computes fast in bfloat16: GPUs since 2020."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (8, 0)


def load_data(config: Config) -> Dataset:
    """The images that [data] names."""
    data = config.data
    return sources.load(
        data.name, data.path, root=Path(data.root), download=data.download, size=data.size,
        test_fraction=data.test_fraction,
    )  # fmt: skip


def rounds(config: Config) -> float:
    """How many rounds there will be, before rounding where they were given in epochs."""
    federation = config.federation
    if federation.rounds is not None:
        return federation.rounds
    steps = (federation.epochs or 0) * federation.epoch_images / config.train.batch_size
    return steps / federation.period


def resolve(config: Config, dataset: Dataset) -> Config:
    """The config with every choice made that depends on the data."""
    federation, wanted = config.federation, config.split
    participants = federation.participants or wanted.users
    groups, method = federation.groups, config.method
    if groups is None:
        groups = min(participants, max(2, -(-participants // 10))) if method.grouped else 1
    full = -(-participants // groups)
    if federation.group_sizes == "filled" and (groups - 1) * full >= participants:
        raise ConfigError(
            f"federation.group_sizes = 'filled' leaves one of {groups} groups without users: set "
            f"federation.groups={-(-participants // full)}"
        )
    count = max(1, round(rounds(config)))
    if count > 10**9:
        raise ConfigError(f"federation.epochs = {federation.epochs} makes {count:.0e} rounds: lower it")
    counts = torch.bincount(dataset.labels[dataset.labels >= 0], minlength=len(dataset.classes))
    labels = wanted.server_labels
    if labels is None:
        smallest = int(counts.min() * (1 - config.data.validation))
        labels = len(counts) * min(100, max(smallest // 2, 1))
        if bool((dataset.labels < 0).any()):  # the others are the users'
            _, kept = split.hold_out(dataset.labels.numpy(), config.data.validation, wanted.seed)
            everything = int((dataset.labels[kept] >= 0).sum())
            labels = everything if wanted.labels_at == "server" else len(counts) * smallest
    user_labels = wanted.user_labels
    if wanted.labels_at != "server" and user_labels is None:
        user_labels = labels
    if wanted.labels_at == "users":
        labels = 0
    if config.model.norm_statistics != "average" and labels == 0:
        raise ConfigError(
            f"model.norm_statistics = {config.model.norm_statistics!r} needs a server that trains: "
            "use 'average'"
        )
    if "labels" in method.needs() and bool((dataset.labels < 0).any()):
        raise ConfigError(
            f"method.name = {method.name!r} needs a label on every image, and some of {dataset.name} have "
            "none: choose another method",
            key="method.name",
            value=method.name,
        )
    flip = dataset.flip if config.data.flip is None else config.data.flip
    path = None if config.data.path is None else _absolute(config.data.path)
    privacy = config.privacy
    if privacy.clip is not None:
        library()
        delta = min(1e-5, 0.1 / wanted.users) if privacy.delta is None else privacy.delta
        privacy = replace(privacy, delta=delta)
    gpu = torch.cuda.is_available() if config.run.device == "auto" else config.run.device != "cpu"
    views = config.train.server_views
    if views == "suited":
        views = "both" if min(dataset.shape[1:]) >= 16 else "weak"
    return replace(
        config,
        data=replace(config.data, flip=flip, root=_absolute(config.data.root), path=path),
        split=replace(wanted, server_labels=labels, user_labels=user_labels),
        train=replace(config.train, server_views=views),
        privacy=privacy,
        model=replace(config.model, name=config.model.name or models.suited(dataset.shape, gpu)),
        federation=replace(
            federation,
            participants=participants,
            groups=groups,
            rounds=count,
            epochs=None,
            gate=bool(federation.gate),
        ),
        run=replace(
            config.run,
            eval_every=config.run.eval_every or max(5, count // 100),
            checkpoint_every=config.run.checkpoint_every or max(10, count // 100),
        ),
    )


def _absolute(path: str) -> str:
    """A run must find its images again from whatever folder it is resumed."""
    return str(Path(path).absolute())


def make_parts(config: Config, dataset: Dataset) -> tuple[split.Parts, Index]:
    """Who gets which images, and the images set aside for validation."""
    wanted = config.split
    labels = dataset.labels.numpy()
    if wanted.users > len(labels):
        raise ConfigError(
            f"split.users = {wanted.users} is more than the {len(labels)} training images: "
            "some users would have no image; lower it"
        )
    held, kept = split.hold_out(labels, config.data.validation, wanted.seed)
    usable = kept[labels[kept] >= 0]
    given = (labels[usable], wanted.users)
    more = (wanted.server_labels or 0, wanted.seed)
    if len(usable) < len(kept) and wanted.server_labels == len(usable):  # however uneven the classes are
        parts = split.Parts(np.arange(len(usable)), [np.zeros(0, np.int64)] * wanted.users)
    elif wanted.scheme == "skew":
        parts = split.skewed(*given, wanted.skew, *more)
    elif wanted.scheme == "iid":
        parts = split.iid(*given, *more)
    elif wanted.scheme == "dirichlet":
        parts = split.dirichlet(*given, wanted.alpha, *more)
    elif wanted.scheme == "shards":
        parts = split.shards(*given, wanted.classes_per_user, *more)
    else:
        parts = split.mixture(*given, wanted.mixtures, *more)
    parts = split.Parts(usable[parts.server], Hands.of(parts.users).renamed(usable))
    if len(usable) < len(kept):
        parts = split.deal_unlabelled(parts, kept[labels[kept] < 0], wanted.seed)
    if wanted.labels_at != "server":
        parts = split.label_some(labels, parts, wanted.user_labels or 0, wanted.seed)
    if wanted.shared:
        parts = split.share(parts)
    empty = int((Hands.of(parts.users).sizes == 0).sum())
    if empty:
        raise ConfigError(
            f"{empty} of {len(parts.users)} users would have no image: lower split.users "
            "or split.server_labels, or use more images"
        )
    return parts, held


def make(config: Config, model: external.Factory | str | None = None) -> Simulation:
    """A simulation that is ready to play; `model` makes its network, or is the import path of what does."""
    if model is not None:
        if isinstance(model, str):
            outside.trust(model)
        name = model if isinstance(model, str) else outside.IN_MEMORY
        config = replace(config, model=replace(config.model, name=name))
    check(config)
    if config.run.engine == "sites":
        raise ConfigError("run.engine = 'sites' is a real federation: go on with `ssfl serve --resume RUN`")
    device = choose_device(config.run.device)
    if config.run.engine == "dist":
        device = engines.dist.local_device(device)
    given, dataset = config, load_data(config)
    config = resolve(config, dataset)
    parts, held = make_parts(config, dataset)
    if config.run.engine != "dist" or engines.dist.rank() == 0:
        doubts.warn(given, config, dataset, parts)
    return build(config, dataset, parts, held, device, None if isinstance(model, str) else model)


def brought(config: Config, network: nn.Module) -> dict[str, Any]:
    """How a network from outside is known again: its path, the digest of its text (None in memory) and the
    fingerprint of its frozen weights; nothing for one of the package."""
    name = config.model.name
    if name is None or not outside.is_outside(name):
        return {}
    digest = outside.digest(name) if outside.is_path(name) else None
    return {"name": name, "digest": digest, "frozen": external.fingerprint(network), "seed": config.run.seed}


def build(
    config: Config,
    dataset: Dataset,
    parts: split.Parts,
    held: Index,
    device: torch.device,
    make: external.Factory | None = None,
) -> Simulation:
    """A simulation of given owners of given images; the config is resolved."""
    if config.run.test != "every" and not len(held):
        raise ConfigError(
            f"run.test = {config.run.test!r} needs other images to look at, and data.validation = "
            f"{config.data.validation} of so few labelled images is none: raise it"
        )
    if device.type == "cuda":
        torch.cuda.set_device(device.index or 0)
        if not _has_bfloat16(device):
            convolution.use(False)
    precision = config.train.precision or ("bfloat16" if _has_bfloat16(device) else "float32")
    pool = Pool(
        dataset.images.to(device), dataset.labels.to(device),
        torch.tensor(dataset.mean, device=device), torch.tensor(dataset.std, device=device),
        bool(config.data.flip), getattr(torch, precision),
    )  # fmt: skip
    model = network_of(config, dataset, make)
    known = brought(config, model)
    model = model.to(device, pool.wide)
    external.check_precision(model, pool.normalised(pool.images[:2]))
    layout = layout_of(model)
    train = config.train
    kept, policy, users = 0, train.momentum_policy, config.split.users
    if policy != "reset":
        rows = users if policy == "user" else config.federation.participants or 1
        setting = f"train.momentum_policy = {policy!r}"
        instead = "'slot' or 'reset'" if policy == "user" else "'reset'"
        kept = memory.check_kept(setting, f"{policy}s", rows, layout.weights, pool.wide, device, instead)
    if config.method.start == "user" or "models" in config.method.needs():
        setting = f"method.name = {config.method.name!r}"
        rows = users if config.method.start == "user" else config.federation.participants or 1
        kept += memory.check_kept(
            setting, "users", rows, layout.length, pool.wide, device, "another, or lower split.users"
        )
    engine, run = _make_engine(config, model, layout, pool, device, kept)
    config = replace(config, run=run, train=replace(train, precision=precision))
    marked = Hands.of(parts.labelled or [])
    labelled = Owners.of(marked, device) if len(marked.flat) else None
    plan = Plan(
        config, Owners.of(parts.users, device), labelled, Owners.of([parts.server], device),
        engine.positions, device,
    )  # fmt: skip
    return Simulation(dataset, parts, held, pool, model, layout, engine, plan, device, make, known)


def _make_engine(
    config: Config, model: nn.Module, layout: Layout, pool: Pool, device: torch.device, kept: int
) -> tuple[engines.Engine, Run]:
    """The engine, and [run] with every choice made that depends on the machine; the state keeps
    some of its memory."""
    train, run, method = config.train, config.run, config.method
    spread_out = run.engine == "dist"
    participants = -(-(config.federation.participants or 1) // (engines.dist.ranks() if spread_out else 1))
    steps = (config.federation.rounds or 1) * config.federation.period
    optimizer = Optimizer(train.momentum, train.nesterov, train.weight_decay, train.clip)
    network = (model, layout, pool, optimizer, method)
    needed = engines.make("vmap", *network, False).memory(train.batch_size)
    threads = engines.dist.local_cores(CORES) if spread_out else run.threads or CORES
    torch.set_num_threads(engines.threads(needed, threads))
    name = engines.choose(device, needed) if run.engine in ("auto", "dist") else run.engine
    compiled = engines.can_compile(name, device) and (
        steps >= engines.LONG if run.compile is None else run.compile
    )
    if name == "vmap":
        external.try_batching(model, pool.normalised(pool.images[:2]))
    engine = engines.make(name, *network, compiled)
    at_once = min(run.users_at_once or participants, participants)
    cores = threads if method.trains_users else 1
    if run.users_at_once is None:
        if name != "vmap":
            needed = engine.memory(train.batch_size)
        elif method.label is not None:  # and the place where models look at images before they train
            needed += 3 * layout.length * pool.wide.itemsize
        if engines.spread.possible(device, cores, participants):  # and the rows on their way to processes
            needed += 8 * layout.length * pool.wide.itemsize
        at_once = memory.share(participants, needed, device, kept)
    if device.type == "cuda":
        at_once = min(at_once, engines.MOST)
    engine = engines.on_all_cores(engine, device, cores, at_once)
    if spread_out:
        name, engine = "dist", engines.dist.Dist(engine, device)
    run = replace(
        run, device=str(device), threads=threads, engine=name, compile=compiled, users_at_once=at_once
    )
    return engine, run

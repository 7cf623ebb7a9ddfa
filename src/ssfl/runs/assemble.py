"""From a config to a simulation: load, choose what was left open, split, build.

Every mistake in the input shows here, before anything is written.
"""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from ssfl.config.checks import check
from ssfl.config.settings import Config, ModelSettings, RunSettings, SplitSettings
from ssfl.core import outside
from ssfl.core.rows import Layout, layout_of
from ssfl.data import arrays, sources, split
from ssfl.data.arrays import Data
from ssfl.data.dataset import Dataset
from ssfl.data.hands import Hands, Index
from ssfl.engines import choice, memory
from ssfl.engines.features import Features, is_divided, tail_of
from ssfl.engines.work import Optimizer, Pool
from ssfl.errors import ConfigError
from ssfl.models import backbones, external, networks
from ssfl.models.kernels import convolution
from ssfl.runs import doubts
from ssfl.simulate.plan import Owners, Plan
from ssfl.simulate.privacy import library
from ssfl.simulate.simulation import Simulation, plain_network_of

CORES = torch.get_num_threads()
"""What torch would use: all of the machine's cores, or what the environment says."""
VIEWS = 4
"""How many weak and how many strong views of an image are kept if a network has a frozen trunk."""


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


def load_data(config: Config, given: Data | None = None) -> Dataset:
    """The images that were given, or that [data] names."""
    data = config.data
    if given is None and outside.is_path(data.name):
        given = _from_outside(data.name or "")
    if given is not None:
        return given.resized(data.size)
    if data.name == outside.IN_MEMORY:
        raise ConfigError(
            "data.name = 'in memory': these images were passed from Python: pass them again, as data=..."
        )
    return sources.load(
        data.name, data.path, root=Path(data.root), download=data.download, size=data.size,
        test_fraction=0.0 if config.run.folds else data.test_fraction, broken=data.broken,
    )  # fmt: skip


def _from_outside(name: str) -> Data:
    """The data that a function outside the package returns."""
    made = outside.called(name, "data.name")
    if not isinstance(made, Data):
        raise ConfigError(f"data.name = {name!r} returned a {type(made).__name__}: return an ssfl.Data")
    return made


def taking(config: Config, data: Data | str | None) -> Config:
    """The config of data that are passed from Python, or named there by their import path."""
    if data is None:
        return config
    if isinstance(data, str):
        outside.trust(data)
    name = data if isinstance(data, str) else outside.IN_MEMORY
    return replace(config, data=replace(config.data, name=name, path=None))


def rounds(config: Config) -> float:
    """How many rounds there will be, before rounding where they were given in epochs."""
    federation = config.federation
    if federation.rounds is not None:
        return federation.rounds
    steps = (federation.epochs or 0) * federation.epoch_images / config.train.batch_size
    return steps / federation.period


def resolve(config: Config, dataset: Dataset) -> Config:
    """The config with every choice made that depends on the data."""
    config = _with_owners(config, dataset)
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
    given = dataset.server is not None or (dataset.users is not None and labels is None)
    if given and wanted.labels_at != "users":
        labels = len(_server_images(config, dataset))
    elif labels is None:
        smallest = int(counts.min() * (1 - config.data.validation))
        labels = len(counts) * min(100, max(smallest // 2, 1))
        if bool((dataset.labels < 0).any()):  # the others are the users'
            _, kept = set_aside(config, dataset)
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
        model=_chosen_model(config, dataset, gpu),
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
            baseline=_compared(config, labels),
        ),
    )


def _compared(config: Config, server_labels: int) -> bool:
    """Whether a run also trains a server-only model: where users and server train, by itself on one's own
    images."""
    own = config.data.path is not None or outside.is_outside(config.data.name)
    wanted = own and config.run.engine != "dist" if config.run.baseline is None else config.run.baseline
    return wanted and config.method.trains_users and server_labels > 0


def _chosen_model(config: Config, dataset: Dataset, gpu: bool) -> ModelSettings:
    """[model] with every choice made."""
    model = config.model
    name, views = model.name or networks.suited(dataset.shape, gpu), model.cached_views
    if views is None:
        views = VIEWS if name in backbones.NAMES and model.train != "all" else 0
    weights = None if model.weights is None else _absolute(model.weights)
    return replace(model, name=name, cached_views=views, weights=weights)


def _with_owners(config: Config, dataset: Dataset) -> Config:
    """The config of users that the data name: [split] deals them nothing."""
    if dataset.users is None:
        return config
    owners, said = len(dataset.users), config.split.users
    if config.split.scheme == "given" or (config.data.path is not None and said != SplitSettings.users):
        require_users(said, owners, config.data.path is not None)  # a run that goes on, or a person's number
    kept = {
        key: getattr(config.split, key) for key in ("server_labels", "labels_at", "user_labels", "shared")
    }
    config = replace(config, split=SplitSettings("given", owners, seed=config.split.seed, **kept))
    check(config)
    return config


def require_users(said: int, owners: int, folder: bool) -> None:
    """Raises if somebody asks for another number of users than the data name."""
    if said != owners:
        where = "unlabelled/ has a sub-folder for each of" if folder else "the data name"
        raise ConfigError(
            f"split.users = {said}, but {where} {owners} users: set split.users={owners}, or leave it out",
            key="split.users",
            value=said,
            fix=f"split.users={owners}",
        )


def set_aside(config: Config, dataset: Dataset) -> tuple[Index, Index]:
    """The images for validation, and the others."""
    if dataset.validation is None:
        return split.hold_out(dataset.labels.numpy(), config.data.validation, config.split.seed)
    return dataset.validation, np.setdiff1d(np.arange(len(dataset.labels)), dataset.validation)


def _server_images(config: Config, dataset: Dataset) -> Index:
    """The labelled images of the server: those given, or all that belong to no user."""
    _, kept = set_aside(config, dataset)
    if config.split.labels_at == "users":
        return kept[:0]
    if dataset.server is not None:
        return np.intersect1d(kept, dataset.server)
    free = kept if dataset.users is None else np.setdiff1d(kept, dataset.users.flat)
    return free[dataset.labels.numpy()[free] >= 0]


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
    held, kept = set_aside(config, dataset)
    if dataset.users is not None:
        parts = _given_parts(config, dataset, kept)
    else:
        parts = _dealt_parts(config, dataset, kept)
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


def _given_parts(config: Config, dataset: Dataset, kept: Index) -> split.Parts:
    """The users that the data name, without validation images, and a server of the images that are left."""
    labels, wanted = dataset.labels.numpy(), config.split
    left = np.zeros(len(labels), bool)
    left[kept] = True
    assert dataset.users is not None
    server = _server_images(config, dataset)
    if dataset.server is None and len(server) != (wanted.server_labels or 0):
        server = server[split.iid(labels[server], 1, wanted.server_labels or 0, wanted.seed).server]
    return split.Parts(server, dataset.users.where(left))


def _dealt_parts(config: Config, dataset: Dataset, kept: Index) -> split.Parts:
    """The images dealt as [split] says; those that the data give to the server are its own."""
    labels, wanted, count = dataset.labels.numpy(), config.split, config.split.server_labels or 0
    if dataset.server is not None:
        kept, count = np.setdiff1d(kept, dataset.server), 0
    usable = kept[labels[kept] >= 0]
    given = (labels[usable], wanted.users)
    more = (count, wanted.seed)
    if len(usable) < len(kept) and count == len(usable):  # however uneven the classes are
        parts = split.Parts(np.arange(len(usable)), [np.zeros(0, np.int64)] * wanted.users)
    elif wanted.scheme == "skew":
        parts = split.skewed(*given, wanted.skew, *more)
    elif wanted.scheme == "iid":
        parts = split.iid(*given, *more)
    elif wanted.scheme == "dirichlet":
        parts = split.dirichlet(*given, wanted.alpha, *more, capped=wanted.capped)
    elif wanted.scheme == "shards":
        parts = split.shards(*given, wanted.classes_per_user, *more)
    elif wanted.scheme == "mixture":
        parts = split.mixture(*given, wanted.mixtures, *more)
    else:
        raise ConfigError(
            "split.scheme = 'given' needs data that say who owns which image: pass ssfl.Data(users=...), "
            "or make a sub-folder of unlabelled/ for each user"
        )
    parts = split.Parts(usable[parts.server], Hands.of(parts.users).renamed(usable))
    if len(usable) < len(kept):
        parts = split.deal_unlabelled(parts, kept[labels[kept] < 0], wanted.seed)
    return parts if dataset.server is None else replace(parts, server=_server_images(config, dataset))


def make(
    config: Config, model: external.Factory | str | None = None, data: Data | str | None = None
) -> Simulation:
    """A simulation that is ready to play. `model` makes its network and `data` are its images; both may be
    import paths."""
    config = taking(config, data)
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
        device = choice.dist.local_device(device)
    given, dataset = config, load_data(config, data if isinstance(data, Data) else None)
    config = resolve(config, dataset)
    parts, held = make_parts(config, dataset)
    if config.run.engine != "dist" or choice.dist.rank() == 0:
        doubts.warn(given, config, dataset, parts, held)
    return build(config, dataset, parts, held, device, None if isinstance(model, str) else model)


def scaled_for(config: Config, dataset: Dataset) -> Dataset:
    """The data set with the normalisation that a pretrained network learned its weights with."""
    if config.model.name not in backbones.NAMES:
        return dataset
    channels = dataset.shape[0]
    return replace(dataset, mean=(backbones.MEAN,) * channels, std=(backbones.STD,) * channels)


def brought(config: Config, network: nn.Module) -> dict[str, dict[str, Any]]:
    """How a network and a method from outside are known again: the path, the digest of its text (None in
    memory) and, of a network, the fingerprint of its frozen weights; nothing for those of the package."""
    known: dict[str, dict[str, Any]] = {}
    for section, name in (("model", config.model.name), ("method", config.method.name)):
        if name is not None and outside.is_outside(name):
            digest = outside.digest(name) if outside.is_path(name) else None
            known[section] = {"name": name, "digest": digest, "seed": config.run.seed}
    if config.model.name in backbones.NAMES:
        known["model"] = {"name": config.model.name, "seed": config.run.seed}
    if "model" in known:
        known["model"]["frozen"] = external.fingerprint(network)
    return known


def build(
    config: Config,
    dataset: Dataset,
    parts: split.Parts,
    held: Index,
    device: torch.device,
    make: external.Factory | None = None,
) -> Simulation:
    """A simulation of given owners of given images; the config is resolved."""
    dataset = scaled_for(config, dataset)
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
        bool(config.data.flip), getattr(torch, precision), dataset.weak, dataset.strong,
    )  # fmt: skip
    if outside.is_path(config.method.name):
        outside.require(config.method.name, "method.name")
    arrays.check_views(dataset, pool.images[: arrays.PROBED])
    whole = plain_network_of(config, dataset, make)
    known = brought(config, whole)
    if config.model.cached_views:
        whole, features = _with_features(config, dataset, whole, parts, device)
        pool = replace(pool, features=features)
    model = config.method.network(whole).to(device, pool.wide)
    external.check_precision(model, pool.normalised(pool.images[:2]))
    layout = layout_of(model)
    train = config.train
    kept, policy, users = 0, train.momentum_policy, config.split.users
    if policy in ("slot", "user"):
        rows = users if policy == "user" else config.federation.participants or 1
        key, fix = "train.momentum_policy", "train.momentum_policy=reset"
        kept = memory.check_kept(key, policy, f"{policy}s", rows, layout.weights, pool.wide, device, fix)
    if config.method.start == "user" or "models" in config.method.needs():
        every = config.method.start == "user" or config.method.keeps_models
        rows = users if every else config.federation.participants or 1
        kept += memory.check_kept(
            "method.name", config.method.name, "users", rows, layout.length, pool.wide, device,
            "a smaller split.users or another method.name",
        )  # fmt: skip
    engine, run = _make_engine(config, model, layout, pool, device, kept)
    config = replace(config, run=run, train=replace(train, precision=precision))
    marked = Hands.of(parts.labelled or [])
    labelled = Owners.of(marked, device) if len(marked.flat) else None
    server, judges = parts.server, None
    if train.server_held_out and len(server):
        held_out, kept_in = split.hold_out(
            dataset.labels.numpy()[server], train.server_held_out, config.split.seed
        )
        if not len(held_out) or not len(kept_in):
            raise ConfigError(
                f"train.server_held_out = {train.server_held_out} of {len(server)} labelled images leaves "
                "none to train on or none to judge by: change it, or set it to 0",
                key="train.server_held_out",
                value=train.server_held_out,
                fix="train.server_held_out=0",
            )
        server, judges = server[kept_in], torch.from_numpy(server[held_out]).to(device)
    plan = Plan(
        config, Owners.of(parts.users, device), labelled, Owners.of([server], device),
        engine.positions, device, judges,
    )  # fmt: skip
    return Simulation(dataset, parts, held, pool, model, layout, engine, plan, device, make, known)


def _with_features(
    config: Config, dataset: Dataset, whole: nn.Module, parts: split.Parts, device: torch.device
) -> tuple[nn.Module, Features]:
    """The part of a network that learns, and what the frozen part makes of the images that are trained on."""
    module, count = external.plain(whole), config.model.cached_views or 0
    if not is_divided(module):
        raise ConfigError(
            f"model.cached_views = {count} needs a network with a frozen trunk and a tail, and "
            f"{config.model.name} has none: set model.cached_views=0",
            key="model.cached_views",
            value=count,
            fix="model.cached_views=0",
        )
    features = Features.of(
        module.to(device), count, dataset.mean, dataset.std, bool(config.data.flip), dataset.weak,
        dataset.strong, config.run.threads or CORES,
    )  # fmt: skip
    owners = [torch.from_numpy(parts.server)]
    if config.method.trains_users:
        owners.append(torch.from_numpy(Hands.of(parts.users).flat))
    strong = "strong" in config.method.uses() or config.train.server_views == "both"
    features.prepare(dataset.images.to(device), torch.cat(owners), strong)
    return external.External(tail_of(module)).train(), features


def _make_engine(
    config: Config, model: nn.Module, layout: Layout, pool: Pool, device: torch.device, kept: int
) -> tuple[choice.Engine, RunSettings]:
    """The engine, and [run] with every choice made that depends on the machine; the state keeps
    some of its memory."""
    train, run, method = config.train, config.run, config.method
    spread_out = run.engine == "dist"
    participants = -(-(config.federation.participants or 1) // (choice.dist.ranks() if spread_out else 1))
    steps = (config.federation.rounds or 1) * config.federation.period
    optimizer = Optimizer(train.momentum, train.nesterov, train.weight_decay, train.clip)
    network = (model, layout, pool, optimizer, method)
    needed = choice.make("vmap", *network, False).memory(train.batch_size)
    threads = choice.dist.local_cores(CORES) if spread_out else run.threads or CORES
    torch.set_num_threads(choice.threads(needed, threads))
    name = choice.choose(device, needed) if run.engine in ("auto", "dist") else run.engine
    compiled = choice.can_compile(name, device) and (
        steps >= choice.LONG if run.compile is None else run.compile
    )
    if name == "vmap":
        external.try_batching(model, pool.normalised(pool.images[:2]))
    engine = choice.make(name, *network, compiled)
    at_once = min(run.users_at_once or participants, participants)
    cores = threads if method.trains_users else 1
    if run.users_at_once is None:
        if name != "vmap":
            needed = engine.memory(train.batch_size)
        elif method.label is not None:  # and the place where models look at images before they train
            needed += 3 * layout.length * pool.wide.itemsize
        if choice.spread.possible(device, cores, participants):  # and the rows on their way to processes
            needed += 8 * layout.length * pool.wide.itemsize
        at_once = memory.share(participants, needed, device, kept)
    if device.type == "cuda":
        at_once = min(at_once, choice.MOST)
    engine = choice.on_all_cores(engine, device, cores, at_once)
    if spread_out:
        name, engine = "dist", choice.dist.Dist(engine, device)
    run = replace(
        run, device=str(device), threads=threads, engine=name, compile=compiled, users_at_once=at_once
    )
    return engine, run

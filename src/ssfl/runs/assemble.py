"""Makes a simulation, ready to train, from a config. `resolve.py` does the part about the data.

Some mistakes in a config can only be noticed with the data or on the machine that trains. They are all found
here, before anything is written.
"""

from dataclasses import replace
from typing import Any

import torch
from torch import nn

from ssfl.config.checks import check
from ssfl.config.settings import Config, RunSettings
from ssfl.core import outside
from ssfl.core.rows import Layout, layout_of
from ssfl.data import arrays, folds, split
from ssfl.data.arrays import Data
from ssfl.data.dataset import Dataset
from ssfl.data.hands import Hands, Index
from ssfl.engines import choice, memory
from ssfl.engines.features import Features, artificial_images, is_divided, tail_of
from ssfl.engines.work import Optimizer, Pool
from ssfl.errors import ConfigError, one_line, warn_user
from ssfl.models import backbones, external
from ssfl.models.building import plain_network_of
from ssfl.models.kernels import convolution, launching
from ssfl.models.trials import is_whole
from ssfl.runs import doubts
from ssfl.runs.resolve import load_data, make_parts, resolve, with_data
from ssfl.simulate.plan import Owners, Plan
from ssfl.simulate.simulation import Simulation

CORES = torch.get_num_threads()
"""How many threads torch uses by default: one for each CPU core, unless an environment variable such as
OMP_NUM_THREADS says otherwise."""


def choose_device(name: str) -> torch.device:
    """Returns the device with this name; "auto" is the GPU if there is one, otherwise the CPU. Raises if the
    device does not exist on this machine."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
        if device.type in ("cpu", "cuda"):
            torch.zeros(1, device=device)
            return device
        reason = "ssfl trains only on CPUs and CUDA GPUs"
    except (RuntimeError, AssertionError) as error:
        reason = one_line(error, 160)
    raise ConfigError(
        f"run.device = {name!r} cannot be used ({reason}): use cpu, cuda, cuda:N or auto; `ssfl doctor` "
        "lists the devices of this machine",
        key="run.device",
        value=name,
        fix="run.device=auto",
    )


def _has_bfloat16(device: torch.device) -> bool:
    """Returns whether the device computes fast in bfloat16. GPUs of NVIDIA do since 2020 (compute capability
    8.0)."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (8, 0)


def make(
    config: Config, model: external.Factory | str | None = None, data: Data | str | None = None
) -> Simulation:
    """Returns the simulation of a config, ready to run: loads the data, fills in open settings, splits the
    images and builds the network.

    If `model` or `data` is given, it replaces the network or the data that the config names. `model` is a
    function that makes the network, and `data` the data as a Python object. Each may also be an import path.
    """
    config = with_data(config, data)
    if model is not None:
        if isinstance(model, str):
            outside.trust(model)
        name = model if isinstance(model, str) else outside.IN_MEMORY
        config = replace(config, model=replace(config.model, name=name))
    check(config)
    if config.run.engine == "sites":
        raise ConfigError(
            "run.engine = 'sites' means a federation on several machines: start one with `ssfl serve --data "
            "FOLDER --keys KEYS`, or continue one with `ssfl serve --resume RUN --keys KEYS`",
            key="run.engine",
            value="sites",
        )
    device = choose_device(config.run.device)
    if config.run.engine == "dist":
        device = choice.dist.local_device(device)
    if device.type == "cuda":
        launching.prepare()
    as_written, dataset = config, load_data(config, data if isinstance(data, Data) else None)
    config = resolve(config, dataset)
    parts, validation = make_parts(config, dataset)
    if config.run.engine != "dist" or choice.dist.rank() == 0:
        doubts.warn(as_written, config, dataset, parts, validation)
    return build(config, dataset, parts, validation, device, None if isinstance(model, str) else model)


def scaled_for(config: Config, dataset: Dataset) -> Dataset:
    """Returns the data set, changed so that its images are normalised as a pretrained network expects. The
    mean and standard deviation are then those of the images on which the network was pretrained. For networks
    that are not pretrained, the data set is returned unchanged."""
    if config.model.name not in backbones.NAMES:
        return dataset
    channels = dataset.shape[0]
    return replace(dataset, mean=(backbones.MEAN,) * channels, std=(backbones.STD,) * channels)


def brought(config: Config, network: nn.Module) -> dict[str, dict[str, Any]]:
    """Returns what identifies the network and the method, if they come from outside the package. This is
    saved, so that a resumed run notices whether they have changed.

    The keys are "model" and "method". Each value has the import path ("name"), a hash of the imported file
    ("digest") and the seed. The digest is None for a Python object. The value for a network also has a
    fingerprint of its frozen weights ("frozen").

    The package's own networks and methods have no entry, except that its pretrained networks have an entry
    without "digest".
    """
    identities: dict[str, dict[str, Any]] = {}
    for section, name in (("model", config.model.name), ("method", config.method.name)):
        if name is not None and outside.is_outside(name):
            digest = outside.digest(name) if outside.is_path(name) else None
            identities[section] = {"name": name, "digest": digest, "seed": config.run.seed}
    if config.model.name in backbones.NAMES:
        identities["model"] = {"name": config.model.name, "seed": config.run.seed}
    if "model" in identities:
        identities["model"]["frozen"] = external.fingerprint(network)
    return identities


def build(
    config: Config,
    dataset: Dataset,
    parts: split.Parts,
    validation: Index,
    device: torch.device,
    make: external.Factory | None = None,
    features: Features | None = None,
) -> Simulation:
    """Returns the simulation of a config in which open settings that depend on the data are filled in.
    `parts` says which images the server and the users own, and `validation` which images are for validation.

    `make` is a function that makes the network, if one was passed from Python. `features` are outputs of the
    network's frozen part from another simulation with the same network; they are used again to save time.
    """
    dataset = scaled_for(config, dataset)
    if config.run.test != "every" and not len(validation):
        raise ConfigError(
            f"run.test = {config.run.test!r} needs validation images, but there are too few labelled images "
            f"for data.validation = {config.data.validation} to set any aside: raise data.validation",
            key="data.validation",
            value=config.data.validation,
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
        test_views=config.data.test_views,
    )  # fmt: skip
    if outside.is_path(config.method.name):
        outside.require(config.method.name, "method.name")
    arrays.check_views(dataset, pool.images[: arrays.PROBED])
    whole = plain_network_of(config, dataset, make)
    identities = brought(config, whole)
    if config.model.cached_views:
        whole, features = _with_features(config, dataset, whole, parts, device, features)
        if len(dataset.test_images):
            features.remember(dataset.test_images)
        pool = replace(pool, features=features)
    model = config.method.network(whole).to(device, pool.wide)
    external.check_precision(model, pool.normalised(pool.images[:2]))
    layout = layout_of(model)
    train = config.train
    state_bytes, policy, users = 0, train.momentum_policy, config.split.users
    if policy in ("slot", "user"):
        rows = users if policy == "user" else config.federation.participants or 1
        key, fix = "train.momentum_policy", "train.momentum_policy=reset"
        whose = "users" if policy == "user" else "participants"
        state_bytes = memory.check_kept(key, policy, whose, rows, layout.weights, pool.wide, device, fix)
    if config.method.start == "user" or "models" in config.method.needs():
        every = config.method.start == "user" or config.method.keeps_models
        rows = users if every else config.federation.participants or 1
        state_bytes += memory.check_kept(
            "method.name", config.method.name, "users", rows, layout.length, pool.wide, device,
            "a smaller split.users or another method.name",
        )  # fmt: skip
    engine, run = _make_engine(config, model, layout, pool, device, state_bytes)
    config = replace(config, run=run, train=replace(train, precision=precision))
    marked = Hands.of(parts.labelled or [])
    labelled = Owners.of(marked, device) if len(marked.flat) else None
    server, judges = parts.server, None
    if train.server_held_out and len(server):
        groups = None if dataset.groups is None else dataset.groups[server]
        held_out, kept_in = split.hold_out(
            dataset.labels.numpy()[server], train.server_held_out, config.split.seed, groups
        )
        wanted = round(train.server_held_out * len(server))
        if not len(held_out) or not len(kept_in):
            grouped = "" if groups is None else f", because {folds.GROUPS} are not divided"
            raise ConfigError(
                f"train.server_held_out = {train.server_held_out} of {len(server)} labelled images leaves "
                f"none to train on or none to evaluate on{grouped}: change it, or set it to 0",
                key="train.server_held_out",
                value=train.server_held_out,
                fix="train.server_held_out=0",
            )
        if groups is not None and abs(len(held_out) - wanted) > wanted / 3:
            warn_user(
                f"train.server_held_out = {train.server_held_out}: {len(held_out)} of {len(server)} labelled "
                f"images are held out instead of {wanted}, because {folds.GROUPS} are not divided"
            )
        server, judges = server[kept_in], torch.from_numpy(server[held_out]).to(device)
    plan = Plan(
        config, Owners.of(parts.users, device), labelled, Owners.of([server], device),
        engine.positions, device, judges,
    )  # fmt: skip
    return Simulation(dataset, parts, validation, pool, model, layout, engine, plan, device, make, identities)


def _with_features(
    config: Config, dataset: Dataset, whole: nn.Module, parts: split.Parts, device: torch.device,
    known: Features | None,
) -> tuple[nn.Module, Features]:  # fmt: skip
    """Divides a network into its frozen first part and its trained rest. Returns the trained rest, and the
    features: the outputs of the frozen part for the training images. The features in `known` are used again
    if they cover these images."""
    module, count = external.plain(whole), config.model.cached_views or 0
    if not is_divided(module):
        raise ConfigError(
            f"model.cached_views = {count} needs a network with a frozen part named trunk and a trained part "
            "named tail, and this network has no such parts: set model.cached_views=0",
            key="model.cached_views",
            value=count,
            fix="model.cached_views=0",
        )
    own = type(module).__module__.startswith("ssfl.")
    if not own and not is_whole(module, dataset.shape):
        raise ConfigError(
            f"model.cached_views = {count} needs a network whose forward(x) is tail(trunk(x)), and this "
            "network's returns something else: set model.cached_views=0",
            key="model.cached_views",
            value=count,
            fix="model.cached_views=0",
        )
    owners = [torch.from_numpy(parts.server)]
    if config.method.trains_users:
        owners.append(torch.from_numpy(Hands.of(parts.users).flat))
    strong = "strong" in config.method.uses() or config.train.server_views == "both"
    images, indices = dataset.images.to(device), torch.cat(owners)
    tail = external.External(tail_of(module)).train()
    if known is not None and known.count == count and known.serves(images, indices, strong):
        return tail, known
    features = Features.of(
        module.to(device), count, dataset.mean, dataset.std, bool(config.data.flip), dataset.weak,
        dataset.strong, config.run.threads or CORES, None if own else artificial_images(dataset.shape),
    )  # fmt: skip
    features.prepare(images, indices, strong)
    return tail, features


def _make_engine(
    config: Config, model: nn.Module, layout: Layout, pool: Pool, device: torch.device, state_bytes: int
) -> tuple[choice.Engine, RunSettings]:
    """Returns the engine that trains users, and the section [run] in which settings that depend on the
    machine (such as device and threads) are filled in. `state_bytes` is the memory that must stay free for
    the state between rounds."""
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
        elif method.label is not None:  # also memory for the models that make the pseudo-labels
            needed += 3 * layout.length * pool.wide.itemsize
        if choice.spread.possible(device, cores, participants):  # also memory for models sent to processes
            needed += 8 * layout.length * pool.wide.itemsize
        reserved = state_bytes
        if name == "vmap" and device.type == "cuda":  # the server may train at the same time
            reserved += needed * -(-train.batch_of("server") // train.batch_size)
        at_once = memory.share(participants, needed, device, reserved)
    if device.type == "cuda":
        at_once = min(at_once, choice.MOST)
    engine = choice.on_all_cores(engine, device, cores, at_once)
    if spread_out:
        name, engine = "dist", choice.dist.Dist(engine, device)
    run = replace(
        run, device=str(device), threads=threads, engine=name, compile=compiled, users_at_once=at_once
    )
    return engine, run

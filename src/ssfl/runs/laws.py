"""The tests of `ssfl check`: rules that a method and a network must follow, because all engines rely on them.

Each rule is tested on the data set of digits, or on the data that a person chooses, in float64, with a few
users and rounds. If a rule is broken, the output names the likely cause.
"""

import tempfile
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, closing, nullcontext
from dataclasses import fields, replace
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ssfl import methods
from ssfl.config.loading import as_texts, load_config
from ssfl.config.settings import Config
from ssfl.core import generators
from ssfl.core.outside import IN_MEMORY
from ssfl.engines.work import TrainedRows, Work, make_batch
from ssfl.errors import ConfigError, MethodError, SsflError, SsflWarning, with_class
from ssfl.federation import Method, State
from ssfl.models.external import Factory
from ssfl.runs import assemble, checkpoints
from ssfl.runs.checkpoints import Checkpoint
from ssfl.runs.surroundings import reproducible
from ssfl.simulate.simulation import Simulation

CLOSE = 1e-6
"""The largest relative difference that is allowed between the models that two engines train, after five
rounds in float64."""
SETTINGS = (
    "split.users=6", "split.server_labels=50", "federation.participants=4", "federation.rounds=5",
    "federation.period=3", "train.batch_size=16", "train.precision=float64", "train.momentum_policy=reset",
    "run.threads=1", "run.device=cpu", "run.compile=false", "run.engine=loop",
)  # fmt: skip
FEWEST = 3
"""The smallest number of rounds of the check, whatever the person's settings are. A run is interrupted after
two rounds, and must then go on."""
MASKED = (0.2, 0.95)
"""The range of mask rates (shares of images that get a pseudo-label) that is good for comparing engines. At a
mask rate of 0, for example, nothing is trained, so all engines agree even if the method is wrong."""
THRESHOLDS = (0.12, 0.15, 0.2, 0.3, 0.5)
"""Confidence thresholds that are tried, one after another, until the mask rate is within `MASKED`. They are
for methods that have a threshold."""

REPEATED = "a run can be repeated"
"""The name of the rule that all random numbers come from the seed."""
OTHER_IMAGES = (
    "The check trains on images with 1 x 8 x 8 pixels and 10 classes, unless a setting says otherwise: use "
    "--set data.size=32 for another size, --set data.path=FILE.npz or --set data.name=FILE.py:load for others"
)
"""What to do if a network does not fit the images of the check."""


class Law(NamedTuple):
    """The outcome of testing one rule: its name, whether it holds, and details."""

    name: str
    holds: bool
    detail: str
    """What was measured and, if the rule is broken, the likely cause."""


def check(
    method: Method | str = methods.DEFAULT,
    model: Factory | str | None = None,
    overrides: Iterable[str] | Mapping[str, Any] = (),
) -> list[Law]:
    """Tests every rule and returns the outcomes. `method` is a method's name, import path or object. `model`
    is a function that makes the network, or its import path; None takes the network of the preset
    `quickstart`.

    `overrides` are settings, as a dict such as {"method.tau": 0.5} or as texts such as "method.tau=0.5". The
    images are the digits, grey and with 8 x 8 pixels. "data.size=32" resizes them, and
    "data.name=FILE.py:load" or "data.path=FILE.npz" takes other images.
    """
    overrides = as_texts(overrides)
    fixed = any(override.startswith("method.threshold=") for override in overrides)
    if isinstance(method, str):
        config = load_config("quickstart", [*SETTINGS, *overrides, f"method.name={method}"])
    else:
        for override in overrides:
            if override.startswith("method."):
                raise ConfigError(
                    f"{override} has no effect, because the method is an object: set the field when you make "
                    f"the object, such as {type(method).__name__}({override.removeprefix('method.')})",
                    key="overrides",
                    value=override,
                )
        config = load_config("quickstart", [*SETTINGS, *overrides], method)
    rounds = config.federation.rounds
    if rounds is not None:
        rounds = max(FEWEST, rounds)
        config = replace(config, federation=replace(config.federation, rounds=rounds))
    with reproducible(), warnings.catch_warnings():
        warnings.simplefilter("ignore", SsflWarning)
        try:
            config, mask = _with_some_labels(config, model, fixed)
        except ConfigError as error:
            if model is None or error.key != "model.name":
                raise
            raise ConfigError(f"{error}. {OTHER_IMAGES}", key=error.key, value=error.value) from error
        return list(_laws(config, model, mask))


def _laws(config: Config, model: Factory | str | None, mask: float | None) -> Iterator[Law]:
    """Tests the rules one after another and yields each outcome. `mask` is the mask rate that was measured;
    None if the method does not train users."""

    def law(name: str, why: str, *others: Callable[[], tuple[float, float]]) -> Law:
        try:
            worst = max(apart / (1 + size) for apart, size in (other() for other in others))
        except (SsflError, RuntimeError, TypeError, ValueError, KeyError, AttributeError) as error:
            return Law(name, False, with_class(error))
        measured = f"largest relative difference {worst:.1e}"
        return Law(name, worst <= CLOSE, measured if worst <= CLOSE else f"{measured}: {why}")

    rated = "users do not train" if mask is None else f"mask rate {mask:.2f}"
    # without a threshold, a method may train on all images, as with true labels or a mean teacher
    all_images = "labels" in config.method.needs() or (mask == 1 and not _has_threshold(config.method))
    useful = mask is None or 0.02 <= mask <= 0.98 or all_images
    hint = (
        ""
        if useful
        else ", so almost all or almost no images are trained on, and the other tests prove nothing: choose "
        f"{_another_threshold(config.method, mask or 0.0)}"
    )
    yield Law("some images are trained on and some are not", useful, rated + hint)
    before = generators.random_states()
    loop = _played(config, model)
    used = [kind for kind, now in generators.random_states().items() if now != before[kind]]
    instead = "make all draws from look.keys or fed.key(purpose)"
    if used:
        watch = generators.FindDraws()
        _played(config, model, around=watch)
        source = " and ".join(used) + f" ({watch.function})" * bool(watch.function)
        yield Law(REPEATED, False, f"the method draws random numbers from {source}: {instead}")
    else:
        yield law(
            REPEATED,
            f"two runs with the same seed differ, so the method draws random numbers of its own: {instead}",
            lambda: _apart(loop, _played(config, model)),
        )
    vmap = replace(config, run=replace(config.run, engine="vmap"))

    @cache
    def all_at_once() -> State:
        return _played(vmap, model)

    yield law(
        "loop equals vmap",
        "the loss of a user uses values of other users: do not combine values along the first dimension, "
        "which is users",
        lambda: _apart(loop, all_at_once()),
    )
    one_at_a_time = replace(vmap, run=replace(vmap.run, users_at_once=1))
    yield law(
        "one user at a time equals all at once",
        "a user's update depends on which other users train at the same time: use only the values of that "
        "user",
        lambda: _apart(all_at_once(), _played(one_at_a_time, model)),
    )
    yield law(
        "a resumed run equals an uninterrupted one",
        "the method keeps a value outside of State.memory, which a checkpoint does not save: move it there",
        lambda: _apart(loop, _resumed(config, model)),
    )
    yield law(
        "a recorded step can be replayed in another round",
        "the step uses a Python number from the first round: use the tensors of `step` instead",
        lambda: _replayed(vmap, model),
    )
    if torch.cuda.is_available():
        cuda = replace(config, run=replace(config.run, device="cuda", engine="vmap"))
        yield law(
            "a GPU equals a CPU",
            "the method or the network gives other results on a GPU: make new tensors on the device of the "
            "tensors that it gets, and draw no random numbers of your own",
            lambda: _apart(loop, _played(cuda, model)),
        )


def _another_threshold(method: Method, rate: float) -> str:
    """Returns in words which threshold to choose, if a method's mask rate `rate` is too small or too large.
    Its first field with a number from 0 to 1 is probably the threshold."""
    numbers = [one.name for one in fields(method) if isinstance(getattr(method, one.name), float)]
    likely = [name for name in numbers if 0 < getattr(method, name) <= 1] or numbers
    if not likely:
        return "a smaller threshold" if rate < 0.5 else "a larger threshold"
    now = getattr(method, likely[0])
    better = min(0.2, now / 2) if rate < 0.5 else max(0.95, (1 + now) / 2)
    setting = f"{likely[0]}={better:.3g}"
    shown = f"{type(method).__name__}({setting})" if method.name == IN_MEMORY else f"--set method.{setting}"
    return f"another threshold, such as {shown}"


def _has_threshold(method: Method) -> bool:
    return any(candidate.name == "threshold" for candidate in fields(method))


def _with_some_labels(
    config: Config, model: Factory | str | None, fixed: bool
) -> tuple[Config, float | None]:
    """Returns the config with a threshold at which some images, but not all, get a pseudo-label. Also returns
    the mask rate, or None if users do not train. A method without a field `threshold` keeps its settings, and
    so does every method if the person has set the threshold (`fixed`)."""
    tried = [config]
    if _has_threshold(config.method) and not fixed:
        tried += [replace(config, method=replace(config.method, threshold=t)) for t in THRESHOLDS]  # type: ignore[call-arg]
    best, rate = config, None
    for candidate in tried:
        rates: list[float] = []
        _played(candidate, model, rates)
        if not rates:
            return config, None
        mean = sum(rates) / len(rates)
        if rate is None or abs(mean - 0.5) < abs(rate - 0.5):
            best, rate = candidate, mean
        if MASKED[0] <= mean <= MASKED[1]:
            break
    return best, rate


def _played(
    config: Config,
    model: Factory | str | None,
    rates: list[float] | None = None,
    around: AbstractContextManager[object] | None = None,
) -> State:
    """Trains with this config and returns the state after the last round. If `rates` is a list, the mask rate
    of each round is appended to it. Each round is played inside the context manager `around`, if there is
    one."""
    sim = assemble.make(config, model)
    with closing(sim.engine):
        state = sim.initial()
        for _ in range(sim.rounds):
            with around or nullcontext():
                state, events = sim.play(state)
            rate = events[0].get("mask_rate")
            if rates is not None and rate is not None:
                rates.append(rate)
    return state


def _resumed(config: Config, model: Factory | str | None) -> State:
    """Trains like `_played`, but interrupts the run after two rounds and continues from a checkpoint with a
    new simulation. Returns the state after the last round, which should equal the state that `_played`
    returns."""
    first = assemble.make(config, model)
    with closing(first.engine), tempfile.TemporaryDirectory() as folder:
        path = Path(folder)
        (path / "config.toml").write_text("")
        (path / "events.jsonl").write_text("")
        state = first.initial()
        for _ in range(2):
            state, _ = first.play(state)
        checkpoints.write(path, Checkpoint(state, {}, {}))
        saved = checkpoints.newest(path, torch.device("cpu"))
        assert saved is not None
    second = assemble.make(config, model)
    with closing(second.engine):
        state = saved.state
        if state.memory.keys() != second.initial().memory.keys():
            raise MethodError(
                "the tensors that round() stores in the memory have other names than those that initial() "
                "returns: use the same names"
            )
        while state.round < second.rounds:
            state, _ = second.play(state)
    return state


def _replayed(config: Config, model: Factory | str | None) -> tuple[float, float]:
    """Tests whether a training step that torch has recorded (traced with `make_fx`) can be replayed with
    other tensors. The users' first step is recorded in the first round with users, and replayed with the
    tensors of the next three rounds.

    Returns the largest absolute difference between a replayed gradient and the same gradient without
    recording, and the largest absolute number in the latter. Returns 0 and 1 if nothing was replayed, for
    example because the method does not train users.
    """
    sim = assemble.make(config, model)
    with closing(sim.engine):
        if not sim.method.trains_users:
            return 0.0, 1.0
        from torch.fx.experimental.proxy_tensor import make_fx

        train, state = sim.engine.train, sim.initial()
        start = state.streams[0]
        recorded: dict[int, Callable[..., Tensor]] = {}  # by the number of users, which are a dimension
        rounds: list[int] = []
        found = [(0.0, 1.0)]

        def noted(rows: Tensor, momentum: Tensor, work: Work) -> TrainedRows:
            """Records and compares before the users train, when their pseudo-labels are made and the server
            has sent what it sends."""
            if work.role == "user" and state.round not in rounds:
                step, arguments = _flat_step(sim, work, start, rows)
                rounds.append(state.round)
                if len(rows) in recorded:
                    again, direct = recorded[len(rows)](*arguments), step(*arguments)
                    found.append((float((again - direct).abs().max()), float(direct.abs().max())))
                else:
                    recorded[len(rows)] = make_fx(step)(*arguments)
            return train(rows, momentum, work)

        sim.engine.train = noted  # type: ignore[method-assign]
        while state.round < sim.rounds and len(rounds) < 4:
            state, _ = sim.play(state)
        return max(found)


def _flat_step(
    sim: Simulation, work: Work, start: Tensor, rows: Tensor
) -> tuple[Callable[..., Tensor], list[Tensor]]:
    """Returns a function that computes the gradient of the first training step of users with this work, and
    the arguments of that function: everything that differs between rounds. All arguments are plain tensors,
    because torch can only record functions of plain tensors.

    The gradient is taken at the model `start` [P + Q]. `rows` [n, P + Q] are the models that the n users
    received. A model is a row of P weights and Q running statistics.
    """
    from ssfl.engines.vmap import Vmap

    engine = sim.engine
    assert isinstance(engine, Vmap)
    place = engine._buffers(len(rows), rows, work)
    place.load(sim.layout, start.expand_as(rows), torch.zeros_like(rows[:, : sim.layout.weights]), work)
    received = sim.layout.unflatten(rows)
    changing = (
        make_batch(sim.pool, place.work, 0), place.rates, {name: received[name] for name in place.received},
    )  # fmt: skip
    tensors, layout = torch.utils._pytree.tree_flatten(changing)
    known = [tensor for tensor in tensors if isinstance(tensor, Tensor)]

    def step(*arguments: Tensor) -> Tensor:
        left = iter(arguments)
        whole = [next(left) if isinstance(tensor, Tensor) else tensor for tensor in tensors]
        batch, rates, received = torch.utils._pytree.tree_unflatten(whole, layout)
        one = engine._step_of(replace(place, rates=rates, received=received), batch)
        gradients, _ = sim.method.gradient(one, engine._losses["user"])
        return torch.cat([gradient.flatten() for gradient in gradients.values()])

    return step, known


def _apart(one: State, two: State) -> tuple[float, float]:
    """Returns two numbers. The first is the largest absolute difference between the tensors of two states.
    The second is the largest absolute number in the averaged model of `one`. The relative difference is first
    / (1 + second)."""
    pairs = [(one.average, two.average), (one.streams, two.streams)]
    pairs += [(one.memory[name], two.memory[name]) for name in one.memory]
    worst = max(float((a - b.to(a.device)).abs().max()) if a.numel() else 0.0 for a, b in pairs)
    return worst, float(one.average.abs().max())

"""The method in examples/own/, written with public names alone: engines agree, a contest plays it, and a run
that was stopped ends in the same bytes."""

import ast
import json
from collections.abc import Callable
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import ssfl as public
from conftest import Call
from documents import ROOT
from ssfl.config.loading import load_config
from ssfl.config.settings import Config
from ssfl.core import outside
from ssfl.errors import ConfigError, MethodError
from ssfl.federation import Fed, Look, Method, State, Step
from ssfl.methods import METHODS, find, parts, require
from ssfl.runs import assemble, folder

FILE = ROOT / "examples/own/adamatch.py"
NAME = f"{FILE}:AdaMatch"
SHORT = [
    "federation.rounds=6", "federation.period=2", "train.batch_size=16", "run.checkpoint_every=2",
    "run.threads=1", "run.device=cpu",
]  # fmt: skip


@pytest.fixture(autouse=True)
def nothing_typed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each test starts as a new process would."""
    monkeypatch.setattr(outside, "_trusted", set())


def sets(*more: str) -> list[str]:
    return [word for one in [*SHORT, *more] for word in ("--set", one)]


def relative(a: torch.Tensor, b: torch.Tensor) -> float:
    return float((a - b).norm() / b.norm())


def test_it_takes_from_ssfl_only_public_names() -> None:
    for node in ast.walk(ast.parse(FILE.read_text("utf-8"))):
        if isinstance(node, ast.ImportFrom):
            assert node.module is not None
            assert not node.module.startswith("ssfl")
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "ssfl":
            assert node.attr in public.__all__


def test_labels_by_hand() -> None:
    """Two users of two classes; nine tenths of the mean confidence, and none of the alignment."""
    outside.trust(NAME)
    method = find(NAME)(share=0.9, align=0.0)  # type: ignore[call-arg]
    answers = torch.tensor([[[0.9, 0.1], [0.7, 0.3]], [[0.6, 0.4], [0.5, 0.5]]], dtype=torch.float64)
    images = torch.arange(2).expand(2, 1, 2)
    look = Look(answers, images, torch.zeros(2, dtype=torch.int64), {}, False)
    labels = method.label(look)
    assert labels.tensors["labels"].tolist() == [[[0, 0]], [[0, 0]]]
    assert labels.tensors["mask"].tolist() == [[[1, 0]], [[1, 1]]]  # at least 0.72, at least 0.495
    aligned = replace(method, align=1.0).label(look)  # type: ignore[call-arg]
    # 0.7 / 0.8 against 0.3 / 0.2: the class that is predicted less often wins
    assert aligned.tensors["labels"].tolist() == [[[0, 1]], [[0, 1]]]


def test_engines_agree_in_float64(quick: Callable[..., Config]) -> None:
    config = quick(f"method.name={NAME}", "train.precision=float64", "federation.rounds=30")
    sims = [
        assemble.make(replace(config, run=replace(config.run, engine=engine))) for engine in ("loop", "vmap")
    ]
    states, masks = [sim.initial() for sim in sims], []
    for _ in range(5):
        events = []
        for i, sim in enumerate(sims):
            states[i], found = sim.play(states[i])
            events.append(found[0])
        assert events[0]["user_mask_rate"] == events[1]["user_mask_rate"]
        assert relative(states[1].average, states[0].average) < 1e-6
        masks.append(events[0]["mask_rate"])
    assert 0.2 < sum(masks) / 5 < 0.95


def test_a_contest_plays_it(ssfl: Call) -> None:
    methods = f"alternate,{NAME}"
    choose = ["--choose", "method.share=0.8", "--quiet"]
    code, out, err = ssfl("contest", "--methods", methods, "--seeds", "1", *sets(), *choose, "--out", "both")
    assert code == 0, err
    assert "alternate" in out
    assert "adamatch.py:AdaMatch" in out
    standings = json.loads(Path("both/contest.json").read_text("utf-8"))["standings"]
    played = {one["method"]: one for one in standings}
    assert played.keys() == {"alternate", NAME}
    assert list(played[NAME]["options"]) == ["method.share=0.8"]
    assert list(played["alternate"]["options"]) == []  # it has no such field


def test_a_stopped_run_ends_in_the_same_bytes(ssfl: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    own = sets(f"method.name={NAME}")
    assert ssfl("run", *own, "--out", "whole")[0] == 0
    federation = public.Federation(
        public.load_config("quickstart", [*SHORT, f"method.name={NAME}"]), out="stopped"
    )
    for done in federation:
        if done.round == 3:
            federation.stop()
    monkeypatch.setattr(outside, "_trusted", set())
    code, _, err = ssfl("resume", "stopped")
    assert code == 2
    assert "--with" in err
    assert "adamatch.py" in err
    code, _, err = ssfl("resume", "stopped", "--with", str(FILE))
    assert code == 0, err
    models = [Path(run, "model.safetensors").read_bytes() for run in ("whole", "stopped")]
    assert models[0] == models[1]
    assert folder.read_config(Path("stopped")).method.name == NAME


def test_a_changed_file_is_refused(ssfl: Call) -> None:
    mine = Path("adamatch.py")
    mine.write_text(FILE.read_text("utf-8"), "utf-8")
    federation = public.Federation(
        public.load_config("quickstart", [*SHORT, "method.name=adamatch.py:AdaMatch"]), out="run"
    )
    next(iter(federation))
    federation.stop()
    mine.write_text(mine.read_text("utf-8").replace("aligned.amax(-1) >= threshold", "aligned.amax(-1) > 0"))
    code, _, err = ssfl("resume", "run", "--with", "adamatch.py")
    assert code == 2
    assert "adamatch.py" in err


def test_the_example_for_contests_is_the_method_of_the_preset_pictures() -> None:
    name = f"{ROOT / 'examples/own/relative.py'}:Relative"
    outside.trust(name)
    mine, of_preset = find(name)(), load_config("pictures").method
    assert {field.name: getattr(mine, field.name) for field in fields(mine)} == {
        field.name: getattr(of_preset, field.name) for field in fields(of_preset)
    }


def returns(**functions: Any) -> Method:
    """A method with the paper's defaults but for these functions."""
    kind: Any = type("Mine", (Method,), functions)
    method: Method = dataclass(frozen=True)(kind)()
    return method


def with_changed(**changes: Callable[[torch.Tensor], Any]) -> Callable[..., Any]:
    """A user's loss whose parts are changed by these functions."""

    def user_loss(self: Method, step: Step) -> Any:
        good = parts.consistency(step, 0.2)
        return good._replace(**{name: change(getattr(good, name)) for name, change in changes.items()})

    return user_loss


def trained(state: State, fed: Fed) -> torch.Tensor:
    return fed.train_users(state.streams).means


def records(**metrics: Any) -> Callable[..., State]:
    def round(self: Method, state: State, fed: Fed) -> State:
        fed.record(**metrics)
        return state.next(trained(state, fed))

    return round


def with_labels(**changes: Callable[[public.Labels], Any]) -> dict[str, Any]:
    """A method with labels once a round, whose result of `label` is changed by these functions."""

    def label(self: Method, look: Look) -> Any:
        good = parts.labelled(look, parts.confident(look, 0.2))
        return good._replace(**{name: change(good) for name, change in changes.items()})

    return {
        "label": label,
        "user_loss": lambda self, step: parts.round_labels(step),
        "needs": lambda self: ("reports",),
    }


MISTAKES: dict[str, tuple[dict[str, Any], str]] = {
    "no loss": ({"user_loss": lambda self, step: None}, "Losses"),
    "a tensor as loss": ({"user_loss": lambda self, step: step.forward(step.weak).sum((1, 2))}, "Losses"),
    "no loss at the server": ({"server_loss": lambda self, step: None}, "Losses"),
    "a mask for each user": ({"user_loss": with_changed(mask=lambda mask: mask.mean(1))}, "mask"),
    "a mask of bools": ({"user_loss": with_changed(mask=lambda mask: mask > 0)}, "mask"),
    "no labels": ({"user_loss": with_changed(label=lambda label: None)}, "label"),
    "one loss for all users": ({"user_loss": with_changed(loss=lambda loss: loss.mean())}, "loss"),
    "no state": ({"round": lambda self, state, fed: None}, "round"),
    "the same state": ({"round": lambda self, state, fed: state}, "round"),
    "a row": ({"round": lambda self, state, fed: state.next(trained(state, fed)[0])}, "streams"),
    "all users": ({"round": lambda self, s, fed: s.next(fed.train_users(s.streams))}, "streams"),
    "a short average": ({"round": lambda self, s, fed: s.next(s.streams, s.average[1:])}, "average"),
    "two numbers": ({"round": records(mine=torch.tensor([1.0, 2.0]))}, "mine"),
    "a word": ({"round": records(mine="high")}, "mine"),
    "a metric that every round has": ({"round": records(loss=0.5)}, "loss"),
    "a metric that some rounds have": ({"round": records(refused=1)}, "refused"),
    "a loss without a gradient": ({"user_loss": with_changed(loss=lambda loss: loss.detach())}, "loss"),
    "a metric that is not declared": (
        {"user_loss": lambda self, step: parts.consistency(step, 0.2)._replace(metrics={"x": step.labels})},
        "x",
    ),
    "a number in the memory": ({"initial": lambda self, state, fed: {"level": 0.5}}, "memory"),
    "a number put into the memory": (
        {
            "initial": lambda self, state, fed: {"level": torch.zeros(1)},
            "round": lambda self, state, fed: state.next(trained(state, fed), level=0.5),
        },
        "memory",
    ),
    "a number as a name in the memory": (
        {"initial": lambda self, state, fed: {3: torch.zeros(1)}},
        "memory",
    ),
    "the name of the slow average": ({"initial": lambda self, s, fed: {"slow": s.average.clone()}}, "slow"),
    "the name of the gate's norms": ({"initial": lambda self, s, fed: {"usual": torch.zeros(8)}}, "usual"),
    "the name of the gate's trust": ({"initial": lambda self, s, fed: {"trust": torch.zeros(10)}}, "trust"),
    "another slow average": (
        {
            "defaults": {"federation": {"slow_average": 0.9}},
            "round": lambda self, state, fed: state.next(trained(state, fed), slow=state.average + 1),
        },
        "slow",
    ),
    "too few entries to send": (
        {
            "needs": lambda self: ("sends",),
            "round": lambda self, s, fed: s.next(
                fed.train_users(s.streams, send=lambda users: {"level": torch.zeros(1)}).means
            ),
        },
        "level",
    ),
    "images instead of labels": (
        {"label": lambda self, look: look.images, "user_loss": lambda self, step: parts.round_labels(step)},
        "Labels",
    ),
    "labels that are flat": (
        with_labels(tensors=lambda labels: {name: t.flatten(1) for name, t in labels.tensors.items()}),
        "tensors['labels']",
    ),
    "one weight for all": (with_labels(weight=lambda labels: torch.tensor(0.5)), "weight"),
    "a weight for each image": (with_labels(weight=lambda labels: labels.tensors["mask"].float()), "weight"),
    "a weight that is no number": (
        with_labels(weight=lambda labels: torch.full((len(labels.images),), torch.nan)),
        "weight",
    ),
    "a negative weight": (
        with_labels(weight=lambda labels: torch.linspace(-1, 1, len(labels.images))),
        "weight",
    ),
    "a factor as a float": (with_labels(lr_scale=lambda labels: 0.5), "lr_scale"),
    "a metric for each image": (
        with_labels(metrics=lambda labels: {"mask_rate": labels.tensors["mask"]}),
        "metrics['mask_rate']",
    ),
    "a metric of labels that every round has": (
        with_labels(metrics=lambda labels: {"lr": torch.ones(len(labels.images))}),
        "lr",
    ),
    "a list of tensors": (with_labels(tensors=lambda labels: [labels.tensors["mask"]]), "tensors"),
    "a list of reports": (with_labels(report=lambda labels: [labels.tensors["mask"]]), "report"),
    "positions": (
        with_labels(images=lambda labels: torch.arange(labels.images.numel()).view_as(labels.images)),
        "images",
    ),
    "negative numbers of images": (with_labels(images=lambda labels: labels.images - 5000), "images"),
    "images that do not exist": (with_labels(images=lambda labels: labels.images + 10**6), "images"),
    "images of another user": (with_labels(images=lambda labels: labels.images.roll(1, 0)), "images"),
    "images as floats": (with_labels(images=lambda labels: labels.images.float()), "images"),
    "partners that are positions": (
        with_labels(extra_images=lambda labels: {"partner": torch.full_like(labels.images, -1)}),
        "extra_images['partner']",
    ),
    "steps below zero": (
        with_labels(steps=lambda labels: torch.full((len(labels.images),), -1)),
        "steps",
    ),
    "a factor that is no number": (
        with_labels(lr_scale=lambda labels: torch.full((len(labels.images),), torch.nan)),
        "lr_scale",
    ),
    "nothing to send": (
        {
            "needs": lambda self: ("sends",),
            "round": lambda self, s, fed: s.next(fed.train_users(s.streams, send=lambda users: None).means),
        },
        "send",
    ),
    "one report for all": (with_labels(report=lambda labels: {"x": torch.tensor(1.0)}), "report['x']"),
}


@pytest.mark.parametrize("engine", ["loop", "vmap"])
@pytest.mark.parametrize("mistake", MISTAKES)
def test_what_a_method_returns_by_mistake_is_one_line(
    mistake: str, engine: str, quick: Callable[..., Config]
) -> None:
    functions, key = MISTAKES[mistake]
    config = replace(quick(f"run.engine={engine}"), method=returns(**functions))

    def played() -> None:
        sim = assemble.make(config)
        sim.play(sim.initial())

    with pytest.raises(MethodError) as caught:
        played()
    assert caught.value.key == key
    assert "\n" not in str(caught.value)


def test_a_recorded_tensor_with_one_number_is_that_number(quick: Callable[..., Config]) -> None:
    method = returns(round=records(mine=torch.tensor([1.5]), count=2))
    sim = assemble.make(replace(quick(), method=method))
    event = json.loads(json.dumps(sim.play(sim.initial())[1][0]))
    assert (event["mine"], event["count"]) == (1.5, 2)


def near(self: Method, step: Step) -> Any:
    """A loss with FedProx's term, computed from the received weights."""
    found = parts.consistency(step, 0.2)
    apart = [(step.weights[name] - sent).flatten(1).square().sum(1) for name, sent in step.received.items()]
    return found._replace(loss=found.loss.mean(1) + 0.1 * torch.stack(apart).sum(0))


def scaled(self: Method, step: Step) -> Any:
    """A loss that reads a tensor that the server sends."""
    found = parts.consistency(step, 0.2)
    return found._replace(loss=found.loss * step.tensors["level"][:, None])


READING: dict[str, dict[str, Any]] = {
    "received weights": {"user_loss": near, "uses": lambda self: ("weak", "strong", "received")},
    "sent tensors": {
        "user_loss": scaled,
        "needs": lambda self: ("sends",),
        "round": lambda self, s, fed: s.next(
            fed.train_users(s.streams, send=lambda users: {"level": torch.ones(len(users))}).means
        ),
    },
    "sent tensors for labels": {
        "label": lambda self, look: parts.labelled(look, look.probabilities.amax(-1) > look.tensors["level"]),
        "user_loss": lambda self, step: parts.round_labels(step),
        "needs": lambda self: ("sends",),
        "round": lambda self, s, fed: s.next(
            fed.train_users(s.streams, send=lambda users: {"level": torch.full((len(users), 1), 0.2)}).means
        ),
    },
}


@pytest.mark.parametrize("read", READING)
def test_a_loss_may_read_what_the_server_sent(read: str, quick: Callable[..., Config]) -> None:
    rows = []
    for engine in ("loop", "vmap"):
        config = quick(f"run.engine={engine}", "train.precision=float64")
        sim = assemble.make(replace(config, method=returns(**READING[read])))
        state = sim.initial()
        for _ in range(2):
            state, _ = sim.play(state)
        rows.append(state.average)
        assert not torch.equal(state.average, sim.initial().average)
    assert relative(rows[0], rows[1]) < 1e-9


def measured(config: Config, method: Method) -> dict[str, Any]:
    """The gradient diversity in the first round."""
    sim = assemble.make(replace(config, method=method))
    return sim.play(sim.initial())[1][1]["gradient_l2_squared"]  # type: ignore[no-any-return]


@pytest.mark.parametrize("read", READING)
def test_gradient_diversity_reads_what_the_server_sent(read: str, quick: Callable[..., Config]) -> None:
    settings = "train.precision=float64", "run.diversity_every=1", "run.users_at_once=3"
    one, two = (
        measured(quick(f"run.engine={engine}", *settings), returns(**READING[read]))
        for engine in ("loop", "vmap")
    )
    assert one == pytest.approx(two, rel=1e-6)
    assert one["definition"] > 0
    if read == "sent tensors":  # a factor of 1
        plain = returns(user_loss=lambda self, step: parts.consistency(step, 0.2))
        assert measured(quick("run.engine=loop", *settings), plain) == pytest.approx(one, rel=1e-6)


def test_gradient_diversity_is_refused_if_the_loss_needs_what_gradient_adds(
    quick: Callable[..., Config],
) -> None:
    def gradient(self: Method, step: Step, loss: Any) -> Any:
        return step.with_tensors(level=torch.ones(len(step.labels))).gradient(loss)

    method = returns(user_loss=scaled, gradient=gradient, needs=lambda self: ("sends",))
    with pytest.raises(ConfigError) as caught:
        measured(quick("run.diversity_every=1"), method)
    assert (caught.value.key, caught.value.fix) == ("run.diversity_every", "run.diversity_every=0")


def test_a_number_that_is_not_finite_becomes_null_and_one_number_may_be_memory(
    quick: Callable[..., Config], tmp_path: Path
) -> None:
    def round(self: Method, state: State, fed: Fed) -> State:
        fed.record(mine=float("nan"))
        return state.next(trained(state, fed), level=state.memory["level"] + 1)

    method = returns(round=round, initial=lambda self, state, fed: {"level": torch.tensor(0.0)})
    config = quick("run.checkpoint_every=1", "federation.rounds=3")
    for done in (federation := public.Federation(config, method=method, out=tmp_path / "run")):
        if done.round == 2:
            federation.stop()
    ended = public.resume(tmp_path / "run", method=method)
    events = [event for event in folder.read_events(tmp_path / "run") if event["event"] == "round"]
    assert [event["mine"] for event in events] == [None] * 3
    assert 0 < ended.accuracy <= 1


@dataclass(frozen=True)
class Last(Method):
    """Keeps the model of the last round in its memory, in the same tensor as the state does."""

    def initial(self, state: State, fed: Fed) -> dict[str, torch.Tensor]:
        return {"last": state.average, "first": state.streams[0]}

    def round(self, state: State, fed: Fed) -> State:
        means = fed.train_users(state.streams).means
        return state.next(means, means[0], last=means[0], first=state.memory["first"] + state.memory["last"])


def test_memory_may_be_a_tensor_of_the_state(quick: Callable[..., Config], tmp_path: Path) -> None:
    config = quick("run.checkpoint_every=1", "federation.slow_average=0")
    whole = public.run(config, tmp_path / "whole", method=Last())
    for done in (federation := public.Federation(config, method=Last(), out=tmp_path / "run")):
        if done.round == 2:
            federation.stop()
    public.resume(tmp_path / "run", method=Last())
    models = [(tmp_path / name / "model.safetensors").read_bytes() for name in ("whole", "run")]
    assert models[0] == models[1]
    assert whole.accuracy is not None


def test_a_purpose_of_ones_own_has_its_own_random_numbers(quick: Callable[..., Config]) -> None:
    drawn: list[float] = []

    def round(self: Method, state: State, fed: Fed) -> State:
        for purpose in ("mine", "other", "mine"):
            numbers = public.draws.uniform(public.draws.bits(fed.key(purpose), 100))
            assert 0.3 < float(numbers.mean()) < 0.7
            drawn.append(float(numbers.sum()))
        return state.next(trained(state, fed))

    sim = assemble.make(replace(quick(), method=returns(round=round)))
    sim.play(sim.initial())
    assert drawn[0] == drawn[2] != drawn[1]


def test_a_contest_refuses_runs_of_code_that_has_changed(ssfl: Call) -> None:
    mine = Path("adamatch.py")
    mine.write_text(FILE.read_text("utf-8"), "utf-8")
    command = [
        "contest",
        "--methods",
        "adamatch.py:AdaMatch",
        "--seeds",
        "1",
        "--no-tune",
        *sets(),
        "--quiet",
    ]
    assert ssfl(*command, "--out", "once")[0] == 0
    assert ssfl(*command, "--out", "once")[0] == 0
    mine.write_text(mine.read_text("utf-8").replace("aligned.amax(-1) >= threshold", "aligned.amax(-1) > 0"))
    code, _, err = ssfl(*command, "--out", "once")
    assert code == 2
    assert "adamatch.py" in err
    assert "changed" in err


class Undecorated(Method):
    tau: float = 0.5


@dataclass(frozen=True)
class OverUndecorated(Undecorated):
    share: float = 0.5


@dataclass(frozen=True)
class FieldNamedName(Method):
    name: float = 0.5  # type: ignore[assignment]


@dataclass(frozen=True)
class NoClassVar(Method):
    start: str = "user"  # type: ignore[misc]


REFUSED: dict[str, tuple[Any, str]] = {
    "no dataclass": (Undecorated, "Undecorated"),
    "a base that is no dataclass": (OverUndecorated, "Undecorated"),
    "a field called name": (FieldNamedName, "name"),
    "a field that hides an attribute": (NoClassVar, "start"),
    "users_loss": (lambda: returns(users_loss=lambda self, step: None), "users_loss"),
    "rounds": (lambda: returns(rounds=lambda self, state, fed: state), "rounds"),
    "need": (lambda: returns(need=lambda self: ()), "need"),
    "an unknown need": (lambda: returns(needs=lambda self: ("model",)), "needs"),
    "a word instead of a tuple": (lambda: returns(uses=lambda self: "weak"), "uses"),
    "a metric that every round has": (lambda: returns(metrics=("participants",)), "participants"),
    "a metric that only the gate writes": (lambda: returns(metrics=("mine", "cut")), "cut"),
    "a metric that every step has": (lambda: returns(metrics=("correct_rate",)), "correct_rate"),
    "a text instead of metrics": (lambda: returns(metrics="mine"), "metrics"),
    "an unknown use": (lambda: returns(uses=lambda self: ("weak", "gentle")), "uses"),
}


@pytest.mark.parametrize("mistake", REFUSED)
def test_a_class_with_a_mistake_is_refused_before_it_trains(
    mistake: str, quick: Callable[..., Config]
) -> None:
    make, key = REFUSED[mistake]
    for use in (
        lambda method: public.load_config("quickstart", SHORT, method=method),
        lambda method: public.run(quick(), "run", method=method),
        lambda method: public.Federation(quick(), out="run", method=method),
        lambda method: public.check(method),
    ):
        with pytest.raises(MethodError) as caught:
            use(make())
        assert caught.value.key == key
    assert not Path("run").exists()


def test_a_misspelt_function_is_refused_on_the_command_line(ssfl: Call) -> None:
    Path("mine.py").write_text(
        "import ssfl\n\nclass Mine(ssfl.Method):\n    def users_loss(self, step): ...\n", "utf-8"
    )
    code, _, err = ssfl("run", *sets("method.name=mine.py:Mine"))
    assert (code, len(err.splitlines())) == (2, 1)
    assert "did you mean user_loss?" in err


def test_the_methods_of_the_package_and_of_the_examples_are_accepted() -> None:
    examples = [NAME, f"{ROOT / 'examples/own/relative.py'}:Relative"]
    for name in examples:
        outside.trust(name)
    for name in [*METHODS, *examples]:
        require(find(name)())


@dataclass(frozen=True)
class Helpers(Method):
    """Its own functions are called like hooks, but not very much."""

    def trained_users(self) -> None: ...
    def labelled(self) -> None: ...
    def loss(self) -> None: ...
    def checked(self) -> None: ...
    def _users_loss(self) -> None: ...


def test_helpers_of_a_method_are_accepted() -> None:
    assert require(Helpers()) == Helpers()


def test_arguments_of_a_wrong_type_are_one_line(quick: Callable[..., Config]) -> None:
    run: Any = public.run
    federation: Any = public.Federation
    for start in (run, federation):
        for arguments, key in (
            ({"method": "grouping"}, "method"),
            ({"method": Helpers}, "method"),
            ({"data": np.zeros((10, 8, 8))}, "data"),
        ):
            with pytest.raises(ConfigError) as caught:
                start(quick(), out="run", **arguments)
            assert caught.value.key == key
            assert "\n" not in str(caught.value)
        with pytest.raises(ConfigError, match="dict"):
            start({"split": {"users": 20}}, out="run")
    assert not Path("run").exists()


def test_the_settings_of_a_method_object_are_checked(tmp_path: Path) -> None:
    """As if they had been written into the config: their limits hold, and a whole number becomes a float."""
    anchored: Any = find("anchored")
    for wrong in (3.0, "high", None):
        with pytest.raises(ConfigError, match=r"method\.threshold"):
            load_config("quickstart", SHORT, method=anchored(threshold=wrong))
        with pytest.raises(ConfigError, match=r"method\.threshold"):
            public.run(load_config("quickstart", SHORT), tmp_path / "run", method=anchored(threshold=wrong))
    assert not (tmp_path / "run").exists()
    for right in (1, np.float64(1), 1.0):
        config = load_config("quickstart", SHORT, method=anchored(threshold=right))
        assert type(config.method.threshold) is float  # type: ignore[attr-defined]
    path = public.run(load_config("quickstart", SHORT), tmp_path / "run", method=anchored(threshold=1)).path
    assert folder.read_config(path).method == anchored(threshold=1.0)
    method = anchored(threshold=0.7)
    assert load_config("quickstart", SHORT, method=method).method is method


@dataclass(frozen=True)
class Declared(public.Method):
    k: int = None  # type: ignore[assignment]
    weights: tuple[float, ...] = (1.0, 2.0)


@dataclass(frozen=True)
class Listed(public.Method):
    weights: list[float] = field(default_factory=list)


def test_a_method_may_have_none_as_a_default_and_arrays_as_settings() -> None:
    assert load_config("quickstart", SHORT, method=Declared()).method == Declared()
    method = Declared(k=3, weights=np.array([1, 0.5]))  # type: ignore[arg-type]
    assert load_config("quickstart", SHORT, method=method).method == Declared(3, (1.0, 0.5))
    with pytest.raises(ConfigError, match=r"tuple\[float"):
        load_config("quickstart", SHORT, method=Listed())

"""`ssfl check`: the package's methods keep the laws, and methods that break one are told which."""

from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from torch import nn

from conftest import Call
from ssfl.config.loading import load_config
from ssfl.core import losses
from ssfl.core.losses import Losses
from ssfl.errors import ConfigError, MethodError
from ssfl.federation import Fed, Labels, Look, Loss, Method, Named, State, Step, Users
from ssfl.methods import METHODS, parts
from ssfl.runs import laws

REPEATED, ENGINES, AT_ONCE, RESUMED, REPLAYED = (
    "a run can be repeated",
    "loop equals vmap",
    "one user at a time equals all at once",
    "a resumed run equals an uninterrupted one",
    "a recorded step can be replayed in another round",
)


def broken(method: Method) -> set[str]:
    """The laws that a method breaks."""
    return {law.name for law in laws.check(method) if not law.holds}


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(METHODS.keys() - {"fixmatch"}))
def test_every_method_keeps_every_law(name: str) -> None:
    assert [law for law in laws.check(name) if not law.holds] == []


@dataclass(frozen=True)
class Plain(Method):
    """A method that keeps the laws."""

    threshold: float = 0.2

    def user_loss(self, step: Step) -> Losses:
        return parts.consistency(step, self.threshold)


@dataclass(frozen=True)
class Mixes(Method):
    """Each user's loss depends on the other users' images."""

    threshold: float = 0.2

    def user_loss(self, step: Step) -> Losses:
        found = parts.consistency(step, self.threshold)
        return found._replace(loss=found.loss * (1 + found.mask.mean()))


class Counting:
    """Something that a process forgets when it ends."""

    rounds = 0


@dataclass(frozen=True)
class Remembers(Method):
    """What it knows is not in the state: it counts the rounds of its simulation."""

    threshold: float = 0.2

    def initial(self, state: State, fed: Fed) -> dict[str, torch.Tensor]:
        Counting.rounds = 0
        return {}

    def user_loss(self, step: Step) -> Losses:
        return parts.consistency(step, self.threshold)

    def round(self, state: State, fed: Fed) -> State:
        Counting.rounds += 1
        users = fed.train_users(state.streams, server=state.average)
        return state.next(users.means * (1 + 0.01 * Counting.rounds))


CALLS = [0]


@dataclass(frozen=True)
class Schedules(Method):
    """A Python number that changes from step to step is frozen into a recorded one."""

    threshold: float = 0.2

    def label(self, look: Look) -> Labels:
        CALLS[0] += 1
        return parts.labelled(look, parts.confident(look, self.threshold))

    def user_loss(self, step: Step) -> Losses:
        found = losses.labelled(step.forward(step.strong), step.tensors["labels"], step.tensors["mask"])
        return found._replace(loss=found.loss * CALLS[0])


@pytest.mark.slow
def test_a_plain_method_keeps_the_laws() -> None:
    assert broken(Plain()) == set()


def test_users_that_touch_each_other_are_noticed() -> None:
    assert {ENGINES, AT_ONCE} <= broken(Mixes())


@dataclass(frozen=True)
class Noisy(Method):
    """Weights the loss by a random number that the seed does not determine."""

    threshold: float = 0.2

    def user_loss(self, step: Step) -> Losses:
        found = parts.consistency(step, self.threshold)
        return found._replace(loss=found.loss * torch.rand(()))


GENERATOR = torch.Generator().manual_seed(1)


@dataclass(frozen=True)
class Hidden(Method):
    """Has a random generator of its own, whose state no checkpoint saves."""

    threshold: float = 0.2

    def user_loss(self, step: Step) -> Losses:
        found = parts.consistency(step, self.threshold)
        return found._replace(loss=found.loss * torch.rand((), generator=GENERATOR))


@pytest.mark.slow
def test_random_generators_are_noticed_and_named() -> None:
    (found,) = (law for law in laws.check(Noisy()) if law.name == REPEATED)
    assert not found.holds
    assert "torch (rand)" in found.detail
    assert REPEATED in broken(Hidden())


@pytest.mark.slow
def test_memory_outside_of_the_state_is_noticed() -> None:
    assert RESUMED in broken(Remembers())


def test_a_number_frozen_into_a_step_is_noticed() -> None:
    assert REPLAYED in broken(Schedules())


@dataclass(frozen=True)
class Looks(Method):
    """Its gradient is the mean of those before and after a step, whose rate changes from round to round, and
    its loss reads the received weights."""

    threshold: float = 0.2

    def uses(self) -> tuple[str, ...]:
        return ("weak", "strong", "received")

    def user_loss(self, step: Step) -> Losses:
        found = parts.consistency(step, self.threshold)
        apart = [(step.weights[name] - sent).flatten(1) for name, sent in step.received.items()]
        return found._replace(loss=found.loss.mean(1) + 0.1 * torch.cat(apart, 1).square().sum(1))

    def gradient(self, step: Step, loss: Loss) -> tuple[Named, Named]:
        first, metrics = step.gradient(loss)
        if step.role == "server":
            return first, metrics
        later = step.after(first)
        second, _ = later.gradient(loss, at=later.weights)
        return {name: (value + second[name]) / 2 for name, value in first.items()}, metrics


def replayed(method: Method, *settings: str) -> laws.Law:
    config = load_config("quickstart", [*laws.SETTINGS, "run.engine=vmap", *settings], method)
    apart, size = laws._replayed(config, None)
    return laws.Law(REPLAYED, apart / (1 + size) <= laws.CLOSE, str(apart))


def test_a_step_may_depend_on_the_rate_and_on_the_received_weights() -> None:
    assert replayed(Looks(), "train.warmup=9", "train.lr=0.5").holds


@pytest.mark.parametrize(
    "settings", [["federation.head_start=0.4", "federation.dropout=0.3"], ["federation.rounds=1"]]
)
def test_rounds_without_users_and_few_rounds_break_no_law(settings: list[str]) -> None:
    assert [law for law in laws.check(Plain(), overrides=settings) if not law.holds] == []


def test_what_a_method_uses_without_declaring_it_is_told() -> None:
    @dataclass(frozen=True)
    class Undeclared(Plain):
        def round(self, state: State, fed: Fed) -> State:
            users: Users = fed.train_users(state.streams)
            return state.next(users.rows.mean(0)[None])

    with pytest.raises(MethodError) as caught:
        laws.check(Undeclared())
    assert caught.value.key == "models"


@dataclass(frozen=True)
class Tau(Method):
    """Its threshold has another name."""

    tau: float = 0.95

    def user_loss(self, step: Step) -> Losses:
        return parts.consistency(step, self.tau)


def test_a_threshold_of_any_name_can_be_set(ssfl: Call) -> None:
    few = next(law for law in laws.check(Tau()) if not law.holds)
    assert "Tau(tau=0.2)" in few.detail
    with pytest.raises(ConfigError):
        laws.check(Tau(), overrides={"method.tau": 0.2})
    Path("mine.py").write_text(
        "from dataclasses import dataclass\nimport ssfl\n@dataclass(frozen=True)\n"
        "class Tau(ssfl.Method):\n    tau: float = 0.95\n"
        "    def user_loss(self, step): return ssfl.parts.consistency(step, self.tau)\n",
        "utf-8",
    )
    assert ssfl("check", "mine.py:Tau", "--set", "method.tau=0.2")[0] == 0
    code, _, err = ssfl("check", "mine.py:Tau", "--set", "method.tu=0.2")
    assert (code, len(err.splitlines())) == (2, 1)
    Path("scans").mkdir()
    code, _, err = ssfl("check", "scans")
    assert (code, len(err.splitlines())) == (2, 1)
    assert "ssfl split scans" in err


@pytest.mark.slow
def test_a_threshold_that_was_set_is_kept() -> None:
    assert not laws.check("alternate", overrides=["method.threshold=1"])[0].holds


def wide() -> nn.Module:
    """A network for images of 1 x 12 x 12 pixels only."""
    return nn.Sequential(nn.Flatten(), nn.Linear(144, 10))


def test_a_network_for_other_images_is_checked_with_them() -> None:
    with pytest.raises(ConfigError, match=r"data\.size") as caught:
        laws.check(Plain(), wide)
    assert caught.value.key == "model.name"
    assert all(law.holds for law in laws.check(Plain(), wide, ["data.size=12"]))


@pytest.mark.slow
def test_labels_of_users_are_hidden_unless_declared() -> None:
    seen = []

    @dataclass(frozen=True)
    class Peeks(Plain):
        def user_loss(self, step: Step) -> Losses:
            seen.append(step.labels)
            return super().user_loss(step)

    laws.check(Peeks())
    assert all(bool((labels == -1).all()) for labels in seen if type(labels) is torch.Tensor)

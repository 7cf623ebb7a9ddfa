"""Options that are off by default: users without labels left out, labels held out, relative thresholds."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from hand_rounds import Adding, column, played, start, toy
from ssfl.config.loading import load_config
from ssfl.config.settings import Config
from ssfl.core.cohort import Cohort
from ssfl.engines.local import Returned
from ssfl.errors import ConfigError
from ssfl.federation import METRICS, Look, Named
from ssfl.methods.anchored import Anchored
from ssfl.runs import assemble

Make = Callable[..., Config]
PAIR = Cohort((0, 1), (0, 1), ((0, 1),), (0, 0), (0, 1))


class Unsure(Adding):
    """The second user has no pseudo-label."""

    def train(self, rows: torch.Tensor, momentum: torch.Tensor, part: slice, given: Named) -> Returned:
        metrics = dict.fromkeys(METRICS, rows.new_zeros(len(rows))) | {"mask_rate": column(0.5, 0).flatten()}
        return super().train(rows, momentum, part, given)._replace(metrics=metrics)


@pytest.mark.parametrize(("skip", "expected"), [("false", 42.5), ("true", 44)])
def test_users_without_a_label_can_be_left_out_of_the_mean(skip: str, expected: float) -> None:
    sim = toy("alternate", "split.users=2", f"federation.skip_unlabelled={skip}", server=True)
    new, fed = played(sim, start([10.0]), PAIR, Unsure([4, 1], [30]))
    assert new.average.item() == expected
    assert fed.log.refused == {}


@pytest.mark.parametrize("other", ["run.engine=dist", "privacy.clip=1.0 privacy.noise=0.5"])
def test_where_nobody_may_know_who_had_a_label_it_is_refused(other: str) -> None:
    with pytest.raises(ConfigError) as error:
        load_config("quickstart", ["federation.skip_unlabelled=true", *other.split()])
    assert error.value.key in ("federation.skip_unlabelled", "privacy.clip")


def test_held_out_labels_are_judged_by_and_not_trained_on(quick: Make) -> None:
    sim = assemble.make(quick("train.server_held_out=0.2"))
    own, judges = set(sim.plan.server.images.tolist()), set((sim.plan.judges).tolist())  # type: ignore[union-attr]
    assert (len(own), len(judges)) == (40, 10)
    assert not own & judges
    assert own | judges == set(sim.parts.server.tolist())
    assert torch.equal(sim.server_images()[1].bincount(), torch.ones(10, dtype=torch.int64))
    assert set(sim.plan.server_work(0).batches.flatten().tolist()) <= own
    with pytest.raises(ConfigError) as error:
        assemble.make(quick("train.server_held_out=0.001"))
    assert error.value.key == "train.server_held_out"


def test_held_out_labels_keep_patients_together(tmp_path: Path) -> None:
    pixels = np.random.default_rng(1)
    names = [f"train/{'ab'[n // 24]}/patient{n // 3}_{n}" for n in range(48)]
    for name in [*names, "test/a/0", "test/b/0", "unlabelled/0", "unlabelled/1"]:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        image = Image.fromarray(pixels.integers(0, 255, (8, 8), dtype=np.uint8))
        image.save(tmp_path / f"{name}.png")
    settings = ["model.name=small", "split.users=2", "train.server_held_out=0.25"]
    sim = assemble.make(load_config("own", [f"data.path={tmp_path}", *settings]))
    assert sim.plan.judges is not None
    assert sim.dataset.groups is not None
    own, judges = sim.plan.server.images.numpy(), sim.plan.judges.numpy()
    assert len(judges) == 12
    assert not set(sim.dataset.groups[own]) & set(sim.dataset.groups[judges])


def test_a_relative_threshold_follows_the_confidence_on_labelled_images(quick: Make) -> None:
    answers = torch.tensor([[[0.5, 0.3, 0.2], [0.7, 0.2, 0.1]]]).double()
    images, keys = torch.arange(2).reshape(1, 1, 2), torch.zeros(1, dtype=torch.int64)
    method = Anchored(threshold=0.8, relative=True)
    for threshold, mask in ((0.8, [0, 0]), (0.64, [0, 1]), (0.48, [1, 1])):
        sent = {"threshold": torch.tensor([threshold]).double()}
        made = method.label(Look(answers, images, keys, sent, False))
        assert made.tensors["mask"].flatten().tolist() == mask
    settings = ["method.relative=true", "method.threshold=0.9", "run.engine=vmap"]
    sim = assemble.make(quick(*settings))
    state, (first, *_) = sim.play(sim.initial())
    assert first["mask_rate"] == 0  # the first model has learned nothing
    state, (event, *_) = sim.play(state)
    assert 0.1 < event["labelled_confidence"] < 0.5
    plain = assemble.make(quick("method.threshold=0.9"))
    assert event["mask_rate"] > plain.play(plain.play(plain.initial())[0])[1][0]["mask_rate"]
    assert state.round == 2

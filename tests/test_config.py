"""Settings: precedence, round trips, and errors that name the key, the value and the fix."""

import math
import re
import tomllib
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
import torch

import ssfl
from ssfl import methods
from ssfl.cli import explain
from ssfl.config.loading import from_dict, load_config
from ssfl.config.sections import GONE, RENAMED, make_section
from ssfl.config.settings import SECTIONS, Config
from ssfl.config.sources import CONFIGS, presets
from ssfl.config.writing import portable, to_toml
from ssfl.core.fields import limits_of, setting
from ssfl.errors import ConfigError
from ssfl.methods import METHODS
from ssfl.methods.semifl import SemiFL
from ssfl.runs import folder


@pytest.mark.parametrize("name", presets())
def test_every_preset_loads(name: str) -> None:
    assert isinstance(load_config(name, ["data.name=digits"]), Config)


@pytest.mark.parametrize("method", METHODS)
def test_every_method_fills_in_what_nobody_set_and_a_persons_keys_win(method: str) -> None:
    words = [f"method.name={method}", *(["split.users=1"] if method == "fixmatch" else [])]
    config = load_config("quickstart", words)
    preset = tomllib.loads((CONFIGS / "quickstart.toml").read_text("utf-8"))
    assert config.method == methods.find(method)()
    for section, values in methods.find(method).defaults.items():
        for key, value in values.items():
            if key not in preset.get(section, {}):
                assert getattr(getattr(config, section), key) == value
    changed = load_config("quickstart", ["model.norm=none", *words])
    assert changed.model.norm == "none"


def test_toml_goes_round() -> None:
    config = load_config(
        "quickstart",
        ["split.mixtures=[[0.5, 0.5], [1, 0]]", 'data.path=a "strange" näme.npz', "train.lr=1e-7"],
    )
    assert config.split.mixtures == ((0.5, 0.5), (1.0, 0.0))
    assert from_dict(tomllib.loads(to_toml(config))) == config


def test_texts_that_toml_must_escape_or_cannot_hold(tmp_path: Path) -> None:
    config = load_config("quickstart", ["data.name=digits"])
    odd = replace(config, data=replace(config.data, root='a\x7f"\\\n\u00e9'))
    assert from_dict(tomllib.loads(to_toml(odd))) == odd
    wrong = replace(config, data=replace(config.data, root="caf\udce9"))
    with pytest.raises(ConfigError) as caught:
        folder.create(tmp_path / "run", wrong, {})
    assert caught.value.key == "data.root"
    assert str(caught.value).isascii()
    assert not (tmp_path / "run").exists()


def test_a_config_without_paths_of_this_machine() -> None:
    config = load_config("quickstart", ["data.path=/home/me/scans.npz", "data.root=/home/me/data"])
    config = replace(
        config, model=replace(config.model, name="/home/me/net.py:make", weights="a/b.safetensors")
    )
    sections = portable(config)
    assert (sections["data"]["path"], sections["data"]["root"]) == ("scans.npz", "data")
    assert (sections["model"]["name"], sections["model"]["weights"]) == ("net.py:make", "b.safetensors")
    assert "/home/me" not in to_toml(sections)


def test_a_file_and_overrides(tmp_path: Path) -> None:
    file = tmp_path / "mine.toml"
    file.write_text('[data]\nname = "digits"\n[federation]\nepochs = 3\n[train]\nlr = 1\n')
    config = load_config(file, ["federation.rounds=7", "run.device=cpu"])
    assert config.train.lr == 1.0
    assert (config.federation.rounds, config.federation.epochs) == (7, None)


def test_another_method_does_not_get_the_settings_of_a_presets_own_method(tmp_path: Path) -> None:
    assert load_config("pictures").method.relative  # type: ignore[attr-defined]
    other = load_config("pictures", ["method.name=semifl", "method.mix=0.5"])
    assert other.method == SemiFL(mix=0.5)
    same = load_config("pictures", ["method.name=anchored"])
    assert same.method.relative  # type: ignore[attr-defined]
    file = tmp_path / "mine.toml"  # what a person wrote is not dropped without a word
    file.write_text('[method]\nname = "anchored"\nrelative = true\n')
    with pytest.raises(ConfigError) as caught:
        load_config(file, ["method.name=semifl"])
    assert caught.value.key == "method.relative"


def test_a_preset_may_be_given_as_a_path() -> None:
    other = ["method.name=server-only"]
    assert load_config(Path("pictures"), other) == load_config("pictures", other)


def test_numbers_as_people_write_them_and_the_preset_for_other_data() -> None:
    assert load_config(None, ["split.skew=.5", "train.lr=1."]).split.skew == 0.5
    assert load_config().split.server_labels == 50
    assert load_config(None, ["data.path=x.npz"]).split.server_labels is None


def test_a_section_that_is_none(tmp_path: Path) -> None:
    (tmp_path / "mine.toml").write_text("split = 3")
    with pytest.raises(ConfigError) as caught:
        load_config(tmp_path / "mine.toml", ["split.users=3"])
    assert (caught.value.key, caught.value.value) == ("split", 3)


def test_the_papers_seeds_are_the_defaults() -> None:
    config = load_config("quickstart")
    assert (config.split.seed, config.run.seed) == (2019, 1)


@pytest.mark.parametrize("section", SECTIONS)
def test_every_field_is_explained_and_its_default_is_allowed(section: str) -> None:
    kind = SECTIONS[section]
    limits = limits_of(kind)
    assert set(explain.docstrings(kind)) == set(limits) == {field.name for field in fields(kind)}
    assert all(one.instead in {"", *limits} for one in limits.values())
    defaults = {field.name: field.default for field in fields(kind) if field.default is not None}
    assert make_section(section, kind, defaults) == kind()


@pytest.mark.parametrize(
    ("override", "key", "value", "fix"),
    [
        ("split.user=3", "split.user", 3, "split.users=3"),
        ("split.lr=3", "split.lr", 3, "train.lr=3"),
        ("splt.users=3", "splt.users", 3, "split.users=3"),
        ("users=3", "users", "3", "split.users=3"),
        ("split.users", "split.users", None, None),
        ("split.users=many", "split.users", "many", None),
        ("split.users=2.5", "split.users", 2.5, None),
        ("split.users=", "split.users", "", None),
        ("train.nesterov=1", "train.nesterov", 1, None),
        ("split.users=0", "split.users", 0, "split.users=1"),
        ("split.skew=1.5", "split.skew", 1.5, "split.skew=1"),
        ("split.skew=.nan", "split.skew", ".nan", None),
        ("method.threshold=-0.1", "method.threshold", -0.1, "method.threshold=0"),
        ("method.name=groping", "method.name", "groping", "method.name=grouping"),
        ("method.name=3", "method.name", 3, None),
        ("model.norm=layer", "model.norm", "layer", None),
        ("model.norm=bath", "model.norm", "bath", "model.norm=batch"),
        ("split.mixtures=[1]", "split.mixtures", [1], None),
        ("split.mixtures=[[1, 2], [1]]", "split.mixtures", [[1, 2], [1]], None),
        ("split.mixtures=[[1, -2]]", "split.mixtures", ((1.0, -2.0),), None),
        ("run.seed=-1", "run.seed", -1, "run.seed=0"),
        ("data.path=", "data.path", "", None),
        (f"train.lr=1{'0' * 400}", "train.lr", 1e300, "train.lr=1000"),
        (f"split.users=1{'0' * 5000}", "split.users", float("inf"), None),
    ],
)
def test_a_mistake_has_a_key_a_value_and_a_fix_that_works(
    override: str, key: str, value: Any, fix: str | None
) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config("quickstart", [override])
    error = caught.value
    assert (error.key, error.value, error.fix) == (key, value, fix)
    assert key in str(error)
    assert "\n" not in str(error)
    if fix is not None:
        load_config("quickstart", [fix])


def test_not_a_number_is_out_of_range() -> None:
    with pytest.raises(ConfigError) as caught:
        load_config("quickstart", ["split.skew=nan"])
    assert caught.value.key == "split.skew"
    assert math.isnan(caught.value.value)


@pytest.mark.parametrize(
    ("override", "key", "fix"),
    [
        ("federation.participants=11", "federation.participants", "federation.participants=10"),
        ("federation.groups=11", "federation.groups", "federation.groups=10"),
        ("split.scheme=mixture", "split.scheme", None),
        ("train.momentum=0", "train.nesterov", "train.nesterov=false"),
    ],
)
def test_settings_that_do_not_go_together(override: str, key: str, fix: str | None) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config("quickstart", [override])
    assert (caught.value.key, caught.value.fix) == (key, fix)
    assert "\n" not in str(caught.value)
    if fix is not None:
        load_config("quickstart", [override, fix])


VALUES: dict[str, tuple[str, Any]] = {
    "method.slow": ("0.5", 0.5), "method.head_start": ("0.5", 0.5), "method.gate": ("true", True),
    "method.combine": ("median", "median"), "method.check": ("true", True),
    "federation.check": ("true", True),
    "method.server_views": ("both", "both"), "method.server_momentum": ("0.25", 0.25),
}  # fmt: skip
"""A value of every setting that has another name now."""


@pytest.mark.parametrize("old", RENAMED)
def test_an_old_name_gives_the_new_one(old: str) -> None:
    word, value = VALUES[old]
    with pytest.raises(ConfigError) as caught:
        load_config("quickstart", [f"{old}={word}"])
    fix = f"{RENAMED[old]}={word}"
    assert (caught.value.key, caught.value.value, caught.value.fix) == (old, value, fix)
    section, _, name = RENAMED[old].partition(".")
    assert getattr(getattr(load_config("quickstart", [fix]), section), name) == value


@pytest.mark.parametrize("old", GONE)
def test_a_setting_that_is_gone_says_what_to_do_instead(old: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config("quickstart", [f"{old}=none"])
    assert (caught.value.key, caught.value.value, caught.value.fix) == (old, "none", GONE[old])
    assert old in str(caught.value)
    words = re.findall(r"[a-z]+\.[a-z_]+(?:=[a-z0-9]+)?", GONE[old])
    assert words
    for word in words:
        if "=" in word:
            load_config("quickstart", [word])
        else:
            section, _, name = word.partition(".")
            found = (
                [*SECTIONS.values(), *map(methods.find, METHODS)]
                if section == "method"
                else [SECTIONS[section]]
            )
            assert name == "name" or any(name in limits_of(kind) for kind in found)


def test_a_setting_of_another_method_is_refused() -> None:
    with pytest.raises(ConfigError) as caught:
        load_config("quickstart", ["method.name=supervised", "method.threshold=0.5"])
    assert (caught.value.key, caught.value.value, caught.value.fix) == ("method.threshold", 0.5, None)
    assert "[method] has name, server_weight, server_replicas" in str(caught.value)


@dataclass(frozen=True)
class Outside:
    """A section that somebody else wrote, with and without limits."""

    needed: int
    """It has no default."""
    rate: float = 0.5
    kind: Literal["a", "b"] = "a"
    sizes: tuple[int, ...] = (1, 2)
    steps: int | None = setting(None, least=1)


def test_a_dataclass_from_outside_is_a_section() -> None:
    given = {"needed": 1, "rate": 2, "kind": "b", "sizes": [3], "steps": 4}
    assert make_section("mine", Outside, given) == Outside(1, 2.0, "b", (3,), 4)
    about, rows = explain.section("mine", Outside)
    assert about == "A section that somebody else wrote, with and without limits."
    assert [row.key.partition(".")[2] for row in rows] == [field.name for field in fields(Outside)]
    assert (rows[0].about, rows[4].about) == ("It has no default.", "(at least 1)")


@pytest.mark.parametrize(
    ("values", "key", "fix"),
    [
        ({}, "mine.needed", None),
        ({"needed": 1.5}, "mine.needed", None),
        ({"needed": 1, "rte": 3}, "mine.rte", "mine.rate=3"),
        ({"needed": 1, "kind": "c"}, "mine.kind", None),
        ({"needed": 1, "sizes": [0.5]}, "mine.sizes", None),
        ({"needed": 1, "steps": 0}, "mine.steps", "mine.steps=1"),
    ],
)
def test_mistakes_in_a_section_from_outside(values: dict[str, Any], key: str, fix: str | None) -> None:
    with pytest.raises(ConfigError) as caught:
        make_section("mine", Outside, values)
    assert (caught.value.key, caught.value.fix) == (key, fix)


FOLLOWED = [
    (["method.name=easgd", "federation.gate=true"], "federation.gate", "federation.gate=false"),
    (["method.name=easgd", "federation.combine=median"], "federation.combine", "federation.combine=mean"),
    (["method.name=rscfed", "federation.median_fallback=true"], "federation.median_fallback",
     "federation.median_fallback=false"),
    (["method.name=semifl", "federation.combine=trimmed"], "federation.combine", "federation.combine=mean"),
    (["method.name=overlap-sgd", "federation.attackers=0.3"], "federation.attackers",
     "federation.attackers=0"),
    (["method.name=easgd", "federation.groups=2"], "federation.groups", "federation.groups=1"),
    (["method.name=semifl", "run.engine=dist"], "run.engine", "run.engine=auto"),
    (["method.name=server-only", "split.labels_at=users"], "split.labels_at", "split.labels_at=server"),
    (["method.name=server-only", "split.labels_at=both"], "split.labels_at", "split.labels_at=server"),
    (["method.name=data-sharing", "split.labels_at=both"], "split.shared", "split.labels_at=server"),
    (["split.labels_at=users", "federation.head_start=0.5"], "federation.head_start",
     "federation.head_start=0"),
    (["split.server_labels=0", "federation.median_fallback=true"], "federation.median_fallback",
     "federation.median_fallback=false"),
    (["method.name=fedmatch", "model.norm=batch"], "model.norm", "model.norm=none"),
    (["method.name=fedmatch", "train.momentum=0.9"], "train.momentum", "train.momentum=0"),
    (["method.name=fedmatch", "federation.groups=2"], "federation.groups", "federation.groups=1"),
    (["run.engine=dist", "federation.gate=true"], "federation.gate", "federation.gate=false"),
]  # fmt: skip


@pytest.mark.parametrize(("sets", "key", "fix"), FOLLOWED)
def test_what_a_message_says_to_do_helps(sets: list[str], key: str, fix: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config("quickstart", sets)
    assert (caught.value.key, caught.value.fix) == (key, fix)
    assert fix.partition("=")[2] in str(caught.value)
    assert "\n" not in str(caught.value)
    load_config("quickstart", [*sets, fix])


@pytest.mark.parametrize("labels", ["split.labels_at=users", "split.server_labels=0"])
@pytest.mark.parametrize("method", METHODS)
def test_a_server_without_labels_is_refused_only_by_methods_that_need_it(method: str, labels: str) -> None:
    sets = [f"method.name={method}", labels, *(["split.users=1"] if method == "fixmatch" else [])]
    refused = {
        "server-only": labels.partition("=")[0],
        "data-sharing": "split.shared" if labels == "split.labels_at=users" else "",
        "fl2": "federation.head_start",  # these begin with rounds of the server alone
        "rscfed": "federation.head_start",
        "cbafed": "federation.head_start",
    }
    if not refused.get(method):
        load_config("quickstart", sets)
        return
    with pytest.raises(ConfigError) as caught:
        load_config("quickstart", sets)
    assert caught.value.key == refused[method]
    if caught.value.key == "federation.head_start":
        assert caught.value.fix == "federation.head_start=0"
        load_config("quickstart", [*sets, caught.value.fix])


def test_more_groups_than_participants() -> None:
    sets = ["method.name=grouping", "federation.groups=4", "federation.participants=3"]
    with pytest.raises(ConfigError) as caught:
        load_config("quickstart", sets)
    error = caught.value
    assert (error.key, error.value, error.fix) == ("federation.groups", 4, "federation.groups=3")


@pytest.mark.parametrize(
    ("text", "key", "value", "fix"),
    [
        ("data = 3", "data", 3, None),
        ("[data", None, "mine.toml", None),
        ('[data]\nname = "digits"', "federation.rounds", None, None),
        ('[data]\nname = "digits"\npath = "x"\n[federation]\nrounds = 3', "data.name", "digits", None),
        ('[data]\nname = "mnist"', "data.name", "mnist", "data.name=emnist"),
        ("[tain]\nlr = 1", "tain", {"lr": 1}, "[train]"),
    ],
)
def test_files_with_mistakes(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    text: str,
    key: str | None,
    value: object,
    fix: str | None,
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("mine.toml").write_text(text)
    with pytest.raises(ConfigError) as caught:
        load_config("mine.toml")
    assert (caught.value.key, caught.value.value, caught.value.fix) == (key, value, fix)


def test_configs_that_are_not_there(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config("quickstar")
    assert (caught.value.value, caught.value.fix) == ("quickstar", "quickstart")
    with pytest.raises(ConfigError) as caught:
        load_config(tmp_path / "no.toml")
    assert caught.value.value == str(tmp_path / "no.toml")


def test_overrides_may_be_a_dict(tmp_path: Path) -> None:
    """Values are those of Python, so a text that looks like a number stays a text."""
    assert ssfl.load_config("quickstart", {"federation.rounds": 5}).federation.rounds == 5
    with pytest.raises(ConfigError, match=r"federation\.rounds"):
        ssfl.load_config("quickstart", {"federation": {"rounds": 5}})
    texts = ["federation.rounds=5", "train.lr=0.1", "data.flip=true", "run.engine=vmap", "data.path=a b/7"]
    values = {
        "federation.rounds": 5,
        "train.lr": 0.1,
        "data.flip": True,
        "run.engine": "vmap",
        "data.path": "a b/7",
    }
    assert load_config("own", values) == load_config("own", texts)
    assert load_config("own", {"data.path": Path("7")}).data.path == "7"
    for number in (np.float64(0.5), np.float32(0.5), torch.tensor(0.5)):
        assert load_config("own", {"data.path": "x", "train.lr": number}).train.lr == 0.5
    assert load_config("own", {"data.path": "x", "federation.rounds": np.int64(7)}).federation.rounds == 7
    weights = load_config("own", {"data.path": "x", "split.mixtures": np.eye(2)}).split.mixtures
    assert weights == ((1.0, 0.0), (0.0, 1.0))
    with pytest.raises(ConfigError, match=r"train\.lr") as caught:
        load_config("own", {"lr": 0.1})
    assert (caught.value.key, "--set" in str(caught.value)) == ("lr", False)
    with pytest.raises(ConfigError, match=r"train\.lr"):
        load_config("own", {"data.path": "x", "train.lr": None})
    with pytest.raises(ConfigError, match=r"train\.lr"):
        load_config("own", {"data.path": "x", "train.lr": "fast"})

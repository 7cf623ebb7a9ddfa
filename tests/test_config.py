"""Settings: precedence, round trips, and errors that name the key, the value and the fix."""

import tomllib
from pathlib import Path

import pytest

from ssfl import assemble
from ssfl.config import CONFIGS, from_dict, load_config, presets, to_toml
from ssfl.errors import ConfigError
from ssfl.limits import CHOICES, RANGES
from ssfl.methods import METHODS
from ssfl.settings import SECTIONS, Config


@pytest.mark.parametrize("name", presets())
def test_every_preset_loads(name: str) -> None:
    assert isinstance(load_config(name, ["data.name=digits"]), Config)


@pytest.mark.parametrize("method", METHODS)
def test_every_method_fills_in_what_nobody_set_and_a_persons_keys_win(method: str) -> None:
    words = [f"method.name={method}", *(["split.users=1"] if method == "fixmatch" else [])]
    config = load_config("quickstart", words)
    preset = tomllib.loads((CONFIGS / "quickstart.toml").read_text("utf-8"))
    for section, values in METHODS[method].items():
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


def test_a_file_and_overrides(tmp_path: Path) -> None:
    file = tmp_path / "mine.toml"
    file.write_text('[data]\nname = "digits"\n[federation]\nepochs = 3\n[train]\nlr = 1\n')
    config = load_config(file, ["federation.rounds=7", "run.device=cpu"])
    assert config.train.lr == 1.0
    assert (config.federation.rounds, config.federation.epochs) == (7, None)


def test_numbers_as_people_write_them_and_the_preset_for_other_data() -> None:
    assert load_config(None, ["split.skew=.5", "train.lr=1."]).split.skew == 0.5
    assert load_config().split.server_labels == 50
    assert load_config(None, ["data.path=x.npz"]).split.server_labels is None


def test_a_section_that_is_none(tmp_path: Path) -> None:
    (tmp_path / "mine.toml").write_text("split = 3")
    with pytest.raises(ConfigError, match="must be a section"):
        load_config(tmp_path / "mine.toml", ["split.users=3"])


def test_the_papers_seeds_are_the_defaults() -> None:
    config = load_config("quickstart")
    assert (config.split.seed, config.run.seed) == (2019, 1)


def test_every_checked_key_is_a_field_and_every_field_is_explained() -> None:
    fields = {f"{section}.{key}" for section, kind in SECTIONS.items() for key in kind.__annotations__}
    assert set(CHOICES) | set(RANGES) <= fields
    source = Path(load_config.__code__.co_filename).read_text().splitlines()
    for number, line in enumerate(source):
        if line.startswith("    ") and ": " in line and "=" in line and line.strip()[0].isalpha():
            if source[number - 1].strip().startswith(("def ", "for ")) or "field(" in line:
                continue
            key = line.strip().split(":")[0]
            if any(f.endswith(f".{key}") for f in fields):
                assert source[number + 1].strip().startswith('"""'), key


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("split.user=3", "unknown key split.user: did you mean split.users?"),
        ("split.lr=3", "did you mean train.lr?"),
        ("splt.users=3", "unknown section 'splt'.*did you mean split"),
        ("split.users", "section.key=value"),
        ("split.users=many", "split.users = 'many' must be a whole number"),
        ("split.users=2.5", "must be a whole number"),
        ("train.nesterov=1", "train.nesterov = 1 must be true or false"),
        ("split.users=0", "between 1 and"),
        ("split.skew=1.5", "split.skew = 1.5 must lie between 0 and 1"),
        ("split.skew=nan", "split.skew = nan must lie between"),
        ("method.threshold=-0.1", "method.threshold = -0.1 must lie between 0 and 1"),
        ("federation.participants=11", "more than split.users = 10: set it to at most 10"),
        ("federation.groups=2", "needs method.averaging = 'grouping'"),
        ("method.name=groping", "did you mean grouping"),
        ("method.name=3", "is not one of"),
        ("model.norm=layer", "model.norm = 'layer' is not one of group, batch, none"),
        ("method.averaging=weighted", "go together"),
        ("split.scheme=mixture", "needs split.mixtures"),
        ("run.test=last", "needs other images to look at"),
        ("run.test=never", "needs other images to look at"),
        ("split.mixtures=[1]", "rows of numbers"),
        ("split.labels_at=users", "add method.server = 'none'"),
        ("train.momentum=0", "set train.nesterov=false"),
        ("run.seed=-1", "run.seed = -1 must lie between 0"),
        ("data.path=", "data.path is empty"),
        ("split.mixtures=[[1, 2], [1]]", "equally long rows"),
        (f"train.lr=1{'0' * 400}", "must lie between"),
        (f"split.users=1{'0' * 5000}", "must be a whole number"),
    ],
)
def test_mistakes_are_named(override: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words) as caught:
        load_config("quickstart", [override])
    assert "\n" not in str(caught.value)


FOLLOWED = [
    (["method.averaging=weighted", "method.name=crl-gn"], ["method.server_weight=0.5"]),
    (["method.name=easgd", "method.gate=true"], ["method.gate=false"]),
    (["method.name=easgd", "method.combine=median"], ["method.combine=mean"]),
    (["method.name=overlap-sgd", "federation.attackers=0.3"], ["federation.attackers=0"]),
    (["method.name=semifl", "run.engine=dist"], ["method.fill=false"]),
    (["method.name=semifl", "run.engine=dist"], ["run.engine=auto"]),
    (["method.name=server-only", "split.labels_at=users"], ["split.labels_at = 'server'"]),
    (["method.name=data-sharing", "method.check=true"], ["method.check=false"]),
    (["method.name=alternate", "method.guard=true", "split.labels_at=users"],
     ["method.server = 'none'", "method.guard=false"]),
    (["split.labels_at=users"], ["method.server = 'none'", "method.name=alternate"]),
    (["method.name=crl-gn", "method.objective=none", "split.labels_at=both"], ["split.labels_at = 'server'"]),
]  # fmt: skip


@pytest.mark.parametrize(("sets", "remedies"), FOLLOWED)
def test_what_a_message_says_to_do_helps(sets: list[str], remedies: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config("quickstart", sets)
    assert all(remedy in str(caught.value) for remedy in remedies)
    load_config("quickstart", [*sets, *(remedy.replace("'", '"') for remedy in remedies)])


def test_a_guard_of_ones_own_is_taken_back_where_no_server_trains() -> None:
    sets = ["method.name=alternate", "method.guard=true", "split.server_labels=0"]
    config = load_config("quickstart", sets)
    with pytest.raises(ConfigError, match=r"method.server = 'none' and method.guard=false"):
        assemble.resolve(config, assemble.load_data(config))


def test_more_groups_than_participants() -> None:
    with pytest.raises(ConfigError, match="groups = 4 is more than the 3 participants"):
        load_config(
            "quickstart", ["method.name=grouping", "federation.groups=4", "federation.participants=3"]
        )


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("data = 3", r"\[data\] must be a section"),
        ("[data", "not valid TOML"),
        ('[data]\nname = "digits"', "federation.rounds or federation.epochs"),
        ('[data]\nname = "digits"\npath = "x"\n[federation]\nrounds = 3', "data.name .* or data.path"),
        ('[data]\nname = "mnist"', "data.name = 'mnist' is not one of digits"),
        ("[tain]\nlr = 1", r"unknown section \[tain\]: did you mean train"),
    ],
)
def test_files_with_mistakes(tmp_path: Path, text: str, words: str) -> None:
    file = tmp_path / "mine.toml"
    file.write_text(text)
    with pytest.raises(ConfigError, match=words):
        load_config(file)


def test_configs_that_are_not_there(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="did you mean quickstart"):
        load_config("quickstar")
    with pytest.raises(ConfigError, match=r"cannot read .*no\.toml"):
        load_config(tmp_path / "no.toml")

"""Reads the source of a config: a preset, a TOML file, or a folder that holds ssfl.toml or images."""

import tomllib
from pathlib import Path
from shlex import quote
from typing import Any

from ssfl.core.fields import closest, meant
from ssfl.errors import ConfigError

CONFIGS = Path(__file__).parent / "presets"
PROJECT = "ssfl.toml"
"""The name of the config file in a folder that `ssfl new` made. Commands accept the folder's path in place of
the file's."""


def presets() -> list[str]:
    """Returns the names of the presets, the configs that come with the package."""
    return sorted(path.stem for path in CONFIGS.glob("*.toml"))


def read_source(source: str | Path) -> dict[str, Any]:
    """Returns the settings of a preset, of a TOML file, or of a folder that holds ssfl.toml or images, as
    {section: {key: value}}."""
    if not isinstance(source, str | Path):
        raise ConfigError(
            f"the config is of type {type(source).__name__}: pass the name of a preset, a file or a folder. "
            'To change settings, use ssfl.load_config("quickstart", ["split.users=20"])',
            value=source,
        )
    path = Path(source)
    if path.suffix != ".toml":
        path = CONFIGS / f"{source}.toml"
        if not path.is_file():
            path = Path(source) / PROJECT
        if not path.is_file() and Path(source).is_dir():
            return _read_folder(Path(source))
        if not path.is_file():
            close = closest(str(source), presets())
            hint = meant(close) or f". Presets: {', '.join(presets())}"
            raise ConfigError(
                f"there is no preset or folder {str(source)!r} (a config file must end in .toml){hint}",
                value=str(source),
                fix=close or None,
            )
    try:
        return tomllib.loads(path.read_text("utf-8"))
    except OSError as error:
        close = closest(path.name, [file.name for file in path.parent.glob("*.toml")])
        raise ConfigError(
            f"cannot read the config {path}: {error.strerror}{meant(close)}",
            value=str(source),
            fix=str(path.with_name(close)) if close else None,
        ) from error
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{path} is not valid TOML: {error}", value=str(source)) from error


def _read_folder(folder: Path) -> dict[str, Any]:
    """Returns the settings for a folder of images: those of the preset `own`, with data.path set to the
    folder. Raises if it is a run folder or has no sub-folders."""
    if (folder / "config.toml").is_file():
        command = f"ssfl resume {quote(str(folder))}"
        raise ConfigError(
            f"{folder} is a run folder, not a config: continue it with `{command}`, or start a new run with "
            f"its settings: `ssfl run {quote(str(folder / 'config.toml'))}`",
            value=str(folder),
            fix=command,
        )
    if not is_image_folder(folder):
        raise ConfigError(
            f"{folder} has neither {PROJECT} nor sub-folders that can be read: put the images of each class "
            "into a sub-folder, and unlabelled ones into unlabelled/",
            value=str(folder),
        )
    sections = read_source("own")
    sections["data"] = {**sections.get("data", {}), "path": str(folder)}
    return sections


def is_image_folder(source: str | Path | None) -> bool:
    """Returns whether `source` is a folder of images: it has sub-folders, but no config file."""
    if source is None or (CONFIGS / f"{source}.toml").is_file():
        return False
    folder = Path(source)
    try:
        if not folder.is_dir() or any((folder / name).is_file() for name in (PROJECT, "config.toml")):
            return False
        return any(entry.is_dir() and not entry.name.startswith(".") for entry in folder.iterdir())
    except OSError:
        return False

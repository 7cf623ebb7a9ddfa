"""Writes docs/leaderboard.md from the contest files in results/leaderboard/.

    python -m benchmarks.leaderboard            # writes the page
    python -m benchmarks.leaderboard --check    # exit code 1 if the page is not up to date

Contests with the same protocol (data, split, network and user images) share their tables. The same seed has
the same split in all of them, so methods of different files can be compared seed by seed.
"""

import argparse
import json
import statistics
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ssfl.contest import texts
from ssfl.contest.standings import GUESSING
from ssfl.core.statistics import mean_difference, wilson
from ssfl.models import backbones
from ssfl.runs.provenance import ROOT
from ssfl.runs.text import difference

FILES = ROOT / "results" / "leaderboard"
PAGE = ROOT / "docs" / "leaderboard.md"
ACCURACY = ("method", "test accuracy, %", "points behind the first method (95 % interval)", "seeds",
            "collapsed runs", "images with a label or pseudo-label, %")  # fmt: skip
WORK = ("method", "user images, million", "users' passes, million", "server images, million",
        "chosen settings", "files")  # fmt: skip
CLASSES = {"digits": 10, "cifar10": 10, "svhn": 10, "stl10": 10, "emnist": 47, "cifar10.npz": 10,
           "cifar10-8000.npz": 10, "emnist47.npz": 47}  # fmt: skip
"""The number of classes of data sets, by data.name or by the file's name. Older contest files do not have
it."""
INTRODUCTION = f"""# Leaderboard

Each section of this page compares methods under one protocol, best first. Methods with a diverged run
come after all others, because their mean leaves this run out. The end of the page shows how to add your own
method. The page is for readers who choose a method and for authors of methods. [Contest](contest.md) explains
the protocol, and how each method's learning rate and threshold are chosen.

Each section has two tables. The first has the accuracies, the second the amount of work and the settings.

- **The heading** is the protocol: data set, number of labels at the server, split, network, and training.
  There are K users, and C of them take part in a round. R is the skew of their classes, from 0 (all users
  alike) to 1 (no two users share a class). Each user takes T steps in a round, with batches of B images. The
  number of user images is the length of training.
- **Accuracy** is measured on the test images after the last round. It is the mean and standard deviation
  over seeds. A seed sets the split, the initial weights and the random draws, the same for every method.
- **The interval** is Student's t over the seeds. If it contains 0, these seeds cannot distinguish the method
  from the first one. It covers the splits and the random draws, but not the test images, because all seeds
  use the same ones. And the first method is first partly by luck, so the other methods look slightly worse
  than they are.
- **A run has diverged** if its loss or an update was not finite. The mean of a method is only over its runs
  that did not diverge. A line below the table names each method with a diverged run.
- **A run has collapsed** if it ended more than ten points below its own best validation accuracy, or if
  training diverged.
- **A run stayed near guessing** if its best validation accuracy is less than {GUESSING:g} points above that
  of guessing, which is 100 % divided by the number of classes. Such a run learned almost nothing. The column
  of collapsed runs does not show it, but a line below the table does.
- **Images with a label or pseudo-label**: the part of the users' images that had one and was trained on, as a
  mean over the rounds and seeds. A dash means that it was not recorded, or that no user trained. If it is
  near 0, the contest says little about how the method uses unlabelled images.
- **User images** and **server images** count how many images users and server drew for training. An image
  counts each time it is drawn.
- A **pass** is one forward and one backward computation of the network for one image. The column is the
  total over all users. `semifl` makes two passes for an image, and `fl2` three. `semifl`, `fl2` and
  `cbafed` make none for an image without a pseudo-label.
- **Chosen settings** are the learning rate and the threshold that the contest chose for the method on
  validation images. If no threshold is listed, the method has none or its default was best. "Largest tried"
  or "smallest tried" means that a value outside the tried range may be better. The line below the tables
  says on how many validation images settings were chosen: with few images, a choice may be chance.
  Contests dated before 2026-11-19 tried three learning rates on one split, and did not go on if the smallest
  or largest was best. A method with such a mark may be better than shown there.

**`semifl` has changed** after the contests of letters (`emnist-47`) and photographs (`cifar10-100` and both
contests of `pictures`). It now gives an image that is drawn several times in a round the same label each
time, as published. There, each draw had a label of its own.

**`cbafed` and `rscfed` have changed** after the contests of letters and photographs. There, their rows are
of former versions, which differed from the authors' code in ways that matter. Do not quote them as accuracies
of the published methods. The present versions are closer: [`cbafed`](methods.md#cbafed),
[`rscfed`](methods.md#rscfed). On digits, only these two methods were run again.

If a method was run again under the same protocol, the page shows its newest row.

Older contests are on [another page](results-contest.md). Their rules were less fair to `semifl`, `fl2` and
`cbafed`.
"""
ADD = """
## Add a row

1. Commit your code: results of uncommitted code are refused.
2. Run your method together with a method of the tables, under the same protocol. Take the command below the
   tables and change only `--methods` and `--out`: `--methods my.py:Mine,anchored --out runs/mine`. Here
   `my.py` is your file and `Mine` the method in it ([Add a method](add-a-method.md)). The contest chooses
   the learning rate, and the threshold if your method has one. `--jobs 2` does two runs at the same time.
3. Copy `runs/mine/contest.json` to `results/leaderboard/NAME.json`.
4. Generate this page with `python -m benchmarks.leaderboard`. It reads all files in `results/leaderboard/`.
5. Open a pull request with the JSON file, this page and your method's file.

Another data set or split is another protocol and gets a section of its own. Run at least `anchored`,
`semifl` and `server-only` in it, with three seeds.
"""


class Unfit(Exception):
    """Raised if a contest file cannot be used for the page, for example because it does not say how it was
    made."""


@dataclass(frozen=True)
class Row:
    """The results of one method, and the contest files that have them."""

    standing: dict[str, Any]
    files: tuple[str, ...]

    @property
    def accuracies(self) -> dict[int, float]:
        """The test accuracy of each seed in percent."""
        return {run["seed"]: 100 * run["accuracy"] for run in self.standing["runs"]}


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command. Returns the exit code: 1 if --check finds that the page is not up to date."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.leaderboard", description=__doc__)
    parser.add_argument("--check", action="store_true", help="write nothing")
    check = parser.parse_args(arguments).check
    try:
        made = page(sorted(FILES.glob("*.json")))
    except Unfit as error:
        print(error, file=sys.stderr)
        return 1
    if check:
        fresh = PAGE.is_file() and PAGE.read_text("utf-8") == made
        print(
            "up to date" if fresh else f"{PAGE.name} is not up to date: run python -m benchmarks.leaderboard"
        )
        return int(not fresh)
    PAGE.write_text(made, "utf-8")
    print(PAGE)
    return 0


def page(files: Sequence[Path]) -> str:
    """Returns the whole leaderboard page as Markdown, made from these contest files."""
    tables: dict[str, list[tuple[str, dict[str, Any]]]] = {}
    for file in files:
        contest = json.loads(file.read_text("utf-8"))
        _require_fit(file.name, contest)
        tables.setdefault(protocol(contest), []).append((file.name, contest))
    parts = [INTRODUCTION]
    for title, contests in sorted(tables.items()):
        parts.append(f"\n## {title}\n\n{_tables(contests)}\n")
        for name, contest in contests:
            runs = [run for one in contest["standings"] for run in one["runs"]]
            devices = sorted({run["device"] for run in runs})
            commits = sorted({str(run["commit"])[:7] for run in runs})
            used = [run.get("versions") or contest["versions"] for run in runs]
            versions = ", ".join(_named(used, what) for what in ("ssfl", "torch"))
            parts.append(
                f"\n`{contest['command']}` ([{name}](../results/leaderboard/{name}); {', '.join(devices)}; "
                f"{contest['date'][:10]}; commit {', '.join(commits)}; {versions}).\n"
            )
    return "".join([*parts, ADD])


def _named(versions: list[dict[str, Any]], package: str) -> str:
    """Returns a package's name and which versions of it the runs used, as text."""
    return f"{package} {', '.join(sorted({str(each.get(package, '?')) for each in versions}))}"


def _require_fit(name: str, contest: dict[str, Any]) -> None:
    """Raises `Unfit` if a contest file does not say how it was made, did not tune the learning rate, or comes
    from uncommitted code."""
    for key in ("command", "date", "versions", "standings"):
        if not contest.get(key):
            raise Unfit(f"{name} has no {key}: make it with `ssfl contest`")
    if not contest.get("tuned"):
        raise Unfit(f"{name}: no learning rate was chosen: play it without --no-tune and without --choose")
    for one in contest["standings"]:
        if not one.get("config"):
            raise Unfit(f"{name}: {one['method']} has no resolved config: make it with `ssfl contest`")
        if any(str(run["commit"]).endswith("+") for run in one["runs"]):
            raise Unfit(f"{name}: {one['method']} was played with uncommitted changes: commit them first")


def protocol(contest: dict[str, Any]) -> str:
    """Returns the protocol of a contest as a title, such as its data, split and network. Contests with the
    same title share their tables."""
    one = next((one for one in contest["standings"] if one["images"]), contest["standings"][0])
    data, split, model = (one["config"][section] for section in ("data", "split", "model"))
    federation, train = one["config"]["federation"], one["config"]["train"]
    kinds = {
        "skew": f"R = {split['skew']:g}",
        "dirichlet": f"Dirichlet {split['alpha']:g}" + (", capped" if split.get("capped") else ""),
        "shards": f"{split['classes_per_user']} classes each",
    }
    dealt = kinds.get(split["scheme"], split["scheme"])
    steps = f"T = {federation['period']}"
    if federation.get("local_epochs"):
        steps = f"{federation['local_epochs']:g} local epochs"
    norm = "without normalisation" if model["norm"] == "none" else f"with {model['norm']} normalisation"
    if model["name"] in backbones.NAMES:
        norm = f"with ImageNet weights, of which `{model['train']}` learns"
        norm += f", {model['cached_views']} stored views of an image" if model["cached_views"] else ""
    size = f", {data['size']}×{data['size']} pixels" if data["size"] else ""
    name = data["name"] or f"{contest['source']} (`{Path(data['path']).name}`)"
    return (
        f"{name}: {split['server_labels']:,} labels, K = {split['users']}, "
        f"C = {federation['participants']}, {dealt}{size}; network `{model['name']}` {norm}; {steps}, "
        f"B = {train['batch_size']}, {one['images'] / 1e6:.3g} million user images"
    )


def _tables(contests: Sequence[tuple[str, dict[str, Any]]]) -> str:
    """Returns the two Markdown tables of one protocol, best method first. Methods with diverged seeds come
    after all others. Lines between the tables explain this, and name methods that stayed near guessing."""
    by_date = sorted(contests, key=lambda contest: contest[1]["date"])
    rows = _newest([Row(one, (name,)) for name, contest in by_date for one in contest["standings"]])
    rows.sort(key=lambda row: (row.standing["diverged"] > 0, -(row.standing["mean"] or 0.0)))
    accuracy = [_accuracy(row, None if row is rows[0] else rows[0]) for row in rows]
    notes = "\n".join(f"- {line}" for row in rows for line in _notes(row))
    tables = _markdown(ACCURACY, accuracy), _markdown(WORK, [_work(row) for row in rows])
    return "\n\n".join(filter(None, [tables[0], notes, tables[1], _choices(rows)]))


def _choices(rows: Sequence[Row]) -> str:
    """Returns a line that says on how many validation images the settings were chosen, and how far chance can
    move an accuracy on so many. It is empty if there are no tries."""
    found = [
        tried.get("images", run["validation_images"])
        for row in rows
        for run in row.standing["runs"][:1]
        for tried in row.standing["tries"]
    ]
    if not found:
        return ""
    images = min(found)
    best = max(tried["validation_accuracy"] or 0.0 for row in rows for tried in row.standing["tries"])
    low, high = wilson(best * images, images)
    return (
        f"Settings were chosen on {images:,} validation images. The best accuracy there was "
        f"{100 * best:.1f} %, with a 95 % interval of {100 * low:.1f} to {100 * high:.1f} %."
    )


def _notes(row: Row) -> list[str]:
    """Returns the lines about a method's runs that diverged, collapsed or stayed near guessing."""
    one, name = row.standing, f"`{row.standing['method']}`"
    seeds = len(one["runs"]) + one["diverged"]
    data = one["config"]["data"]
    classes = next((run["classes"] for run in one["runs"] if run.get("classes")), None)
    classes = classes or CLASSES.get(data["name"] or Path(data["path"] or "").name)
    return [
        *texts.diverged(name, one["diverged"], seeds),
        *texts.collapsed(name, one["collapsed"], seeds, tuned=True),
        *texts.guessed(name, one["runs"], seeds, classes)
    ]  # fmt: skip


def _newest(rows: Sequence[Row]) -> list[Row]:
    """Returns one row for each method: its last one, because the method may have changed since the others. If
    other rows have the same settings and accuracies, the row names their files too."""
    found: dict[str, Row] = {}
    for row in rows:
        method = row.standing["method"]
        same = method in found and _result(found[method]) == _result(row)
        found[method] = replace(row, files=(*found[method].files, *row.files)) if same else row
    return list(found.values())


def _result(row: Row) -> tuple[list[str], dict[int, float]]:
    return row.standing["options"], row.accuracies


def _markdown(head: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    return "\n".join(f"| {' | '.join(line)} |" for line in (head, ("---",) * len(head), *lines))


def _accuracy(row: Row, first: Row | None) -> tuple[str, ...]:
    """Returns the cells of a method in the table of accuracies. `first` is the best method, or None if this
    is the best method."""
    one = row.standing
    mean = "diverged" if one["mean"] is None else f"{one['mean']:.2f}"
    mean += "" if one["deviation"] is None else f" ± {one['deviation']:.2f}"
    if one["diverged"] and one["mean"] is not None:
        mean += f" (without {one['diverged']} diverged)"
    masked = [run["mask_rate"] for run in one["runs"] if run.get("mask_rate") is not None]
    rate = 100 * statistics.mean(masked) if masked else 0.0
    labelled = (f"{rate:.0f}" if rate >= 10 else f"{rate:.2g}") if masked else "–"
    seeds, lost = len(one["runs"]) + one["diverged"], one["collapsed"] + one["diverged"]
    return (
        f"`{one['method']}`", mean, "–" if first is None else _between(first, row), str(seeds), str(lost),
        labelled,
    )  # fmt: skip


def _work(row: Row) -> tuple[str, ...]:
    """Returns the cells of a method in the table of work and settings."""
    one = row.standing
    millions = [f"{one[key] / 1e6:.3g}" for key in ("images", "passes", "server_images")]
    chosen = ", ".join(_chosen(option, one["tries"]) for option in one["options"]) or "–"
    links = ", ".join(f"[{Path(file).stem}](../results/leaderboard/{file})" for file in row.files)
    return f"`{one['method']}`", *millions, chosen, links


def _chosen(option: str, tries: Sequence[dict[str, Any]]) -> str:
    """Returns a chosen setting as text, such as "lr=0.1". The text says if it is the largest or smallest
    value that was tried."""
    section = option.partition("=")[0]
    tried = [each for one in tries for each in one["options"] if each.partition("=")[0] == section]
    end = texts.end_of_range(tried, option)
    return option.partition(".")[2] + f" ({end} tried)" * bool(end)


def _between(first: Row, other: Row) -> str:
    """Returns as text how many percentage points the first method is better than the other, with the 95 %
    interval over their common seeds."""
    gap = mean_difference(first.accuracies, other.accuracies)
    return "no common seed" if gap is None else difference(gap)


if __name__ == "__main__":
    sys.exit(main())

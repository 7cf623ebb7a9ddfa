"""The section of a report about the owners of the images: the classes of each user, the measured skew R,
the expected accuracy of each user, and the groups in each round. The charts work for ten users and for
100,000."""

from collections import Counter
from collections.abc import Sequence
from statistics import median

from ssfl.core.events import Event
from ssfl.core.words import count
from ssfl.report.blocks import Block, bars, text
from ssfl.report.gather import Run, finite, numbers, whole
from ssfl.runs.text import percent, untested

MOST_USERS, MOST_CLASSES, MOST_ROUNDS = 50, 200, 40
"""The largest numbers of users, classes and rounds that a chart shows."""


def holdings(run: Run) -> list[Block]:
    """Returns the part of a report that shows how many images of each class the server and the users have:
    sentences and charts."""
    if not run.split:
        return [text("split.json is missing or damaged, so the owners of the images are unknown.")]
    rows = run.user_classes
    server = numbers(run.split.get("server"))
    blocks = [text(" ".join([_sizes(run, server), *_measured(run)]))]
    if not any(value for row in rows for value in row):
        return blocks
    if len(run.classes) <= MOST_CLASSES and all(len(row) == len(run.classes) for row in [server, *rows]):
        blocks.append(_matrix(run, server, rows))
    if run.users > MOST_USERS:
        blocks.append(_variety(run, rows))
    return blocks


def _sizes(run: Run, server: list[float | None]) -> str:
    """Returns a sentence that says how many images the server and the users have. `server` has the server's
    number of images of each class."""
    quartiles = numbers(run.split.get("size_quartiles"))
    server_text = f"The server holds {count(int(_sum(server)), 'labelled image')}."
    sites = run.split.get("sites") or run.split.get("names")
    names = f" ({', '.join(map(str, sites[:10]))})" if isinstance(sites, list) and sites else ""
    if len(quartiles) != 5 or None in quartiles:
        return f"{server_text} There are {count(run.users, 'user')}{names}."
    least, _, middle, _, most = (f"{value or 0:,.0f}" for value in quartiles)
    users = count(run.users, "user")
    return f"{server_text} The {users}{names} have {least} to {most} images each, with a median of {middle}."


def _measured(run: Run) -> list[str]:
    """Returns sentences about the split: the measured skew, how many labels are known, the validation images,
    and classes without test images."""
    skew = finite(run.split.get("measured_skew"))
    sentences = ["The label skew R is unknown because the users' images have no labels."]
    if skew is not None:
        sentences = [f"The measured R is {skew:.4f} (Definition 2 of the paper: 0 is iid, 1 is disjoint)."]
        known, sizes = (
            sum(value or 0 for value in numbers(run.split.get(key))) for key in ("class_totals", "sizes")
        )
        listed = sum(value or 0 for row in run.user_classes for value in row)
        if listed < sizes:
            sentences.append(
                f"The class is known for {known:,.0f} of the users' images; all numbers about classes and "
                "about correct pseudo-labels are for these."
            )
    held, labelled = finite(run.split.get("validation")), finite(run.split.get("user_labelled_total"))
    sentences += [f"{held:,.0f} images are for validation."] if held else []
    sentences += [f"{labelled:,.0f} images of the users have labels."] if labelled else []
    tests = numbers(run.split.get("test_classes"))
    missing = untested(run.classes, tests) if len(tests) == len(run.classes) else []
    return sentences + [f"{line}." for line in missing]


def _matrix(run: Run, server: list[float | None], rows: list[list[float | None]]) -> Block:
    """Returns a chart of the number of images by owner (the server and the users) and class. `server` has the
    server's number of images of each class, and `rows` has one such list for each user. With more than
    `MOST_USERS` users, the chart shows some of them, evenly spaced."""
    sizes, chosen = numbers(run.split.get("sizes")), _some(len(rows), MOST_USERS)
    sizes += [None] * (len(rows) - len(sizes))
    note = "The number of images is in brackets; images without a label are in no class."
    if len(chosen) < run.users:
        note = f"{len(chosen)} of {run.users:,} users, evenly spaced. {note}"
    most = max((value or 0 for row in rows for value in row), default=1)
    return {
        "kind": "matrix", "figure": "who-has-what", "most": most, "title": "Images of each class, by owner",
        "rows": [f"server ({_sum(server):,.0f})", *(f"user {k} ({sizes[k] or 0:,.0f})" for k in chosen)],
        "columns": run.classes, "values": [server, *(rows[k] for k in chosen)], "rowLabel": "owner",
        "columnLabel": "class", "format": "count", "note": note,
    }  # fmt: skip


def _variety(run: Run, rows: list[list[float | None]]) -> Block:
    """Returns a bar chart that shows how many classes the users have. For each user, the fewest classes are
    counted that make up 90 % of its images. A bar is the number of users with a certain count, or with counts
    in a small range.

    The chart is used if there are too many users to show each of them. `rows` has each user's number of
    images of each class.
    """
    needed = Counter(_nine_tenths([value or 0 for value in row]) for row in rows if any(row))
    low, high = min(needed), max(needed)
    width = -(-(high - low + 1) // 12)
    items = []
    for first in range(low, high + 1, width):
        last = min(first + width - 1, high)
        name = count(first, "class") if first == last else f"{first:,} to {last:,} classes"
        items.append({"name": name, "value": sum(needed[k] for k in range(first, last + 1))})
    note = f"For the {len(rows):,} users that split.json lists." if len(rows) < run.users else ""
    title = "Users by the number of classes that make up 90 % of their images"
    return bars("classes-per-user", title, items, "count", note)


def expected(run: Run) -> list[Block]:
    """Returns the part of a report that shows each user's expected accuracy on new images like its own. It is
    the mean of the test accuracies of the classes, weighted by the user's number of images of each class."""
    known = _expected(run)
    if not known:
        return []
    ranked, middle = sorted(known.values()), median(known.values())
    sentence = (
        "On new images with the same classes as a user's own, the expected accuracy is "
        f"{percent(ranked[0])} to {percent(ranked[-1])}, with a median of {percent(middle)}. It is the mean "
        "test accuracy of the classes, weighted by how many images of each class the user has."
    )
    chosen = [list(known)[k] for k in _some(len(known), MOST_USERS)]
    items: list[Block] = [{"name": f"user {user}", "value": known[user]} for user in chosen]
    title = "Accuracy on images like each user's own"
    note = f"{len(chosen)} of {run.users:,} users, evenly spaced." if len(chosen) < run.users else ""
    return [text(sentence), bars("accuracy-by-user", title, items, "percent", note)]


def _expected(run: Run) -> dict[int, float]:
    """Returns the expected accuracy of each user, from 0 to 1. Users for which it is unknown are left out."""
    shares = {user: _mixed(row, run.class_accuracy) for user, row in enumerate(run.user_classes)}
    return {user: share for user, share in shares.items() if share is not None}


def ranges(runs: Sequence[Run]) -> list[str]:
    """Returns sentences that give the smallest and the largest values over several runs of one experiment:
    the number of images of a user, the measured skew R, and the expected accuracy of a user."""
    facts = []
    sizes = [numbers(run.split.get("size_quartiles")) for run in runs]
    known = [value for quartiles in sizes if len(quartiles) == 5 for value in quartiles if value is not None]
    if known:
        facts.append(f"the users have {min(known):,.0f} to {max(known):,.0f} images each")
    skews = [skew for run in runs if (skew := finite(run.split.get("measured_skew"))) is not None]
    if skews:
        low, high = f"{min(skews):.4f}", f"{max(skews):.4f}"
        facts.append(f"the measured R is {low}{f' to {high}' if high != low else ''}")
    shares = [share for run in runs for share in _expected(run).values()]
    if shares:
        facts.append(f"the expected accuracy of a user is {percent(min(shares))} to {percent(max(shares))}")
    if not facts:
        return []
    last = f", and {facts[-1]}" if len(facts) > 1 else facts[0]
    return [f"Over all runs of this experiment, {', '.join(facts[:-1])}{last}."]


def _mixed(row: list[float | None], each: list[float | None]) -> float | None:
    """Returns the mean of the class accuracies `each`, weighted by `row`: one user's number of images of each
    class. Returns None if no class has both images of this user and a known accuracy."""
    if len(row) != len(each):
        return None
    known = [(count, share) for count, share in zip(row, each, strict=True) if count and share is not None]
    total = sum(count for count, _ in known)
    return sum(count * share for count, share in known) / total if total else None


def groups(run: Run) -> list[Block]:
    """Returns the part of a report that shows which users took part in which round, and in which group."""
    known = [event for event in run.rounds if isinstance(event.get("returned"), list)]
    with_users = [event for event in known if event["returned"] or event.get("participants")]
    if not with_users or not run.config.method.trains_users:
        return []  # no user has trained yet, or the method trains none
    attendance = Counter(user for event in with_users for user in whole(event["returned"]))
    times = sorted(attendance.values()) or [0]
    if not run.grouped and len(attendance) == run.users and times[0] == times[-1] == len(with_users):
        which = (
            "every round"
            if with_users == known
            else f"each of the {count(len(with_users), 'round')} in which users trained"
        )
        return [text(f"There is one group, and all users took part in {which}.")]
    if not attendance:
        return [text(_attendance(run, with_users, attendance, times))]
    shown, people = with_users[:MOST_ROUNDS], sorted(attendance)
    chosen = [people[k] for k in _some(len(people), MOST_USERS)]
    dealt = [_dealt(event, run.grouped) for event in shown]
    notes = [
        "The number is the user's group. A cell is empty if the user did not take part in the round."
        if run.grouped
        else "1: the user took part in the round."
    ]
    if len(chosen) < run.users:
        notes.append(f"{len(chosen)} of {run.users:,} users, evenly spaced among those that took part.")
    if len(shown) < len(with_users):
        notes.append(f"The first {len(shown)} of {len(with_users):,} rounds.")
    return [
        text(_attendance(run, with_users, attendance, times)),
        {
            "kind": "matrix", "figure": "groups", "kinds": True, "format": "count",
            "title": "The group of each user, by round" if run.grouped else "Who took part, by round",
            "rows": [f"user {user}" for user in chosen], "columns": [f"{event['round']}" for event in shown],
            "values": [[place.get(user) for place in dealt] for user in chosen],
            "rowLabel": "user", "columnLabel": "round", "note": " ".join(notes),
        },
    ]  # fmt: skip


def _attendance(run: Run, rounds_played: list[Event], attendance: Counter[int], times: list[int]) -> str:
    """Returns sentences that say how often users took part, how many updates did not arrive, and how many
    were refused by the gate (federation.gate).

    `attendance` maps each user to the number of rounds in which its update arrived, and `times` are these
    numbers in ascending order. `rounds_played` are the events of the rounds.
    """
    often = f"{times[0]:,}" if times[0] == times[-1] else f"{times[0]:,} to {times[-1]:,}"
    rounds = count(len(rounds_played), "round")
    sentence = f"In {rounds}, {len(attendance):,} of {run.users:,} users sent an update, {often} times each."
    sent = sum(len(whole(event.get("participants"))) for event in rounds_played)
    lost = sent - sum(attendance.values())
    refused = sum(len(event["refused"]) for event in rounds_played if isinstance(event.get("refused"), dict))
    sentence += f" {count(lost, 'update')} did not arrive (dropout)." if lost > 0 else ""
    return sentence + (f" The gate refused {count(refused, 'update')}." if refused else "")


def _dealt(event: Event, grouped: bool) -> dict[int, int]:
    """Returns the group number of each user whose update arrived in this round. Groups are numbered from 1;
    without grouping it is always 1."""
    groups = event.get("groups") if grouped else [event["returned"]]
    members = enumerate(groups, 1) if isinstance(groups, list) else ()
    return {user: place for place, group in members for user in whole(group)}


def _some(many: int, most: int) -> list[int]:
    """Returns at most `most` of the numbers 0, 1, ..., many - 1, evenly spaced."""
    return list(range(many)) if many <= most else [k * many // most for k in range(most)]


def _sum(values: list[float | None]) -> float:
    """Returns the sum of the values, with None as 0."""
    return sum(value or 0 for value in values)


def _nine_tenths(values: list[float]) -> int:
    """Returns how many of the largest values are needed to reach 90 % of the sum of all values."""
    total, needed = 0.0, 0
    for value in sorted(values, reverse=True):
        if total >= 0.9 * sum(values):
            break
        total, needed = total + value, needed + 1
    return needed

"""Who has what and what it is worth to them: classes by user, the measured R, accuracy in each user's mix of
classes, the groups of the rounds; of ten users or of 100,000."""

from collections import Counter

from ssfl.core.events import Event
from ssfl.report.blocks import Block, bars, text
from ssfl.report.gather import Run, finite, numbers, whole
from ssfl.report.words import count
from ssfl.runs.text import percent, untested

MOST_USERS, MOST_CLASSES, MOST_ROUNDS = 50, 200, 40


def holdings(run: Run) -> list[Block]:
    """What everybody holds."""
    if not run.split:
        return [text("split.json is missing or damaged: who has what is not known.")]
    rows = run.user_classes
    server = numbers(run.split.get("server"))
    made = [text(" ".join([_sizes(run, server), *_measured(run)]))]
    if not any(value for row in rows for value in row):
        return made
    if len(run.classes) <= MOST_CLASSES and all(len(row) == len(run.classes) for row in [server, *rows]):
        made.append(_matrix(run, server, rows))
    if run.users > MOST_USERS:
        made.append(_variety(run, rows))
    return made


def _sizes(run: Run, server: list[float | None]) -> str:
    quartiles = numbers(run.split.get("size_quartiles"))
    told = f"The server holds {count(int(_sum(server)), 'labelled image')}."
    sites = run.split.get("sites") or run.split.get("names")
    names = f" ({', '.join(map(str, sites[:10]))})" if isinstance(sites, list) and sites else ""
    if len(quartiles) != 5 or None in quartiles:
        return f"{told} There are {count(run.users, 'user')}{names}."
    least, _, middle, _, most = (f"{value or 0:,.0f}" for value in quartiles)
    users = count(run.users, "user")
    return f"{told} The {users}{names} hold {least} to {most} images each, half of them at most {middle}."


def _measured(run: Run) -> list[str]:
    skew = finite(run.split.get("measured_skew"))
    told = ["The label skew R is unknown because the users' images have no labels."]
    if skew is not None:
        told = [f"The measured R is {skew:.4f} (Definition 2 of the paper: 0 is iid, 1 is disjoint)."]
        known, sizes = (
            sum(value or 0 for value in numbers(run.split.get(key))) for key in ("class_totals", "sizes")
        )
        listed = sum(value or 0 for row in run.user_classes for value in row)
        if listed < sizes:
            told.append(
                f"Classes are known of {known:,.0f} of the users' images; what is said of classes and of "
                "right labels is of these."
            )
    held, labelled = finite(run.split.get("validation")), finite(run.split.get("user_labelled_total"))
    told += [f"{held:,.0f} images were set aside for validation."] if held else []
    told += [f"{labelled:,.0f} images of the users have labels."] if labelled else []
    tests = numbers(run.split.get("test_classes"))
    missing = untested(run.classes, tests) if len(tests) == len(run.classes) else []
    return told + [f"There is {line}." for line in missing]


def _matrix(run: Run, server: list[float | None], rows: list[list[float | None]]) -> Block:
    sizes, chosen = numbers(run.split.get("sizes")), _some(len(rows), MOST_USERS)
    sizes += [None] * (len(rows) - len(sizes))
    note = "In brackets, how many images each holds; those without a label are in no class."
    if len(chosen) < run.users:
        note = f"{len(chosen)} of {run.users:,} users, evenly chosen. {note}"
    most = max((value or 0 for row in rows for value in row), default=1)
    return {
        "kind": "matrix", "figure": "who-has-what", "most": most, "title": "Images of each class, by owner",
        "rows": [f"server ({_sum(server):,.0f})", *(f"user {k} ({sizes[k] or 0:,.0f})" for k in chosen)],
        "columns": run.classes, "values": [server, *(rows[k] for k in chosen)], "rowLabel": "owner",
        "columnLabel": "class", "format": "count", "note": note,
    }  # fmt: skip


def _variety(run: Run, rows: list[list[float | None]]) -> Block:
    """Of many users: how many classes they have, most of all."""
    needed = Counter(_nine_tenths([value or 0 for value in row]) for row in rows if any(row))
    low, high = min(needed), max(needed)
    width = -(-(high - low + 1) // 12)
    items = []
    for first in range(low, high + 1, width):
        last = min(first + width - 1, high)
        name = count(first, "class") if first == last else f"{first:,} to {last:,} classes"
        items.append({"name": name, "value": sum(needed[k] for k in range(first, last + 1))})
    note = f"Of the {len(rows):,} users that split.json lists." if len(rows) < run.users else ""
    title = "Users by the number of classes that make up nine tenths of their images"
    return bars("classes-per-user", title, items, "count", note)


def expected(run: Run) -> list[Block]:
    """What each user may expect of the model: the accuracy of every class, in its own mix of classes."""
    shares = {user: _mixed(row, run.class_accuracy) for user, row in enumerate(run.user_classes)}
    found = {user: share for user, share in shares.items() if share is not None}
    if not found:
        return []
    ranked = sorted(found.values())
    middle = (ranked[(len(ranked) - 1) // 2] + ranked[len(ranked) // 2]) / 2
    said = (
        f"On new images with the classes that each user has, the accuracy is {percent(ranked[0])} to "
        f"{percent(ranked[-1])}, {percent(middle)} in the middle: the accuracy of each class on the test "
        "images, in each user's mix."
    )
    chosen = [list(found)[k] for k in _some(len(found), MOST_USERS)]
    items: list[Block] = [{"name": f"user {user}", "value": found[user]} for user in chosen]
    title = "Accuracy on images like each user's own"
    note = f"{len(chosen)} of {run.users:,} users, evenly chosen." if len(chosen) < run.users else ""
    return [text(said), bars("accuracy-by-user", title, items, "percent", note)]


def _mixed(row: list[float | None], each: list[float | None]) -> float | None:
    """The mean accuracy of classes, weighed by how many images of each there are."""
    if len(row) != len(each):
        return None
    known = [(count, share) for count, share in zip(row, each, strict=True) if count and share is not None]
    total = sum(count for count, _ in known)
    return sum(count * share for count, share in known) / total if total else None


def groups(run: Run) -> list[Block]:
    """Who was in which group of which round."""
    known = [event for event in run.rounds if isinstance(event.get("returned"), list)]
    told = [event for event in known if event["returned"] or event.get("participants")]
    if not told or not run.config.method.trains_users:
        return []  # so far the server played alone
    came = Counter(user for event in told for user in whole(event["returned"]))
    times = sorted(came.values()) or [0]
    if not run.grouped and len(came) == run.users and times[0] == times[-1] == len(told):
        which = "every round" if told == known else f"each of the {count(len(told), 'round')} with users"
        return [text(f"There is one group, and everybody was in it in {which}.")]
    if not came:
        return [text(_attendance(run, told, came, times))]
    shown, people = told[:MOST_ROUNDS], sorted(came)
    chosen = [people[k] for k in _some(len(people), MOST_USERS)]
    dealt = [_dealt(event, run.grouped) for event in shown]
    notes = ["Cells give the group; who has none did not take part." if run.grouped else "1: took part."]
    if len(chosen) < run.users:
        notes.append(f"{len(chosen)} of {run.users:,} users, evenly chosen of those that took part.")
    if len(shown) < len(told):
        notes.append(f"The first {len(shown)} of {len(told):,} rounds.")
    return [
        text(_attendance(run, told, came, times)),
        {
            "kind": "matrix", "figure": "groups", "kinds": True, "format": "count",
            "title": "The group of each user, by round" if run.grouped else "Who took part, by round",
            "rows": [f"user {user}" for user in chosen], "columns": [f"{event['round']}" for event in shown],
            "values": [[place.get(user) for place in dealt] for user in chosen],
            "rowLabel": "user", "columnLabel": "round", "note": " ".join(notes),
        },
    ]  # fmt: skip


def _attendance(run: Run, told: list[Event], came: Counter[int], times: list[int]) -> str:
    often = f"{times[0]:,}" if times[0] == times[-1] else f"{times[0]:,} to {times[-1]:,}"
    rounds = count(len(told), "round")
    said = f"In {rounds}, {len(came):,} of {run.users:,} users gave a model, {often} times each."
    sent = sum(len(whole(event.get("participants"))) for event in told)
    lost = sent - sum(came.values())
    refused = sum(len(event["refused"]) for event in told if isinstance(event.get("refused"), dict))
    said += f" {count(lost, 'model')} did not come back." if lost > 0 else ""
    return said + (f" The gate refused {count(refused, 'model')}." if refused else "")


def _dealt(event: Event, grouped: bool) -> dict[int, int]:
    """The group of each user that came back, from 1."""
    found = event.get("groups") if grouped else [event["returned"]]
    members = enumerate(found, 1) if isinstance(found, list) else ()
    return {user: place for place, group in members for user in whole(group)}


def _some(many: int, most: int) -> list[int]:
    """At most so many of the places 0 to many - 1, evenly."""
    return list(range(many)) if many <= most else [k * many // most for k in range(most)]


def _sum(values: list[float | None]) -> float:
    return sum(value or 0 for value in values)


def _nine_tenths(values: list[float]) -> int:
    """How many of the values, the largest first, make up nine tenths of their sum."""
    total, needed = 0.0, 0
    for value in sorted(values, reverse=True):
        if total >= 0.9 * sum(values):
            break
        total, needed = total + value, needed + 1
    return needed

"""The section of a report about the costs of runs: time by phase, bytes sent, and memory."""

from collections.abc import Sequence

from ssfl.report.blocks import Block, Cell, bars, number, table, text
from ssfl.report.gather import Run, finite, inside
from ssfl.runs.text import duration

PHASES = {
    "users": "users train",
    "server": "server trains",
    "features": "computing features of new views",
    "diversity": "gradient diversity",
    "other": "other work in the rounds",
    "evaluation": "evaluations",
    "checkpoint": "checkpoints",
}
"""The phases of a run in the events, and their names in the report."""
_NOTE = """The time per round is the median. Bytes count the models only, without protocol overhead. Memory is
the peak of the main process (and of its GPU, if any), without additional processes that train users."""


def blocks(runs: Sequence[Run]) -> list[Block]:
    """Returns the charts and tables of the report's costs section: a table of the runs and, for a single run,
    a chart of its time by phase."""
    made: list[Block] = []
    if len(runs) == 1:
        items: list[Block] = [
            {"name": PHASES[name], "value": value} for name, value in phases(runs[0]).items()
        ]
        if items:
            made.append(bars("time", "Time by phase", items, "seconds"))
        else:
            made.append(text("This run did not record the time of its phases."))
    rows: list[list[Cell]] = []
    for run in runs:
        cost = totals(run)
        cells = duration(cost["seconds"]), duration(cost["round"]), *(size(cost[key]) for key in _BYTES)
        device = str(run.summary.get("device") or run.config.run.device)
        rows.append([run.name, *map(number, (*cells, _memory(run))), device])
    head = ("time of all rounds", "per round", "sent by users", "sent to users", "peak memory")
    return [*made, table(["run", *map(number, head), "device"], rows), text(_NOTE, "note")]


_BYTES = ("bytes_up", "bytes_down")


def phases(run: Run) -> dict[str, float]:
    """Returns the seconds that a run spent in each phase; {} if it did not record them. "other" is the time
    within rounds that belongs to no recorded phase."""
    if not any("phases" in event for event in run.rounds):
        return {}
    seconds = dict.fromkeys(PHASES, 0.0)
    for event in run.rounds:
        for name in PHASES:
            seconds[name] += finite(inside(event.get("phases"), name)) or 0.0
    inside_rounds = sum(seconds[name] for name in ("users", "server", "features", "diversity"))
    seconds["other"] = _sum(run, "seconds") - inside_rounds
    seconds["evaluation"] = _sum(run, "seconds", "eval")
    return {name: value for name, value in seconds.items() if value > 0}


def totals(run: Run) -> dict[str, float]:
    """Returns a run's costs: "seconds" of all rounds and evaluations, the median seconds of a "round", and
    the bytes that users sent and received ("bytes_up", "bytes_down")."""
    seconds = sorted(value for _, value in run.series("seconds"))
    return {
        "seconds": sum(seconds) + _sum(run, "seconds", "eval"),
        "round": seconds[len(seconds) // 2] if seconds else 0.0,
        **{key: _sum(run, key) for key in _BYTES},
    }


def size(count: float) -> str:
    """Returns a number of bytes as text such as "1.2 MB". Units are decimal: 1 kB is 1,000 bytes."""
    for unit in ("B", "kB", "MB", "GB", "TB"):
        if count < 999.5:
            return f"{count:.3g} {unit}"
        count /= 1000
    return f"{count:.3g} PB"


def _memory(run: Run) -> str:
    """Returns the last recorded peak memory of a run as text, for the CPU and the GPU."""
    readings = [event["memory"] for event in run.events if isinstance(event.get("memory"), dict)]
    peaks = [(finite(readings[-1].get(kind)), kind) for kind in ("cpu", "gpu")] if readings else []
    where = {"cpu": "", "gpu": " on the GPU"}
    return ", ".join(size(count) + where[kind] for count, kind in peaks if count) or "not recorded"


def _sum(run: Run, key: str, kind: str = "round") -> float:
    """Returns the sum of a field over all events of one kind."""
    return sum(value for _, value in run.series(key, kind))

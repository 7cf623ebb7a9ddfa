"""What a run costs: time by phase, bytes sent, memory."""

from collections.abc import Sequence

from ssfl.report.blocks import Block, Cell, bars, number, table, text
from ssfl.report.gather import Run, finite, inside
from ssfl.runs.text import duration

PHASES = {
    "users": "users train",
    "server": "server trains",
    "diversity": "gradient diversity",
    "other": "the rest of rounds",
    "evaluation": "evaluations",
    "checkpoint": "checkpoints",
}
_NOTE = """A round's time is the median. Bytes are those of the models sent, without the envelope. Memory is
the peak of the main process (and of its GPU, if any), without processes that train users beside it."""


def blocks(found: Sequence[Run]) -> list[Block]:
    """The costs of one run or several."""
    made: list[Block] = []
    if len(found) == 1:
        items: list[Block] = [
            {"name": PHASES[name], "value": value} for name, value in phases(found[0]).items()
        ]
        if items:
            made.append(bars("time", "Time by phase", items, "seconds"))
        else:
            made.append(text("This run did not record the time of its phases."))
    rows: list[list[Cell]] = []
    for run in found:
        cost = totals(run)
        cells = duration(cost["seconds"]), duration(cost["round"]), *(size(cost[key]) for key in _BYTES)
        device = str(run.summary.get("device") or run.config.run.device)
        rows.append([run.name, *map(number, (*cells, _memory(run))), device])
    head = ("time", "per round", "sent by users", "sent to users", "peak memory")
    return [*made, table(["run", *map(number, head), "device"], rows), text(_NOTE, "note")]


_BYTES = ("bytes_up", "bytes_down")


def phases(run: Run) -> dict[str, float]:
    """Seconds by phase; "other" is what rounds took beyond the phases inside them."""
    if not any("phases" in event for event in run.rounds):
        return {}
    found = dict.fromkeys(PHASES, 0.0)
    for event in run.rounds:
        for name in PHASES:
            found[name] += finite(inside(event.get("phases"), name)) or 0.0
    found["other"] = _sum(run, "seconds") - found["users"] - found["server"] - found["diversity"]
    found["evaluation"] = _sum(run, "seconds", "eval")
    return {name: value for name, value in found.items() if value > 0}


def totals(run: Run) -> dict[str, float]:
    """Seconds of rounds and evaluations, of the middle round, and bytes."""
    seconds = sorted(value for _, value in run.told("seconds"))
    return {
        "seconds": sum(seconds) + _sum(run, "seconds", "eval"),
        "round": seconds[len(seconds) // 2] if seconds else 0.0,
        **{key: _sum(run, key) for key in _BYTES},
    }


def size(count: float) -> str:
    """Bytes that a person reads, in powers of a thousand."""
    for unit in ("B", "kB", "MB", "GB", "TB"):
        if count < 999.5:
            return f"{count:.3g} {unit}"
        count /= 1000
    return f"{count:.3g} PB"


def _memory(run: Run) -> str:
    told = [event["memory"] for event in run.events if isinstance(event.get("memory"), dict)]
    found = [(finite(told[-1].get(kind)), kind) for kind in ("cpu", "gpu")] if told else []
    where = {"cpu": "", "gpu": " on the GPU"}
    return ", ".join(size(count) + where[kind] for count, kind in found if count) or "not recorded"


def _sum(run: Run, key: str, kind: str = "round") -> float:
    return sum(value for _, value in run.told(key, kind))

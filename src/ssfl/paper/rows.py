"""The fifty rows of the paper's experiment table (Appendix A.5), with all settings of every run.

The symbols are the paper's. R is the skew, T the number of local steps per round, and N_s the number of
labelled images at the server. C is the number of participants per round, K the number of users, S the number
of groups, and E the number of epochs. The paper's table prints "-" for S if S follows from C, and for N_s if
the server has no data.

`published` is the accuracy in percent that the paper prints for a run, and `where` is the table or figure
with this number.
"""

from dataclasses import dataclass, replace
from itertools import product
from typing import Any

from ssfl.errors import ConfigError

TENTHS = tuple(tenth / 10 for tenth in range(11))
PERIODS = (2, 4, 8, 16, 32)
LABELS = (1000, 2000, 3000, 4000, 5000)
NAMES = {
    "grouping": "Grouping-based", "crl-gn": "FedAvg", "crl-bn": "CRL with BN",
    "self-training": "Self-training",
    "supervised": "Supervised FedAvg", "supervised-grouping": "Supervised grouping", "fixmatch": "FixMatch",
    "data-sharing": "DataSharing", "easgd": "EASGD", "overlap-sgd": "OverlapSGD", "fedmatch": "FedMatch",
    "anchored": "Anchored",
    "alternate": "Alternate",
}  # fmt: skip
"""The name of each method in tables and figures. For methods of the paper, it is the paper's name."""


@dataclass(frozen=True)
class PaperRun:
    """One training run of the paper: a data set, a method, and the values of the factors that the paper
    varies."""

    data: str
    method: str
    skew: float
    """R, the skew: how different the users' class mixtures are, from 0 to 1."""
    period: int
    """T, the number of local steps per round."""
    server_labels: int
    """N_s, the number of labelled images at the server; 0 if the server has no data."""
    participants: int
    """C, the number of users that take part in a round."""
    users: int
    """K, the number of all users."""
    groups: int | None
    """S, the number of groups; None if the method does not use grouping."""
    epochs: int | None = None
    """E, the number of epochs; None for the usual number of the data set."""
    labels_at: str = "server"
    """Who has the labelled images: "server" or "users"."""
    published: float | None = None
    """The test accuracy in percent that the paper prints for this run; None if it prints none."""
    where: str = ""
    """The table or figure of the paper that prints the accuracy of this run; empty if none does."""

    @property
    def name(self) -> str:
        """The name of the run, made from its settings. So the same run in two rows has the same name, and is
        trained once."""
        parts = [
            self.data, self.method, f"R{self.skew:g}", f"T{self.period}", f"Ns{self.server_labels}",
            f"C{self.participants}", f"K{self.users}",
        ]  # fmt: skip
        parts += [f"S{self.groups}"] if self.groups else []
        parts += [f"E{self.epochs}"] if self.epochs else []
        parts += ["labels-at-users"] if self.labels_at == "users" else []
        return "-".join(parts)


@dataclass(frozen=True)
class Row:
    """One row of the paper's experiment table: runs in which one factor varies."""

    number: int | str
    title: str
    where: str
    """The table or figure of the paper that shows the results of the row."""
    runs: tuple[PaperRun, ...]
    note: str = ""


def _row(
    number: int | str,
    title: str,
    where: str,
    data: str,
    method: str | tuple[str, ...],
    *,
    R: float | tuple[float, ...] = 0.4,
    T: int | tuple[int, ...] = 16,
    Ns: int | tuple[int, ...] = 1000,
    C: int | tuple[int, ...] = 10,
    K: int | tuple[int, ...] = 10,
    S: int | None = None,
    published: dict[tuple[str, float], tuple[float, str]] | None = None,
    note: str = "",
    labels_at: str = "server",
) -> Row:
    """Returns a row with one run for every combination of the given values. R, T, Ns, C, K and S are the
    paper's symbols, which the beginning of this file explains. A tuple means that this factor varies. If S is
    None, the number of groups follows from C.

    `published` has the accuracies that the paper prints, as (percent, where printed). Its keys are (method,
    value of the varying factor); the value is 0 if no factor varies.
    """

    def each(value: Any) -> tuple[Any, ...]:
        return value if isinstance(value, tuple) else (value,)

    factors = (R, T, Ns, C, K)
    runs = []
    for name, *values in product(*map(each, (method, *factors))):
        varying = [
            value
            for value, factor_values in zip(values, factors, strict=True)
            if isinstance(factor_values, tuple)
        ]
        skew, period, labels, participants, users = values
        groups = (S or max(2, -(-participants // 10))) if "grouping" in name else None
        accuracy, printed = (published or {}).get((name, varying[0] if varying else 0), (None, ""))
        factor = (skew, period, labels, participants, users, groups)
        runs.append(PaperRun(data, name, *factor, labels_at=labels_at, published=accuracy, where=printed))
    return Row(number, title, where, tuple(runs), note)


_G, _F = "grouping", "crl-gn"
_T1, _T2 = "Table 1", "Table 2"
_BOTH = (_F, _G)


def _printed(method: str, where: str, **accuracies: float) -> dict[tuple[str, float], tuple[float, str]]:
    """Returns the accuracies that the paper prints for a method, in the form that `_row` takes. The name of
    each argument encodes a value of the factor that varies in the row. So x10=92.86 means 92.86 % if this
    factor is 10, and R04=92.86 means 92.86 % if R is 0.4."""
    return {
        (method, int(key[1:]) / (10 if key[0] == "R" else 1)): (accuracy, where)
        for key, accuracy in accuracies.items()
    }


_ROWS_1_18 = (
    _row(1, "Impact of R", "Figure 5, left", "cifar10", _G, R=TENTHS,
         published=_printed(_G, "text", R00=93.42, R10=81.7) | _printed(_G, _T1, R04=92.86)),
    _row(2, "Impact of R", "Figure 5, left", "svhn", _G, R=TENTHS,
         published=_printed(_G, "text", R00=95.32, R10=92.49) | _printed(_G, _T1, R04=95.49)),
    _row(3, "Impact of R", "Figure 5, left", "emnist", _G, R=TENTHS, Ns=4700, K=47,
         published=_printed(_G, "text", R00=84.43, R10=82.69) | _printed(_G, _T2, R04=84.43),
         note="84.43 is printed both for R=0 (text) and for R=0.4 (Table 2)"),
    _row(4, "Impact of T", "Figure 5, middle; Figure B.1", "cifar10", _G, T=PERIODS,
         published=_printed(_G, _T1, x16=92.86) | _printed(_G, "Table 4", x32=92.96)),
    _row(5, "Impact of T", "Figure 5, middle", "svhn", _G, T=PERIODS,
         published=_printed(_G, _T1, x16=95.49)),
    _row(6, "Impact of T", "Figure 5, middle", "emnist", _G, T=PERIODS, Ns=4700, K=47,
         published=_printed(_G, _T2, x16=84.43)),
    _row(7, "Impact of Ns", "Figure 5, right", "cifar10", _G, Ns=LABELS,
         published=_printed(_G, _T1, x1000=92.86), note="the text says that 5000 labels gain 1.92 points"),
    _row(8, "Impact of Ns", "Figure 5, right", "svhn", _G, Ns=LABELS,
         published=_printed(_G, _T1, x1000=95.49), note="the text says that 5000 labels gain 0.66 points"),
    _row(9, "Impact of Ns", "Figure 5, right", "emnist", _G, Ns=LABELS, K=47,
         note="the text says that 5000 labels gain 2.07 points"),
    _row(10, "Impact of C", _T1, "cifar10", _G, published=_printed(_G, _T1, x0=92.86)),
    _row(11, "Impact of C", _T1, "cifar10", _G, C=(10, 20), K=20,
         published=_printed(_G, _T1, x10=93.19, x20=92.93)),
    _row(12, "Impact of C", _T1, "cifar10", _G, C=(10, 30), K=30,
         published=_printed(_G, _T1, x10=92.84, x30=92.12)),
    _row(13, "Impact of C", _T1, "svhn", _G, published=_printed(_G, _T1, x0=95.49)),
    _row(14, "Impact of C", _T1, "svhn", _G, C=(10, 20), K=20,
         published=_printed(_G, _T1, x10=95.43, x20=94.99)),
    _row(15, "Impact of C", f"{_T1}; Figure C.1", "svhn", _G, C=(10, 30), K=30,
         published=_printed(_G, _T1, x10=93.56, x30=78.77),
         note="Appendix C also trains K=C=30 for E=120, with an accuracy of 94.93"),
    _row(16, "Impact of C", f"{_T2}; Figures 6 and D", "emnist", _BOTH, C=(10, 30, 47), Ns=4700, K=47,
         published=_printed(_F, _T2, x10=83.07, x30=79.05, x47=65.48)
         | _printed(_G, _T2, x10=84.43, x30=83.12, x47=82.95),
         note="the row names only grouping, but Table 2 also prints FedAvg"),
    _row(17, "Impact of K", _T1, "cifar10", _G, K=(10, 20, 30),
         published=_printed(_G, _T1, x10=92.86, x20=93.19, x30=92.84)),
    _row(18, "Impact of K", _T1, "svhn", _G, K=(10, 20, 30),
         published=_printed(_G, _T1, x10=95.49, x20=95.43, x30=93.56)),
)  # fmt: skip

_VERSUS = "FedAvg vs. grouping-based"
_SUPERVISED = ("supervised", "supervised-grouping")
_ROWS_19_37 = (
    _row(19, _VERSUS, f"{_T1}; Figure 4", "cifar10", _BOTH, S=2,
         published=_printed(_G, _T1, x0=92.86)),
    _row(20, _VERSUS, _T1, "svhn", _BOTH, C=20, K=20, S=2, published=_printed(_G, _T1, x0=94.99)),
    _row(21, _VERSUS, f"{_T2}; Figures 6 and D", "emnist", _BOTH, Ns=4700, C=47, K=47, S=5,
         published=_printed(_F, _T2, x0=65.48) | _printed(_G, _T2, x0=82.95)),
    _row(22, "Comparison with supervised FL", "Table 4", "cifar10", "supervised", R=0.29, T=32, Ns=0,
         published=_printed("supervised", "Table 4", x0=78.52), note="the server has no data"),
    _row(23, "Comparison with supervised FL", "Table 4", "cifar10", "data-sharing", R=0.29, T=32, Ns=2500,
         published=_printed("data-sharing", "Table 4", x0=81.82),
         note="the paper does not print the size of the shared set; here it is 2,500 images, 5 % of the "
         "training set"),
    _row(24, "Comparison with supervised FL", "Table 4", "cifar10", _F, T=32),
    _row(25, "Comparison with supervised FL", "Table 4", "cifar10", _G, T=32, S=2,
         published=_printed(_G, "Table 4", x0=92.96)),
    _row(26, "Comparison with EASGD and OverlapSGD", "Table 5", "cifar10", "easgd", T=(2, 8), Ns=0,
         C=16, K=16, published=_printed("easgd", "Table 5", x2=91.12, x8=88.88),
         note="the server has no data"),
    _row(27, "Comparison with EASGD and OverlapSGD", "Table 5", "cifar10", "overlap-sgd", T=(2, 8), Ns=0,
         C=16, K=16, published=_printed("overlap-sgd", "Table 5", x2=91.63, x8=91.45),
         note="the server has no data"),
    _row(28, "Comparison with EASGD and OverlapSGD", "Table 5", "cifar10", _F, T=(2, 8, 32), C=16, K=16),
    _row(29, "Comparison with EASGD and OverlapSGD", "Table 5", "cifar10", _G, T=(2, 8, 32), C=16, K=16, S=2,
         published=_printed(_G, "Table 5", x2=94.22, x8=93.58, x32=91.92)),
    _row(30, "Impact of the ratio C/K", "Table E.1", "cifar10", _BOTH, C=(3, 6, 10, 30), K=30,
         published=_printed(_G, "Table E.1", x3=82.48, x6=92.08, x10=92.84, x30=92.12)),
    _row(31, "Impact of the ratio C/K", "Table E.1", "svhn", _BOTH, C=(3, 6, 10, 30), K=30,
         published=_printed(_G, "Table E.1", x3=92.83, x6=93.42, x10=93.56, x30=78.77)),
    _row(32, "Fully supervised FL", "Table F.1", "emnist", _SUPERVISED, Ns=4700, C=10, K=10, S=2,
         published=_printed("supervised", "Table F.1", x0=86.19)
         | _printed("supervised-grouping", "Table F.1", x0=86.29)),
    _row(33, "Fully supervised FL", "Table F.1", "emnist", _SUPERVISED, Ns=4700, C=20, K=20, S=2,
         published=_printed("supervised", "Table F.1", x0=86.14)
         | _printed("supervised-grouping", "Table F.1", x0=86.27)),
    _row(34, "Fully supervised FL", "Table F.1", "emnist", _SUPERVISED, Ns=4700, C=47, K=47, S=5,
         published=_printed("supervised", "Table F.1", x0=84.71)
         | _printed("supervised-grouping", "Table F.1", x0=84.97)),
    _row(35, "Grouping-based vs. FixMatch", "Table G.1", "cifar10", _G, Ns=4000, S=2,
         published=_printed(_G, "Table G.1", x0=92.86),
         note="Table 1 prints the same accuracy for Ns=1000"),
    _row(36, "Grouping-based vs. FixMatch", "Table G.1", "svhn", _G, C=20, K=20, S=2,
         published=_printed(_G, "Table G.1", x0=95.49), note="Table 1 prints 94.99 for K=C=20"),
    _row(37, "Grouping-based vs. FixMatch", "Table G.1", "emnist", _G, Ns=4700, C=47, K=47, S=5,
         published=_printed(_G, "Table G.1", x0=81.63), note="Table 2 prints 82.95 for the same setting"),
)  # fmt: skip

_FIXMATCH = (
    "one model, trained with L_s + L_k in every step, so rounds of 16 steps are the same training as T=1; "
    "the accuracies for CIFAR-10 and SVHN are from the FixMatch paper, which uses another network"
)
_LARGE = "the table prints K=47, the text and Table J.1 say 470"
_JEONG = "200 rounds, as in FedMatch; some runs have the 5,000 labels at the server, others at the users"
_ROWS_38_50 = (
    _row(38, "Grouping-based vs. FixMatch", "Table G.1", "cifar10", "fixmatch", R=0.0, T=1, Ns=4000, C=1, K=1,
         published=_printed("fixmatch", "Table G.1", x0=95.74), note=_FIXMATCH),
    _row(39, "Grouping-based vs. FixMatch", "Table G.1", "svhn", "fixmatch", R=0.0, T=1, C=1, K=1,
         published=_printed("fixmatch", "Table G.1", x0=97.72), note=_FIXMATCH),
    _row(40, "Grouping-based vs. FixMatch", "Table G.1", "emnist", "fixmatch", R=0.0, T=1, Ns=4700, C=1, K=1,
         published=_printed("fixmatch", "Table G.1", x0=83.70), note=_FIXMATCH),
    _row(41, "Users have labelled samples", "Table H.1", "emnist", _BOTH, R=(0.4, 0.6), Ns=4700, C=47, K=47,
         S=5, published=_printed(_F, "Table H.1", R04=81.88, R06=81.40)
         | _printed(_G, "Table H.1", R04=81.88, R06=81.40), labels_at="users",
         note="the row says FedAvg, the text says grouping; both are run here. The server has no data"),
    _row(42, "Performance on STL-10", "Table I.1", "stl10", "self-training", R=0.0, C=2,
         published=_printed("self-training", "Table I.1", x0=74.25)),
    _row(43, "Performance on STL-10", "Table I.1", "stl10", "crl-bn", R=0.0, C=2,
         published=_printed("crl-bn", "Table I.1", x0=78.96)),
    _row(44, "Performance on STL-10", "Table I.1", "stl10", _F, R=0.0, C=2,
         published=_printed(_F, "Table I.1", x0=81.71)),
    _row(45, "Performance on STL-10", "Table I.1", "stl10", _G, R=0.0, C=2, S=2,
         published=_printed(_G, "Table I.1", x0=82.81)),
    _row(46, "EMNIST with many users", "Table J.1", "emnist", _BOTH, Ns=4700, C=10, K=470, S=2,
         published=_printed(_F, "Table J.1", x0=83.69) | _printed(_G, "Table J.1", x0=83.94), note=_LARGE),
    _row(47, "EMNIST with many users", "Table J.1", "emnist", _BOTH, Ns=4700, C=20, K=470, S=2,
         published=_printed(_F, "Table J.1", x0=82.36) | _printed(_G, "Table J.1", x0=83.66), note=_LARGE),
    _row(48, "EMNIST with many users", "Table J.1", "emnist", _BOTH, Ns=4700, C=30, K=470, S=2,
         published=_printed(_F, "Table J.1", x0=79.41) | _printed(_G, "Table J.1", x0=81.31), note=_LARGE),
    _row(49, "Comparison with FedMatch", "Table 3", "cifar10", "fedmatch", R=(0.0, 1.0), T=100, Ns=5000,
         C=5, K=100, published=_printed("fedmatch", "Table 3", R00=46.81, R10=47.11), note=_JEONG),
    _row(50, "Comparison with FedMatch", "Table 3", "cifar10", _G, R=(0.0, 1.0), T=100, Ns=5000, C=5, K=100,
         S=2, published=_printed(_G, "Table 3", R00=63.32, R10=63.24), note=_JEONG),
)  # fmt: skip
_AT_USERS = {49: (53.51, 54.26), 50: (71.61, 69.05)}
"""The accuracies in percent that Table 3 prints for rows 49 and 50 if the users have the labels, not the
server. Each number belongs to one run of the row, in the order of the runs."""


def _completed(row: Row) -> Row:
    """Returns the row with further runs that the paper's tables show but the row of the experiment table does
    not list; most rows are returned unchanged."""
    if row.number == 15:
        longer = replace(row.runs[-1], epochs=120, published=94.93, where=_T1)
        return replace(row, runs=(*row.runs, longer))
    if row.number in _AT_USERS:
        figures = _AT_USERS[int(row.number)]
        at_users = tuple(
            replace(run, labels_at="users", published=figure)
            for run, figure in zip(row.runs, figures, strict=True)
        )
        return replace(row, runs=(*row.runs, *at_users))
    return row


ROWS = tuple(_completed(row) for row in (*_ROWS_1_18, *_ROWS_19_37, *_ROWS_38_50))
"""The fifty rows of the experiment table."""
METHODS = _row(
    "methods", "The five methods of section 3", "Figures 2, 3 and 4", "cifar10",
    ("self-training", "crl-bn", _F, _G, "supervised"), R=(0.0, 0.4),
    published=_printed(_G, "text", R00=93.42) | _printed(_G, _T1, R04=92.86),
    note="not in the experiment table: section 3 shows them as curves",
)  # fmt: skip
"""The runs of section 3 of the paper, which compares five methods. They are not in its experiment table."""
TABLES: dict[str, tuple[int, ...]] = {
    "1": (10, 11, 12, 13, 14, 15), "2": (16,), "3": (49, 50), "4": (22, 23, 24, 25), "5": (26, 27, 28, 29),
    "E.1": (30, 31), "F.1": (32, 33, 34), "G.1": (35, 36, 37, 38, 39, 40), "H.1": (41,),
    "I.1": (42, 43, 44, 45), "J.1": (46, 47, 48),
}  # fmt: skip
"""The numbers of the rows that each of the paper's tables shows."""


def row(number: str) -> Row:
    """Returns a row by its number, "1" to "50", or the row "methods" with the five methods of section 3."""
    for one in (*ROWS, METHODS):
        if str(one.number) == number:
            return one
    raise ConfigError(
        f"there is no row {number!r}: use 1 to {len(ROWS)}, or 'methods'", key="row", value=number
    )


def table(name: str) -> tuple[Row, ...]:
    """Returns the rows that a table of the paper shows. `name` is the number of the table, such as "2" or
    "E.1" ("E" for short). The name "methods" means the row with the five methods of section 3, and "all"
    means all fifty rows and that row."""
    special = {"methods": (METHODS,), "all": (*ROWS, METHODS)}
    if name in special:
        return special[name]
    wanted = name.upper() if name.upper() in TABLES else f"{name.upper()}.1"
    if wanted not in TABLES:
        raise ConfigError(
            f"there is no table {name!r}: use one of {', '.join((*TABLES, *special))}",
            key="table",
            value=name,
        )
    return tuple(one for one in ROWS if one.number in TABLES[wanted])

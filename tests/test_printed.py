"""The paper's own tables, as printed, beside our rows: the experiments (Appendix A.5) and every accuracy.

What is printed stands here as text, taken from the paper's source and not from our rows.
"""

from dataclasses import replace

import pytest

from ssfl.paper import rows
from ssfl.paper.rows import PaperRun

EXPERIMENTS = """
1 |Cifar10|Grouping-based       |0.0,0.1,...,1.0|16           |10^3                  |10       |10      |-
2 |SVHN   |Grouping-based       |0.0,0.1,...,1.0|16           |10^3                  |10       |10      |-
3 |EMNIST |Grouping-based       |0.0,0.1,...,1.0|16           |4.7x10^3              |10       |47      |-
4 |Cifar10|Grouping-based       |0.4            |2,2^2,...,2^5|10^3                  |10       |10      |-
5 |SVHN   |Grouping-based       |0.4            |2,2^2,...,2^5|10^3                  |10       |10      |-
6 |EMNIST |Grouping-based       |0.4            |2,2^2,...,2^5|4.7x10^3              |10       |47      |-
7 |Cifar10|Grouping-based       |0.4            |16           |10^3,2x10^3,...,5x10^3|10       |10      |-
8 |SVHN   |Grouping-based       |0.4            |16           |10^3,2x10^3,...,5x10^3|10       |10      |-
9 |EMNIST |Grouping-based       |0.4            |16           |10^3,2x10^3,...,5x10^3|10       |47      |-
10|Cifar10|Grouping-based       |0.4            |16           |10^3                  |10       |10      |-
11|Cifar10|Grouping-based       |0.4            |16           |10^3                  |10,20    |20      |-
12|Cifar10|Grouping-based       |0.4            |16           |10^3                  |10,30    |30      |-
13|SVHN   |Grouping-based       |0.4            |16           |10^3                  |10       |10      |-
14|SVHN   |Grouping-based       |0.4            |16           |10^3                  |10,20    |20      |-
15|SVHN   |Grouping-based       |0.4            |16           |10^3                  |10,30    |30      |-
16|EMNIST |Grouping-based       |0.4            |16           |4.7x10^3              |10,30,47 |47      |-
17|Cifar10|Grouping-based       |0.4            |16           |10^3                  |10       |10,20,30|-
18|SVHN   |Grouping-based       |0.4            |16           |10^3                  |10       |10,20,30|-
19|Cifar10|FedAvg/Grouping-based|0.4            |16           |10^3                  |10       |10      |-/2
20|SVHN   |FedAvg/Grouping-based|0.4            |16           |10^3                  |20       |20      |-/2
21|EMNIST |FedAvg/Grouping-based|0.4            |16           |4.7x10^3              |47       |47      |-/5
22|Cifar10|Supervised FedAvg    |0.29           |32           |-                     |10       |10      |-
23|Cifar10|DataSharing          |0.29           |32           |-                     |10       |10      |-
24|Cifar10|FedAvg               |0.4            |32           |10^3                  |10       |10      |-
25|Cifar10|Grouping-based       |0.4            |32           |10^3                  |10       |10      |2
26|Cifar10|EASGD                |0.4            |2,8          |-                     |16       |16      |-
27|Cifar10|OverlapSGD           |0.4            |2,8          |-                     |16       |16      |-
28|Cifar10|FedAvg               |0.4            |2,8,32       |10^3                  |16       |16      |-
29|Cifar10|Grouping-based       |0.4            |2,8,32       |10^3                  |16       |16      |2
30|Cifar10|FedAvg/Grouping-based|0.4            |16           |10^3                  |3,6,10,30|30      |-
31|SVHN   |FedAvg/Grouping-based|0.4            |16           |10^3                  |3,6,10,30|30      |-
32|EMNIST |Grouping-based       |0.4            |16           |4.7x10^3              |10       |10      |2
33|EMNIST |Grouping-based       |0.4            |16           |4.7x10^3              |20       |20      |2
34|EMNIST |Grouping-based       |0.4            |16           |4.7x10^3              |47       |47      |5
35|Cifar10|Grouping-based       |0.4            |16           |4x10^3                |10       |10      |2
36|SVHN   |Grouping-based       |0.4            |16           |10^3                  |20       |20      |2
37|EMNIST |Grouping-based       |0.4            |16           |4.7x10^3              |47       |47      |5
38|Cifar10|FixMatch             |0.0            |1            |4x10^3                |1        |1       |-
39|SVHN   |FixMatch             |0.0            |1            |10^3                  |1        |1       |-
40|EMNIST |FixMatch             |0.0            |1            |4.7x10^3              |1        |1       |-
41|EMNIST |FedAvg               |0.4,0.6        |16           |4.7x10^3              |47       |47      |-
42|STL-10 |Self-training        |0.0            |16           |10^3                  |2        |10      |-
43|STL-10 |CRL with BN          |0.0            |16           |10^3                  |2        |10      |-
44|STL-10 |FedAvg               |0.0            |16           |10^3                  |2        |10      |-
45|STL-10 |Grouping-based       |0.0            |16           |10^3                  |2        |10      |2
46|EMNIST |FedAvg/Grouping-based|0.4            |16           |4.7x10^3              |10       |47      |-/2
47|EMNIST |FedAvg/Grouping-based|0.4            |16           |4.7x10^3              |20       |47      |-/2
48|EMNIST |FedAvg/Grouping-based|0.4            |16           |4.7x10^3              |30       |47      |-/2
49|Cifar10|FedMatch             |0,1            |100          |5x10^3                |5        |100     |-
50|Cifar10|Grouping-based       |0,1            |100          |5x10^3                |5        |100     |2
"""
"""Row, data set, method, R, T, N_s, C, K and S, as printed but for braces around sets."""

WORDS = {
    "Cifar10": "cifar10", "SVHN": "svhn", "EMNIST": "emnist", "STL-10": "stl10",
    "Grouping-based": "grouping", "FedAvg": "crl-gn", "Supervised FedAvg": "supervised",
    "DataSharing": "data-sharing", "EASGD": "easgd", "OverlapSGD": "overlap-sgd", "FixMatch": "fixmatch",
    "Self-training": "self-training", "CRL with BN": "crl-bn", "FedMatch": "fedmatch",
}  # fmt: skip
SETS: dict[str, list[float]] = {
    "0.0,0.1,...,1.0": [0.0, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0],
    "2,2^2,...,2^5": [2, 4, 8, 16, 32],
    "10^3,2x10^3,...,5x10^3": [1000, 2000, 3000, 4000, 5000],
    "10^3": [1000], "4x10^3": [4000], "4.7x10^3": [4700], "5x10^3": [5000],
}  # fmt: skip
DEVIATIONS: dict[tuple[int, str], tuple[str, list[float | str]]] = {
    # row and column: why, and what we have instead
    (16, "method"): ("Table 2 prints FedAvg beside the grouping that the row names", ["crl-gn", "grouping"]),
    (41, "method"): ("the row names FedAvg and its text grouping", ["crl-gn", "grouping"]),
    (23, "Ns"): ("no size of the shared set is printed: 5 % of the training images", [2500]),
    **{
        (row, "method"): ("Appendix F is fully supervised, and Table F.1 prints FedAvg beside grouping",
                          ["supervised", "supervised-grouping"])
        for row in (32, 33, 34)
    },
    **{(row, "K"): ("text and Table J.1 say 470 users", [470]) for row in (46, 47, 48)},
}  # fmt: skip


def numbers(printed: str) -> list[float]:
    """The values of a cell; "-" is none."""
    if printed == "-":
        return [0]
    return SETS.get(printed) or [float(value) for value in printed.split(",")]


def lines() -> list[list[str]]:
    return [[cell.strip() for cell in line.split("|")] for line in EXPERIMENTS.strip().splitlines()]


@pytest.mark.parametrize("line", lines(), ids=lambda line: line[0])
def test_the_experiment_table_as_printed(line: list[str]) -> None:
    number, data, method, *cells = line
    row = rows.row(number)
    found: dict[str, list[float | str]] = {
        name: sorted({getattr(run, field) for run in row.runs})
        for name, field in (
            ("method", "method"), ("R", "skew"), ("T", "period"), ("Ns", "server_labels"),
            ("C", "participants"), ("K", "users"),
        )
    }  # fmt: skip
    printed: dict[str, list[float | str]] = {"method": sorted(WORDS[word] for word in method.split("/"))}
    for name, cell in zip(["R", "T", "Ns", "C", "K"], cells, strict=False):
        printed[name] = list(numbers(cell))
    for (deviating, name), (_, ours) in DEVIATIONS.items():
        if deviating == int(number):
            assert printed[name] != ours, "the paper says the same: no deviation"
            printed[name] = ours
    assert found == printed
    assert {run.data for run in row.runs} == {WORDS[data]}
    # S where it is printed, "-/5" for FedAvg and grouping; else what follows from C
    last = cells[-1].split("/")[-1]
    for run in row.runs:
        if "grouping" in run.method:
            assert run.groups == (int(last) if last != "-" else max(2, -(-run.participants // 10)))
        else:
            assert run.groups is None
    # every value with every other; labels at the users and longer training are Table 3's and Appendix C's
    plain = {replace(run, published=None, where="", labels_at="server", epochs=None) for run in row.runs}
    size = 1
    for values in found.values():
        size *= len(values)
    assert len(plain) == size


def test_the_table_has_every_row_once() -> None:
    assert [int(line[0]) for line in lines()] == list(range(1, 51))
    assert [row.number for row in rows.ROWS] == list(range(1, 51))


GROUPING, FEDAVG = "Grouping-based", "FedAvg"
PRINTED: list[tuple[str, str, str, dict[str, float | str], str]] = [
    # where, data, method, what differs from R = 0.4, T = 16, C = K = 10 and the data's N_s, accuracies as
    # printed, one for each value of the factor that is written "C=10/20/30"
    ("Table 1", "Cifar10", GROUPING, {"CK": "10/20/30"}, "92.86 92.93 92.12"),
    ("Table 1", "SVHN", GROUPING, {"CK": "10/20/30"}, "95.49 94.99 78.77"),
    ("Table 1", "SVHN", GROUPING, {"CK": "30", "E": "120"}, "94.93"),
    ("Table 1", "Cifar10", GROUPING, {"K": "10/20/30"}, "92.86 93.19 92.84"),
    ("Table 1", "SVHN", GROUPING, {"K": "10/20/30"}, "95.49 95.43 93.56"),
    ("Table 2", "EMNIST", FEDAVG, {"K": "47", "C": "10/30/47"}, "83.07 79.05 65.48"),
    ("Table 2", "EMNIST", GROUPING, {"K": "47", "C": "10/30/47"}, "84.43 83.12 82.95"),
    ("Table 3", "Cifar10", "FedMatch", {"R": "0/1", "labels_at": "users"}, "53.51 54.26"),
    ("Table 3", "Cifar10", GROUPING, {"R": "0/1", "labels_at": "users"}, "71.61 69.05"),
    ("Table 3", "Cifar10", "FedMatch", {"R": "0/1"}, "46.81 47.11"),
    ("Table 3", "Cifar10", GROUPING, {"R": "0/1"}, "63.32 63.24"),
    ("Table 4", "Cifar10", "Supervised FedAvg", {"R": "0.29", "T": "32", "Ns": "0"}, "78.52"),
    ("Table 4", "Cifar10", "DataSharing", {"R": "0.29", "T": "32", "Ns": "2500"}, "81.82"),
    ("Table 4", "Cifar10", GROUPING, {"T": "32"}, "92.96"),
    ("Table 5", "Cifar10", "EASGD", {"CK": "16", "Ns": "0", "T": "2/8"}, "91.12 88.88"),
    ("Table 5", "Cifar10", "OverlapSGD", {"CK": "16", "Ns": "0", "T": "2/8"}, "91.63 91.45"),
    ("Table 5", "Cifar10", GROUPING, {"CK": "16", "T": "2/8/32"}, "94.22 93.58 91.92"),
    ("Table E.1", "Cifar10", GROUPING, {"K": "30", "C": "3/6/10/30"}, "82.48 92.08 92.84 92.12"),
    ("Table E.1", "SVHN", GROUPING, {"K": "30", "C": "3/6/10/30"}, "92.83 93.42 93.56 78.77"),
    ("Table F.1", "EMNIST", "Supervised FedAvg", {"CK": "47/20/10"}, "84.71 86.14 86.19"),
    ("Table F.1", "EMNIST", "supervised-grouping", {"CK": "47/20/10"}, "84.97 86.27 86.29"),
    ("Table G.1", "Cifar10", "FixMatch", {"R": "0", "T": "1", "CK": "1", "Ns": "4000"}, "95.74"),
    ("Table G.1", "SVHN", "FixMatch", {"R": "0", "T": "1", "CK": "1"}, "97.72"),
    ("Table G.1", "EMNIST", "FixMatch", {"R": "0", "T": "1", "CK": "1"}, "83.70"),
    ("Table G.1", "Cifar10", GROUPING, {"Ns": "4000"}, "92.86"),
    ("Table G.1", "SVHN", GROUPING, {"CK": "20"}, "95.49"),
    ("Table G.1", "EMNIST", GROUPING, {"CK": "47"}, "81.63"),
    ("Table H.1", "EMNIST", FEDAVG, {"CK": "47", "R": "0.4/0.6", "labels_at": "users"}, "81.88 81.40"),
    ("Table H.1", "EMNIST", GROUPING, {"CK": "47", "R": "0.4/0.6", "labels_at": "users"}, "81.88 81.40"),
    ("Table I.1", "STL-10", "Self-training", {"R": "0", "C": "2"}, "74.25"),
    ("Table I.1", "STL-10", "CRL with BN", {"R": "0", "C": "2"}, "78.96"),
    ("Table I.1", "STL-10", FEDAVG, {"R": "0", "C": "2"}, "81.71"),
    ("Table I.1", "STL-10", GROUPING, {"R": "0", "C": "2"}, "82.81"),
    ("Table J.1", "EMNIST", FEDAVG, {"K": "470", "C": "10/20/30"}, "83.69 82.36 79.41"),
    ("Table J.1", "EMNIST", GROUPING, {"K": "470", "C": "10/20/30"}, "83.94 83.66 81.31"),
    ("text", "Cifar10", GROUPING, {"R": "0/1"}, "93.42 81.7"),
    ("text", "SVHN", GROUPING, {"R": "0/1"}, "95.32 92.49"),
    ("text", "EMNIST", GROUPING, {"K": "47", "R": "0/1"}, "84.43 82.69"),
]
Figure = tuple[str, str, str, float, float, float, float, float, float, str, float]


def figures() -> list[Figure]:
    """Where, data, method, R, T, N_s, C, K, E (0: the usual), who has the labels, accuracy."""
    found = []
    for where, data, method, given, accuracies in PRINTED:
        spread = {name: str(value).split("/") for name, value in given.items()}
        for place, accuracy in enumerate(accuracies.split()):
            factor = {name: values[min(place, len(values) - 1)] for name, values in spread.items()}
            if where == "Table 3":
                factor |= {"T": "100", "Ns": "5000", "C": "5", "K": "100"}
            if "CK" in factor:
                factor["C"] = factor["K"] = factor.pop("CK")
            labels_at = factor.pop("labels_at", "server")
            usual = {"R": 0.4, "T": 16, "Ns": 4700 if data == "EMNIST" else 1000, "C": 10, "K": 10, "E": 0}
            R, T, Ns, C, K, E = (float(factor.get(name, value)) for name, value in usual.items())
            name = WORDS.get(method, method)
            found.append((where, WORDS[data], name, R, T, Ns, C, K, E, labels_at, float(accuracy)))
    return found


def told(run: PaperRun) -> Figure:
    assert run.published is not None
    factors = (run.skew, run.period, run.server_labels, run.participants, run.users, run.epochs or 0)
    return (run.where, run.data, run.method, *map(float, factors), run.labels_at, run.published)  # type: ignore[return-value]


def test_every_accuracy_that_is_printed_stands_with_its_run_and_no_other_does() -> None:
    ours = {told(run) for row in rows.ROWS for run in row.runs if run.published is not None}
    assert ours == set(figures())
    also = {told(run) for run in rows.METHODS.runs if run.published is not None}
    assert also <= ours


def test_a_tables_figures_stand_in_its_own_rows() -> None:
    for name, numbers_ in rows.TABLES.items():
        expected = {figure for figure in figures() if figure[0] == f"Table {name}"}
        found = {told(run) for number in numbers_ for run in rows.row(str(number)).runs if run.published}
        assert expected <= found, name

"""Four methods on real handwritten digits: same images, same split, same test set (`make demo`).

python examples/demo.py [--out FOLDER] [--rounds N] [--seed S]
"""

import argparse
import os
from pathlib import Path

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import ssfl
from ssfl.progress import Reporter
from ssfl.report import plots
from ssfl.runs import next_free

METHODS = {
    "server alone": "server-only",
    "FedAvg": "crl-gn",
    "grouping (paper)": "grouping",
    "alternate (recommended)": "alternate",
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--out", type=Path, help="folder for the four runs and the picture")
    parser.add_argument("--rounds", type=int, help="rounds of each run")
    parser.add_argument("--seed", type=int, default=1, help="names the weights and every draw")
    given = parser.parse_args()
    folder = given.out or next_free(Path("runs") / "demo")
    histories = {}
    print("10 users with unlabelled digits, 50 labelled ones at the server, 360 test images")
    for title, method in METHODS.items():
        overrides = [f"method.name={method}", f"run.seed={given.seed}"]
        if given.rounds:
            overrides.append(f"federation.rounds={given.rounds}")
        print(f"\n{title}")
        with Reporter() as report:
            result = ssfl.run(ssfl.load_config("quickstart", overrides), folder / method, report)
        histories[title] = result.history

    picture = plots.curves(
        histories,
        folder / "curves.png",
        "Digits: 10 users, skew 0.4, 5 labels per class at the server",
    )
    print(f"\n{'method':<26}{'accuracy':>10}{'mask rate':>12}{'pseudo-labels right':>22}")
    for title, history in histories.items():
        accuracy = [e["accuracy"] for e in history if e["event"] == "eval"][-1]
        told = [e for e in history if e["event"] == "round"][-1]
        mask, right = told.get("mask_rate"), told.get("pseudo_accuracy")
        print(
            f"{title:<26}{100 * accuracy:>8.1f} %"
            f"{'-' if mask is None else f'{mask:.2f}':>12}"
            f"{'-' if right is None else f'{100 * right:.0f} %':>22}"
        )
    print(
        "\nWhere the mask rate is high and the pseudo-labels are wrong, the users agree on mistakes: "
        "averaged with ten of them, the server's labels count for little (FedAvg), more in two groups "
        "(grouping), and most when the server trains after the average (alternate)."
    )
    print(f"\npicture     {picture}\nrun folders {folder}")


if __name__ == "__main__":
    main()

"""Results of the paper's runs, made up."""

from ssfl.paper.rows import PaperRun


def fake(run: PaperRun, seed: int, **more: object) -> dict[str, object]:
    """A result as `results.write` leaves it, of made-up numbers."""
    measured = {"definition": 0.5, "authors_groups": 4.0}
    kinds = [f"{k}_{n}{s}" for k in ("gradient", "update") for n in ("l2_squared", "l2", "l1_squared", "l1")
             for s in ("", "_server")]  # fmt: skip
    curve = [
        {"round": r, "accuracy": 0.1 * r, "round_mask_rate": 0.5, "round_pseudo_accuracy": 0.4}
        for r in (1, 2)
    ]
    return {
        "run": run.name, "data": "emnist47", "fidelity": "paper", "scale": 0.5, "seed": seed,
        "accuracy": 0.8 + seed / 100, "changes": [], "curve": curve,
        "diversity": [{"round": r} | dict.fromkeys(kinds, measured) for r in (1, 2)],
        "config": {"federation": {"period": 16, "epoch_images": 1024}, "train": {"batch_size": 64}},
    } | more  # fmt: skip

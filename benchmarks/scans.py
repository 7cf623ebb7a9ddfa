"""Measures the cross-validated accuracy of a pretrained network on a folder of your own images.

    python benchmarks/scans.py FOLDER --set model.train=head --out results/scans.json

FOLDER has one sub-folder for each class, and `unlabelled/` with one sub-folder for each site. Every variant
trains on four fifths of the labelled images and all unlabelled ones, and predicts the last fifth. Images of
the same patient, as far as file names show it, are in the same fold.
"""

import argparse
import json
import platform
import re
import statistics
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from sklearn.linear_model import LogisticRegression
from sklearn.model_selection import StratifiedGroupKFold

import ssfl
from ssfl import methods
from ssfl.data import sources
from ssfl.data.views import KINDS
from ssfl.engines.features import Features
from ssfl.models import backbones
from ssfl.runs import provenance

SIZE, VIEWS = 224, 4


def patient(file: Path) -> str:
    """Returns the patient's identifier in a file name: the name without its short last parts, such as "-01"
    or "_left"."""
    name = re.sub(r"-(jpe?g|png)$", "", file.stem)
    return re.sub(r"([-_][0-9A-Za-z]{1,4})+$", "", name)


def read(folder: Path) -> tuple[np.ndarray, np.ndarray, list[str], list[np.ndarray], list[str]]:
    """Returns five things: all images [N, H, W, 3]; their labels (-1 without a label); the class names; for
    each site, the positions of its images; and the patient of each image.

    Images are decoded in the same way as by `ssfl run FOLDER` on colour images, so that both use the same
    cached features.
    """
    named = sorted(one for one in folder.iterdir() if one.is_dir() and one.name not in ("unlabelled", "test"))
    sites = sorted(one for one in (folder / "unlabelled").iterdir() if one.is_dir())
    files: list[Path] = []
    labels: list[int] = []
    owners: list[np.ndarray] = []
    for number, place in enumerate([*named, *sites]):
        inside = sorted(one for one in place.rglob("*") if one.is_file())
        if number >= len(named):
            owners.append(np.arange(len(files), len(files) + len(inside)))
        files += inside
        labels += [number if number < len(named) else -1] * len(inside)
    images = sources.read_image_files(files, 3, SIZE, SIZE, 255).permute(0, 2, 3, 1).numpy()
    return images, np.array(labels), [one.name for one in named], owners, [patient(one) for one in files]


def folds(labels: np.ndarray, patients: list[str], count: int, repeats: int) -> list[np.ndarray]:
    """Returns the positions of the held-out labelled images, one array for each fold of each repetition.
    Images of one patient are in the same fold."""
    labelled = np.flatnonzero(labels >= 0)
    groups = np.array(patients)[labelled]
    return [
        labelled[held]
        for seed in range(repeats)
        for _, held in StratifiedGroupKFold(count, shuffle=True, random_state=seed).split(
            labelled, labels[labelled], groups
        )
    ]


def regressions(
    images: np.ndarray, labels: np.ndarray, classes: list[str], held: list[np.ndarray]
) -> dict[str, Any]:
    """Returns the results of a baseline without unlabelled images: logistic regression on the features of the
    network lite0. There is one result for each regularisation strength C and each kind of views to learn
    from. Held-out images are predicted from one view without augmentation."""
    module = backbones.lite0(len(classes))
    scale = (backbones.MEAN,) * 3, (backbones.STD,) * 3
    labelled = np.flatnonzero(labels >= 0)
    pixels = torch.from_numpy(images[labelled]).permute(0, 3, 1, 2).contiguous()
    results, known = {}, labels[labelled]
    for kind, pair in KINDS.items():
        features = Features.of(module, VIEWS, *scale, False, *pair, torch.get_num_threads())
        plain = features.plain(pixels, torch.float32).numpy()
        features.prepare(pixels, torch.arange(len(pixels)), strong=False)
        features.use(VIEWS - 1)
        views = {f"{kind} views": features.views[0].float().numpy()}
        for name, rows in ({"plain": plain[:, None]} | views if kind == "standard" else views).items():
            for strength in (0.01, 0.1, 1.0):
                right, surprise = [], []
                for one in held:
                    at = np.searchsorted(labelled, one)
                    train = np.setdiff1d(np.arange(len(labelled)), at)
                    count = rows.shape[1]
                    model = LogisticRegression(C=strength / count, max_iter=1000).fit(
                        rows[train].reshape(-1, rows.shape[2]), known[train].repeat(count)
                    )
                    hits = known[at][model.predict(plain[at]) == known[at]]
                    right.append(np.bincount(hits, minlength=len(classes)))
                    surprise.append(-model.predict_log_proba(plain[at])[np.arange(len(at)), known[at]])
                results[f"{name}, C={strength:g}"] = measured(labels, held, right) | {
                    "log_loss": float(np.concatenate(surprise).mean())
                }
    return results


def trained(
    config: ssfl.Config, images: np.ndarray, labels: np.ndarray, classes: list[str],
    owners: list[np.ndarray], held: np.ndarray,
) -> np.ndarray:  # fmt: skip
    """Trains with `config` on all images except the held-out ones. Returns for each class how many held-out
    images the model classifies correctly."""
    rest = np.setdiff1d(np.arange(len(labels)), held)
    moved = np.full(len(labels), -1)
    moved[rest] = np.arange(len(rest))
    data = ssfl.Data(
        images[rest], labels[rest], images[held], labels[held], classes=classes,
        server=moved[np.intersect1d(rest, np.flatnonzero(labels >= 0))],
        users=[moved[one] for one in owners], flip=False,
    )  # fmt: skip
    with tempfile.TemporaryDirectory() as scratch:
        result = ssfl.run(config, out=Path(scratch) / "run", data=data)
    each = [event for event in result.history if event["event"] == "eval"][-1]["class_accuracy"]
    counts = np.bincount(labels[held], minlength=len(classes))
    return np.array([round(count * (one or 0)) for count, one in zip(counts, each, strict=True)])


def measured(labels: np.ndarray, held: list[np.ndarray], right: list[np.ndarray]) -> dict[str, Any]:
    """Returns the balanced accuracy and the accuracy of each class over all folds, and the accuracy in each
    fold. `right` has the number of correct images by fold and class."""
    counts = np.array([np.bincount(labels[one], minlength=len(right[0])) for one in held])
    hits = np.array(right)
    each = (hits.sum(0) / counts.sum(0)).tolist()
    return {
        "balanced_accuracy": statistics.fmean(each),
        "class_accuracy": each,
        "folds": (hits.sum(1) / counts.sum(1)).tolist(),
    }


def main(words: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path)
    parser.add_argument("--config", default="pictures")
    parser.add_argument("--set", action="append", default=[], help="a setting, key=value")
    parser.add_argument(
        "--variant",
        action="append",
        default=[],
        help="NAME:key=value key=value ...; the name `alone` trains without unlabelled images",
    )
    parser.add_argument("--regression", action="store_true", help="only logistic regression on features")
    parser.add_argument("--folds", type=int, default=5)
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--out", type=Path)
    asked = parser.parse_args(words)
    images, labels, classes, owners, patients = read(asked.folder)
    held = folds(labels, patients, asked.folds, asked.repeats)
    report: dict[str, Any] = {
        "command": " ".join(
            ["python benchmarks/scans.py FOLDER", *(words or sys.argv[1:])[1:]]
        ),
        "commit": provenance.commit(), "device": platform.machine(), "threads": torch.get_num_threads(),
        "torch": torch.__version__, "labelled": int((labels >= 0).sum()),
        "unlabelled": int((labels < 0).sum()), "classes": classes, "patients": len(set(patients)),
        "folds": asked.folds, "repeats": asked.repeats, "results": {},
    }  # fmt: skip
    variants = dict(one.split(":", 1) for one in asked.variant) or {"preset": ""}
    if asked.regression:
        variants = {}
        for name, result in regressions(images, labels, classes, held).items():
            _tell(report, name, result, asked.out)
    for name, sets in variants.items():
        config = ssfl.load_config(asked.config, [*asked.set, *sets.split()])
        if name == "alone":  # trains without the unlabelled images
            config = replace(config, method=methods.find("server-only")())
        began = time.perf_counter()
        right = [trained(config, images, labels, classes, owners, one) for one in held]
        seconds = time.perf_counter() - began
        _tell(report, name, measured(labels, held, right) | {"seconds": seconds, "set": sets}, asked.out)


def _tell(report: dict[str, Any], name: str, result: dict[str, Any], out: Path | None) -> None:
    """Adds the result of a variant to the report, prints it, and writes the report to `out`."""
    report["results"][name] = result
    shares = " ".join(f"{100 * one:.0f}" for one in result["class_accuracy"])
    print(f"{name}: balanced {100 * result['balanced_accuracy']:.1f} % ({shares})", flush=True)
    if out:
        out.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()

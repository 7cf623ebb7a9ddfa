"""The first thing a newcomer runs, and what it promises."""

import subprocess
import sys
from pathlib import Path

import pytest
from PIL import Image

import ssfl

ROOT = Path(__file__).parent.parent


@pytest.mark.slow
def test_the_demo_ends_with_a_table_a_picture_and_run_folders(tmp_path: Path) -> None:
    shown = subprocess.run(
        [sys.executable, ROOT / "examples" / "demo.py", "--rounds", "2", "--out", tmp_path / "demo"],
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    for method in ("server alone", "FedAvg", "grouping", "anchored"):
        assert method in shown.stdout
    assert shown.stdout.count(" %") >= 4
    with Image.open(tmp_path / "demo" / "curves.png") as picture:
        assert picture.size[0] > 600
    for method in ("server-only", "crl-gn", "grouping", "anchored"):
        assert (tmp_path / "demo" / method / "summary.json").is_file()


@pytest.mark.slow
def test_the_recommended_method_beats_the_server_alone_by_three_points(tmp_path: Path) -> None:
    gains = []
    for seed in (1, 2, 3):
        accuracies = [
            ssfl.run(
                ssfl.load_config(
                    "quickstart", [f"method.name={method}", f"run.seed={seed}", f"split.seed={2018 + seed}"]
                ),
                tmp_path / f"{method}-{seed}",
            ).accuracy
            for method in ("anchored", "server-only")
        ]
        gains.append(accuracies[0] - accuracies[1])
    assert sum(gains) / 3 >= 0.03


@pytest.mark.slow
def test_letters_with_the_emnist_network_fit_into_four_gigabytes(tmp_path: Path) -> None:
    """K=47, C=10, T=16 on images made to EMNIST's measure: 112,800 of 28×28, 47 classes."""
    script = f"""
import resource
import numpy as np, ssfl
noise = np.random.default_rng(0).integers(0, 256, (112_800, 28, 28), dtype=np.uint8)
y = np.arange(112_800) % 47
np.savez(r"{tmp_path / "letters.npz"}", x_train=noise, y_train=y, x_test=noise[:940], y_test=y[:940])
del noise
config = ssfl.load_config("emnist", [r"data.path={tmp_path / "letters.npz"}", "federation.rounds=1"])
result = ssfl.run(config, r"{tmp_path / "run"}")
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024)
"""
    shown = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert int(shown.stdout.split()[-1]) < 4096

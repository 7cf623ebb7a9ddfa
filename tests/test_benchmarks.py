"""The benchmarks run, count their work and never guess; none of these tests asserts a time."""

import json
import os
import signal
import subprocess
import sys
from argparse import Namespace
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest
import torch

import ssfl
from benchmarks import peers, plots, record, robustness, steps, turns, variants
from ssfl import Config
from ssfl.models import networks
from waiting import descendants

ROOT = Path(__file__).parent.parent


def bench(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "benchmarks", *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True)


@pytest.mark.slow
def test_engines_do_the_same_work_and_a_missing_peer_is_named(tmp_path: Path) -> None:
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", tmp_path / "bare"], check=True)
    path = tmp_path / "digits.json"
    shown = bench(
        "digits", "--on", "loop,vmap,pfl-2,flower", "--rounds", "1", "--json", str(path),
        *(f"--python={peer}={tmp_path / 'bare' / 'bin' / 'python'}" for peer in ("pfl", "flower")),
    )  # fmt: skip
    assert shown.returncode == 0, shown.stderr
    assert (
        "pfl-2 not run: pfl is not installed (pip install -r benchmarks/requirements-pfl.txt)" in shown.stdout
    )
    assert "flower not run: flwr is not installed" in shown.stdout
    told = json.loads(path.read_text("utf-8"))
    assert told["expected"] == {"steps": 2 * 10 * 16, "images": 2 * 10 * 16 * 32}
    assert told["command"].startswith("python -m benchmarks digits")
    ours = [told["contestants"][engine] for engine in ("loop", "vmap")]
    for engine, one in zip(("loop", "vmap"), ours, strict=True):
        assert f"| {engine} " in shown.stdout
        assert {name: one[name] for name in told["expected"]} == told["expected"]
        assert [len(rounds) for rounds in one["round_s"]] == [1]
        assert 50 < one["memory_mib"] < 5000
    assert ours[0]["losses"][0] == pytest.approx(ours[1]["losses"][0], rel=1e-3)
    assert 0 < ours[0]["losses"][0][-1] < ours[0]["losses"][0][0]
    assert min(one["times_our_best"] for one in ours) == 1
    assert told["contestants"]["pfl-2"].keys() == {"not_run"}


@pytest.mark.slow
@pytest.mark.parametrize("peer", ["pfl", "pfl-2", "flower"])
def test_a_peer_does_the_same_work_with_the_same_loss(peer: str, tmp_path: Path) -> None:
    if not (ROOT / f".venv-{peer.partition('-')[0]}" / "stamp").exists():
        pytest.skip("needs make bench-venvs")
    path = tmp_path / "digits.json"
    shown = bench("digits", "--on", f"vmap,{peer}", "--rounds", "2", "--json", str(path))
    assert shown.returncode == 0, shown.stderr
    told = json.loads(path.read_text("utf-8"))["contestants"]
    assert told[peer]["losses"][0] == pytest.approx(told["vmap"]["losses"][0], rel=0.1)


@pytest.mark.slow
def test_a_contestant_that_fails_is_told_apart_from_the_others(tmp_path: Path) -> None:
    shown = bench(
        "emnist", "--on", "loop", "--data", str(tmp_path / "none.npz"), "--json", str(tmp_path / "j")
    )
    assert shown.returncode == 1
    assert "loop failed: exit code 1" in shown.stdout
    assert "none.npz" in shown.stderr


def test_the_figure_is_drawn_from_the_results_and_the_same_each_time(tmp_path: Path) -> None:
    told = [plots.read(ROOT / "results" / f"{name}.json") for name in ("participants-h200", "users-cpu")]
    once, again = (plots.save(plots.cost(*told), tmp_path / name / "cost.svg") for name in "ab")
    drawn = once.read_text("utf-8")
    assert drawn == again.read_text("utf-8")
    assert "<metadata>" not in drawn
    assert told[0]["device"] in drawn
    assert f"{told[1]['rows'][-1]['start_seconds']:.1f}" in drawn
    fixed, each = plots.straight([{"users": c, "step_ms": 0.5 + 0.25 * c} for c in (1, 2, 8)])
    assert (fixed, each) == pytest.approx((0.5, 0.25))


@pytest.mark.parametrize(
    ("name", "norm", "shape"), [("small", "group", (1, 8, 8)), ("cnn", "none", (3, 32, 32))]
)
def test_the_peers_network_is_ours(name: str, norm: str, shape: tuple[int, int, int]) -> None:
    ours, theirs = networks.build(name, 10, shape, norm), peers.plain(name, 10, shape)
    with torch.no_grad():
        for mine, copied in zip(theirs.parameters(), ours.parameters(), strict=True):
            mine.copy_(copied)
        images = torch.randn(4, *shape)
        torch.testing.assert_close(theirs.eval()(images), ours.eval()(images))


def test_a_variant_that_is_refused_does_not_stop_the_others(tmp_path: Path) -> None:
    options = Namespace(config="quickstart", set_of="screen", sets=[], out=tmp_path)
    row = variants.played(options, "too many users", ["federation.participants=99"], 1)
    assert "federation.participants" in row["refused"]
    line = variants._lines(["anchored", "too many users"], [row])[1]
    assert "refused" in line[1]


@pytest.mark.slow
def test_variants_are_paired_by_seed_and_not_run_again(tmp_path: Path) -> None:
    command = [
        *(sys.executable, "-m", "benchmarks.variants", "anchored", "--only", "anchored", "T = 8"),
        *("--seeds", "2", "--set", "federation.rounds=4", "--out", str(tmp_path / "runs")),
        *("--json", str(tmp_path / "found.json")),
    ]
    first = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert first.returncode == 0, first.stderr
    told = json.loads((tmp_path / "found.json").read_text("utf-8"))
    assert [(row["variant"], row["seed"]) for row in told["rows"]] == [
        ("anchored", 1), ("T = 8", 1), ("anchored", 2), ("T = 8", 2)
    ]  # fmt: skip
    apart = [
        100 * (b["validation_accuracy"] - a["validation_accuracy"])
        for a, b in (told["rows"][:2], told["rows"][2:])
    ]
    assert f"{sum(apart) / 2:+.2f} ± {abs(apart[0] - apart[1]) / 2:.2f}" in first.stdout
    assert "rounds = 8" in (tmp_path / "runs/anchored-T_=_8-seed1/config.toml").read_text("utf-8")
    written = (tmp_path / "runs/anchored-anchored-seed1/summary.json").stat().st_mtime_ns
    again = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert again.stdout == first.stdout
    assert (tmp_path / "runs/anchored-anchored-seed1/summary.json").stat().st_mtime_ns == written


@pytest.mark.slow
def test_attacks_are_compared_whatever_happens_to_a_single_run(tmp_path: Path) -> None:
    """A run that fails and one whose process dies are listed; the others go on, and are not run again."""
    path = tmp_path / "robustness.json"

    def compare(*arguments: str) -> subprocess.Popen[str]:
        command = [
            sys.executable, "-m", "benchmarks.robustness", "--rounds", "1", "--seeds", "1",
            "--sites", "1 of 4", "--processes", "1", "--json", str(path), *arguments,
        ]  # fmt: skip
        return subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)

    first = compare("--attacks", "none", "--defences", "no defence", "--set", "run.device=cpu")
    assert first.communicate()[1].count("seed 1: ") == 1
    assert first.returncode == 0
    more = ["--attacks", "none", "sign flip", "--defences", "no defence", "gate", "--set", "run.device=cpu"]
    with compare(*more) as second:
        assert second.stderr is not None
        line = second.stderr.readline()  # the first of three that were missing
        assert "none" in line
        [child] = [pid for pid in descendants(second.pid) - {second.pid} if worker(pid)]
        os.kill(child, signal.SIGKILL)
        rest = second.stderr.read()
        assert second.wait() == 1
    assert rest.count("died") >= 1
    told = json.loads(path.read_text("utf-8"))
    assert [row["defence"] for row in told["rows"] if row["attack"] == "none"] == ["no defence", "gate"]
    assert len(told["runs"]) + len(told["failed"]) == 4
    assert len(told["failed"]) == 1
    assert "run.baseline=false" in told["settings"]
    third = compare(*more)
    assert third.communicate()[1].count("seed 1: ") == 1
    told = json.loads(path.read_text("utf-8"))
    assert (third.returncode, len(told["rows"]), told["failed"]) == (0, 4, [])


def worker(pid: int) -> bool:
    """Whether a process plays runs."""
    with suppress(OSError):
        return b"spawn_main" in Path(f"/proc/{pid}/cmdline").read_bytes()
    return False


def test_a_run_that_is_refused_does_not_end_the_comparison() -> None:
    case = robustness.Case("1 of 4", "none", "no defence", 1, 1.0, ("train.lr=-1",), False)
    assert "train.lr" in robustness.play(case).error


def test_two_versions_are_timed_in_turns_each_with_its_own_code(tmp_path: Path) -> None:
    """The other version is a checkout whose benchmarks/steps.py answers at once."""
    (tmp_path / "benchmarks").mkdir()
    (tmp_path / "benchmarks" / "steps.py").write_text(
        "import json, sys\n"
        "row = {'name': sys.argv[2], 'step_ms': 2.0, 'server_step_ms': 1.0, 'round_ms': 40.0}\n"
        "open(sys.argv[-1], 'w').write(json.dumps({'rows': [row]}))\n"
    )
    rows = turns.measured(tmp_path, ["--only", "cnn-47"])["rows"]
    assert [row["name"] for row in rows] == ["cnn-47"]
    now = [row | {"version": "now", "step_ms": ms} for row in rows for ms in (1.0, 1.5, 9.0)]
    compared = turns.compared([row | {"version": "before"} for row in rows] + now)
    assert compared[0]["step_ms"] == {"before": 2.0, "now": 1.5, "ratio": 0.75}
    assert compared[0]["round_ms"]["ratio"] == 1.0


def test_a_folder_without_the_benchmark_is_no_version(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "benchmarks.turns", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 1
    assert str(tmp_path) in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.skipif(torch.cuda.is_available(), reason="on a GPU, kernels have other names")
def test_a_profile_counts_the_calls_of_one_execution() -> None:
    one = torch.ones(300, 300)

    def part() -> None:
        for _ in range(4):
            one @ one
        one.sum()

    spent = steps.kernels(part)
    calls = {row["kernel"]: row["calls"] for row in spent}
    assert (calls["aten::mm"], calls["aten::sum"]) == (4, 1)
    assert [row["ms"] for row in spent] == sorted((row["ms"] for row in spent), reverse=True)
    assert spent[0]["ms"] > 0


def test_the_record_of_a_run_has_its_results_and_no_folder_of_this_machine(
    quick: Callable[..., Config],
    patterns: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    small = ["federation.rounds=2", "federation.period=1", "split.users=2", "run.baseline=false"]
    config = quick(f"data.path={patterns}", "run.eval_every=1", *small)
    finished = ssfl.run(config, tmp_path / "run")
    out = tmp_path / "kept.json"
    words = [str(tmp_path / "run"), "--what", "two rounds", "--command", "ssfl run", "--device", "a CPU"]
    monkeypatch.setattr(sys, "argv", ["record", *words, "--images", "patterns.npz=abc", "--out", str(out)])
    record.main()
    assert f"{finished.accuracy:.4f}  ssfl run" in capsys.readouterr().out
    kept = json.loads(out.read_text("utf-8"))
    assert kept["images"] == {"patterns.npz": "abc"}
    [run] = kept["runs"]
    assert run["command"] == "ssfl run"
    assert run["summary"]["accuracy"] == finished.accuracy
    assert run["last_evaluation"]["correct"] == run["summary"]["correct"]
    assert [end for end, _ in run["mask_rate_curve"]] == [1, 2]
    assert run["images_of_users"] == 2 * 2 * 1 * 16
    assert str(tmp_path) not in out.read_text("utf-8")
    assert 'path = "patterns.npz"' in run["config"]
    monkeypatch.setattr(sys, "argv", ["record", str(tmp_path), *words[1:], "--out", str(out)])
    with pytest.raises(SystemExit, match="not finished"):
        record.main()
    monkeypatch.setattr(sys, "argv", ["record", *words, "--images", "patterns.npz", "--out", str(out)])
    with pytest.raises(SystemExit) as caught:
        record.main()
    assert caught.value.code == 2


@pytest.mark.parametrize(
    "settings",
    [["method.name=server-only"], ["method.name=easgd"], ["run.test=never", "data.validation=0.2"]],
)
def test_the_record_of_a_run_in_which_something_is_missing(
    settings: list[str],
    quick: Callable[..., Config],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    config = quick("federation.rounds=2", "federation.period=1", "run.baseline=false", *settings)
    finished = ssfl.run(config, tmp_path / "run").summary
    out = tmp_path / "kept.json"
    words = [str(tmp_path / "run"), "--what", "two rounds", "--command", "ssfl run", "--device", "a CPU"]
    monkeypatch.setattr(sys, "argv", ["record", *words, "--out", str(out)])
    record.main()
    accuracy = finished.get("accuracy", finished.get("validation_accuracy"))
    assert f"{accuracy:.4f}  ssfl run" in capsys.readouterr().out
    [run] = json.loads(out.read_text("utf-8"))["runs"]
    assert (run["images_of_users"] == 0) == ("method.name=server-only" in settings)

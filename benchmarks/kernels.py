"""Finds fast tile sizes for the GPU kernels. Every candidate is checked against PyTorch's layers, then timed.

  python -m benchmarks.kernels [--only NAME ...] [--processes N] [--seconds S] [--json FILE]

The tables in `ssfl/models/kernels` were chosen by hand from the results. A run does not time anything at its
start. Candidates are compiled and checked by several processes, within a time limit, and timed by a single
process.
"""

import argparse
import json
import multiprocessing
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from benchmarks import report

CONVOLUTIONS = {
    "resnet18": [
        (64, 64, 32, 3, 1, 1), (64, 128, 32, 3, 2, 1), (64, 128, 32, 1, 2, 0), (128, 128, 16, 3, 1, 1),
        (128, 256, 16, 3, 2, 1), (256, 256, 8, 3, 1, 1), (256, 512, 8, 3, 2, 1), (256, 512, 8, 1, 2, 0),
        (512, 512, 4, 3, 1, 1),
    ],
    "wide_resnet": [
        (16, 32, 32, 3, 1, 1), (32, 32, 32, 3, 1, 1), (32, 64, 32, 3, 2, 1), (64, 64, 16, 3, 1, 1),
        (64, 128, 16, 3, 2, 1), (128, 128, 8, 3, 1, 1),
    ],
    "cnn": [(32, 64, 26, 3, 1, 0)],
}  # fmt: skip
"""The convolutions of each network: input channels, output channels, image side in pixels, kernel size,
stride and padding."""
NORMS = {
    "resnet18": [(64, 32, 32), (128, 32, 16), (256, 32, 8), (512, 32, 4)],
    "wide_resnet": [(32, 16, 32), (64, 32, 16), (128, 32, 8)],
}
"""The normalisation layers of each network: channels, groups and image side in pixels."""
MODELS = {"resnet18": (10, 1), "wide_resnet": (10,), "cnn": (47, 10, 1)}
IMAGES, CLOSE = 64, 0.02
PRODUCTS = [
    (128, 128, 64, 8, 4), (128, 128, 64, 4, 3), (256, 128, 64, 8, 3), (256, 128, 64, 8, 4),
    (128, 256, 64, 8, 3), (128, 256, 64, 8, 4), (256, 64, 64, 4, 4), (256, 64, 64, 4, 2),
    (128, 64, 64, 4, 4), (128, 64, 64, 4, 3), (64, 64, 64, 4, 6), (64, 128, 64, 4, 4),
    (128, 64, 64, 4, 2), (128, 128, 64, 4, 2), (64, 64, 64, 4, 3), (64, 128, 64, 4, 3),
]  # fmt: skip
"""Candidate tiles for convolutions: pixels, output channels and input channels of a tile, then Triton's warps
and stages."""
FILTERS = [
    (64, 128, 128, 8, 3, False), (64, 128, 256, 8, 3, False), (128, 128, 128, 8, 3, False),
    (64, 128, 64, 8, 4, True), (64, 64, 64, 4, 4, True), (128, 64, 64, 4, 3, True), (64, 64, 64, 4, 5, False),
]  # fmt: skip
"""Candidate tiles for the gradient of the filters: the same five numbers, and whether three taps of a 3×3
filter are computed together."""
FOLDED = [(256, 4, 4), (256, 4, 3), (256, 8, 4), (128, 4, 4), (128, 4, 6), (128, 4, 3), (64, 4, 6)]
"""Candidate tiles for convolutions of which two columns are computed together: pixels, warps and stages."""
FOLDED_FILTERS = [(128, 4, 3), (64, 4, 4), (64, 4, 3), (128, 8, 3), (128, 4, 2)]
"""The same for the gradient of their filters."""


def random(*shape: int, seed: int = 1) -> Tensor:
    """Returns a tensor of random normal bfloat16 numbers on the GPU."""
    generator = torch.Generator("cuda").manual_seed(seed)
    return torch.randn(*shape, device="cuda", generator=generator).bfloat16()


def unlike(ours: Tensor, theirs: Tensor) -> float:
    """Returns the relative error of `ours`: the norm of the difference divided by the norm of `theirs`."""
    return float((ours.float() - theirs).norm() / theirs.norm())


def last(x: Tensor) -> Tensor:
    """Returns images or filters with the channels as the last dimension, contiguous in memory, as the kernels
    expect."""
    return x.movedim(-3, -1).contiguous()


Candidate = tuple[Any, Callable[[], Any]]
"""A candidate's name, and the function that computes with it."""


def products(case: tuple[int, ...], models: int, images: int, way: str) -> tuple[Iterator[Candidate], Tensor]:
    """Returns the candidates for computing a convolution or one of its gradients, and the correct result to
    compare with.

    `case` is a line of `CONVOLUTIONS`. `way` is "forward", "images" (gradient of the images) or "filters"
    (gradient of the filters).
    """
    from ssfl.models.kernels import triton_conv, triton_fold, triton_tma

    inputs, outputs, size, kernel, stride, padding = case
    x = random(models * images, inputs, size, size)
    w = random(models, outputs, inputs, kernel, kernel, seed=2) / (inputs * kernel**2) ** 0.5
    out = (size + 2 * padding - kernel) // stride + 1
    g = random(models * images, outputs, out, out, seed=3)
    x_last, w_last, g_last = last(x), last(w), last(g)
    level = torch.zeros(models, outputs, device="cuda")

    def expected() -> Tensor:
        outputs = []
        for a, b, c in zip(x.float().chunk(models), w.float(), g.float().chunk(models), strict=True):
            a.requires_grad_(), b.requires_grad_()
            y = F.conv2d(a, b, None, stride, padding)
            grads = {"forward": 0, "images": a, "filters": b}
            outputs.append(last(y if way == "forward" else torch.autograd.grad(y, grads[way], c)[0]).detach())
        return torch.stack(outputs) if way == "filters" else torch.cat(outputs)

    def product(*arguments: Any) -> Tensor:
        return triton_tma.correlate(*arguments)[0]

    def folded_product(*arguments: Any) -> Tensor:
        return triton_fold.correlate(*arguments)[0]

    def with_moments() -> Tensor:
        return triton_conv.correlate_with_moments(x_last, w_last, None, stride, padding, level)[0]

    def folded() -> Iterator[Candidate]:
        made, summed = (inputs, outputs) if way == "images" else (outputs, inputs)
        size_made = size if way == "images" else out
        x_or_g = g_last if way == "images" else x_last
        if not triton_fold.possible(x_or_g, made, size_made, kernel, stride):
            return
        for pixels, *rest in FOLDED_FILTERS if way == "filters" else FOLDED:
            tile = triton_tma.Tile(pixels, triton_fold.FOLD * made, summed, *rest)
            if way == "filters":
                for programs in (1,) if images < IMAGES else (132, 264, 528):
                    parts = max(1, programs // (models * kernel))
                    compute = partial(triton_fold.weights_grad, g_last, x_last, models, padding, tile, parts)
                    yield ["fold", *tile, parts], compute
            else:
                pad = kernel - 1 - padding if way == "images" else padding
                how = x_or_g, w_last, None, [size_made] * 2, pad, way == "images", None, tile
                compute = partial(folded_product, *how)
                yield ["fold", *tile], compute

    def old() -> Tensor:
        keep = triton_tma.hopper
        setattr(triton_tma, "hopper", lambda device: False)  # noqa: B010 (typed as a cached function)
        try:
            if way == "forward":
                return triton_conv.correlate(x_last, w_last, None, stride, padding)
            if way == "images":
                return triton_conv.spread(g_last, w_last, [size, size], stride, padding)
            return triton_conv.weights_grad(g_last, x_last, False, models, kernel, stride, padding)
        finally:
            setattr(triton_tma, "hopper", keep)  # noqa: B010

    def each() -> Iterator[Candidate]:
        yield "old", old
        if way == "forward":
            yield "moments", with_moments
        yield from folded()
        seen: set[Any] = set()
        rows = PRODUCTS if way != "filters" else FILTERS
        for pixels, wide, deep, *rest in rows:
            made, summed = (inputs, outputs) if way == "images" else (outputs, inputs)
            tile = triton_tma.Tile(pixels, min(wide, made), min(deep, summed), *rest[:2])
            if way == "forward":
                how: tuple[Any, ...] = (
                    x_last,
                    w_last,
                    None,
                    [out, out],
                    outputs,
                    stride,
                    1,
                    padding,
                    False,
                    tile,
                )
                yield from fresh(seen, tile, partial(product, *how))
            elif way == "images":
                how = (g_last, w_last, None, [size, size], inputs, 1, stride, padding, True, tile)
                yield from fresh(seen, tile, partial(product, *how))
            elif not (rest[2] and kernel != 3):
                taps = kernel if rest[2] else kernel**2
                tiles = models * taps * (outputs // tile.outputs) * (inputs // tile.channels)
                few = images < IMAGES  # few images mean a check: try one part and two parts
                for parts in (1, 2) if few else [max(1, each // tiles) for each in (132, 264, 528, 1056)]:
                    how = (g_last, x_last, models, kernel, stride, padding, tile, bool(rest[2]), parts)
                    yield from fresh(seen, (*tile, rest[2], parts), partial(triton_tma.weights_grad, *how))

    return each(), expected() if models <= 3 else x


def fresh(seen: set[Any], name: Any, function: Callable[[], Any]) -> Iterator[Candidate]:
    """Yields the candidate unless its name is in `seen`. Several entries of a table can give the same
    tile."""
    if name not in seen:
        seen.add(name)
        yield list(name), function


def norms(case: tuple[int, ...], models: int, images: int, way: str) -> tuple[Iterator[Candidate], Tensor]:
    """Returns the candidates for computing a normalisation layer or its gradient, and the correct result to
    compare with.

    `case` is a line of `NORMS`. `way` contains "group" or "batch", and possibly "back" (gradient) and "add"
    (with a sum before the ReLU).
    """
    from ssfl.models.kernels import triton_batch, triton_norm

    channels, groups, size = case
    x = random(models * images, channels, size, size) * 2 + 0.5
    weight, bias = random(models, channels, seed=2), random(models, channels, seed=3)
    add = random(*x.shape, seed=4) if "add" in way else None
    g = random(*x.shape, seed=5)
    x_last, g_last, summand = last(x), last(g), None if add is None else last(add)
    added = add is not None

    def expected() -> Tensor:
        outputs = []
        adds = [None] * models if add is None else add.float().chunk(models)
        wide = (x.float().chunk(models), weight.float(), bias.float(), g.float().chunk(models), adds)
        for a, w, b, c, d in zip(*wide, strict=True):
            a.requires_grad_()
            y = F.batch_norm(a, None, None, w, b, True) if "batch" in way else F.group_norm(a, groups, w, b)
            y = F.relu(y if d is None else y + d)
            outputs.append(last(torch.autograd.grad(y, a, c)[0] if "back" in way else y.detach()))
        return torch.cat(outputs)

    def each() -> Iterator[Candidate]:
        if "batch" in way:
            for held in (2048, 4096, 8192):
                for programs in (1056, 2112, 4224):

                    def run(held: int = held, programs: int = programs) -> Tensor:
                        triton_batch.HELD, triton_batch.PROGRAMS = held, programs
                        if "back" in way:
                            return triton_batch.backward(
                                g_last, x_last, y, *moments, weight, bias, 1e-5, 0.0, added
                            )[0]
                        own = triton_batch.statistics(x_last, running, running, 0.1)[:2]
                        return triton_batch.forward(x_last, *own, weight, bias, summand, 1e-5, 0.0)

                    yield [held, programs], run
            return
        yield "old", lambda: group(None)
        tall = 1 << (size * size - 1).bit_length()
        wide = channels // groups
        while wide <= channels:
            for warps in (1, 2, 4, 8, 16):
                each_holds = tall * wide // (32 * warps)
                if wide >= 8 and 16 <= each_holds <= 64 and tall * wide <= 65536:
                    yield [tall, wide, warps], partial(group, (tall, wide, warps))
            for part in (16, 32, 64, 128, 256):  # tiles smaller than an image, which is then read twice
                for warps in (4, 8):
                    if wide in (16, 32, 64) and part < tall and part * wide // (32 * warps) in (8, 16):
                        yield [part, wide, warps], partial(group, (part, wide, warps))
            wide *= 2

    def group(tile: tuple[int, int, int] | None) -> Tensor:
        if "back" in way:
            return triton_norm.backward(
                g_last, x_last, y, weight, bias, groups, 1e-5, 0.0, add is not None, tile
            )[0]
        return triton_norm.forward(x_last, weight, bias, summand, groups, 1e-5, 0.0, tile)

    running = torch.zeros(models, channels, device=x.device)
    if "back" in way and "batch" in way:
        moments: tuple[Tensor, Tensor] = triton_batch.statistics(x_last, running, running, 0.1)[:2]
        y = triton_batch.forward(x_last, *moments, weight, bias, summand, 1e-5, 0.0)
    elif "back" in way:
        y = triton_norm.forward(x_last, weight, bias, summand, groups, 1e-5, 0.0)
    return each(), expected() if models <= 3 else x


def check(task: tuple[Any, ...], file: Path) -> None:
    """Compiles every candidate of a task and compares its result with PyTorch's layers. Writes a line [name,
    relative error or reason] for each to `file`."""
    make, _, case, way, _ = task
    torch.backends.cudnn.allow_tf32 = torch.backends.cuda.matmul.allow_tf32 = False
    candidates, expected = make(case, 2, 16, way)
    with file.open("w") as lines:
        for name, function in candidates:
            try:
                first = function()
                error: Any = unlike(first, expected)
                if not torch.equal(first, function()):
                    error = "not the same twice"
            except Exception as failed:
                error = f"{type(failed).__name__}: {str(failed)[:200]}"
                if "CUDA" in str(failed):
                    lines.write(json.dumps([name, error]) + "\n")
                    return
            lines.write(json.dumps([name, error]) + "\n")
            lines.flush()


def timed(function: Callable[[], Any]) -> float:
    """Returns the microseconds of one call of the function on the GPU: the median over five replays of a CUDA
    graph."""
    function()
    torch.cuda.synchronize()
    graph, count = torch.cuda.CUDAGraph(), 5
    with torch.cuda.graph(graph):
        for _ in range(count):
            function()
    spent = []
    for _ in range(6):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        spent.append(1000 * begin.elapsed_time(end) / count)
    return float(statistics.median(spent[1:]))


def label(candidate: Any, way: str) -> str:
    """Returns a candidate's name as text. For "filters", the number of parts is left out, because it depends
    on the number of models."""
    return json.dumps(candidate[:-1] if way == "filters" and isinstance(candidate, list) else candidate)


def tasks(only: list[str], ways: list[str] | None) -> list[tuple[Any, ...]]:
    """Returns all combinations of layer and direction to try, for the networks in `only`. `ways` are the
    directions to try; None means all."""
    cases: list[tuple[Any, ...]] = []
    for name in only:
        for case in CONVOLUTIONS[name]:
            cases += [(products, name, case, way, MODELS[name]) for way in ("forward", "images", "filters")]
        for sizes in NORMS.get(name, []):
            for kind in ("group", "batch"):
                each = [f"{kind}{back}{add}" for back in ("", " back") for add in ("", " add")]
                cases += [(norms, name, sizes, way, MODELS[name]) for way in each]
    return [case for case in cases if ways is None or case[3] in ways]


def main() -> None:
    """Runs the command: checks all candidates, times the correct ones, and writes the results."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.kernels", description="Find fast tiles for the GPU kernels."
    )
    parser.add_argument("--only", nargs="+", default=list(CONVOLUTIONS))
    parser.add_argument("--ways", nargs="+", help='such as forward, images, filters and "batch back"')
    parser.add_argument("--processes", type=int, default=14)
    parser.add_argument(
        "--seconds", type=float, default=100, help="the most seconds for checking all candidates"
    )
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    waiting = [(number, task) for number, task in enumerate(tasks(options.only, options.ways))]
    fork = multiprocessing.get_context("fork")
    running: dict[int, Any] = {}
    start = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        files = {number: Path(folder) / f"{number}.jsonl" for number, _ in waiting}
        todo = list(waiting)
        while (todo or running) and time.monotonic() - start < options.seconds:
            while todo and len(running) < options.processes:
                number, task = todo.pop(0)
                running[number] = fork.Process(target=check, args=(task, files[number]))
                running[number].start()
            time.sleep(0.05)
            for number in [number for number, process in running.items() if not process.is_alive()]:
                running.pop(number).join()
        for process in running.values():
            process.kill()
            process.join()
        print(
            f"checked in {time.monotonic() - start:.0f} s, {len(todo) + len(running)} not finished",
            flush=True,
        )
        rows = []
        for number, (make, name, case, way, models) in waiting:
            lines = files[number].read_text().splitlines() if files[number].exists() else []
            checked = {label(line[0], way): line[1] for line in map(json.loads, lines)}
            for count in models:
                times: dict[str, Any] = {}
                try:
                    candidates, kept = make(case, count, IMAGES, way)
                    for candidate, function in candidates:
                        error = checked.get(label(candidate, way), "not checked")
                        good = isinstance(error, float) and error < CLOSE
                        times[json.dumps(candidate)] = timed(function) if good else error
                    del candidates, kept
                except Exception as failed:
                    times["failed"] = f"{type(failed).__name__}: {str(failed)[:200]}"
                numbers = sorted((t, c) for c, t in times.items() if isinstance(t, float))
                best = numbers[:3]
                rows.append({"network": name, "case": case, "way": way, "models": count, "us": times,
                             "errors": checked})  # fmt: skip
                print(name, case, way, count, "old", times.get('"old"'), "best", best, flush=True)
                if options.json:
                    where = {"device": torch.cuda.get_device_name(), "torch": torch.__version__}
                    report.save(
                        options.json, report.circumstances("benchmarks.kernels") | where | {"rows": rows}
                    )


if __name__ == "__main__":
    main()

"""Image files become one memory-mapped array, decoded once and shared by every command."""

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from ssfl.core import cache
from ssfl.data import decoding, pictures
from ssfl.data.sources import load
from ssfl.errors import DataError


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("SSFL_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def draw(file: Path, seed: int = 0, size: tuple[int, int] = (40, 30), kind: str = "L") -> Path:
    """A picture of noise: "L" grey, "RGB" colours, "same" grey stored as RGB, "deep" 16 bits."""
    rng = np.random.default_rng(seed)
    grey = rng.integers(0, 256, size[::-1], dtype=np.uint8)
    pixels: np.ndarray = grey
    if kind == "RGB":
        pixels = rng.integers(0, 256, (*size[::-1], 3), dtype=np.uint8)
    elif kind == "same":
        pixels = np.stack([grey] * 3, -1)
    elif kind == "deep":
        pixels = grey.astype(np.uint16) * 16
    file.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(pixels).save(file)
    return file


def entries(place: Path) -> list[Path]:
    return [path for path in (place / "images").glob("*") if path.is_dir()]


def test_all_kinds_of_images_become_one_array_of_the_bytes_that_each_has_alone(tmp_path: Path) -> None:
    kinds = ["L", "RGB", "same", "deep"] * 3
    files = [draw(tmp_path / f"{i}.png", i, (30 + i, 50 - i), kind) for i, kind in enumerate(kinds)]
    found = decoding.decoded(files, (24, 20))
    assert found.images.shape == (12, 3, 24, 20)
    assert (found.white, found.deep, found.grey) == (4095, 3, 9)
    for image, file in zip(found.images, files, strict=True):
        assert np.array_equal(image.numpy(), pictures.decode(file, 3, (24, 20), 4095))


def test_files_are_decoded_once(tmp_path: Path, own_cache: Path) -> None:
    files = [draw(tmp_path / f"{i}.png", i) for i in range(5)]
    first = decoding.decoded(files, (8, 8))
    (entry,) = entries(own_cache)
    written = (entry / "pixels").stat()
    assert written.st_size == 5 * 64
    again = decoding.decoded(files, (8, 8))
    assert torch.equal(first.images, again.images)
    assert (entry / "pixels").stat().st_ino == written.st_ino
    decoding.decoded(files, (8, 9))
    assert len(entries(own_cache)) == 2
    draw(files[2], 77)
    os.utime(files[2], ns=(1, 1))  # clocks of file systems are coarse
    assert not torch.equal(decoding.decoded(files, (8, 8)).images[2], first.images[2])
    assert len(entries(own_cache)) == 3


def test_pixels_are_mapped_and_cannot_be_changed_by_who_reads(tmp_path: Path) -> None:
    files = [draw(tmp_path / f"{i}.png", i) for i in range(3)]
    first = decoding.decoded(files, (8, 8)).images
    kept = first.clone()
    first.zero_()
    assert torch.equal(decoding.decoded(files, (8, 8)).images, kept)
    with open("/proc/self/maps") as maps:
        assert "/images/" in maps.read()


def test_more_images_than_memory_can_be_mapped(tmp_path: Path) -> None:
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    count, file = 4 * memory // (1 << 20), tmp_path / "pixels"
    with file.open("wb") as opened:
        opened.truncate(count << 20)  # takes no room on the disk
        opened.seek(-1, os.SEEK_END)
        opened.write(b"7")
    pixels = torch.from_numpy(decoding.map_pixels(file, (count, 1, 1024, 1024)))
    assert (int(pixels[0, 0, 0, 0]), int(pixels[-1, -1, -1, -1])) == (0, ord("7"))
    pixels[0] = 1  # a copy of this process
    with file.open("rb") as opened:
        assert opened.read(1) == b"\0"


def test_broken_files_leave_no_gap(tmp_path: Path) -> None:
    files = [draw(tmp_path / f"{i}.png", i, kind="deep" if i % 3 == 0 else "L") for i in range(9)]
    whole = decoding.decoded(files, (8, 8), white=4095).images
    for number in (0, 4):
        files[number].write_bytes(files[number].read_bytes()[:60])  # its header is whole
    files[7].write_bytes(b"no picture")
    found = decoding.decoded(files, (8, 8), white=4095)
    assert sorted(found.broken) == [0, 4, 7]
    assert torch.equal(found.images, whole[[1, 2, 3, 5, 6, 8]])
    line = decoding.describe_broken(found.broken, 9)
    assert "\n" not in line
    assert "3 of 9" in line
    assert all(str(files[n]) in line for n in (0, 4, 7))


SCRIPT = """
import sys
from pathlib import Path
from ssfl.data import decoding
files = sorted(Path(sys.argv[1]).glob("*.png"))
print(int(decoding.decoded(files, (64, 64)).images.long().sum()))
"""


def test_processes_share_one_entry_even_if_they_begin_together(tmp_path: Path, own_cache: Path) -> None:
    for i in range(60):
        draw(tmp_path / "pictures" / f"{i}.png", i, (200, 200))
    words = [sys.executable, "-c", SCRIPT, str(tmp_path / "pictures")]
    running = [subprocess.Popen(words, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    sums = {process.communicate()[0] for process in running}
    assert len(sums) == 1
    assert all(process.returncode == 0 for process in running)
    assert len(entries(own_cache)) == 1


def test_what_a_killed_process_left_is_made_anew(tmp_path: Path, own_cache: Path) -> None:
    files = [draw(tmp_path / "1.png")]
    key = decoding.fingerprint(files, ((8, 8), None, None))
    torn = own_cache / "images" / f"{key}.part"
    torn.mkdir(parents=True)
    (torn / "pixels").write_bytes(b"half")
    assert len(decoding.decoded(files, (8, 8)).images) == 1
    assert not torn.exists()
    (own_cache / "images" / key / "pixels").write_bytes(b"short")  # damaged: decoded into memory
    assert np.array_equal(decoding.decoded(files, (8, 8)).images[0], pictures.decode(files[0], 1, (8, 8)))


def test_without_a_place_to_write_images_are_decoded_into_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "taken").write_text("a file")
    monkeypatch.setenv("SSFL_CACHE", str(tmp_path / "taken"))
    files = [draw(tmp_path / "1.png")]
    assert decoding.decoded(files, (8, 8)).images.shape == (1, 1, 8, 8)


def test_the_cache_is_bounded(tmp_path: Path, own_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files = [draw(tmp_path / f"{i}.png", i) for i in range(4)]
    for size in (50, 51, 52):
        decoding.decoded(files, (size, size))
    for age, (_, _, entry) in enumerate(sorted(cache.entries(), reverse=True)):
        os.utime(entry, (1e9 - age, 1e9 - age))
    oldest = min(cache.entries())[2]
    decoding.decoded(files, (52, 52))
    monkeypatch.setenv("SSFL_CACHE_GB", "0.00004")  # three of them
    decoding.decoded(files, (53, 53))
    left = {entry for _, _, entry in cache.entries()}
    assert oldest not in left
    assert sum(size for _, size, _ in cache.entries()) <= 4e4


def test_mirroring_is_off_if_most_images_are_grey_by_their_pixels(tmp_path: Path) -> None:
    for name in ("a", "b"):
        for i in range(6):
            draw(tmp_path / "scans" / name / f"{i}.png", i, kind="same" if i else "RGB")
            draw(tmp_path / "photos" / name / f"{i}.jpg", i, kind="RGB" if i else "same")
    scans, photos = (load(path=tmp_path / name, root=tmp_path) for name in ("scans", "photos"))
    assert (scans.shape[0], scans.grey, scans.flip) == (3, 10, False)
    assert (photos.shape[0], photos.grey, photos.flip) == (3, 2, True)


def test_sizes_that_differ_are_refused_without_a_size(tmp_path: Path) -> None:
    files = [draw(tmp_path / "1.png"), draw(tmp_path / "2.png", size=(41, 30))]
    with pytest.raises(DataError) as caught:
        decoding.decoded(files)
    assert "data.size" in str(caught.value)
    assert str(files[1]) in str(caught.value)
    index = decoding.decoded(files, (10, 10))
    assert json.dumps(index.broken) == "{}"

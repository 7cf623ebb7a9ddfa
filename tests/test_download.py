"""Public data sets fetched from a real server: whole, or not at all."""

import hashlib
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from image_files import refusal, write_svhn
from ssfl.data import download
from ssfl.data.download import OFFICIAL, Official, Remote
from ssfl.data.sources import load


class Handler(BaseHTTPRequestHandler):
    """Serves `files`; paths that begin with /short end too early, with /stall never."""

    files: dict[str, bytes]

    def do_GET(self) -> None:
        _, behaviour, name = self.path.split("/")
        if name not in self.files:
            self.send_error(404)
            return
        body = self.files[name]
        self.send_response(200)
        if behaviour != "unannounced":
            self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body if behaviour in ("good", "unannounced") else body[:-10])
        if behaviour == "stall":
            self.wfile.flush()
            time.sleep(1.5)

    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.fixture
def address(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """A server that offers small SVHN files."""
    origin = tmp_path / "origin"
    origin.mkdir()
    write_svhn(origin)
    files = {path.name: path.read_bytes() for path in origin.iterdir()}
    handler = type("Files", (Handler,), {"files": files})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
    base = f"http://127.0.0.1:{server.server_port}"
    offer(monkeypatch, f"{base}/good", files)
    yield base
    server.shutdown()
    server.server_close()


def offer(monkeypatch: pytest.MonkeyPatch, base: str, files: dict[str, bytes]) -> None:
    remotes = tuple(
        Remote(name, f"{base}/{name}", hashlib.md5(files[name]).hexdigest(), len(files[name]))
        for name in ("train_32x32.mat", "test_32x32.mat")
    )
    monkeypatch.setitem(OFFICIAL, "svhn", Official(remotes))


def move(monkeypatch: pytest.MonkeyPatch, base: str, **changes: str) -> Remote:
    """Put the offered files elsewhere."""
    remotes = tuple(
        replace(remote, url=f"{base}/{remote.file}", **changes)  # type: ignore[arg-type]
        for remote in OFFICIAL["svhn"].remotes
    )
    monkeypatch.setitem(OFFICIAL, "svhn", Official(remotes))
    return remotes[0]


@pytest.mark.parametrize("behaviour", ["good", "unannounced"])
def test_download(
    tmp_path: Path,
    address: str,
    behaviour: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    move(monkeypatch, f"{address}/{behaviour}")
    root = tmp_path / "root"
    data = load("svhn", root=root, download=True)
    assert data.labels.tolist() == [0, 1, 9]
    assert sorted(p.name for p in root.rglob("*")) == ["svhn", "test_32x32.mat", "train_32x32.mat"]
    shown = capsys.readouterr()
    assert shown.out == ""
    assert "train_32x32.mat" in shown.err
    move(monkeypatch, "http://127.0.0.1:9")  # what is there is neither fetched nor verified again
    move(monkeypatch, "http://127.0.0.1:9", md5="0" * 32)
    assert len(load("svhn", root=root, download=True).images) == 3


def test_download_of_the_missing_one_only(tmp_path: Path, address: str) -> None:
    write_svhn(tmp_path)
    (tmp_path / "test_32x32.mat").unlink()
    load("svhn", root=tmp_path, download=True)
    assert [p.name for p in (tmp_path / "svhn").iterdir()] == ["test_32x32.mat"]


def failed_download(root: Path, remote: Remote, *words: str) -> None:
    refusal(
        lambda: load("svhn", root=root, download=True),
        *(remote.file, remote.url, remote.md5, root / "svhn"),
        *words,
    )
    assert list((root / "svhn").iterdir()) == []


def test_download_with_a_wrong_checksum(
    tmp_path: Path, address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    remote = move(monkeypatch, f"{address}/good", md5="0" * 32)
    failed_download(tmp_path, remote, "md5", "removed", "try again")


def test_what_has_no_https_is_checked_by_sha256(
    tmp_path: Path, address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file with the right MD5 and another SHA-256 is what somebody on the way could make."""
    remote = move(monkeypatch, f"{address}/good", sha256="0" * 64)
    refusal(lambda: load("svhn", root=tmp_path, download=True), remote.url, f"sha256 {'0' * 64}", "removed")
    assert list((tmp_path / "svhn").iterdir()) == []


def test_every_official_address_has_https_or_a_sha256() -> None:
    for official in OFFICIAL.values():
        for remote in official.remotes:
            assert remote.url.startswith("https://") or len(remote.sha256) == 64


@pytest.mark.parametrize("behaviour", ["short", "stall", "good/absent", "nowhere"])
def test_download_that_fails(
    tmp_path: Path, address: str, behaviour: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(download, "TIMEOUT", 0.5)
    base = "http://127.0.0.1:9" if behaviour == "nowhere" else f"{address}/{behaviour}"
    failed_download(tmp_path, move(monkeypatch, base), "cannot be downloaded", "md5")


def test_download_into_a_folder_that_cannot_be(tmp_path: Path, address: str) -> None:
    (tmp_path / "svhn").write_text("in the way")
    refusal(lambda: load("svhn", root=tmp_path, download=True), tmp_path / "svhn", "http")


def test_interrupted_download_leaves_nothing(
    tmp_path: Path, address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(remote: Remote, part: Path) -> str:
        part.write_bytes(b"half")
        raise KeyboardInterrupt

    monkeypatch.setattr(download, "_stream", interrupt)
    with pytest.raises(KeyboardInterrupt):
        load("svhn", root=tmp_path, download=True)
    assert list((tmp_path / "svhn").iterdir()) == []

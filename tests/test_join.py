"""What a site says, and what it keeps to itself: servers that do not work, errors, and a full federation."""

import ssl
import subprocess
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from flwr.app import ConfigRecord, Context, Message, RecordDict

from conftest import Call
from ssfl.deploy import flower, internals
from stage import Stage, free_port, sets

Answer = Callable[[str], tuple[int, bytes]]


@contextmanager
def serving(answer: Answer, ring: Path | None, host: str = "127.0.0.1") -> Iterator[tuple[str, list[str]]]:
    """A real web server with an answer for each path; its address, and the paths that it was asked for."""
    asked: list[str] = []

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self) -> None:
            self.rfile.read(int(self.headers["content-length"]))
            asked.append(self.path)
            status, body = answer(self.path)
            self.send_response(status)
            self.send_header("content-length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *words: object) -> None:
            pass

    with ThreadingHTTPServer((host, 0), Handler) as server:
        server.daemon_threads = True
        if ring is not None:
            context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
            context.load_cert_chain(ring / "centre.crt", ring / "centre.key")
            server.socket = context.wrap_socket(server.socket, server_side=True)
        threading.Thread(target=server.serve_forever, daemon=True).start()
        try:
            yield f"{host}:{server.server_port}", asked
        finally:
            server.shutdown()


def broken(path: str) -> tuple[int, bytes]:
    return 503, b"back\nsoon"


def half_broken(path: str) -> tuple[int, bytes]:
    """Lets every site in, and then answers no request for work."""
    if not path.endswith("/activate-node"):
        return broken(path)
    return 200, internals.TYPES["fleet/activate-node"][1](node_id=7).SerializeToString()


@pytest.mark.parametrize("answer", [broken, half_broken])
def test_a_centre_that_answers_with_errors_is_given_up_after_the_patience(
    answer: Answer, folders: Path, ring: Path, ssfl: Call
) -> None:
    with serving(answer, ring) as (place, asked):
        code, out, err = ssfl("join", place, "--data", str(folders / "aachen"), "--key",
                              str(ring / "aachen.site"), "--device", "cpu", "--patience", "3")  # fmt: skip
    assert code == 2
    assert len(asked) > 2  # it was tried again, and said so once
    assert out.count("503 back soon") == 1
    [line] = err.splitlines()
    assert place in line
    assert "503 back soon" in line


@pytest.mark.parametrize(("status", "body"), [(404, b"not here"), (200, b"<html>hello</html>")])
def test_a_server_that_is_no_centre_is_one_clear_line(
    status: int, body: bytes, folders: Path, ssfl: Call
) -> None:
    with serving(lambda path: (status, body), None) as (place, _):
        code, out, err = ssfl(
            "join", place, "--data", str(folders / "aachen"), "--insecure", "--patience", "2"
        )
    assert code == 2
    assert out.count("trying again") == 1
    [line] = err.splitlines()
    assert place in line
    assert "key" not in line


def in_use(path: str) -> tuple[int, bytes]:
    return 412, b'{"code":2004,"detail":"Failed to activate SuperNode."}'


def test_a_key_that_a_connected_site_uses_is_one_clear_line(folders: Path, ring: Path, ssfl: Call) -> None:
    with serving(in_use, ring) as (place, _):
        code, out, err = ssfl("join", place, "--data", str(folders / "aachen"), "--key",
                              str(ring / "aachen.site"), "--device", "cpu", "--patience", "2")  # fmt: skip
    assert code == 2
    [line] = err.splitlines()
    assert "uses this key" in line
    assert out.count("uses this key") == 1
    assert "SuperNode" not in out + err


@pytest.mark.slow
def test_a_key_on_two_machines_is_told_at_both_ends(folders: Path, ring: Path, stage: Stage) -> None:
    port = free_port()
    serve = stage.serve(folders, ring, port, *sets())
    first = stage.join("aachen", port, folders, ring)
    stage.until("serve", "aachen has connected")
    second = stage.ssfl("second", "join", f"127.0.0.1:{port}", "--data", folders / "bonn", "--key",
                        ring / "aachen.site", "--device", "cpu")  # fmt: skip
    assert stage.ended(second) == 2
    assert "uses this key" in stage.said("second").splitlines()[-1]
    assert stage.said("serve").count("refused: aachen sent ") == 1
    assert serve.poll() is None
    assert first.poll() is None


def test_a_certificate_for_another_host_is_one_clear_line(folders: Path, ring: Path, ssfl: Call) -> None:
    with serving(broken, ring, "127.0.0.2") as (place, _):
        code, _, err = ssfl("join", place, "--data", str(folders / "aachen"), "--key",
                            str(ring / "aachen.site"), "--device", "cpu", "--patience", "2")  # fmt: skip
    assert code == 2
    assert "ssfl keys init --host 127.0.0.2" in err


@pytest.mark.parametrize(
    "address",
    [
        "exa mple.org:80",
        "[::1:80",
        "::1:80",
        "[]:80",
        "no.such.host.invalid:80",
        "a:99999",
        "a:0",
        "https://a:80",
        "a@b:80",
        "a",
        ":80",
        "a:\u0663",
    ],
)
def test_an_address_that_cannot_be_used_is_one_clear_line(
    address: str, folders: Path, ring: Path, ssfl: Call
) -> None:
    code, _, err = ssfl("join", address, "--data", str(folders / "aachen"), "--key",
                        str(ring / "aachen.site"), "--patience", "1")  # fmt: skip
    assert code == 2
    [line] = err.splitlines()
    assert address in line


@pytest.mark.parametrize("settings", [{"data": "/srv/ward-7"}, {"data": "/srv/ward-7", "name": "aachen"}])
def test_under_flowers_own_commands_no_path_leaves_a_site_either(
    settings: dict[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    internals.identity(1, 1, 1)
    asked = RecordDict({"config": ConfigRecord({"ask": "name"})})
    message = Message(asked, dst_node_id=7, message_type="query")
    reply = flower.client(message, Context(1, 7, dict(settings), RecordDict(), {}))
    assert reply.has_error()
    assert "ward-7" not in str(reply.error.reason)
    told = capsys.readouterr().out
    assert ("ward-7" in told) == (
        "name" in settings
    )  # why its images cannot be read, or that name is missing


@pytest.mark.slow
def test_without_keys_a_site_too_many_is_sent_away_with_one_line(folders: Path, stage: Stage) -> None:
    port, rounds = free_port(), sets("federation.rounds=1000")
    serve = stage.ssfl("serve", "serve", "--data", folders / "labelled", "--insecure", "--sites", 1, "--port",
                       port, "--out", stage.folder / "run", *rounds)  # fmt: skip
    stage.until("serve", "listening")

    def join(name: str) -> "subprocess.Popen[bytes]":
        return stage.ssfl(name, "join", f"127.0.0.1:{port}", "--insecure", "--data", folders / name,
                          "--device", "cpu", "--threads", 1)  # fmt: skip

    join("aachen")
    stage.until("serve", "aachen has connected")
    second = join("bonn")
    assert stage.ended(second) == 2
    *before, last = stage.said("bonn").splitlines()
    assert last.startswith("ssfl: ")
    assert "bonn" in last
    assert last.removeprefix("ssfl: ") not in before
    assert serve.poll() is None  # it goes on
    assert stage.said("serve").count("bonn may not join") == 1

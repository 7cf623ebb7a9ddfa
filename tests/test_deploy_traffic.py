"""What travels between a centre and its sites: the traffic of a whole federation is recorded and searched."""

import shutil
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
import torch

from ssfl.data import sources
from ssfl.deploy import centre
from ssfl.runs import folder, resolve
from ssfl.simulate.simulation import evaluated_row
from stage import NAMES, Stage, checkpoint, config_of, files, free_port, same, sets, simulated


@contextmanager
def recorded(port: int) -> Iterator[tuple[int, dict[str, list[bytes]]]]:
    """A port that passes everything on to another, and what went through it, up and down."""
    heard: dict[str, list[bytes]] = {"up": [], "down": []}
    with socket.create_server(("127.0.0.1", 0)) as listening:

        def pass_on(source: socket.socket, target: socket.socket, way: str) -> None:
            mine: list[bytes] = []
            try:
                while part := source.recv(65536):
                    mine.append(part)
                    target.sendall(part)
            except OSError:
                pass
            finally:
                heard[way].append(b"".join(mine))
                for end in (source, target):
                    end.close()

        def accept() -> None:
            while True:
                try:
                    near = listening.accept()[0]
                    far = socket.create_connection(("127.0.0.1", port))
                except OSError:
                    if listening.fileno() < 0:
                        return
                    near.close()
                    continue
                for ends in ((near, far, "up"), (far, near, "down")):
                    threading.Thread(target=pass_on, args=ends, daemon=True).start()

        threading.Thread(target=accept, daemon=True).start()
        yield listening.getsockname()[1], heard


@pytest.mark.slow
def test_no_image_label_or_path_ever_travels(folders: Path, stage: Stage) -> None:
    port, out = free_port(), stage.folder / "run"
    serve = stage.ssfl("serve", "serve", "--data", folders / "labelled", "--insecure", "--sites", 3, "--port",
                       port, "--out", out, "--share-model", *sets())  # fmt: skip
    stage.until("serve", "listening")
    with recorded(port) as (near, heard):
        joins = [
            stage.ssfl(name, "join", f"127.0.0.1:{near}", "--insecure", "--data", folders / name, "--name",
                       f"site-{number}", "--device", "cpu", "--threads", 1, "--keep", f"kept-{number}")
            for number, name in enumerate(NAMES)
        ]  # fmt: skip
        assert stage.ended(serve) == 0, stage.said("serve")
        for process in joins:
            assert stage.ended(process) == 0
    up, down = (b"\n".join(heard[way]) for way in ("up", "down"))
    # the record is of what travelled: the first model went down, and the last one came as it was averaged
    config = config_of(folders, [])
    sim, _ = centre.prepare(config)
    assert sim.initial().average.numpy().tobytes() in down
    assert evaluated_row(checkpoint(out)).numpy().tobytes() in down
    assert same(checkpoint(out), simulated(config, folders))
    events = [event for event in folder.read_events(out) if event["event"] == "round"]
    for way, bodies in (("up", up), ("down", down)):
        models, wire = (sum(event[f"{kind}_{way}"] for event in events) for kind in ("bytes", "wire"))
        assert models == 3 * 3 * sim.message_bytes() <= wire <= len(bodies)
    # no image, in no shape
    data = resolve.load_data(config)
    mean, std = (np.array(part, np.float32) for part in (data.mean, data.std))
    for name in (*NAMES, "labelled"):
        for file in files(folders, name):
            [pixels] = sources.read_image_files([file], *data.shape).numpy()
            grey = (pixels / np.float32(255) - mean) / std
            for form in (file.read_bytes(), pixels, pixels / np.float32(255), grey.astype(np.float32)):
                content = form if isinstance(form, bytes) else form.tobytes()
                assert content not in up
                assert content not in down
            for text in (file.name, str(file.parent)):
                assert text.encode() not in up
                assert text.encode() not in down
    # no label, in no width
    for labels in (data.labels, data.test_labels):
        for kind in (torch.int64, torch.int32, torch.uint8, torch.float32):
            assert labels.to(kind).numpy().tobytes() not in up + down
    for text in (str(folders), str(stage.folder), str(Path.home()), *NAMES):
        assert text.encode() not in up + down


@pytest.mark.slow
def test_an_image_that_breaks_during_the_run_is_named_at_its_site_alone(folders: Path, stage: Stage) -> None:
    port, out, ward = free_port(), stage.folder / "run", stage.folder / "ward-7"
    shutil.copytree(folders / "aachen", ward)
    file = sorted(ward.iterdir())[0]
    serve = stage.ssfl("serve", "serve", "--data", folders / "labelled", "--insecure", "--sites", 3, "--port",
                       port, "--out", out, *sets("federation.rounds=12"))  # fmt: skip
    stage.until("serve", "listening")

    def join(number: int, place: int, data: Path) -> None:
        stage.ssfl(f"site-{number}", "join", f"127.0.0.1:{place}", "--insecure", "--data", data, "--name",
                   f"site-{number}", "--device", "cpu", "--threads", 1)  # fmt: skip

    with recorded(port) as (near, heard):
        join(0, near, ward)
        stage.until("site-0", "connected")
        content = file.read_bytes()
        file.write_bytes(content[:40])
        for number in (1, 2):
            join(number, port, folders / NAMES[number])
        stage.until("serve", "round 2/12  accuracy")
        file.write_bytes(content)  # repaired, the site takes part again
        assert stage.ended(serve) == 0, stage.said("serve")
        assert stage.ended(stage.started[1]) == 0
    rounds = [event for event in folder.read_events(out) if event["event"] == "round"]
    assert [event["returned"] for event in rounds[:2]] == [[1, 2]] * 2
    assert rounds[-1]["returned"] == [0, 1, 2], stage.said("serve")
    assert str(file) in stage.said("site-0")
    assert "site-0 answered with an error: 1 of its" in stage.said("serve")
    up = b"\n".join(heard["up"])
    assert b"1 of its" in up
    received = [up.decode("latin1"), stage.said("serve")]
    received += [part.read_bytes().decode("latin1") for part in out.rglob("*") if part.is_file()]
    for text in (ward.name, file.name, str(stage.folder)):
        assert not any(text in one for one in received[:1])
    assert not any(ward.name in one for one in received)

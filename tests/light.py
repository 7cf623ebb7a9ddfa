"""Light sites: they hold no images and train nothing, so that many of them fit into one process."""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import httpx
import numpy as np
from flwr.app import Array, ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict

from ssfl.deploy.connection import connected
from ssfl.deploy.internals import CannotCarry
from ssfl.deploy.keys import SiteKey
from ssfl.errors import SsflError


def model(numbers: int) -> RecordDict:
    """A message as long as a model of so many float32 numbers."""
    content = RecordDict({"config": ConfigRecord({"ask": "train"})})
    content["model"] = ArrayRecord({"row": Array(np.random.default_rng(1).random(numbers, np.float32))})
    return content


def answer(message: Message) -> Message:
    """What came, with other numbers."""
    content = RecordDict(
        {"metrics": MetricRecord({"images": 1, "loss": float(np.random.default_rng().random())})}
    )
    content["config"] = ConfigRecord({"name": "light"})
    if "model" in message.content:
        row = message.content.array_records["model"]["row"].numpy()
        content["model"] = ArrayRecord({"row": Array(row + np.float32(np.random.default_rng().random()))})
    return Message(content, reply_to=message)


@dataclass
class Crowd:
    """Sites in threads of this process."""

    reply: Callable[[Message], Message] = answer
    over: threading.Event = field(default_factory=threading.Event)
    lost: list[str] = field(default_factory=list)
    """Connections that had to be made again, and why."""
    threads: list[threading.Thread] = field(default_factory=list)

    def attend(self, address: str, key: SiteKey) -> None:
        """Answer whatever comes until it is over."""
        while not self.over.is_set():
            try:
                with connected(address, key, 600) as connection:
                    while not self.over.is_set():
                        message = connection.receive()
                        if message is None:
                            self.over.wait(0.5)
                            continue
                        began = time.monotonic()
                        connection.send(self.reply(message), time.monotonic() - began)
            except (httpx.HTTPError, CannotCarry) as error:
                reply = error.response.text if isinstance(error, httpx.HTTPStatusError) else ""
                self.lost.append(f"{key.name}: {error!r} {reply}")
            except SsflError as error:  # the centre does not want it any more
                self.lost.append(f"{key.name}: {error}")
                return


@contextmanager
def crowd(address: str, keys: list[SiteKey]) -> Iterator[Crowd]:
    """Sites with these keys, as long as the context lasts."""
    made = Crowd()
    for key in keys:
        thread = threading.Thread(target=made.attend, args=(address, key), daemon=True)
        thread.start()
        made.threads.append(thread)
    try:
        yield made
    finally:
        made.over.set()
        for thread in made.threads:
            thread.join(60)

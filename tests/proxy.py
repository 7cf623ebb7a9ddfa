"""A TCP proxy on this machine whose connections a test can cut or hold up."""

import select
import socket
import struct
import threading
from dataclasses import dataclass, field

RESET = struct.pack("ii", 1, 0)
"""SO_LINGER with no time: closing sends RST, as a router does that forgot a connection."""


@dataclass
class Proxy:
    """Passes on what comes to its port to another port of this machine."""

    target: int
    listening: socket.socket = field(default_factory=lambda: socket.create_server(("127.0.0.1", 0)))
    free: threading.Event = field(default_factory=threading.Event)
    """Cleared while nothing is passed on."""
    halving: bool = False
    """Whether connections end in the middle of what they carry next."""
    pairs: set[tuple[socket.socket, socket.socket]] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.port = int(self.listening.getsockname()[1])
        self.free.set()
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        while True:
            try:
                near, _ = self.listening.accept()
            except OSError:
                return
            threading.Thread(target=self._carry, args=(near,), daemon=True).start()

    def _carry(self, near: socket.socket) -> None:
        """One connection, both ways, until either end or `cut` closes it."""
        try:
            far = socket.create_connection(("127.0.0.1", self.target), 30)
        except OSError:
            near.close()
            return
        pair = near, far
        self.pairs.add(pair)
        other = {near: far, far: near}
        try:
            while True:
                for source in select.select(pair, (), ())[0]:
                    data = source.recv(65_536)
                    self.free.wait()
                    if not data:
                        return
                    if self.halving and len(data) > 1:
                        other[source].sendall(data[: len(data) // 2])
                        return
                    other[source].sendall(data)
        except (OSError, ValueError):  # cut, or closed by one of them
            pass
        finally:
            self.pairs.discard(pair)
            for end in pair:
                end.close()

    def cut(self) -> int:
        """Resets all connections; returns how many there were."""
        pairs = list(self.pairs)
        for pair in pairs:
            for end in pair:
                try:
                    end.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET)
                    end.shutdown(socket.SHUT_RDWR)
                except OSError:
                    pass
        return len(pairs)

    def close(self) -> None:
        """Ends the proxy."""
        self.listening.close()
        self.free.set()
        self.cut()

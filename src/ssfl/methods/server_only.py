"""No users at all: what the server can do alone with its labels. The baseline to beat."""

from dataclasses import dataclass
from typing import Any, ClassVar

from ssfl.errors import ConfigError
from ssfl.federation import Fed, Method, State


@dataclass(frozen=True)
class ServerOnly(Method):
    """Supervised training on the server's labelled images."""

    defaults: ClassVar = {"model": {"norm": "group"}}
    trains_users: ClassVar = False

    def check(self, config: Any) -> None:
        if config.split.labels_at == "users" or config.split.server_labels == 0:
            raise ConfigError(
                "method.name = 'server-only' needs labels at the server: use split.labels_at=server and "
                "split.server_labels above 0",
                key="split.labels_at",
                value=config.split.labels_at,
                fix="split.labels_at=server",
            )

    def round(self, state: State, fed: Fed) -> State:
        server = fed.train_server(state.average)
        return state.next(server.row.repeat(len(state.streams), 1), server.row, kept=[server])

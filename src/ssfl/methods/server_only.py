"""The baseline to beat: the server trains on its labels, without any users."""

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
                f"split.labels_at = {config.split.labels_at!r} and split.server_labels = "
                f"{config.split.server_labels}: method.name = 'server-only' needs labels at the server. Set "
                "split.labels_at=server and split.server_labels above 0.",
                key="split.labels_at",
                value=config.split.labels_at,
                fix="split.labels_at=server",
            )

    def round(self, state: State, fed: Fed) -> State:
        server = fed.train_server(state.average)
        return state.next(server.row.repeat(len(state.streams), 1), server.row, momentum_of=[server])

"""The method "server-only", the baseline to beat: the server trains on its labels, without users."""

from dataclasses import dataclass
from typing import Any, ClassVar

from ssfl.errors import ConfigError
from ssfl.federation import Fed, Method, State
from ssfl.methods import parts


@dataclass(frozen=True)
class ServerOnly(Method):
    """The server trains on its labelled images. Users do not take part."""

    defaults: ClassVar = {"model": {"norm": "group"}}
    trains_users: ClassVar = False

    def check(self, config: Any) -> None:
        """Raises ConfigError if the server has no labelled images to train on."""
        needs = "method.name = 'server-only' needs labels at the server"
        if config.split.labels_at == "users":
            raise ConfigError(
                f"split.labels_at = 'users', but {needs}: set split.labels_at=server",
                key="split.labels_at",
                value="users",
                fix="split.labels_at=server",
            )
        if config.split.server_labels == 0:
            raise ConfigError(
                f"split.server_labels = 0, but {needs}: raise split.server_labels",
                key="split.server_labels",
                value=0,
            )

    def round(self, state: State, fed: Fed) -> State:
        return parts.server_alone(state, fed)

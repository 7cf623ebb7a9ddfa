"""The ServerApp and the ClientApp that `flwr run` starts. Their code is part of ssfl."""

from ssfl.deploy.flower import client, server

__all__ = ["client", "server"]

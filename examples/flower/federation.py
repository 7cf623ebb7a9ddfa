"""The two apps that Flower runs. All their code comes with ssfl."""

from ssfl.deploy.flower import client, server

__all__ = ["client", "server"]

"""The apps that Flower runs; all there is to them comes with ssfl."""

from ssfl.deploy.flower import client, server

__all__ = ["client", "server"]

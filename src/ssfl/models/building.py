"""Builds the network that a config asks for: a built-in one, a pretrained one, or a person's own module."""

from torch import nn

from ssfl.config.settings import Config
from ssfl.core import outside
from ssfl.data.dataset import Dataset
from ssfl.models import backbones, external, networks, weights


def network_of(config: Config, dataset: Dataset, make: external.Factory | None = None) -> nn.Module:
    """Returns the network to train, with its initial weights. It is the network of the config, after changes
    by the method (`Method.network`). `make` is a person's factory function, if one was passed from Python."""
    return config.method.network(plain_network_of(config, dataset, make))


def plain_network_of(config: Config, dataset: Dataset, make: external.Factory | None = None) -> nn.Module:
    """Returns the network of the config with its initial weights, without changes by the method (see
    `network_of`). `make` is a person's factory function, if one was passed from Python."""
    name, norm, seed = config.model.name or "", config.model.norm, config.run.seed
    if outside.is_outside(name):
        network = external.named(name, make, len(dataset.classes), dataset.shape, seed)
    elif name in backbones.NAMES:
        pretrained = config.model.weights is None
        network = backbones.build(name, len(dataset.classes), dataset.shape, config.model.train, pretrained)
    else:
        network = networks.build(name, len(dataset.classes), dataset.shape, norm, seed)
    if config.model.weights is not None:
        weights.load(external.plain(network), config.model.weights)
    return network


def is_saved_whole(config: Config) -> bool:
    """Returns whether a saved model also contains the frozen weights. It does if the network is pretrained,
    or if its initial weights come from a file (model.weights). So a saved model can be used without the files
    from which these weights were read."""
    return config.model.name in backbones.NAMES or config.model.weights is not None

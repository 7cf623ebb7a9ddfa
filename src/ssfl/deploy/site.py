"""A site: the process that `ssfl join` starts. It has unlabelled images and opens one connection to the
centre. It does not listen on any port.

To the centre's SuperLink a site is a Flower SuperNode. It runs ssfl's ClientApp in its own process and
ignores the app bundle that Flower would install and run. A centre sends numbers and settings, never code.
"""

import json
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

import httpx
import numpy as np
import torch
from flwr.app import ConfigRecord, Context, Error, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.clientapp.typing import ClientAppCallable, Mod

from ssfl.core import outside
from ssfl.core.cohort import Cohort
from ssfl.core.rows import layout_of
from ssfl.data import split
from ssfl.data.dataset import Dataset
from ssfl.data.views import KINDS
from ssfl.deploy import Tell, silenced, wire
from ssfl.deploy.connection import RETRY, Connection, connected, connection_error
from ssfl.deploy.disclosure import PublicError, for_centre
from ssfl.deploy.images import Images
from ssfl.deploy.internals import CannotCarry
from ssfl.deploy.keys import SiteKey
from ssfl.engines import local
from ssfl.errors import DataError, SsflError, one_line, with_class
from ssfl.models import backbones
from ssfl.runs import assemble, predict
from ssfl.runs.surroundings import reproducible
from ssfl.simulate import privacy
from ssfl.simulate.simulation import Simulation

GRACE = 2.0
"""A site that cannot take part waits this many seconds before it disconnects, so that its error message
reaches the centre."""
LONGEST = 500
"""The maximum length, in characters, of an error text that is sent to the centre."""
POLL = 0.5
"""Seconds that a site waits before it asks the centre for work again, if there was none."""


@dataclass
class Site:
    """One owner of unlabelled images in a real federation: the images, and the code that trains on them."""

    name: str
    images: Images
    device: str = "auto"
    threads: int | None = None
    tell: Tell = print
    keep: Path | None = None
    """The path to write the final model to, if the centre shares the model. None: do not write it."""
    done: bool = False
    """Whether this site's work is over: the centre said so, or this site cannot take part."""
    not_kept: SsflError | None = None
    """The error that prevented writing the final model, if there was one."""
    unfit: SsflError | None = None
    """The reason why this site cannot take part, if there is one: its code or its frozen weights differ from
    the centre's, or the centre has refused it."""
    heard: float = 0.0
    """The time of the last contact in seconds (`time.monotonic`): the centre answered a request for work, or
    this site finished a piece of work."""
    _ready: dict[str, Simulation] = field(default_factory=dict, repr=False)
    """The simulation for the most recent terms (the settings that the centre sent). It is cached so that the
    images are read only once."""

    def simulation(self, terms: str, user: int) -> Simulation:
        """Returns the simulation in which this site trains. In it, user `user` has the site's images and all
        other users have none. `terms` is the text with the settings that the centre sent."""
        key = f"{user} {terms}"
        if key not in self._ready:
            agreed = wire.read_terms(terms)
            if not 0 <= user < agreed.config.split.users:
                raise PublicError(
                    f"the centre numbers this site as user {user}, but has only {agreed.config.split.users} "
                    "users: ask the operator of the centre to restart it"
                )
            images = self.images.read(agreed.shape, agreed.white, self.tell)
            nothing = np.zeros(0, np.int64)
            owned = [nothing] * agreed.config.split.users
            owned[user] = np.arange(len(images))
            weak, strong = KINDS[agreed.config.data.views]
            data = Dataset(
                self.name, images, torch.full((len(images),), -1), images[:0], torch.tensor(nothing),
                tuple(str(number) for number in range(agreed.classes)), agreed.mean, agreed.std,
                flip=bool(agreed.config.data.flip), weak=weak, strong=strong,
            )  # fmt: skip
            run = replace(agreed.config.run, device=self.device, threads=self.threads)
            config = replace(agreed.config, run=run)
            device = assemble.choose_device(self.device)
            if config.privacy.clip is not None:
                self.tell(privacy.describe(privacy.planned(config)))
            self._ready.clear()
            with self._leaving_if_unfit(config.model.name):
                _require_same(agreed, "model.digest", config.model.name, outside.digest)
            with self._leaving_if_unfit(config.method.name):
                _require_same(agreed, "method.digest", config.method.name, outside.digest)
            sim = assemble.build(config, data, split.Parts(nothing, owned), nothing, device)
            frozen = sim.brought.get("model", {}).get("frozen", "")
            with self._leaving_if_unfit(config.model.name):
                _require_same(agreed, "model.frozen", config.model.name, lambda name: str(frozen))
            self._ready[key] = sim
        return self._ready[key]

    @contextmanager
    def _leaving_if_unfit(self, name: str | None) -> Iterator[None]:
        """A context manager that ends this site's work if the `with` block raises an error.

        The block compares the network or method `name` (its code or its frozen weights) with the centre's. It
        raises if they differ, or if the code is missing here. Then the work ends, because trying again would
        not help.
        """
        try:
            yield
        except SsflError as error:
            public = f"{name} is missing at this site or differs from the centre's, so the site has left"
            self.unfit, self.done = error, True
            raise PublicError(
                str(error), public=public, key=error.key, value=error.value, fix=error.fix
            ) from error

    def train(self, terms: str, user: int, round: int, content: RecordDict) -> local.Returned:
        """Trains this site's user for one round, starting from the model in `content`. Returns the trained
        model and its metrics.

        The training is the same as that of a simulated user: the same images, random numbers, loss and
        learning rates. With differential privacy, the update is clipped and noise is added before it is
        returned.
        """
        sim = self.simulation(terms, user)
        row = wire.unpack(content, sim.layout.length).to(sim.device)[None]
        work = sim.plan.users_work(round, Cohort((user,), (user,), ((0,),), (0,), (0,)))
        work = replace(work, sent=wire.read_numbers(content, row))
        sim.pool.use(round)
        weights = sim.layout.weights
        rest = torch.zeros_like(row[:, :weights])
        trained = local.train(sim.engine, sim.method, weights, row, rest, work)
        clip, noise = sim.config.privacy.clip, sim.config.privacy.noise
        if clip is None or noise is None:
            return trained
        normal = privacy.secret(row.numel()).to(row.device)
        return trained._replace(rows=privacy.released(row, trained.rows, clip, noise, normal))

    def end(self, asked: ConfigRecord, content: RecordDict) -> None:
        """Handles the centre's message that the run is over, or that this site is refused. `asked` has the
        settings in this message. If `content` has the final model and `keep` is set, the model is written to
        the path `keep`."""
        self.done = True
        if asked.get("refused"):
            self.unfit = SsflError(str(asked["why"]))
            return
        self.tell(str(asked["why"]))
        if self.keep is None:
            return
        if wire.MODEL not in content:
            self.tell(
                "no model was written: the centre does not share its model (`ssfl serve --share-model`)"
            )
            return
        try:
            for file in keep_model(self.keep, str(asked["card"]), content):
                self.tell(f"wrote {file}")
        except SsflError as error:  # such as a full disk; this does not concern the centre
            self.not_kept = error


def _require_same(agreed: wire.Terms, key: str, name: str | None, here: Callable[[str], str]) -> None:
    """Raises if the network or method `name` has other code or other frozen weights here than at the centre.

    `key` says what is compared: the code ("model.digest" or "method.digest") or the frozen weights
    ("model.frozen"). `here` takes `name` and returns this site's digest. It must be equal to the centre's
    digest, which is in `agreed`.

    External code and its frozen weights are always compared. If the code is in a file, this file must also
    have been allowed at this site with `--with`. Of ssfl's own networks and methods, only the frozen weights
    of pretrained networks are compared. If `name` is None, nothing is compared.
    """
    pretrained = name in backbones.NAMES and key == "model.frozen"
    if name is None or not (pretrained or outside.is_outside(name)):
        return
    section, _, what = key.partition(".")
    if outside.is_path(name):
        outside.require(name, f"{section}.name")
    if agreed.outside.get(key) != here(name) and pretrained:
        raise DataError(
            f"the frozen weights of {name} differ from the centre's: install the weights again, here or at "
            f"the centre, with `{backbones.REINSTALL}`"
        )
    if agreed.outside.get(key) != here(name):
        raise DataError(
            f"the {'code' if what == 'digest' else 'layers or frozen weights'} of {name} here differ from "
            "those at the centre: ask the operator of the centre for the centre's file"
        )


def keep_model(target: Path, card: str, content: RecordDict) -> list[Path]:
    """Checks the model in `content` and its model card `card`, which the centre sent. Writes them to two
    files: `target` with the endings .safetensors and .json, as `ssfl export` does. Returns the paths of the
    two files."""
    try:
        facts = json.loads(card)
        predict.check_description(facts)
        row = wire.unpack(content)
        network = predict.network_of(facts, target, len(row))
        tensors = layout_of(network).unflatten(row)
        predict.check_card(facts, tensors)
        model = predict.classifier_of(network, tensors, facts)
    except (ValueError, KeyError, TypeError, RuntimeError, RecursionError) as error:
        raise DataError(
            f"the centre's model does not match its description ({error}): {wire.SAME_VERSION}"
        ) from error
    return predict.write(model, predict.free_files(target)[:2])


def client_app(site_of: Callable[[Context], Site], *mods: Mod, tell: Tell = print) -> ClientApp:
    """Returns the Flower ClientApp of a site, which answers the centre's messages.

    A "query" message asks for the site's name, or says that the run is over or that the site is refused. A
    "train" message asks for one round of training. If the work fails, `tell` shows the full error at the
    site. The centre gets only a text that reveals nothing about the site's files. `site_of` returns the site
    that answers. `mods` are further Flower mods, functions that wrap the handling of each message.
    """

    def report_errors(message: Message, context: Context, call_next: ClientAppCallable) -> Message:
        try:
            return call_next(message, context)
        except Exception as error:
            why = one_line(error) if isinstance(error, SsflError) else with_class(error)
            tell(
                f"the centre's request failed here ({why}); the centre was told, and this site waits for its "
                "next request"
            )
            return Message(Error(code=0, reason=for_centre(error)[:LONGEST]), reply_to=message)

    app = ClientApp(mods=[report_errors, *mods])

    @app.query()
    def query(message: Message, context: Context) -> Message:
        site, asked = site_of(context), wire.settings(message.content)
        if asked["ask"] == "end":
            site.end(asked, message.content)
            if site.unfit is not None:
                tell(str(site.unfit))
        content = RecordDict({"metrics": MetricRecord({"images": len(site.images)})})
        content["config"] = ConfigRecord({"name": site.name})
        return Message(content, reply_to=message)

    @app.train()
    def train(message: Message, context: Context) -> Message:
        site, asked, began = site_of(context), wire.settings(message.content), time.perf_counter()
        round, user = (wire.whole(asked[name]) for name in ("round", "user"))
        terms = str(asked["terms"])
        trained = site.train(terms, user, round, message.content)
        private = site.simulation(terms, user).config.privacy.clip is not None
        metrics = trained.metrics
        numbers = f"loss {float(metrics['loss']):.3f}  mask rate {float(metrics['mask_rate']):.2f}"
        site.tell(f"round {round + 1}  {numbers}  {time.perf_counter() - began:.1f} s")
        return Message(wire.pack_trained(trained, len(site.images), round, private), reply_to=message)

    return app


def join(address: str, site: Site, key: SiteKey | None, patience: float) -> None:
    """Connects a site to the centre at `address` (HOST:PORT) and answers its messages until the run is over.

    Without a key the connection is not encrypted. If the centre cannot be reached, the site tries again for
    `patience` seconds, then raises.
    """

    def tell_failure(line: str) -> None:
        if site.unfit is None:  # otherwise the command ends with the same line, as its error
            site.tell(line)

    app = client_app(lambda context: site, tell=tell_failure)
    site.heard, in_vain = time.monotonic(), 0
    with reproducible(), silenced():
        while not site.done:
            before = site.heard
            with connected(address, key, patience, site.tell) as connection:
                if in_vain < 2:
                    site.tell(f"connected to {address} as {site.name} with {len(site.images)} images")
                try:
                    _attend(connection, app, site)
                except (httpx.HTTPError, CannotCarry) as error:
                    why = connection_error(error)
                    in_vain = in_vain + 1 if site.heard == before else 0
                    if isinstance(error, httpx.HTTPError) and time.monotonic() > site.heard + patience:
                        raise SsflError(
                            f"{address} has answered no request for work for {patience:.0f} s ({why}): ask "
                            "the operator of the centre to check it"
                        ) from error
                    if in_vain < 2:
                        site.tell(f"lost the connection to {address} ({why}): connecting again")
                    else:  # it is there, but does not work: say so only once
                        time.sleep(RETRY)
    for reason in (site.unfit, site.not_kept):
        if reason is not None:
            raise reason


def _attend(connection: Connection, app: ClientApp, site: Site) -> None:
    """Answers the centre's messages over this connection until the run is over for this site."""
    while not site.done:
        message = connection.receive()
        site.heard = time.monotonic()
        if message is None:
            time.sleep(POLL)
            continue
        began = time.perf_counter()
        reply = app(message, Context(message.metadata.run_id, connection.node.node_id, {}, RecordDict(), {}))
        site.heard = time.monotonic()  # training may take longer than the patience
        connection.send(reply, time.perf_counter() - began)
    if site.unfit is not None:
        time.sleep(GRACE)

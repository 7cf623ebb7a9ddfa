"""The sites that are connected to the centre, and how a site joins: the centre asks it for its name, and lets
it join or turns it away."""

import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field

from flwr.app import ConfigRecord, RecordDict

from ssfl.deploy import Tell, post, wire
from ssfl.deploy.internals import NodeInfo
from ssfl.deploy.keys import NAME, NAME_RULE
from ssfl.errors import DataError

GREETING = 10.0
"""The centre asks new sites for their names. It stops waiting after this many seconds without an answer;
later answers are still handled."""
LATER = 30.0
"""Seconds until the centre asks a site for its name again, if its answer was not valid."""
SOON = 10.0
"""Seconds until the centre asks a site for its name again, if the name was taken or the answer did not arrive
completely. The other site of that name may have disconnected without the centre knowing it yet."""
TAKEN = 30.0
"""Seconds for which a site without a key, whose name is taken, is asked for its name again. Then it is told
that the name is taken, and has to leave. A site with a key is asked again without a limit."""
EXCLUDED = "the centre has excluded this site after refusing three of its answers: ask its operator why"
"""The text that an excluded site is sent."""


@dataclass(kw_only=True)
class Sites:
    """The sites of a federation, and which of them are connected."""

    grid: post.Exchange
    """The connection to Flower that sends and receives messages."""
    names: list[str]
    """The names of the sites. Site `names[i]` is user i."""
    needed: int
    """How many sites the centre waits for before the first round."""
    deadline: float
    """How many seconds a site has to answer in a round."""
    tell: Tell
    exclude: Callable[[Collection[int]], None] = lambda nodes: None
    """A function that takes Flower's node numbers of excluded sites. It tells the process at the centre's
    port to refuse the requests of these nodes."""
    asked: bool = False
    """Whether sites choose their own names. Otherwise each site is known by its key."""
    images: dict[str, int] = field(default_factory=dict)
    """The number of images that each site reports."""
    doing: dict[str, str] = field(default_factory=dict)
    """For each site, a text that says what the site is doing. The centre shows it on the terminal, in a table
    of the sites."""
    left_out: set[str] = field(default_factory=set)
    """The names of the sites that are excluded from the run."""
    joined: set[str] = field(default_factory=set)
    """The names of all sites that have connected at least once. The default quorum is a fraction of their
    number."""
    nodes: dict[int, str] = field(default_factory=dict)
    """The name of the site behind each node. Flower numbers its nodes, and a site gets a new number when its
    key changes."""
    _greeted: dict[int, tuple[str, float]] = field(default_factory=dict)
    """For each node that was asked for its name: the identifier of the message that asked, and the time until
    which the node may answer (`time.monotonic`)."""
    _rejected: dict[int, float] = field(default_factory=dict)
    """For each node that may not join: the time before which the centre does not ask for its name again
    (`time.monotonic`)."""
    _taken: dict[int, float] = field(default_factory=dict)
    """For each node that sent the name of another connected site: when the node first sent this name
    (`time.monotonic`)."""
    _reached: bool = True
    """Whether Flower's SuperLink answered at the last attempt. It is used to report a failure only once."""

    def connected(self) -> dict[int, int]:
        """Finds out which sites are connected, and lets new sites join. Returns Flower's node number of each
        connected user that is not excluded. The keys are the users' numbers."""
        try:
            online = {node.node_id: node for node in self.grid.get_nodes()}
        except post.TROUBLE as error:
            if self._reached:
                self.tell(
                    "the process of this centre that exchanges messages with the sites (Flower's SuperLink) "
                    f"does not answer ({post.short(error)}): trying again"
                )
            self._reached = False
            return {}
        self._reached = True
        for node, name in list(self.nodes.items()):
            if node not in online:
                del self.nodes[node]
                self.doing[name] = "disconnected"
                self.tell(f"{name} has disconnected")
        now = time.monotonic()
        known = self.nodes.keys() | {node for node, until in self._rejected.items() if now < until}
        new = {number: node for number, node in online.items() if number not in known}
        self._greet(new)
        nodes = {name: node for node, name in self.nodes.items() if name not in self.left_out}
        return {user: nodes[name] for user, name in enumerate(self.names) if name in nodes}

    def _greet(self, strangers: Mapping[int, NodeInfo]) -> None:
        """Asks new sites for their names and numbers of images, and handles the answers.

        It waits only a few seconds for slow sites. Their answers are handled in a later call.
        """
        now = time.monotonic()
        self._greeted = {
            node: asked for node, asked in self._greeted.items() if node in strangers and now < asked[1]
        }
        new = {
            node: RecordDict({"config": ConfigRecord({"ask": "name"})})
            for node in strangers
            if node not in self._greeted
        }
        for node, name in post.send(self.grid, new, "query", self.deadline, self.tell, self.called):
            self._greeted[node] = name, now + self.deadline
        end, waiting = time.monotonic() + GREETING, set(new)
        while True:
            for node, content in self._greetings().items():
                self._introduce(node, content, strangers[node])
                waiting.discard(node)
                end = time.monotonic() + GREETING
            waiting &= self._greeted.keys()
            if not waiting or time.monotonic() > end:
                return
            time.sleep(getattr(self.grid, "pause", post.POLL))

    def _greetings(self) -> dict[int, RecordDict]:
        """Returns the answers that have arrived from sites that were asked for their names, by node."""
        answers = {}
        for node, (name, _) in list(self._greeted.items()):
            try:
                replies = list(self.grid.pull_messages([name]))
            except Exception as error:  # the answer is incomplete, or the site is gone: ask again
                self.tell(f"a site (node {node}) did not send its name: {post.short(error)}; asking again")
                self._rejected[node] = time.monotonic() + SOON
                del self._greeted[node]
                continue
            for reply in replies:
                del self._greeted[node]
                if reply.has_content():
                    answers[node] = reply.content
                elif reply.error.code not in post.LATE:
                    self.tell(
                        f"site {node} sent an error instead of its name: {post.short(reply.error.reason)}"
                    )
                    self._rejected[node] = time.monotonic() + LATER
        return answers

    def _introduce(self, node: int, content: RecordDict, info: NodeInfo) -> None:
        """Handles the answer of a site that was asked for its name: lets the site join, or turns it away."""
        try:
            claimed, count = wire.read_identity(content)
        except DataError as error:
            self.tell(f"site {info.name or node} sent {post.short(error)} instead of its name")
            self._rejected[node] = time.monotonic() + LATER
            return
        name = claimed if self.asked else info.name
        free = self.asked and len(self.names) < self.needed and NAME.fullmatch(name)
        if free and name not in self.names:
            self.names = sorted([*self.names, name])
        if name not in self.names or name in self.nodes.values():
            self._turn_away(node, name)
            return
        self.nodes[node], self.images[name] = name, count
        self.joined.add(name)
        self.doing[name] = "connected"
        self.tell(f"{name} has connected, with {count} images")
        if name in self.left_out:
            self.dismiss_nodes([node], EXCLUDED)

    def _turn_away(self, node: int, name: str) -> None:
        """Refuses to let a site join: its name is taken or not allowed, or the centre does not expect this
        site.

        If sites have keys, a site whose name is taken is asked again later. The other site of that name may
        have disconnected by then. A site that is not expected is not asked again.

        If sites choose their own names, a site whose name is taken is asked again for `TAKEN` seconds. Then
        the site is told why it may not join. A site that is not expected, or whose name is not allowed, is
        told so at once. After that, the site is not asked again.
        """
        now, taken = time.monotonic(), name in self.names
        if taken:
            why = "a connected site has this name" + (": start it with another --name" if self.asked else "")
        elif not self.asked:
            why = "no site of this name is expected"
        elif not NAME.fullmatch(name):
            why = f"its name must have {NAME_RULE}"
        else:
            why = f"the centre waits for {self.needed} sites, and as many others have joined already"
        name = post.short(name)
        self.tell(f"{name} may not join: {why}")
        if taken and now - self._taken.setdefault(node, now) < TAKEN:
            self._rejected[node] = now + SOON
            return
        self._rejected[node] = float("inf") if self.asked or not taken else now + SOON
        if self.asked:
            self.dismiss_nodes([node], f"the centre does not let {name} join: {why}")

    def called(self, node: int) -> str:
        """Returns the name of a node's site for messages, or the node's number if the name is unknown."""
        return self.nodes.get(node, str(node))

    def dismiss_nodes(self, nodes: Collection[int], why: str) -> None:
        """Tells these nodes why they may not take part, and lets the centre's port refuse their further
        requests. Does not wait for answers."""
        end = ConfigRecord({"ask": "end", "why": why, "refused": True})
        contents = {node: RecordDict({"config": end}) for node in nodes}
        list(post.send(self.grid, contents, "query", self.deadline, self.tell, self.called))
        try:
            self.exclude(nodes)
        except post.TROUBLE as error:  # they stay excluded: the centre sends them nothing
            self.tell(
                f"refused sites could not be disconnected ({post.short(error)}); they get no more models, "
                "and their answers are not used"
            )

"""emfed over Flower: a courier between the mailboxes of sites and those of the server.

Flower starts this program at the server and at every SuperNode. It sees messages as opaque bytes.
Rows and keys are with ``emfed join mailbox:FOLDER`` at a site, and the relay with ``emfed serve``,
under accounts of their own (docs/platforms.md).
"""

import time

from flwr.app import ConfigRecord, Message, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import ServerApp

from emfed.network.mailbox import Courier, exchange

QUERY, RECORD, LETTERS, SITE = "emfed", "emfed", "letters", "site"
LIFETIME = 120.0
"""Seconds until a message to a node that is away counts as lost."""
PAUSE = 0.2
"""Seconds between two looks of the server for messages and answers."""
client = ClientApp()
server = ServerApp()  # each by itself: Flower looks for these names in the text


def packed(letters, site=""):
    """Letters as the content of a message of Flower's, and whose they are."""
    return RecordDict({RECORD: ConfigRecord({LETTERS: letters, SITE: site})})


def unpacked(message):
    """The inverse of `packed`."""
    record = {} if message.has_error() else message.content.get(RECORD, {})
    return list(record.get(LETTERS, [])), str(record.get(SITE, ""))


@client.query(QUERY)
def carry(message, context):
    """At a site, where ``--node-config 'mailbox="..." site="oslo"'`` says which it is.

    The name counts where nodes have no keys of Flower's, on one machine.
    """
    letters = exchange(str(context.node_config["mailbox"]), unpacked(message)[0])
    return Message(packed(letters, context.node_config.get("site", "")), reply_to=message)


@server.main()
def run(grid, context):
    """At the server: ask every node in turn, until ``emfed serve`` is over."""
    nodes = Nodes(grid, Courier(str(context.run_config["mailboxes"])))
    while not nodes.courier.over:
        nodes.look()
        time.sleep(PAUSE)


class Nodes:
    """The nodes of a grid, by the names under which their keys were registered."""

    def __init__(self, grid, courier):
        self.grid, self.courier = grid, courier
        self.asked = {}  # by number of the message: the node, and when it is lost
        self.said = {}  # what nodes without a registered name call themselves

    def look(self):
        """Ask each node that is not asked, and take what has come."""
        now = time.monotonic()
        self.asked = {number: one for number, one in self.asked.items() if one[1] > now}
        busy = {node.node_id for node, _ in self.asked.values()}
        free = [node for node in self.grid.get_nodes() if node.node_id not in busy]
        out = [
            Message(
                packed(self.courier.down(self.site(node))),
                dst_node_id=node.node_id,
                message_type=f"query.{QUERY}",
                ttl=LIFETIME,
            )
            for node in free
        ]
        for node, number in zip(free, self.grid.push_messages(out), strict=True):
            if number:
                self.asked[number] = node, now + LIFETIME
        for answer in self.grid.pull_messages(list(self.asked)) if self.asked else ():
            node, _ = self.asked.pop(answer.metadata.reply_to_message_id, (None, 0))
            if node is not None and node.node_id == answer.metadata.src_node_id:
                letters, self.said[node.node_id] = unpacked(answer)
                self.courier.up(self.site(node), letters)

    def site(self, node):
        """A node's site."""
        return node.name or self.said.get(node.node_id, "")

"""emfed over vantage6: a courier between the mailboxes of sites and those of the server.

``carry`` runs once, at the node beside ``emfed serve``; ``visit`` runs at every node, in a new
container for every message. They see messages as opaque bytes. Rows and keys are with
``emfed join mailbox:FOLDER`` at a site, under an account of its own (docs/platforms.md). Containers
find the mailbox of the site in ``EMFED_MAILBOX``, and those of the server in ``EMFED_MAILBOXES``.
"""

import base64
import os

from vantage6.algorithm.tools.decorators import algorithm_client

from emfed.network.mailbox import Courier, exchange


def packed(letters):
    """Letters as vantage6 carries them."""
    return [base64.b64encode(letter).decode() for letter in letters]


def unpacked(texts):
    """The inverse of `packed`."""
    return [base64.b64decode(text) for text in texts]


@algorithm_client
def carry(client, sites):
    """Ask every site in turn until ``emfed serve`` is over; ``sites`` are organizations by name.

    Gives how many messages were carried.
    """
    courier, messages = Courier(os.environ["EMFED_MAILBOXES"]), 0
    while not courier.over:
        tasks = {site: ask(client, number, courier.down(site)) for site, number in sites.items()}
        for site, task in tasks.items():
            for answer in client.wait_for_results(task_id=task["id"], interval=0.5):
                letters = unpacked(answer["letters"])
                courier.up(site, letters)
                messages += len(letters)
    return {"messages": messages}


def ask(client, organization, letters):
    """Send one site what waits for it."""
    asked = {"method": "visit", "kwargs": {"letters": packed(letters)}}
    return client.task.create(input_=asked, organizations=[organization], name="emfed visit")


def visit(letters):
    """At a site: leave what came, and take what its member has to say."""
    return {"letters": packed(exchange(os.environ["EMFED_MAILBOX"], unpacked(letters)))}

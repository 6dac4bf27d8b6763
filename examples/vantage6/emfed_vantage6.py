"""emfed as a vantage6 algorithm: `fit` runs once, `step` runs at every node and answers a message.

vantage6 carries bytes between containers, so it is one more `Transport`. A node starts a new
container for every message; that is what `Site` is made for, since it keeps all that matters in its
folder. vantage6 gives every node a folder that lives as long as the job, in ``TEMPORARY_FOLDER``.
"""

import base64
import os
from pathlib import Path

from vantage6.algorithm.tools.decorators import algorithm_client, data

import emfed
from emfed.network import RemoteFederation, Site, SiteRules, Transport
from emfed.network.masking import SiteIdentity


class Vantage6(Transport):
    """Nodes of a collaboration, by the ids of their organizations."""

    def __init__(self, client, organizations):
        self.client, self.organizations = client, organizations

    @property
    def between_machines(self):
        return "EMFED_ROSTER" in os.environ  # with keys, three nodes or more mask what they tell

    def workers(self):
        return [str(number) for number in self.organizations]

    def deliver(self, messages, deadline):
        tasks = {site: self.ask(site, message) for site, message in messages.items()}
        for site, task in tasks.items():
            for answer in self.client.wait_for_results(task_id=task["id"], interval=0.5):
                yield site, base64.b64decode(answer["reply"])

    def ask(self, site, message):
        text = base64.b64encode(message).decode()
        asked = {"method": "step", "kwargs": {"organization": site, "message": text}}
        return self.client.task.create(input_=asked, organizations=[int(site)], name="emfed step")


@algorithm_client
def fit(client, model, **settings):
    """Fit a model, described as in ``run.toml``, to the rows of all nodes; gives its parameters."""
    organizations = [node["id"] for node in client.organization.list()]
    federation = RemoteFederation(Vantage6(client, organizations))
    result = emfed.fit(emfed.models.make_model(**model), federation, **settings)
    parameters = {name: value.tolist() for name, value in result.params.arrays().items()}
    sent = {"bytes_up": result.bytes_up, "bytes_down": result.bytes_down}
    return {"params": parameters, "rounds": result.rounds, "columns": result.columns, **sent}


@data(1)
def step(table, organization, message):
    """Answer one message from this node's rows.

    With ``EMFED_KEY`` and ``EMFED_ROSTER`` in the node's environment (its ``NAME.key`` and a folder
    of everybody's ``NAME.pub``) the node masks what it tells.
    """
    folder = Path(os.environ["TEMPORARY_FOLDER"]) / "emfed" / organization
    roster = os.environ.get("EMFED_ROSTER")
    identity = SiteIdentity.read(Path(os.environ["EMFED_KEY"]), Path(roster)) if roster else None
    rules = SiteRules(unmasked=identity is None)
    reply = Site(table, folder, rules=rules, identity=identity).step(base64.b64decode(message))
    return {"reply": base64.b64encode(reply).decode()}

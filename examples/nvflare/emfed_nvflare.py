"""emfed as an NVFlare recipe: a courier between the mailboxes of sites and those of the server.

NVFlare starts the controller at its server and the executor at every client. They see messages as
opaque bytes. Rows and keys are with ``emfed join mailbox:FOLDER`` at a site, and the relay with
``emfed serve``, under accounts of their own (docs/platforms.md).
"""

import time

from nvflare.apis.controller_spec import Task
from nvflare.apis.executor import Executor
from nvflare.apis.impl.controller import Controller
from nvflare.apis.shareable import Shareable
from nvflare.job_config.api import FedJob
from nvflare.recipe.spec import Recipe

from emfed.network.mailbox import Courier, exchange

TASK, LETTERS = "emfed", "letters"
LIFETIME = 120
"""Seconds until a message to a client that is away counts as lost."""
PAUSE = 0.1
"""Seconds between two looks for messages."""


class EmfedController(Controller):
    """Asks every client in turn, until ``emfed serve`` is over."""

    def __init__(self, mailboxes: str):
        super().__init__()
        self.mailboxes = mailboxes
        self.asked = {}  # by client: when the message is lost

    def start_controller(self, fl_ctx):
        pass

    def control_flow(self, abort_signal, fl_ctx):
        courier = Courier(self.mailboxes)

        def received(client_task, fl_ctx):
            site = client_task.client.name
            courier.up(site, client_task.result.get(LETTERS) or [])
            self.asked.pop(site, None)

        while not (courier.over or abort_signal.triggered):
            now = time.monotonic()
            for client in fl_ctx.get_engine().get_clients():
                if self.asked.get(client.name, 0) < now:
                    self.asked[client.name] = now + LIFETIME
                    content = Shareable({LETTERS: courier.down(client.name)})
                    task = Task(TASK, content, timeout=LIFETIME, result_received_cb=received)
                    self.broadcast(task, fl_ctx, targets=[client.name], min_responses=1)
            time.sleep(PAUSE)

    def stop_controller(self, fl_ctx):
        pass

    def process_result_of_unknown_task(self, client, task_name, client_task_id, result, fl_ctx):
        pass


class EmfedExecutor(Executor):
    """Carries for one site; ``SITE`` in the path stands for the client's name."""

    def __init__(self, mailbox: str):
        super().__init__()
        self.mailbox = mailbox

    def execute(self, task_name, shareable, fl_ctx, abort_signal):
        mailbox = self.mailbox.replace("SITE", fl_ctx.get_identity_name())
        return Shareable({LETTERS: exchange(mailbox, shareable[LETTERS])})


class EmfedRecipe(Recipe):
    """Carries what the sites of one ``emfed serve`` say; clients have the names of sites."""

    def __init__(self, *, clients: int, mailboxes: str, mailbox: str):
        job = FedJob(name="emfed", min_clients=clients)
        job.to_server(EmfedController(mailboxes))
        job.to_clients(EmfedExecutor(mailbox), tasks=[TASK])
        super().__init__(job)

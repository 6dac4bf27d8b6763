"""emfed as an NVFlare recipe: a controller that fits, and an executor that answers at each site.

NVFlare carries bytes between its server and its clients, so it is one more `Transport`.
"""

import queue
import time
from pathlib import Path

import polars as pl
from nvflare.apis.controller_spec import Task
from nvflare.apis.executor import Executor
from nvflare.apis.impl.controller import Controller
from nvflare.apis.shareable import Shareable
from nvflare.job_config.api import FedJob
from nvflare.recipe.spec import Recipe

import emfed
from emfed.network import RemoteFederation, Site, SiteRules, Transport
from emfed.network.masking import SiteIdentity

TASK = "emfed"


class NVFlare(Transport):
    """The clients of a job, by name."""

    def __init__(self, controller, context, abort, masked):
        self.controller, self.context, self.abort = controller, context, abort
        self.masked = masked

    @property
    def between_machines(self):
        return self.masked

    def workers(self):
        return sorted(client.name for client in self.context.get_engine().get_clients())

    def deliver(self, messages, deadline):
        answers, until = queue.SimpleQueue(), time.monotonic() + deadline

        def received(client_task, fl_ctx):
            answers.put((client_task.client.name, client_task.result.get("reply")))

        for site, message in messages.items():
            content = Shareable({"message": message})
            asked = Task(TASK, content, timeout=int(deadline), result_received_cb=received)
            self.controller.broadcast(asked, self.context, targets=[site], min_responses=1)
        waiting = set(messages)
        while waiting and time.monotonic() < until and not self.abort.triggered:
            try:
                site, reply = answers.get(timeout=0.2)
            except queue.Empty:
                continue
            waiting.discard(site)
            if reply is not None:  # else the client failed; the run asks again, or goes on without
                yield site, reply


class EmfedController(Controller):
    """Fits a model, described as in ``run.toml``, and writes a model file."""

    def __init__(self, model: dict, settings: dict, result: str, masked: bool):
        super().__init__()
        self.model, self.settings, self.result, self.masked = model, settings, result, masked

    def start_controller(self, fl_ctx):
        pass

    def control_flow(self, abort_signal, fl_ctx):
        federation = RemoteFederation(NVFlare(self, fl_ctx, abort_signal, self.masked))
        fitted = emfed.fit(emfed.models.make_model(**self.model), federation, **self.settings)
        fitted.save(self.result)
        self.log_info(fl_ctx, fitted.outcome)

    def stop_controller(self, fl_ctx):
        pass

    def process_result_of_unknown_task(self, client, task_name, client_task_id, result, fl_ctx):
        pass


class EmfedExecutor(Executor):
    """Answers for one site. ``SITE`` in a path stands for the client's name."""

    def __init__(self, data: str, directory: str, keys: str):
        super().__init__()
        self.data, self.directory, self.keys = data, directory, keys
        self.site = None

    def execute(self, task_name, shareable, fl_ctx, abort_signal):
        # A site that stays remembers who was ready, and then says so in fewer bytes.
        self.site = self.site or self.opened(fl_ctx)
        return Shareable({"reply": self.site.step(shareable["message"])})

    def opened(self, fl_ctx):
        name = fl_ctx.get_identity_name()
        data, where, keys = (
            p.replace("SITE", name) for p in (self.data, self.directory, self.keys)
        )
        identity = SiteIdentity.read(Path(keys) / f"{name}.key", Path(keys)) if keys else None
        rules = SiteRules(unmasked=identity is None)
        return Site(pl.read_csv(data), where, rules=rules, identity=identity)


class EmfedRecipe(Recipe):
    """One fit over all clients; with ``keys``, three clients or more mask what they tell.

    ``keys`` is, at every client, a folder with its own ``NAME.key`` and everybody's ``NAME.pub``
    (`emfed keys site`); without it runs are not masked, and every client's rules allow that.
    """

    def __init__(
        self, *, clients: int, model: dict, data: str, directory: str, result: str, **more
    ):
        keys = more.pop("keys", "")
        job = FedJob(name="emfed", min_clients=clients)
        job.to_server(EmfedController(model, more, result, bool(keys)))
        job.to_clients(EmfedExecutor(data, directory, keys), tasks=[TASK])
        super().__init__(job)

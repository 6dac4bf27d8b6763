"""The program that answers at a site: the site's own, started once, and never one a server sent.

A SuperNode is given a bundle of code with every run. Flower's own executor would unpack it and
start a process with it for each message. Under ``emfed join`` this module takes the executor's
place: it asks the SuperNode for messages, answers them with the emfed installed here, and the
bundle is left unopened. Whoever holds the server can therefore ask questions of this protocol, and
cannot run anything here. A start of Python per message is saved, too.
"""

from __future__ import annotations

import logging
import sys
import time
from pathlib import Path
from typing import Any

from flwr.app import Error, Message
from flwr.common.constant import ErrorCode, SubStatus
from flwr.proto.runtime_pb2 import AcquireTaskRequest
from flwr.supercore.constant import TaskType
from flwr.supercore.heartbeat import HeartbeatSender, make_task_heartbeat_fn_http
from flwr.supercore.interceptors import (
    RuntimeTokenHttpInterceptor,
    RuntimeVersionHttpInterceptor,
    SuperExecAuthHttpInterceptor,
)
from flwr.supercore.retry import make_simple_http_retry_invoker
from flwr.supercore.runtime import RuntimeHttpClient
from flwr.supernode.runtime.run_clientapp import pull_task_input, push_message, push_task_output

from emfed.network.flower.client import site_app

logger = logging.getLogger(__name__)
PAUSE = 0.25
"""Seconds between two looks for a message."""
_ACQUIRE = frozenset({"/flwr.proto.Runtime/AcquireTask"})


def _client(address: str, *checks: Any) -> RuntimeHttpClient:
    return RuntimeHttpClient.from_server_address(
        server_address=address,
        insecure=True,  # this machine to itself
        root_certificates=None,
        interceptors=list(checks),
        retry_invoker=make_simple_http_retry_invoker(),
    )


def answer_all(address: str, secret: bytes, app: Any) -> None:
    """Take tasks from the SuperNode at ``address``, one after the other, for ever."""
    client = _client(
        address,
        RuntimeVersionHttpInterceptor(component_name="SuperExec"),
        SuperExecAuthHttpInterceptor(master_secret=secret, protected_methods=_ACQUIRE),
    )
    wanted = AcquireTaskRequest(supported_task_types=[TaskType.CLIENT_APP])
    while True:
        found = client.AcquireTask(wanted)
        if found.HasField("task") and found.token:
            answer_one(address, found.token, app)
        else:
            time.sleep(PAUSE)


def answer_one(address: str, token: str, app: Any) -> None:
    """One message: take it, answer it, hand the answer over."""
    client = _client(
        address,
        RuntimeVersionHttpInterceptor(component_name="flwr-clientapp"),
        RuntimeTokenHttpInterceptor(token),
    )
    beating = HeartbeatSender(make_task_heartbeat_fn_http(client))
    beating.start()
    status, details = SubStatus.FAILED, "no message"
    message = context = None
    try:
        message, context, _, _ = pull_task_input(client)
        try:
            reply = app(message=message, context=context)
            status, details = SubStatus.COMPLETED, ""
        except Exception as error:  # the server is told that, not what
            logger.exception("a message could not be answered")
            status, details = SubStatus.FAILED, type(error).__name__
            failure = Error(code=ErrorCode.CLIENT_APP_RAISED_EXCEPTION, reason=details)
            reply = Message(failure, reply_to=message)
        push_message(client, reply, context)
    except Exception:
        logger.exception("a message was lost between here and the SuperNode")
    finally:
        push_task_output(client=client, context=context, sub_status=status, details=details)
        if beating.is_running:
            beating.stop()
        client.close()


def main() -> None:
    """``python -m emfed.network.flower.site_process ADDRESS SECRET_FILE``."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s")
    logging.getLogger("httpx").setLevel(logging.WARNING)
    address, secret = sys.argv[1:3]
    answer_all(address, Path(secret).read_bytes(), site_app())


if __name__ == "__main__":
    main()

"""Sends some bytes to every node and waits for all of them to come back, some times over."""

import json
import time
from pathlib import Path

from flwr.app import ConfigRecord, Context, Message, RecordDict
from flwr.serverapp import Grid, ServerApp

app = ServerApp()


@app.main()
def main(grid: Grid, context: Context) -> None:
    config = context.run_config
    while len(list(grid.get_node_ids())) < config["nodes"]:
        time.sleep(0.2)
    for number in range(1 + config["rounds"]):  # the first brings the app to the nodes
        began = time.perf_counter()
        blob = bytes(config["bytes"])
        messages = [
            Message(
                RecordDict({"empty": ConfigRecord({"blob": blob})}),
                dst_node_id=node,
                message_type="query.empty",
            )
            for node in grid.get_node_ids()
        ]
        waiting = set(grid.push_messages(messages))
        while waiting:
            for reply in grid.pull_messages(waiting):
                waiting.discard(reply.metadata.reply_to_message_id)
            time.sleep(0.2)
        with Path(config["log"]).open("a") as log:
            seconds = time.perf_counter() - began
            log.write(json.dumps({"round": number, "seconds": seconds, "time": time.time()}) + "\n")

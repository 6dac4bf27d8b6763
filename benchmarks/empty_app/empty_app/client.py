"""Gives back what it got."""

from flwr.app import ConfigRecord, Context, Message, RecordDict
from flwr.clientapp import ClientApp

app = ClientApp()


@app.query("empty")
def answer(message: Message, context: Context) -> Message:
    blob = message.content["empty"]["blob"]
    return Message(RecordDict({"empty": ConfigRecord({"blob": blob})}), reply_to=message)

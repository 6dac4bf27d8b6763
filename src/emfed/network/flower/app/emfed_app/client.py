"""A site: its rows are the file that the node's configuration names.

Start it with ``flower-supernode --node-config 'data="rows.parquet" folder="site" unmasked=true'``.
The last word is the owner's: nodes of Flower's cannot mask what they tell.
"""

from typing import Any

from emfed.network.flower import make_client_app


def rows(context: Any) -> str:
    """The path of a Parquet file; return a table or frame of your own instead if you like."""
    return str(context.node_config["data"])


app = make_client_app(rows)

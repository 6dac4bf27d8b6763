"""``emfed serve`` and ``emfed join``, whatever engine carries their messages.

settings.py and config.py read run.toml; serving.py makes a run out of a configuration and a
transport; hosting.py and joining.py are the two programs, over WebSockets, and what those over
Flower share with them.
"""

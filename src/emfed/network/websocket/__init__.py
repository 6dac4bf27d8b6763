"""The default engine: one WebSocket over TLS 1.3 that each member opens to the relay and keeps.

Decision: docs/decisions/024-engines-are-transports.md
"""

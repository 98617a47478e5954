"""The protocol between supervisor and daemons: frames, messages, connections, links, arenas (docs/protocol.md).

Both sides import this package, so it depends only on the standard library, msgspec and :mod:`lucevisor.model`.
"""

"""The contract between supervisor and daemons: frames, messages, connections, links, arenas.

Both sides import it, so it imports the standard library, msgspec and :mod:`lucevisor.model` only.
"""

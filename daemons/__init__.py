"""Shard daemons: run inside the interpreters of backend groups.

They import the standard library, torch, numpy, gguf, msgspec, ``lucevisor.model`` and ``lucevisor.protocol``,
nothing else.
"""

"""Shard daemons: run inside the interpreters of backend groups. Imports only the standard library, torch, numpy, gguf, msgspec and lucevisor.wire."""

"""The contract between supervisor and daemons: codec, messages, arena, GGUF header, layer specs.

Both sides import it, so it imports the standard library and msgspec only, and nothing else of the project.
"""

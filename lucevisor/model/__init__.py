"""Models as described by their GGUF files.  Both sides import this: the standard library, msgspec and gguf only."""

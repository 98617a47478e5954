"""Models as described by their GGUF files: header parser, quant types, one spec per family, weight layout, fingerprint.

Both sides import this package, so it depends only on the standard library, msgspec and gguf's constants,
and on nothing of the project.
"""

"""What a GGUF file says about a model: header, tensors, one spec per family, weight layouts, fingerprint.

Both sides import it, so it imports the standard library and msgspec only, and nothing else of the project.
"""

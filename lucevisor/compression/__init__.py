"""Prompt compression (PFlash): long prompts are shortened to their relevant parts before prefill.  docs/pflash.md.

Decides which tokens stay; a scoring model, which runs in a daemon, says how relevant each is.  Knows no HTTP, no
sockets and no engine.
"""

"""Prompt compression (PFlash): long prompts are shortened to their relevant parts before prefill.  docs/pflash.md.

A scoring model in a daemon scores the tokens; this package selects those to keep.
"""

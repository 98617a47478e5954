"""Prompt compression (PFlash, speculative prefill): long prompts are shortened to their relevant parts before prefill.

A scoring model in a daemon scores the tokens; this package selects those to keep.  See docs/pflash.md.
"""

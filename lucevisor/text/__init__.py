"""Strings to token ids and back: tokenizer, chat template, detokenizer, stop strings, output parser, tool-call formats.

Knows neither sockets nor tensors nor requests: everything here is synchronous and keeps only what one stream needs.
Invariant: what a client wrote never becomes a control token, and no character of the model's output is lost.
"""

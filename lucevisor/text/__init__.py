"""Strings to token ids and back: tokenizer, chat template, detokenizer, stop strings, output parser, tool-call formats.

Knows no sockets, tensors or requests: everything is synchronous and keeps only the state of one stream.
Invariant: client text never becomes a control token, and no character of the model's output is lost.
"""

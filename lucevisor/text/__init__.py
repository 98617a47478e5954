"""Strings to token ids and back: tokenizer, chat template, detokenizer, stop strings, output parser, tool-call formats.

Client text never becomes a control token, and no character of the model's output is lost.
"""

"""Grammars of constrained output: the forms that a request may require, as one grammar, and masks of the next
tokens.
"""

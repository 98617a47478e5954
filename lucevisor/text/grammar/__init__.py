"""Grammars of constrained output: what a request may ask for, as one grammar, and which tokens may come next."""

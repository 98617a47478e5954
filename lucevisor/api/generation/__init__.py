"""Prepared requests to running sequences and their responses."""

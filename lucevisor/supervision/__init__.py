"""Keeps one shard daemon per backend group alive: a pure state machine, its policies, and the shell that spawns,
signals and waits.
"""

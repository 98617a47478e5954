"""Process supervision of the workers, one shard daemon per backend group: a pure state machine, its policies, and the
shell that spawns, signals and waits.
"""

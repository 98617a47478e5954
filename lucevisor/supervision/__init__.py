"""Process supervision of shard daemons: a pure state machine, and the shell that spawns, signals and waits."""

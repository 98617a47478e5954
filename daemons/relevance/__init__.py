"""The scoring stage of a daemon: a small model that says which tokens of a prompt matter to its end."""

"""One module for each API: its request bodies, its responses and its handlers."""

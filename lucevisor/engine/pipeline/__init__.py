"""The way of a step through the stages of the daemons, and of its drafts."""

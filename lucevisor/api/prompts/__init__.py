"""Request bodies to token ids: reading, validation, chat templates and the worker processes for long bodies."""

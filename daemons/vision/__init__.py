"""Vision encoders: images to rows of embeddings.  A file for each projector, and the stage that loads and runs one."""

"""One placement brought to life: groups, buffers, links, weights and the pipeline made of them."""

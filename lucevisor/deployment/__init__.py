"""One placement brought to life: groups, boundary buffers, links, weights and the pipeline made of them.

`service` owns the engine and the deployments (read it first), `deployment` one placement with its daemons, `assembly`
joins READY daemons into a pipeline, `admin_operations` restarts and reloads.
"""

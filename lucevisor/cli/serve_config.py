"""``lucevisor serve-config``: a Ray Serve application of whole services.  Ray itself is neither needed nor imported."""

from __future__ import annotations

import json
import os
import shutil
import sys
from pathlib import Path
from typing import Any

import click

from lucevisor.cli.options import SECONDS, config_argument
from lucevisor.config import load
from lucevisor.errors import ConfigError, ExitCode
from lucevisor.source_tree import locate

MODULE = "lucevisor_serve"


@click.command(name="serve-config")
@config_argument
@click.option("--directory", type=click.Path(path_type=Path, file_okay=False), default=Path(), show_default=True,
              help="Where the two files are written.")  # fmt: skip
@click.option("--services", type=click.IntRange(1, 1000), nargs=2, default=(1, 2), show_default=True, metavar="MIN MAX",
              help="Services that run at least and at most.")  # fmt: skip
@click.option("--requests", type=click.IntRange(1, 10_000), default=8, show_default=True,
              help="Requests for each service that Ray aims at.")  # fmt: skip
@click.option("--gpus", type=click.IntRange(0, 64), default=0, show_default=True, help="GPUs of each service.")
@click.option("--cpus", type=click.IntRange(0, 1024), default=2, show_default=True, help="Cores of each service.")
@click.option("--start-s", type=SECONDS, default=600.0, show_default=True, help="Seconds that a start may take.")
def serve_config(
    config: Path,
    overrides: tuple[str, ...],
    directory: Path,
    services: tuple[int, int],
    requests: int,
    gpus: int,
    cpus: int,
    start_s: float,
) -> int:
    """Write a Ray Serve application that runs as many services of CONFIG as the load needs, behind Ray's ingress.

    Each is a whole supervisor with its daemons, on one node, and sees the GPUs that Ray gives it: leave
    `visible_devices` of its groups empty.  CONFIG, the model and Lucevisor are at the same paths on every node.
    """
    loaded = load(config, overrides)
    least, most = services
    if least > most:
        raise click.UsageError(f"--services {least} {most}: the first is more than the second")
    if loaded.server.tls_cert_file:
        why, hint = "is for clients, and these reach Ray's proxy", "leave it empty, and put TLS before that"
        raise ConfigError("server.tls_cert_file", loaded.server.tls_cert_file, why, hint, file=str(config))
    directory.mkdir(parents=True, exist_ok=True)
    shutil.copyfile(locate("etc") / "serve" / f"{MODULE}.py", directory / f"{MODULE}.py")
    arguments = {
        "lucevisor": [sys.executable, "-P", "-m", "lucevisor"],
        "python_path": os.environ.get("PYTHONPATH", ""),
        "config": str(loaded.file),
        "overrides": [each for each in overrides if each.partition("=")[0] not in ("server.host", "server.port")],
        "start_s": start_s,
    }
    deployment: dict[str, Any] = {
        "name": "Lucevisor",
        "max_ongoing_requests": 1000,  # the service has a queue of its own
        "autoscaling_config": {
            "min_replicas": least,
            "max_replicas": most,
            "target_ongoing_requests": requests,
        },
        "graceful_shutdown_timeout_s": 60,
        "ray_actor_options": {"num_cpus": cpus, "num_gpus": gpus},
    }
    application = {
        "name": loaded.file.stem,
        "route_prefix": "/",
        "import_path": f"{MODULE}:app",
        "runtime_env": {"env_vars": {"PYTHONPATH": str(directory.absolute())}},
        "args": arguments,
        "deployments": [deployment],
    }
    http = {"host": loaded.server.host, "port": loaded.server.port or 8000}
    text = json.dumps({"http_options": http, "applications": [application]}, indent=2)  # JSON is YAML, too
    file = directory / "serve.yaml"
    file.write_text(f"# Written by `lucevisor serve-config`.\n{text}\n")
    click.echo(f"{file} and {MODULE}.py are written; in an environment with ray[serve]:")
    click.echo(f"  cd {directory.absolute()} && serve run {file.name}")
    click.echo(f"or, on a cluster that runs and has these files on every node: serve deploy {file.name}")
    return ExitCode.DONE

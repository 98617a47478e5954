"""Commands on nodes of a real Ray cluster: what is relayed, and how each end is noticed, with nothing left running."""

from __future__ import annotations

import hashlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from tests.cluster.ray_hosts import HEAD, RayCluster, needs_ray, ray_cluster
from tests.waiting import wait_until

pytestmark = needs_ray

ACTOR = "ray::RemoteProcess"
FOREVER = ("sh", "-c", "echo started; exec sleep 100000")


@pytest.fixture(scope="module")
def cluster(tmp_path_factory) -> Iterator[RayCluster]:
    resources = {"attic": ["amd=1"], "cellar": ["amd=2", "disk=1", "GPU=2"]}
    with ray_cluster("attic", "cellar", folder=tmp_path_factory.mktemp("ray"), resources=resources) as made:
        yield made


def ray_exec(cluster: RayCluster, host: str, *command: str) -> list[str]:
    host = cluster.hosts.address(host) if host in cluster.hosts.names else host
    options = ["--address", cluster.address, "--host", host, "--name", "box/group"]
    return [sys.executable, "-m", "lucevisor.cluster.ray_exec", *options, "--", *command]


def run(
    cluster: RayCluster, host: str, *command: str, stdin: bytes = b"", expected: int = 0
) -> subprocess.CompletedProcess[bytes]:
    done = subprocess.run(
        ray_exec(cluster, host, *command), input=stdin, capture_output=True, env=cluster.env, check=False, timeout=120
    )
    assert done.returncode == expected, done
    return done


@contextmanager
def running(cluster: RayCluster, host: str = "attic") -> Iterator[subprocess.Popen[bytes]]:
    """A command that runs until something ends it."""
    pipe = subprocess.PIPE
    process = subprocess.Popen(
        ray_exec(cluster, host, *FOREVER), stdin=pipe, stdout=pipe, stderr=pipe, env=cluster.env, bufsize=0
    )
    try:
        assert process.stdout.readline() == b"started\n", process.stderr.read()
        yield process
    finally:
        process.kill()
        process.communicate()


def left(cluster: RayCluster) -> list[str]:
    """What still runs of commands and of their actors."""
    return [
        " ".join(process.cmdline())
        for host in cluster.hosts.names
        for part in (ACTOR, "sleep 100000")
        for process in cluster.processes(host, part)
    ]


def ended(cluster: RayCluster, process: subprocess.Popen[bytes], seconds: float) -> tuple[int, str]:
    """Exit code and stderr of a command, whose actor and child are gone."""
    began = time.monotonic()
    code = process.wait(seconds)
    wait_until(lambda: not left(cluster), seconds, "no actor and no child are left")
    print(f"{seconds=}: {time.monotonic() - began:.1f} s")
    return code, process.stderr.read().decode()


# ---- what is relayed


def test_ten_megabytes_there_and_back(cluster):
    sent = os.urandom(10_000_000)
    done = run(cluster, "attic", "cat", stdin=sent)
    assert hashlib.sha256(done.stdout).digest() == hashlib.sha256(sent).digest()
    assert done.stderr == b""


def test_ten_megabytes_to_both_outputs(cluster):
    script = "head -c 10000000 /dev/zero; head -c 10000000 /dev/zero >&2; exit 4"
    done = run(cluster, "cellar", "sh", "-c", script, expected=4)
    assert done.stdout == done.stderr == bytes(10_000_000)


@pytest.mark.parametrize(("script", "code"), [("exit 0", 0), ("exit 77", 77), ("kill -SEGV $$", 128 + signal.SIGSEGV)])
def test_exit_codes(cluster, script, code):
    run(cluster, "attic", "sh", "-c", script, expected=code)


def test_a_program_that_does_not_exist(cluster):
    assert run(cluster, "attic", "/no/such", expected=127).stderr == b"/no/such: No such file or directory\n"


def test_a_command_runs_on_its_host_as_the_node_was_started(cluster):
    script = "cat /proc/net/fib_trie; env"
    for host in cluster.hosts.names:
        out = run(cluster, host, "sh", "-c", script).stdout.decode()
        assert cluster.hosts.address(host) in out
        assert "\nRAY_" not in out
        assert "OMP_NUM_THREADS" not in out or "OMP_NUM_THREADS" in os.environ


@pytest.mark.parametrize(("resources", "host"), [("amd=2", "cellar"), ("amd=1,disk=1", "cellar")])
def test_a_host_by_its_resources(cluster, resources, host):
    out = run(cluster, resources, "cat", "/proc/net/fib_trie").stdout.decode()
    assert cluster.hosts.address(host) in out


def test_resources_are_reserved_until_the_command_ends(cluster):
    with running(cluster, "amd=2"):
        place = f"{cluster.hosts.address('cellar')},amd=1"
        refused = run(cluster, place, "true", expected=255).stderr.decode()
        assert refused.count("\n") == 1
        assert "has not amd=1 free within 30 s" in refused
    run(cluster, place, "true")


def test_gpus_that_ray_assigned_are_the_visible_ones(cluster):
    """Ray believes what it is told of GPUs; there need not be any."""
    show = ("sh", "-c", "echo ${CUDA_VISIBLE_DEVICES-all}; read wait")
    pipe = subprocess.PIPE
    both = [
        subprocess.Popen(ray_exec(cluster, "GPU=1", *show), stdin=pipe, stdout=pipe, env=cluster.env, bufsize=0)
        for _ in range(2)
    ]
    assert sorted(one.stdout.readline() for one in both) == [b"0\n", b"1\n"]
    assert run(cluster, "cellar", *show, stdin=b"end\n").stdout == b"all\n"  # as the node itself
    for one in both:
        one.communicate(b"end\n", timeout=30.0)
        assert one.returncode == 0


def test_refusals_name_what_there_is(cluster):
    refused = run(cluster, "10.9.9.9", "true", expected=255).stderr.decode()
    assert refused.startswith("lucevisor: no node of the Ray cluster is '10.9.9.9': it has 10.211.8.1 (")


@pytest.mark.parametrize(
    ("address", "said"),
    [
        ("10.211.8.1:1", "no Ray cluster answers at '10.211.8.1:1'; `lucevisor cluster start` starts one"),
        (
            "ray://10.211.8.1:10001",
            "is Ray's client protocol, which ends no commands; join this host",
        ),
        ("auto", "cannot connect to the Ray cluster at 'auto' within 30 s; does `ray status` here?"),
    ],
)
def test_clusters_that_are_not_there(cluster, address, said):
    command = ray_exec(cluster, "attic", "true")
    command[command.index(cluster.address)] = address
    env = cluster.env | {"RAY_ADDRESS": "10.211.8.1:1"}
    done = subprocess.run(command, capture_output=True, text=True, env=env, check=False, timeout=60)
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (255, "", 1)
    assert said in done.stderr


def test_without_ray(cluster):
    script = "import sys; sys.modules['ray'] = None; from lucevisor.cluster import ray_exec; ray_exec.main()"
    command = [sys.executable, "-c", script, "--host=a", "true"]
    done = subprocess.run(command, capture_output=True, text=True, env=cluster.env, check=False)
    assert done.returncode == 255
    assert "pip install 'lucevisor[ray]'" in done.stderr


def test_the_actor_needs_no_lucevisor_on_its_node():
    script = """
import sys, ray, lucevisor.cluster.ray_actor as module
ray.cloudpickle.register_pickle_by_value(module)
data = ray.cloudpickle.dumps(module.RemoteProcess)
for name in [name for name in sys.modules if name.partition('.')[0] == 'lucevisor']:
    sys.modules[name] = None
process = ray.cloudpickle.loads(data)(100.0)
process.start(["echo", "works"], False)
print(process.read()[0].decode())
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert done.stdout.strip() == "works", done.stderr


# ---- who ends


def test_the_child_is_killed(cluster):
    with running(cluster) as process:
        cluster.kill("attic", "sleep 100000")
        assert ended(cluster, process, 5.0) == (128 + signal.SIGKILL, "")


def test_the_actor_is_killed(cluster):
    with running(cluster) as process:
        cluster.kill("attic", ACTOR)
        code, said = ended(cluster, process, 5.0)
    assert code == 255
    assert said.startswith("lucevisor: 10.211.8.2 is lost: Ray's worker process there has died: ")
    assert said.count("\n") == 1


def test_the_local_process_is_killed(cluster):
    with running(cluster) as process:
        process.kill()
        assert ended(cluster, process, 5.0)[0] == -signal.SIGKILL


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_signals_reach_the_child(cluster, number):
    with running(cluster) as process:
        process.send_signal(number)
        assert ended(cluster, process, 5.0) == (128 + number, "")


def test_the_end_of_input_ends_the_command(cluster):
    with running(cluster) as process:
        process.stdin.close()
        process.stdin = None
        assert ended(cluster, process, 15.0) == (128 + signal.SIGTERM, "")


@pytest.mark.parametrize("part", ["/raylet/raylet", ""], ids=["raylet", "all"])
def test_the_node_is_killed(cluster, part):
    try:
        with running(cluster) as process:
            cluster.kill("attic", part)
            code, said = ended(cluster, process, 15.0)
        assert code == 255
        assert said.startswith("lucevisor: 10.211.8.2 is lost: ")
        assert said.count("\n") == 1
    finally:
        cluster.restart("attic")
    assert run(cluster, "attic", "echo", "again").stdout == b"again\n"  # though Ray counts the former node as alive


@pytest.mark.parametrize("also_local", [False, True])
def test_the_link_is_cut(cluster, also_local):
    with running(cluster) as process:
        cluster.hosts.cut("attic")
        try:
            if also_local:
                process.kill()
            code, said = ended(cluster, process, 40.0)
        finally:
            cluster.hosts.cut("attic", cut=False)
    if also_local:
        assert code == -signal.SIGKILL
    else:
        assert (code, said.count("\n")) == (255, 1)
        assert "no answer for 20 s: the network is cut, or the host hangs" in said
    assert run(cluster, "attic", "echo", "again").stdout == b"again\n"


def test_a_slow_reader_and_a_stopped_one_lose_nothing(cluster):
    """Output waits for its reader, and this is not taken for silence."""
    command = ray_exec(cluster, "attic", "sh", "-c", "head -c 3000000 /dev/zero; echo end >&2")
    process = subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=cluster.env
    )
    time.sleep(25.0)
    out, err = process.communicate(timeout=60.0)
    assert (len(out), err, process.returncode) == (3_000_000, b"end\n", 0)


# ---- the supervisor's own host; these come last, as the cluster ends with its head


def test_the_local_node_is_killed(cluster):
    with running(cluster) as process:
        cluster.kill(HEAD, "/raylet/raylet")
        code, said = ended(cluster, process, 30.0)
    assert (code, said.count("\n")) == (255, 1)
    assert said.startswith("lucevisor: 10.211.8.2 is lost: Ray's node on this host has died")
    cluster.restart(HEAD, *cluster.hosts.names)


def test_the_head_is_killed(cluster):
    with running(cluster) as process:
        cluster.kill(HEAD, "/gcs_server")
        code, said = ended(cluster, process, 90.0)
    assert (code, said.count("\n")) == (255, 1)
    assert "Ray's head at 10.211.8.1:" in said
    cluster.restart(HEAD, *cluster.hosts.names)

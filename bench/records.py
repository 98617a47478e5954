"""What the benchmarks share of their records: the conditions they ran under, and the file that keeps their figures."""

import json
import os
import platform
import subprocess
import sys
from pathlib import Path

RESULTS = Path(__file__).parent / "results"


def machine():
    """The processor, and how busy it is now."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    return {
        "cpu": next((line.split(":")[1].strip() for line in lines if line.startswith("model name")), "?"),
        "cores": len(os.sched_getaffinity(0)),
        "kernel": platform.release(),
        "python": platform.python_version(),
        "load average": [round(load, 2) for load in os.getloadavg()],
    }


def conditions():
    """:func:`machine`, torch and its GPUs: asked of another process, as this one may not import torch."""
    names = "*(torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count()))"
    code = f"import torch; print(torch.__version__, {names}, sep='|')"
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip()
    torch_version, *gpus = said.split("|")
    return {**machine(), "gpus": gpus, "torch": torch_version}


def write_json(path, record):
    """Write a record to ``path``, and make its folder if need be."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(record, indent=1) + "\n")


def save(name, record):
    """Keep a record as bench/results/NAME.json."""
    write_json(RESULTS / f"{name}.json", record)
    print(f"written to bench/results/{name}.json")

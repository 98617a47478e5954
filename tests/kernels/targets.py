"""Compile every kernel for every supported GPU, on a machine without one.

    python -m tests.kernels.targets [--few] [TARGET ...]  prints a JSON line per target: what was compiled, what failed

``--few``: a few cases with every kernel and quant type, spread over the targets (:func:`dealt`).

Runs in a process of its own: the tests use Triton's interpreter, which is chosen per process.
"""

from __future__ import annotations

import importlib
import json
import pkgutil
import sys
import time
from dataclasses import dataclass, field, replace
from typing import Any

import tests.kernels
from tests.kernels.cover import cover

TARGETS = {
    "sm_75": ("cuda", 75, 32),
    "sm_80": ("cuda", 80, 32),
    "sm_86": ("cuda", 86, 32),
    "sm_89": ("cuda", 89, 32),
    "sm_90": ("cuda", 90, 32),
    "sm_120": ("cuda", 120, 32),
    "gfx942": ("hip", "gfx942", 64),
    "gfx1100": ("hip", "gfx1100", 32),
    "gfx1151": ("hip", "gfx1151", 32),
    "gfx1201": ("hip", "gfx1201", 32),
}
"""Name -> backend, architecture, threads of a warp."""

PDL_TARGETS = ("sm_90", "sm_120")
"""Those with programmatic dependent launch."""


@dataclass(frozen=True)
class Case:
    """One specialisation of a kernel.

    ``signature``: argument -> Triton type ("*fp32", "i32"); arguments not named are those of ``constants``.
    ``aligned``: arguments that are multiples of 16, as the launcher finds for most pointers and sizes.
    ``targets``: those it is compiled for.
    """

    name: str
    kernel: Any
    signature: dict[str, str]
    constants: dict[str, Any]
    aligned: tuple[str, ...] = ()
    options: dict[str, int] = field(default_factory=dict)
    targets: tuple[str, ...] = tuple(TARGETS)


ONE_EACH = ("sm_90", "gfx942")
"""Targets for further specialisations of a kernel."""


def for_some(*cases: Case) -> list[Case]:
    """The same cases, for one target of each vendor."""
    return [replace(case, targets=ONE_EACH) for case in cases]


def cases() -> list[Case]:
    """CASES of every module tests.kernels.cases_*."""
    names = [m.name for m in pkgutil.iter_modules(tests.kernels.__path__) if m.name.startswith("cases_")]
    return [case for name in sorted(names) for case in importlib.import_module(f"tests.kernels.{name}").CASES]


def compiled(case: Case, target: str) -> Any:
    """The compiled kernel; its ``asm`` ends with the machine code."""
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource, compile

    names = case.kernel.arg_names
    constants = {"PDL": target in PDL_TARGETS} if "PDL" in names else {}
    constants |= case.constants
    signature = {n: case.signature.get(n, "constexpr") for n in names}
    missing = [n for n in names if n not in case.signature and n not in constants]
    if missing:
        raise ValueError(f"{case.name}: neither type nor value of {missing}")
    attributes = {(names.index(n),): [["tt.divisibility", 16]] for n in case.aligned}
    source = ASTSource(case.kernel, signature=signature, constexprs=constants, attrs=attributes)
    options = dict(case.options) | ({"launch_pdl": True} if constants.get("PDL") else {})
    return compile(source, target=GPUTarget(*TARGETS[target]), options=options)


def dealt(found: list[Case]) -> dict[str, list[Case]]:
    """Target -> cases: few in which every kernel and quant type occurs, each for the target that has fewest."""
    hands: dict[str, list[Case]] = {target: [] for target in TARGETS}
    names = cover({case.name: kinds(case) for case in found})
    for case in found:
        if case.name in names:
            hands[min(case.targets, key=lambda target: len(hands[target]))].append(case)
    return hands


def kinds(case: Case) -> set[tuple[str, str]]:
    """What a case is one of: its kernel, and its quant type if it has one."""
    found = {("kernel", case.kernel.fn.__qualname__)}
    return found | {("quant type", case.constants["KIND"])} if "KIND" in case.constants else found


def report(target: str, few: bool) -> dict[str, Any]:
    """Compile the cases for one target."""
    began, failures, machine_code = time.monotonic(), {}, "hsaco" if target.startswith("gfx") else "cubin"
    found = dealt(cases())[target] if few else [c for c in cases() if target in c.targets]
    for case in found:
        try:
            if not compiled(case, target).asm[machine_code]:
                failures[case.name] = f"no {machine_code}"
        except Exception as e:  # every kind of failure is a line of the report
            failures[case.name] = f"{type(e).__name__}: {e}"[:2000]
    seconds = round(time.monotonic() - began, 1)
    return {"target": target, "cases": [c.name for c in found], "failures": failures, "seconds": seconds}


if __name__ == "__main__":
    names = [a for a in sys.argv[1:] if a != "--few"]
    for name in names or TARGETS:
        print(json.dumps(report(name, few="--few" in sys.argv)), flush=True)

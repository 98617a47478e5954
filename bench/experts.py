"""Routed experts of one layer on one GPU: a gemv per (token, expert) pair, grouped gemm, and plain torch.

    python bench/experts.py [--device cuda:0] [--tokens 1,8,32,64,128,512,2048] [--rounds 15] [--name NAME] [--save]

Shapes of real layers, random blocks, random routes, bfloat16 activations.  The time is that of a whole gated MLP of
experts until the device is done, since plain torch synchronises on the way; `chosen` is what a layer selects.
The forms take turns within a round.  --save writes bench/results/experts-NAME.json.
"""

import argparse
import statistics
import time
from unittest import mock

import torch
from kernels import conditions, random_packed
from records import save

from daemons.device import prepare
from daemons.ops import packed_linear
from daemons.ops.experts import BlockExperts
from daemons.ops.moe import ExpertMlp
from daemons.ops.router import RoutedExperts
from daemons.ops.selection import KernelSelector
from daemons.ops.triton_operations import TritonOperations
from daemons.weights.packed import unpack
from lucevisor.model.quant_types import BY_NAME
from lucevisor.model.values import Backend

LAYERS = (  # experts, of which each token uses, embedding, width of an expert, types of gate and up, and of down
    ("Qwen3.6-35B-A3B", 256, 8, 2048, 512, "Q4_K", "Q6_K"),
    ("Gemma 4 26B-A4B", 128, 8, 2816, 704, "Q4_K", "Q5_0"),
)
ARMS = ("chosen", "each pair", "grouped", "plain torch")


def matrices(kind_name, n_experts, n, k, device):
    """The same experts as packed weights and as blocks."""
    kind = BY_NAME[kind_name]
    packed = random_packed(kind, n, k, device, n_experts)
    raw = unpack(packed, k).contiguous()
    selector = KernelSelector(device, torch.bfloat16)
    return selector.packed_experts(packed, k), BlockExperts(kind, raw.view(n_experts, n, -1), k)


def limits(arm):
    """What MAX_GEMV_PAIRS_PER_EXPERT is while an arm runs."""
    return {"each pair": 1 << 30, "grouped": 0}.get(arm, packed_linear.MAX_GEMV_PAIRS_PER_EXPERT)


def seconds(arm, mlp, x, chosen):
    with mock.patch.object(packed_linear, "MAX_GEMV_PAIRS_PER_EXPERT", limits(arm)):
        torch.cuda.synchronize()
        began = time.perf_counter()
        out = mlp(x, chosen)
        torch.cuda.synchronize()
    return time.perf_counter() - began, out


def measure(options):
    rows = []
    for name, n_experts, n_used, width, inner, gate_kind, down_kind in LAYERS:
        gate_up = matrices(gate_kind, n_experts, 2 * inner, width, options.device)
        down = matrices(down_kind, n_experts, width, inner, options.device)
        packed, plain = (ExpertMlp(a, b, "silu", TritonOperations()) for a, b in zip(gate_up, down, strict=True))
        for n in options.tokens:
            x = torch.randn(n, width, device=options.device, dtype=torch.bfloat16)
            weights, experts = torch.rand(n, n_experts, device=options.device).softmax(dim=1).topk(n_used)
            chosen = RoutedExperts(experts, weights, None)
            times, results = {}, {}
            for i in range(options.rounds + 3):  # the first ones compile
                for arm in ARMS:
                    mlp = plain if arm == "plain torch" else packed
                    s, results[arm] = seconds(arm, mlp, x, chosen)
                    if i >= 3:
                        times.setdefault(arm, []).append(s)
            wanted = results["plain torch"].float()
            error = max(float((results[arm].float() - wanted).norm() / wanted.norm()) for arm in ARMS)
            if not error < 2e-2:
                raise SystemExit(f"{name}, {n} tokens: relative error {error}")
            middle = {arm: statistics.median(found) for arm, found in times.items()}
            row = {"layer": name, "tokens": n, "us": {arm: 1e6 * s for arm, s in middle.items()}, "error": error}
            rows.append(row | {"ratio": middle["chosen"] / middle["plain torch"]})
            shown = " | ".join(f"{1e6 * middle[arm]:10.0f} us" for arm in ARMS)
            print(f"{name:16} {n:5} tokens | {shown} | {row['error']:.1e}", flush=True)
    return rows


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", type=torch.device, default=torch.device("cuda:0"))
    parser.add_argument(
        "--tokens", type=lambda s: [int(n) for n in s.split(",")], default=[1, 8, 32, 64, 128, 512, 2048]
    )
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--name", default="gpu", help="of the result")
    parser.add_argument("--save", action="store_true", help="write bench/results/experts-NAME.json")
    options = parser.parse_args()
    prepare(Backend.CUDA, 0)
    torch.cuda.set_device(options.device)
    where = conditions(options)
    print(", ".join(f"{name} {value}" for name, value in where.items()))
    print(f"{'':29} | " + " | ".join(f"{arm:>13}" for arm in ARMS) + " | error")
    with torch.inference_mode():
        rows = measure(options)
    if options.save:
        save(f"experts-{options.name}", {"conditions": where, "rows": rows})


if __name__ == "__main__":
    main()

"""Workspace on a GPU: the bytes of tensors that exist at once, beside weights and state, in the largest step.

Kernels read packed weights in place, and pages where slices are short, so these tensors are left:

    stream      5 T E b                              the residual stream, before and after an addition, and normed
    attention   T (inputs + keys + 3 outputs) b      products, queries and keys, outputs of a slice and of all
                L x keys and values b                gathered for one long slice at a time
                T x query heads of a kv head x L     masks (1 + b), of windows and in graphs
    delta rule  T (inputs + 2 outputs) b             products, outputs of a group of slices and of all
                T (channels + 2 RULE_CHUNK heads) 4  convolution, and what its chunks solve, in float32
    MLP         T (up + inner) b                     dense, or of shared experts
                T k (inner + max(up, E)) b           of k routed experts
    matrix      min(its numbers, DEQUANT_ELEMENTS) b dequantised in parts before GEMM, in place of what is gathered,
                                                     solved or made by an activation
    sampling    V (8 R + 20 min(R, DRAW_ROWS)        logits and log-probabilities of R rows in float32, and draws,
                  + 64 min(R, WIDE_DRAW_ROWS))       of some with the whole vocabulary sorted
    BLAS        BLAS_BYTES                           a workspace for the stream of steps and for that of captures
    weights     WEIGHTS_MARGIN of them               what torch's allocator takes more for them

A layer frees its part before the next one begins, so the largest counts, and sampling begins when the layers have
ended.  Graphs have a pool of their own: the same again for a chunk of GRAPH_ROWS tokens that attends to GRAPH_LENGTH
positions, as a graph does not know its length, and POOL_MARGIN for what one leaves that others cannot reuse.

T tokens of a step, L positions of a sequence, E hidden size, V vocabulary, b bytes of a number.  What the allocator
cannot reuse, kernels and the launches of graphs are left to the device's reserve; so is what plain torch takes more, on
a GPU without kernels.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from math import prod
from typing import Final

from lucevisor.model.spec import LayerSpec
from lucevisor.model.values import PAGE_TOKENS
from lucevisor.model.workspace import DEQUANT_ELEMENTS, DRAW_ROWS, WIDE_DRAW_ROWS

BLAS_BYTES: Final = 32 << 20
POOL_MARGIN: Final = 0.25
WEIGHTS_MARGIN: Final = 0.065
"""Measured after the load of a 27B shape in Q4_K_M on an H200: 6.4 % of its weights.  Matrices are rounded up to 2 MiB,
which is 1.8 %.  Of 35B-A3B it was 1 % at most."""
RULE_CHUNK: Final = 64
"""Tokens that the delta rule solves together."""
MAX_FLASH_DIM: Final = 256
"""Dim of a head up to which long slices take flash attention, which reads no mask."""
CONVOLUTION, OUTPUTS = "ssm_conv1d.weight", ("attn_output.weight", "ssm_out.weight")

Shape = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class LayerWidths:
    """Numbers of a layer's activations for each token, and of its matrices that one product reads."""

    hidden: int
    inputs: int
    mixer: int
    float32: int
    up: int
    inner: int
    routed: int
    query_groups: int  # query heads of a kv head
    is_masked: bool
    input_matrix: int
    output_matrix: int
    up_matrix: int
    down_matrix: int

    @classmethod
    def of(cls, layer: LayerSpec, source: LayerSpec, hidden: int) -> LayerWidths:
        """``source``: the layer whose keys and values it reads."""
        shapes = {name: shape for name, shape in layer.tensors.items() if len(shape) > 1 and name.endswith(".weight")}
        convolution, outputs, first, up, down, up_experts, down_experts = _dealt(shapes)
        state = {tensor.name: tensor.shape for tensor in source.state}
        k, v, delta = (state.get(name, ()) for name in ("k", "v", "delta"))
        inputs, output_width = _sum(first, -2), _sum(outputs, -1)
        n_copies = 1 + any("_exps.bias" in name for name in layer.tensors)  # biases are added to a copy
        each = _sum(down_experts, -1) + n_copies * max(_sum(up_experts, -2), _sum(down_experts, -2))
        return cls(
            hidden,
            inputs,
            mixer=inputs + prod(k) // PAGE_TOKENS + (3 if k else 2) * output_width,
            float32=_sum(convolution, 0) + (2 * RULE_CHUNK * delta[0] if delta else 0),
            up=_sum(up, -2),
            inner=_sum(down, -1),
            routed=layer.n_routed * each,
            query_groups=max(1, output_width // prod(v[1:])) if v else 1,
            is_masked=layer.window > 0 or (len(k) > 1 and k[-1] > MAX_FLASH_DIM),
            input_matrix=sum(map(prod, first)),
            output_matrix=sum(map(prod, outputs)),
            up_matrix=sum(map(prod, up)),
            down_matrix=sum(map(prod, down)),
        )

    def peak_bytes(
        self, n_tokens: int, n_seen: int, kv_bytes: int, number: int, matrix_number: int, *, in_graph: bool
    ) -> int:
        """Return the peak of a step of ``n_tokens``, one slice of which sees ``n_seen`` positions whose keys and values
        take ``kv_bytes``.  Numbers have ``number`` bytes, dequantised ones ``matrix_number``.
        """

        def dequantised(n_numbers: int) -> int:
            return min(n_numbers, DEQUANT_ELEMENTS) * matrix_number

        def activations(width: int) -> int:
            return n_tokens * width * number

        masks = n_tokens * self.query_groups * n_seen * (1 + number) if self.is_masked or in_graph else 0
        mixing = n_tokens * self.float32 * 4 + kv_bytes + masks
        return activations(5 * self.hidden) + max(
            activations(self.inputs) + max(activations(self.inputs), dequantised(self.input_matrix)),
            activations(self.mixer) + max(mixing, dequantised(self.output_matrix)),
            activations(self.up) + max(activations(self.inner), dequantised(self.up_matrix)),
            activations(self.inner + self.hidden) + dequantised(self.down_matrix),
            activations(self.hidden + self.routed) if self.routed else 0,
        )


def sampling_bytes(n_rows: int, vocabulary: int) -> int:
    return vocabulary * (8 * n_rows + 20 * min(n_rows, DRAW_ROWS) + 64 * min(n_rows, WIDE_DRAW_ROWS))


def _dealt(shapes: Mapping[str, Shape]) -> tuple[list[Shape], ...]:
    """Return the shapes of convolutions, of output and input matrices of the mixer, of those before and behind the
    activation of the MLP, and of experts' likewise."""
    dealt: tuple[list[Shape], ...] = tuple([] for _ in range(7))
    for name, shape in shapes.items():
        if ".ffn_" in name:
            place = 3 + ("down" in name) + 2 * (len(shape) > 2)
        else:
            place = 0 if name.endswith(CONVOLUTION) else 1 if name.endswith(OUTPUTS) else 2
        dealt[place].append(shape)
    return dealt


def _sum(shapes: Iterable[Shape], axis: int) -> int:
    return sum(shape[axis] for shape in shapes)

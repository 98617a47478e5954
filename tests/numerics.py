"""How far a float32 run may be from the exact result: measured from the code's conditioning, not tuned on a machine.

``Exact()`` runs code written for float32 in float64.  ``Exact(seed)`` also perturbs every result by as much as float32
may round it, whatever the order of summation (Monte Carlo arithmetic, Parker 1997).  The distance between the two is
the rounding error that the code amplifies, and the same number on every processor.  docs/numerics.md has the model.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode

UNIT = 2.0**-24
"""Unit roundoff of float32: the largest relative error of one rounding."""
ULP = 2 * UNIT
"""Error of an elementary function (SLEEF u10, MKL VML HA), and more than that of + - * /."""
RUNS = 6
"""Perturbed runs of which the worst counts."""
SAFETY = 4.0
"""Twice, as two float32 runs may err to either side, and twice, as the worst of few runs is a guess at the worst."""

EXACT = frozenset(
    re.findall(
        r"\w+",
        """
        _to_copy _unsafe_view abs amax amin arange argmax bitwise_not cat clamp clamp_ clone constant_pad_nd copy_
        detach_ embedding empty empty_like eq eye fill_ full full_like gather ge gt index index_copy_ index_put_
        index_select isinf isnan le lift_fresh lt masked_fill masked_fill_ max maximum min minimum ne neg new_empty
        new_full new_zeros one_hot ones ones_like relu repeat roll scalar_tensor scatter scatter_ sort stack topk tril
        triu where zero_ zeros zeros_like
        """,
    )
)
"""Operations that move or choose numbers and round none."""
PRODUCTS = frozenset(["addmm", "addmv", "baddbmm", "bmm", "dot", "mm", "mv"])
BFLOAT16, FLOAT16 = 2.0**-8, 2.0**-11
"""Their unit roundoffs."""
STORED = PRODUCTS | frozenset(["add", "add_", "gelu", "mul", "mul_", "sigmoid", "silu"])
"""Operations whose results the half precision path writes to memory in its format; the others it does in float32."""
SET_UP = frozenset(["copy_", "detach_", "lift_fresh"])
"""Writes into float32 memory that leave a number as it is: how weights come to rest."""


class Narrow(NamedTuple):
    """Roundoff relative to the results of what is ``STORED``, and to ``weights`` of products: uniform within +-, which
    has 1.4 times the deviation that rounding to the nearest has over all mantissas.

    ``packed``: weights are int8 or int4 with bfloat16 scales: half a step is 1/254 of the row's largest number, int4's
    zero is rounded at the height of it; the scale costs what plain bfloat16 does.
    """

    unit: float
    packed: bool = False


EXPONENTIALS = frozenset(["exp", "exp_", "sigmoid", "silu", "softplus"])
TF32X3 = 20 * UNIT
"""Error of a product of two numbers as three of TF32: a number is its first 11 bits and, cut off, the next 11, which is
8u off; so are both factors, and the product of the seconds, which is left out, is 4u.
"""


class _Kind(NamedTuple):
    name: str
    composite: bool
    view: bool
    written: tuple[int, ...]


@cache
def _kind(func: Any) -> _Kind:
    arguments = func._schema.arguments
    return _Kind(
        func._schema.name.removeprefix("aten::"),
        func.has_kernel_for_dispatch_key(torch._C.DispatchKey.CompositeImplicitAutograd),
        any(a.alias_info and not a.alias_info.is_write for a in arguments),
        tuple(i for i, a in enumerate(arguments) if a.alias_info and a.alias_info.is_write),
    )


class Exact(TorchDispatchMode):
    """Within it, float32 operands are widened where they are used and new tensors are float64.

    Pools that are written must be made within it.  ``choices``: indices that ``topk`` gave, in order.
    ``narrow``: roundings to a narrower format that are perturbed too.  ``tf32x3``: products are those of matrix units.
    ``gpu``: exponentials are those of a GPU's kernels.
    """

    def __init__(
        self, seed: int | None = None, narrow: Narrow | None = None, *, tf32x3: bool = False, gpu: bool = False
    ) -> None:
        super().__init__()
        self.narrow, self.tf32x3, self.gpu = narrow, tf32x3, gpu
        self.random = None if seed is None else torch.Generator().manual_seed(seed)
        self.choices: list[Tensor] = []

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # skipping takes an import of 1.4 s, and nothing is compiled here

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kind, kwargs = _kind(func), kwargs or {}
        if kind.name == "view" and func._overloadname == "dtype":
            return func(*args, **kwargs)  # bytes of a file
        if kind.name == "scaled_dot_product_attention":
            with sdpa_kernel(SDPBackend.MATH), self:
                return func.decompose(*args, **kwargs)
        if kind.composite:
            with self:
                return func.decompose(*args, **kwargs)
        if kind.view:
            return func(*args, **kwargs)
        for i in kind.written:
            if args[i].dtype == torch.float32 and kind.name not in SET_UP:
                raise TypeError(f"{func} writes into float32 memory; make that tensor within Exact")
        args = [x if i in kind.written else _widened(x) for i, x in enumerate(args)]
        kwargs = {name: _widened(x) for name, x in kwargs.items()}
        if self.random is None or kind.name in EXACT:
            out = func(*args, **kwargs)
        else:
            out = self._perturbed(kind.name, func, args, kwargs)
        if kind.name == "topk":
            self.choices.append(out[1])
        return out

    def _perturbed(self, name: str, func: Any, args: list[Any], kwargs: dict[str, Any]) -> Any:
        if name == "linalg_solve_triangular":  # backward stable: the exact solution for a matrix nearby
            matrix = args[0]
            args[0] = matrix + matrix * self._uniform(matrix) * _summed(matrix.shape[-1], self.tf32x3)
            return func(*args, **kwargs)
        out = func(*args, **kwargs)
        if isinstance(out, tuple) and any(x.is_floating_point() for x in out):
            raise NotImplementedError(f"{func}: tests/numerics.py has no error model for it")
        if isinstance(out, Tensor) and out.dtype == torch.float64:
            size = _size(name, func, args, kwargs, out, self.tf32x3)
            if self.gpu and name in EXPONENTIALS:
                size = size + _exponential_size(name, args[0], out)
            if self.narrow:
                size = size + _narrow_size(name, self.narrow, args, out)
            out.add_(size.mul_(self._uniform(out)).nan_to_num_(0.0, 0.0, 0.0))  # infinities of a mask stay
        return out

    def _uniform(self, x: Tensor) -> Tensor:
        return torch.rand(x.shape, generator=self.random, dtype=torch.float64).mul_(2).sub_(1).to(x.device)


class Bound(NamedTuple):
    """``exact`` float64 [..., N]: row by row, two float32 results differ by ``allowed`` [...] at most."""

    exact: Tensor
    allowed: Tensor

    @classmethod
    def of(cls, exact: Tensor, perturbed: Tensor) -> Bound:
        """``perturbed`` [runs, *exact.shape]."""
        return cls(exact, SAFETY * (perturbed - exact).abs().amax(dim=-1).amax(dim=0))

    def worst(self, found: Tensor, wanted: Tensor | None = None) -> float:
        """The largest difference between the first rows and ``wanted`` (None: the exact ones), in parts of what is
        allowed: above 1, rounding does not explain it.
        """
        rows = slice(len(found))
        apart = (found.double() - (self.exact if wanted is None else wanted.double())[rows]).abs().amax(dim=-1)
        return float(torch.where(apart == 0, 0.0, apart / self.allowed[rows]).max())


def bound(function: Callable[..., Tensor], *args: Tensor) -> Bound:
    """Of the rows of a function of tensors; arguments may be written.  Raises where a choice hangs on rounding."""

    def run(mode: Exact) -> Tensor:
        with mode:
            return function(*(_widened(x.clone()) for x in args))

    exact, perturbed = Exact(), [Exact(seed) for seed in range(RUNS)]
    found = Bound.of(run(exact), torch.stack([run(mode) for mode in perturbed]))
    for mode in perturbed:
        if not all(torch.equal(a, b) for a, b in zip(exact.choices, mode.choices, strict=True)):
            raise AssertionError("what is chosen hangs on rounding; take other numbers")
    return found


def product_error(x: Tensor, weight: Tensor) -> Tensor:
    """What ``x @ weight.T`` in float32 may be from the exact product, in any order: n u |x| |w| (Higham 2002, 3.1), and
    one rounding more for the other side of the comparison.
    """
    return (x.double().abs() @ weight.double().abs().mT) * ((x.shape[-1] + 1) * UNIT)


def narrow_error(x: Tensor, weight: Tensor, narrow: Narrow) -> Tensor:
    """The same where results and weights are rounded to a narrower format, which no bound in any order tells from a
    wrong weight: what independent roundings reach.  Compare the norm of all numbers, in which they even out.
    """
    x, weight = x.double(), weight.double().mT
    return _narrow_size("mm", narrow, (x, weight), x @ weight) + product_error(x, weight.mT)


def attention_error(q: Tensor, k: Tensor, v: Tensor, scale: float) -> float:
    """What one row of attention in float32 (q [D], k [n, D], v [n, Dv]) may be from the exact one, in any order: an
    error e of scores scales weights by exp(2 e) at most, and there are n numbers to sum, twice.
    """
    scores = float((k.double().abs() @ q.double().abs()).max()) * scale * (q.shape[-1] + 2) * UNIT
    return float(v.abs().max()) * (2 * scores + (2 * len(k) + 8) * UNIT)


def q8_error(x: Tensor) -> Tensor:
    """How far numbers [..., D] kept in q8_0 may be from ``x``: half a step of their group's float16 scale.

    Codes end at 127, which a scale that was rounded down leaves behind by 127 times what was lost; float32 rounds the
    inverse, a code and a product by up to 127 u of the step each.
    """
    groups = F.pad(x, (0, -x.shape[-1] % 32)).unflatten(-1, (-1, 32)).double().abs()
    largest = groups.amax(dim=-1, keepdim=True)
    step = (largest.float() / 127).half().double()
    error = (step / 2).maximum(largest - 127 * step) + step * (3 * 127 * UNIT)
    return error.expand_as(groups).flatten(-2)[..., : x.shape[-1]]


def _widened(x: Any) -> Any:
    if isinstance(x, Tensor):
        return x.double() if x.dtype == torch.float32 else x
    if isinstance(x, list | tuple) and x and isinstance(x[0], Tensor | None):
        return [_widened(y) for y in x]
    return torch.float64 if x is torch.float32 else x


def _narrow_size(name: str, narrow: Narrow, args: Sequence[Any], out: Tensor) -> Tensor:
    """What rounding results, and factors of products, to a narrower format adds to :func:`_size`."""
    if name not in STORED:
        return torch.zeros_like(out)
    size = out.abs()
    if name in PRODUCTS:
        a, b = args[-2:]
        a, b = (a[None] if a.dim() == 1 else a).double(), (b[:, None] if b.dim() == 1 else b).double()
        terms = (a.square() @ b.square()).sqrt_()
        if narrow.packed:  # either may be the weight
            largest = a.norm(dim=-1, keepdim=True) * b.abs().amax(dim=-2, keepdim=True)
            terms += largest.maximum(a.abs().amax(dim=-1, keepdim=True) * b.norm(dim=-2, keepdim=True))
        size += terms.view_as(out)
    return size.mul_(narrow.unit)


def _exponential_size(name: str, x: Tensor, out: Tensor) -> Tensor:
    """What exp(x) as a GPU's exp2(x log2(e)) adds: factor and product are rounded, and exp2 is off by 4u (PTX:
    ex2.approx.f32), which counts as much as exp(x) does in the result; the quotient is off by 4u (div.full.f32).
    """
    if name.startswith("exp"):  # x may be overwritten
        return out * ((out.log().abs() * 2 + 4) * UNIT)
    argument = (x.abs() * 2 + 4) * UNIT
    if name == "softplus":
        return x.sigmoid() * argument + out * (4 * UNIT)
    return out.abs() * ((-x).sigmoid() * argument + 4 * UNIT)


def _summed(n: int, tf32x3: bool) -> float:
    """Error of a sum of n products, relative to the 2-norm of the terms.  Matrix units cut partial sums off, by 2u."""
    return TF32X3 + ULP * (n / 2) ** 0.5 if tf32x3 else max(ULP, UNIT * (n / 2) ** 0.5)


def _size(
    name: str, func: Any, args: Sequence[Any], kwargs: dict[str, Any], out: Tensor, tf32x3: bool = False
) -> Tensor:
    """The largest error of each number of ``out = func(*args)``.

    The error of a sum of n terms, every step rounded by up to u, has a standard deviation of at most u sqrt(n / 6)
    times the 2-norm of the terms where signs are mixed and u sqrt(n) / 3 times their sum where they are not, whatever
    the order.  Uniform noise of that deviation reaches sqrt(3) times as far.
    """
    if name in PRODUCTS:
        squares = [x.square() if isinstance(x, Tensor) else x for x in args]
        n = args[-1].shape[-1 if args[-1].dim() == 1 else -2]
        return func(*squares, **{k: abs(x) for k, x in kwargs.items()}).sqrt_().mul_(_summed(n, tf32x3))
    if name in ("sum", "mean"):
        n = args[0].numel() // max(1, out.numel())
        return func(args[0].abs(), *args[1:], **kwargs).mul_(UNIT * (n / 3) ** 0.5)
    if name == "cumsum":
        return func(args[0].abs(), *args[1:], **kwargs).mul_(UNIT * (out.shape[args[1]] / 3) ** 0.5)
    if name == "cumprod":  # as many roundings as factors
        return out.abs() * (UNIT * out.shape[args[1]] ** 0.5)
    if name == "linalg_vector_norm":
        return out * (UNIT * (args[0].numel() / max(1, out.numel()) / 3) ** 0.5)
    if name in ("_softmax", "_safe_softmax", "_log_softmax"):
        return out * (ULP + UNIT * (out.shape[args[1]] / 3) ** 0.5)
    if name in ("addcmul", "addcmul_"):  # a difference of products may be as small as it likes
        return (args[1] * args[2]).mul_(kwargs.get("value", 1)).abs_().add_(out.abs()).mul_(ULP)
    if name == "gelu":  # 1 + tanh is rounded at 1 where the result is nearly nothing
        return args[0].abs().mul_(ULP)
    return out * ULP

"""Pools: the memory of the KV cache (pages) and the recurrent states of one shard.

``kv_dtype`` q8_0 is KV cache quantisation.  Layers of equal state share one allocation ``[layers, units, *shape]``, so
a page or a state is copied for all of them in one call.  Some recurrent states may lie in host memory: the device only
copies to and from them, in stream order, so other readers and writers must wait for that stream.  States of drafts have
rows only in the small tensors, and updates.  Pages and states may share memory (:mod:`lucevisor.model.extents`).
Invariants: unit ids are the supervisor's, the same in every shard; a pool starts as zeros, and pages become zeros when
they take the place of a state, so masked stale positions are finite.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor

from daemons import parking
from daemons.device import allocating, host_zeros, torch_dtype
from daemons.errors import LoadError, StateError
from daemons.kv.state_updates import ApplyUpdates, StateUpdates
from daemons.ops.delta_rule import apply_updates
from daemons.ops.host_pages import HostLayer, HostPages, PageCopy
from daemons.ops.page_scores import KeySketches
from daemons.ops.paged import DensePages, PagedTensor, Pages, Q8Pages
from lucevisor.model.extents import PAGE_ROWS, Extent, extent_of
from lucevisor.model.spec import ModelSpec
from lucevisor.model.values import PAGE_TOKENS, Q8_GROUP, Dtype, KvGroup, LayerRange, Tier, q8_groups
from lucevisor.protocol.loading import PoolSizes


@dataclass(frozen=True, slots=True)
class _StateShape:
    """Layers with equal shapes share an allocation."""

    kv_group: KvGroup
    name: str
    shape: tuple[int, ...]
    dtype: Dtype
    update_width: int


class Pools:
    """All state of the layers of one shard on one device.  Raises DeviceError when memory runs out."""

    def __init__(
        self,
        spec: ModelSpec,
        layers: LayerRange,
        device: torch.device,
        kv_dtype: Dtype,
        sizes: PoolSizes,
        *,
        rank_pages: bool = False,
        page_copy: PageCopy | None = None,
        apply_updates: ApplyUpdates = apply_updates,
    ) -> None:
        """``rank_pages``: keep on the device what pages in host memory are ranked by.
        ``page_copy``: the device's copy of scattered pages.  ``apply_updates``: how it makes a state of updates.
        """
        self._rank_pages = rank_pages
        self.device, self.layers = device, layers
        n_states = sizes.n_state_ids
        self.units = {KvGroup.FULL: sizes.full_pages, KvGroup.WINDOW: sizes.window_pages, KvGroup.RECURRENT: n_states}
        self._sizes = sizes
        self.states_locked = True  # of the states in host memory, if there are any
        members: dict[_StateShape, list[int]] = {}
        for i in range(layers.start, layers.stop):
            layer = spec.layers[i]
            for t in layer.state:
                shape = _StateShape(layer.kv_group, t.name, t.shape, t.dtype or kv_dtype, t.update_width)
                members.setdefault(shape, []).append(i)
        self._stacks: list[tuple[KvGroup, list[Tensor]]] = []
        self._stack_layers: list[list[int]] = []  # of each of them
        self._paged: dict[tuple[int, str], PagedTensor] = {}
        self._states: dict[tuple[int, str], Tensor] = {}
        self._host_stacks: list[Tensor] = []  # host part of the recurrent _stacks, in the same order
        self._host_states: dict[tuple[int, str], Tensor] = {}
        self._ranked: list[PagedTensor] = []  # keys of which sketches are kept
        self._host_pages = HostPages(device, sizes.host_pages, page_copy) if sizes.host_pages else None
        extent = _extent(spec, layers, kv_dtype, sizes)
        self.page_rows, self.state_rows = (PAGE_ROWS, extent.layers) if extent is not None else (1, 1)
        """Rows of a layer's tensor that a page of KV group full and a state take."""
        self._used_states: set[int] = set()  # those whose bytes are in the memory of pages
        self._n_bytes = 0
        self.updates = StateUpdates(device, apply_updates, self.state_rows)
        paged = [shape for shape in members if shape.kv_group is not KvGroup.RECURRENT]
        if extent is not None and paged:
            self._allocate_pages(paged, members[paged[0]])
        else:
            for shape in paged:
                self._allocate_pages([shape], members[shape])
        for shape, indices in members.items():
            if shape.kv_group is KvGroup.RECURRENT:
                self._allocate_states(shape, indices, self._extents(shape, paged, members))
        if self._host_pages is not None:
            self._host_pages.prepare()

    def _allocate_pages(self, shapes: Sequence[_StateShape], indices: list[int]) -> None:
        """Allocate pages of layers; those of several tensors of equal shape adjoin."""
        shape, width = shapes[0], shapes[0].shape[-1]
        n, quantised = (len(indices), len(shapes) * self.units[shape.kv_group]), shape.dtype is Dtype.Q8_0
        if quantised:
            groups = q8_groups(width)
            parts = [
                ((*n, *shape.shape[:-1], groups * Q8_GROUP), torch.int8),
                ((*n, *shape.shape[:-1], groups), torch.float16),
            ]
        else:
            parts = [((*n, *shape.shape), torch_dtype(shape.dtype))]
        tensors = self._zeros(parts, self._what(shapes, indices, self.units[shape.kv_group]))
        self._stacks.append((shape.kv_group, tensors))
        self._stack_layers.append(indices)
        hosts = []
        if self._host_pages is not None and shape.kv_group is KvGroup.FULL:
            hosts = [self._host_pages.add(tensor) for tensor in tensors]
        for at, i in enumerate(indices):
            for first, one in enumerate(shapes):
                own = [tensor[at, first : n[1] - len(shapes) + 1 + first] for tensor in tensors]  # equally long
                paged = Q8Pages(own[0], own[1], width) if quantised else DensePages(own[0])
                if self._host_pages is not None and hosts:
                    paged.host = HostLayer([host[at] for host in hosts], self._host_pages)
                    if self._rank_pages and one.name == "k":
                        paged.sketches = KeySketches(self._sizes.host_pages, one.shape[1], width, self.device)
                        self._ranked.append(paged)
                self._paged[i, one.name] = paged

    def _extents(
        self, shape: _StateShape, paged: Sequence[_StateShape], members: dict[_StateShape, list[int]]
    ) -> tuple[int, Tensor | None]:
        """Return in how many stacks' memory states lie side by side, and the memory that they share with pages."""
        if self.state_rows == 1 or not paged:
            return len(members[shape]), None
        n_layers = len(members[paged[0]])
        if not shape.update_width:
            return n_layers, None
        n_rows = self.state_rows * self._sizes.device_states
        memory = self._stacks[0][1][0].view(n_layers, -1).view(torch.float32)
        return n_layers, memory[:, : n_rows * prod(shape.shape)].view(n_layers, n_rows, *shape.shape)

    def _allocate_states(self, shape: _StateShape, indices: list[int], extents: tuple[int, Tensor | None]) -> None:
        """Allocate states of layers: rows of ``state_rows`` layers lie side by side, in an attention layer's memory if
        they share it.
        """
        (n, memory), rows, what = extents, self.state_rows, self._what([shape], indices, self._n_rows(shape))
        if memory is None:
            [memory] = self._zeros([((n, rows * self._n_rows(shape), *shape.shape), torch_dtype(shape.dtype))], what)
        updates = None
        if shape.update_width:
            updates = self.updates.allocate(n, rows * self._sizes.device_rows, shape.update_width, what)
        for first in range(rows):
            if not (layers := indices[first * n : (first + 1) * n]):
                break
            stack = memory[: len(layers), first:]
            self._stacks.append((KvGroup.RECURRENT, [stack]))
            self._stack_layers.append(layers)
            self._allocate_host(shape, layers, stack.dtype)
            if updates is None:
                self.updates.add_windows([stack])
            else:
                self.updates.add(stack, updates[: len(layers), first:], layers)
            self._states |= {(i, shape.name): stack[at] for at, i in enumerate(layers)}

    @staticmethod
    def _what(shapes: Sequence[_StateShape], indices: list[int], n_units: int) -> str:
        names, kv_group = " and ".join(repr(shape.name) for shape in shapes), shapes[0].kv_group
        return f"state {names} of layers {indices[0]}..{indices[-1]} ({n_units} units of KV group {kv_group.value})"

    def _zeros(self, parts: Sequence[tuple[tuple[int, ...], torch.dtype]], what: str) -> list[Tensor]:
        """Allocate tensors on the device.  Raises DeviceError."""
        n_bytes = sum(prod(extent) * kind.itemsize for extent, kind in parts)
        advice = "lower the number of pages or sequences, choose a smaller kv dtype, or give this device fewer layers"
        with allocating(self.device, what, n_bytes, advice):
            tensors = [parking.zeros(extent, kind, self.device) for extent, kind in parts]
        self._n_bytes += n_bytes
        return tensors

    def _n_rows(self, shape: _StateShape) -> int:
        """Rows on the device of a tensor: drafts' states have none where updates stand for them."""
        if shape.kv_group is not KvGroup.RECURRENT:
            return self.units[shape.kv_group]
        return self._sizes.device_states if shape.update_width else self._sizes.device_rows

    def _allocate_host(self, shape: _StateShape, indices: list[int], dtype: torch.dtype) -> None:
        n = self._sizes.host_states
        advice = "lower cache.prefix_slots or cache.memory, or let the devices hold them: cache.states = device"
        what = f"checkpoints of {self.device}"
        host, locked = host_zeros((len(indices), n, *shape.shape), dtype, self.device, what, advice)
        self.states_locked &= locked or not n
        self._host_stacks.append(host)
        for at, i in enumerate(indices):
            self._host_states[i, shape.name] = host[at]

    def paged(self, layer: int, name: str) -> PagedTensor:
        """Pages of an attention layer (or of the layer it shares from)."""
        return self._paged[layer, name]

    def state(self, layer: int, name: str) -> Tensor:
        """Recurrent states of a layer on the device, ``[rows, *shape]``, those after drafts behind the others.

        State s is in row ``s * state_rows``.
        """
        return self._states[layer, name]

    def rows_with(self, layer: int, name: str, state: int) -> tuple[Tensor, int]:
        """Rows ``[n, *shape]`` that hold a whole recurrent state, on the device or in host memory, and its index.

        Raises StateError.
        """
        if self._sizes.is_draft_state(state):
            raise StateError(f"layer {layer}", f"state {state} is a draft's, which is nowhere whole")
        tier, index = self._sizes.place_of_state(state)
        if tier is Tier.DEVICE:
            return self._states[layer, name], index * self.state_rows
        return self._host_states[layer, name], index

    def copy_page(self, kv_group: KvGroup, source: int, target: int, n_tokens: int, layer: int | None = None) -> None:
        """Copy the first ``n_tokens`` positions of a page, in every layer of ``kv_group`` or in one."""
        if kv_group is KvGroup.FULL:
            self.take_pages([target])
        n = self.page_rows if kv_group is KvGroup.FULL else 1
        to, of = slice(target * n, (target + 1) * n), slice(source * n, (source + 1) * n)
        for tensor in self._of(kv_group, layer):
            tensor[:, to, :n_tokens] = tensor[:, of, :n_tokens]

    def take_pages(self, pages: Sequence[int]) -> None:
        """Pages of KV group full come into use: those in the memory of a state that was used become zeros."""
        n = self._sizes.state_pages
        for state in sorted({page // n for page in pages} & self._used_states) if self._used_states else ():
            self._used_states.remove(state)
            for tensor in self._of(KvGroup.FULL):
                tensor[:, state * n * self.page_rows : (state + 1) * n * self.page_rows].zero_()

    def take_state(self, state: int) -> None:
        """A recurrent state comes into use, on the device in the memory of pages."""
        if self._sizes.state_pages and state < self._sizes.device_states:
            self._used_states.add(state)

    def page_out(self, pages: Sequence[int], rows: Sequence[int]) -> None:
        """Copy pages of KV group full to rows of host memory, in every layer."""
        if self._host_pages is None:
            return
        if self._ranked:
            at = torch.tensor([pages, rows])
            if self.device.type != "cpu":
                at = at.pin_memory().to(self.device, non_blocking=True)
            for keys in self._ranked:
                assert keys.sketches is not None
                keys.sketches.missing.difference_update(rows)
                keys.sketches.keep(keys.read(Pages(at[0], len(pages), 0, PAGE_TOKENS), torch.float32), at[1])
        self._host_pages.page_out(pages, rows)

    def page_in(self, rows: Sequence[int], pages: Sequence[int]) -> None:
        """Copy rows of host memory to pages of KV group full, in every layer."""
        if self._host_pages is not None:
            self._host_pages.page_in(rows, pages)

    def place_of_page(self, kv_group: KvGroup, page: int, where: str) -> tuple[Tier, int]:
        """Return the memory that a page lies in, and its row in the layers' tensors there.

        Raises StateError naming ``where``.
        """
        n = self.units[kv_group]
        if 0 <= page < n:
            return Tier.DEVICE, page * self.page_rows if kv_group is KvGroup.FULL else page
        in_host = self._host_pages.n_pages if self._host_pages is not None and kv_group is KvGroup.FULL else 0
        if n <= page < n + in_host:
            return Tier.HOST, page - n
        more = f" and the {in_host} in host memory" if in_host else ""
        raise StateError(where, f"page {page} is outside the pool of {n}{more}")

    def forget_sketches(self, pages: Sequence[int]) -> None:
        """Pages of KV group full get other bytes: sketches of those in host memory are made when they are needed."""
        rows = [page - self.units[KvGroup.FULL] for page in pages if page >= self.units[KvGroup.FULL]]
        for keys in self._ranked if rows else ():
            assert keys.sketches is not None
            keys.sketches.missing.update(rows)

    def copy_state(self, source: int, target: int, layer: int | None = None) -> None:
        """Copy a recurrent state in every layer or in one; at most one of the two is in host memory."""
        to, of = self._sizes.place_of_state(target), self._sizes.place_of_state(source)
        self.take_state(target)
        for device, host in zip(self._of(KvGroup.RECURRENT, layer), self._host_of(layer), strict=True):
            stacks = {Tier.DEVICE: device[:, :: self.state_rows], Tier.HOST: host}
            if to.tier is of.tier:
                stacks[to.tier][:, to.row] = stacks[of.tier][:, of.row]
                continue
            pairs = zip(stacks[to.tier][:, to.row], stacks[of.tier][:, of.row], strict=True)
            for a, b in pairs:  # per layer: a contiguous copy needs no staging
                a.copy_(b, non_blocking=True)

    def zero_state(self, state: int) -> None:
        self.take_state(state)
        for tensor in self._of(KvGroup.RECURRENT):
            tensor[:, state * self.state_rows].zero_()

    def _of(self, kv_group: KvGroup, layer: int | None = None) -> list[Tensor]:
        """Stacks of ``kv_group``, or a layer's part of them."""
        stacks = zip(self._stacks, self._stack_layers, strict=True)
        return [t for (s, tensors), layers in stacks if s is kv_group for t in _part(tensors, layers, layer)]

    def _host_of(self, layer: int | None) -> list[Tensor]:
        """Stacks of the states in host memory, or a layer's part of them."""
        stacks = zip(self._stacks, self._stack_layers, strict=True)
        own = [layers for (kv_group, _), layers in stacks if kv_group is KvGroup.RECURRENT]
        return [t for host, layers in zip(self._host_stacks, own, strict=True) for t in _part([host], layers, layer)]

    @property
    def page_locked(self) -> bool:
        """True if copies to and from host memory are DMA."""
        return self.states_locked and self.pages_locked

    @property
    def pages_locked(self) -> bool:
        """True if a GPU can read pages in host memory."""
        return self._host_pages is None or self._host_pages.page_locked

    def finish_page_outs(self) -> None:
        """Make the device's computation wait for pages on their way to host memory."""
        if self._host_pages is not None:
            self._host_pages.finish()

    @property
    def nbytes(self) -> int:
        """Bytes on the device."""
        return self._n_bytes + self.updates.nbytes

    @property
    def host_nbytes(self) -> int:
        """Bytes of the states and pages in host memory."""
        of_pages = self._host_pages.nbytes if self._host_pages is not None else 0
        return sum(t.nbytes for t in self._host_stacks) + of_pages


def _part(stacks: list[Tensor], layers: list[int], layer: int | None) -> list[Tensor]:
    if layer is None:
        return stacks
    return [t.narrow(0, layers.index(layer), 1) for t in stacks] if layer in layers else []


def _extent(spec: ModelSpec, layers: LayerRange, kv_dtype: Dtype, sizes: PoolSizes) -> Extent | None:
    """Return the extent of pages and states that share memory; None if they do not.  Raises LoadError."""
    if not sizes.state_pages:
        return None
    extent, own = extent_of(spec, kv_dtype), spec.layers[layers.start : layers.stop]
    if extent is None or extent.pages != sizes.state_pages or not extent.holds(own) or sizes.host_pages:
        reason = f"states cannot share the memory of {sizes.state_pages} pages on layers {layers}"
        raise LoadError(f"pools of {spec.name}", reason, "report this, with the plan", configuration=True)
    if sizes.device_states * sizes.state_pages > sizes.full_pages:
        reason = f"{sizes.full_pages} pages do not hold {sizes.device_states} states of {sizes.state_pages} pages"
        raise LoadError(f"pools of {spec.name}", reason, "report this, with the plan", configuration=True)
    return extent

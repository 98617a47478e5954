"""Drafter spec: the layers of a drafter as a :class:`ModelSpec`, and what it takes from its target."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from lucevisor.model.gguf_files import GgufFiles
from lucevisor.model.gguf_header import GgufError, TensorInfo
from lucevisor.model.quant_types import GgmlType, WeightFormat, format_bytes, weight_format
from lucevisor.model.spec import LayerSpec, ModelSpec, Shapes, check_tensors, main_quant, model_name
from lucevisor.model.values import Backend, Dtype, LayerRange
from lucevisor.model.weight_layout import ROW_INDEXED, TensorLayout, shard_layouts

MAX_DRAFT_TOKENS = 31
"""Drafts of one slice: with the token they follow no more than a step can have without being split."""
MAX_RECURRENT_DRAFTS = 15
"""Drafts of one slice of a model with recurrent states: kernels keep what up to 16 tokens do to a state."""
EMBEDDING = "token_embd.weight"
LM_HEAD = "output.weight"


@dataclass(frozen=True, slots=True)
class DraftVocabularySizes:
    """Of ``min_vocabulary`` tokens or more one in ``share`` is drafted, at most ``max_rows``, in ``multiple`` (whole
    tiles)."""

    min_vocabulary: int = 65536
    share: int = 4
    max_rows: int = 65536
    multiple: int = 256  # 16 tiles of 16 rows: kernels that deal tiles out to slabs have whole ones

    def rows(self, vocabulary: int) -> int:
        """Tokens that drafts are drawn from; 0: from all."""
        n = min(self.max_rows, vocabulary // self.share) // self.multiple * self.multiple
        return n if vocabulary >= self.min_vocabulary else 0

    def n_bytes(self, kind: GgmlType, shape: tuple[int, ...], fmt: WeightFormat) -> int:
        """Bytes on the drafter's device beside an output matrix [V, E]; 0 unless that is packed."""
        n = self.rows(shape[0]) if fmt is WeightFormat.PACKED else 0
        return format_bytes(kind, (n, shape[-1]), fmt) + n * 8 if n else 0  # a row has its token id beside it


DRAFT_VOCABULARY = DraftVocabularySizes()


@dataclass(frozen=True, slots=True)
class DraftSpec:
    """A drafter of one target model.

    ``model``: layers and state as of any model; its ``files`` also have the target's tensors named in ``from_target``.
    ``files``: the drafter's own.  ``captures``: ascending layers of the target whose residual stream, after the layer,
    the drafter reads.  ``max_drafts``, ``default_drafts``: tokens of one draft.
    """

    model: ModelSpec
    version: int
    files: GgufFiles
    from_target: frozenset[str]
    captures: tuple[int, ...]
    max_drafts: int
    default_drafts: int

    @property
    def layers(self) -> LayerRange:
        return LayerRange(0, self.model.n_layers)

    def layouts(self, backend: Backend, dtype: Dtype, *, with_output: bool, with_embedding: bool) -> list[TensorLayout]:
        """The tensors that its device holds for it alone, as it has the target's output matrix (``with_output``) or
        embedding (``with_embedding``).  Without the table, a tied output matrix serves where rows of it can be read."""
        table = with_embedding or (with_output and self._is_table(backend, dtype))
        return shard_layouts(
            self.model,
            self.layers,
            embedding=not (table and EMBEDDING in self.from_target),
            output=not (with_output and self.shares_lm_head),
            backend=backend,
            dtype=dtype,
        )

    @property
    def lm_head(self) -> str:
        return next(iter(self.model.output_tensors))

    @property
    def shares_lm_head(self) -> bool:
        return self.lm_head in self.from_target

    def draft_vocabulary_bytes(
        self, backend: Backend, dtype: Dtype, sizes: DraftVocabularySizes = DRAFT_VOCABULARY
    ) -> int:
        """Bytes of the draft vocabulary; 0 with an output matrix of its own or one that is not packed."""
        if not self.shares_lm_head:
            return 0
        tensor = self.model.files.tensors[self.lm_head]
        fmt = weight_format(tensor.kind, tensor.shape, backend, dtype)
        return sizes.n_bytes(tensor.kind, tensor.shape, fmt)

    def _is_table(self, backend: Backend, dtype: Dtype) -> bool:
        """Return whether the target's output matrix is its embedding, with rows that can be read."""
        name = self.lm_head
        if name != EMBEDDING:
            return False
        tensor = self.model.files.tensors[name]
        fmt = weight_format(tensor.kind, tensor.shape, backend, dtype)
        # bfloat16 matrices of a cpu are packed in an order of their own
        return fmt in ROW_INDEXED and (backend is not Backend.CPU or dtype is Dtype.FLOAT32)


def with_tensors(files: GgufFiles, tensors: Mapping[str, TensorInfo]) -> GgufFiles:
    return replace(files, tensors=dict(tensors))


def joined(files: GgufFiles, target: GgufFiles, names: Iterable[str]) -> GgufFiles:
    """``files`` with the tensors ``names`` of ``target``, in one table over the files of both."""
    if files.parts == target.parts:
        return with_tensors(files, files.tensors | {name: target.tensors[name] for name in names})
    n = len(files.parts)
    infos = (target.tensors[name] for name in names)
    added = {t.name: replace(t, part=t.part + n) for t in infos}
    return replace(
        files, paths=files.paths + target.paths, tensors=files.tensors | added, parts=files.parts + target.parts
    )


def assemble(
    own: GgufFiles,
    files: GgufFiles,
    target: ModelSpec,
    params: object,
    layers: Sequence[LayerSpec],
    shared: Shapes,
    lm_head: tuple[str, int],
) -> ModelSpec:
    """Check and build the spec of a drafter.  ``own``: its tensors, by the names in ``files``; ``lm_head``: name and
    columns of its output matrix.  Raises GgufError."""
    embedding = {EMBEDDING: (target.vocabulary, target.hidden_size)}
    output = {lm_head[0]: (target.vocabulary, lm_head[1])}
    expected = {**shared, **{n: s for layer in layers for n, s in layer.tensors.items()}, **embedding, **output}
    for name, info in own.tensors.items():
        if name not in expected:
            raise refuse(own, info, "is unknown to this version, so the drafter would draft garbage")
    check_tensors(files, expected)
    return ModelSpec(
        architecture="mtp",
        name=model_name(own),
        quant=main_quant(own),
        hidden_size=target.hidden_size,
        vocabulary=target.vocabulary,
        context_tokens=target.context_tokens,
        layers=tuple(layers),
        embedding_tensors=embedding,
        output_tensors=output,
        boundary_width=target.hidden_size,
        params=params,
        shared_tensors=shared,
        embedding_scale=target.embedding_scale,
        mrope=target.mrope,
        files=files,
    )


def refuse(files: GgufFiles, tensor: TensorInfo, reason: str) -> GgufError:
    return GgufError(str(files.paths[tensor.part]), f"tensor {tensor.name!r}", reason)

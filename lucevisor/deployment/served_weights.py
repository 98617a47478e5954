"""The weights of a served model: its own, and those of a drafter with files of its own.

Invariant: an MTP head in the model's file is watched and hashed with the model, once.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from lucevisor.deployment.served_model import ServedModel
from lucevisor.deployment.weights import ModelWeights
from lucevisor.model.drafters import open_draft
from lucevisor.model.fingerprint import fingerprint
from lucevisor.model.values import FileIdentity
from lucevisor.placement.stages import LoadFiles
from lucevisor.snapshots.file_format import DraftModel


class ServedWeights:
    """``directory``: where digests are kept."""

    def __init__(self, served: ServedModel, directory: Path) -> None:
        assert served.spec.files is not None
        self._served = served
        self.model = ModelWeights(served.spec.files, directory)
        self.draft: ModelWeights | None = None
        if served.drafter is not None:
            own = served.drafter.files is not served.spec.files
            self.draft = (
                ModelWeights(served.drafter.files, directory, reopen=open_draft, what="the drafter")
                if own
                else self.model
            )

    @property
    def _all(self) -> list[ModelWeights]:
        return [self.model] if self.draft is None or self.draft is self.model else [self.model, self.draft]

    async def model_files(self) -> LoadFiles:
        """Return what a daemon loads of the model.  Raises as :meth:`ModelWeights.admit` does."""
        return LoadFiles([str(path) for path in self._served.files], await self.model.admit())

    async def draft_files(self) -> LoadFiles:
        """Return what a daemon loads of the drafter; call it only if there is one.  Raises in the same way."""
        assert self.draft is not None
        assert self._served.drafter is not None
        return LoadFiles([str(path) for path in self._served.drafter.files.paths], await self.draft.admit())

    async def draft_model(self) -> DraftModel:
        """Return what identifies the drafter's state, when its tensors are hashed.  Raises LucevisorError."""
        assert self.draft is not None
        assert self._served.drafter is not None
        digests, drafter = await self.draft.digests(), self._served.drafter
        mark = await asyncio.to_thread(fingerprint, replace(drafter.spec.model, files=drafter.files), digests)
        return DraftModel(mark, drafter.spec.model.layers)

    def admitted(self, identities: Sequence[FileIdentity]) -> bool:
        """Whether files that a daemon read, first the model's and then the drafter's if any, hold the right bytes."""
        n = len(self._served.files)
        of_model, of_draft = identities[:n], identities[n:]
        return self.model.admitted(of_model) and (
            not of_draft or (self.draft is not None and self.draft.admitted(of_draft))
        )

    async def settle(self) -> None:
        """See :meth:`ModelWeights.settle`."""
        for weights in self._all:
            await weights.settle()

    def fits_memory(self) -> bool:
        """See :meth:`ModelWeights.fits_memory`."""
        return all(weights.fits_memory() for weights in self._all)

    def begin(self) -> None:
        """Start hashing in the background; does nothing the second time."""
        for weights in self._all:
            weights.begin()

    def progress(self) -> str:
        """Return the progress of hashing the model, for messages."""
        return self.model.progress()

    async def close(self) -> None:
        """Stop hashing."""
        for weights in self._all:
            await weights.close()

"""The token columns of an episode while they grow."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from posttrain.core.types import Ids, Sample


class Record:
    """Token ids with what is known of each. Appending costs what is appended, whatever is there already.

    Args:
        prompt_ids: the first columns, given, not sampled.
    """

    def __init__(self, prompt_ids: Ids) -> None:
        self._count = 0
        self._ids = np.empty(max(256, 2 * len(prompt_ids)), np.int32)
        self._samples: list[tuple[int, Sample]] = []
        """Where each turn begins, and the turn. One that a weight update cut off is several of them."""
        self._routing: list[npt.NDArray[np.uint8]] = []
        """The experts of each request's tokens, from the first token of the record on."""
        self.turn_begun = 0
        """Where the turn begins that is sampled, or comes next."""
        self.given(prompt_ids)

    @staticmethod
    def of(columns: Mapping[str, npt.NDArray[Any]]) -> Record:
        """Return the record that has these ``columns``."""
        record = Record([])
        if len(columns["routing"]):
            record._routing.append(columns["routing"].reshape(len(columns["tokens"]), -1))
        tokens, mask, versions = columns["tokens"], columns["loss_mask"], columns["weight_version"]
        changes = 1 + np.flatnonzero((mask[1:] != mask[:-1]) | (versions[1:] != versions[:-1]))
        for part in np.split(np.arange(len(tokens)), changes):
            if mask[part[0]]:
                logprobs = columns["logprobs"][part].tolist()
                record.sampled(Sample(tokens[part].tolist(), logprobs, "stop", int(versions[part[0]])))
            else:
                record.given(tokens[part])
        return record

    def __len__(self) -> int:
        return self._count

    @property
    def ids(self) -> npt.NDArray[np.int32]:
        """Return [T] the tokens so far: a view, which later tokens do not change."""
        return self._ids[: self._count]

    def given(self, ids: Ids) -> None:
        """Append tokens that the policy did not choose."""
        self._append(ids)
        self.turn_begun = self._count

    def _append(self, ids: Ids) -> None:
        end = self._count + len(ids)
        if end > len(self._ids):
            grown = np.empty(max(end, 2 * len(self._ids)), np.int32)
            grown[: self._count] = self.ids
            self._ids = grown
        self._ids[self._count : end] = ids
        self._count = end

    def sampled(self, sample: Sample) -> None:
        """Append a turn of the policy, or a part of one."""
        self._samples.append((self._count, sample))
        if sample.routing is not None:
            self._routing.append(sample.routing)
        self._append(sample.ids)

    def columns(self) -> dict[str, npt.NDArray[Any]]:
        """Return the columns of a ``Trajectory``: tokens, loss_mask, logprobs and weight_version, each [T], and
        routing."""
        mask = np.zeros(self._count, np.bool_)
        logprobs = np.zeros(self._count, np.float32)
        versions = np.full(self._count, -1, np.int32)
        for start, sample in self._samples:
            turn = slice(start, start + len(sample.ids))
            mask[turn] = True
            logprobs[turn] = sample.logprobs
            versions[turn] = sample.versions if sample.updates else sample.version
        return {
            "tokens": self.ids.copy(),
            "loss_mask": mask,
            "logprobs": logprobs,
            "weight_version": versions,
            "routing": self._experts(),
        }

    def _experts(self) -> npt.NDArray[np.uint8]:
        """Return ``Trajectory.routing``. A later request computes the tokens of earlier ones again: those that were
        sampled went where the request that sampled them sent them."""
        if not self._routing:
            return np.empty(0, np.uint8)
        rows = np.zeros((self._count, self._routing[0].shape[1]), np.uint8)
        for request in self._routing:
            found = request[: self._count]
            place = rows[: len(found)]
            unknown = ~place.any(1)
            place[unknown] = found[unknown]
        return rows.reshape(-1)

"""The experts that each token of the embedded engine's requests goes to (`rollout.router_replay`)."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from posttrain.models.experts import Mixture

if TYPE_CHECKING:
    from transformers import PreTrainedModel


@dataclass
class _Request:
    """The first ``count`` tokens of a request, in the pieces in which they were computed."""

    pieces: list[npt.NDArray[np.uint8]] = field(default_factory=list)
    count: int = 0


class RoutingRecorder:
    """Keeps what the routers choose for requests of transformers' continuous batching.

    No request may take tokens of another one from the KV cache: what is not computed for it is not seen.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        self._mixture = Mixture(model)
        self._mixture.record()
        self._requests: dict[str, _Request] = {}

    def attach(self, manager: Any) -> None:
        """Record for this manager, before it starts: its own thread creates the object that computes."""
        create = manager._create_batch_processor

        def create_with_recorder() -> Any:
            processor = create()
            runner = processor.model_runner
            compute = runner._forward_process_and_sample

            def compute_and_record(*args: Any) -> None:
                compute(*args)
                self._record(runner.inputs_and_outputs.requests_in_batch)

            runner._forward_process_and_sample = compute_and_record
            return processor

        manager._create_batch_processor = create_with_recorder

    def begin(self, request_id: str) -> None:
        """Record a request from its first token on."""
        self._requests[request_id] = _Request()

    def end(self, request_id: str) -> npt.NDArray[np.uint8]:
        """Return the experts of a request's tokens as they are stored, [tokens computed, bytes of a token]."""
        pieces = list(self._requests.pop(request_id).pieces)
        return np.concatenate(pieces) if pieces else np.empty((0, self._mixture.format.width), np.uint8)

    def _record(self, batch: list[Any]) -> None:
        """Keep the last forward pass, over some tokens of each request of a batch. A request that lost its place in the
        cache is computed again from its first token: what it sampled went where it went at first."""
        rows = self._mixture.recorded()
        at = 0
        for part in batch:
            count, end = part.query_length, part.state.position_offset
            request = self._requests.get(part.state.request_id)
            if request is not None and end > request.count:
                request.pieces.append(rows[at + count - (end - request.count) : at + count])
                request.count = end
            at += count

"""Images in transformers' continuous batching, which knows ids alone.

The library asks the model for logits of ids and positions of all requests of a batch. Here the model is told besides
which request the tokens belong to: tokens of images get the features of their images in place of embeddings, and
requests with images their positions in time, height and width.

Shape legend: S tokens of a batch of requests, I images of a request, P their patches, C channels.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from posttrain.core.errors import RunError
from posttrain.core.types import Ids
from posttrain.data.images import ImageError, PlacedImage
from posttrain.data.vision import VisionProcessor
from posttrain.models import vision
from posttrain.models.vision import Features


@dataclass
class _Seeing:
    """A request that has images."""

    pixels: Tensor
    """[P, C * side * side] uint8"""
    grids: Tensor
    """[I, 3]"""
    positions: Tensor | None
    """[prompt, 3] in time, height and width; None: tokens are counted, whatever they are"""
    marked: Tensor
    """[prompt] bool, true at tokens of images"""
    ahead: int
    """What a position after the prompt is, less its place."""
    features: Features | None = field(default=None, repr=False)
    """Once they are computed"""


class ImageRequests:
    """Lets a model that sees sample requests with images, and never an image token.

    Args:
        model: whose ``forward`` the library calls; it is replaced.
        reader: what reads its images.
    """

    def __init__(self, model: Any, reader: VisionProcessor, device: torch.device) -> None:
        self._model, self._reader, self._device = model, reader, device
        self._table = torch.from_numpy(reader.table).to(device)
        self._requests: dict[str, _Seeing] = {}
        self._runner: Any = None
        self._axes = 1 if reader.positions(0, ()) is None else 3
        self._never = torch.tensor(reader.never_sampled, device=device)
        model.forward = self._forward

    def add(self, request_id: str, prompt: Ids, images: Sequence[PlacedImage]) -> None:
        """Take the images of a request, among the tokens of its prompt, before it is given to the library.

        Raises:
            RunError: one of them can no longer be read.
        """
        try:  # here, since what is raised while a batch is computed would end all of its requests
            pixels = torch.from_numpy(self._reader.pixels(images))
        except ImageError as error:
            raise RunError(f"an image of the prompt: {error.message}", hint=error.hint) from error
        found = self._reader.positions(len(prompt) + 1, images)
        positions = None if found is None else torch.from_numpy(found[:-1]).to(self._device)
        ahead = 0 if found is None else int(found[-1, 0]) - len(prompt)
        marked = torch.from_numpy(self._reader.marked(prompt, images))
        grids = torch.tensor([self._reader.patch_grid(image.grid) for image in images])
        pixels, grids, marked = (x.to(self._device) for x in (pixels, grids, marked))
        self._requests[request_id] = _Seeing(pixels, grids, positions, marked, ahead)

    def drop(self, request_id: str) -> None:
        """Forget a request."""
        self._requests.pop(request_id, None)

    def attach(self, manager: Any) -> None:
        """Follow the batches of this manager, before it starts: its own thread creates what runs them."""
        create = manager._create_batch_processor

        def create_and_follow() -> Any:
            processor = create()
            self._runner = processor.model_runner
            return processor

        manager._create_batch_processor = create_and_follow

    def _forward(self, input_ids: Tensor, position_ids: Tensor, logits_to_keep: Tensor, **rest: Any) -> Any:
        """Return the logits of the tokens ``logits_to_keep`` of a batch, [1, n, V]. The library looks for that name."""
        ids, places = input_ids[0], position_ids[0].long()
        positions = places[:, None].expand(-1, 3).clone() if self._axes == 3 else places
        where: list[Tensor] = []
        found: list[Features] = []
        at = 0
        for future in self._runner.inputs_and_outputs.requests_in_batch:
            part = slice(at, at + future.query_length)
            at = part.stop
            if (seeing := self._requests.get(future.state.request_id)) is None:
                continue
            here = places[part]
            prompt = here < len(seeing.marked)
            if seeing.positions is not None:
                positions[part] = torch.where(
                    prompt[:, None],
                    seeing.positions[here.clamp(max=len(seeing.positions) - 1)],
                    here[:, None] + seeing.ahead,
                )
            tokens = here[prompt][seeing.marked[here[prompt]]]
            if len(tokens):
                where.append(part.start + (tokens - here[0]))
                found.append(self._features(seeing).select(seeing.marked.cumsum(0)[tokens] - 1))
        hidden = vision.hidden_with_features(self._model, ids, positions, where, found, rest)
        logits = self._model.get_output_embeddings()(hidden[logits_to_keep.long()]).float()
        logits[:, self._never] = torch.finfo(logits.dtype).min
        return SimpleNamespace(logits=logits[None])

    def _features(self, seeing: _Seeing) -> Features:
        if seeing.features is None:
            patches = vision.patches(seeing.pixels, self._table, self._reader.frames)
            seeing.features = vision.features_of(self._model, patches, seeing.grids)
        return seeing.features

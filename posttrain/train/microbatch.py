"""A micro-batch on the device of a worker, cut to the stretch of tokens that is the worker's.

Shape legend: T packed tokens of the micro-batch, S of them computed on this worker (all, without sequence parallelism
and without prompts that sequences share), N tokens that this worker predicts.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from posttrain.algos.segments import segment_ids
from posttrain.core.errors import RunError
from posttrain.data.pack import PackedBatch
from posttrain.data.vision import VisionProcessor
from posttrain.models.attention import Ragged
from posttrain.models.attention_kernels import Kernel
from posttrain.models.experts import Mixture, RoutedTokens
from posttrain.models.prefixes import SharedPrefixes
from posttrain.models.ulysses import SequenceParallel
from posttrain.models.vision import ImageInput


@dataclass(frozen=True)
class MicroBatch:
    """What one forward pass needs. Tensors are on the device, but ``predict``."""

    input_ids: Tensor
    """[S]"""
    position_ids: Tensor
    """[S], or [S, 3] in time, height and width"""
    ragged: Ragged
    rows: Tensor
    """[N] which of the S hidden states predict"""
    targets: Tensor
    """[N] the tokens that follow them"""
    predict: Tensor
    """[N] where the targets stand among the T tokens (on the CPU)"""
    weights: Tensor
    """[N] loss weights; 0 where nothing on this worker carries loss and one token stands in"""
    has_loss: bool
    """True where any token of this worker carries loss"""
    advantages: Tensor | None
    """[N], as the columns below"""
    rollout_logprobs: Tensor | None
    old_logprobs: Tensor | None
    ref_logprobs: Tensor | None
    prepared: Tensor | None
    values: Tensor | None
    returns: Tensor | None
    routed: RoutedTokens | None
    """What routers are told; None where the model has none."""
    images: ImageInput | None
    """None: no worker has an image in this micro-batch"""

    @staticmethod
    def build(
        batch: PackedBatch,
        device: torch.device,
        kernel: Kernel,
        parallel: SequenceParallel | None = None,
        vision: VisionProcessor | None = None,
        mixture: Mixture | None = None,
        *,
        replay: bool = False,
    ) -> MicroBatch:
        """Move ``batch`` to the device: of a prompt that sequences share one copy, and with ``parallel`` the worker's
        stretch.

        Args:
            vision: what reads the images, where there are any.
            mixture: the model's routers.
            replay: tokens go to the experts that an engine chose, where the batch has these.
        """
        ids, offsets = batch.input_ids, batch.cu_seqlens
        positions = batch.position_ids if batch.rotary_ids is None else batch.rotary_ids
        if batch.images is not None and vision is None:
            raise RunError("a batch with images is given to a model that reads text alone")
        stretch = slice(0, len(ids))
        if parallel is not None:
            ids, positions, offsets = _padded(ids, positions, offsets, parallel.size)
            stretch = parallel.stretch(len(ids))
        predict = batch.loss_mask.nonzero().flatten()
        # Token t is predicted by the hidden state before it.
        predict = predict[(predict > stretch.start) & (predict <= stretch.stop)]
        has_loss = len(predict) > 0
        if not has_loss:
            # Collectives need every worker in every micro-batch: predict something, and let it weigh nothing.
            predict = torch.tensor([max(1, stretch.start)])
        computed: slice | Tensor = stretch
        rows = (predict - 1 - stretch.start).clamp(min=0)
        prefixes = None
        if batch.shared is not None:
            prefixes = SharedPrefixes.build(offsets, batch.shared)
            computed, rows = prefixes.own, prefixes.source[rows]
        weights = torch.zeros(len(predict))
        if has_loss and batch.loss_weights is not None:
            weights = batch.loss_weights[predict]

        def on_device(x: Tensor) -> Tensor:
            return x.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else x.to(device)

        def column(x: Tensor | None) -> Tensor | None:
            return None if x is None else on_device(x[predict.clamp(max=len(x) - 1)])

        routed = None
        if mixture is not None:
            counted = _counted(batch)
            if prefixes is not None:
                counted = torch.zeros(len(prefixes.own)).index_add(0, prefixes.source, counted)
            else:
                counted = _padded_column(counted, len(ids))[stretch]
            replayed = None
            if replay and batch.routing is not None:
                replayed = on_device(mixture.format.loaded(_padded_column(batch.routing, len(ids)))[computed])
            routed = RoutedTokens(on_device(counted), replayed)

        return MicroBatch(
            input_ids=on_device(ids[computed]),
            position_ids=on_device(positions[computed]),
            ragged=Ragged.build(offsets, device, kernel, parallel, prefixes),
            rows=on_device(rows),
            targets=on_device(ids[predict.clamp(max=len(ids) - 1)]),
            predict=predict,
            weights=on_device(weights),
            has_loss=has_loss,
            advantages=column(batch.advantages),
            rollout_logprobs=column(batch.rollout_logprobs),
            old_logprobs=column(batch.old_logprobs),
            ref_logprobs=column(batch.ref_logprobs),
            prepared=column(batch.prepared),
            values=column(batch.values),
            returns=column(batch.returns),
            routed=routed,
            images=None if batch.images is None or vision is None else _images(batch, stretch, on_device, vision),
        )

    def one_row(self) -> MicroBatch:
        """Return the micro-batch with one hidden state that predicts, for passes that are about the layers alone."""
        return replace(self, rows=self.rows[:1], targets=self.targets[:1])


def _counted(batch: PackedBatch) -> Tensor:
    """Return [T] float32, 1 where the token's sequence carries loss, and 0 elsewhere."""
    sequence = segment_ids(batch.cu_seqlens)
    carries = torch.zeros(batch.num_sequences)
    carries[sequence[batch.loss_mask]] = 1.0
    return carries[sequence]


def _padded_column(column: Tensor, length: int) -> Tensor:
    """Return the column with zeros for the tokens that ``_padded`` adds."""
    return torch.cat([column, column.new_zeros(length - len(column), *column.shape[1:])])


def _padded(ids: Tensor, positions: Tensor, offsets: Tensor, multiple: int) -> tuple[Tensor, Tensor, Tensor]:
    """Ids, positions and offsets with one more sequence, so that the tokens divide by ``multiple``."""
    missing = -len(ids) % multiple
    if not missing:
        return ids, positions, offsets
    more = torch.arange(missing)
    end = torch.tensor([len(ids) + missing], dtype=offsets.dtype)
    return (
        torch.cat([ids, torch.zeros_like(more)]),
        torch.cat([positions, more if positions.ndim == 1 else more[:, None].expand(-1, positions.shape[1])]),
        torch.cat([offsets, end]),
    )


def _images(
    batch: PackedBatch, stretch: slice, on_device: Callable[[Tensor], Tensor], vision: VisionProcessor
) -> ImageInput:
    """The images of a batch that has some, of which this worker computes the tokens ``stretch``. Every worker that
    shares the sequences computes the features of all their images."""
    images = batch.images
    assert images is not None
    marked = batch.image_tokens
    where = torch.empty(0, dtype=torch.int64) if marked is None else marked.nonzero().flatten()
    here = ((where >= stretch.start) & (where < stretch.stop)).nonzero().flatten()
    return ImageInput(
        pixels=on_device(images.pixels),
        grids=on_device(images.grids),
        places=on_device(where[here] - stretch.start),
        features=on_device(here),
        left_over=len(here) < sum(images.patches) // images.merge**2,
        table=on_device(torch.from_numpy(vision.table)),
        frames=vision.frames,
    )

"""The sending side of all weight updates of a model, in one of its trainer's processes."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor
from transformers import PreTrainedModel

from posttrain.core import sizes
from posttrain.models import lora, vision
from posttrain.models.fp8 import quantized_weights
from posttrain.models.fp8_layers import Fp8Layers
from posttrain.models.weights import as_stored
from posttrain.weight_sync.broadcast import BroadcastConnection
from posttrain.weight_sync.buckets import Bucket
from posttrain.weight_sync.sender import Transport, WeightSender


class ModelSender:
    """Hands out a model's weights in the form that engines take, in one update after another: each has a
    ``WeightSender``, from ``open`` to ``close``.

    Args:
        model: of this process, its shard where it is sharded. Adapters are merged into what is handed out.
        dtype: in which engines take weights that are not quantized.
        device: of this process.
        stored_names: engines take names and shapes as files on the hub have them; else as the model does.
        fp8: the layers that engines take quantized; None: they take none so.
        tower_frozen: training leaves a vision tower as it is.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        dtype: torch.dtype,
        device: torch.device,
        *,
        stored_names: bool = False,
        fp8: Fp8Layers | None = None,
        tower_frozen: bool = True,
    ) -> None:
        self._model, self._dtype, self._device = model, dtype, device
        self._stored_names, self._fp8, self._tower_frozen = stored_names, fp8, tower_frozen
        self._connection = BroadcastConnection()  # which outlasts an update
        self._update: WeightSender | None = None

    def open(self, transport: Transport | None, bucket_bytes: int, frozen: bool = True) -> None:
        """Begin to hand out the whole weights, with the same arguments but for the transport on every rank.

        Args:
            transport: of this rank's buckets; None: nobody reads them.
            bucket_bytes: most bytes of a bucket; a bucket of a small model has half of its weights.
            frozen: a vision tower that training leaves as it is, is among them.
        """
        self._update = WeightSender(
            self._weights(frozen=frozen, values=transport is not None),
            self._dtype,
            transport,
            self._device,
            bucket_bytes=sizes.bucket_bytes(self._whole_bytes(), bucket_bytes),
            connection=self._connection,
        )

    def next(self, slot: int) -> Bucket | None:
        """Return as ``WeightSender.next``. A collective."""
        assert self._update is not None
        return self._update.next(slot)

    def send(self, slot: int) -> None:
        """Start to broadcast buffer ``slot``. The first call for a group waits for all of its ranks."""
        assert self._update is not None
        self._update.send(slot)

    def close(self) -> float:
        """Free the buffers, if there are any. Nobody reads them any more.

        Returns:
            GiB of the GPU that all of its processes used until then; on a CPU 0.
        """
        on_gpu, used = self._device.type == "cuda", 0.0
        if on_gpu:
            free, total = torch.cuda.mem_get_info()
            used = (total - free) / 2**30
        if self._update is not None:
            self._update.close()
            self._update = None
            if on_gpu:
                torch.cuda.ipc_collect()
        return used

    def _weights(self, *, frozen: bool, values: bool) -> Iterator[tuple[str, Tensor]]:
        """Yield names and weights as engines take them. Drawing one is a collective where the model is sharded.

        Args:
            values: False: nobody reads them.
        """
        left_out = vision.TOWER if self._tower_frozen and not frozen else ()
        weights = lora.whole_weights(self._model, self._dtype, left_out)
        if self._stored_names:
            weights = as_stored(self._model, weights)
        return weights if self._fp8 is None else quantized_weights(weights, self._fp8, values=values)

    def _whole_bytes(self) -> int:
        """Return the bytes of all weights of the model in the form that engines take."""
        total = sum(p.numel() for p in self._model.parameters()) * self._dtype.itemsize
        return total if self._fp8 is None else total - self._fp8.saved_bytes(self._dtype.itemsize)

"""The tensors of a paged cache on one rank, head-major: `[heads, slots, dim]` per layer and plane.

Head-major, because a run of consecutive blocks is then a view `[heads, keys, dim]` that an
attention kernel reads in place; on a CPU a gathered copy costs 5 to 8 times as much as the view.
"""

from __future__ import annotations

import torch
from torch import Tensor

from cplayers.cache.huge_pages import advise
from cplayers.cache.reads import Read
from cplayers.cache.spec import CacheSpec
from cplayers.cache.view import Writes
from cplayers.ops.by_device import cache_write


class Storage:
    """Slots for ``num_slots`` tokens in every layer.

    Args:
        spec: The planes of a layer.
        num_layers: Layers.
        num_slots: Token slots per layer.
        dtype: Storage type.
        device: Storage device.
    """

    def __init__(
        self,
        spec: CacheSpec,
        num_layers: int,
        num_slots: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.spec, self.dtype, self.device = spec, dtype, device
        self.num_layers, self.num_slots = num_layers, num_slots
        self._layers = [self._layer(num_slots) for _ in range(num_layers)]

    def _layer(self, num_slots: int) -> list[Tensor]:
        # outside inference mode, so that both later modes may write in place
        with torch.inference_mode(False):
            stores = [
                torch.empty(plane.heads, num_slots, plane.dim, dtype=self.dtype, device=self.device)
                for plane in self.spec.planes
            ]
            for store in stores:
                advise(store)  # before anything is written
                store.zero_()
        return stores

    def write(self, layer: int, writes: Writes, planes: tuple[Tensor, ...]) -> None:
        """Copy rows `[T, heads, dim]` of each plane to their slots."""
        stores = self._layers[layer]
        rows = [plane.detach() for plane in planes]  # or the cache would keep every step's graph
        if writes.slots is not None and writes.rows is None:
            cache_write(writes.slots, rows, stores)
            return
        for store, given in zip(stores, rows, strict=True):
            for row0, row1, slot in writes.segments:
                store[:, slot : slot + row1 - row0] = given[row0:row1].transpose(0, 1)
            if writes.rows is not None and writes.slots is not None:
                source = given[writes.rows].transpose(0, 1)
                store.index_copy_(1, writes.slots, source.to(self.dtype))

    def view(self, layer: int, slot: int, length: int) -> list[Tensor]:
        """``length`` slots from ``slot`` on, in place, one `[length, heads, dim]` per plane."""
        return [store[:, slot : slot + length].transpose(0, 1) for store in self._layers[layer]]

    def read(self, layer: int, read: Read, block_size: int) -> list[Tensor]:
        """The keys of a read, `[length, heads, dim]` a plane: in place, or copied from its blocks.

        Args:
            layer: Layer index.
            read: One of ``plan.reads`` or ``plan.prefill.reads``.
            block_size: Slots per block.
        """
        if read.blocks is None:
            return self.view(layer, read.slot, read.length)
        planes = []
        for store in self._layers[layer]:
            heads, _, dim = store.shape
            rows = store.view(heads, -1, block_size * dim).index_select(1, read.blocks)
            planes.append(rows.view(heads, -1, dim)[:, : read.length].transpose(0, 1))
        return planes

    def stores(self, layer: int) -> list[Tensor]:
        """All slots of a layer, in place, one `[heads, slots, dim]` per plane."""
        return self._layers[layer]

    def copy(self, source: int, target: int, length: int) -> None:
        """Copy ``length`` slots in every layer."""
        for layer in self._layers:
            for store in layer:
                store[:, target : target + length] = store[:, source : source + length]

    def grow(self, num_slots: int) -> None:
        """Enlarge to ``num_slots``, layer by layer, contents kept."""
        for index, layer in enumerate(self._layers):
            bigger = self._layer(num_slots)
            for store, target in zip(layer, bigger, strict=True):
                target[:, : self.num_slots] = store
            self._layers[index] = bigger
        self.num_slots = num_slots

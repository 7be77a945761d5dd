"""Decode steps of real plans on pages, for backend "varlen" on a GPU and for its stand-in."""

from __future__ import annotations

import torch

from cplayers.cache import GQASpec, InterleavedLayout, PagedKVCache
from cplayers.ops import attention_reference
from cplayers.ops.backends.varlen import PAGE, VARLEN, takes

Step = tuple[tuple[str, int], ...]
STEPS: dict[str, tuple[int, int, tuple[Step, ...]]] = {
    "one_row_each": (0, 1, ((("a", 1), ("b", 1)), (("b", 1),))),
    "drafts": (0, 1, ((("a", 3), ("b", 1)), (("b", 5), ("a", 2)))),
    "a_shard": (1, 2, ((("a", 1), ("b", 1)), (("b", 1), ("c", 1)))),
}
"""cp_rank, cp_size and steps; sequence c is one token long, which rank 1 of 2 does not hold."""


def check_steps(name: str, device: str) -> None:
    """Rows of a plan against the same keys, row by row in float64."""
    cp_rank, cp_size, steps = STEPS[name]
    generator = torch.Generator().manual_seed(0)
    layout = InterleavedLayout(cp_size, 1, PAGE)
    cache = PagedKVCache(GQASpec(2, 16), layout, 1, 8, cp_rank, torch.bfloat16, device)
    stores = cache.storage.stores(0)
    for store in stores:
        store.copy_(torch.randn(store.shape, generator=generator))
    for seq, length in (("a", 300), ("b", 7), ("c", 1)):
        cache.add(seq)
        cache.commit(cache.plan([(seq, length)]))
    for step in steps:
        plan = cache.plan(step)
        keys = plan.paged()
        assert takes(keys)
        assert VARLEN.paged is not None
        q = (torch.randn(plan.num_rows, 6, 16, generator=generator) * 4).bfloat16()
        found = VARLEN.paged(q.to(device), *stores, keys, scale=0.25)
        out, lse = found.out.cpu().double(), found.lse.cpu().double()
        rows = zip(keys.request.cpu(), keys.lo.cpu(), keys.hi.cpu(), strict=True)
        for row, (request, lo, hi) in enumerate(rows):
            ids = keys.block_table.cpu()[request].long()
            slots = (ids[:, None] * PAGE + torch.arange(PAGE)).flatten()
            k, v = (store.cpu()[:, slots].transpose(0, 1) for store in stores)
            wanted = attention_reference(q[[row]], k, v, lo[None], hi[None], scale=0.25)
            assert (out[row] - wanted.out[0]).abs().max() <= 2**-6
            torch.testing.assert_close(lse[row], wanted.lse[0], rtol=1e-4, atol=1e-5)
        cache.commit(plan)

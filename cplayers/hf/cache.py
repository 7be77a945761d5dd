"""`CPCache`: what ``generate`` carries from step to step, a batch of sequences."""

from __future__ import annotations

import itertools
import weakref

from torch import Tensor
from transformers.cache_utils import Cache

from cplayers.cache import PagedKVCache
from cplayers.errors import ConfigError
from cplayers.hf.batch import Batch

_NAMES = itertools.count()
CROP_TOKENS = 256
"""Tokens that can be cropped where every layer has a sliding window: drafts that were rejected."""


class CPCache(Cache):
    """A batch of sequences in a `PagedKVCache`, seen as a transformers cache.

    transformers counts *columns*, padding included; the paged cache holds real tokens only. This
    class keeps both: the sequences of the batch, the columns so far and which of them are tokens.
    The sequences are freed by `free`, or when the object is garbage collected.

    Args:
        paged: The cache of this rank.
        window: The widest sliding window where every layer has one; what is out of it and of
            `CROP_TOKENS` more is given back. ``None``: nothing is.
    """

    def __init__(self, paged: PagedKVCache, window: int | None = None) -> None:
        super().__init__(layers=[])
        self.paged, self.window = paged, window
        self.seqs: list[int] = []
        self.columns = 0
        self.seen: Tensor | None = None  # which columns are tokens [B, columns], None: all
        self.expected = 0  # columns that the call will need in all, if known
        self._oldest: dict[int, int] = {}  # tokens before this position were given back
        self._finalizer: weakref.finalize[..., CPCache] | None = None

    def start(self, batch: int) -> None:
        """Add ``batch`` empty sequences."""
        self._adopt([next(_NAMES) for _ in range(batch)])
        for seq in self.seqs:
            self.paged.add(seq)

    def __deepcopy__(self, memo: dict[int, object]) -> CPCache:
        """A cache that goes its own way from here, e.g. from a prompt that several calls share.

        It lives in the same paged cache; blocks are shared until one side writes to them.
        """
        copy = CPCache(self.paged, self.window)
        copy.columns, copy.seen, copy.expected = self.columns, self.seen, self.expected
        if self.seqs:
            copy._adopt([next(_NAMES) for _ in self.seqs])
            for seq, new in zip(self.seqs, copy.seqs, strict=True):
                self.paged.fork(seq, new)
                copy._oldest[new] = self._oldest[seq]
        return copy

    def __copy__(self) -> CPCache:
        return self.__deepcopy__({})

    def _adopt(self, seqs: list[int]) -> None:
        self.seqs = seqs
        self._oldest = dict.fromkeys(seqs, 0)
        self._finalizer = weakref.finalize(self, _free, self.paged, tuple(seqs))

    def free(self) -> None:
        """Give the blocks back; the object is then empty and can be started again."""
        if self._finalizer is not None:
            self._finalizer()
        self.seqs, self.columns, self.seen = [], 0, None

    def accept(self, batch: Batch) -> None:
        """Count the columns of a step that was committed."""
        self.columns += batch.columns
        self.seen = batch.seen()
        if self.window is not None:
            for seq in self.seqs:
                oldest = self.paged.length(seq) + 1 - self.window - CROP_TOKENS
                self.paged.forget(seq, oldest)
                self._oldest[seq] = max(oldest, self._oldest[seq])

    # What transformers asks for

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Columns so far, padding included."""
        return self.columns

    def get_max_length(self, layer_idx: int | None = None) -> int:
        """-1: no maximum."""
        return -1

    def crop(self, tokens_to_remove: int) -> None:
        """Drop the last ``-tokens_to_remove`` columns, e.g. rejected draft tokens.

        A positive number is the columns to keep, as transformers meant it before 5.24.

        Of a column that is padding in some rows, the tokens of the others are dropped.

        Raises:
            ConfigError: If there are fewer columns, or if a window of the kept ones reaches tokens
                that were given back.
        """
        given = int(tokens_to_remove)  # older versions pass a tensor
        count = -given if given <= 0 else max(0, self.columns - given)
        kept = self.columns - count
        if kept < 0:
            raise ConfigError(
                f"crop of {count} columns",
                f"the cache has {self.columns} columns",
                "drop at most these",
            )
        if count == 0:
            return
        counts = [count] * len(self.seqs)
        if self.seen is not None:
            counts = self.seen[:, kept:].sum(1).tolist()
        for seq, tokens in zip(self.seqs, counts, strict=True):
            self._require_window(seq, tokens)
        for seq, tokens in zip(self.seqs, counts, strict=True):
            self.paged.truncate(seq, self.paged.length(seq) - tokens)
        self.columns = kept
        self.seen = None if self.seen is None else self.seen[:, :kept]

    def _require_window(self, seq: int, count: int) -> None:
        if self.window is None or not self._oldest[seq]:
            return
        most = self.paged.length(seq) + 1 - self.window - self._oldest[seq]
        if count > most:
            raise ConfigError(
                f"crop of {count} tokens",
                f"all layers have sliding windows of at most {self.window} tokens, and what is out "
                f"of them is kept for {CROP_TOKENS} tokens only, of which {most} are left",
                f"drop at most {most} tokens, or compute the prompt again",
            )

    def reset(self) -> None:
        """Free all sequences."""
        self.free()

    def update(self, *args: object, **kwargs: object) -> tuple[Tensor, Tensor]:
        """Not reached: swapped layers write to the paged cache themselves."""
        raise ConfigError(
            "cache.update",
            "a plain attention module met a context-parallel cache",
            "swap every attention module with parallelize",
        )

    def _no_beams(self, *args: object, **kwargs: object) -> None:
        raise ConfigError(
            "a reordered cache", "beam search is not supported", "use greedy decoding or sampling"
        )

    reorder_cache = batch_repeat_interleave = batch_select_indices = _no_beams

    def activate_past_recording(self) -> None:
        """Nothing to do: the past is always kept."""

    @property
    def batch_size(self) -> int:
        """Sequences in the batch."""
        return len(self.seqs)

    @property
    def is_compileable(self) -> bool:
        """Shapes are not static."""
        return False

    @property
    def is_initialized(self) -> bool:
        """Storage exists from the start."""
        return True

    @property
    def is_croppable(self) -> bool:
        """`crop` restores the state exactly."""
        return True

    @property
    def is_sliding(self) -> list[bool]:
        """No layer slides."""
        return [False] * self.paged.num_layers

    @property
    def is_linear(self) -> list[bool]:
        """No layer is linear attention."""
        return [False] * self.paged.num_layers

    def __len__(self) -> int:
        return self.paged.num_layers

    def __repr__(self) -> str:
        return f"CPCache(batch={len(self.seqs)}, columns={self.columns}, {self.paged!r})"


def _free(paged: PagedKVCache, seqs: tuple[int, ...]) -> None:
    for seq in seqs:
        if seq in paged.seqs:
            paged.free(seq)

"""The settings of a run, typed, so that Hydra refuses what does not exist. Values: conf/*.yaml."""

from __future__ import annotations

from dataclasses import dataclass, field

from hydra.core.config_store import ConfigStore
from omegaconf import MISSING

from benchmarks.measure import Budget


@dataclass
class Heads:
    """Query heads, KV heads, and their dimension."""

    num: int = MISSING
    num_kv: int = MISSING
    dim: int = MISSING


@dataclass
class LocalDecode:
    """One token over a local cache."""

    keys: list[int] = MISSING
    bar_keys: int = MISSING
    heads: Heads = field(default_factory=Heads)
    block_size: int = MISSING


@dataclass
class DCPDecode:
    """One token over a cache that is spread over ranks."""

    keys: list[int] = MISSING
    ranks: list[int] = MISSING
    bar_keys: int = MISSING
    bar_ranks: int = MISSING
    hidden_size: int = MISSING
    heads: Heads = field(default_factory=Heads)
    block_size: int = MISSING


@dataclass
class Prefill:
    """A whole prompt, its tokens spread over ranks."""

    tokens: list[int] = MISSING
    ranks: list[int] = MISSING
    bar_tokens: int = MISSING
    bar_ranks: int = MISSING
    slow_tokens: int = MISSING
    """Longest prompt besides the bar's that the slow peer is given."""
    heads: Heads = field(default_factory=Heads)


@dataclass
class ChunkPrefill:
    """A chunk of a prompt over a cached context."""

    new: int = MISSING
    keys: list[int] = MISSING
    ranks: list[int] = MISSING
    heads: Heads = field(default_factory=Heads)
    block_size: int = MISSING


@dataclass
class MLADecode:
    """One token over cached latents."""

    keys: list[int] = MISSING
    ranks: list[int] = MISSING
    bar_keys: int = MISSING
    bar_ms: float = MISSING
    num_heads: int = MISSING
    latent: int = MISSING
    rope: int = MISSING
    block_size: int = MISSING
    gemm: int = MISSING
    """Size of the square matrices whose product gives the machine's rate."""


@dataclass
class Planning:
    """The plan of a decode step."""

    requests: int = MISSING
    keys: list[int] = MISSING
    block_size: int = MISSING


@dataclass
class Model:
    """A Llama with random weights, and what it generates."""

    hidden_size: int = MISSING
    layers: int = MISSING
    heads: Heads = field(default_factory=Heads)
    vocabulary: int = MISSING
    keys: list[int] = MISSING
    """Tokens of the prompt."""
    new_tokens: int = MISSING


@dataclass
class HostTime:
    """A layer, and models, that are spread over nothing, beside stock transformers."""

    keys: list[int] = MISSING
    bar_keys: int = MISSING
    tiny: Model = field(default_factory=Model)
    """Nothing but host time; its layer is measured by itself too."""
    model: Model = field(default_factory=Model)


@dataclass
class Settings:
    """A run of the suite."""

    benchmarks: list[str] = MISSING
    threads: int = MISSING
    out: str | None = MISSING
    plots: bool = MISSING
    budget: Budget = field(default_factory=lambda: Budget(MISSING, MISSING, MISSING, MISSING))
    local_decode: LocalDecode = field(default_factory=LocalDecode)
    dcp_decode: DCPDecode = field(default_factory=DCPDecode)
    prefill: Prefill = field(default_factory=Prefill)
    chunk_prefill: ChunkPrefill = field(default_factory=ChunkPrefill)
    mla_decode: MLADecode = field(default_factory=MLADecode)
    planning: Planning = field(default_factory=Planning)
    host_time: HostTime = field(default_factory=HostTime)


def register() -> None:
    """Make the schema known to Hydra. Calling it again is harmless."""
    ConfigStore.instance().store(name="settings", node=Settings, provider="benchmarks")

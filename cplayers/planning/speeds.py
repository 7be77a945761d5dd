"""How fast a rank computes, reads memory and talks: of a preset, of a file, or measured.

    compute     flops / rate
    memory      bytes / bandwidth
    collective  latency + bytes that a rank sends / bandwidth

The figures of a preset are those that a vendor publishes. A kernel does not reach them, and vendors
publish no latency: `ASSUMED` says what is assumed instead. `cplayers.planning.calibrate` measures.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from importlib import resources
from pathlib import Path
from typing import Any, NamedTuple

from cplayers.errors import ConfigError
from cplayers.mesh import AXES, Topology
from cplayers.planning.fields import read_object, shown

PRESETS = resources.files("cplayers.planning") / "hardware.json"

LEAST, MOST = 1e6, 1e30
"""Of a figure of a card: below them it is in GB or TFLOPS, above what is reckoned is not finite."""
MOST_IN_NODE = 1 << 20


class Assumed(NamedTuple):
    """What no data sheet says; assumptions, not measurements.

    Attributes:
        compute: Part of the peak rate that matrix products reach.
        memory: Part of the peak memory bandwidth that attention and small products reach.
        links: Part of a link's bandwidth that a collective reaches.
        latency_s: Of a collective inside a node, seconds.
        network_latency_s: Of one between nodes.
    """

    compute: float = 0.5
    memory: float = 0.8
    links: float = 0.7
    latency_s: float = 10e-6
    network_latency_s: float = 25e-6


ASSUMED = Assumed()


class Link(NamedTuple):
    """A collective's time.

    Attributes:
        latency_s: Seconds with next to nothing to send.
        bandwidth: Bytes that a rank sends in a second.
    """

    latency_s: float
    bandwidth: float


class Call(NamedTuple):
    """Collectives of one kind in a layer.

    Attributes:
        axis: Axis of the topology.
        operation: As in `cplayers.mesh.CPMesh`.
        bytes: That a rank sends in all of them.
        times: How many.
        combine: The way of combining that they belong to, or an empty string.
    """

    axis: str
    operation: str
    bytes: int
    times: int = 1
    combine: str = ""


@dataclass(frozen=True)
class Speeds:
    """Rates that a rank reaches.

    Attributes:
        flops: Floating-point operations a second.
        memory_bandwidth: Bytes read a second.
        links: By way of combining, by operation or by axis; ``"*"`` stands for all others.
    """

    flops: float
    memory_bandwidth: float
    links: Mapping[str, Link]

    def link(self, axis: str, operation: str) -> Link:
        """The link of an operation over an axis.

        Args:
            axis: Of the topology.
            operation: As in `cplayers.mesh.CPMesh`.
        """
        return self.links.get(operation) or self.links.get(axis) or self.links["*"]

    def local(self, flops: float, read: float) -> float:
        """Seconds of work on a rank, bound by compute or by memory (the roofline).

        Args:
            flops: Operations.
            read: Bytes.
        """
        return max(flops / self.flops, read / self.memory_bandwidth)

    def talk(self, calls: Iterable[Call]) -> float:
        """Seconds of collectives, one after another.

        Args:
            calls: What is sent.
        """
        seconds, combined = 0.0, set[str]()
        for call in calls:
            whole = self.links.get(call.combine)
            latency, bandwidth = whole or self.link(call.axis, call.operation)
            # what was measured as a whole has one latency, however many collectives it takes
            count = call.combine not in combined if whole else call.times
            combined.add(call.combine)
            seconds += count * latency + call.bytes / bandwidth
        return seconds


@dataclass(frozen=True)
class Hardware:
    """A kind of card, and how many of them share fast links.

    Attributes:
        name: Of the preset or file.
        flops: Dense bf16 operations a second, as published.
        memory: Bytes of a card.
        memory_bandwidth: Bytes a second, as published.
        link_bandwidth: Bytes a second that a card sends inside a node, as published.
        node_size: Cards that share these links.
        network_bandwidth: Bytes a second that a card sends to other nodes.
        title: In words.
        source: Addresses, with what is taken from each.
        checked: Others that agree, with what was compared.
        unconfirmed: Which figures others state differently, or an empty string.
    """

    name: str
    flops: float
    memory: float
    memory_bandwidth: float
    link_bandwidth: float
    node_size: int = 8
    network_bandwidth: float = 50e9
    title: str = ""
    source: Mapping[str, str] | None = None
    checked: Mapping[str, str] | None = None
    unconfirmed: str = ""

    @classmethod
    def load(cls, hardware: str) -> Hardware:
        """A preset, or a JSON file with the fields of this class.

        Args:
            hardware: Name of a preset (`hardware_presets`), or the path of a file.

        Raises:
            ConfigError: If it is neither, or a figure is missing or not above 0.
        """
        presets: dict[str, Any] = json.loads(PRESETS.read_text(encoding="utf-8"))
        fields = presets.get(hardware.lower())
        if fields is None:
            fields = read_object(
                Path(hardware),
                ConfigError(
                    f"hardware={hardware}",
                    "hardware is a preset or a JSON file",
                    f"use one of {', '.join(presets)}, or a path that exists",
                ),
            )
        needed = ("flops", "memory", "memory_bandwidth", "link_bandwidth")
        for name in (*needed, "network_bandwidth"):
            value: Any = fields.get(name, None if name in needed else LEAST)
            if not _is(value, int, float) or not LEAST <= value <= MOST:
                raise ConfigError(
                    f"hardware={hardware} with {name}={shown(value)}",
                    f"{name} is a number from {LEAST:.0e} to {MOST:.0e}",
                    f"give it {', '.join(needed)}, in bytes and seconds, e.g. 80e9 for 80 GB",
                )
        size = fields.get("node_size", 1)
        if not _is(size, int) or not 1 <= size <= MOST_IN_NODE:
            raise ConfigError(
                f"hardware={hardware} with node_size={shown(size)}",
                f"node_size is an int from 1 to {MOST_IN_NODE:,}",
                "give it the number of cards that share fast links",
            )
        texts = {"name": str, "title": str, "unconfirmed": str, "source": dict, "checked": dict}
        for name, kind in texts.items():
            value = fields.get(name, kind())
            if not isinstance(value, kind):
                raise ConfigError(
                    f"hardware={hardware} with {name}={shown(value)}",
                    f"{name} is {'an object' if kind is dict else 'a text'}",
                    "write it so, or leave it out",
                )
        unknown = sorted(fields.keys() - cls.__dataclass_fields__.keys())
        if unknown:
            raise ConfigError(
                f"hardware={hardware} with {unknown[0]}",
                f"its fields are {', '.join(cls.__dataclass_fields__)}",
                "leave the others out",
            )
        return cls(**{"name": hardware, **fields})

    def speeds(self, topology: Topology, assumed: Assumed = ASSUMED) -> Speeds:
        """Rates to reckon with. An axis whose groups leave a node has the network's links.

        Args:
            topology: The ranks, node after node.
            assumed: What no data sheet says.
        """
        links = {"*": Link(assumed.latency_s, assumed.links * self.link_bandwidth)}
        network = Link(assumed.network_latency_s, assumed.links * self.network_bandwidth)
        # replicas do not talk, and after so many of them they lie on nodes as the first ones do
        replica = topology.pcp * topology.tp
        period = self.node_size // math.gcd(replica, self.node_size)
        some = replace(topology, dp=min(topology.dp, period))
        for axis in (axis for axis in AXES if axis != "dp"):
            nodes = ({rank // self.node_size for rank in group} for group in some.groups(axis))
            if any(len(spanned) > 1 for spanned in nodes):
                links[axis] = network
        return Speeds(assumed.compute * self.flops, assumed.memory * self.memory_bandwidth, links)


def _is(value: object, *kinds: type) -> bool:
    """Whether it is of these kinds; truth values are no numbers."""
    return isinstance(value, kinds) and not isinstance(value, bool)


def hardware_presets() -> list[str]:
    """Names of the hardware whose published figures are shipped."""
    return sorted(json.loads(PRESETS.read_text(encoding="utf-8")))

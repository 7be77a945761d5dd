"""Whether a model, its replicas and the requests fit each other: judged before anything begins."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence

from cplayers.errors import ConfigError
from cplayers.mesh import world_size
from cplayers.serving.fleet import Fleet
from cplayers.serving.requests import Request
from cplayers.serving.served import ServedModel


def require_replicas(model: ServedModel, fleet: Fleet, dcp_per_replica: int) -> None:
    """The ranks are those of the replicas, and the layers were built for one of them.

    Args:
        model: The model.
        fleet: The replicas.
        dcp_per_replica: Ranks of one that share a sequence.

    Raises:
        ConfigError: If not; alike on all ranks.
    """
    ranks, world = fleet.num_replicas * fleet.ranks_per_replica, world_size()
    if ranks != world:
        raise ConfigError(
            f"num_replicas={fleet.num_replicas} of ranks_per_replica={fleet.ranks_per_replica} "
            f"with {world} ranks",
            "every rank is in one replica",
            f"start {ranks} ranks and initialise the process group, or pass other numbers",
        )
    asked = (fleet.ranks_per_replica, dcp_per_replica)
    for topology in model.topologies:
        shape = (topology.tp, max(1, topology.dcp // topology.pcp))
        if shape != asked:
            raise ConfigError(
                f"layers of tp={shape[0]} with dcp={shape[1]} in ranks_per_replica={asked[0]} "
                f"with dcp_per_replica={asked[1]}",
                "the layers of a model are cut as one replica is",
                f"pass ranks_per_replica={shape[0]}, dcp_per_replica={shape[1]}, or build the "
                "model for the replica",
            )


def require_requests(
    model: ServedModel, requests: Sequence[Request], known: Collection[str]
) -> None:
    """Names are unique, and the model knows the tokens.

    Args:
        model: The model.
        requests: New ones.
        known: Names of earlier ones.

    Raises:
        ConfigError: If not; alike on all ranks.
    """
    names = [request.name for request in requests]
    counts = Counter(names)
    twice = sorted(name for name, count in counts.items() if count > 1 or name in known)
    if twice:
        raise ConfigError(
            f"requests named {twice}", "the name of a request is unique", "choose other names"
        )
    size = model.vocab_size
    for request in requests:
        highest = max(request.prompt)
        if size is not None and highest >= size:
            raise ConfigError(
                f"request {request.name!r} with token id {highest}",
                f"the model knows token ids below {size}",
                "use the tokenizer of this model, or pass vocab_size to ServedModel",
            )

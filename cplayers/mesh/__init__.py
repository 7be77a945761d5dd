"""Who the ranks are, and how they talk: Topology, its judge, and collectives by axis."""

from cplayers.mesh.exchange import exchange, gather_bytes
from cplayers.mesh.mesh import CPMesh
from cplayers.mesh.ring import Ring
from cplayers.mesh.subset import meshes_over, regroup
from cplayers.mesh.topology import AXES, Coords, Topology
from cplayers.mesh.traffic import TrafficLog, TrafficRecord
from cplayers.mesh.validate import legal_dcp, validate
from cplayers.mesh.world import world_size

__all__ = [
    "AXES",
    "CPMesh",
    "Coords",
    "Ring",
    "Topology",
    "TrafficLog",
    "TrafficRecord",
    "exchange",
    "gather_bytes",
    "legal_dcp",
    "meshes_over",
    "regroup",
    "validate",
    "world_size",
]

"""Hydra configuration: the groups mesh, cache, attention, prefill and serving.

An application registers the schemas and adds this package to Hydra's search path::

    register_configs()                            # before hydra.main

    defaults:                                     # in the application's config
      - mesh: auto
      - cache: default
      - attention: gqa
      - prefill: auto
      - _self_
    hydra:
      searchpath: [pkg://cplayers.conf]

so that ``mesh=tp3_pcp2_dcp2 cache.interleave_size=1 attention.combine=ag_rs`` is understood.
"""

from cplayers.conf.schema import (
    CacheConf,
    GQAConf,
    MLAConf,
    PrefillConf,
    ServingConf,
    TopologyConf,
    register_configs,
)

__all__ = [
    "CacheConf",
    "GQAConf",
    "MLAConf",
    "PrefillConf",
    "ServingConf",
    "TopologyConf",
    "register_configs",
]

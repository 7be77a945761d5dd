"""Tools for testing context-parallel code: live ranks in a pool. The library never imports this."""

from cplayers.testing.pool import RankPool, RankPoolError

__all__ = ["RankPool", "RankPoolError"]

"""Tools for testing context-parallel code: live ranks, and a check of attention backends.

The library never imports this.
"""

from cplayers.testing.conformance import BackendError, check_backend
from cplayers.testing.pool import RankPool, RankPoolError

__all__ = ["BackendError", "RankPool", "RankPoolError", "check_backend"]

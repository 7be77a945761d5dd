"""transformers adapters: swap context-parallel attention into a model and call ``generate``."""

from cplayers.hf.cache import CPCache
from cplayers.hf.model import ContextParallelModel
from cplayers.hf.parallelize import parallelize
from cplayers.hf.serving import serving_step
from cplayers.hf.state import CPState

__all__ = ["CPCache", "CPState", "ContextParallelModel", "parallelize", "serving_step"]

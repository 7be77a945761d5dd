"""Tensors on CPU lent to gloo, whose threads may hold them for longer than the operation takes.

gloo runs an operation in a thread of its own. That thread announces the result first and drops the
operation's tensors afterwards; a tensor that Python has seen is dropped under the interpreter lock.
Where the interpreter begins to finalize while the thread waits for that lock, CPython (up to 3.13)
ends the thread by unwinding it, which C++ forbids inside torch's destructors: the process aborts
with "terminate called without an active exception", although all its work is done.

So a rank that ends waits here first, until it has all tensors back. Others get the lock meanwhile.
"""

from __future__ import annotations

import time
from collections import deque
from weakref import ref

from torch import Tensor

POLL_S = 0.001

# A thread holds the two tensors of one finished operation, and a group has two threads by default:
# this many reach back over the threads of 64 groups.
_lent: deque[ref[Tensor]] = deque(maxlen=256)


def lend(*tensors: Tensor) -> None:
    """Note tensors that a backend is about to get; those on other devices are not followed.

    Args:
        tensors: Objects that no one keeps beyond the operation: what a caller keeps has to be
            another object, a view of the same memory.
    """
    _lent.extend(ref(tensor) for tensor in tensors if tensor.device.type == "cpu")


def wait_for_return(limit_s: float) -> bool:
    """Wait until no lent tensor is alive, and let other threads have the interpreter lock.

    A tensor's Python object lives as long as C++ refers to the tensor. So a weak reference to it
    tells when the backend has dropped the tensor, and has had the lock for that.

    Args:
        limit_s: Seconds to wait at most; with 0, threads that wait for the lock already get it.

    Returns:
        Whether all tensors have come back.
    """
    deadline = time.monotonic() + limit_s
    while True:
        time.sleep(POLL_S)
        if all(tensor() is None for tensor in _lent):
            return True
        if time.monotonic() > deadline:
            return False

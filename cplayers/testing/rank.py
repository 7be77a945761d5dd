"""The process of one rank of a pool: runs what it is sent, in a process group of the asked size."""

from __future__ import annotations

import faulthandler
import io
import os
import pickle
import signal
import sys
import traceback
from collections.abc import Callable
from contextlib import nullcontext
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from cplayers.mesh.health import Health
from cplayers.mesh.world import current_world


class _ByValue(pickle.Pickler):
    """Plain pickle, which copies tensors, with a detour for float8: torch cannot read it back."""

    def reducer_override(self, obj: object) -> Any:
        if not isinstance(obj, torch.Tensor) or obj.dtype.itemsize > 1:
            return NotImplemented
        if not obj.dtype.is_floating_point:
            return NotImplemented
        return _float8, (obj.detach().contiguous().view(torch.uint8), obj.dtype)


def _float8(bits: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return bits.view(dtype)


def by_value(obj: object) -> bytes:
    """Pickle, with tensors copied: no memory or file descriptor is shared with the receiver."""
    buffer = io.BytesIO()
    _ByValue(buffer, protocol=pickle.HIGHEST_PROTOCOL).dump(obj)
    return buffer.getvalue()


class Call(NamedTuple):
    """A call to make on ``size`` ranks. ``work`` is the pickled (function, args, kwargs)."""

    size: int
    rendezvous: str
    search_path: list[str]
    work: bytes


class Outcome(NamedTuple):
    """How a call ended on one rank: with a value, or with an error."""

    value: Any = None
    error: BaseException | None = None
    """The exception itself; ``None`` with a traceback where it cannot be pickled."""
    error_type: str = ""
    traceback: str = ""
    in_step: str = "yes"
    """Whether the rank's process group can be used again, as ``Health.in_step`` says."""


def serve(rank: int, connection: Connection, stack_file: str) -> None:
    """Run calls until the parent closes the connection."""
    torch.set_num_threads(1)
    with open(stack_file, "w") as stacks:
        # The parent asks a rank that misses its deadline where it is.
        faulthandler.register(signal.SIGUSR1, file=stacks, all_threads=False)
        connection.send_bytes(b"ready")
        rendezvous = ""
        while True:
            try:
                call: Call = pickle.loads(connection.recv_bytes())
            except EOFError:
                # A thread of the backend may still wait for a rank that is gone: do not join it.
                os._exit(0)
            outcome = _run(rank, call, rendezvous)
            rendezvous = call.rendezvous
            connection.send_bytes(_pickled(outcome))


def _run(rank: int, call: Call, rendezvous: str) -> Outcome:
    health: Health | None = None
    try:
        if call.rendezvous != rendezvous:
            _join(rank, call)
        if call.size > 1:
            health = current_world().health
        sys.path[:] = call.search_path
        with health.guard(range(call.size)) if health else nullcontext():
            fn: Callable[..., Any]
            fn, args, kwargs = pickle.loads(call.work)
            value = fn(*args, **kwargs)
        return Outcome(value=value, in_step=_in_step(call, health))
    except BaseException as error:
        return Outcome(
            error=error,
            error_type=type(error).__name__,
            traceback=traceback.format_exc(),
            in_step=_in_step(call, health),
        )


def _in_step(call: Call, health: Health | None) -> str:
    if health is None:
        return "yes" if call.size == 1 else "no"
    return health.in_step


def _join(rank: int, call: Call) -> None:
    """Leave the process group of an earlier call and join the one of this call."""
    if dist.is_initialized():
        dist.destroy_process_group()
        _forget_dtensor_plans()
    if call.size > 1:
        dist.init_process_group(
            "gloo", init_method=f"file://{call.rendezvous}", rank=rank, world_size=call.size
        )


def _forget_dtensor_plans() -> None:
    """Clear DTensor's caches.

    A device mesh of the next process group compares equal to one of the last, and a cached plan
    would go on using its groups, which are gone.
    """
    if "torch.distributed.tensor" not in sys.modules:
        return
    from torch.distributed.tensor._redistribute import clear_redistribute_planner_cache
    from torch.distributed.tensor.debug import _clear_sharding_prop_cache

    _clear_sharding_prop_cache()  # type: ignore[no-untyped-call]
    clear_redistribute_planner_cache()


def _pickled(outcome: Outcome) -> bytes:
    try:
        if outcome.error is not None:
            # An exception may pickle and yet fail to come back: tried here, not in the parent.
            pickle.loads(by_value(outcome.error))
        return by_value(outcome)
    except Exception:
        if outcome.error is not None:
            return by_value(outcome._replace(error=None))
        return by_value(
            Outcome(
                error_type="PicklingError",
                traceback=f"the result cannot be pickled:\n{traceback.format_exc()}",
                in_step=outcome.in_step,
            )
        )

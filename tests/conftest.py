"""What every test shares: ranks that are started once, Hypothesis profiles, and a leak check."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import HealthCheck, settings

if TYPE_CHECKING:
    from cplayers.testing import RankPool

# A first example on fresh ranks is slow, which says nothing about the strategy that drew it.
_PROFILE = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("default", _PROFILE, max_examples=25, derandomize=True)
settings.register_profile("all", _PROFILE, max_examples=300, derandomize=False)
settings.load_profile("default")

torch.set_num_threads(1)

EXAMPLES = Path(__file__).parents[1] / "examples"

# pytest names the running test here, and changes it by itself.
_ENVIRONMENT_OF_PYTEST = {"PYTEST_CURRENT_TEST"}


@dataclass(frozen=True)
class Ranks:
    """Exactly ``size`` ranks of a pool that may hold more, so that a result never depends on it."""

    pool: RankPool
    size: int

    def run(self, fn: Callable[..., Any], *args: Any, **kwargs: Any) -> list[Any]:
        """Run ``fn(*args, **kwargs)`` on each rank, or on the first ``n`` of them."""
        kwargs.setdefault("n", self.size)
        return self.pool.run(fn, *args, **kwargs)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Of a test marked ``sampled(n)``, mark all but one in n of its parameter sets as slow.

    Which ones depends on their names alone, so that a sample meets values of every parameter.
    """
    for item in items:
        marker = item.get_closest_marker("sampled")
        if marker is not None and zlib.crc32(item.name.encode()) % marker.args[0]:
            item.add_marker(pytest.mark.slow)


@pytest.fixture(scope="session")
def ranks() -> Iterator[Callable[[int], Ranks]]:
    """``ranks(n)``: n started ranks. They are kept for the session, and replaced to get more."""
    from cplayers.testing import RankPool

    pool: RankPool | None = None
    started = 0

    def at_least(n: int) -> Ranks:
        nonlocal pool, started
        if pool is None or started < n:
            if pool is not None:
                pool.close()
            pool, started = RankPool(n), n
        return Ranks(pool, n)

    yield at_least
    if pool is not None:
        pool.close()


@pytest.fixture(scope="session")
def smollm2(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The folder of the examples' model, converted once per session, in a process of its own."""
    folder = tmp_path_factory.mktemp("weights") / "smollm2"
    code = "import pathlib, sys, smollm2; smollm2.convert(pathlib.Path(sys.argv[1]))"
    subprocess.run([sys.executable, "-c", code, str(folder)], cwd=EXAMPLES, check=True)
    yield folder
    shutil.rmtree(folder)


@pytest.fixture(autouse=True)
def leaves_no_trace() -> Iterator[None]:
    """Fail a test that leaves environment variables, threads of torch or a process group behind."""
    before = _environment()
    yield
    leaks = [
        f"environment variable {name}: {before.get(name)!r} became {_environment().get(name)!r}"
        for name in sorted(before.keys() | _environment().keys())
        if before.get(name) != _environment().get(name)
    ]
    if torch.get_num_threads() != 1:
        leaks.append(f"torch.set_num_threads: 1 became {torch.get_num_threads()}")
        torch.set_num_threads(1)
    if dist.is_initialized():
        leaks.append("torch.distributed: the default process group is still initialised")
        dist.destroy_process_group()
    if torch.is_grad_enabled() is not True:
        leaks.append("torch.set_grad_enabled: gradients were switched off")
        torch.set_grad_enabled(True)
    if torch.get_default_dtype() is not torch.float32:
        leaks.append(f"torch.set_default_dtype: float32 became {torch.get_default_dtype()}")
        torch.set_default_dtype(torch.float32)
    if leaks:
        pytest.fail("this test leaves something behind: " + "; ".join(leaks), pytrace=False)


def _environment() -> dict[str, str]:
    return {k: v for k, v in os.environ.items() if k not in _ENVIRONMENT_OF_PYTEST}

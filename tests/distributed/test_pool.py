"""The rank pool: values by rank, every way to fail, and that it works again afterwards."""

import os
import signal
import time
from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

from cplayers.errors import ConfigError, StateError
from cplayers.testing import RankPool, RankPoolError


@pytest.fixture(scope="module")
def pool():
    with RankPool(3) as pool:
        yield pool


def group_and_pid():
    if not dist.is_initialized():
        return None, None, os.getpid()
    return dist.get_rank(), dist.get_world_size(), os.getpid()


def summed(x, *, scale):
    x = x * scale * (dist.get_rank() + 1)
    dist.all_reduce(x)
    return x


def threads_and_address(x):
    return torch.get_num_threads(), x.data_ptr(), x.is_shared()


def raise_config_error():
    raise ConfigError("x=1", "x is 2", "pass 2")


def raise_on(rank, error):
    if dist.get_rank() == rank:
        raise error
    return rank


def raise_own_type():
    raise [KeyError, IndexError, TypeError][dist.get_rank()]("mine")


class Unpicklable(Exception):
    def __init__(self, a, b):
        super().__init__(a)


def raise_unpicklable():
    raise Unpicklable(1, 2)


def return_unpicklable():
    return lambda: 1


def sleep_on(rank):
    while dist.get_rank() == rank:
        time.sleep(0.1)


def kill_on(rank):
    if dist.get_rank() == rank:
        os.kill(os.getpid(), signal.SIGKILL)
    dist.barrier()


def works(pool, n=None):
    n = n or pool.world_size
    answers = pool.run(group_and_pid, n=n)
    expected = [(rank, n) for rank in range(n)] if n > 1 else [(None, None)]
    assert [answer[:2] for answer in answers] == expected
    return [answer[2] for answer in answers]


def test_values_come_back_by_rank(pool):
    totals = pool.run(summed, torch.tensor([1.0, 2.0]), scale=3)
    assert [total.tolist() for total in totals] == [[18.0, 36.0]] * 3
    assert pool.run(partial(summed, scale=1), torch.ones(1))[2].tolist() == [6.0]


def test_ranks_are_kept_between_calls_whatever_n(pool):
    pids = works(pool)
    assert len({*pids, os.getpid()}) == 4
    assert works(pool, 1) == pids[:1]
    assert works(pool, 2) == pids[:2]
    assert works(pool, 3) == pids


def test_tensors_travel_by_value_to_single_threaded_ranks(pool):
    x = torch.zeros(1000)
    for threads, address, shared in pool.run(threads_and_address, x):
        assert (threads, shared) == (1, False)
        assert address != x.data_ptr()


def test_an_error_of_all_ranks_is_raised_as_it_is(pool):
    pids = works(pool)
    for n in (1, 2, 3):
        with pytest.raises(ConfigError, match="x=1: x is 2") as caught:
            pool.run(raise_config_error, n=n)
        assert caught.value.remedy == "pass 2"
        notes = "\n".join(caught.value.__notes__)
        assert str(list(range(n))) in notes
        assert "in raise_config_error" in notes
    assert works(pool) == pids, "nobody is out of step, so nobody is replaced"


def test_an_error_of_one_rank_names_it_with_its_traceback(pool):
    with pytest.raises(RankPoolError, match=r"(?s)^rank 1: Traceback.*raise_on.*KeyError: 'k'"):
        pool.run(raise_on, 1, KeyError("k"))
    works(pool)


def test_different_errors_are_all_shown(pool):
    with pytest.raises(RankPoolError, match=r"(?s)rank 0.*KeyError.*rank 1.*IndexE.*rank 2.*TypeE"):
        pool.run(raise_own_type)
    works(pool)


def test_what_cannot_be_pickled_is_described(pool):
    with pytest.raises(RankPoolError, match=r"(?s)rank 0: .*Unpicklable: 1"):
        pool.run(raise_unpicklable, n=2)
    with pytest.raises(RankPoolError, match="the result cannot be pickled"):
        pool.run(return_unpicklable, n=2)
    works(pool)


def test_a_rank_that_misses_its_deadline_is_named_and_replaced(pool):
    before = works(pool)
    began = time.monotonic()
    with pytest.raises(RankPoolError, match=r"(?s)^rank 2: did not answer.*in sleep_on"):
        pool.run(sleep_on, 2, timeout=1.0)
    assert time.monotonic() - began < 10
    assert set(works(pool)).isdisjoint(before)


def test_a_rank_that_dies_is_named_and_replaced(pool):
    before = works(pool)
    with pytest.raises(RankPoolError, match=r"rank 1: died of SIGKILL"):
        pool.run(kill_on, 1, n=2)
    after = works(pool)
    assert set(after[:2]).isdisjoint(before)
    assert after[2] == before[2], "it took no part in the call"


def test_a_rank_that_died_between_calls_is_replaced(pool):
    before = works(pool)
    os.kill(before[1], signal.SIGKILL)
    time.sleep(0.3)
    after = works(pool)
    assert after[0] == before[0] and after[2] == before[2] and after[1] != before[1]


def test_sizes_are_checked_and_a_closed_pool_says_so(pool):
    with pytest.raises(ConfigError, match=r"n=4.*3 ranks"):
        pool.run(group_and_pid, n=4)
    with pytest.raises(ConfigError, match="world_size=0"):
        RankPool(0)
    other = RankPool(1)
    [pid] = works(other)
    other.close()
    other.close()
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)
    with pytest.raises(StateError, match="closed"):
        other.run(group_and_pid)


def with_dtensor(other_groups: int) -> float:
    everyone = list(range(dist.get_world_size()))
    for _ in range(other_groups):  # the group below has another name then
        dist.new_group(everyone)
    mesh = DeviceMesh.from_group(dist.new_group(everyone), "cpu")
    torch.manual_seed(0)
    linear = torch.nn.Linear(6, 12)
    x = torch.ones(2, 6)
    expected = linear(x).sum()
    style = ColwiseParallel(output_layouts=Replicate())
    parallelize_module(linear, mesh, style, src_data_rank=None)
    return float((linear(x).sum() - expected).abs())


def test_dtensor_follows_a_change_of_size(pool) -> None:
    for size, other_groups in ((2, 3), (3, 0), (2, 0)):
        assert max(pool.run(with_dtensor, other_groups, n=size)) < 1e-5

"""The C kernel is compiled once, by many at a time; a machine that cannot refuses by name."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from cplayers.cache import GQASpec, InterleavedLayout, PagedKVCache
from cplayers.errors import ConfigError
from cplayers.ops import attend, attention_reference, select_paged
from cplayers.ops.native import attention, build


@pytest.fixture
def fresh(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A home folder without libraries, and nothing remembered."""
    monkeypatch.setenv("HOME", str(tmp_path))
    caches = (build.library, build._own_folder, attention._function, attention._reason)
    for cached in caches:
        cached.cache_clear()
    yield tmp_path / ".cache" / "cplayers"
    for cached in caches:
        cached.cache_clear()


def tensors() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    q, k, v = torch.randn(1, 2, 16), torch.randn(5, 1, 16), torch.randn(5, 1, 16)
    return q, k, v, torch.tensor([0]), torch.tensor([5])


def test_compiled_once_into_the_users_cache(fresh: Path) -> None:
    given = tensors()
    for _ in range(2):
        out, _ = attend(*given, scale=0.25, backend="native")
        expected = attention_reference(*given, scale=0.25)
        torch.testing.assert_close(out.double(), expected.out, rtol=0, atol=1e-6)
    (library,) = fresh.iterdir()
    assert library.name.startswith("span_attention-") and library.suffix == ".so"
    assert fresh.stat().st_mode & 0o077 == 0
    made = library.stat().st_mtime_ns
    for cached in (build.library, attention._function, attention._reason):
        cached.cache_clear()
    attend(*given, scale=0.25, backend="native")
    assert [path.stat().st_mtime_ns for path in fresh.iterdir()] == [made]


def test_several_compile_at_the_same_time(fresh: Path) -> None:
    code = (
        "from cplayers.ops.native.build import library\n"
        "library('span_attention.c', ('HEAD_DIM=16', 'VALUE_DIM=16')).span_attention\n"
    )
    started = [subprocess.Popen([sys.executable, "-c", code]) for _ in range(3)]
    assert [process.wait(60) for process in started] == [0, 0, 0]
    assert len(list(fresh.iterdir())) == 1


def test_without_a_home_folder_it_lives_as_long_as_the_process(
    fresh: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fresh.parent.write_text("a file where a folder should be")
    attend(*tensors(), scale=0.25, backend="native")
    assert len(list(build._own_folder().iterdir())) == 1
    assert fresh.parent.is_file()


@pytest.mark.parametrize(
    ("compiler", "reason"),
    [
        (None, "no C compiler is on the path"),
        ("exit 3", "did not compile span_attention.c: exit 3"),
        ("echo no such option >&2; exit 1", "no such option"),
    ],
)
def test_a_machine_that_cannot_compile_says_so(
    fresh: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, compiler: str | None, reason: str
) -> None:
    folder = tmp_path / "bin"
    folder.mkdir()
    if compiler is not None:
        (folder / "cc").write_text(f"#!/bin/sh\n{compiler}\n")
        (folder / "cc").chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:/nowhere")
    if compiler is not None:  # its script needs a shell, which has an absolute path
        assert subprocess.run([str(folder / "cc")], check=False).returncode != 0
    given = tensors()
    with pytest.raises(ConfigError, match=f'backend="native".*{reason}.*use auto or one of cpu'):
        attend(*given, scale=0.25, backend="native")
    cache = PagedKVCache(GQASpec(1, 16), InterleavedLayout(1, 4, 4), 1, 2)
    assert select_paged(given[0], *cache.storage.stores(0), most_rows=1) is None
    out, _ = attend(*given, scale=0.25)
    expected = attention_reference(*given, scale=0.25)
    torch.testing.assert_close(out.double(), expected.out, rtol=0, atol=1e-6)
    assert not list(fresh.glob("*.so"))


@pytest.mark.parametrize(
    ("dim", "dtype", "softcap", "reason"),
    [
        (8, torch.float32, None, "multiples of 16, got H=8, V=8"),
        (16, torch.float64, None, "fp32 and bf16, q is torch.float64"),
        (16, torch.float32, 2.0, "no softcap, 2.0"),
    ],
)
def test_what_it_cannot_do_is_refused(
    dim: int, dtype: torch.dtype, softcap: float | None, reason: str
) -> None:
    q, k = torch.randn(1, 2, dim, dtype=dtype), torch.randn(5, 1, dim, dtype=dtype)
    span = torch.tensor([0]), torch.tensor([5])
    with pytest.raises(ConfigError, match=reason):
        attend(q, k, k.clone(), *span, scale=1.0, softcap=softcap, backend="native")

"""Finding compilers, headers and libraries."""

from __future__ import annotations

from pathlib import Path

import pytest

from mbc.codegen.toolchain import Places, find_toolchain


def _file(path: Path, text: str = "") -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    path.chmod(0o755)
    return path


@pytest.fixture
def toolkit(tmp_path: Path) -> Path:
    root = tmp_path / "cuda"
    _file(root / "bin" / "nvcc", "#!/bin/sh\necho sm_80\necho sm_90\n")
    _file(root / "include" / "cuda_runtime.h")
    _file(root / "lib64" / "libcudart_static.a")
    _file(root / "lib64" / "libcudart.so.13")
    return root


def test_nothing_found_says_what_is_missing(tmp_path: Path) -> None:
    found = find_toolchain({"PATH": str(tmp_path)}, Places())
    assert (found.nvcc, found.gxx, found.cudart, found.cudnn, found.cublaslt) == (None,) * 5
    assert [missing.name for missing in found.missing] == ["nvcc", "g++", "the CUDA runtime", "cuDNN 9", "cuBLASLt"]
    assert all(missing.remedy for missing in found.missing)
    assert "CUDA_HOME" in str(found.missing[0])


def test_cuda_home_comes_first(tmp_path: Path, toolkit: Path) -> None:
    _file(tmp_path / "bin" / "nvcc")
    found = find_toolchain({"PATH": str(tmp_path / "bin"), "CUDA_HOME": str(toolkit)}, Places())
    assert found.nvcc == toolkit / "bin" / "nvcc"
    assert found.architectures == ("sm_80", "sm_90")
    assert found.cudart is not None
    assert found.cudart.library == "libcudart_static.a"  # a package then needs no runtime library


def test_compiler_named_by_cxx(tmp_path: Path) -> None:
    compiler = _file(tmp_path / "bin" / "g++-13")
    assert find_toolchain({"PATH": str(tmp_path / "bin"), "CXX": "g++-13"}, Places()).gxx == compiler


def test_wheels_have_libraries_without_links(tmp_path: Path, toolkit: Path) -> None:
    cudnn, cu13 = tmp_path / "nvidia" / "cudnn", tmp_path / "nvidia" / "cu13"
    _file(cudnn / "include" / "cudnn.h")
    _file(cudnn / "lib" / "libcudnn.so.9")
    _file(cu13 / "include" / "cublasLt.h")
    for name in ("libcublasLt.so.12", "libcublasLt.so.13", "libcublasLt.so.13.0.2"):
        _file(cu13 / "lib" / name)
    found = find_toolchain({"PATH": ""}, Places((toolkit,), (cu13, cudnn)))
    assert found.nvcc == toolkit / "bin" / "nvcc"
    assert found.cudnn is not None and found.cudnn.library_folder == cudnn / "lib"
    assert found.cublaslt is not None and found.cublaslt.library == "libcublasLt.so.13"
    assert [missing.name for missing in found.missing] == ["g++"]


def test_system_folders(tmp_path: Path) -> None:
    _file(tmp_path / "include" / "cudnn.h")
    _file(tmp_path / "lib" / "libcudnn.so.9")
    found = find_toolchain({"PATH": ""}, Places(system=((tmp_path / "include", tmp_path / "lib"),)))
    assert found.cudnn is not None


def test_this_machine_is_looked_at() -> None:
    found = find_toolchain()  # whatever is here, it does not fail, and finds files or says what is missing
    assert all(path.exists() for path in (found.nvcc, found.gxx) if path is not None)
    assert {missing.name for missing in found.missing} >= {
        name for name, path in (("nvcc", found.nvcc), ("g++", found.gxx)) if path is None
    }

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


def test_nothing_found_names_missing_parts(tmp_path: Path) -> None:
    toolchain = find_toolchain({"PATH": str(tmp_path)}, Places())
    assert (toolchain.nvcc, toolchain.gxx, toolchain.cudart, toolchain.cudnn, toolchain.cublaslt) == (None,) * 5
    assert [missing.name for missing in toolchain.missing] == ["nvcc", "g++", "the CUDA runtime", "cuDNN 9", "cuBLASLt"]
    assert all(missing.remedy for missing in toolchain.missing)
    assert "CUDA_HOME" in str(toolchain.missing[0])


def test_cuda_home_comes_first(tmp_path: Path, toolkit: Path) -> None:
    _file(tmp_path / "bin" / "nvcc")
    toolchain = find_toolchain({"PATH": str(tmp_path / "bin"), "CUDA_HOME": str(toolkit)}, Places())
    assert toolchain.nvcc == toolkit / "bin" / "nvcc"
    assert toolchain.architectures == ("sm_80", "sm_90")
    assert toolchain.cudart is not None
    assert toolchain.cudart.library == "libcudart_static.a"  # a package then needs no runtime library


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
    toolchain = find_toolchain({"PATH": ""}, Places((toolkit,), (cu13, cudnn)))
    assert toolchain.nvcc == toolkit / "bin" / "nvcc"
    assert toolchain.cudnn is not None and toolchain.cudnn.library_folder == cudnn / "lib"
    assert toolchain.cublaslt is not None and toolchain.cublaslt.library == "libcublasLt.so.13"
    assert [missing.name for missing in toolchain.missing] == ["g++"]


def test_system_folders(tmp_path: Path) -> None:
    _file(tmp_path / "include" / "cudnn.h")
    _file(tmp_path / "lib" / "libcudnn.so.9")
    toolchain = find_toolchain({"PATH": ""}, Places(system=((tmp_path / "include", tmp_path / "lib"),)))
    assert toolchain.cudnn is not None


def test_this_machine_is_looked_at() -> None:
    toolchain = find_toolchain()  # whatever is here, it does not fail, and finds files or says what is missing
    assert all(path.exists() for path in (toolchain.nvcc, toolchain.gxx) if path is not None)
    assert {missing.name for missing in toolchain.missing} >= {
        name for name, path in (("nvcc", toolchain.nvcc), ("g++", toolchain.gxx)) if path is None
    }

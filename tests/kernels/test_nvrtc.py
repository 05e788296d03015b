"""Which machines NVRTC is for; compiling and launching kernels is tested with them, on a GPU."""

from __future__ import annotations

from lowbit_kernels import nvrtc


def test_without_a_gpu_there_is_no_kernel(monkeypatch):
    monkeypatch.setattr(nvrtc.torch.cuda, "is_available", lambda: False)
    nvrtc.is_available.cache_clear()
    try:
        assert not nvrtc.is_available()
    finally:
        nvrtc.is_available.cache_clear()

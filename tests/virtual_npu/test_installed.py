"""The virtual NPU runs where a torch_npu wheel is installed, and must run where it is required."""

from __future__ import annotations

import os

import pytest

from . import cann_library


def test_torch_npu_is_installed_where_it_is_required():
    if os.environ.get("NPU_AUTOPATCH_REQUIRE_VIRTUAL_NPU") == "1":
        assert cann_library.installed(), "the virtual NPU is required: pip install --no-deps torch_npu==2.13.0"
    elif not cann_library.installed():
        pytest.skip("the virtual NPU needs the torch_npu wheel: pip install --no-deps torch_npu==2.13.0 pyyaml")

"""A virtual NPU: the real torch_npu wheel on host memory, for machines without Ascend hardware.

Real: the ``npu`` device, the schemas of the ``npu::`` ops, their Meta kernels, torch_npu's autograd formulas
and its choice of attention kernel. Stand-ins: CANN's runtime (`cann_library`), aten (the CPU's kernels,
`aten_kernels`), attention (`attention`) and the fused ops (the emulator's kernels). Not there: HCCL,
the profiler, inductor. Run with ``pytest tests/virtual_npu``.
"""

"""A virtual NPU: the real torch_npu wheel on host memory, for machines without Ascend hardware.

Real: the ``npu`` device, the schemas of the ``npu::`` ops, their Meta kernels, torch_npu's autograd formulas
and its choice of attention kernel. Stand-ins: CANN's runtime (`cann_library`), aten (the CPU's kernels,
`aten_kernels`), attention (`attention`) and the fused ops (the emulator's kernels). Run with
``pytest tests/virtual_npu``, apart from the other tests: where torch_npu is installed and CANN is not, torch can be
imported only after `activation`.

A test of an op adds its legal calls to `samples`; the op itself is served once it is in ``emulator.OPS``.

Not there: HCCL, the profiler, inductor, attention with dropout or a layout other than BNSD. An op without a kernel
raises torch_npu's own error with the name of the kernel it looked for; `device.serving` gives it one. Results are
contiguous, as op-plugin's are, while Meta kernels of aten keep the strides of their inputs: compiled with
``aot_eager``, Mamba2, Bamba and Qwen3-Next view what cannot be viewed, patched or not.
"""

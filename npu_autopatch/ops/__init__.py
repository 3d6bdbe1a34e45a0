"""What torch_npu can do: detection, legality and the differentiable call of each op, one module an op."""

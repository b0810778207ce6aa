"""The `kaitian` backend of torch.distributed, and the algorithms under it."""

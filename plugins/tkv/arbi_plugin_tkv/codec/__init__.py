"""The codec as a library of pure functions over tensors; `layout` is torch-free."""

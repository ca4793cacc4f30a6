"""Checkpoint tensors in memory."""

from attrs import field, frozen


@frozen(eq=False)
class MemoryTensor:
    """A tensor source; remembers how many numbers each read took."""

    name: str
    value: object
    reads: list = field(factory=list)
    encoding: str = "dense"

    @property
    def shape(self):
        return tuple(self.value.shape)

    @property
    def dtype(self):
        return str(self.value.dtype).removeprefix("torch.")

    def load(self, dim=None, start=0, length=None):
        part = self.value if dim is None else self.value.narrow(dim, start, length)
        self.reads.append(part.numel())
        return part.clone()

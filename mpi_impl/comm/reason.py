"""The reason for a message at the edge of a layer's region: a value for programs that reads as prose in the ledger."""


class Reason(str):
    """A tensor that a layer sends, 'mlp input' or 'experts: weights'. The ledger's phase tells the direction."""

    layer: str       # mlp, attention, ...
    tensor: str      # input and output, at the edges of the layer; or another one

    def __new__(cls, layer: str, tensor: str):
        reason = super().__new__(cls, f"{layer} {tensor}" if tensor in ("input", "output") else f"{layer}: {tensor}")
        reason.layer, reason.tensor = layer, tensor
        return reason

    def __getnewargs__(self):
        """Return the arguments to make it from, where it is unpickled."""
        return self.layer, self.tensor

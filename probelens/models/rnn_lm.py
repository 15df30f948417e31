"""A stacked LSTM or GRU between an embedding and a head, one module per layer."""

from __future__ import annotations

from torch import Tensor, nn

from probelens.errors import InputError

__all__ = ["RNNLM"]


class RNNLM(nn.Module):
    """Embedding, `n_layers` single recurrent layers, linear head; no residual connections.

    Each layer is its own `nn.LSTM` or `nn.GRU` (batch first), so that a plain forward hook
    sees every layer's output. A fused stack of several layers shows only its last.

    Args:
        cell: "lstm" or "gru".
        d_vocab: Number of token ids and of logits.
        d_model: Width of the embedding.
        hidden_size: Width of every layer's state.
        n_layers: Number of layers.

    Raises:
        InputError: A cell that is neither "lstm" nor "gru".

    Examples:
        >>> import torch
        >>> model = RNNLM("gru", d_vocab=7, d_model=8, hidden_size=12, n_layers=2)
        >>> model(torch.zeros(3, 5, dtype=torch.long)).shape
        torch.Size([3, 5, 7])
    """

    def __init__(self, cell: str, *, d_vocab: int, d_model: int, hidden_size: int, n_layers: int) -> None:
        super().__init__()
        cells: dict[str, type[nn.LSTM] | type[nn.GRU]] = {"lstm": nn.LSTM, "gru": nn.GRU}
        if cell not in cells:
            raise InputError(f"unknown cell {cell!r}. Allowed: lstm, gru.")
        self.embedding = nn.Embedding(d_vocab, d_model)
        widths = [d_model] + [hidden_size] * (n_layers - 1)
        self.layers = nn.ModuleList(cells[cell](width, hidden_size, batch_first=True) for width in widths)
        self.head = nn.Linear(hidden_size, d_vocab)

    def forward(self, input_ids: Tensor) -> Tensor:
        """Logits of every position.

        Args:
            input_ids: Tokens. (batch, pos)

        Returns:
            Logits. (batch, pos, d_vocab)
        """
        x = self.embedding(input_ids)
        for layer in self.layers:
            x, _state = layer(x)
        return self.head(x)

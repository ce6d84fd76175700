"""The import of attention: accepted forms and refusals.

Models write attention by `MultiheadAttention`, by `scaled_dot_product_attention`, or by products and softmax. Windows,
and shifted windows with their mask, are tested too.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest

from mbc.errors import MbcError
from mbc.interchange.importing import import_model
from tests.interchange.models import Model, Tensor, compared, exported, nn, torch

F = torch.nn.functional
IMAGE = (3, 3, 16, 16)


class Tokens(nn.Module):
    """A small ViT: patches, a class token, positions and one block; the class token gives the output."""

    def __init__(self, block: Model) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, 8, 4, stride=4)
        self.token = nn.Parameter(torch.randn(1, 1, 8))
        self.position = nn.Parameter(torch.randn(1, 17, 8))
        self.block, self.norm, self.head = block, nn.LayerNorm(8), nn.Linear(8, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = self.patches(x).flatten(2).transpose(1, 2)
        x = torch.cat((self.token.expand(x.shape[0], -1, -1), x), 1) + self.position
        x = x + self.block(self.norm(x))
        return self.head(F.gelu(x)[:, 0])


class Multihead(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.own = nn.MultiheadAttention(8, 2, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.own(x, x, x, need_weights=False)[0]


class Packed(nn.Module):
    """Attention as in timm: one layer gives query, key and value."""

    def __init__(self, **settings: object) -> None:
        super().__init__()
        self.qkv, self.proj, self.settings = nn.Linear(8, 24), nn.Linear(8, 8, bias=False), settings

    def forward(self, x: Tensor) -> Tensor:
        n, t, c = x.shape
        q, k, v = self.qkv(x).reshape(n, t, 3, 2, c // 2).permute(2, 0, 3, 1, 4).unbind(0)
        return self.proj(self.mixed(q, k, v).transpose(1, 2).reshape(n, t, c))

    def mixed(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, **self.settings)


class ByHand(Packed):
    def mixed(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return ((q @ k.transpose(-2, -1)) / 3).softmax(-1) @ v


class Separate(Packed):
    """Attention whose query, key and value come from separate layers."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(8, 8) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (f(x).unflatten(-1, (2, 4)).transpose(1, 2) for f in (self.q, self.k, self.v))
        return self.proj(self.mixed(q, k, v).transpose(1, 2).flatten(2))


def windows(x: Tensor, side: int) -> Tensor:
    n, h, w, c = x.shape
    x = x.view(n, h // side, side, w // side, side, c).permute(0, 1, 3, 2, 4, 5)
    return x.reshape(-1, side * side, c)


def offsets(side: int) -> Tensor:
    """Return the row of the table for each pair of pixels of a window, [T * T]."""
    y, x = (p.flatten() for p in torch.meshgrid(torch.arange(side), torch.arange(side), indexing="ij"))
    down, across = y[:, None] - y + side - 1, x[:, None] - x + side - 1
    return (down * (2 * side - 1) + across).flatten()


class Windows(nn.Module):
    """A block of Swin with its merging of patches. The mask adds `masked` to scores between different parts."""

    def __init__(self, shift: int, side: int = 4, masked: float = -100.0) -> None:
        super().__init__()
        self.patches, self.norm = nn.Conv2d(3, 8, 2, stride=2), nn.LayerNorm(8)
        self.qkv, self.proj = nn.Linear(8, 24), nn.Linear(8, 8)
        self.table = nn.Parameter(torch.randn((2 * side - 1) ** 2, 2))
        self.register_buffer("index", offsets(side))
        self.merged, self.shrink = nn.LayerNorm(32), nn.Linear(32, 6)
        self.shift, self.side, self.masked = shift, side, masked

    def mask(self, x: Tensor) -> Tensor:
        side, shift = self.side, self.shift
        parts = x.new_zeros((8, 8))
        for number, rows in enumerate(((0, -side), (-side, -shift), (-shift, None))):
            for columns, part in (((0, -side), 0), ((-side, -shift), 1), ((-shift, None), 2)):
                parts[rows[0] : rows[1], columns[0] : columns[1]] = 3 * number + part
        parts = windows(parts.view(1, 8, 8, 1), side).squeeze(-1)
        mask = parts.unsqueeze(1) - parts.unsqueeze(2)
        return mask.masked_fill(mask != 0, self.masked).masked_fill(mask == 0, 0.0)

    def scores(self, q: Tensor, k: Tensor) -> Tensor:
        t = self.side**2
        bias = self.table[self.index].view(t, t, 2).permute(2, 0, 1).contiguous().unsqueeze(0)
        logits = (q * 4**-0.5) @ k.transpose(-2, -1) + bias
        if self.shift:
            mask = self.mask(q)
            logits = logits.view(-1, mask.shape[0], 2, t, t) + mask.unsqueeze(1).unsqueeze(0)
        return logits.view(-1, 2, t, t)

    def forward(self, x: Tensor) -> Tensor:
        x = self.patches(x).permute(0, 2, 3, 1)
        n, h, w, c = x.shape
        y = torch.roll(self.norm(x), (-self.shift, -self.shift), (1, 2)) if self.shift else self.norm(x)
        y = windows(y, self.side)
        q, k, v = self.qkv(y).reshape(*y.shape[:2], 3, 2, c // 2).permute(2, 0, 3, 1, 4)
        y = F.dropout(self.scores(q, k).softmax(-1), 0.0) @ v
        y = self.proj(y.transpose(1, 2).reshape(-1, self.side**2, c))
        y = y.view(n, h // self.side, w // self.side, self.side, self.side, c).permute(0, 1, 3, 2, 4, 5)
        y = y.reshape(n, h, w, c)
        y = torch.roll(y, (self.shift, self.shift), (1, 2)) if self.shift else y
        x = (x + y).reshape(n, h // 2, 2, w // 2, 2, c).permute(0, 1, 3, 4, 2, 5).flatten(3)
        return self.shrink(self.merged(x)).permute(0, 3, 1, 2)


SEQUENCES: dict[str, tuple[Callable[[], Model], str]] = {
    "multihead": (Multihead, "attention(2)"),
    "packed": (Packed, "attention(2)"),
    "causal": (lambda: Packed(is_causal=True), "attention(2, causal=true)"),
    "scaled": (lambda: Packed(scale=0.3), "attention(2, scale=0.3)"),
    "by hand": (ByHand, "attention(2, scale=0.33333333"),
    "separate": (Separate, "attention(2)"),
}


@pytest.mark.parametrize("name", SEQUENCES)
def test_attention_of_a_sequence(name: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    make, layer = SEQUENCES[name]
    source = compared(tmp_path, Tokens(make()), torch.randn(*IMAGE)).source
    assert layer in source
    # Positions stay an image: nothing is moved between the patches and the head but parameters.
    assert len(re.findall(r"^.*permute.*$", source, re.M)) == 1 and "@position |> permute" in source
    assert "slice(axis=1" not in source


@pytest.mark.parametrize("shift", [0, 1, 2])
def test_attention_in_windows(shift: int, tmp_path: Path) -> None:
    torch.manual_seed(0)
    source = compared(tmp_path, Windows(shift), torch.randn(*IMAGE)).source
    shifted = f", size=8, shift={shift}" if shift else ""
    assert f"window_bias(2, 4{shifted}) @table" in source and "windows(4)" in source and "join_windows(8, 4)" in source
    assert (f"roll({-shift})" in source and f"roll({shift})" in source) == bool(shift)


class OtherOffsets(Windows):
    def __init__(self) -> None:
        super().__init__(0)
        self.index = offsets(4).flip(0)


class ByColumns(Windows):
    """Windows whose table is that of LeViT: [heads, offsets]."""

    def __init__(self) -> None:
        super().__init__(0)
        self.table = nn.Parameter(torch.randn(2, 49))

    def scores(self, q: Tensor, k: Tensor) -> Tensor:
        return (q * 4**-0.5) @ k.transpose(-2, -1) + self.table[:, self.index].view(1, 2, 16, 16)


class Multiplied(ByHand):
    def mixed(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return (q @ k.transpose(-2, -1)) @ v


REFUSED: dict[str, tuple[Callable[[], Model], str]] = {
    "dropout": (lambda: Tokens(Packed(dropout_p=0.1)), "it drops scores"),
    "mask": (lambda: Windows(1, masked=-5.0), "its mask is not that of shifted windows"),
    "offsets": (OtherOffsets, "its bias is not that of offsets within windows of (4, 4)"),
    "columns": (ByColumns, "its bias is not that of offsets within windows of (4, 4)"),
    "no softmax": (lambda: Tokens(Multiplied()), "it multiplies scores that have no softmax"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_unsupported_attention_is_refused(name: str, tmp_path: Path) -> None:
    make, reason = REFUSED[name]
    with pytest.raises(MbcError) as error:
        import_model(exported(tmp_path, make(), torch.randn(*IMAGE)), "net", "mse")
    assert error.value.code == "MBC303" and reason in str(error.value)

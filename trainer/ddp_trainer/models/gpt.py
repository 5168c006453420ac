"""A small GPT of four blocks, each with causal self-attention and a feed-forward layer after a layer norm.

After Radford et al., "Language Models are Unsupervised Multitask Learners" (2019), without dropout.
"""

from torch import Tensor, nn
from torch.nn.functional import gelu, scaled_dot_product_attention

from ddp_sdk.errors import require
from ddp_trainer.models import ModelConfig

_BLOCKS = 4
# Channels of an attention head.
_HEAD = 32


class Block(nn.Module):
    """Causal attention with heads of 32 channels, then a feed-forward layer four times as wide; both are residual."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(width)
        self.norm2 = nn.LayerNorm(width)
        self.attend = nn.Linear(width, 3 * width)
        self.join = nn.Linear(width, width)
        self.widen = nn.Linear(width, 4 * width)
        self.narrow = nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        """Map (B, T, width) to the same."""
        heads = self.attend(self.norm1(x)).unflatten(2, (3, -1, _HEAD)).permute(2, 0, 3, 1, 4)
        attention = scaled_dot_product_attention(heads[0], heads[1], heads[2], is_causal=True)
        x = x + self.join(attention.transpose(1, 2).flatten(2))
        out: Tensor = x + self.narrow(gelu(self.widen(self.norm2(x))))
        return out


class Gpt(nn.Module):
    """Embeddings of token and position, the blocks, a norm and a linear layer."""

    def __init__(self, length: int, tokens: int, width: int) -> None:
        super().__init__()
        self.token = nn.Embedding(tokens, width)
        self.place = nn.Embedding(length, width)
        self.blocks = nn.Sequential(*(Block(width) for _ in range(_BLOCKS)))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, tokens, bias=False)
        for module in self.modules():
            if isinstance(module, nn.Linear | nn.Embedding):
                nn.init.normal_(module.weight, std=0.02)
            if isinstance(module, nn.Linear) and module.bias is not None:
                nn.init.zeros_(module.bias)

    def forward(self, tokens: Tensor) -> Tensor:
        """Map tokens, int64 (B, T), to logits (B, T, tokens) of the one that follows each."""
        x = self.token(tokens) + self.place.weight[: tokens.shape[1]]
        logits: Tensor = self.head(self.norm(self.blocks(x)))
        return logits


def build(config: ModelConfig, in_channels: int, num_classes: int) -> nn.Module:
    """Build a GPT of ``config.width`` channels for windows of ``in_channels`` tokens, of ``num_classes`` kinds."""
    require(
        config.width % _HEAD == 0, "model.width", f"{config.width} is not a multiple of {_HEAD} (gpt)", "give 32 or 128"
    )
    return Gpt(in_channels, num_classes, config.width)

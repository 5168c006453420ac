"""A small GPT: causal self-attention and a feed-forward layer, four times, each after a layer norm.

After Radford et al., "Language Models are Unsupervised Multitask Learners" (2019), without dropout.
"""

from torch import Tensor, nn
from torch.nn.functional import gelu, scaled_dot_product_attention

from ddp_trainer.errors import require
from ddp_trainer.models import ModelConfig

_BLOCKS, _HEAD = 4, 32


class Block(nn.Module):
    """Attention of heads of 32 channels to what came before, then a layer four times as wide; both are added."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attend, self.join = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.widen, self.narrow = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        """Map (B, T, width) to the same."""
        heads = self.attend(self.norm1(x)).unflatten(2, (3, -1, _HEAD)).permute(2, 0, 3, 1, 4)
        seen = scaled_dot_product_attention(heads[0], heads[1], heads[2], is_causal=True)
        x = x + self.join(seen.transpose(1, 2).flatten(2))
        out: Tensor = x + self.narrow(gelu(self.widen(self.norm2(x))))
        return out


class Gpt(nn.Module):
    """Embeddings of token and place, the blocks, a norm and a linear layer."""

    def __init__(self, length: int, tokens: int, width: int) -> None:
        super().__init__()
        self.token, self.place = nn.Embedding(tokens, width), nn.Embedding(length, width)
        self.blocks = nn.Sequential(*(Block(width) for _ in range(_BLOCKS)))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, tokens, bias=False)
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
    """A GPT of ``config.width`` channels for windows of ``in_channels`` tokens, of ``num_classes`` kinds."""
    require(
        config.width % _HEAD == 0, "model.width", f"{config.width} is not a multiple of {_HEAD} (gpt)", "give 32 or 128"
    )
    return Gpt(in_channels, num_classes, config.width)

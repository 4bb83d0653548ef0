"""A decoder-only transformer, line by line.

Token and position embeddings, then blocks of causal attention and a two-layer perceptron, each
behind a layer norm and added to the stream (pre-norm), a last norm, a linear head. Shape comments:
B batch, T positions given, S positions seen (those in the cache, then those given), D width,
H heads, K = D/H width of a head, V vocabulary.

`mathrl.by_hand` computes the same function and its gradient in numpy, without autograd;
`mathrl.responses` samples, scores and enumerates what the network writes.
"""

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mathrl import _checks


@dataclass(frozen=True)
class DecoderConfig:
    """Sizes of a decoder; the defaults are those of the bench.

    Args:
        vocab_size: V.
        context_length: the number of positions that have an embedding.
        width: D, a multiple of `heads`.
        depth: the number of blocks.
        heads: H.
        mlp_ratio: width of the perceptron's hidden layer over D.
        tied: whether the head is the token embedding, transposed.

    Raises:
        ValueError: a size is not positive, or `width` is not a multiple of `heads`.
    """

    vocab_size: int = 14
    context_length: int = 8
    width: int = 48
    depth: int = 2
    heads: int = 4
    mlp_ratio: int = 4
    tied: bool = False

    def __post_init__(self) -> None:
        """Check the sizes."""
        for name in ("vocab_size", "context_length", "width", "depth", "heads", "mlp_ratio"):
            if getattr(self, name) < 1:
                raise ValueError(f"`{name}` must be at least 1, got {getattr(self, name)}")
        if self.width % self.heads:
            raise ValueError(f"`width` must be a multiple of {self.heads=}, got {self.width}")


class Attention(nn.Module):
    """Each position takes a weighted mean of values from the positions that it may see."""

    def __init__(self, config: DecoderConfig) -> None:
        """Make the two projections."""
        super().__init__()
        self.heads = config.heads
        self.qkv = nn.Linear(config.width, 3 * config.width, bias=False)
        self.softmax = nn.Softmax(dim=-1)
        self.out = nn.Linear(config.width, config.width, bias=False)

    def forward(self, x: Tensor, mask: Tensor, past: "Layer | None" = None) -> Tensor:
        """Attend: `x` (B, T, D), `mask` (T, S), True where position t may see position s."""
        B, T, D = x.shape
        qkv = self.qkv(x).view(B, T, 3, self.heads, D // self.heads)  # (B, T, 3, H, K)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)  # 3 times (B, H, T, K)
        if past is not None:
            k, v = past.extend(k, v)  # 2 times (B, H, S, K)
        scores = q @ k.transpose(-2, -1) / math.sqrt(D // self.heads)  # (B, H, T, S)
        weights = self.softmax(scores.masked_fill(~mask, -math.inf))  # (B, H, T, S)
        mixed = (weights @ v).transpose(1, 2).reshape(B, T, D)  # (B, T, D)
        return self.out(mixed)  # (B, T, D)


class Block(nn.Module):
    """Attention moves information between positions, the perceptron works on each alone."""

    def __init__(self, config: DecoderConfig) -> None:
        """Make the two halves, each with its norm."""
        super().__init__()
        hidden = config.mlp_ratio * config.width
        self.attention_norm = nn.LayerNorm(config.width)
        self.attention = Attention(config)
        self.mlp_norm = nn.LayerNorm(config.width)
        self.up = nn.Linear(config.width, hidden)
        self.down = nn.Linear(hidden, config.width)

    def forward(self, x: Tensor, mask: Tensor, past: "Layer | None" = None) -> Tensor:
        """Add both halves to the stream: (B, T, D) to (B, T, D)."""
        x = x + self.attention(self.attention_norm(x), mask, past)  # (B, T, D)
        hidden = F.gelu(self.up(self.mlp_norm(x)))  # (B, T, mlp_ratio * D)
        return x + self.down(hidden)  # (B, T, D)


class Decoder(nn.Module):
    """The network: from token ids to the logits of the token that follows each position.

    >>> model = Decoder(DecoderConfig(), seed=0)
    >>> model(torch.tensor([[12, 3, 10, 4, 11]])).shape
    torch.Size([1, 5, 14])
    >>> sum(p.numel() for p in model.parameters())
    57984
    """

    def __init__(self, config: DecoderConfig, *, seed: int = 0) -> None:
        """Build and initialise.

        Embeddings and head are normal with standard deviation 0.02, so that the first policy is
        close to uniform; other matrices with `0.5/√fan_in`; biases are 0.

        Args:
            config: the sizes.
            seed: of the initial parameters, whatever the state of torch's global generator.
        """
        super().__init__()
        self.config = config
        self.token_embedding = nn.Embedding(config.vocab_size, config.width)
        self.position_embedding = nn.Embedding(config.context_length, config.width)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.depth))
        self.norm = nn.LayerNorm(config.width)
        self.head = nn.Linear(config.width, config.vocab_size, bias=False)
        if config.tied:
            self.head.weight = self.token_embedding.weight
        self._initialise(torch.Generator().manual_seed(seed))

    def forward(
        self,
        tokens: Tensor,
        positions: Tensor | None = None,
        mask: Tensor | None = None,
        cache: "Cache | None" = None,
    ) -> Tensor:
        """Logits of the next token at each position.

        Args:
            tokens: int64, (B, T), each in [0, V).
            positions: int64, (T,), each in [0, context_length): the position whose embedding each
                token gets. By default they go on from the cache, or from 0.
            mask: boolean, (T, S): which positions each token sees. By default all up to itself.
                With both arguments, tokens that are alternatives to each other can stand side by
                side at the same position.
            cache: keys and values of earlier positions; those of `tokens` are added to it.

        Returns:
            Logits, (B, T, V).

        Raises:
            TypeError: an argument has another type.
            ValueError: a shape differs, a token id or a position is out of range, the tokens go
                past the context, or a position sees nothing.
            RuntimeError: there is a cache and gradients are recorded.
        """
        T = _check_ids("tokens", tokens, 2, self.config.vocab_size)
        past = 0 if cache is None else cache.check(tokens)
        if positions is None:
            _check_length(past + T, self.config.context_length)
            positions = torch.arange(past, past + T, device=tokens.device)  # (T,)
        if _check_ids("positions", positions, 1, self.config.context_length) != T:
            raise ValueError(f"`positions` has shape {tuple(positions.shape)}, expected ({T},)")
        if mask is None:
            seen = torch.arange(past + T, device=tokens.device)  # (S,)
            mask = seen <= seen[past:, None]  # (T, S)
        _check_mask(mask, T, past + T)
        x = self.token_embedding(tokens) + self.position_embedding(positions)  # (B, T, D)
        for index, block in enumerate(self.blocks):
            x = block(x, mask, None if cache is None else cache.layer(index))  # (B, T, D)
        if cache is not None:
            cache.length += T
        return self.head(self.norm(x))  # (B, T, V)

    @torch.no_grad()
    def _initialise(self, generator: torch.Generator) -> None:
        for name, parameter in self.named_parameters():
            if "norm" in name or parameter.dim() == 1:
                parameter.fill_(1.0 if name.endswith("norm.weight") else 0.0)
            else:
                outer = "embedding" in name or "head" in name
                std = 0.02 if outer else 0.5 / math.sqrt(parameter.shape[1])
                parameter.normal_(0.0, std, generator=generator)


class Cache:
    """Keys and values of the positions that a decoder has seen.

    Given it, a decoder computes only new positions, and the result is the same. Only for use
    under `torch.no_grad()`: keys and values are written in place.
    """

    def __init__(self, model: Decoder, batch: int) -> None:
        """Make room for `context_length` positions of `batch` sequences."""
        config, like = model.config, model.head.weight
        shape = (2, batch, config.heads, config.context_length, config.width // config.heads)
        self.length, self.room = 0, config.context_length
        self.memory = [like.new_empty(shape) for _ in range(config.depth)]  # (2, B, H, C, K) each

    def layer(self, index: int) -> "Layer":
        """What the block of this index reads and extends."""
        return Layer(self.memory[index], self.length)

    def check(self, tokens: Tensor) -> int:
        """Refuse tokens, (B, T), that do not fit; return the number of positions seen."""
        if torch.is_grad_enabled():
            raise RuntimeError("a `cache` is written in place: use it under torch.no_grad()")
        if tokens.shape[0] != self.memory[0].shape[1]:
            raise ValueError(
                f"`tokens` has {tokens.shape[0]} sequences, the cache {self.memory[0].shape[1]}"
            )
        _check_length(self.length + tokens.shape[1], self.room)
        return self.length

    def repeat(self, times: int) -> None:
        """Give every sequence `times` copies that stand next to each other."""
        self.memory = [memory.repeat_interleave(times, 1) for memory in self.memory]


class Layer:
    """The part of a cache that belongs to one block."""

    def __init__(self, memory: Tensor, length: int) -> None:
        """Keep the memory, (2, B, H, C, K), of which `length` positions are filled."""
        self.memory, self.length = memory, length

    def extend(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Write new keys and values, (B, H, T, K), and return all, (B, H, S, K)."""
        total = self.length + k.shape[2]
        self.memory[0, :, :, self.length : total] = k
        self.memory[1, :, :, self.length : total] = v
        return self.memory[0, :, :, :total], self.memory[1, :, :, :total]


def attention_maps(
    model: Decoder, tokens: Tensor, positions: Tensor | None = None, mask: Tensor | None = None
) -> Tensor:
    """Attention weights of every block and head; each row sums to 1.

    Args:
        model: the decoder.
        tokens: int64, (B, T).
        positions: as in `Decoder.forward`.
        mask: as in `Decoder.forward`.

    Returns:
        Weights, (depth, B, H, T, T).

    >>> attention_maps(Decoder(DecoderConfig()), torch.tensor([[12, 3, 10]])).shape
    torch.Size([2, 1, 4, 3, 3])
    """
    maps: list[Tensor] = []
    hooks = [
        module.register_forward_hook(lambda _module, _inputs, weights: maps.append(weights))
        for module in model.modules()
        if isinstance(module, nn.Softmax)
    ]
    try:
        with torch.no_grad():
            model(tokens, positions, mask)
    finally:
        for hook in hooks:
            hook.remove()
    return torch.stack(maps)


def _check_ids(name: str, ids: Tensor, dimensions: int, size: int) -> int:
    """Check ids of any kind; return the length of the last dimension."""
    _checks.tensor(**{name: ids})
    if ids.dtype != torch.int64:
        raise TypeError(f"`{name}` must be int64, got {ids.dtype}")
    if ids.dim() != dimensions or ids.numel() == 0:
        shape = "(B, T)" if dimensions == 2 else "(T,)"
        raise ValueError(f"`{name}` must have shape {shape}, got {tuple(ids.shape)}")
    _checks.reject((ids < 0) | (ids >= size), ids, f"`{name}` must lie in [0, {size})")
    return ids.shape[-1]


def _check_length(length: int, context_length: int) -> None:
    if length > context_length:
        raise ValueError(f"`tokens` make {length} positions, expected at most {context_length=}")


def _check_mask(mask: Tensor, given: int, seen: int) -> None:
    _checks.tensor(mask=mask)
    if mask.dtype != torch.bool:
        raise TypeError(f"`mask` must be boolean, got {mask.dtype}")
    if mask.shape != (given, seen):
        raise ValueError(f"`mask` has shape {tuple(mask.shape)}, expected {(given, seen)}")
    _checks.reject(~mask.any(-1), mask.sum(-1), "`mask` must let each position see something")

"""A GPT that reads the clues of a Zebra puzzle and writes its solution, action by action.

The prefix is the set of clues, one token each, and a start token. All of the prefix sees all of it,
and a clue has no position, so the order of the clues cannot matter. The actions follow: each has a
position, and sees the prefix and the actions up to itself. The blocks are those of
`mathrl.decoder`.

The prefix does not depend on the actions. It is computed once for each puzzle, however many
responses there are to it, when sampling and when training alike. Shape comments: R puzzles, G
responses to each, K clues, P = K + 1 positions of the prefix, T actions, D width, V vocabulary.
"""

import math
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mathrl import _checks, policy
from mathrl.decoder import Block, DecoderConfig, Layer
from mathrl.responses import Samples, draw, response_mask
from mathrl.zebra.clues import KINDS, Size
from mathrl.zebra.tokens import EOS, Codec

FIELDS = 4
"""Numbers of a clue: its kind and three arguments."""


@dataclass(frozen=True)
class PuzzlerConfig:
    """Sizes of a puzzler.

    Args:
        houses: of the puzzles.
        attributes: of the puzzles.
        max_clues: K.
        width: D, a multiple of `heads`.
        depth: the number of blocks.
        heads: of the attention.

    Raises:
        ValueError: a size is out of range, or `width` is not a multiple of `heads`.

    >>> PuzzlerConfig(houses=3, attributes=3, max_clues=14).codec.vocabulary
    28
    """

    houses: int
    attributes: int
    max_clues: int
    width: int = 64
    depth: int = 4
    heads: int = 4

    def __post_init__(self) -> None:
        """Check the sizes."""
        self.codec  # noqa: B018 - refuses puzzles that cannot be
        self.blocks()

    @property
    def codec(self) -> Codec:
        """What turns puzzles and solutions into tokens."""
        return Codec(Size(self.houses, self.attributes), self.max_clues)

    def blocks(self) -> DecoderConfig:
        """The sizes as the blocks of `mathrl.decoder` take them."""
        codec = self.codec
        return DecoderConfig(
            vocab_size=codec.vocabulary,
            context_length=codec.max_clues + 1 + codec.cells,
            width=self.width,
            depth=self.depth,
            heads=self.heads,
        )


class Puzzler(nn.Module):
    """The network: from clues and actions to the logits of each action and of the next.

    >>> model = Puzzler(PuzzlerConfig(houses=2, attributes=2, max_clues=5))
    >>> clues = torch.tensor([[[1, 3, 6, 0], [0, 0, 0, 0]]])
    >>> model(clues, torch.tensor([[[6, 7, 1]]])).shape
    torch.Size([1, 1, 4, 9])
    """

    def __init__(self, config: PuzzlerConfig, *, seed: int = 0) -> None:
        """Build and initialise.

        Embeddings and head are normal with standard deviation 0.02, other matrices with
        `0.5/√fan_in`, biases are 0.

        Args:
            config: the sizes.
            seed: of the initial parameters, whatever the state of torch's global generator.
        """
        super().__init__()
        self.config = config
        codec, blocks = config.codec, config.blocks()
        self.arguments = codec.arguments
        self.kind_embedding = nn.Embedding(1 + len(KINDS), config.width)
        # One table for three roles: the argument a in role i is row i * arguments + a.
        self.argument_embedding = nn.Embedding((FIELDS - 1) * codec.arguments, config.width)
        self.start_embedding = nn.Embedding(1, config.width)
        self.action_embedding = nn.Embedding(codec.vocabulary, config.width)
        self.position_embedding = nn.Embedding(codec.cells, config.width)
        self.blocks = nn.ModuleList(Block(blocks) for _ in range(config.depth))
        self.norm = nn.LayerNorm(config.width)
        self.head = nn.Linear(config.width, codec.vocabulary, bias=False)
        self._initialise(torch.Generator().manual_seed(seed))

    def forward(self, clues: Tensor, actions: Tensor) -> Tensor:
        """Logits of the first action, and of the one after each that is given.

        Args:
            clues: int64, (R, K, 4), as `Codec.clues` makes them; K may be any number.
            actions: int64, (R, G, T), each in [0, V), T from 0 to the number of cells.

        Returns:
            Logits, (R, G, T + 1, V), float32 or float64.

        Raises:
            TypeError: an argument is not an int64 tensor.
            ValueError: a shape does not match, or a token is out of range.
        """
        self._check(clues, actions)
        R, G, T = actions.shape
        with self._autocast():
            read = self._read(clues)
            first = read.start[:, None, None].expand(R, G, 1, -1)  # (R, G, 1, D)
            if not T:
                return self._logits(first)
            x = self._embed(actions.flatten(0, 1), 0)  # (RG, T, D)
            seen = read.seen.repeat_interleave(G, 0)[:, None].expand(-1, T, -1)  # (RG, T, P)
            causal = torch.ones(T, T, dtype=torch.bool, device=x.device).tril()  # (T, T)
            mask = torch.cat([seen, causal.expand(R * G, T, T)], -1)[:, None]  # (RG, 1, T, P + T)
            for block, layer in zip(self.blocks, read.layers, strict=True):
                x = block(x, mask, layer.repeated(G))
            return self._logits(torch.cat([first, x.view(R, G, T, -1)], 2))

    def start(self, clues: Tensor, times: int) -> tuple[Tensor, "Cache"]:
        """Logits of the first action of `times` responses to each puzzle, and a cache for them.

        Args:
            clues: int64, (R, K, 4).
            times: G.

        Returns:
            Logits, (RG, V), and what `step` needs.
        """
        self._check(clues, clues.new_zeros(len(clues), 1, 0))
        with self._autocast():
            read = self._read(clues)
            room = self.position_embedding.num_embeddings
            memory = [layer.memory(times, room) for layer in read.layers]
            logits = self._logits(read.start).repeat_interleave(times, 0)
            return logits, Cache(memory, read.seen.repeat_interleave(times, 0))

    def step(self, actions: Tensor, cache: "Cache") -> Tensor:
        """Logits of the action after these, (B,): (B, V). The cache grows by one position."""
        with self._autocast():
            x = self._embed(actions[:, None], cache.actions)  # (B, 1, D)
            cache.actions += 1
            mask = F.pad(cache.seen, (0, cache.actions), value=True)[:, None, None]  # (B, 1, 1, S)
            for block, memory in zip(self.blocks, cache.memory, strict=True):
                x = block(x, mask, Layer(memory, mask.shape[-1] - 1))
            return self._logits(x[:, 0])

    def _read(self, clues: Tensor) -> "_Read":
        R = len(clues)
        offsets = self.arguments * torch.arange(FIELDS - 1, device=clues.device)
        x = self.kind_embedding(clues[..., 0])  # (R, K, D)
        x = x + self.argument_embedding(clues[..., 1:] + offsets).sum(-2)
        x = torch.cat([x, self.start_embedding.weight.expand(R, 1, -1)], 1)  # (R, P, D)
        seen = F.pad(clues[..., 0] > 0, (0, 1), value=True)  # (R, P)
        layers = [Prefix() for _ in self.blocks]
        for block, layer in zip(self.blocks, layers, strict=True):
            x = block(x, seen[:, None, None], layer)
        return _Read(x[:, -1], layers, seen)

    def _embed(self, actions: Tensor, start: int) -> Tensor:
        positions = self.position_embedding.weight[start : start + actions.shape[1]]
        return self.action_embedding(actions) + positions

    def _logits(self, x: Tensor) -> Tensor:
        logits: Tensor = self.head(self.norm(x))
        return logits.float() if logits.dtype == torch.bfloat16 else logits

    def _autocast(self) -> torch.autocast:
        """On a GPU, matrix products in bfloat16; elsewhere nothing changes."""
        device = self.head.weight.device.type
        return torch.autocast(device, torch.bfloat16, enabled=device == "cuda")

    def _check(self, clues: Tensor, actions: Tensor) -> None:
        _checks.tensor(clues=clues, actions=actions)
        for name, tensor in (("clues", clues), ("actions", actions)):
            if tensor.dtype != torch.int64:
                raise TypeError(f"`{name}` must be int64, got {tensor.dtype}")
        if clues.dim() != 3 or clues.shape[-1] != FIELDS or not clues.shape[0]:
            raise ValueError(f"`clues` must have shape (R, K, 4), got {tuple(clues.shape)}")
        R, cells = len(clues), self.position_embedding.num_embeddings
        if actions.dim() != 3 or actions.shape[0] != R or actions.shape[2] > cells:
            raise ValueError(
                f"`actions` must have shape ({R}, G, T), T at most {cells}, "
                f"got {tuple(actions.shape)}"
            )
        limits = [self.kind_embedding.num_embeddings] + (FIELDS - 1) * [self.arguments]
        bound = torch.tensor(limits, device=clues.device)
        _checks.reject((clues < 0) | (clues >= bound), clues, f"`clues` must lie below {limits}")
        size = self.head.out_features
        _checks.reject(
            (actions < 0) | (actions >= size), actions, f"`actions` must lie in [0, {size})"
        )

    @torch.no_grad()
    def _initialise(self, generator: torch.Generator) -> None:
        for name, parameter in self.named_parameters():
            if "norm" in name or parameter.dim() == 1:
                parameter.fill_(1.0 if name.endswith("norm.weight") else 0.0)
            else:
                outer = "embedding" in name or "head" in name
                std = 0.02 if outer else 0.5 / math.sqrt(parameter.shape[1])
                parameter.normal_(0.0, std, generator=generator)


class Prefix:
    """Keys and values of a prefix in one block, with their gradients."""

    def __init__(self, keys: Tensor | None = None, values: Tensor | None = None) -> None:
        """Keep what is there, (R, H, P, D/H) each; a new prefix is filled by `extend`."""
        self.keys, self.values = keys, values

    def extend(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values of the prefix and of what follows; the first call makes the prefix."""
        if self.keys is None or self.values is None:
            self.keys, self.values = k, v
            return k, v
        return torch.cat([self.keys, k], 2), torch.cat([self.values, v], 2)

    def repeated(self, times: int) -> "Prefix":
        """The same prefix for each of `times` responses that stand next to each other."""
        assert self.keys is not None
        assert self.values is not None
        if times == 1:
            return Prefix(self.keys, self.values)
        return Prefix(
            self.keys.repeat_interleave(times, 0), self.values.repeat_interleave(times, 0)
        )

    def memory(self, times: int, room: int) -> Tensor:
        """Room for each of `times` responses: (2, RG, H, P + room, D/H), the prefix in place."""
        assert self.keys is not None
        assert self.values is not None
        R, H, P, width = self.keys.shape
        memory = self.keys.new_empty(2, R, times, H, P + room, width)
        memory[0, ..., :P, :] = self.keys[:, None]
        memory[1, ..., :P, :] = self.values[:, None]
        return memory.flatten(1, 2)


class Cache:
    """Keys and values of the prefix and of the actions so far, for use without gradients."""

    def __init__(self, memory: list[Tensor], seen: Tensor) -> None:
        """Keep the memory of each block and which positions of the prefix count, (B, P)."""
        self.memory, self.seen = memory, seen
        self.actions = 0


class _Read(NamedTuple):
    """What the start token came to, (R, D); keys and values; False where a clue is padding."""

    start: Tensor
    layers: list[Prefix]
    seen: Tensor


@torch.no_grad()
def sample(
    model: Puzzler, clues: Tensor, uniforms: Tensor | None = None, temperature: float = 1.0
) -> Samples:
    """Write responses with a cache, action by action, until `EOS` or the length of a solution.

    Nothing is forbidden: a response may repeat a cell, or stop early, and has to learn not to.

    Args:
        model: the policy.
        clues: int64, (R, K, 4).
        uniforms: float64, (R, G, cells + 1), each in [0, 1): what each draw is made of, see
            `responses.draw`. None takes the likeliest action each time, with G = 1.
        temperature: divides the logits.

    Returns:
        `tokens` (R, G, cells + 1), with `EOS` after the end; `mask`, True up to and with the first
        `EOS`; `log_probs` of the tokens at this temperature, 0 after the end.

    Raises:
        TypeError: as `Puzzler.forward` and `responses.draw`.
        ValueError: as `Puzzler.forward` and `responses.draw`; the shapes do not match, or the
            temperature is not positive.

    >>> model = Puzzler(PuzzlerConfig(houses=2, attributes=2, max_clues=5))
    >>> sample(model, torch.tensor([[[1, 3, 6, 0]]])).tokens.shape
    torch.Size([1, 1, 5])
    """
    R, length = len(clues), model.position_embedding.num_embeddings + 1
    G = 1 if uniforms is None else uniforms.shape[1]
    if uniforms is not None and uniforms.shape != (R, G, length):
        shape = tuple(uniforms.shape)
        raise ValueError(f"`uniforms` must have shape ({R}, G, {length}), got {shape}")
    logits, cache = model.start(clues, G)  # (RG, V)
    tokens = torch.full((R * G, length), EOS, device=clues.device)
    log_probs = logits.new_zeros(R * G, length)
    running = torch.ones(R * G, dtype=torch.bool, device=clues.device)
    for position in range(length):
        if position:
            logits = model.step(tokens[:, position - 1], cache)
        full = torch.log_softmax(logits / temperature, -1)  # (RG, V)
        if uniforms is None:
            action = full.argmax(-1)
        else:
            action = draw(full, uniforms[:, :, position].reshape(-1, 1))[:, 0]  # (RG,)
        tokens[:, position] = action.masked_fill(~running, EOS)
        log_probs[:, position] = full.gather(-1, action[:, None])[:, 0].masked_fill(~running, 0.0)
        running = running & (action != EOS)
    tokens = tokens.view(R, G, length)
    return Samples(tokens, response_mask(tokens, EOS), log_probs.view(R, G, length))


def log_probs(model: Puzzler, clues: Tensor, tokens: Tensor, temperature: float = 1.0) -> Tensor:
    """Log-probability of each action of given responses, in one pass, with gradients.

    Args:
        model: the policy.
        clues: int64, (R, K, 4).
        tokens: int64, (R, G, cells + 1), as `sample` writes them.
        temperature: of the policy that wrote them.

    Returns:
        Nats, (R, G, cells + 1); after a first `EOS` they mean nothing, see
        `responses.response_mask`.
    """
    return policy.log_probs(model(clues, tokens[..., :-1]), tokens, temperature)

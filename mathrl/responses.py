"""From a network to its responses: all of them, a few of them, or given ones, with log-probs.

Three ways to the same numbers. `enumerate_all` evaluates every response of a grammar in one pass
over a prefix tree; `sample` draws responses token by token; `score` reads given ones. All
log-probabilities are of the distribution that a token is sampled from: the softmax of
`logits / temperature` over the tokens that the grammar allows at that step, in nats. A token that
is the only one allowed has log-probability exactly 0, and costs no evaluation.

Axes: B prompts of L tokens, G samples of each, N responses of the grammar, T steps, V vocabulary.
A response that ends before step T is padded with the grammar's `end`. `mask` is True up to and
with the token that ends; log-probabilities of padding are 0.

`model` is a `Decoder`, or anything that maps `(tokens, positions, mask)` to logits as it does and
has its `config`; a cache needs a `Decoder`.
"""

import functools
import math
from typing import NamedTuple

import torch
from torch import Tensor

from mathrl import _checks, policy
from mathrl.decoder import Cache, Decoder
from mathrl.grammar import Grammar


class Enumeration(NamedTuple):
    """Every response of a grammar and how likely each is after each prompt.

    `tokens` int64 and `mask` boolean, (N, T), in the order of `Grammar.responses`; `log_probs`
    (B, N, T), of each token given those before it, with gradients.
    """

    tokens: Tensor
    mask: Tensor
    log_probs: Tensor

    @property
    def joint(self) -> Tensor:
        """Log-probabilities of whole responses, (B, N): a distribution over N actions."""
        return self.log_probs.sum(-1)


class Samples(NamedTuple):
    """Sampled responses: `tokens` int64, `mask` boolean, `log_probs`, each (B, G, T)."""

    tokens: Tensor
    mask: Tensor
    log_probs: Tensor


def enumerate_all(
    model: Decoder, prompts: Tensor, grammar: Grammar, temperature: float = 1.0
) -> Enumeration:
    """Log-probabilities of all responses to all prompts, in one forward pass.

    Every prefix after which there is a choice is one more position of the pass. It gets the
    position embedding that it would have in its own sequence, and sees only the prompt and its
    own prefixes: the output there is what a pass over its own sequence gives.

    Args:
        model: the network.
        prompts: int64, (B, L).
        grammar: at most `MOST_RESPONSES` responses.
        temperature: positive.

    Returns:
        An `Enumeration`, whose log-probabilities carry gradients.

    Raises:
        TypeError: `prompts` is not int64.
        ValueError: a token id is out of range, a prefix goes past the context, a logit is not
            finite, the temperature is not positive, or the grammar is too large.

    >>> from mathrl.decoder import DecoderConfig
    >>> from mathrl.grammar import ARITHMETIC
    >>> model, prompts = Decoder(DecoderConfig()), torch.tensor([[12, 3, 10, 4, 11]])
    >>> enumerate_all(model, prompts, ARITHMETIC).joint.exp().sum().round(decimals=4).item()
    1.0
    """
    _check_prompts(prompts)
    tree = _tree(grammar, prompts.shape[1], model.config.vocab_size, prompts.device)
    tokens = torch.cat([prompts, tree.nodes.expand(len(prompts), -1)], 1)  # (B, L + M)
    logits = model(tokens, tree.positions, tree.sees)[:, prompts.shape[1] - 1 :]  # (B, 1 + M, V)
    log_probs = _restrict(logits, tree.allowed, temperature)  # (B, 1 + M, V)
    # One entry more, of value 0, is where tokens without a choice point to.
    flat = torch.nn.functional.pad(log_probs.flatten(1), (0, 1))  # (B, (1 + M) V + 1)
    chosen = flat.index_select(1, tree.entries)  # (B, N T)
    return Enumeration(tree.tokens, tree.mask, chosen.view(-1, *tree.tokens.shape))


@torch.no_grad()
def sample(
    model: Decoder,
    prompts: Tensor,
    grammar: Grammar,
    uniforms: Tensor,
    temperature: float = 1.0,
    *,
    cached: bool = True,
) -> Samples:
    """Draw responses token by token.

    Args:
        model: the network.
        prompts: int64, (B, L).
        grammar: the tokens allowed at each step.
        uniforms: float64, (B, G, T), each in [0, 1): the randomness of each token. The result is
            a function of the arguments and of nothing else.
        temperature: positive; 1 samples from the policy itself.
        cached: keep keys and values, rather than compute the whole sequence for every token.

    Returns:
        `Samples`.

    Raises:
        TypeError: `prompts` is not int64, or `uniforms` is not float64.
        ValueError: as `enumerate_all` and `draw`, or `uniforms` has another shape.

    >>> from mathrl.decoder import DecoderConfig
    >>> from mathrl.grammar import ARITHMETIC
    >>> model, prompts = Decoder(DecoderConfig()), torch.tensor([[12, 3, 10, 4, 11]])
    >>> uniforms = torch.tensor([[[0.22, 0.77, 0.5]]], dtype=torch.float64)
    >>> sample(model, prompts, ARITHMETIC, uniforms).tokens
    tensor([[[ 2,  7, 13]]])
    """
    _check_prompts(prompts)
    B, G, T = len(prompts), uniforms.shape[1] if uniforms.dim() == 3 else 0, grammar.length
    if uniforms.shape != (B, G, T) or G == 0:
        raise ValueError(f"`uniforms` has shape {tuple(uniforms.shape)}, expected ({B}, G, {T})")
    allowed = _allowed(grammar, model.config.vocab_size, prompts.device)  # (T, V)
    rows = prompts.repeat_interleave(G, 0)  # (B G, L)
    tokens = rows.new_full((B * G, T), grammar.end or 0)
    chosen = torch.zeros(B * G, T, dtype=torch.float64, device=prompts.device)
    cache = Cache(model, B) if cached else None
    logits = model(prompts, cache=cache) if cache else model(prompts)  # (B, L, V)
    logits = logits[:, -1].repeat_interleave(G, 0)  # (B G, V)
    if cache:
        cache.repeat(G)
    for t, step in enumerate(grammar.steps):
        if len(step) == 1:
            tokens[:, t] = step[0]
            continue
        if t > 0:
            sequence = torch.cat([rows, tokens[:, :t]], 1)  # (B G, L + t)
            unread = sequence[:, cache.length :] if cache else sequence
            logits = (model(unread, cache=cache) if cache else model(unread))[:, -1]  # (B G, V)
        log_probs = _restrict(logits, allowed[t], temperature)  # (B G, V)
        picked = draw(log_probs, uniforms[:, :, t].reshape(-1, 1))  # (B G, 1)
        tokens[:, t] = picked.squeeze(1)
        chosen[:, t] = log_probs.gather(1, picked).squeeze(1)
    mask = response_mask(tokens, grammar.end)
    tokens.masked_fill_(~mask, grammar.end or 0)
    chosen = chosen.masked_fill(~mask, 0.0).to(_precision(logits))
    return Samples(*(x.view(B, G, T) for x in (tokens, mask, chosen)))


def score(
    model: Decoder,
    prompts: Tensor,
    responses: Tensor,
    grammar: Grammar,
    temperature: float = 1.0,
) -> Tensor:
    """Log-probability of each token of given responses, from one pass over whole sequences.

    Args:
        model: the network.
        prompts: int64, (B, L), one for each response.
        responses: int64, (B, T) with T the length of the grammar. What follows the first `end` is
            padding: it may be any token.
        grammar: the tokens allowed at each step.
        temperature: positive, the one that sampled the responses.

    Returns:
        Shape (B, T), with gradients; 0 at padding and where there was no choice.

    Raises:
        TypeError: `prompts` or `responses` is not int64.
        ValueError: as `enumerate_all`, or a shape differs, or a token is not allowed at its step.

    >>> from mathrl.decoder import DecoderConfig
    >>> from mathrl.grammar import ARITHMETIC
    >>> prompts, responses = torch.tensor([[12, 3, 10, 4, 11]]), torch.tensor([[7, 4, 13]])
    >>> score(Decoder(DecoderConfig()), prompts, responses, ARITHMETIC).shape
    torch.Size([1, 3])
    """
    _check_prompts(prompts)
    _checks.tensor(responses=responses)
    if responses.dtype != torch.int64:
        raise TypeError(f"`responses` must be int64, got {responses.dtype}")
    if responses.shape != (len(prompts), grammar.length):
        expected = (len(prompts), grammar.length)
        raise ValueError(f"`responses` has shape {tuple(responses.shape)}, expected {expected}")
    allowed = _allowed(grammar, model.config.vocab_size, prompts.device)  # (T, V)
    mask = response_mask(responses, grammar.end)  # (B, T)
    legal = allowed.gather(1, responses.T.clamp(0, allowed.shape[1] - 1)).T
    legal = legal & (responses >= 0) & (responses < allowed.shape[1])
    _checks.reject(mask & ~legal, responses, "`responses` must hold tokens allowed at their step")
    read = grammar.last_choice  # the tokens after the last choice are certain
    sequence = torch.cat([prompts, responses[:, :read]], 1)  # (B, L + read)
    logits = model(sequence)[:, prompts.shape[1] - 1 :]  # (B, read + 1, V)
    log_probs = _restrict(logits, allowed[: read + 1], temperature)  # (B, read + 1, V)
    # Padding need not be allowed: it points to a token that is, and gives 0.
    first = allowed.long().argmax(1).expand_as(responses)  # (B, T)
    targets = torch.where(mask, responses, first)[:, : read + 1, None]
    chosen = log_probs.gather(2, targets).squeeze(2)  # (B, read + 1)
    chosen = torch.nn.functional.pad(chosen, (0, grammar.length - read - 1))  # (B, T)
    return chosen.masked_fill(~mask, 0.0)


def draw(log_probs: Tensor, uniforms: Tensor) -> Tensor:
    """Actions by inverting the distribution function: the least `a` with `π_0 + … + π_a > u`.

    Computed in float64, in which a probability of 1e-12 can still be drawn. An action of
    probability 0 never is.

    Args:
        log_probs: log-probabilities of whole distributions, (..., A).
        uniforms: float64, (..., G), each in [0, 1).

    Returns:
        Actions, int64, (..., G).

    Raises:
        TypeError: `uniforms` is not float64.
        ValueError: a shape does not match, a uniform lies outside [0, 1), or probabilities do not
            sum to 1.

    >>> uniforms = torch.tensor([0.2, 0.5, 0.9], dtype=torch.float64)
    >>> draw(torch.tensor([0.5, 0.0, 0.5]).log(), uniforms)
    tensor([0, 2, 2])
    """
    _checks.normalized(log_probs=log_probs)
    _checks.tensor(uniforms=uniforms)
    if uniforms.dtype != torch.float64:
        raise TypeError(f"`uniforms` must be float64, got {uniforms.dtype}")
    if uniforms.dim() != log_probs.dim() or uniforms.shape[:-1] != log_probs.shape[:-1]:
        expected = (*log_probs.shape[:-1], "G")
        raise ValueError(f"`uniforms` has shape {tuple(uniforms.shape)}, expected {expected}")
    _checks.reject(~((uniforms >= 0) & (uniforms < 1)), uniforms, "`uniforms` must lie in [0, 1)")
    cumulative = log_probs.detach().double().exp().cumsum(-1)
    # Relative to their sum, which rounding leaves a little beside 1.
    return torch.searchsorted(cumulative, uniforms * cumulative[..., -1:], right=True)


def response_mask(tokens: Tensor, end: int | None) -> Tensor:
    """True up to and with the first `end` of each response, False after it.

    Args:
        tokens: int64, (..., T).
        end: the token that ends a response; None makes every token count.

    Returns:
        Boolean, (..., T).

    >>> response_mask(torch.tensor([7, 4, 13, 13, 13]), end=13)
    tensor([ True,  True,  True, False, False])
    """
    if end is None:
        return torch.ones_like(tokens, dtype=torch.bool)
    ends = (tokens == end).long()
    return ends.cumsum(-1) - ends == 0


class _Tree(NamedTuple):
    """A grammar as tensors: M nodes after the root, N responses of at most T tokens."""

    nodes: Tensor  # (M,) token of each node
    positions: Tensor  # (L + M,)
    sees: Tensor  # (L + M, L + M)
    allowed: Tensor  # (1 + M, V) at the end of the prompt and at each node
    entries: Tensor  # (N T,) index of each token of each response into (1 + M) V numbers and a 0
    tokens: Tensor  # (N, T)
    mask: Tensor  # (N, T)


@functools.lru_cache(maxsize=64)
def _tree(grammar: Grammar, start: int, vocab_size: int, device: torch.device) -> _Tree:
    """The tree below a prompt of `start` tokens."""
    prefixes, responses = grammar.prefixes(), grammar.responses()
    index = {prefix: node for node, prefix in enumerate(prefixes)}
    size = start - 1 + len(prefixes)  # the root is the last token of the prompt
    sees = torch.ones(size, size, dtype=torch.bool).tril()
    sees[start:, start:] = False
    for prefix in prefixes[1:]:
        ancestors = [start - 1 + index[prefix[: k + 1]] for k in range(len(prefix))]
        sees[start - 1 + index[prefix], ancestors] = True
    entries = [
        index[tuple(response[:t])] * vocab_size + response[t]
        if t < len(response) and len(grammar.steps[t]) > 1
        else len(prefixes) * vocab_size
        for response in responses
        for t in range(grammar.length)
    ]
    tokens = torch.tensor([r + [grammar.end] * (grammar.length - len(r)) for r in responses])
    depths = torch.tensor([len(prefix) for prefix in prefixes])
    tree = _Tree(
        nodes=torch.tensor([prefix[-1] for prefix in prefixes[1:]], dtype=torch.int64),
        positions=torch.cat([torch.arange(start - 1), start - 1 + depths]),
        sees=sees,
        allowed=_allowed(grammar, vocab_size, torch.device("cpu"))[depths],
        entries=torch.tensor(entries),
        tokens=tokens,
        mask=response_mask(tokens, grammar.end),
    )
    return _Tree(*(tensor.to(device) for tensor in tree))


@functools.lru_cache(maxsize=64)
def _allowed(grammar: Grammar, vocab_size: int, device: torch.device) -> Tensor:
    allowed = torch.zeros(grammar.length, vocab_size, dtype=torch.bool)
    for t, step in enumerate(grammar.steps):
        if max(step) >= vocab_size:
            raise ValueError(f"`grammar` allows token {max(step)}, the vocabulary is {vocab_size}")
        allowed[t, list(step)] = True
    return allowed.to(device)  # (T, V)


def _restrict(logits: Tensor, allowed: Tensor, temperature: float) -> Tensor:
    if not 0 < temperature < math.inf:
        raise ValueError(f"`temperature` must be positive and finite, got {temperature}")
    return policy.restricted_log_softmax(logits / temperature, allowed.expand(logits.shape))


def _precision(logits: Tensor) -> torch.dtype:
    return torch.float64 if logits.dtype == torch.float64 else torch.float32


def _check_prompts(prompts: Tensor) -> None:
    _checks.tensor(prompts=prompts)
    if prompts.dtype != torch.int64:
        raise TypeError(f"`prompts` must be int64, got {prompts.dtype}")
    if prompts.dim() != 2 or prompts.numel() == 0:
        raise ValueError(f"`prompts` must have shape (B, L), got {tuple(prompts.shape)}")

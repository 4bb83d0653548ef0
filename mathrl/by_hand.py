"""The decoder once more, in numpy: forward and backward by hand, without autograd.

It reads the parameters of `mathrl.decoder.Decoder` under the same names and shares no code with
it. Each operation comes as a pair: the function, and its pull-back, which turns the gradient of a
number in the output into the gradients in the input and in the parameters. The gradient of `out`
is written `d_out`, and has the shape of `out`.

The rules that are used, with `Σ` over whatever was broadcast or shared:

- `y = x Wᵀ + b` gives `d_x = d_y W`, `d_W = Σ d_yᵀ x`, `d_b = Σ d_y`.
- `w = softmax(s)` gives `d_s = w (d_w - Σ w d_w)`.
- `y = g n + b` with `n = (x - mean)/std` gives, for `d_n = d_y g`,
  `d_x = (d_n - mean(d_n) - n mean(d_n n))/std`.
- `y = x Φ(x)`, the GELU, gives `d_x = d_y (Φ(x) + x φ(x))`, φ the normal density.
- `z = x + f(x)`, a residual connection, gives `d_x = d_z +` what comes back through `f`.

Shapes: B batch, T positions, D width, H heads, K = D/H, V vocabulary.
"""

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]
Ids = NDArray[np.int64]
Parameters = Mapping[str, Array]

EPS = 1e-5
"""Added to the variance in a layer norm, as in torch."""

_erf = np.frompyfunc(math.erf, 1, 1)


def forward(
    parameters: Parameters,
    tokens: Ids,
    heads: int,
    positions: Ids | None = None,
    mask: NDArray[np.bool_] | None = None,
) -> tuple[Array, dict[str, Any]]:
    """Logits, and what the backward pass needs of what was computed.

    Args:
        parameters: numpy arrays under the names of `Decoder.state_dict()`.
        tokens: (B, T), each in [0, V).
        heads: H.
        positions: (T,), by default 0 … T-1.
        mask: (T, T), True where a row's position sees a column's, by default all up to itself.

    Returns:
        Logits, (B, T, V), and the saved values.

    >>> from mathrl.decoder import Decoder, DecoderConfig
    >>> state = Decoder(DecoderConfig()).state_dict()
    >>> parameters = {name: tensor.double().numpy() for name, tensor in state.items()}
    >>> logits, saved = forward(parameters, np.array([[12, 3, 10, 4, 11]]), heads=4)
    >>> logits.shape
    (1, 5, 14)
    """
    T = tokens.shape[1]
    positions = np.arange(T) if positions is None else positions
    mask = np.tril(np.ones((T, T), dtype=bool)) if mask is None else mask
    saved: dict[str, Any] = {"tokens": tokens, "positions": positions, "heads": heads}
    x = parameters["token_embedding.weight"][tokens]  # (B, T, D)
    x = x + parameters["position_embedding.weight"][positions]  # (B, T, D)
    for block in range(_depth(parameters)):
        at = f"blocks.{block}"
        normed = _norm(parameters, f"{at}.attention_norm", x, saved)  # (B, T, D)
        x = x + _attention(parameters, f"{at}.attention", normed, mask, saved)  # (B, T, D)
        normed = _norm(parameters, f"{at}.mlp_norm", x, saved)  # (B, T, D)
        hidden = _linear(parameters, f"{at}.up", normed, saved)  # (B, T, mlp_ratio * D)
        active = _gelu(f"{at}.gelu", hidden, saved)  # (B, T, mlp_ratio * D)
        x = x + _linear(parameters, f"{at}.down", active, saved)  # (B, T, D)
    x = _norm(parameters, "norm", x, saved)  # (B, T, D)
    return _linear(parameters, "head", x, saved), saved  # (B, T, V)


def backward(parameters: Parameters, saved: dict[str, Any], d_logits: Array) -> dict[str, Array]:
    """Gradient in every parameter, of a number whose gradient in the logits is given.

    Args:
        parameters: those of the forward pass.
        saved: what `forward` returned.
        d_logits: (B, T, V).

    Returns:
        Arrays under the names of `parameters`. A tied head has its own gradient and the token
        embedding has another; the gradient of the shared matrix is their sum.

    >>> from mathrl.decoder import Decoder, DecoderConfig
    >>> state = Decoder(DecoderConfig()).state_dict()
    >>> parameters = {name: tensor.double().numpy() for name, tensor in state.items()}
    >>> logits, saved = forward(parameters, np.array([[12, 3, 10, 4, 11]]), heads=4)
    >>> gradients = backward(parameters, saved, np.ones_like(logits))
    >>> gradients["head.weight"].shape
    (14, 48)
    """
    grads: dict[str, Array] = {}
    d_x = _linear_back(parameters, "head", saved, d_logits, grads)  # (B, T, D)
    d_x = _norm_back(parameters, "norm", saved, d_x, grads)  # (B, T, D)
    for block in reversed(range(_depth(parameters))):
        at = f"blocks.{block}"
        d_active = _linear_back(parameters, f"{at}.down", saved, d_x, grads)
        d_hidden = _gelu_back(f"{at}.gelu", saved, d_active)
        d_normed = _linear_back(parameters, f"{at}.up", saved, d_hidden, grads)
        d_x = d_x + _norm_back(parameters, f"{at}.mlp_norm", saved, d_normed, grads)
        d_normed = _attention_back(parameters, f"{at}.attention", saved, d_x, grads)
        d_x = d_x + _norm_back(parameters, f"{at}.attention_norm", saved, d_normed, grads)
    # A row of an embedding was used by every position that holds its id: their gradients add up.
    for name, ids in (("token", saved["tokens"]), ("position", saved["positions"])):
        weight = f"{name}_embedding.weight"
        grads[weight] = np.zeros_like(parameters[weight])
        np.add.at(grads[weight], ids, d_x if name == "token" else d_x.sum(0))
    return grads


def _linear(parameters: Parameters, name: str, x: Array, saved: dict[str, Any]) -> Array:
    saved[name] = x
    return x @ parameters[f"{name}.weight"].T + parameters.get(f"{name}.bias", 0.0)


def _linear_back(
    parameters: Parameters, name: str, saved: dict[str, Any], d_y: Array, grads: dict[str, Array]
) -> Array:
    grads[f"{name}.weight"] = np.einsum("bti,btj->ij", d_y, saved[name])
    if f"{name}.bias" in parameters:
        grads[f"{name}.bias"] = d_y.sum((0, 1))
    return d_y @ parameters[f"{name}.weight"]


def _norm(parameters: Parameters, name: str, x: Array, saved: dict[str, Any]) -> Array:
    std = np.sqrt(x.var(-1, keepdims=True) + EPS)  # (B, T, 1)
    n = (x - x.mean(-1, keepdims=True)) / std  # (B, T, D)
    saved[name] = n, std
    return n * parameters[f"{name}.weight"] + parameters[f"{name}.bias"]


def _norm_back(
    parameters: Parameters, name: str, saved: dict[str, Any], d_y: Array, grads: dict[str, Array]
) -> Array:
    n, std = saved[name]
    grads[f"{name}.weight"] = (d_y * n).sum((0, 1))
    grads[f"{name}.bias"] = d_y.sum((0, 1))
    d_n = d_y * parameters[f"{name}.weight"]
    return (d_n - d_n.mean(-1, keepdims=True) - n * (d_n * n).mean(-1, keepdims=True)) / std


def _attention(
    parameters: Parameters, name: str, x: Array, mask: NDArray[np.bool_], saved: dict[str, Any]
) -> Array:
    B, T, D = x.shape
    H = saved["heads"]
    qkv = _linear(parameters, f"{name}.qkv", x, saved).reshape(B, T, 3, H, D // H)
    q, k, v = qkv.transpose(2, 0, 3, 1, 4)  # 3 times (B, H, T, K)
    scores = q @ k.swapaxes(2, 3) / math.sqrt(D // H)  # (B, H, T, T)
    scores = np.where(mask, scores, -np.inf)
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    weights /= weights.sum(-1, keepdims=True)  # (B, H, T, T)
    saved[name] = q, k, v, weights
    mixed = (weights @ v).transpose(0, 2, 1, 3).reshape(B, T, D)
    return _linear(parameters, f"{name}.out", mixed, saved)  # (B, T, D)


def _attention_back(
    parameters: Parameters, name: str, saved: dict[str, Any], d_out: Array, grads: dict[str, Array]
) -> Array:
    B, T, D = d_out.shape
    q, k, v, weights = saved[name]
    d_mixed = _linear_back(parameters, f"{name}.out", saved, d_out, grads)  # (B, T, D)
    d_heads = d_mixed.reshape(B, T, *q.shape[1::2]).transpose(0, 2, 1, 3)  # (B, H, T, K)
    d_weights = d_heads @ v.swapaxes(2, 3)  # (B, H, T, T)
    d_scores = weights * (d_weights - (weights * d_weights).sum(-1, keepdims=True))
    d_scores /= math.sqrt(q.shape[3])  # (B, H, T, T), 0 where the mask is False
    d_q, d_k, d_v = d_scores @ k, d_scores.swapaxes(2, 3) @ q, weights.swapaxes(2, 3) @ d_heads
    d_qkv = np.stack([d_q, d_k, d_v]).transpose(1, 3, 0, 2, 4).reshape(B, T, 3 * D)
    return _linear_back(parameters, f"{name}.qkv", saved, d_qkv, grads)  # (B, T, D)


def _gelu(name: str, x: Array, saved: dict[str, Any]) -> Array:
    below = (1 + np.asarray(_erf(x / math.sqrt(2)), dtype=np.float64)) / 2  # Φ(x)
    saved[name] = x, below
    return x * below


def _gelu_back(name: str, saved: dict[str, Any], d_y: Array) -> Array:
    x, below = saved[name]
    return d_y * (below + x * np.exp(-(x**2) / 2) / math.sqrt(2 * math.pi))


def _depth(parameters: Parameters) -> int:
    return len({name.split(".")[1] for name in parameters if name.startswith("blocks.")})

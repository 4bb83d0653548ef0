"""Claims of chapter 5 about estimators on the parameters of a real network."""

import numpy as np
import pytest
import torch

from mathrl import arithmetic
from mathrl.decoder import Decoder, DecoderConfig
from mathrl.grammar import ARITHMETIC
from mathrl.responses import score
from tests.oracles import fails

TASK = (3, 4)


@pytest.fixture(scope="module")
def network():
    """Probabilities, per-response gradients and rewards, by 100 passes over whole sequences."""
    model = Decoder(DecoderConfig(width=16, heads=2), seed=3).double()
    prompts = torch.tensor([arithmetic.encode(TASK)]).expand(100, -1)
    paths = [[u, v, 13] for u in range(10) for v in range(10)]
    log_probs = score(model, prompts, torch.tensor(paths), ARITHMETIC).sum(1)
    rewards = np.array([float(path == [7, 4, 13]) for path in paths])

    def flat(value):
        slopes = torch.autograd.grad(value, model.parameters(), retain_graph=True)
        return torch.cat([slope.flatten() for slope in slopes]).numpy()

    exact = flat(log_probs[rewards.argmax()].exp())  # one response is paid: J is its probability
    scores = np.stack([flat(value) for value in log_probs])
    return log_probs.detach().exp().numpy(), scores, rewards, exact


@pytest.mark.claim("5.8", "autograd")
def test_one_draw_is_unbiased_on_real_parameters(network):
    chance, scores, rewards, exact = network

    def check(weights):
        np.testing.assert_allclose(chance @ (weights[:, None] * scores), exact, rtol=0, atol=1e-12)

    for constant in (0.0, 0.01, 0.5, -3.0):
        check(rewards - constant)
    fails(check, rewards * chance)
    fails(check, rewards - rewards * 0.1)


@pytest.mark.claim("5.8", "enumeration")
def test_a_constant_baseline_hardly_helps_where_success_is_rare(network):
    chance, scores, rewards, exact = network
    norms = (scores**2).sum(1)

    def variance(constant):
        return chance @ ((rewards - constant) ** 2 * norms) - exact @ exact

    best = (chance * norms) @ rewards / (chance @ norms)
    assert variance(best) == min(variance(b) for b in (0.0, best, 0.005, 0.02, 0.1, 0.5))
    assert 0.98 < variance(best) / variance(0.0) < 1
    assert variance(0.5) > 10 * variance(0.0)

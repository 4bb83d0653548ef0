"""The network against its twin in numpy, and the tree of responses against whole sequences."""

import itertools
import math

import numpy as np
import pytest
import torch
from torch.autograd import grad

from mathrl import arithmetic, by_hand, decoder, exact, grammar, kl, policy, responses
from mathrl.decoder import Decoder, DecoderConfig
from mathrl.grammar import ARITHMETIC, Grammar
from tests.mutants import assert_caught
from tests.oracles import fails, refuses

PROMPTS = torch.tensor([arithmetic.encode(task) for task in arithmetic.TASKS])
SIZES = [
    DecoderConfig(vocab_size=5, context_length=9, width=6, depth=1, heads=1),
    DecoderConfig(width=12, depth=3, heads=3, mlp_ratio=2, tied=True),
    DecoderConfig(width=10, depth=2, heads=5, context_length=20, mlp_ratio=1),
]
UNEVEN = Grammar([(1, 4, 9), (2,), (3, 9), (0, 2)], end=9)
NO_CHOICE = Grammar([(4,), (8,)])


def network(config=None, seed=0, dtype=torch.float64, module=decoder):
    """A network whose parameters are all far from their simple initial values."""
    model = module.Decoder(config or DecoderConfig(), seed=seed).to(dtype)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
            parameter.add_(0.3 * noise)
    return model


def arrays(model):
    return {name: tensor.double().numpy() for name, tensor in model.state_dict().items()}


def close(got, expected, tolerance=1e-12):
    got = got.detach().numpy() if isinstance(got, torch.Tensor) else np.asarray(got)
    expected = np.asarray(expected)
    assert got.shape == expected.shape, (got.shape, expected.shape)
    assert np.allclose(got, expected, rtol=0, atol=tolerance), np.abs(got - expected).max()


def uniforms(*shape, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.rand(*shape, generator=generator, dtype=torch.float64)


# The network and its twin


def check_twins(decoder=decoder, by_hand=by_hand, sizes=SIZES):
    """Outputs and the gradient of every parameter, for several sizes, with and without a tree."""
    for size, config in enumerate(sizes):
        model = network(config, size, module=decoder)
        rng = np.random.default_rng(size)
        tokens = rng.integers(config.vocab_size, size=(3, 6))
        branches = np.tril(np.ones((6, 6), dtype=bool))
        branches[4:, 3:] = np.eye(3, dtype=bool)[1:]
        trees = [(None, None), (np.array([0, 1, 2, 3, 3, 3]), branches)]
        for positions, mask in trees:
            given = [None if x is None else torch.tensor(x) for x in (positions, mask)]
            logits = model(torch.tensor(tokens), *given)
            d_logits = rng.normal(size=logits.shape)
            twin, saved = by_hand.forward(arrays(model), tokens, config.heads, positions, mask)
            close(logits, twin, 1e-10)
            theirs = by_hand.backward(arrays(model), saved, d_logits)
            assert set(theirs) == set(model.state_dict())
            if config.tied:
                theirs["token_embedding.weight"] += theirs.pop("head.weight")
            model.zero_grad()
            logits.backward(torch.tensor(d_logits))
            for name, parameter in model.named_parameters():
                close(parameter.grad, theirs[name], 1e-10)


@pytest.mark.claim("5.2", "autograd")
def test_network_and_twin_agree_on_outputs_and_on_every_gradient():
    check_twins()
    check_twins(sizes=[DecoderConfig()])


@pytest.mark.claim("5.2", "algebra")
def test_twin_agrees_with_finite_differences():
    """The twin's own backward pass against its own forward pass: no torch on either side."""
    config = SIZES[0]
    parameters, rng = arrays(network(config)), np.random.default_rng(0)
    tokens = rng.integers(config.vocab_size, size=(2, 4))
    logits, saved = by_hand.forward(parameters, tokens, config.heads)
    d_logits = rng.normal(size=logits.shape)
    gradients = by_hand.backward(parameters, saved, d_logits)
    for name, array in parameters.items():
        direction, step = rng.normal(size=array.shape), 1e-5
        ends = [
            by_hand.forward({**parameters, name: array + sign * step * direction}, tokens, 1)[0]
            for sign in (1, -1)
        ]
        slope = ((ends[0] - ends[1]) * d_logits).sum() / (2 * step)
        assert slope == pytest.approx((gradients[name] * direction).sum(), rel=1e-6, abs=1e-8)


def check_causal(decoder=decoder):
    model = network(module=decoder)
    first = torch.randint(14, (2, 7), generator=torch.Generator().manual_seed(0))
    for position in range(7):
        changed = first.clone()
        changed[:, position] = (changed[:, position] + 1) % 14
        before, after = model(first), model(changed)
        assert torch.equal(before[:, :position], after[:, :position])
        assert (before[:, position:] != after[:, position:]).any(-1).all()


@pytest.mark.claim("5.1", "autograd")
def test_a_token_changes_what_follows_and_nothing_before():
    check_causal()


def test_initial_parameters_depend_on_the_seed_only():
    torch.manual_seed(1)
    first = Decoder(DecoderConfig(), seed=3).state_dict()
    torch.manual_seed(2)
    second = Decoder(DecoderConfig(), seed=3).state_dict()
    other = Decoder(DecoderConfig(), seed=4).state_dict()
    assert all(torch.equal(first[name], second[name]) for name in first)
    drawn = [name for name in first if first[name].dim() == 2]
    assert len(drawn) == 11
    assert not any(torch.equal(first[name], other[name]) for name in drawn)


def check_initial_scales(decoder=decoder):
    config = DecoderConfig(vocab_size=300, context_length=300, width=64, depth=2)
    for name, parameter in decoder.Decoder(config).named_parameters():
        if parameter.dim() == 1:
            assert (parameter == float("norm.weight" in name)).all(), name
        else:
            outer = "embedding" in name or "head" in name
            expected = 0.02 if outer else 0.5 / math.sqrt(parameter.shape[1])
            assert parameter.std().item() == pytest.approx(expected, rel=0.05), name


def test_initial_parameters_have_the_stated_scales():
    check_initial_scales()


def test_first_policy_is_close_to_uniform():
    joint = responses.enumerate_all(Decoder(DecoderConfig()), PROMPTS, ARITHMETIC).joint
    assert (joint.exp() - 0.01).abs().max() < 0.015


@pytest.mark.claim("5.1", "enumeration")
def test_attention_maps_are_the_weights_that_were_used():
    config = DecoderConfig(width=12, depth=3, heads=3)
    model, tokens = network(config), PROMPTS[:2]
    maps = decoder.attention_maps(model, tokens)
    _, saved = by_hand.forward(arrays(model), tokens.numpy(), config.heads)
    for block in range(config.depth):
        close(maps[block], saved[f"blocks.{block}.attention"][3])
    close(maps.sum(-1), np.ones((3, 2, 3, 5)))
    assert (maps.triu(1) == 0).all()
    assert not any(module._forward_hooks for module in model.modules())


# The cache


def check_cache(decoder=decoder):
    model = network(module=decoder)
    tokens = torch.randint(14, (3, 8), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        whole = model(tokens)
        for pieces in ([1] * 8, [5, 1, 1, 1], [2, 6], [8]):
            cache = decoder.Cache(model, 3)
            parts = [model(piece, cache=cache) for piece in tokens.split(pieces, 1)]
            close(torch.cat(parts, 1), whole)
            assert cache.length == 8
        cache = decoder.Cache(model, 3)
        model(tokens[:, :5], cache=cache)
        cache.repeat(2)
        rest = model(tokens[:, 5:].repeat_interleave(2, 0), cache=cache)
        close(rest, whole[:, 5:].repeat_interleave(2, 0))


@pytest.mark.claim("5.2", "enumeration")
def test_a_cached_pass_gives_what_a_whole_pass_gives():
    check_cache()


def check_cache_refusals(decoder=decoder):
    model = network(module=decoder)
    refuses(RuntimeError, "no_grad", model, PROMPTS, cache=decoder.Cache(model, 25))
    with torch.no_grad():
        refuses(ValueError, "25 sequences", model, PROMPTS, cache=decoder.Cache(model, 1))
        cache = decoder.Cache(model, 25)
        model(PROMPTS, cache=cache)
        refuses(ValueError, "10 positions", model, PROMPTS, cache=cache)


def test_a_cache_is_not_misused():
    check_cache_refusals()


# Bad input


def check_refusals(decoder=decoder):
    model = network(module=decoder)
    ids = torch.zeros(1, 8, dtype=torch.int64)
    refuses(TypeError, "`tokens` must be a torch.Tensor, got list", model, [[1]])
    refuses(TypeError, "`tokens` must be int64, got torch.float32", model, ids.float())
    refuses(ValueError, r"`tokens` must have shape \(B, T\)", model, ids[0])
    refuses(ValueError, r"`tokens` must have shape \(B, T\)", model, ids[:, :0])
    for wrong in (14, -1):
        refuses(
            ValueError, rf"`tokens` must lie in \[0, 14\), got {wrong}", model, ids[:, :2] + wrong
        )
    refuses(ValueError, "9 positions, expected at most .*8", model, ids.repeat(1, 2)[:, :9])
    positions = torch.arange(8)
    refuses(ValueError, r"`positions` must lie in \[0, 8\), got 8", model, ids, positions + 1)
    refuses(ValueError, r"`positions` has shape \(7,\), expected \(8,\)", model, ids, positions[1:])
    mask = torch.ones(8, 8, dtype=torch.bool)
    refuses(TypeError, "`mask` must be boolean", model, ids, positions, mask.int())
    refuses(
        ValueError, r"`mask` has shape \(8, 7\), expected \(8, 8\)", model, ids, None, mask[:, 1:]
    )
    refuses(ValueError, "see something, got 0 at index", model, ids, None, mask.triu(1))


def test_network_refuses_bad_input():
    check_refusals()


@pytest.mark.parametrize(
    ("name", "value"),
    [("vocab_size", 0), ("context_length", -1), ("width", 0), ("width", 49), ("depth", 0)],
)
def test_sizes_are_checked(name, value):
    refuses(ValueError, f"`{name}` must be", DecoderConfig, **{name: value})


# The grammar


def check_grammar(grammar=grammar):
    for steps, end in [
        (ARITHMETIC.steps, 13),
        (UNEVEN.steps, 9),
        (NO_CHOICE.steps, None),
        (((5, 9), (5, 9), (5, 9)), 9),
        (((3, 2), (2, 3)), None),
    ]:
        tried = grammar.Grammar(steps, end)
        cut = [
            row[: row.index(end) + 1] if end in row else row
            for row in map(list, itertools.product(*steps))
        ]
        expected = [row for row, _ in itertools.groupby(cut)]
        assert tried.responses() == expected
        assert tried.size == len(expected)
        beginnings = {tuple(row[:k]) for row in expected for k in range(len(row) + 1)}
        open_ended = {
            p for p in beginnings if sum(row[: len(p)] == list(p) for row in expected) > 1
        }
        assert open_ended <= set(tried.prefixes()) <= beginnings
        assert tried.prefixes()[0] == ()
        assert sorted(tried.prefixes(), key=len) == tried.prefixes()
    assert len(grammar.Grammar(ARITHMETIC.steps, 13).prefixes()) == 11


def test_grammar_lists_every_response_and_every_prefix_once():
    check_grammar()
    assert ARITHMETIC.responses() == arithmetic.responses()
    assert Grammar([range(10), range(10), [13]], end=13) == ARITHMETIC


def check_grammar_refusals(grammar=grammar):
    make = grammar.Grammar
    refuses(ValueError, "at least one step", make, [])
    refuses(ValueError, r"`steps\[1\]` must allow at least one token", make, [(1,), ()])
    refuses(TypeError, r"`steps\[0\]` must hold ints, got True", make, [(True,)])
    refuses(TypeError, "`end` must be an int", make, [(1,)], 1.0)
    refuses(ValueError, "distinct tokens from 0", make, [(1, 1)])
    refuses(ValueError, "distinct tokens from 0", make, [(-1, 1)])
    refuses(ValueError, r"`steps\[1\]` cannot be reached", make, [(9,), (1,)], 9)
    refuses(ValueError, "`end` must be allowed at some step, got 9", make, [(1,)], 9)
    refuses(ValueError, "1000000 responses are too many", make([range(100)] * 3).responses)
    refuses(ValueError, "1000000 responses are too many", make([range(100)] * 3).prefixes)


def test_grammar_refuses_what_describes_no_responses():
    check_grammar_refusals()


# All responses at once


def brute_force(model, prompts, rules, temperature=1.0):
    """Log-probability of each token by numpy, from one whole sequence for each response."""
    table = np.zeros((len(prompts), rules.size, rules.length))
    for p, prompt in enumerate(prompts.tolist()):
        for n, response in enumerate(rules.responses()):
            table[p, n, : len(response)] = read(model, prompt, tuple(response), rules, temperature)
    return table


def read(model, prompt, response, rules, temperature):
    tokens = np.array([[*prompt, *response[:-1]]])
    logits, _ = by_hand.forward(arrays(model), tokens, model.config.heads)
    row = []
    for t, token in enumerate(response):
        allowed = list(rules.steps[t])
        at = logits[0, len(prompt) - 1 + t, allowed] / temperature
        row.append(exact.log_softmax(at)[allowed.index(token)])
    return row


def check_enumeration(responses=responses):
    cases = [(UNEVEN, 0.6), (NO_CHOICE, 1.0), (ARITHMETIC, 1.0)]
    for rules, temperature in cases:
        for dtype, tolerance in ((torch.float64, 1e-12), (torch.float32, 1e-5)):
            model = network(DecoderConfig(width=4, heads=2), dtype=dtype)
            prompts = PROMPTS[[7, 19]]
            everything = responses.enumerate_all(model, prompts, rules, temperature)
            assert everything.log_probs.dtype == dtype
            close(everything.log_probs, brute_force(model, prompts, rules, temperature), tolerance)
            close(everything.joint.exp().sum(-1), np.ones(2), 1e-5)
            for row, mask, expected in zip(
                everything.tokens.tolist(), everything.mask.tolist(), rules.responses(), strict=True
            ):
                assert mask == [t < len(expected) for t in range(rules.length)]
                assert row == expected + [rules.end] * (rules.length - len(expected))


@pytest.mark.claim("5.3", "enumeration")
@pytest.mark.claim("5.4", "enumeration")
def test_tree_gives_what_whole_sequences_give():
    check_enumeration()


@pytest.mark.claim("5.3", "enumeration")
def test_forced_tokens_have_log_probability_exactly_zero():
    log_probs = responses.enumerate_all(network(), PROMPTS, ARITHMETIC).log_probs
    assert (log_probs[:, :, 2] == 0).all()
    assert (log_probs[:, :, :2] < 0).all()
    whole = responses.enumerate_all(network(), PROMPTS[:1], NO_CHOICE)
    assert (whole.joint == 0).all()


@pytest.mark.claim("5.4", "enumeration")
def test_all_responses_cost_one_pass_of_fifteen_positions():
    model, shapes = network(), []
    model.register_forward_pre_hook(lambda _, inputs: shapes.append(tuple(inputs[0].shape)))
    responses.enumerate_all(model, PROMPTS, ARITHMETIC)
    assert shapes == [(25, 15)]


def check_network_gradient(responses=responses):
    """∇J, KL and its gradient on real parameters, with no torch on the other side.

    `exact` differentiates in the logits of the tree, the twin pulls that back to the parameters.
    """
    model, ref = network(seed=0), network(seed=1)
    rewards = np.random.default_rng(0).normal(size=(10, 10))
    prompts = PROMPTS[:3]
    mine = responses.enumerate_all(model, prompts, ARITHMETIC)
    theirs = responses.enumerate_all(ref, prompts, ARITHMETIC).joint.detach()
    value = (mine.joint.exp() * torch.tensor(rewards).flatten()).sum(1).mean()
    penalty = kl.divergence(mine.joint, theirs).mean()
    slopes = [
        dict(
            zip(
                dict(model.named_parameters()),
                grad(number, model.parameters(), retain_graph=True),
                strict=True,
            )
        )
        for number in (value, penalty)
    ]

    tokens = np.concatenate([prompts.numpy(), np.tile(np.arange(10), (3, 1))], 1)
    positions = np.array([0, 1, 2, 3, 4, *[5] * 10])
    sees = np.tril(np.ones((15, 15), dtype=bool))
    sees[5:, 5:] = np.eye(10, dtype=bool)
    logits, saved = by_hand.forward(arrays(model), tokens, 4, positions, sees)
    ref_logits, _ = by_hand.forward(arrays(ref), tokens, 4, positions, sees)
    steps = [[x[4, :10], x[5:, :10]] for x in logits]
    ref_steps = [[x[4, :10], x[5:, :10]] for x in ref_logits]
    close(value, np.mean([exact.tree_value(s, rewards) for s in steps]))
    divergences = [exact.tree_kl(s, r).sum() for s, r in zip(steps, ref_steps, strict=True)]
    close(penalty, np.mean(divergences))
    entropies = [
        -exact.tree_kl(s, [np.zeros(10), np.zeros((10, 10))]).sum() + math.log(100) for s in steps
    ]
    close(policy.entropy(mine.joint), entropies)
    in_logits = (
        [exact.tree_gradient(s, rewards) for s in steps],
        [exact.tree_kl_gradient(s, r) for s, r in zip(steps, ref_steps, strict=True)],
    )
    for slope, at_choices in zip(slopes, in_logits, strict=True):
        d_logits = np.zeros_like(logits)
        for row, (first, second) in enumerate(at_choices):
            d_logits[row, 4, :10], d_logits[row, 5:, :10] = first / 3, second / 3
        by_parameter = by_hand.backward(arrays(model), saved, d_logits)
        for name, expected in by_parameter.items():
            close(slope[name], expected, 1e-10)


@pytest.mark.claim("5.7", "autograd")
def test_exact_policy_gradient_and_divergence_of_a_real_network():
    check_network_gradient()


# Given responses


def check_score(responses=responses):
    for rules, temperature in ((ARITHMETIC, 0.7), (UNEVEN, 1.0), (NO_CHOICE, 1.0)):
        model, prompts = network(DecoderConfig(width=8, heads=2)), PROMPTS[[3, 12]]
        everything = responses.enumerate_all(model, prompts, rules, temperature)
        count = len(everything.tokens)
        rows, given = prompts.repeat_interleave(count, 0), everything.tokens.repeat(2, 1)
        scored = responses.score(model, rows, given, rules, temperature)
        close(scored.view(2, count, -1), everything.log_probs.detach())
        padded = torch.where(everything.mask, everything.tokens, 11).repeat(2, 1)
        assert torch.equal(responses.score(model, rows, padded, rules, temperature), scored)


def test_scoring_reads_what_the_tree_wrote():
    check_score()


def test_scores_and_enumeration_have_the_same_gradient():
    model, chosen = network(), torch.tensor([74, 3, 99])
    prompts = PROMPTS[[19, 2, 7]]
    everything = responses.enumerate_all(model, prompts, ARITHMETIC)
    one = everything.joint[range(3), chosen].sum()
    other = responses.score(model, prompts, everything.tokens[chosen], ARITHMETIC).sum()
    pairs = (grad(number, model.parameters()) for number in (one, other))
    for left, right in zip(*pairs, strict=True):
        close(left, right.numpy())


# Sampled responses


def wrong_sampling_at_another_temperature(model, prompts, rules, numbers, temperature=1.0):
    drawn = responses.sample(model, prompts, rules, numbers, 1.0)
    rows = prompts.repeat_interleave(numbers.shape[1], 0)
    log_probs = responses.score(model, rows, drawn.tokens.flatten(0, 1), rules, temperature)
    return responses.Samples(drawn.tokens, drawn.mask, log_probs.view(drawn.tokens.shape))


def wrong_cut_without_renormalising(model, prompts, rules, numbers, temperature=1.0):
    """Softmax over all 14 tokens, of which 10 are kept."""
    drawn = responses.sample(model, prompts, rules, numbers, temperature)
    tokens = drawn.tokens.flatten(0, 1)
    rows = prompts.repeat_interleave(numbers.shape[1], 0)
    logits = model(torch.cat([rows, tokens[:, :-1]], 1))[:, 4:]
    full = policy.log_probs(logits, tokens, temperature).detach()
    return responses.Samples(drawn.tokens, drawn.mask, full.view(drawn.tokens.shape))


def check_sample(sample):
    """Tokens, mask and log-probabilities are those of the enumerated distribution."""
    for rules, temperature in ((ARITHMETIC, 0.6), (UNEVEN, 1.4), (NO_CHOICE, 1.0)):
        model, prompts = network(DecoderConfig(width=8, heads=2)), PROMPTS[[3, 12]]
        everything = responses.enumerate_all(model, prompts, rules, temperature)
        index = {tuple(row): n for n, row in enumerate(everything.tokens.tolist())}
        drawn = sample(model, prompts, rules, uniforms(2, 50, rules.length), temperature)
        for b, g in itertools.product(range(2), range(50)):
            row = tuple(drawn.tokens[b, g].tolist())
            assert row in index
            n = index[row]
            assert torch.equal(drawn.mask[b, g], everything.mask[n])
            close(drawn.log_probs[b, g], everything.log_probs[b, n].detach().numpy())


def check_frequencies(sample):
    """Pearson's statistic of 20,000 responses: expectation 99, against its 1e-6 quantile."""
    model, temperature = network(DecoderConfig(width=4, heads=1, depth=1), seed=2), 0.8
    prompts = PROMPTS[[3]]
    joint = responses.enumerate_all(model, prompts, ARITHMETIC, temperature).joint[0].detach()
    drawn = sample(model, prompts, ARITHMETIC, uniforms(1, 20_000, 3), temperature).tokens[0]
    counts = torch.bincount(10 * drawn[:, 0] + drawn[:, 1], minlength=100)
    expected = 20_000 * joint.exp()
    statistic = ((counts - expected) ** 2 / expected).sum().item()
    assert expected.min() > 5
    assert 50 < statistic < 99 * (1 - 2 / 891 + 4.75 * math.sqrt(2 / 891)) ** 3


@pytest.mark.claim("5.5", "enumeration")
def test_sampled_log_probs_are_those_of_the_distribution_sampled_from():
    for cached in (True, False):
        check_sample(lambda *a, c=cached: responses.sample(*a, cached=c))
    fails(check_sample, wrong_cut_without_renormalising)


@pytest.mark.claim("5.5", "enumeration")
def test_sampling_frequencies_follow_the_exact_distribution():
    check_frequencies(responses.sample)
    fails(check_frequencies, wrong_sampling_at_another_temperature)


def check_cached_samples(responses=responses):
    model, numbers = network(), uniforms(25, 8, 3)
    one = responses.sample(model, PROMPTS, ARITHMETIC, numbers)
    other = responses.sample(model, PROMPTS, ARITHMETIC, numbers, cached=False)
    again = responses.sample(model, PROMPTS, ARITHMETIC, numbers)
    assert torch.equal(one.tokens, other.tokens)
    close(one.log_probs, other.log_probs.numpy())
    assert all(map(torch.equal, one, again))


def test_cached_and_uncached_sampling_agree():
    check_cached_samples()


def test_low_temperature_samples_the_most_likely_token():
    model = network()
    everything = responses.enumerate_all(model, PROMPTS, ARITHMETIC, 1e-4)
    drawn = responses.sample(model, PROMPTS, ARITHMETIC, uniforms(25, 4, 3), 1e-4)
    best = everything.tokens[everything.joint.argmax(-1)]
    assert torch.equal(drawn.tokens, best[:, None].expand(-1, 4, -1))
    assert (everything.joint.max(-1).values > -1e-3).all()


def test_half_precision_network_samples_in_float32():
    model = network(dtype=torch.bfloat16)
    drawn = responses.sample(model, PROMPTS, ARITHMETIC, uniforms(25, 2, 3))
    assert drawn.log_probs.dtype == torch.float32


def check_draw(responses=responses):
    """On a fine grid of uniforms the frequencies are the probabilities."""
    probabilities = np.array([0.0, 0.5, 0.0, 0.3, 0.2, 0.0])
    log_probs = torch.tensor(probabilities).log()
    grid = (torch.arange(1000, dtype=torch.float64) + 0.5) / 1000
    counts = torch.bincount(responses.draw(log_probs, grid), minlength=6)
    assert counts.tolist() == [0, 500, 0, 300, 200, 0]
    ends = torch.tensor([0.0, 1 - 2**-53], dtype=torch.float64)
    assert responses.draw(log_probs, ends).tolist() == [1, 4]
    assert responses.draw(log_probs.float(), ends).tolist() == [1, 4]
    short = torch.tensor([0.5, 0.4998, 0.0]).log()  # within the tolerance of a distribution
    assert responses.draw(short, ends).tolist() == [0, 1]
    assert responses.draw(short.exp().mul(1.0004).log(), ends).tolist() == [0, 1]
    rare = torch.tensor([1e-12, 1 - 1e-12], dtype=torch.float64).log()
    assert responses.draw(rare, ends / 2**41).tolist() == [0, 0]
    rows = torch.stack([log_probs, log_probs.flip(0)])
    assert responses.draw(rows, grid[[100, 100]][:, None]).tolist() == [[1], [1]]


def test_draw_inverts_the_distribution_function():
    check_draw()


def check_response_refusals(responses=responses):
    model, numbers = network(), uniforms(25, 2, 3)
    for function, more in (
        (responses.enumerate_all, (ARITHMETIC,)),
        (responses.sample, (ARITHMETIC, numbers)),
        (responses.score, (torch.tensor([[7, 4, 13]]).repeat(25, 1), ARITHMETIC)),
    ):
        refuses(TypeError, "`prompts` must be int64", function, model, PROMPTS.int(), *more)
        refuses(
            ValueError, r"`prompts` must have shape \(B, L\)", function, model, PROMPTS[0], *more
        )
        for wrong in (0.0, -1.0, math.inf, math.nan):
            refuses(
                ValueError, "`temperature` must be positive", function, model, PROMPTS, *more, wrong
            )
        broken = network()
        with torch.no_grad():
            broken.head.weight[3, 0] = math.nan
        refuses(ValueError, "must be finite, got nan", function, broken, PROMPTS, *more)
    wide = Grammar([range(15)])
    long = Grammar([range(2)] * 5)
    for function, more in (
        (responses.enumerate_all, ()),
        (responses.sample, (uniforms(25, 1, 1),)),
    ):
        refuses(ValueError, "allows token 14", function, model, PROMPTS, wide, *more)
    refuses(ValueError, r"must lie in \[0, 8\)", responses.enumerate_all, model, PROMPTS, long)
    refuses(ValueError, "9 positions", responses.sample, model, PROMPTS, long, uniforms(25, 1, 5))
    refuses(
        ValueError,
        r"expected \(25, G, 3\)|expected \(25, 2, 3\)",
        responses.sample,
        model,
        PROMPTS,
        ARITHMETIC,
        uniforms(25, 2, 2),
    )
    refuses(
        TypeError,
        "`uniforms` must be float64",
        responses.sample,
        model,
        PROMPTS,
        ARITHMETIC,
        numbers.float(),
    )
    refuses(
        ValueError,
        r"lie in \[0, 1\), got 1.0",
        responses.sample,
        model,
        PROMPTS,
        ARITHMETIC,
        torch.ones(25, 2, 3, dtype=torch.float64),
    )


def test_responses_refuse_bad_input():
    check_response_refusals()


def check_score_refusals(responses=responses):
    model, prompts = network(), PROMPTS[:1]
    for row, words in (
        ([7, 4, 4], "allowed at their step, got 4"),
        ([13, 13, 13], "allowed at their step, got 13"),
        ([7, 14, 13], "allowed at their step, got 14"),
        ([-1, 4, 13], "allowed at their step, got -1"),
    ):
        refuses(ValueError, words, responses.score, model, prompts, torch.tensor([row]), ARITHMETIC)
    refuses(
        ValueError,
        r"`responses` has shape \(1, 2\), expected \(1, 3\)",
        responses.score,
        model,
        prompts,
        torch.tensor([[7, 4]]),
        ARITHMETIC,
    )
    refuses(
        ValueError,
        r"`responses` has shape \(2, 3\), expected \(1, 3\)",
        responses.score,
        model,
        prompts,
        torch.tensor([[7, 4, 13]] * 2),
        ARITHMETIC,
    )
    refuses(
        TypeError,
        "`responses` must be int64",
        responses.score,
        model,
        prompts,
        torch.tensor([[7.0, 4, 13]]),
        ARITHMETIC,
    )


def test_scoring_refuses_responses_outside_the_grammar():
    check_score_refusals()


@pytest.mark.claim("5.6", "enumeration")
def test_the_mask_counts_one_stop_token():
    tokens = torch.tensor([[7, 4, 13, 13, 13], [13, 1, 2, 13, 13], [1, 2, 3, 4, 5]])
    expected = [[1, 1, 1, 0, 0], [1, 0, 0, 0, 0], [1, 1, 1, 1, 1]]
    assert responses.response_mask(tokens, 13).int().tolist() == expected
    assert responses.response_mask(tokens, None).all()


def in_twin(module):
    check_twins(by_hand=module)


def drawn_right(module):
    check_sample(module.sample)
    check_sample(lambda *args: module.sample(*args, cached=False))


MUTANTS = [
    (
        "decoder",
        "mask = seen <= seen[past:, None]",
        "mask = seen < seen[past:, None] + 2",
        check_causal,
    ),
    ("decoder", "/ math.sqrt(D // self.heads)", "/ math.sqrt(D)", check_twins),
    (
        "decoder",
        "x = x + self.attention(self.attention_norm(x)",
        "x = self.attention(self.attention_norm(x)",
        check_twins,
    ),
    ("decoder", "self.up(self.mlp_norm(x))", "self.up(x)", check_twins),
    ("decoder", "F.gelu(self.up", "F.silu(self.up", check_twins),
    ("decoder", "self.head(self.norm(x))", "self.head(x)", check_twins),
    ("decoder", ".permute(2, 0, 3, 1, 4)", ".permute(2, 0, 3, 1, 4).flip(0)", check_twins),
    (
        "decoder",
        "self.position_embedding(positions)",
        "self.position_embedding(positions.flip(0))",
        check_twins,
    ),
    (
        "decoder",
        "            self.head.weight = self.token_embedding.weight",
        "            pass",
        check_twins,
    ),
    ("decoder", "0.02 if outer", "0.2 if outer", check_initial_scales),
    ("decoder", "0.5 / math.sqrt", "1.0 / math.sqrt", check_initial_scales),
    ("decoder", "parameter.shape[1])", "parameter.shape[0])", check_initial_scales),
    ("decoder", "torch.arange(past, past + T", "torch.arange(T", check_cache),
    ("decoder", "cache.length += T", "cache.length += 1", check_cache),
    (
        "decoder",
        "self.memory[1, :, :, self.length : total] = v",
        "self.memory[1, :, :, self.length : total] = k",
        check_cache,
    ),
    (
        "decoder",
        "memory.repeat_interleave(times, 1)",
        "memory.repeat(1, times, 1, 1, 1)",
        check_cache,
    ),
    ("decoder", "if torch.is_grad_enabled():", "if False:", check_cache_refusals),
    ("decoder", "(ids < 0) | (ids >= size)", "ids > size", check_refusals),
    ("by_hand", " - n * (d_n * n).mean(-1, keepdims=True)", "", in_twin),
    ("by_hand", "d_weights - (weights * d_weights).sum(-1, keepdims=True)", "d_weights", in_twin),
    ("by_hand", "below + x * np.exp", "below - x * np.exp", in_twin),
    (
        "by_hand",
        'd_x = d_x + _norm_back(parameters, f"{at}.mlp_norm"',
        'd_x = _norm_back(parameters, f"{at}.mlp_norm"',
        in_twin,
    ),
    ("by_hand", "np.add.at(grads[weight], ids, d_x", "np.put(grads[weight], ids, d_x", in_twin),
    ("by_hand", "EPS = 1e-5", "EPS = 1e-4", in_twin),
    ("grammar", "live * len(self._lasting(step))", "live * len(step)", check_grammar),
    ("grammar", "ended + live * (self.end in step)", "ended + (self.end in step)", check_grammar),
    ("grammar", "for token in self._lasting(step)]", "for token in step]", check_grammar),
    ("grammar", "if len(step) > 1), default=0)", "if step), default=0)", check_grammar),
    (
        "grammar",
        "        if step == (end,) and t < len(steps) - 1:",
        "        if False:",
        check_grammar_refusals,
    ),
    ("responses", "sees[start:, start:] = False", "pass", check_enumeration),
    (
        "responses",
        "for k in range(len(prefix))]",
        "for k in (len(prefix) - 1,)]",
        check_enumeration,
    ),
    (
        "responses",
        "torch.arange(start - 1), start - 1 + depths",
        "torch.arange(start - 1), start - 1 + depths.clamp(max=1)",
        check_enumeration,
    ),
    (
        "responses",
        "[:, prompts.shape[1] - 1 :]  # (B, 1 + M, V)",
        "[:, prompts.shape[1] - 2 : -1]",
        check_enumeration,
    ),
    ("responses", "logits / temperature, allowed", "logits, allowed", check_enumeration),
    (
        "responses",
        "logits / temperature, allowed",
        "logits * temperature, allowed",
        check_enumeration,
    ),
    ("responses", "allowed[t, list(step)] = True", "allowed[t] = True", check_enumeration),
    ("responses", "right=True", "right=False", check_draw),
    ("responses", "uniforms * cumulative[..., -1:]", "uniforms", check_draw),
    ("responses", "ends.cumsum(-1) - ends == 0", "ends.cumsum(-1) == 0", check_enumeration),
    ("responses", "tokens.masked_fill_(~mask, grammar.end or 0)", "pass", drawn_right),
    (
        "responses",
        "chosen.masked_fill(~mask, 0.0).to(_precision",
        "chosen.to(_precision",
        drawn_right,
    ),
    (
        "responses",
        "_restrict(logits, allowed[t], temperature)",
        "_restrict(logits, allowed[t], 1.0)",
        drawn_right,
    ),
    ("responses", "uniforms[:, :, t]", "uniforms[:, :, 0]", lambda m: check_frequencies(m.sample)),
    (
        "responses",
        "logits[:, -1].repeat_interleave(G, 0)",
        "logits[:, -1].repeat(G, 1)",
        drawn_right,
    ),
    (
        "responses",
        "_checks.reject(mask & ~legal,",
        "_checks.reject(mask & ~mask,",
        check_score_refusals,
    ),
    ("responses", "chosen.masked_fill(~mask, 0.0)\n", "chosen\n", check_score),
]


@pytest.mark.parametrize(("module", "old", "new", "check"), MUTANTS)
def test_every_mutant_is_caught(module, old, new, check):
    assert_caught(f"mathrl.{module}", old, new, check)

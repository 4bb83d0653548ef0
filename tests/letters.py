"""Tokens written as letters, and calls as "prompt|output", the way the field's cases are.

U is context, A B C are sampled, E is a sampled stop token, T a tool result, S template scaffold, n
a newline of the template, k reasoning, b a start token, I an image placeholder, o and c open and
close a block of tool results, and the rest is anything else.
"""

from mathrl.trajectory import Call

ALPHABET = "UABCETSnkbIocPXYZ"


def ids(letters):
    return [ALPHABET.index(letter) for letter in letters]


def letters(row):
    return "".join(ALPHABET[i] for i in row.tokens)


def calls_of(*texts, kind=Call, **settings):
    """Calls with log-probabilities -0.1, -0.2, … through all of them."""
    made, count = [], 0
    for text in texts:
        prompt, output = (ids(part) for part in text.split("|"))
        log_probs = [-(count + i + 1) / 10 for i in range(len(output))]
        count += len(output)
        made.append(kind(prompt_ids=prompt, output_ids=output, log_probs=log_probs, **settings))
    return made

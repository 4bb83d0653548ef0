"""Random call graphs, made from a string of bytes so that hypothesis can shrink them."""

from mathrl.trajectory import Call


class Graph:
    """Calls made from a string of bytes: extend, branch, edit, truncate, sample nothing."""

    def __init__(self, program):
        self.bytes, self.at = program, 0
        self.calls = []
        while self.at < len(program) or not self.calls:
            self.calls.append(self.call())

    def draw(self, below):
        value = self.bytes[self.at] if self.at < len(self.bytes) else 0
        self.at += 1
        return value % below

    def some(self, most):
        return [self.draw(3) for _ in range(self.draw(most + 1))]

    def call(self):
        prompt = self.prompt() or [0]
        output = self.some(3)
        missing = self.draw(4) == 0
        log_probs = None if missing else [-(len(self.calls) + i / 8) for i in range(len(output))]
        return Call(prompt_ids=prompt, output_ids=output, log_probs=log_probs)

    def prompt(self):
        if not self.calls:
            return self.some(3)
        earlier = self.calls[self.draw(len(self.calls))]
        history = [*earlier.prompt_ids, *earlier.output_ids]
        kind, at = self.draw(8), self.draw(len(history))
        if kind == 0:
            return [*earlier.prompt_ids]
        if kind == 1:
            return history[: at + 1]
        if kind == 2:
            return history[at:]
        if kind == 3:
            return [*history[:at], *self.some(2), *history[at + 1 :], *self.some(2)]
        return [*history, *self.some(2)]

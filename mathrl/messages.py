"""From messages to calls, where the ids that were sampled were not recorded.

A conversation stored as messages says who played which part, not which ids a sampler saw. Its
calls can only be simulated: a chat template renders the messages before each answer as the prompt
would have been rendered, and the answer with its stop token as it would have been sampled. The
calls are marked as simulated and have no log-probabilities. What the next prompt makes of an
earlier answer is then compared by ids, like anything else.
"""

import inspect
import json
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, Protocol

from mathrl.trajectory import Call

Message = Mapping[str, Any]


class Tokenizer(Protocol):
    """Any object that turns text into ids and ids into text."""

    def encode(self, text: str) -> Sequence[int]:
        """Text to ids; special tokens written in the text become one id each."""

    def decode(self, ids: Sequence[int]) -> str:
        """Ids to text, special tokens included."""


class ChatTemplate:
    """A chat template in Jinja, rendered the way the `transformers` library renders it.

    Args:
        source: the template.
        variables: what the template reads besides messages, for example `bos_token` or
            `enable_thinking`.

    Raises:
        ValueError: the template does not compile, or it refuses its messages.

    Source: the environment that `transformers` documents for `apply_chat_template`.

    >>> template = ChatTemplate("{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}")
    >>> template([{"role": "user", "content": "2+3?"}])
    '[user]2+3?'
    """

    def __init__(self, source: str, **variables: Any) -> None:
        """Compile."""
        import jinja2
        from jinja2.ext import loopcontrols
        from jinja2.sandbox import ImmutableSandboxedEnvironment

        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols, _generation_tag()]
        )
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _refuse
        self._error: type[Exception] = jinja2.TemplateError
        self._variables = variables
        try:
            self._template = environment.from_string(source)
        except jinja2.TemplateError as error:
            raise ValueError(f"`source` is no template: {error}") from error

    def __call__(
        self,
        messages: Sequence[Message],
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = False,
    ) -> str:
        """Render; with `add_generation_prompt` the header of an answer follows."""
        try:
            return self._template.render(
                messages=messages,
                tools=tools,
                add_generation_prompt=add_generation_prompt,
                **self._variables,
            )
        except self._error as error:
            raise ValueError(f"the template refuses `messages`: {error}") from error


def calls_from_messages(
    messages: Sequence[Message],
    *,
    template: Callable[..., str],
    tokenizer: Tokenizer,
    stop: Sequence[str],
    tools: Sequence[Mapping[str, Any]] | None = None,
    sampled: Collection[int] | None = None,
) -> list[Call]:
    """Simulate the calls that would have produced the answers in a conversation.

    All tool results before an answer are rendered together with it, in one prompt, as a sampler
    would see them. Arguments of tool calls that are JSON text, as OpenAI's interface returns them,
    are parsed first, because that is what templates expect.

    Args:
        messages: OpenAI's form: `role`, `content`, and for tool calls `tool_calls`.
        template: a `ChatTemplate`, or a function of messages, tools and `add_generation_prompt`.
        tokenizer: encodes without adding tokens of its own: the template writes them already. An
            `encode` that takes `add_special_tokens` is called with False.
        stop: texts of the stop tokens. An answer ends with the last of them that it holds; what
            the template writes after is context.
        tools: what the template is to list.
        sampled: indices of the messages that the policy answered; default, every message with
            the role "assistant". A role does not make an author: few-shot answers are to be left
            out here.

    Returns:
        Calls in order, `simulated`, without log-probabilities.

    Raises:
        ValueError: a field of a message is wrong, a message in `sampled` is no answer, there is
            no answer, an answer is not found in what the template renders or holds no stop text,
            or the tokenizer adds tokens by itself.

    Source: derived in the book, chapter 10.

    >>> class Letters:
    ...     def encode(self, text):
    ...         return [ord(letter) for letter in text]
    ...     def decode(self, ids):
    ...         return "".join(map(chr, ids))
    >>> source = '''{% for m in messages %}{{ m.role[0] }}:{{ m.content }}.{% endfor %}
    ... {%- if add_generation_prompt %}a:{% endif %}'''
    >>> messages = [{"role": "user", "content": "2"}, {"role": "assistant", "content": "4"}]
    >>> [call] = calls_from_messages(messages, template=ChatTemplate(source),
    ...                              tokenizer=Letters(), stop=["."])
    >>> Letters().decode(call.prompt_ids), Letters().decode(call.output_ids)
    ('u:2.a:', '4.')
    """
    parsed = [_checked(at, message) for at, message in enumerate(messages)]
    answers = [at for at, message in enumerate(parsed) if message["role"] == "assistant"]
    wanted = answers if sampled is None else sorted(sampled)
    for at in wanted:
        if at not in answers:
            raise ValueError(f"`sampled` names messages[{at}], which is no answer")
    if not wanted:
        raise ValueError("`messages` hold no answer, so that there is nothing to train")
    encode = _encoder(tokenizer)
    calls = []
    for at in wanted:
        prompt = template(parsed[:at], tools=tools, add_generation_prompt=True)
        answer = _answer(template, parsed[: at + 1], tools, prompt, stop)
        ids = encode(prompt), encode(answer)
        calls.append(
            Call(prompt_ids=ids[0], output_ids=ids[1], finish_reason="stop", simulated=True)
        )
    return calls


def _answer(
    template: Callable[..., str],
    messages: Sequence[Message],
    tools: Sequence[Mapping[str, Any]] | None,
    prompt: str,
    stop: Sequence[str],
) -> str:
    """The text that a sampler returns for the last message, from the prompt to the stop."""
    at = len(messages) - 1
    whole = template(messages, tools=tools, add_generation_prompt=False)
    history = template(messages[:-1], tools=tools, add_generation_prompt=False)
    if whole.startswith(prompt):
        rest = whole[len(prompt) :]
    elif prompt.startswith(history) and (found := _after_header(whole, prompt[len(history) :])):
        rest = found
    else:
        raise ValueError(f"`messages[{at}]` is not rendered as an answer to its prompt")
    ends = [rest.rfind(text) + len(text) for text in stop if text in rest]
    if not ends:
        raise ValueError(f"`messages[{at}]` is rendered without any of `stop`, {[*stop]}")
    return rest[: max(ends)]


def _after_header(whole: str, header: str) -> str | None:
    """What follows the last header in a rendering that keeps only a part of the header.

    A template may write an empty reasoning block into the prompt and leave it out of the history.
    The parts end where a special token or a line ends, so that no letter of the answer that
    resembles the header is taken for it.
    """
    ends = [i + 1 for i, letter in enumerate(header) if letter in ">\n"]
    for end in sorted({*ends, len(header)} - {0}, reverse=True):
        start = whole.rfind(header[:end])
        if start >= 0:
            return whole[start + end :]
    return None


def _encoder(tokenizer: Tokenizer) -> Callable[[str], Sequence[int]]:
    encode: Callable[..., Sequence[int]] = tokenizer.encode
    if "add_special_tokens" in inspect.signature(encode).parameters:
        return lambda text: encode(text, add_special_tokens=False)
    if added := [*encode("")]:
        raise ValueError(
            f"`tokenizer` adds the ids {added} to an empty text; it must add nothing, "
            "because the template writes special tokens itself"
        )
    return encode


def _checked(at: int, message: Any) -> dict[str, Any]:
    """A message whose fields have their types, with the arguments of tool calls parsed."""
    name = f"messages[{at}]"
    if not isinstance(message, Mapping):
        raise ValueError(f"`{name}` must be an object, got {type(message).__name__}")
    if not isinstance(role := message.get("role"), str):
        raise ValueError(f"`{name}.role` must be text, got {role!r}")
    content = message.get("content")
    if content is not None and not isinstance(content, str | list):
        raise ValueError(f"`{name}.content` must be text, a list or null, got {content!r}")
    result = dict(message)
    if (tool_calls := message.get("tool_calls")) is not None:
        if not isinstance(tool_calls, list):
            raise ValueError(f"`{name}.tool_calls` must be a list, got {tool_calls!r}")
        result["tool_calls"] = [
            _tool_call(f"{name}.tool_calls[{i}]", call) for i, call in enumerate(tool_calls)
        ]
    return result


def _tool_call(name: str, call: Any) -> dict[str, Any]:
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise ValueError(f"`{name}.function` must be an object with a name, got {function!r}")
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments)
        except ValueError as error:
            raise ValueError(f"`{name}.function.arguments` is no JSON: {error}") from error
    return {**call, "function": {**function, "arguments": arguments}}


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _refuse(message: str) -> None:
    import jinja2

    raise jinja2.TemplateError(message)


def _generation_tag() -> Any:
    """The tag with which a template marks an answer. It changes nothing in what is rendered."""
    from jinja2 import nodes
    from jinja2.ext import Extension

    class Generation(Extension):
        tags = {"generation"}  # noqa: RUF012

        def parse(self, parser: Any) -> Any:
            line = next(parser.stream).lineno
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            call = self.call_method("_inside")
            return nodes.CallBlock(call, [], [], body).set_lineno(line)

        def _inside(self, caller: Callable[[], str]) -> str:
            return caller()

    return Generation

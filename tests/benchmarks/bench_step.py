"""One policy-gradient step of this book's loop beside TRL's GRPOTrainer, and what makes it cheap.

A step is 20 prompts with 8 samples each: sample, pay, update. Everything runs in float32 on one
thread of a CPU, from networks of equal width, depth and heads, with a leave-one-out or group-mean
baseline, and no divergence:

- `tree`: `train.reinforce` with `TreeRollouts`, one pass that samples and reads;
- `tokens`: the same loop with `TokenRollouts`, token by token with a cache, then read again;
- `tree_kl`, `tokens_kl`: both with the exact divergence from a reference in the loss, for which
  `tokens_kl` reads the ten prefixes of each prompt, each as a sequence of its own;
- `tree_gpt2`, `tokens_gpt2`: the same loop on the network that TRL trains, without its cache;
- `trl`: GRPOTrainer, tuned: no checkpointing, no logging, the same tokens allowed, with its cache.

The ways take turns within one process. TRL's trainer runs once; whenever it has taken as many
steps as make a round, its callback stops its clock and lets the others run.

The second part compares the prefix tree with scoring the ten prefixes or all 100 responses of each
prompt, and sampling with a cache with sampling without, over growing width, depth and size of a
group. The third times 20 supervised updates and 300 steps. Run it as README.md says.
"""

import argparse
import functools
import logging
import os
import statistics
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from unittest.mock import patch

import torch
from torch import Tensor, nn

from mathrl import _sources, arithmetic, evaluate, evidence, experiments, rollout
from mathrl.config import ReinforceConfig, SupervisedConfig
from mathrl.decoder import Decoder, DecoderConfig
from mathrl.problem import Problem, arithmetic_problem
from mathrl.responses import enumerate_all, sample, score
from mathrl.rollout import Rollouts, TokenRollouts, TreeRollouts
from mathrl.train import reinforce, supervise

ROOT = Path(__file__).parents[2]
SEED = 0
GROUP, PER_ROUND = 8, 20
RUNS = 5
SMALL = DecoderConfig(width=8, heads=2, depth=1)
EXPECTED_TOKENS = 3
"""Two digits and the token that ends."""


# ---------------------------------------------------------------- the ways of one step


def tree(problem: Problem) -> Rollouts:
    return TreeRollouts(problem)


def tokens(problem: Problem) -> Rollouts:
    def pay(rows: Tensor, written: Tensor, mask: Tensor) -> Tensor:
        return (written == problem.targets[rows, None]).all(-1).float()

    return TokenRollouts(problem.prompts, problem.grammar, pay)


class Gpt2(nn.Module):
    """The network that TRL trains, called as a `Decoder` is."""

    def __init__(self, model: nn.Module, config: DecoderConfig) -> None:
        super().__init__()
        self.model, self.config = model, config

    def forward(
        self, tokens: Tensor, positions: Tensor | None = None, mask: Tensor | None = None
    ) -> Tensor:
        seen = None
        if mask is not None:
            seen = mask.expand(len(tokens), 1, *mask.shape)  # (B, 1, T, S)
        places = None if positions is None else positions.expand(len(tokens), -1)
        answer = self.model(tokens, attention_mask=seen, position_ids=places, use_cache=False)
        logits: Tensor = answer.logits
        return logits


class UncachedRollouts(TokenRollouts):
    """Token by token without a cache, which `Gpt2` does not have."""

    def sample(self, *arguments):
        with patch.object(rollout, "sample", functools.partial(sample, cached=False)):
            return super().sample(*arguments)


class EnumeratedRollouts(TokenRollouts):
    """Token by token, and the distribution over all responses from the prefixes."""

    def _read(self, model, rows, *given):
        reading = super()._read(model, rows, *given)
        return reading._replace(joint=every_prefix(model, self.prompts[rows]))


def enumerated_tokens(problem: Problem) -> Rollouts:
    cached = tokens(problem)
    assert isinstance(cached, TokenRollouts)
    return EnumeratedRollouts(cached.prompts, cached.grammar, cached.reward)


def uncached_tokens(problem: Problem) -> Rollouts:
    cached = tokens(problem)
    assert isinstance(cached, TokenRollouts)
    return UncachedRollouts(cached.prompts, cached.grammar, cached.reward)


def gpt2(config: DecoderConfig) -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(SEED)
    return GPT2LMHeadModel(GPT2Config(
        vocab_size=config.vocab_size, n_positions=config.context_length, n_embd=config.width,
        n_layer=config.depth, n_head=config.heads, n_inner=config.mlp_ratio * config.width,
        resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, tie_word_embeddings=config.tied,
        bos_token_id=arithmetic.BOS, eos_token_id=arithmetic.EOS, attn_implementation="eager",
    ))  # fmt: skip


def our_steps(name: str, config: DecoderConfig) -> Callable[[], None]:
    """A function that takes the steps of one round, from where the last one ended."""
    problem = arithmetic_problem(arithmetic.TRAIN)
    make, network = {
        "tree": (tree, Decoder),
        "tokens": (tokens, Decoder),
        "tree_kl": (tree, Decoder),
        "tokens_kl": (enumerated_tokens, Decoder),
        "tree_gpt2": (tree, lambda c: Gpt2(gpt2(c), c)),
        "tokens_gpt2": (uncached_tokens, lambda c: Gpt2(gpt2(c), c)),
    }[name]
    model, rollouts = network(config), make(problem)
    settings = ReinforceConfig(steps=PER_ROUND, group_size=GROUP, seed=SEED)
    reference = network(config) if name.endswith("_kl") else None
    if reference:
        settings = replace(settings, beta=0.02)

    def steps() -> None:
        reinforce(model, rollouts, settings, reference=reference, show=False)

    return steps


# ---------------------------------------------------------------- TRL


def tokenizer():
    from tokenizers import Regex, Tokenizer, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    words = [*map(str, range(10)), "+", "=", "<bos>", "<eos>"]
    made = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, "<eos>"))
    made.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    bos = ("<bos>", arithmetic.BOS)
    made.post_processor = processors.TemplateProcessing("<bos> $A", special_tokens=[bos])
    return PreTrainedTokenizerFast(
        tokenizer_object=made, bos_token="<bos>", eos_token="<eos>", pad_token="<eos>"
    )


def trl_trainer(config: DecoderConfig, steps: int, place: str):
    from datasets import Dataset
    from transformers import LogitsProcessorList
    from trl import GRPOConfig, GRPOTrainer

    grammar = arithmetic_problem(arithmetic.TRAIN).grammar
    words = tokenizer()
    rows = [{"prompt": f"{a}+{b}=", "a": a, "b": b} for a, b in arithmetic.TRAIN]
    for row, prompt in zip(rows, map(arithmetic.encode, arithmetic.TRAIN), strict=True):
        assert words(row["prompt"])["input_ids"] == prompt
    forbidden = torch.full((grammar.length, config.vocab_size), -torch.inf)
    for t, allowed in enumerate(grammar.steps):
        forbidden[t, list(allowed)] = 0.0
    start = len(arithmetic.encode(arithmetic.TRAIN[0]))
    allow = LogitsProcessorList([lambda ids, scores: scores + forbidden[ids.shape[1] - start]])

    def pay(completion_ids, a, b, **_):
        tasks = zip(a, b, completion_ids, strict=True)
        return [float(arithmetic.verify((x, y), list(ids))["reward"]) for x, y, ids in tasks]

    model = gpt2(config)
    generate = model.generate
    model.generate = lambda *given, **named: generate(*given, logits_processor=allow, **named)
    batch = len(rows) * GROUP
    settings = GRPOConfig(
        output_dir=place, per_device_train_batch_size=batch, num_generations=GROUP,
        max_completion_length=grammar.length, max_steps=steps, beta=0.0, learning_rate=1e-3,
        adam_beta2=0.99, max_grad_norm=1.0, optim="adamw_torch_fused", lr_scheduler_type="constant",
        gradient_checkpointing=False, bf16=False, fp16=False, use_cpu=True, report_to="none",
        logging_strategy="no", save_strategy="no", disable_tqdm=True, scale_rewards="none",
        temperature=1.0, top_k=0, seed=SEED, dataloader_pin_memory=False,
    )  # fmt: skip
    return GRPOTrainer(model, pay, args=settings, train_dataset=Dataset.from_list(rows),
                       processing_class=words)  # fmt: skip


# ---------------------------------------------------------------- turns

Clock = dict[str, list[float]]


class Stopwatch:
    """Adds up wall and processor seconds of the parts of one round."""

    def __init__(self) -> None:
        self.rounds: Clock = {"wall": [], "cpu": []}
        self.start()

    def start(self) -> None:
        self.began = time.perf_counter(), time.process_time()

    def stop(self, steps: int) -> None:
        for clock, began, now in zip(
            self.rounds, self.began, (time.perf_counter(), time.process_time()), strict=True
        ):
            self.rounds[clock].append((now - began) / steps)


def steps_by_turns(config: DecoderConfig, rounds: int) -> dict[str, Clock]:
    """Seconds of one step in each round; the first round, in which all warm up, is left out."""
    from transformers import TrainerCallback

    names = ["tree", "tokens", "tree_kl", "tokens_kl", "tree_gpt2", "tokens_gpt2"]
    ours = {name: our_steps(name, config) for name in names}
    watches = {name: Stopwatch() for name in [*names, "trl"]}

    class Turns(TrainerCallback):
        def on_step_end(self, args, state, control, **_):
            if state.global_step % PER_ROUND:
                return
            watches["trl"].stop(PER_ROUND)
            shift = state.global_step // PER_ROUND % len(names)
            for name in names[shift:] + names[:shift]:
                watches[name].start()
                ours[name]()
                watches[name].stop(PER_ROUND)
            done = state.global_step // PER_ROUND
            print(f"round {done} of {rounds + 1}", file=sys.stderr, flush=True)
            watches["trl"].start()

    with tempfile.TemporaryDirectory() as place:
        trainer = trl_trainer(config, PER_ROUND * (rounds + 1), place)
        trainer.add_callback(Turns())
        watches["trl"].start()
        trainer.train()
    return {
        name: {clock: taken[1:] for clock, taken in watch.rounds.items()}
        for name, watch in watches.items()
    }


def extra_memory(name: str, config: DecoderConfig) -> int:
    """Bytes by which the steps of one round raise the highest resident size of this process."""

    def steps(config: DecoderConfig, place: str) -> Callable[[], object]:
        return (
            trl_trainer(config, PER_ROUND, place).train
            if name == "trl"
            else our_steps(name, config)
        )

    with tempfile.TemporaryDirectory() as place:
        steps(SMALL, place)()  # what libraries set up at their first call is not counted
        run = steps(config, place)
        Path("/proc/self/clear_refs").write_text("5")  # from here on the peak is counted anew
        before = resident("VmRSS")
        run()
    return resident("VmHWM") - before


def resident(field: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(field))


def memory_apart(name: str) -> float:
    command = [sys.executable, __file__, "--memory-of", name]
    ran = subprocess.run(command, check=True, capture_output=True, text=True)
    return int(ran.stdout.splitlines()[-1]) / 1e6


# ---------------------------------------------------------------- what makes it cheap


def every_prefix(model: Decoder, prompts: Tensor) -> Tensor:
    """Log-probabilities of all responses from a sequence for each first digit: (B, N)."""
    digits = torch.arange(10)
    rows = torch.cat([prompts.repeat_interleave(10, 0), digits.repeat(len(prompts))[:, None]], 1)
    log_probs = model(rows)[:, -2:, :10].log_softmax(-1).view(-1, 10, 2, 10)  # (B, u, 2, v)
    first, second = log_probs[:, 0, 0], log_probs[:, :, 1]  # (B, u), (B, u, v)
    return (first[:, :, None] + second).flatten(1)


def every_response(model: Decoder, problem: Problem) -> Tensor:
    """Log-probabilities of all responses, each as a whole sequence: (B, N)."""
    written = torch.tensor(problem.grammar.responses())  # (N, T)
    prompts = problem.prompts.repeat_interleave(len(written), 0)
    chosen = score(model, prompts, written.repeat(len(problem.prompts), 1), problem.grammar)
    return chosen.sum(-1).view(len(problem.prompts), -1)


def by_turns(ways: dict[str, Callable[[], object]], rounds: int) -> dict[str, Clock]:
    """Seconds of each way in each round, after one to warm up."""
    watches = {name: Stopwatch() for name in ways}
    for turn in range(rounds + 1):
        for name, way in ways.items():
            watches[name].start()
            way()
            watches[name].stop(1)
        if turn == 0:
            for watch in watches.values():
                watch.rounds = {"wall": [], "cpu": []}
    return {name: watch.rounds for name, watch in watches.items()}


GROWING = {
    "bench": ({}, 8),
    "width_96": ({"width": 96}, 8),
    "width_192": ({"width": 192}, 8),
    "depth_4": ({"depth": 4}, 8),
    "depth_8": ({"depth": 8}, 8),
    "group_32": ({}, 32),
    "group_128": ({}, 128),
}


def compare(sizes: dict[str, int], group: int, rounds: int) -> dict[str, object]:
    """The prefix tree against whole sequences, forward and backward, and a cache against none."""
    problem, model = arithmetic_problem(arithmetic.TRAIN), Decoder(DecoderConfig(**sizes))
    rewards = problem.rewards

    def ascend(joint: Tensor) -> None:
        model.zero_grad()
        (joint.exp() * rewards).sum().backward()

    ways: dict[str, Callable[[], object]] = {
        "tree": lambda: ascend(enumerate_all(model, problem.prompts, problem.grammar).joint),
        "prefixes": lambda: ascend(every_prefix(model, problem.prompts)),
        "sequences": lambda: ascend(every_response(model, problem)),
    }
    with torch.no_grad():
        joint = enumerate_all(model, problem.prompts, problem.grammar).joint
        for other in (every_prefix(model, problem.prompts), every_response(model, problem)):
            assert (joint - other).abs().max() < 1e-5
    uniforms = torch.rand(len(problem.prompts), group, EXPECTED_TOKENS, dtype=torch.float64,
                          generator=torch.Generator().manual_seed(SEED))  # fmt: skip
    drawn = (model, problem.prompts, problem.grammar, uniforms)
    ways |= {"cached": lambda: sample(*drawn), "uncached": lambda: sample(*drawn, cached=False)}
    taken = by_turns(ways, rounds)
    return {
        "seconds": seconds(taken),
        "tree_times_faster": {
            name: ratio(taken[name], taken["tree"]) for name in ("prefixes", "sequences")
        },
        "cache_times_faster": ratio(taken["uncached"], taken["cached"]),
    }  # fmt: skip


def from_nothing(rounds: int) -> dict[str, object]:
    """Seconds of the bench: 20 supervised updates, 200 and 300 steps, and until 0.99 is reached."""
    found: dict[str, list[float]] = {"supervised": [], "steps_200": [], "to_099": [], "success": []}
    for seed in range(rounds):
        problem, model = arithmetic_problem(arithmetic.TRAIN), Decoder(DecoderConfig(), seed=seed)
        began = time.perf_counter()
        data = problem.prompts, problem.targets, problem.grammar
        supervise(model, *data, SupervisedConfig(seed=seed), show=False)
        found["supervised"].append(time.perf_counter() - began)
        moments: list[tuple[int, float, float]] = []

        def measure(moments=moments, model=model, problem=problem, began=began):
            mean = evaluate.value(model, problem).mean().item()
            moments.append((len(moments), mean, time.perf_counter() - began))
            return {"success": mean}

        settings = ReinforceConfig(seed=seed)
        reinforce(model, TreeRollouts(problem), settings, measure=measure, show=False)
        found["steps_200"].append(moments[19][2] - found["supervised"][-1])
        reached = [seconds for _, mean, seconds in moments if mean >= 0.99]
        found["to_099"].append(reached[0] if reached else float("inf"))
        found["success"].append(moments[-1][1])
    return {name: spread(values) for name, values in found.items()}


# ---------------------------------------------------------------- the record


def spread(values: list[float]) -> dict[str, object]:
    low, high = min(values), max(values)
    return {"median": statistics.median(values), "low": low, "high": high, "all": values}


def seconds(taken: dict[str, Clock]) -> dict[str, object]:
    return {name: {c: spread(s) for c, s in clocks.items()} for name, clocks in taken.items()}


def ratio(slow: Clock, fast: Clock) -> dict[str, object]:
    """Of the same round, so that what slows a round down cancels."""
    return {
        clock: spread([a / b for a, b in zip(slow[clock], fast[clock], strict=True)])
        for clock in ("wall", "cpu")
    }


def main() -> None:
    parser = argparse.ArgumentParser(description="a policy-gradient step beside TRL's")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--output", type=Path, default=ROOT / "docs/evidence/step-benchmark.json")
    parser.add_argument("--memory-of", help=argparse.SUPPRESS)
    options = parser.parse_args()
    torch.set_num_threads(1)
    logging.disable(logging.WARNING)
    warnings.simplefilter("ignore")
    config = DecoderConfig()
    if options.memory_of:
        print(extra_memory(options.memory_of, config))
        return
    began = time.perf_counter()
    taken = steps_by_turns(config, options.rounds)
    metrics = {
        "seconds": seconds(taken),
        "milliseconds_of_a_step": {
            name: 1e3 * statistics.median(clocks["cpu"]) for name, clocks in taken.items()
        },
        "times_faster_than_trl": {name: ratio(taken["trl"], taken[name]) for name in taken},
        "tree_times_faster": {
            "tokens": ratio(taken["tokens"], taken["tree"]),
            "tokens_kl": ratio(taken["tokens_kl"], taken["tree_kl"]),
        },
        "extra_megabytes": {name: memory_apart(name) for name in taken},
        "growing": {
            name: compare(sizes, group, options.rounds) for name, (sizes, group) in GROWING.items()
        },
        "from_nothing": from_nothing(RUNS),
        "parameters": {
            "mathrl": sum(p.numel() for p in Decoder(config).parameters()),
            "gpt2": sum(p.numel() for p in gpt2(config).parameters()),
        },
    }  # fmt: skip
    sources = _sources.hashes(ROOT / "mathrl/train.py")
    sources = {
        name: digest for name, digest in sources.items() if name not in experiments.RECORDING
    }
    sources["tests/benchmarks/bench_step.py"] = evidence.sha256(Path(__file__).read_bytes())
    stated = {"prompts": len(arithmetic.TRAIN), "group_size": GROUP, "rounds": options.rounds,
              "steps_of_a_round": PER_ROUND,
        "runs_from_nothing": RUNS, "dtype": "float32", "device": "cpu",
              "trl": version("trl"), "transformers": version("transformers"),
              "cores": os.cpu_count()}  # fmt: skip
    recorded = evidence.manifest("step-benchmark", stated, [SEED], metrics, {},
                                 time.perf_counter() - began, sources)  # fmt: skip
    evidence.write_manifest(options.output, recorded)
    for name in taken:
        wall, cpu = (statistics.median(taken[name][clock]) for clock in ("wall", "cpu"))
        times = metrics["times_faster_than_trl"][name]["cpu"]["median"]
        megabytes = metrics["extra_megabytes"][name]
        print(f"{name:12} {1e3 * wall:7.1f} ms wall {1e3 * cpu:7.1f} ms cpu {times:5.1f}x "
              f"{megabytes:6.0f} MB")  # fmt: skip


if __name__ == "__main__":
    main()

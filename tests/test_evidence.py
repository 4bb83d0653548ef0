"""The chain of evidence: what is written comes back, and nothing that was changed is accepted."""

import hashlib
import json
import math
import os
import random
import subprocess
import sys
import threading
import types
import warnings
from collections import Counter
from pathlib import Path
from unittest.mock import patch

import numpy as np
import pytest
import safetensors.torch
import torch

import evidence as book_hook
from mathrl import arithmetic, evidence
from mathrl._sources import ROOT
from mathrl.decoder import Decoder, DecoderConfig
from tests.mutants import assert_caught
from tests.oracles import refuses

SMALL = {"width": 8, "heads": 2, "depth": 1}
RUN = {
    "name": "trial",
    "config": {"arm": {"steps": 2, "betas": (0.9, 0.99), "clip": None}},
    "seeds": [0, 1],
    "metrics": {"runs": [{"success": 0.5, "step": 3}], "summary": {"arm": {"success": 0.5}}},
    "checkpoints": {"arm-0.safetensors": "ab" * 32},
    "seconds": 1.5,
    "sources": {"mathrl/arithmetic.py": evidence.sha256(b"")},
}


def network(seed=0, dtype=torch.float32, **sizes):
    """A decoder whose every parameter is random, norms and biases too."""
    model = Decoder(DecoderConfig(**SMALL, **sizes)).to(dtype)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator))
    return model


def refused(module, words, function, *arguments):
    refuses(module.EvidenceError, words, function, *arguments)


def bits(tensor):
    return tensor.detach().flatten().contiguous().view(torch.uint8).numpy().tobytes()


# ---------------------------------------------------------------- writing


def check_a_new_file_takes_the_place_of_the_old(module, folder):
    """A second name of the old file still holds the old bytes: nothing was written into it."""
    path, other = folder / "deep" / "er" / "file", folder / "other"
    module.write_atomically(path, b"old")
    os.link(path, other)
    module.write_atomically(path, b"new and longer")
    assert (path.read_bytes(), other.read_bytes()) == (b"new and longer", b"old")
    assert [p.name for p in path.parent.iterdir()] == ["file"]


def check_it_is_on_disk_before_it_has_its_name(module, folder):
    """First the content is synced, then the name changes, then the folder is synced."""
    path, events = folder / "file", []
    kinds = {True: "folder", False: "file"}

    def fsync(handle):
        events.append(kinds[os.path.isdir(f"/proc/self/fd/{handle}")])
        if events == ["file"]:
            assert os.fstat(handle).st_size == 4, "synced before it was flushed"

    true = Path.replace

    def replace(self, target):
        events.append("name")
        return true(self, target)

    with patch.object(os, "fsync", fsync), patch.object(Path, "replace", replace):
        module.write_atomically(path, b"data")
    assert events == ["file", "name", "folder"]


def check_a_failure_leaves_the_old_file(module, folder):
    path = folder / "file"
    module.write_atomically(path, b"old")
    for error in (OSError("disk full"), KeyboardInterrupt()):
        caught = None
        with patch.object(os, "fsync", side_effect=error):
            try:
                module.write_atomically(path, b"new")
            except BaseException as problem:
                caught = problem
        assert caught is error
        assert path.read_bytes() == b"old"
        assert [p.name for p in folder.iterdir()] == ["file"]


WRITES = [
    check_a_new_file_takes_the_place_of_the_old,
    check_it_is_on_disk_before_it_has_its_name,
    check_a_failure_leaves_the_old_file,
]


@pytest.mark.parametrize("check", WRITES)
def test_writing(check, tmp_path):
    check(evidence, tmp_path)


def test_a_file_gets_the_rights_of_any_new_file(tmp_path):
    (tmp_path / "plain").touch()
    evidence.write_atomically(tmp_path / "file", b"")
    assert (tmp_path / "file").stat().st_mode == (tmp_path / "plain").stat().st_mode


def test_writers_and_readers_at_once(tmp_path):
    path, contents = tmp_path / "file", [bytes([n]) * (1000 * n + 1) for n in range(4)]
    path.write_bytes(contents[0])
    torn = []

    def write(content):
        for _ in range(20):
            evidence.write_atomically(path, content)
            if path.read_bytes() not in contents:
                torn.append(content)

    threads = [threading.Thread(target=write, args=(content,)) for content in contents]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert torn == []
    assert [p.name for p in tmp_path.iterdir()] == ["file"]


KILLS = """
import json, os, random, signal, sys, time
from pathlib import Path
from mathrl.evidence import write_atomically

def wrong_in_place(path, data):
    path.write_bytes(data)

contents = [bytes([n]) * (300_000 * n + 1) for n in range(5)]
moments, torn = random.Random(0), {}
for write in (write_atomically, wrong_in_place):
    path = Path(sys.argv[1]) / write.__name__
    path.write_bytes(contents[0])
    torn[write.__name__] = 0
    for _ in range(50):
        child = os.fork()
        if child == 0:
            while True:
                for content in contents:
                    write(path, content)
        time.sleep(moments.uniform(0, 0.02))
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        torn[write.__name__] += path.read_bytes() not in contents
print(json.dumps(torn))
"""


@pytest.mark.claim("8.3", "enumeration")
def test_killed_at_any_moment_the_file_is_the_old_or_the_new_one(tmp_path):
    """50 kills each; the same kills tear the file of a writer that writes in place."""
    command = [sys.executable, "-c", KILLS, str(tmp_path)]
    result = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    assert result.returncode == 0, result.stderr
    torn = json.loads(result.stdout)
    assert torn["write_atomically"] == 0
    assert torn["wrong_in_place"] > 0
    left = [path.name for path in tmp_path.iterdir()]
    assert all(n in torn or (n.startswith(".") and n.endswith(".partial")) for n in left)


# ---------------------------------------------------------------- checkpoints

MODELS = {
    "float32": {},
    "float64": {"dtype": torch.float64},
    "bfloat16": {"dtype": torch.bfloat16},
    "tied": {"tied": True},
    "deep": {"mlp_ratio": 2, "context_length": 5},
}


def check_round_trip(module, folder):
    """Every parameter comes back to the last bit, of its type, and is written alike again."""
    for name, options in MODELS.items():
        model = network(**options)
        digest = module.save_checkpoint(model, folder / name)
        data = (folder / name).read_bytes()
        assert digest == hashlib.sha256(data).hexdigest()
        loaded = module.load_checkpoint(folder / name, digest)
        assert loaded.config == model.config
        state = loaded.state_dict()
        assert state.keys() == model.state_dict().keys()
        for key, tensor in model.state_dict().items():
            assert state[key].dtype == tensor.dtype, name
            assert bits(state[key]) == bits(tensor), (name, key)
        assert (loaded.head.weight is loaded.token_embedding.weight) == model.config.tied
        assert module.checkpoint_bytes(loaded) == data


def check_odd_values(module, folder):
    """NaN with its payload, infinities, zero with a sign: a record does not judge."""
    model = network()
    odd = np.array([0x7FC00123, 0xFF800000, 0x80000000, 0x00000001], dtype=np.uint32)
    with torch.no_grad():
        model.norm.bias[:4] = torch.from_numpy(odd.view(np.float32))
    module.save_checkpoint(model, folder / "odd")
    loaded = module.load_checkpoint(folder / "odd")
    assert loaded.norm.bias[:4].detach().numpy().view(np.uint32).tolist() == odd.tolist()


def check_format(module, folder):
    """Read by hand: 8 bytes of length, a JSON header, little-endian numbers; tied weights once."""
    model = network(tied=True)
    data = module.checkpoint_bytes(model)
    size = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + size])
    metadata = json.loads(header.pop("__metadata__")["mathrl"])
    assert metadata["contract"] == arithmetic.digest()
    assert DecoderConfig(**metadata["config"]) == model.config
    state = model.state_dict()
    assert header.keys() == state.keys() - {"head.weight"}
    for name, entry in header.items():
        start, stop = (8 + size + offset for offset in entry["data_offsets"])
        numbers = np.frombuffer(data[start:stop], "<f4").reshape(entry["shape"])
        assert (entry["dtype"], numbers.tolist()) == ("F32", state[name].tolist())
    assert len(data) == 8 + size + 4 * sum(p.numel() for p in model.parameters())


def check_swapped(module, folder):
    """Each file is whole; only the manifest knows which is which."""
    one, two = (module.save_checkpoint(network(seed), folder / f"{seed}") for seed in (1, 2))
    for file, digest in (("1", two), ("2", one)):
        refused(module, "^checkpoint .: .* not the one of the manifest",
                module.load_checkpoint, folder / file, digest)  # fmt: skip
        module.load_checkpoint(folder / file)


def resealed(data, change):
    """The bytes with a change to metadata and tensors, and every hash made anew."""
    stated, tensors = evidence._unpacked(data)
    change(stated, tensors)
    return evidence._packed(stated, tensors)


def double(stated, tensors):
    tensors["norm.bias"] *= 2


def check_a_forger_who_knows_the_hash(module, folder):
    """Whoever writes the hash anew is found out only by a manifest that he does not hold."""
    path = folder / "forged"
    digest = module.save_checkpoint(network(), path)
    path.write_bytes(resealed(path.read_bytes(), double))
    refused(module, "not the one of the manifest", module.load_checkpoint, path, digest)
    assert torch.equal(module.load_checkpoint(path).norm.bias, 2 * network().norm.bias)


SEALED = [  # what is whole and still no checkpoint of this package
    (lambda stated, tensors: stated.update(contract="c" * 64), "^contract: checkpoint x is of ccc"),
    (lambda stated, tensors: stated.update(contract=7), "^contract: checkpoint x is of 7"),
    (lambda stated, tensors: stated.update(schema=2), "^checkpoint x: schema 2, this package"),
    (lambda stated, tensors: stated["config"].update(width=16), "^checkpoint x: .*size mismatch"),
    (lambda stated, tensors: stated["config"].update(heads=3), "^checkpoint x: .*`width`"),
    (lambda stated, tensors: stated["config"].update(depth="1"), "^checkpoint x: .*TypeError"),
    (lambda stated, tensors: stated["config"].update(color=1), "^checkpoint x: .*color"),
    (lambda stated, tensors: stated.pop("config"), "^checkpoint x: .*KeyError"),
    (lambda stated, tensors: tensors.clear(), "^checkpoint x: cannot be read"),
    (lambda stated, tensors: tensors.pop("norm.bias"), "^checkpoint x: .*norm.bias"),
    (lambda stated, tensors: tensors.update(extra=torch.ones(1)), "^checkpoint x: .*extra"),
]


def check_sealed(module, folder):
    path = folder / "x"
    for change, words in SEALED:
        module.save_checkpoint(network(), path)
        path.write_bytes(resealed(path.read_bytes(), change))
        refused(module, words, module.load_checkpoint, path)


def respelled(data, change):
    """The bytes with a header of the same meaning that is written otherwise."""
    size = int.from_bytes(data[:8], "little")
    header = change(data[8 : 8 + size])
    return len(header).to_bytes(8, "little") + header + data[8 + size :]


def reordered(header):
    turned = dict(reversed(json.loads(header).items()))
    return json.dumps(turned).encode().ljust(len(header) + 64)


FORMS = [
    lambda data: b"",
    lambda data: data[:-1],
    lambda data: data[:100],
    lambda data: data + b"\0",
    lambda data: respelled(data, lambda header: header + b" " * 8),
    lambda data: respelled(data, lambda header: header.rstrip() + b"\n" * 4),
    lambda data: respelled(data, reordered),
    lambda data: respelled(data, lambda header: header.replace(b'depth\\":1', b'depth\\":1.0')),
    lambda data: respelled(data, lambda header: header.replace(b'"mathrl"', b'"a":"","mathrl"')),
    lambda data: data.replace(arithmetic.digest().encode(), b"c" * 64),
    lambda data: data.replace(b'schema\\":1', b'schema\\":2'),
    lambda data: respelled(data, lambda header: b"[" * 100_000),
    lambda data: (2**63).to_bytes(8, "little") + data[8:],
    lambda data: safetensors.torch.save({"weight": torch.ones(3)}),
    lambda data: b"PK\x03\x04 a pickle would run code",
]  # fmt: skip


def check_other_forms(module, folder):
    path = folder / "x"
    for form in FORMS:
        path.write_bytes(form(module.checkpoint_bytes(network())))
        refused(module, "^checkpoint x: ", module.load_checkpoint, path)


def check_one_type(module, folder):
    model = network()
    model.norm.double()
    refuses(ValueError, "`model` must have parameters of one type", module.checkpoint_bytes, model)


CHECKPOINTS = [check_round_trip, check_odd_values, check_format, check_swapped, check_sealed,
               check_a_forger_who_knows_the_hash, check_other_forms, check_one_type]  # fmt: skip


@pytest.mark.claim("8.1", "enumeration")
@pytest.mark.parametrize("check", CHECKPOINTS)
def test_checkpoint(check, tmp_path):
    check(evidence, tmp_path)


def test_a_file_that_is_not_there_is_no_tampering(tmp_path):
    refuses(FileNotFoundError, "nothing", evidence.load_checkpoint, tmp_path / "nothing")
    refuses(FileNotFoundError, "nothing", evidence.read_manifest, tmp_path / "nothing")


# ---------------------------------------------------------------- manifests


def check_a_manifest_comes_back(module, folder):
    recorded = module.manifest(**RUN)
    module.write_manifest(folder / "x", recorded)
    returned = module.read_manifest(folder / "x")
    digest = returned.pop("digest")
    assert returned == recorded, "in memory and on disk they are the same"
    assert recorded["config"]["arm"]["betas"] == [0.9, 0.99]
    assert recorded["contract"] == arithmetic.digest()
    body = json.dumps(recorded, sort_keys=True, separators=(",", ":")).encode()
    assert digest == hashlib.sha256(body).hexdigest()
    module.write_manifest(folder / "y", {**recorded, "digest": digest})
    assert (folder / "x").read_bytes() == (folder / "y").read_bytes()


def check_only_plain_numbers(module, folder):
    for number in (math.nan, math.inf):
        refuses(ValueError, "JSON compliant", module.manifest, **{**RUN, "metrics": {"x": number}})
    refuses(TypeError, "Tensor", module.manifest, **{**RUN, "metrics": {"x": torch.ones(1)}})


def check_other_manifests(module, folder):
    path = folder / "x"
    recorded = module.manifest(**RUN)
    module.write_manifest(path, recorded)
    text = path.read_text()
    respellings = [
        text.replace("\n", "\n\n", 1), text.replace('"step": 3', '"step": 3.0'), text + " ",
        text[:-1], text.replace("{", '{"name": "trial",', 1), json.dumps(json.loads(text)), "",
        "[]", "3", "null", '"text"', "{}", "[" * 100_000, text.replace("0.5", "NaN"),
        text.replace('"step": 3', '"step": ' + "3" * 5000), text.replace("ab", "cd"),
    ]  # fmt: skip
    for form in [*(form.encode() for form in respellings), text.encode("utf-16"), b"\xff" * 9]:
        path.write_bytes(form)
        refused(module, "^manifest x: ", module.read_manifest, path)
    for change, words in (
        ({"contract": "c" * 64}, "^contract: manifest x is of cccccccccccc, this package holds "),
        ({"contract": None}, "^contract: manifest x is of None"),
        ({"schema": 0}, "^manifest x: schema 0, this package reads 1"),
    ):
        module.write_manifest(path, {**recorded, **change})
        refused(module, words, module.read_manifest, path)
    for field in recorded:
        module.write_manifest(path, {k: v for k, v in recorded.items() if k != field})
        refused(module, f"^manifest x: lacks {field}", module.read_manifest, path)


def check_sources(module, folder):
    (folder / "same.py").write_bytes(b"same")
    (folder / "other.py").write_bytes(b"now")
    names = {"same.py": b"same", "other.py": b"then", "gone.py": b"gone"}
    sources = {name: hashlib.sha256(data).hexdigest() for name, data in names.items()}
    recorded = module.manifest(**{**RUN, "sources": sources})
    assert module.changed_sources(recorded, folder) == ["gone.py", "other.py"]


def variant(recorded, *path, value):
    """The manifest with one entry replaced."""
    head, *rest = path
    inner = variant(recorded[head], *rest, value=value) if rest else value
    if isinstance(recorded, list):
        return [*recorded[:head], inner, *recorded[head + 1 :]]
    return {**recorded, head: inner}


SUCCESS = ("metrics", "runs", 0, "success")
DIFFERENCES = [  # changes to the repeated run, and the lines that name them
    ([(("seconds",), 9.0)], []),
    ([(("sources",), {})], []),
    ([(SUCCESS, 0.5000000000000001)], ["metrics.runs.0.success: 0.5 became 0.5000000000000001"]),
    ([(SUCCESS, "0.5")], ["metrics.runs.0.success: 0.5 became 0.5"]),
    ([(("metrics", "runs", 0, "step"), 3.0)], ["metrics.runs.0.step: 3 became 3.0"]),
    ([(("metrics", "runs"), [])], ["metrics.runs: [{'step': 3, 'success': 0.5}] became []"]),
    ([(("metrics", "more"), 1)], ["metrics.more: is new"]),
    ([(("checkpoints",), {})], ["checkpoints.arm-0.safetensors: is gone"]),
    ([(("checkpoints", "arm-0.safetensors"), "cd")],
     [f"checkpoints.arm-0.safetensors: {'ab' * 32} became cd"]),
    ([(("config", "arm", "steps"), 3)], ["config.arm.steps: 2 became 3"]),
    ([(("config", "arm", "clip"), False)], ["config.arm.clip: None became False"]),
    ([(("name",), "other")], ["name: trial became other"]),
    ([(("contract",), "cd")], [f"contract: {arithmetic.digest()} became cd"]),
    ([(("seeds", 1), 2)], ["seeds.1: 1 became 2"]),
    # Made elsewhere: only summaries count, within the tolerance
    ([(("environment", "torch"), "1"), (SUCCESS, 0.9)], []),
    ([(("environment", "threads"), 9), (("checkpoints",), {})], []),
    ([(("environment", "torch"), "1"), (("metrics", "summary", "arm", "success"), 0.549)], []),
    ([(("environment", "torch"), "1"), (("metrics", "summary", "arm", "success"), 0.551)],
     ["metrics.summary.arm.success: 0.5 became 0.551"]),
    ([(("environment", "torch"), "1"), (("metrics", "summary", "arm"), {})],
     ["metrics.summary.arm.success: is gone"]),
    ([(("environment", "torch"), "1"), (("metrics",), {})],
     ["metrics.summary: missing, and nothing else can be compared elsewhere"]),
    ([(("environment", "torch"), "1"), (("config", "arm", "steps"), 3)],
     ["config.arm.steps: 2 became 3"]),
    ([(("environment", "torch"), "1"), (("contract",), "cd")],
     [f"contract: {arithmetic.digest()} became cd"]),
]  # fmt: skip


def check_differences(module, folder):
    recorded = module.manifest(**RUN)
    assert module.differences(recorded, recorded) == []
    for changes, lines in DIFFERENCES:
        repeated = recorded
        for path, value in changes:
            repeated = variant(repeated, *path, value=value)
        assert module.differences(recorded, repeated) == lines, changes
    zero, negative = (variant(recorded, *SUCCESS, value=z) for z in (0.0, -0.0))
    assert module.differences(zero, negative) == ["metrics.runs.0.success: 0.0 became -0.0"]


def check_environment(module, folder):
    """Whatever may order a sum otherwise is stated."""
    stated = module.environment()
    assert stated["torch"] == torch.__version__
    assert stated["numpy"] == np.__version__
    assert stated["python"] == ".".join(map(str, sys.version_info[:3]))
    assert stated["threads"] == torch.get_num_threads()
    assert stated["processor"].endswith(torch.backends.cpu.get_cpu_capability())
    assert len(stated["processor"].split(", ")) > 1


MANIFESTS = [check_a_manifest_comes_back, check_only_plain_numbers, check_other_manifests,
             check_sources, check_differences, check_environment]  # fmt: skip


@pytest.mark.claim("8.4", "enumeration")
@pytest.mark.parametrize("check", MANIFESTS)
def test_manifest(check, tmp_path):
    check(evidence, tmp_path)


def test_the_book_reads_what_is_written(tmp_path):
    """The hook that fills in the pages' numbers has its own reader."""
    source = "mathrl/arithmetic.py"
    run = {**RUN, "sources": {source: evidence.sha256((ROOT / source).read_bytes())}}
    evidence.write_manifest(tmp_path / "trial.json", evidence.manifest(**run))
    recorded = book_hook.manifest("trial", tmp_path)
    assert recorded == evidence.read_manifest(tmp_path / "trial.json")
    assert book_hook.look_up(recorded, "metrics.summary.arm.success") == 0.5


# ---------------------------------------------------------------- one byte

EDITS = {"checkpoint": 2900, "manifest": 6000, "contract": 1000, "contract's source": 100}


def edited(data, rng):
    at = rng.randrange(len(data))
    other = rng.choice([b for b in range(256) if b != data[at]])
    return data[:at] + bytes([other]) + data[at + 1 :]


def contract_text():
    """The bytes that the contract's digest is that of."""
    seen = []
    true = hashlib.sha256
    recorder = types.SimpleNamespace(sha256=lambda data: (seen.append(data), true(data))[1])
    with patch.object(arithmetic, "hashlib", recorder):
        arithmetic.digest()
    return seen[0]


def executed(source):
    """The contract as a source would have it; None if it is no program."""
    module = types.ModuleType("arithmetic")
    try:
        with warnings.catch_warnings(action="ignore"):
            exec(compile(source, "arithmetic", "exec"), module.__dict__)
        module.digest()
    except Exception:
        return None
    return module


def verdict(module, function, *arguments):
    """The link that a refusal names, or "accepted"."""
    try:
        function(*arguments)
    except module.EvidenceError as error:
        return str(error).split(":")[0].split(" ")[0]
    return "accepted"


def check_edits(module, folder, share=1.0):
    """Random single-byte edits, each of one link; the refusal names that link."""
    rng = random.Random(0)
    checkpoint, record = folder / "model", folder / "run"
    digest = module.save_checkpoint(network(), checkpoint)
    source = (ROOT / "mathrl/arithmetic.py").read_bytes()
    sources = {"mathrl/arithmetic.py": hashlib.sha256(source).hexdigest()}
    checkpoints = {"model": digest}
    run = {**RUN, "sources": sources, "checkpoints": checkpoints}
    module.write_manifest(record, module.manifest(**run))
    whole, written, text = checkpoint.read_bytes(), record.read_bytes(), contract_text()
    trials = {link: int(share * count) for link, count in EDITS.items()}
    count = Counter()
    for _ in range(trials["checkpoint"]):
        checkpoint.write_bytes(edited(whole, rng))
        count["checkpoint", verdict(module, module.load_checkpoint, checkpoint)] += 1
    checkpoint.write_bytes(whole)
    for _ in range(trials["manifest"]):
        record.write_bytes(edited(written, rng))
        count["manifest", verdict(module, module.read_manifest, record)] += 1
    record.write_bytes(written)
    for _ in range(trials["contract"]):
        other = hashlib.sha256(edited(text, rng)).hexdigest()
        with patch.object(module.arithmetic, "digest", lambda other=other: other):
            for read, path in (
                (module.load_checkpoint, checkpoint),
                (module.read_manifest, record),
            ):
                count["contract", verdict(module, read, path)] += 1
    recorded = module.read_manifest(record)
    (folder / "mathrl").mkdir()
    for _ in range(trials["contract's source"]):
        change = edited(source, rng)
        (folder / "mathrl/arithmetic.py").write_bytes(change)
        assert module.changed_sources(recorded, folder) == ["mathrl/arithmetic.py"]
        changed = executed(change)
        if changed is None or changed.digest() == arithmetic.digest():
            count["source", "no program" if changed is None else "another text"] += 1
            continue
        with patch.object(module, "arithmetic", changed):
            count["contract", verdict(module, module.load_checkpoint, checkpoint)] += 1
    assert {key for key in count if key[0] != "source"} == {
        (link, link) for link in ("checkpoint", "manifest", "contract")
    }, count
    return count


@pytest.mark.claim("8.2", "enumeration")
def test_ten_thousand_edits_of_one_byte(tmp_path):
    assert sum(EDITS.values()) == 10_000
    count = check_edits(evidence, tmp_path)
    assert count["contract", "contract"] > 2 * EDITS["contract"], "sources that change the contract"
    assert min(count["source", kind] for kind in ("no program", "another text")) > 0


PATCHES = [
    ("VOCAB", (*arithmetic.VOCAB[:-1], "<end>")),
    ("EOS", 12),
    ("TASKS", arithmetic.TASKS[::-1]),
    ("TRAIN", (*arithmetic.TRAIN, (2, 2))),
    ("TEST", arithmetic.TEST[1:]),
    ("VERSION", 2),
    ("verify", lambda task, response: {"reward": 1, "reason": "ok", "detail": ""}),
    ("target", lambda task: [sum(task), 0, 13]),
]


@pytest.mark.parametrize(("name", "value"), PATCHES)
def test_a_changed_contract_is_refused(name, value, tmp_path):
    evidence.save_checkpoint(network(), tmp_path / "model")
    evidence.write_manifest(tmp_path / "run", evidence.manifest(**RUN))
    with patch.object(arithmetic, name, value):
        refused(evidence, "^contract: ", evidence.load_checkpoint, tmp_path / "model")
        refused(evidence, "^contract: ", evidence.read_manifest, tmp_path / "run")
    evidence.load_checkpoint(tmp_path / "model")


# ---------------------------------------------------------------- mutants


def few_edits(module, folder):
    check_edits(module, folder, 0.01)


MUTANTS = [
    ("partial.replace(path)", "path.write_bytes(data)", WRITES[0]),
    ("        partial.replace(path)\n    finally:", "    finally:\n        partial.replace(path)",
     check_a_failure_leaves_the_old_file),
    ("            os.fsync(file.fileno())\n", "", WRITES[1]),
    ("            file.flush()\n", "", WRITES[1]),
    ("            os.fsync(folder)  # the new name itself", "            pass", WRITES[1]),
    ("partial.unlink(missing_ok=True)", "pass", check_a_failure_leaves_the_old_file),
    ("path.parent.mkdir(parents=True, exist_ok=True)", "path.parent.mkdir(exist_ok=True)",
     WRITES[0]),
    ("        del tensors[_HEAD]\n", "        tensors[_HEAD] = tensors[_HEAD].clone()\n",
     check_format),
    (".to(tensors[_EMBEDDING].dtype)", "", check_round_trip),
    ("if expected is not None and", "if expected is None and", check_swapped),
    ("if len(types := {tensor.dtype for tensor in tensors.values()}) > 1:", "if False:",
     check_one_type),
    ("whole = _packed(stated, tensors) == data", "whole = True", few_edits),
    ("_packed(stated, tensors) == data", "len(_packed(stated, tensors)) == len(data)", few_edits),
    ("_canonical(stated) + safetensors", "safetensors", check_other_forms),
    ("+ safetensors.torch.save(dict(tensors)))", ")", few_edits),
    ('_check_origin(f"checkpoint {path.name}", stated)', "pass", few_edits),
    ('_check_origin(f"manifest {path.name}", recorded)', "pass", few_edits),
    ('if stated["schema"] != SCHEMA:', "if False:", check_sealed),
    ("except Exception as error:  # whatever these bytes do to the parsers",
     "except ValueError as error:", check_other_forms),
    ('recorded["digest"] == sha256(_canonical(body)) and ', "", few_edits),
    (" and _pretty(recorded) == data", "", check_other_manifests),
    ("AttributeError, RecursionError)", "AttributeError)", check_other_manifests),
    ("if missing := sorted(_FIELDS - body.keys()):", "if missing := []:", check_other_manifests),
    ("return json.loads(_canonical(recorded))", "return recorded", check_a_manifest_comes_back),
    ('separators=(",", ":"), allow_nan=False', 'separators=(",", ":")', check_only_plain_numbers),
    ("or sha256((root / name).read_bytes()) != digest", "", check_sources),
    ("not (root / name).is_file() or", "(root / name).is_file() and", check_sources),
    ('parts = ["name", "contract", "config", "seeds"]', 'parts = ["name", "config", "seeds"]',
     check_differences),
    ('recorded["environment"] != repeated["environment"]', "True", check_differences),
    ('recorded["environment"] != repeated["environment"]', "False", check_differences),
    ('["metrics", "checkpoints"]', '["metrics"]', check_differences),
    ("abs(one - two) < tolerance", "abs(one - two) <= tolerance", check_differences),
    ("abs(one - two) < tolerance", "one - two < tolerance", check_differences),
    ("_canonical(one) == _canonical(two)", "one == two", check_differences),
    ("lines += [f", "lines = [f", check_differences),
    ("and len(one) == len(two)", "", check_differences),
    ('if not all("summary"', 'if not any("summary"', check_differences),
    ("[*known, torch.backends.cpu.get_cpu_capability()]", "known", check_environment),
]  # fmt: skip


@pytest.mark.parametrize(("old", "new", "check"), MUTANTS)
def test_mutant_is_caught(old, new, check, tmp_path_factory):
    def fresh(module):
        try:
            check(module, tmp_path_factory.mktemp("mutant"))
        except AssertionError:
            raise
        except Exception as error:
            raise AssertionError(f"an unexpected error: {error!r}") from error

    assert_caught("mathrl.evidence", old, new, fresh)

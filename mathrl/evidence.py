"""Evidence: what a run was made of, what came out, and whether either has changed since.

The chain has five links. The **contract** is hashed by `arithmetic.digest`. The **sources** of the
package are hashed file by file. A **checkpoint** names the contract it was trained under and holds
a hash of all that is in it. A **run** writes one manifest: all of these, the settings, the
versions, the metrics and the hash of each checkpoint. A **report** reads its numbers from manifests
only.

A hash shows that bytes have changed. It does not show that what was hashed is right, nor who wrote
it: whoever can change a manifest can compute its digest anew. That is why a run can be repeated.

Every file is written whole or not at all: to a temporary file, to disk, then renamed.
"""

import hashlib
import json
import os
import platform
import re
import secrets
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import numpy as np
import safetensors.torch
import torch

from mathrl import arithmetic
from mathrl._sources import ROOT
from mathrl.decoder import Decoder, DecoderConfig

SCHEMA = 1
_FIELDS = {"schema", "name", "contract", "config", "seeds", "environment", "sources", "seconds",
          "metrics", "checkpoints"}  # fmt: skip
_KEY = "mathrl"
_HEAD, _EMBEDDING = "head.weight", "token_embedding.weight"

Manifest = dict[str, Any]


class EvidenceError(Exception):
    """A link of the chain does not hold; the message names the link."""


def write_atomically(path: Path, data: bytes) -> None:
    """Write a file whole or not at all; what stood there stays until the new file is complete.

    A process killed at any moment leaves the old file or the new one, and perhaps a temporary file
    next to it, whose name starts with a dot and ends with `.partial`.

    Args:
        path: of the file; its folder is made if it is not there.
        data: all of it.

    Raises:
        OSError: it cannot be written; what stood there is unchanged.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     write_atomically(Path(folder) / "new" / "file", b"all of it")
    ...     (Path(folder) / "new" / "file").read_bytes()
    b'all of it'
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.{secrets.token_hex(8)}.partial")
    try:
        with partial.open("xb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)
    if os.name == "posix":  # elsewhere a folder cannot be opened
        folder = os.open(path.parent, os.O_RDONLY)
        try:
            os.fsync(folder)  # the new name itself
        finally:
            os.close(folder)


def sha256(data: bytes) -> str:
    """SHA-256 as 64 hexadecimal digits.

    >>> sha256(b"")[:8]
    'e3b0c442'
    """
    return hashlib.sha256(data).hexdigest()


def checkpoint_bytes(model: Decoder) -> bytes:
    """A decoder as the bytes of a safetensors file, the same bytes for the same parameters.

    Its metadata holds the sizes, the digest of the contract, and a hash of these and of all
    parameters with their names, types and shapes. Tied weights are written once.

    Raises:
        ValueError: the parameters are not all of one type.

    >>> checkpoint_bytes(Decoder(DecoderConfig())) == checkpoint_bytes(Decoder(DecoderConfig()))
    True
    """
    tensors = {name: tensor.detach().contiguous() for name, tensor in model.state_dict().items()}
    if len(types := {tensor.dtype for tensor in tensors.values()}) > 1:
        raise ValueError(f"`model` must have parameters of one type, got {types}")
    if model.config.tied:
        del tensors[_HEAD]
    config, contract = asdict(model.config), arithmetic.digest()
    return _packed({"schema": SCHEMA, "config": config, "contract": contract}, tensors)


def save_checkpoint(model: Decoder, path: Path) -> str:
    """Write a checkpoint atomically; return the SHA-256 of the file.

    Args:
        model: a decoder of the bench.
        path: of the file; its folder is made if it is not there.
    """
    data = checkpoint_bytes(model)
    write_atomically(path, data)
    return sha256(data)


def load_checkpoint(path: Path, expected: str | None = None) -> Decoder:
    """Read a decoder and verify it: file, contract, content.

    Args:
        path: a file that `save_checkpoint` wrote.
        expected: the SHA-256 that a manifest states, if there is one. Without it, what is shown
            is that these bytes are a whole checkpoint, not that they are of a certain run.

    Returns:
        The decoder, with the type of its parameters.

    Raises:
        EvidenceError: the file is not the one of the manifest, is no checkpoint, is not what was
            written, or was trained under another contract.
        OSError: the file cannot be read.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     path = Path(folder) / "model.safetensors"
    ...     digest = save_checkpoint(Decoder(DecoderConfig(width=8, heads=2)), path)
    ...     load_checkpoint(path, digest).config.width
    8
    """
    data = path.read_bytes()
    if expected is not None and sha256(data) != expected:
        raise EvidenceError(f"checkpoint {path.name}: the file is not the one of the manifest")
    try:
        stated, tensors = _unpacked(data)
        whole = _packed(stated, tensors) == data
        model = _decoder(stated["config"], tensors) if whole else None
    except Exception as error:  # whatever these bytes do to the parsers
        raise EvidenceError(f"checkpoint {path.name}: cannot be read: {error!r}") from None
    if model is None:
        raise EvidenceError(f"checkpoint {path.name}: it is not what was written")
    _check_origin(f"checkpoint {path.name}", stated)
    return model


def environment() -> dict[str, Any]:
    """Versions, machine and threads, as far as a result may depend on them."""
    try:
        package = version("mathrl")
    except PackageNotFoundError:
        package = "not installed"
    return {
        "mathrl": package,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "numpy": np.__version__,
        "machine": f"{sys.platform} {platform.machine()}",
        "processor": _processor(),
        "threads": torch.get_num_threads(),
    }


def manifest(
    name: str,
    config: Mapping[str, Any],
    seeds: Sequence[int],
    metrics: Mapping[str, Any],
    checkpoints: Mapping[str, str],
    seconds: float,
    sources: Mapping[str, str],
) -> Manifest:
    """Put together the record of a run.

    Args:
        name: of the run.
        config: all settings.
        seeds: of the run.
        metrics: what came out, plain numbers.
        checkpoints: SHA-256 of each, by name.
        seconds: wall time.
        sources: SHA-256 of each source file that the result depends on, by its path.

    Returns:
        What `read_manifest` will return once it is written, but for the digest: plain JSON.

    Raises:
        TypeError: something is not plain.
        ValueError: a number is NaN or infinite.
    """
    recorded = {
        "schema": SCHEMA,
        "name": name,
        "contract": arithmetic.digest(),
        "config": dict(config),
        "seeds": list(seeds),
        "environment": environment(),
        "sources": dict(sources),
        "seconds": seconds,
        "metrics": dict(metrics),
        "checkpoints": dict(checkpoints),
    }
    return json.loads(_canonical(recorded))


def write_manifest(path: Path, recorded: Manifest) -> None:
    """Write a manifest atomically, in canonical form and with its own digest."""
    body = {key: value for key, value in recorded.items() if key != "digest"}
    write_atomically(path, _pretty(body | {"digest": sha256(_canonical(body))}))


def read_manifest(path: Path) -> Manifest:
    """Read a manifest and verify that it is what was written, under this contract.

    Raises:
        EvidenceError: not a manifest, changed since it was written, or of another contract.
        OSError: the file cannot be read.
    """
    data = path.read_bytes()
    try:
        recorded = json.loads(data)
        body = {key: value for key, value in recorded.items() if key != "digest"}
        whole = recorded["digest"] == sha256(_canonical(body)) and _pretty(recorded) == data
    except (ValueError, KeyError, AttributeError, RecursionError) as error:
        raise EvidenceError(f"manifest {path.name}: cannot be read: {error!r}") from None
    if not whole:
        raise EvidenceError(f"manifest {path.name}: it is not what was written")
    if missing := sorted(_FIELDS - body.keys()):
        raise EvidenceError(f"manifest {path.name}: lacks {', '.join(missing)}")
    _check_origin(f"manifest {path.name}", recorded)
    return recorded


def changed_sources(recorded: Manifest, root: Path = ROOT) -> list[str]:
    """The source files of a manifest that are no longer what they were."""
    return [
        name
        for name, digest in recorded["sources"].items()
        if not (root / name).is_file() or sha256((root / name).read_bytes()) != digest
    ]


def differences(recorded: Manifest, repeated: Manifest, tolerance: float = 0.05) -> list[str]:
    """Where a repeated run differs from the recorded one; empty if it confirms it.

    Name, contract, settings and seeds must be equal. In the same environment the metrics and the
    checkpoints must be too, to the last bit. Elsewhere additions of floats round differently,
    sampling amplifies that, and only the metrics named `summary` are compared.

    Args:
        recorded: a manifest.
        repeated: another.
        tolerance: for a number of a summary made elsewhere.

    Returns:
        One line for each difference.

    >>> run = manifest("trial", {"steps": 2}, [0], {"success": 0.5}, {}, 1.0, {})
    >>> differences(run, run | {"metrics": {"success": 0.75}})
    ['metrics.success: 0.5 became 0.75']
    """
    parts = ["name", "contract", "config", "seeds"]
    elsewhere = recorded["environment"] != repeated["environment"]
    parts += [] if elsewhere else ["metrics", "checkpoints"]
    lines = [line for part in parts for line in _apart(part, recorded[part], repeated[part], 0)]
    if not elsewhere:
        return lines
    if not all("summary" in each["metrics"] for each in (recorded, repeated)):
        return [*lines, "metrics.summary: missing, and nothing else can be compared elsewhere"]
    one, two = (each["metrics"]["summary"] for each in (recorded, repeated))
    return lines + _apart("metrics.summary", one, two, tolerance)


def _apart(path: str, one: Any, two: Any, tolerance: float) -> list[str]:
    if isinstance(one, dict) and isinstance(two, dict):
        lines = [f"{path}.{key}: is gone" for key in sorted(one.keys() - two.keys())]
        lines += [f"{path}.{key}: is new" for key in sorted(two.keys() - one.keys())]
        shared = [key for key in one if key in two]
        return lines + [x for k in shared for x in _apart(f"{path}.{k}", one[k], two[k], tolerance)]
    if isinstance(one, list) and isinstance(two, list) and len(one) == len(two):
        pairs = enumerate(zip(one, two, strict=True))
        return [x for i, (a, b) in pairs for x in _apart(f"{path}.{i}", a, b, tolerance)]
    if isinstance(one, float) and isinstance(two, float) and abs(one - two) < tolerance:
        return []
    return [] if _canonical(one) == _canonical(two) else [f"{path}: {one} became {two}"]


def _packed(stated: Mapping[str, Any], tensors: Mapping[str, torch.Tensor]) -> bytes:
    content = sha256(_canonical(stated) + safetensors.torch.save(dict(tensors)))
    # One key: with several, their order in the file would be that of a hash table.
    metadata = {_KEY: _canonical({**stated, "content": content}).decode("ascii")}
    return safetensors.torch.save(dict(tensors), metadata)


def _unpacked(data: bytes) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    tensors = safetensors.torch.load(data)
    header = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])
    stated = json.loads(header["__metadata__"][_KEY])
    del stated["content"]  # `_packed` computes it anew
    return stated, tensors


def _decoder(config: Mapping[str, Any], tensors: dict[str, torch.Tensor]) -> Decoder:
    model = Decoder(DecoderConfig(**config)).to(tensors[_EMBEDDING].dtype)
    tied = {_HEAD: tensors[_EMBEDDING]} if model.config.tied else {}
    model.load_state_dict(tensors | tied)
    return model


def _check_origin(link: str, stated: Mapping[str, Any]) -> None:
    if stated["schema"] != SCHEMA:
        raise EvidenceError(f"{link}: schema {stated['schema']}, this package reads {SCHEMA}")
    if stated["contract"] != (ours := arithmetic.digest()):
        theirs = str(stated["contract"])
        raise EvidenceError(f"contract: {link} is of {theirs[:12]}, this package holds {ours[:12]}")


def _canonical(value: Any) -> bytes:
    text = json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False)
    return text.encode("ascii")


def _pretty(value: Any) -> bytes:
    return (json.dumps(value, indent=1, sort_keys=True, allow_nan=False) + "\n").encode("ascii")


def _processor() -> str:
    """As precisely as is known: kernels are chosen, and sums ordered, by what it can do."""
    try:
        lines = Path("/proc/cpuinfo").read_text("utf-8").splitlines()
    except OSError:
        lines = [f"name: {platform.processor()}"]
    fields = dict(re.split(r"\s*:\s*", line, maxsplit=1) for line in reversed(lines) if ":" in line)
    names = ("name", "model name", "cpu family", "model", "CPU implementer", "CPU part")
    known = [fields[name] for name in names if name in fields]
    return ", ".join([*known, torch.backends.cpu.get_cpu_capability()])

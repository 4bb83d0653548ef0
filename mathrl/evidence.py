"""Evidence: what a run was made of, what came out, and whether either has changed since.

The chain has five links. The **contract** is hashed by `arithmetic.digest`. The **sources** of the
package are hashed file by file. A **checkpoint** names the contract it was trained under and holds
a hash of its own content. A **run** writes one manifest: all of these, the settings, the versions,
the metrics and the hash of each checkpoint. A **report** reads its numbers from manifests only.

A hash shows that bytes have changed. It does not show that what was hashed is right, nor who wrote
it: whoever can change a manifest can compute its digest anew. That is why a run can be repeated.

Every file is written whole or not at all: to a temporary file, to disk, then renamed.
"""

import hashlib
import json
import os
import platform
import sys
import tempfile
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
_KEY = "mathrl"

Manifest = dict[str, Any]


class EvidenceError(Exception):
    """A link of the chain does not hold; the message names the link."""


def write_atomically(path: Path, data: bytes) -> None:
    """Write a file whole or not at all; what stood there stays until the new file is complete.

    A crash at any moment leaves the old file or the new one, and perhaps a temporary file whose
    name starts with a dot.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     write_atomically(Path(folder) / "new" / "file", b"all of it")
    ...     (Path(folder) / "new" / "file").read_bytes()
    b'all of it'
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, temporary = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.chmod(temporary, 0o644)
        os.replace(temporary, path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise
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

    Its metadata holds the sizes, the digest of the contract, and a hash of sizes and parameters.
    """
    tensors = _tensors(model)
    metadata = {
        "schema": SCHEMA,
        "config": asdict(model.config),
        "contract": arithmetic.digest(),
        "content": _content(asdict(model.config), tensors),
    }
    # One key: with several, their order in the file would be the order of a hash table.
    return safetensors.torch.save(tensors, {_KEY: _canonical(metadata).decode("ascii")})


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
        expected: the SHA-256 that a manifest states, if there is one.

    Raises:
        EvidenceError: the file is not a checkpoint, differs from what the manifest states, was
            trained under another contract, or its content is not what was written.
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
        tensors = safetensors.torch.load(data)
        size = int.from_bytes(data[:8], "little")
        metadata = json.loads(json.loads(data[8 : 8 + size])["__metadata__"][_KEY])
        config, contract, content = (metadata[k] for k in ("config", "contract", "content"))
        model = Decoder(DecoderConfig(**config))
        model.load_state_dict(tensors if not config["tied"] else _untied(model, tensors))
    except Exception as error:
        raise EvidenceError(f"checkpoint {path.name}: cannot be read: {error}") from None
    if contract != arithmetic.digest():
        raise EvidenceError(
            f"contract: checkpoint {path.name} was trained under {str(contract)[:12]}, "
            f"this package holds {arithmetic.digest()[:12]}"
        )
    if content != _content(config, tensors) or checkpoint_bytes(model) != data:
        raise EvidenceError(f"checkpoint {path.name}: its content is not what was written")
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
        A dict ready for `write_manifest`.
    """
    return {
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
        contract = recorded["contract"]
    except (ValueError, KeyError, AttributeError, TypeError, RecursionError) as error:
        raise EvidenceError(f"manifest {path.name}: cannot be read: {error}") from None
    if not whole:
        raise EvidenceError(f"manifest {path.name}: it is not what was written")
    if contract != arithmetic.digest():
        raise EvidenceError(
            f"contract: manifest {path.name} is of {contract[:12]}, "
            f"this package holds {arithmetic.digest()[:12]}"
        )
    return body | {"digest": recorded["digest"]}


def changed_sources(recorded: Manifest, root: Path = ROOT) -> list[str]:
    """The source files of a manifest that are no longer what they were."""
    return [
        name
        for name, digest in recorded["sources"].items()
        if not (root / name).is_file() or sha256((root / name).read_bytes()) != digest
    ]


def differences(recorded: Manifest, repeated: Manifest, tolerance: float = 0.05) -> list[str]:
    """Where a repeated run differs from the recorded one; empty if it confirms it.

    On the same machine type, versions and threads the metrics and the checkpoints must be equal
    to the last bit. Elsewhere float additions round differently, sampling amplifies that, and
    only metrics named `summary` are compared, within a tolerance.

    Args:
        recorded: a manifest.
        repeated: another of the same name.
        tolerance: for a summary made elsewhere.

    Returns:
        One line for each difference.

    Raises:
        ValueError: the two are of different runs.
    """
    for key in ("name", "config", "seeds"):
        if recorded[key] != repeated[key]:
            raise ValueError(f"`repeated` is another run: `{key}` differs")
    if recorded["environment"] == repeated["environment"]:
        parts = ("contract", "metrics", "checkpoints")
        return [line for part in parts for line in _apart(part, recorded[part], repeated[part], 0)]
    one, two = (m["metrics"].get("summary", {}) for m in (recorded, repeated))
    return _apart("metrics.summary", one, two, tolerance)


def _apart(path: str, one: Any, two: Any, tolerance: float) -> list[str]:
    if isinstance(one, dict) and isinstance(two, dict):
        lines = [f"{path}: {sorted(one)} became {sorted(two)}"] if one.keys() != two.keys() else []
        shared = [key for key in one if key in two]
        return lines + [x for k in shared for x in _apart(f"{path}.{k}", one[k], two[k], tolerance)]
    if isinstance(one, list) and isinstance(two, list) and len(one) == len(two):
        pairs = enumerate(zip(one, two, strict=True))
        return [x for i, (a, b) in pairs for x in _apart(f"{path}.{i}", a, b, tolerance)]
    if isinstance(one, float) and isinstance(two, float) and abs(one - two) <= tolerance:
        return []
    return [] if one == two else [f"{path}: {one} became {two}"]


def _tensors(model: Decoder) -> dict[str, torch.Tensor]:
    state = {name: tensor.detach().contiguous() for name, tensor in model.state_dict().items()}
    if model.config.tied:
        del state["head.weight"]  # the token embedding holds it
    return state


def _untied(model: Decoder, tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return tensors | {"head.weight": tensors["token_embedding.weight"]}


def _content(config: Mapping[str, Any], tensors: Mapping[str, torch.Tensor]) -> str:
    digest = hashlib.sha256(_canonical(config))
    for name in sorted(tensors):
        tensor = tensors[name]
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
        digest.update(tensor.cpu().numpy().tobytes())
    return digest.hexdigest()


def _canonical(value: Any) -> bytes:
    text = json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False)
    return text.encode("ascii")


def _pretty(value: Any) -> bytes:
    return (json.dumps(value, indent=1, sort_keys=True, allow_nan=False) + "\n").encode("ascii")


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text("utf-8").splitlines()
    except OSError:
        return platform.processor()
    return next((s.split(":", 1)[1].strip() for s in lines if s.startswith("model name")), "")

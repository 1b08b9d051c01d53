"""A session on disk restores what it held; whatever is wrong with the file is one clear error."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file
from short_context import RING, Plain, left

from memra_runtime.device.memory import weights_fingerprint
from memra_runtime.errors import MemraError
from memra_runtime.model import Model, another_model
from memra_runtime.session import Session, Snapshot, read_session, save_session
from tiny_pair import TINY_SPEC


@pytest.fixture(scope="module")
def words(model: Model) -> list[int]:
    return model.tokenizer.encode(TINY_SPEC.read_text(encoding="utf-8"))


def taken(model: Model, ids: list[int], tokens: int = 9) -> Snapshot:
    session = Session(model.device)
    session.prime(ids)
    list(session.generate(tokens))
    return session.snapshot()


@pytest.mark.parametrize("length", [1, 20, RING + 30])
def test_a_saved_session_goes_on_as_the_one_it_was(
    model: Model, oracle: Plain, words: list[int], tmp_path: Path, length: int
) -> None:
    snapshot = taken(model, words[:length])
    after = Session(model.device)
    after.restore(snapshot)
    want = left(after), list(after.generate(12))
    size = save_session(tmp_path / "a.session", snapshot, model.manifest)
    assert (tmp_path / "a.session").stat().st_size == size
    assert list(tmp_path.iterdir()) == [tmp_path / "a.session"]  # no half-written file is left
    found = read_session(tmp_path / "a.session", model.manifest)
    assert found.text == snapshot.text
    session = Session(another_model(model).device)
    session.restore(found)
    assert (left(session), list(session.generate(12))) == want
    session.restore(found, words[70:75])
    shown = [*words[:length], *oracle.after(words[:length], 9), *words[70:75]]
    assert session.committed == shown
    assert session.pending == oracle.after(shown, 1)[0]


def test_8_bit_caches_are_stored_as_they_are(kv8_model: Model, tmp_path: Path) -> None:
    snapshot = taken(kv8_model, list(range(5, 30)))
    save_session(tmp_path / "a", snapshot, kv8_model.manifest)
    found = read_session(tmp_path / "a", kv8_model.manifest)
    assert found.rows.bytes().tobytes() == snapshot.rows.bytes().tobytes()


def test_any_reader_of_safetensors_can_look_into_it(
    model: Model, words: list[int], tmp_path: Path
) -> None:
    save_session(tmp_path / "a", taken(model, words[:20]), model.manifest)
    arrays = load_file(tmp_path / "a")
    assert arrays["tokens"][:20].tolist() == words[:20]
    assert {n for n in arrays if n.startswith("target.layers.")} == {
        p.id for p in model.manifest.planes if p.rollback == "truncate"
    }
    meta = header_of((tmp_path / "a").read_bytes())["__metadata__"]
    count = len(arrays["tokens"])
    assert meta["restores"] == f"the whole text of {count} tokens, or its first 1 to {count}"
    assert meta["artifact_digest"] == model.manifest.build_key
    assert meta["spec_digest"] == model.manifest.spec_digest
    assert meta["kv"] == model.manifest.spec["runtime"]["kv"]


def header_of(data: bytes) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])
    return found


def edited(data: bytes, edit: Callable[[dict[str, Any]], object]) -> bytes:
    """The file with another header."""
    length = int.from_bytes(data[:8], "little")
    header = header_of(data)
    edit(header)
    raw = json.dumps(header).encode()
    return len(raw).to_bytes(8, "little") + raw + data[8 + length :]


def flipped(data: bytes, at: int) -> bytes:
    return data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :]


def meta(**fields: str) -> Callable[[bytes], bytes]:
    return lambda data: edited(data, lambda header: header["__metadata__"].update(fields))


#: What happens to a file, and what its reader says.
DAMAGE: dict[str, tuple[Callable[[bytes], bytes], str]] = {
    "nothing in it": (lambda data: b"", "`a` is not a session file"),
    "a text": (lambda data: b"Dear diary, today I", "`a` is not a session file"),
    "weights": (
        lambda data: edited(data, lambda h: h.pop("__metadata__")),
        "is not a session file",
    ),
    "a header cut short": (lambda data: data[:200], "`a` is damaged: its header cannot be read"),
    "data cut short": (lambda data: data[:-1], r"it has [\d,]+ bytes, its header says"),
    "a byte too many": (lambda data: data + b"x", r"it has [\d,]+ bytes, its header says"),
    "a flipped bit of a row": (lambda data: flipped(data, -1 + len(data)), "the digest it states"),
    "a flipped bit of a token": (
        lambda data: flipped(data, 8 + int.from_bytes(data[:8], "little")),
        "the digest it states",
    ),
    "another pending token": (meta(pending="7"), "the digest it states"),
    "another reach": (meta(written="3"), "the digest it states"),
    "no digest": (lambda data: edited(data, lambda h: h["__metadata__"].pop("digest")), "digest"),
    "a later format": (meta(**{"memra.session": "2"}), "format 2, this memra reads format 1"),
    "another artifact": (meta(artifact_digest="f" * 64), r"another artifact \(gemma4_tiny, cpu"),
    "a plane renamed": (
        lambda data: edited(data, lambda h: h.update(x=h.pop("target.layers.0.k"))),
        "tensor `target.layers.0.k` is not as the artifact has it",
    ),
    "no tokens": (
        lambda data: edited(data, lambda h: h.pop("tokens")),
        "does not list its tensors",
    ),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_file_that_is_not_right_is_refused(
    model: Model, words: list[int], tmp_path: Path, damage: str
) -> None:
    act, message = DAMAGE[damage]
    save_session(tmp_path / "a", taken(model, words[:9]), model.manifest)
    (tmp_path / "a").write_bytes(act((tmp_path / "a").read_bytes()))
    with pytest.raises(MemraError, match=message) as refused:
        read_session(tmp_path / "a", model.manifest)
    (diagnostic,) = refused.value.diagnostics
    assert diagnostic.place == str(tmp_path / "a")
    assert diagnostic.hints


def test_a_session_of_other_weights_is_refused(
    model: Model, words: list[int], tmp_path: Path
) -> None:
    foreign = replace(taken(model, words[:9]), weights="0" * 32)
    save_session(tmp_path / "a", foreign, model.manifest)
    found = read_session(tmp_path / "a", model.manifest)  # no weights are loaded to compare with
    with pytest.raises(MemraError, match="made with other weights"):
        Session(model.device).restore(found)


def test_targets_are_told_apart_by_a_single_tensor(model: Model) -> None:
    """Any tensor of the target; the drafter is none of a text's business."""
    weights = [np.asarray(w) for w in model.device._weights]  # type: ignore[attr-defined]
    ids = [entry.id for entry in model.manifest.weights]
    known = model.device.weights_id
    assert weights_fingerprint(model.manifest, weights) == known
    for name in ("target.embed", "target.layers.5.down", "drafter.pre_projection"):
        at = ids.index(name)
        other = [w.copy() if i == at else w for i, w in enumerate(weights)]
        other[at].reshape(-1)[-1] ^= 1
        same = weights_fingerprint(model.manifest, other) == known
        assert same == name.startswith("drafter.")


def test_a_failed_save_leaves_what_was_there(
    model: Model, words: list[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    snapshot = taken(model, words[:9])
    save_session(tmp_path / "a", snapshot, model.manifest)
    before = (tmp_path / "a").read_bytes()

    def full(handle: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", full)
    with pytest.raises(MemraError, match="cannot be written: No space left on device"):
        save_session(tmp_path / "a", taken(model, words[:12]), model.manifest)
    assert (tmp_path / "a").read_bytes() == before
    assert list(tmp_path.iterdir()) == [tmp_path / "a"]

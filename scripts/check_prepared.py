"""Reads a prepared set as its users do, and compares it with the run it was made of. Needs numpy, pyarrow and datasets; torch is used where it is there.

usage: check_prepared.py PREPARED RAW_RESPONSES

For every format in PREPARED: ids are prompt_token_ids + token_ids of the record (or a beginning of them), the mask is 1 exactly on token_ids, and all formats hold
the same rows in the same order. Shards are read with numpy alone, by docs/formats.md. d2t and t2d are each other's inverse and cover what the summary says.
"""

import collections
import json
import pathlib
import shutil
import struct
import sys
import tempfile

import datasets
import numpy
import pyarrow.parquet


def lines(path):
    with open(path, newline="\n") as file:
        return [json.loads(line) for line in file]


def answers(responses):
    """Ids and mask of every answer, by sample id and turn."""
    wanted = {}
    for record in lines(responses):
        for turn, answer in enumerate(record.get("earlier_turns", []) + [record]):
            prompt, sampled = answer.get("prompt_token_ids"), answer.get("token_ids")
            if prompt and sampled:
                wanted.setdefault((record["sample_id"], turn), (prompt + sampled, [0] * len(prompt) + [1] * len(sampled)))
    return wanted


def shard_rows(path):
    """Rows of a shard: id, turn, ids, mask."""
    data = numpy.memmap(path, dtype=numpy.uint8, mode="r")
    assert data[:8].tobytes() == data[-8:].tobytes() == b"EAGLETEX"
    index, count, names, _, _, _ = struct.unpack("<6Q", data[-64:-16].tobytes())
    for at in range(count):
        entry = data[index + 72 * at : index + 72 * (at + 1)].tobytes()
        offset, tokens, supervised = struct.unpack_from("<QII", entry)
        turn, _marks, name_at, name_bytes = struct.unpack_from("<IIQI", entry, 40)
        name = data[names + name_at : names + name_at + name_bytes].tobytes().decode()
        ids = data[offset : offset + 4 * tokens].view("<u4").tolist()
        mask = data[offset + 4 * tokens : offset + 5 * tokens].tolist()
        assert sum(mask) == supervised
        yield name, turn, ids, mask


def saved_dataset(directory):
    """Rows of a `save_to_disk` directory, through `datasets`."""
    state = json.loads((directory / "state.json").read_text())
    assert state["_format_type"] == "torch"
    try:
        import torch

        loaded = datasets.load_from_disk(str(directory))
        assert loaded[0]["input_ids"].dtype == torch.int64
        loaded = loaded.with_format(None)
    except ImportError:
        # Without torch `datasets` refuses the format: the same files, the format left out.
        copy = pathlib.Path(tempfile.mkdtemp()) / "dataset"
        shutil.copytree(directory, copy)
        (copy / "state.json").write_text(json.dumps(state | {"_format_type": None}))
        loaded = datasets.load_from_disk(str(copy))
    rows = list(loaded)
    assert all(row["seq_len"] == len(row["input_ids"]) for row in rows)
    return [(row["input_ids"], row["loss_mask"]) for row in rows]


def rows_of(prepared, name, split):
    """Ids and masks of a format, by its own reader; None where the format has no rows of this side."""
    if name == "shards":
        files = sorted((prepared / name).glob(f"{split}-*.examples"))
        return [row[2:] for file in files for row in shard_rows(file)] or None
    path = prepared / name / {"speculators": split, "parquet": f"{split}.parquet"}.get(name, f"{split}.jsonl")
    if not path.exists():
        return None
    if name == "speculators":
        return saved_dataset(path)
    if name == "parquet":
        rows = pyarrow.parquet.read_table(path).to_pylist()
    elif name == "speculators-jsonl":
        rows = datasets.load_dataset("json", data_files=str(path), split="train", cache_dir=tempfile.mkdtemp())
    else:
        rows = lines(path)
    return [(row["input_ids"], row["loss_mask"]) for row in rows]


def check_maps(prepared, vocabulary, train):
    counts = collections.Counter(id for ids, mask in train for id, bit in zip(ids, mask) if bit)
    for path in prepared.rglob("d2t-*.npy"):
        d2t, t2d = numpy.load(path), numpy.load(path.with_name(path.name.replace("d2t", "t2d")))
        assert d2t.dtype == numpy.int64 and t2d.dtype == bool
        assert (len(d2t), len(t2d)) == (vocabulary["draft"], vocabulary["target"])
        chosen = numpy.arange(len(d2t)) + d2t
        assert (numpy.flatnonzero(t2d) == chosen).all(), path
        assert sum(counts[id] for id in chosen.tolist()) == vocabulary["covered_train"]


def main():
    prepared, wanted = pathlib.Path(sys.argv[1]), answers(sys.argv[2])
    summary = json.loads((prepared / "summary.json").read_text())
    kept, sides = {}, {}
    for split in ("train", "validation"):
        for name in (name for name in summary["outputs"] if name != "specforge-conversations"):
            rows = [(list(ids), list(mask)) for ids, mask in rows_of(prepared, name, split) or []]
            print(f"{name:<18} {split:<11} {len(rows)} rows")
            assert sides.setdefault(split, rows) == rows, f"{name} differs"
        named = [row for file in sorted((prepared / "shards").glob(f"{split}-*.examples")) for row in shard_rows(file)]
        for name, turn, ids, mask in named:
            all_ids, all_mask = wanted[name, turn]
            assert ids == all_ids[: len(ids)] and mask == all_mask[: len(ids)], (name, turn)
            assert kept.setdefault((name, turn), split) == split
    assert sum(len(rows) for rows in sides.values()) == summary["kept"]
    if "vocabulary" in summary:
        check_maps(prepared, summary["vocabulary"], sides["train"])
    print(f"sound: {summary['kept']} examples, {len(kept)} compared with the record")


if __name__ == "__main__":
    main()

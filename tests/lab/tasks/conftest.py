"""A data folder with a few examples of every set in its official format, and the folder of the real ones."""

import gzip
import json
import os
import struct
import zipfile
from pathlib import Path

import numpy as np
import pytest

from hemiola.lab.tasks.files import SETS
from hemiola.lab.tasks.hmda import AMOUNTS, CATEGORIES, NUMBERS


def idx(array):
    header = struct.pack(f">I{array.ndim}I", 0x0800 + array.ndim, *array.shape)
    return gzip.compress(header + array.astype(np.uint8).tobytes())


WORDS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "the", "film", "is", "good", "bad", "un", "##happy", "##s", ",", ".", "a"]
BERT = {
    "vocab_size": len(WORDS),
    "hidden_size": 8,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 12,
    "max_position_embeddings": 64,
    "type_vocab_size": 2,
    "layer_norm_eps": 1e-12,
}


def write_bert(root, random):
    """A tiny BERT in the three files of a pretrained one."""
    (root / "minilm-l6/config.json").write_text(json.dumps(BERT | {"model_type": "bert"}))
    (root / "minilm-l6/vocab.txt").write_text("\n".join(WORDS) + "\n")
    wide, width = BERT["intermediate_size"], BERT["hidden_size"]
    shapes = {
        "embeddings.word_embeddings.weight": (BERT["vocab_size"], width),
        "embeddings.position_embeddings.weight": (BERT["max_position_embeddings"], width),
        "embeddings.token_type_embeddings.weight": (2, width),
        "embeddings.LayerNorm.weight": (width,),
        "embeddings.LayerNorm.bias": (width,),
        "pooler.dense.weight": (width, width),
    }
    for layer in range(BERT["num_hidden_layers"]):
        parts = {f"attention.self.{part}": (width, width) for part in ("query", "key", "value")}
        parts |= {"attention.output.dense": (width, width), "intermediate.dense": (wide, width)}
        parts |= {"output.dense": (width, wide), "attention.output.LayerNorm": (width,), "output.LayerNorm": (width,)}
        for name, shape in parts.items():
            shapes[f"encoder.layer.{layer}.{name}.weight"] = shape
            shapes[f"encoder.layer.{layer}.{name}.bias"] = shape[:1]
    tensors = {name: random.normal(0, 0.5, shape).astype("<f4") for name, shape in shapes.items()}
    header, at = {"__metadata__": {"format": "pt"}}, 0
    for name, tensor in tensors.items():
        header[name] = {"dtype": "F32", "shape": list(tensor.shape), "data_offsets": [at, at + tensor.nbytes]}
        at += tensor.nbytes
    text = json.dumps(header).encode()
    body = b"".join(tensor.tobytes() for tensor in tensors.values())
    (root / "minilm-l6/model.safetensors").write_bytes(len(text).to_bytes(8, "little") + text + body)


def write_glue(root):
    for part in ("train", "dev"):
        (root / f"glue/SST-2/{part}.tsv").write_text("sentence\tlabel\n" + 'the "film" is good \t1\nunhappy .\t0\n' * 4)
        (root / f"glue/CoLA/{part}.tsv").write_text("gj04\t1\t\tThe film is good.\ngj04\t0\t*\tgood the is\n" * 4)
        pairs = "1\t10\t11\tthe film\ta film\n0\t12\t13\tgood , good , good\tbad\n" * 4
        (root / f"glue/MRPC/{part}.tsv").write_text("\ufeffQuality\t#1 ID\t#2 ID\t#1 String\t#2 String\n" + pairs)
        pairs = "0\tthe film is good\tgood film\tentailment\n1\tbad\tgood\tnot_entailment\n" * 4
        (root / f"glue/RTE/{part}.tsv").write_text("index\tsentence1\tsentence2\tlabel\n" + pairs)


@pytest.fixture(scope="session")
def folder(tmp_path_factory):
    """A data folder with a few examples of every set."""
    root = tmp_path_factory.mktemp("data")
    random = np.random.default_rng(0)
    for data_set in SETS.values():
        for file in data_set.files:
            (root / file).parent.mkdir(parents=True, exist_ok=True)
    for images in ("MNIST", "FashionMNIST"):
        for part in ("train", "t10k"):
            pixels = random.integers(0, 256, (12, 28, 28))
            (root / images / f"raw/{part}-images-idx3-ubyte.gz").write_bytes(idx(pixels))
            (root / images / f"raw/{part}-labels-idx1-ubyte.gz").write_bytes(idx(np.arange(12) % 10))
    for file in SETS["cifar10"].files:
        records = random.integers(0, 256, (3, 3073))
        records[:, 0] = [1, 2, 3]
        (root / file).write_bytes(records.astype(np.uint8).tobytes())
    for part, words in (("train", "a b c <unk> d"), ("valid", "a"), ("test", "a z b")):
        (root / f"wikitext-2/{part}.txt").write_text(f" {words} \n" * 40)
    weeks = [f"W{i}," + ",".join(str(10 * i + j % 7) for j in range(40)) for i in range(3)]
    ahead = [f"W{i}," + ",".join(str(10 * i + j % 7) for j in range(40, 53)) for i in range(3)]
    (root / "m4-weekly/Weekly-train.csv").write_text("V1,V2\n" + "\n".join(weeks))
    (root / "m4-weekly/Weekly-test.csv").write_text("V1,V2\n" + "\n".join(ahead))
    names = CATEGORIES + AMOUNTS + NUMBERS
    rows = [",".join(str(v) for v in random.integers(1, 3, len(names))) for _ in range(30)]
    with zipfile.ZipFile(root / "hmda/2017-NJ-features.zip", "w") as archive:
        archive.writestr("f.csv", "\n".join([",".join(names), *rows]))
    with zipfile.ZipFile(root / "hmda/2017-NJ-target.zip", "w") as archive:
        archive.writestr("t.csv", "\n".join(["action_taken", *(str((1, 3, 2)[i % 3]) for i in range(30))]))
    for file in SETS["a9a"].files:
        (root / file).write_text("-1 1:1 123:1\n+1 2:1\n" * 5)
    arrays = {}
    for part, counts in (("", [3, 2, 5]), ("_test", [2, 2, 2])):
        total = sum(counts)
        arrays |= {f"x{part}": random.integers(0, 256, (total, 784), np.uint8), f"writers{part}": np.array(counts)}
        arrays[f"y{part}"] = np.arange(total, dtype=np.uint8) + 50
    np.savez(root / "femnist/femnist-128.npz", **arrays)
    (root / "tiny-shakespeare/input.txt").write_text("To be, or not to be.\n" * 60)
    write_bert(root, random)
    write_glue(root)
    return root


@pytest.fixture
def real_data():
    if not os.environ.get("HEMIOLA_DATA"):
        pytest.skip("needs the public data sets: set HEMIOLA_DATA to a folder filled by `hemiola data fetch`")
    return Path(os.environ["HEMIOLA_DATA"])

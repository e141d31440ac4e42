"""Readers of the official file formats. A file that is not what it should be is named, with what is wrong."""

from __future__ import annotations

import csv
import gzip
import io
import json
import zipfile
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path

import numpy as np

from hemiola.errors import InputError

_IDX_BYTES = 0x08
_CIFAR_RECORD = 1 + 3 * 32 * 32


@contextmanager
def reading(path: Path) -> Iterator[None]:
    """Turns what can go wrong while a file is read into one line that names the file."""
    try:
        yield
    except InputError:
        raise
    except (EOFError, zlib.error, zipfile.BadZipFile, gzip.BadGzipFile) as error:
        raise InputError(f"cannot read {path}: damaged or cut short ({error})") from error
    except UnicodeDecodeError as error:
        raise InputError(f"cannot read {path}: not UTF-8 text (byte {error.start})") from error
    except (OSError, ValueError, csv.Error) as error:
        raise InputError(f"cannot read {path}: {error}") from error


def read_from_sklearn(name: str, file: str, header: int) -> tuple[np.ndarray, np.ndarray]:
    """Inputs and targets of a table that comes with scikit-learn.

    Importing scikit-learn takes longer than all of a small run, so its file is read; where it has moved, the package
    is asked.

    Args:
        name: In ``sklearn.datasets``, after ``load_``.
        file: In the package's folder of data: numbers with commas, the target last.
        header: Lines of the file before the numbers.
    """
    package = find_spec("sklearn")
    if package is not None and package.origin is not None:
        path = Path(package.origin).parent / "datasets" / "data" / file
        if path.exists():
            with reading(path):
                table = np.loadtxt(path, delimiter=",", skiprows=header)
            return np.ascontiguousarray(table[:, :-1]), table[:, -1].astype(np.int64)
    from sklearn import datasets

    inputs, targets = vars(datasets)[f"load_{name}"](return_X_y=True)
    return inputs, targets


def read_idx(path: Path, dimensions: int) -> np.ndarray:
    """An array of bytes in the IDX format of MNIST, compressed with gzip."""
    with reading(path):
        raw = gzip.decompress(path.read_bytes())
        magic = int.from_bytes(raw[:4], "big")
        if len(raw) < 4 + 4 * dimensions or magic != (_IDX_BYTES << 8) + dimensions:
            raise InputError(
                f"cannot read {path}: not an IDX file of {dimensions}-dimensional bytes (starts with {magic:#010x}, "
                f"should be {(_IDX_BYTES << 8) + dimensions:#010x})"
            )
        shape = np.frombuffer(raw, ">u4", dimensions, offset=4).astype(np.int64)
        values = np.frombuffer(raw, np.uint8, offset=4 + 4 * dimensions)
        if len(values) != shape.prod():
            raise InputError(f"cannot read {path}: holds {len(values)} bytes of data, its header says {shape.prod()}")
        return values.reshape(tuple(shape)).copy()


def read_idx_pair(folder: Path, part: str) -> tuple[np.ndarray, np.ndarray]:
    """Images and labels of ``part`` (``train`` or ``t10k``), which must be equally many."""
    images = read_idx(folder / f"{part}-images-idx3-ubyte.gz", 3)
    path = folder / f"{part}-labels-idx1-ubyte.gz"
    labels = read_idx(path, 1)
    if len(images) != len(labels):
        raise InputError(f"cannot read {path}: {len(labels)} labels for {len(images)} images")
    check_classes(path, labels, 10)
    return images, labels.astype(np.int64)


def read_cifar(paths: list[Path]) -> tuple[np.ndarray, np.ndarray]:
    """Images (N, 3, 32, 32) and labels of CIFAR-10's binary version: records of one label and 3,072 pixels."""
    parts = []
    for path in paths:
        with reading(path):
            raw = np.fromfile(path, np.uint8)
        if len(raw) == 0 or len(raw) % _CIFAR_RECORD:
            raise InputError(
                f"cannot read {path}: {len(raw)} bytes are not whole records of {_CIFAR_RECORD}; it was cut short"
            )
        records = raw.reshape(-1, _CIFAR_RECORD)
        check_classes(path, records[:, 0], 10)
        parts.append(records)
    labels = np.concatenate([records[:, 0] for records in parts]).astype(np.int64)
    images = np.concatenate([records[:, 1:] for records in parts])
    return images.reshape(-1, 3, 32, 32), labels


def read_words(path: Path) -> list[str]:
    """The words of a tokenised text, ``<eos>`` after every line."""
    with reading(path), path.open(encoding="utf-8") as file:
        words = [word for line in file for word in (*line.split(), "<eos>")]
    if not words:
        raise InputError(f"cannot read {path}: it is empty")
    return words


def read_series(path: Path) -> dict[str, np.ndarray]:
    """The series of a CSV file of the M4 competition: one a row, its name first, padded with empty cells."""
    series = {}
    with reading(path), path.open(encoding="utf-8", newline="") as file:
        rows = csv.reader(file)
        if (next(rows, None) or [""])[0] != "V1":
            raise InputError(f"cannot read {path}: its first column should be called V1")
        for name, *cells in rows:
            values = np.array([float(cell) for cell in cells if cell], np.float64)
            if not np.isfinite(values).all():
                raise InputError(f"cannot read {path}: series {name} holds a value that is not finite")
            series[name] = values
    if not series:
        raise InputError(f"cannot read {path}: it holds no series")
    return series


def read_zipped_columns(path: Path, names: tuple[str, ...]) -> dict[str, list[str]]:
    """These columns, as text, of the one CSV file inside a zip archive."""
    with reading(path), zipfile.ZipFile(path) as archive:
        inside = [member for member in archive.namelist() if member.endswith(".csv")]
        if len(inside) != 1:
            raise InputError(f"cannot read {path}: should hold one CSV file, holds {len(inside)}")
        with archive.open(inside[0]) as file:
            rows = csv.reader(io.TextIOWrapper(file, encoding="utf-8", newline=""))
            header = next(rows, None) or []
            absent = [name for name in names if name not in header]
            if absent:
                raise InputError(f"cannot read {path}: no column {', '.join(absent)}")
            columns: dict[str, list[str]] = {name: [] for name in names}
            wanted = [(column.append, header.index(name)) for name, column in columns.items()]
            for row in rows:
                if len(row) != len(header):
                    raise InputError(f"cannot read {path}: a row has {len(row)} cells, the header {len(header)}")
                for append, place in wanted:
                    append(row[place])
    return columns


def read_libsvm(path: Path, features: int) -> tuple[np.ndarray, np.ndarray]:
    """Dense inputs and targets (1 for +1, 0 for -1) of a file in LIBSVM's format."""
    from sklearn.datasets import load_svmlight_file

    with reading(path):
        inputs, targets = load_svmlight_file(str(path), n_features=features, dtype=np.float32, zero_based=False)
    if len(targets) == 0 or not np.isin(targets, (-1, 1)).all():
        raise InputError(f"cannot read {path}: every line should start with +1 or -1")
    return inputs.toarray(), (targets > 0).astype(np.int64)


def read_tsv(path: Path, columns: tuple[int, ...], header: bool) -> list[tuple[str, ...]]:
    """These columns of a file of tab-separated text, in which a quotation mark is a character like any other."""
    rows = []
    with reading(path), path.open(encoding="utf-8-sig", newline="") as file:
        lines = file.read().split("\n")
        for number, line in enumerate(lines, start=1):
            if not line or (header and number == 1):
                continue
            cells = line.rstrip("\r").split("\t")
            if len(cells) <= max(columns):
                raise InputError(f"cannot read {path}: line {number} has {len(cells)} columns, too few")
            rows.append(tuple(cells[column] for column in columns))
    if not rows:
        raise InputError(f"cannot read {path}: it is empty")
    return rows


def read_npz(path: Path, names: tuple[str, ...]) -> list[np.ndarray]:
    """These arrays of a NumPy archive."""
    with reading(path), path.open("rb") as file, np.load(file, allow_pickle=False) as archive:
        absent = [name for name in names if name not in archive]
        if absent:
            raise InputError(f"cannot read {path}: no array {', '.join(absent)}")
        return [archive[name] for name in names]


def read_safetensors(path: Path, names: set[str]) -> dict[str, np.ndarray]:
    """These float32 tensors of a safetensors file: a length, a JSON header of that length, then the bytes."""
    with reading(path):
        raw = path.read_bytes()
        length = int.from_bytes(raw[:8], "little")
        if len(raw) < 8 or length > len(raw) - 8:
            raise InputError(f"cannot read {path}: not a safetensors file, or cut short")
        header = json.loads(raw[8 : 8 + length])
        absent = sorted(names - set(header))
        if absent:
            raise InputError(f"cannot read {path}: no tensor {absent[0]}")
        found = {}
        for name in names:
            kind, shape, (first, last) = (header[name][key] for key in ("dtype", "shape", "data_offsets"))
            count = int(np.prod(shape, dtype=np.int64))
            if kind != "F32":
                raise InputError(f"cannot read {path}: {name} is {kind}, should be F32")
            if 8 + length + last > len(raw) or last - first != 4 * count:
                raise InputError(f"cannot read {path}: {name} is cut short")
            found[name] = np.frombuffer(raw, "<f4", count, offset=8 + length + first).reshape(shape).copy()
    return found


def check_classes(path: Path, labels: np.ndarray, classes: int) -> None:
    """Refuse labels that are not one of so many classes."""
    if len(labels) and labels.max() >= classes:
        raise InputError(f"cannot read {path}: label {labels.max()} is not one of {classes} classes")

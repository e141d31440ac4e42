"""The official formats, on tiny files written here; cut, foreign and impossible ones are named."""

import gzip
import struct
import zipfile

import numpy as np
import pytest

from hemiola.errors import InputError
from hemiola.lab.tasks.files import SETS, require
from hemiola.lab.tasks.readers import (
    read_cifar,
    read_idx,
    read_idx_pair,
    read_libsvm,
    read_npz,
    read_safetensors,
    read_series,
    read_tsv,
    read_words,
    read_zipped_columns,
)


def error_of(call, path, *arguments):
    with pytest.raises(InputError) as caught:
        call(path, *arguments)
    message = str(caught.value)
    assert "\n" not in message
    return message


def idx(array):
    header = struct.pack(f">I{array.ndim}I", 0x0800 + array.ndim, *array.shape)
    return gzip.compress(header + array.astype(np.uint8).tobytes())


IMAGES = np.arange(2 * 3 * 4).reshape(2, 3, 4)


def test_idx(tmp_path):
    path = tmp_path / "x.gz"
    path.write_bytes(idx(IMAGES))
    assert np.array_equal(read_idx(path, 3), IMAGES)


def test_idx_gone_wrong(tmp_path):
    path = tmp_path / "x.gz"
    whole = idx(IMAGES)
    path.write_bytes(whole[:-12])
    assert error_of(read_idx, path, 3).startswith(f"cannot read {path}: damaged or cut short")
    path.write_bytes(b"not gzip at all")
    assert error_of(read_idx, path, 3).startswith(f"cannot read {path}: damaged or cut short")
    path.write_bytes(idx(IMAGES[0]))
    assert "not an IDX file of 3-dimensional bytes (starts with 0x00000802, should be 0x00000803)" in error_of(
        read_idx, path, 3
    )
    path.write_bytes(gzip.compress(gzip.decompress(whole)[:-5]))
    assert error_of(read_idx, path, 3) == f"cannot read {path}: holds 19 bytes of data, its header says 24"
    path.write_bytes(gzip.compress(b"\0"))
    assert "not an IDX file" in error_of(read_idx, path, 3)
    assert "No such file" in error_of(read_idx, tmp_path / "none.gz", 3)


def test_every_prefix_of_an_idx_file_is_refused(tmp_path):
    path = tmp_path / "x.gz"
    whole = idx(IMAGES)
    for length in range(len(whole)):
        path.write_bytes(whole[:length])
        assert str(path) in error_of(read_idx, path, 3)


def test_idx_pairs_must_match(tmp_path):
    (tmp_path / "train-images-idx3-ubyte.gz").write_bytes(idx(IMAGES))
    labels = tmp_path / "train-labels-idx1-ubyte.gz"
    labels.write_bytes(idx(np.array([3, 9])))
    images, read = read_idx_pair(tmp_path, "train")
    assert np.array_equal(images, IMAGES)
    assert read.tolist() == [3, 9]
    labels.write_bytes(idx(np.array([3])))
    assert error_of(read_idx_pair, tmp_path, "train") == f"cannot read {labels}: 1 labels for 2 images"
    labels.write_bytes(idx(np.array([3, 10])))
    assert error_of(read_idx_pair, tmp_path, "train") == f"cannot read {labels}: label 10 is not one of 10 classes"


def test_cifar(tmp_path):
    first, second = tmp_path / "1.bin", tmp_path / "2.bin"
    pixels = np.arange(3072) % 251
    first.write_bytes(bytes([7, *pixels, 0, *pixels[::-1]]))
    second.write_bytes(bytes([9, *pixels]))
    images, labels = read_cifar([first, second])
    assert labels.tolist() == [7, 0, 9]
    assert images.shape == (3, 3, 32, 32)
    assert images[0].ravel().tolist() == pixels.tolist()  # red plane first, row by row
    assert images[1].ravel().tolist() == pixels[::-1].tolist()
    second.write_bytes(second.read_bytes()[:-1])
    assert error_of(lambda p: read_cifar([first, p]), second) == (
        f"cannot read {second}: 3072 bytes are not whole records of 3073; it was cut short"
    )
    second.write_bytes(b"")
    assert "0 bytes are not whole records" in error_of(lambda p: read_cifar([p]), second)
    second.write_bytes(bytes([10, *pixels]))
    assert "label 10 is not one of 10 classes" in error_of(lambda p: read_cifar([p]), second)


def test_words(tmp_path):
    path = tmp_path / "t.txt"
    path.write_text(" \n a  b \nc\n", encoding="utf-8")
    assert read_words(path) == ["<eos>", "a", "b", "<eos>", "c", "<eos>"]
    path.write_bytes(b"ab \xff")
    assert error_of(read_words, path) == f"cannot read {path}: not UTF-8 text (byte 3)"
    path.write_bytes(b"")
    assert error_of(read_words, path) == f"cannot read {path}: it is empty"


def test_series(tmp_path):
    path = tmp_path / "w.csv"
    path.write_text('"V1","V2","V3"\n"W1","1.5","2"\n"W2","3",""\n')
    assert {name: values.tolist() for name, values in read_series(path).items()} == {"W1": [1.5, 2.0], "W2": [3.0]}
    path.write_text("a,b\n")
    assert "its first column should be called V1" in error_of(read_series, path)
    path.write_text('"V1","V2"\n"W1","one"\n')
    assert error_of(read_series, path).startswith(f"cannot read {path}: could not convert string to float")
    path.write_text('"V1","V2"\n"W1","nan"\n')
    assert "series W1 holds a value that is not finite" in error_of(read_series, path)
    path.write_text('"V1","V2"\n')
    assert "it holds no series" in error_of(read_series, path)


def test_zipped_columns(tmp_path):
    path = tmp_path / "x.zip"

    def write(**members):
        with zipfile.ZipFile(path, "w") as archive:
            for name, text in members.items():
                archive.writestr(f"deep/{name}.csv", text)

    write(x="a,b,c\n1,,3\n4,5,6\n")
    assert read_zipped_columns(path, ("c", "a")) == {"c": ["3", "6"], "a": ["1", "4"]}
    assert error_of(read_zipped_columns, path, ("a", "z", "y")) == f"cannot read {path}: no column z, y"
    whole = path.read_bytes()
    path.write_bytes(whole[: len(whole) // 2])
    assert "damaged or cut short" in error_of(read_zipped_columns, path, ("a",))
    write(x="a,b\n1,2\n3\n")
    assert "a row has 1 cells, the header 2" in error_of(read_zipped_columns, path, ("a",))
    write(x="a\n", y="a\n")
    assert "should hold one CSV file, holds 2" in error_of(read_zipped_columns, path, ("a",))


def test_libsvm(tmp_path):
    path = tmp_path / "a9a"
    path.write_text("-1 1:1 3:0.5\n+1 2:1\n")
    inputs, targets = read_libsvm(path, 3)
    assert inputs.tolist() == [[1.0, 0.0, 0.5], [0.0, 1.0, 0.0]]
    assert targets.tolist() == [0, 1]
    path.write_text("-1 1:1\n+1 2:\n")
    assert error_of(read_libsvm, path, 3).startswith(f"cannot read {path}: ")
    path.write_text("2 1:1\n")
    assert "every line should start with +1 or -1" in error_of(read_libsvm, path, 3)
    path.write_text("-1 7:1\n")
    assert error_of(read_libsvm, path, 3).startswith(f"cannot read {path}: ")


@pytest.mark.parametrize("name", SETS)
def test_a_missing_set_says_what_was_looked_for_where_and_what_fetches_it(name, tmp_path):
    first, *others = SETS[name].files
    for file in others:
        (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / file).touch()
    assert error_of(lambda root: require(name, root), tmp_path) == (
        f"data set {name!r} is not complete: looked in {tmp_path} and did not find {first}; "
        f"get it with: hemiola data fetch {name} --data {tmp_path}"
    )
    assert "give the folder with --data DIR or HEMIOLA_DATA" in error_of(lambda root: require(name, root), None)


def test_tab_separated_text(tmp_path):
    path = tmp_path / "x.tsv"
    path.write_text('\ufeffa\tb\tc\n1\t"two\tthree"\r\n\n4\tfive\t6\n')
    assert read_tsv(path, (0, 1), header=True) == [("1", '"two'), ("4", "five")]
    assert read_tsv(path, (2,), header=False)[0] == ("c",)
    path.write_text("a\tb\n1\n")
    assert error_of(read_tsv, path, (1,), True) == f"cannot read {path}: line 2 has 1 columns, too few"
    path.write_text("a\tb\n")
    assert error_of(read_tsv, path, (1,), True) == f"cannot read {path}: it is empty"


def test_archives_of_arrays(tmp_path):
    path = tmp_path / "x.npz"
    np.savez(path, a=np.arange(3), b=np.eye(2))
    (found,) = read_npz(path, ("b",))
    assert np.array_equal(found, np.eye(2))
    assert error_of(read_npz, path, ("a", "c")) == f"cannot read {path}: no array c"
    path.write_bytes(path.read_bytes()[:100])
    assert error_of(read_npz, path, ("a",)).startswith(f"cannot read {path}: ")
    np.savez(path, a=np.array([{}], dtype=object))
    assert error_of(read_npz, path, ("a",)).startswith(f"cannot read {path}: ")


def test_safetensors(tmp_path):
    path = tmp_path / "x.safetensors"
    values = np.arange(6, dtype="<f4")
    weights = '"w":{"dtype":"F32","shape":[2,3],"data_offsets":[8,32]}'
    numbers = '"n":{"dtype":"I64","shape":[1],"data_offsets":[0,8]}'
    header = f"{{{weights},{numbers}}}".encode()
    whole = len(header).to_bytes(8, "little") + header + bytes(8) + values.tobytes()
    path.write_bytes(whole)
    assert np.array_equal(read_safetensors(path, {"w"})["w"], values.reshape(2, 3))
    assert error_of(read_safetensors, path, {"v"}) == f"cannot read {path}: no tensor v"
    assert error_of(read_safetensors, path, {"n"}) == f"cannot read {path}: n is I64, should be F32"
    path.write_bytes(whole[:-1])
    assert error_of(read_safetensors, path, {"w"}) == f"cannot read {path}: w is cut short"
    path.write_bytes(whole[:20])
    assert error_of(read_safetensors, path, {"w"}) == f"cannot read {path}: not a safetensors file, or cut short"
    path.write_bytes(len(header).to_bytes(8, "little") + b"x" * len(header))
    assert error_of(read_safetensors, path, {"w"}).startswith(f"cannot read {path}: ")

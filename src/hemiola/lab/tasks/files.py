"""The data sets that are read from files: what each consists of, where it comes from, and how to know it is whole."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from hemiola.errors import InputError, unknown


@dataclass(frozen=True)
class Download:
    """One file to fetch.

    Attributes:
        urls: Where from, tried in turn.
        checksum: ``"md5:..."`` or ``"sha256:..."`` of the download.
        size: Its bytes, for the progress bar before a server has answered; 0 when unknown.
        path: Where it goes, below the data folder; empty for an archive.
        members: For an archive: each member that is wanted and where it goes.
    """

    urls: tuple[str, ...]
    checksum: str
    size: int
    path: str = ""
    members: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True)
class DataSet:
    """One data set.

    Attributes:
        name: As in ``hemiola data fetch NAME``.
        title: What it is, with its source.
        files: What the tasks read, below the data folder.
        downloads: How to get it; empty when there is no official direct download.
        by_hand: Where to find it when there is none.
    """

    name: str
    title: str
    files: tuple[str, ...]
    downloads: tuple[Download, ...] = ()
    by_hand: str = ""

    def missing(self, root: Path) -> list[str]:
        """The files that are not there."""
        return [file for file in self.files if not (root / file).is_file()]


def _idx(folder: str, bases: tuple[str, ...], md5: dict[str, tuple[str, int]]) -> tuple[Download, ...]:
    return tuple(
        Download(tuple(base + name for base in bases), f"md5:{digest}", size, path=f"{folder}/raw/{name}")
        for name, (digest, size) in md5.items()
    )


_IDX_NAMES = (
    "train-images-idx3-ubyte.gz",
    "train-labels-idx1-ubyte.gz",
    "t10k-images-idx3-ubyte.gz",
    "t10k-labels-idx1-ubyte.gz",
)
_CIFAR_NAMES = (*(f"data_batch_{i}.bin" for i in range(1, 6)), "test_batch.bin")
_WIKITEXT_PARTS = ("train", "valid", "test")
_LIBSVM = "https://www.csie.ntu.edu.tw/~cjlin/libsvmtools/datasets/binary/"
_M4 = "https://raw.githubusercontent.com/Mcompetitions/M4-methods/master/Dataset/"

SETS: dict[str, DataSet] = {
    data_set.name: data_set
    for data_set in (
        DataSet(
            name="mnist",
            title="MNIST handwritten digits (LeCun, Cortes, Burges), 60,000 + 10,000 images of 28 x 28",
            files=tuple(f"MNIST/raw/{name}" for name in _IDX_NAMES),
            downloads=_idx(
                "MNIST",
                ("https://ossci-datasets.s3.amazonaws.com/mnist/", "http://yann.lecun.com/exdb/mnist/"),
                {
                    "train-images-idx3-ubyte.gz": ("f68b3c2dcbeaaa9fbdd348bbdeb94873", 9_912_422),
                    "train-labels-idx1-ubyte.gz": ("d53e105ee54ea40749a09fcbcd1e9432", 28_881),
                    "t10k-images-idx3-ubyte.gz": ("9fb629c4189551a2d022fa330f9573f3", 1_648_877),
                    "t10k-labels-idx1-ubyte.gz": ("ec29112dd5afa0611ce80d1b7f02629c", 4_542),
                },
            ),
        ),
        DataSet(
            name="fashion-mnist",
            title="Fashion-MNIST garments (Xiao, Rasul, Vollgraf, Zalando), 60,000 + 10,000 images of 28 x 28",
            files=tuple(f"FashionMNIST/raw/{name}" for name in _IDX_NAMES),
            downloads=_idx(
                "FashionMNIST",
                ("http://fashion-mnist.s3-website.eu-central-1.amazonaws.com/",),
                {
                    "train-images-idx3-ubyte.gz": ("8d4fb7e6c68d591d4c3dfef9ec88bf0d", 26_421_880),
                    "train-labels-idx1-ubyte.gz": ("25c81989df183df01b3e8a0aad5dffbe", 29_515),
                    "t10k-images-idx3-ubyte.gz": ("bef4ecab320f06d8554ea6380940ec79", 4_422_102),
                    "t10k-labels-idx1-ubyte.gz": ("bb300cfdad3c16e7a12a480ee83cd310", 5_148),
                },
            ),
        ),
        DataSet(
            name="cifar10",
            title="CIFAR-10 pictures (Krizhevsky), binary version, 50,000 + 10,000 images of 32 x 32",
            files=tuple(f"cifar-10-batches-bin/{name}" for name in _CIFAR_NAMES),
            downloads=(
                Download(
                    ("https://www.cs.toronto.edu/~kriz/cifar-10-binary.tar.gz",),
                    "md5:c32a1d4ab5d03f1284b67883e8d87530",
                    0,
                    members=tuple((f"cifar-10-batches-bin/{n}", f"cifar-10-batches-bin/{n}") for n in _CIFAR_NAMES),
                ),
            ),
        ),
        DataSet(
            name="wikitext2",
            title="WikiText-2 (Merity, Xiong, Bradbury, Socher), words of Wikipedia articles, 2.1 million for training",
            files=tuple(f"wikitext-2/{part}.txt" for part in _WIKITEXT_PARTS),
            downloads=(
                Download(
                    (
                        "https://wikitext.smerity.com/wikitext-2-v1.zip",
                        "https://s3.amazonaws.com/research.metamind.io/wikitext/wikitext-2-v1.zip",
                    ),
                    "sha256:92675f1d63015c1c8b51f1656a52d5bdbc33aafa60cc47a218a66e7ee817488c",
                    0,
                    members=tuple(
                        (f"wikitext-2/wiki.{part}.tokens", f"wikitext-2/{part}.txt") for part in _WIKITEXT_PARTS
                    ),
                ),
            ),
        ),
        DataSet(
            name="m4-weekly",
            title="M4 competition (Makridakis, Spiliotis, Assimakopoulos), the 359 weekly series",
            files=("m4-weekly/Weekly-train.csv", "m4-weekly/Weekly-test.csv"),
            downloads=(
                Download(
                    (_M4 + "Train/Weekly-train.csv",),
                    "sha256:d478d3f6ed673e6ed3c2cb0fbed5425f72eedd51318ebebeb0b5ecfcefc37714",
                    4_015_067,
                    path="m4-weekly/Weekly-train.csv",
                ),
                Download(
                    (_M4 + "Test/Weekly-test.csv",),
                    "sha256:3b2bc4be8e636e802260dcd843ca3c5da40536a1fbe1ecb3229a97dae4f44688",
                    44_247,
                    path="m4-weekly/Weekly-test.csv",
                ),
            ),
        ),
        DataSet(
            name="hmda",
            title="Home Mortgage Disclosure Act, applications in New Jersey in 2017, as prepared by Cooper (2023)",
            files=("hmda/2017-NJ-features.zip", "hmda/2017-NJ-target.zip"),
            by_hand="take 2017-NJ-features.zip and 2017-NJ-target.zip from https://github.com/pasta41/hmda",
        ),
        DataSet(
            name="a9a",
            title="Adult census income (Becker, Kohavi), as 123 binary features (Platt; LIBSVM), 32,561 + 16,281 rows",
            files=("a9a/a9a", "a9a/a9a.t"),
            downloads=(
                Download(
                    (_LIBSVM + "a9a",),
                    "sha256:f5d5ffd8d865ff41328e7ee043e4b020816914ff6843ff15b98905ddbedce906",
                    2_329_875,
                    path="a9a/a9a",
                ),
                Download(
                    (_LIBSVM + "a9a.t",),
                    "sha256:1f448a153f0320399a7e40836eb207655b0bde0f21fc941cc472193daa9f5de9",
                    1_164_628,
                    path="a9a/a9a.t",
                ),
            ),
        ),
    )
}


def named_set(name: str) -> DataSet:
    """The set of this name; raises `InputError` listing the sets when there is none."""
    if name not in SETS:
        raise InputError(unknown("data set", name, SETS))
    return SETS[name]


def require(name: str, root: Path | None) -> Path:
    """The data folder, once every file of the set is in it.

    Raises:
        InputError: No data folder was given, or files are missing; says which, where, and what fetches them.
    """
    data_set = SETS[name]
    if root is None:
        raise InputError(
            f"data set {name!r} is read from files: give the folder with --data DIR or HEMIOLA_DATA, "
            f"and fill it with: hemiola data fetch {name} --data DIR"
        )
    missing = data_set.missing(root)
    if missing:
        raise InputError(
            f"data set {name!r} is not complete: looked in {root} and did not find {', '.join(missing)}; "
            f"get it with: hemiola data fetch {name} --data {root}"
        )
    return root

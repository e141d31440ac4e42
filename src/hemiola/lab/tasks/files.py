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

_MINILM_AT = "https://huggingface.co/sentence-transformers/all-MiniLM-L6-v2/resolve/main/"
_MINILM = {
    "config.json": ("953f9c0d463486b10a6871cc2fd59f223b2c70184f49815e7efbcab5d8908b41", 612),
    "vocab.txt": ("07eced375cec144d27c900241f3e339478dec958f92fddbc551f295c992038a3", 231_508),
    "model.safetensors": ("53aa51172d142c89d9012cce15ae4d6cc0ca6895895114379cacb4fab128d9db", 90_868_376),
}


def _glue(name: str, folder: str, title: str) -> DataSet:
    """A task of GLUE. Its archives have no published checksum, so they are left to the user's browser."""
    archive = "GLUE's MRPC from https://gluebenchmark.com/tasks" if name == "mrpc" else f"{_GLUE_AT}{folder}.zip"
    return DataSet(
        name=name,
        title=f"GLUE: {title}",
        files=(f"glue/{folder}/train.tsv", f"glue/{folder}/dev.tsv"),
        by_hand=f"take train.tsv and dev.tsv from {archive}",
    )


_GLUE_AT = "https://dl.fbaipublicfiles.com/glue/data/"

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
        DataSet(
            name="femnist",
            title="Handwritten digits and letters by 128 writers (NIST; LEAF's preparation), 28,395 + 3,218 images",
            files=("femnist/femnist-128.npz",),
            by_hand="make it with https://github.com/TalwalkarLab/leaf, save it as docs/tasks.md says",
        ),
        DataSet(
            name="tiny-shakespeare",
            title="A million characters of Shakespeare's plays (Karpathy)",
            files=("tiny-shakespeare/input.txt",),
            downloads=(
                Download(
                    ("https://raw.githubusercontent.com/karpathy/char-rnn/master/data/tinyshakespeare/input.txt",),
                    "sha256:86c4e6aa9db7c042ec79f339dcb96d42b0075e16b8fc2e86bf0ca57e2dc565ed",
                    1_115_394,
                    path="tiny-shakespeare/input.txt",
                ),
            ),
        ),
        DataSet(
            name="minilm",
            title="all-MiniLM-L6-v2, pretrained weights and vocabulary (sentence-transformers, Apache-2.0)",
            files=tuple(f"minilm-l6/{name}" for name in _MINILM),
            downloads=tuple(
                Download((_MINILM_AT + name,), f"sha256:{digest}", size, path=f"minilm-l6/{name}")
                for name, (digest, size) in _MINILM.items()
            ),
        ),
        _glue("sst2", "SST-2", "Stanford Sentiment Treebank (Socher et al.), 67,349 + 872 snippets of film reviews"),
        _glue("cola", "CoLA", "Corpus of Linguistic Acceptability (Warstadt et al.), 8,551 + 1,043 sentences"),
        _glue("mrpc", "MRPC", "Microsoft Research Paraphrase Corpus (Dolan, Brockett), 3,668 + 408 pairs of sentences"),
        _glue("rte", "RTE", "Recognizing Textual Entailment (Dagan et al. and others), 2,490 + 277 pairs of texts"),
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

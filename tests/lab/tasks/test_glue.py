"""GLUE and MiniLM: tokens, the forward pass against PyTorch's own encoder, embeddings that are kept, frozen layers."""

import importlib.util
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hemiola import cache
from hemiola.errors import InputError
from hemiola.flat import FlatModel
from hemiola.lab.tasks import load_task, minilm
from hemiola.lab.tasks.wordpiece import WordPiece, words


@pytest.fixture
def pieces(folder):
    return WordPiece(folder / "minilm-l6/vocab.txt")


def names(pieces, numbers):
    known = {number: token for token, number in pieces.numbers.items()}
    return [known[number] for number in numbers]


# ------------------------------------------------------------------------------------------------------------- tokens


def test_longest_pieces_first(pieces):
    assert names(pieces, pieces.encode(["The films, UNHAPPYS."], 20)) == (
        ["[CLS]", "the", "film", "##s", ",", "un", "##happy", "##s", ".", "[SEP]"]
    )
    assert names(pieces, pieces.encode(["unhappier is"], 20)) == ["[CLS]", "[UNK]", "is", "[SEP]"]
    assert names(pieces, pieces.encode(["a" * 101], 20)) == ["[CLS]", "[UNK]", "[SEP]"]
    assert names(pieces, pieces.encode([" "], 20)) == ["[CLS]", "[SEP]"]


def test_pairs_are_cut_at_the_longer_text(pieces):
    assert names(pieces, pieces.encode(["a film", "good"], 20)) == ["[CLS]", "a", "film", "[SEP]", "good", "[SEP]"]
    assert names(pieces, pieces.encode(["a a a a", "good good good"], 8)) == (
        ["[CLS]", "a", "a", "a", "[SEP]", "good", "good", "[SEP]"]
    )


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("Crème brûlée", ["creme", "brulee"]),
        ("it's $5.", ["it", "'", "s", "$", "5", "."]),
        ("a\tb\u00a0c\u3000d", ["a", "b", "c", "d"]),
        ("x\u200by\x00z", ["xyz"]),
        ("東京 city", ["東", "京", "city"]),
        ("“quoted”—so", ["“", "quoted", "”", "—", "so"]),
    ],
)
def test_words(text, expected):
    assert words(text) == expected


@given(st.text(max_size=40))
def test_what_is_remembered_between_spaces_is_what_the_whole_text_gives(text):
    """Tokens are remembered by what stands between two spaces: no word may reach across one."""
    assert [word for chunk in text.split(" ") for word in words(chunk)] == words(text)


def test_a_vocabulary_without_special_tokens_is_refused(tmp_path):
    (tmp_path / "vocab.txt").write_text("the\n[PAD]\n")
    with pytest.raises(InputError, match=r"no line \[UNK\], \[CLS\], \[SEP\]"):
        WordPiece(tmp_path / "vocab.txt")


# -------------------------------------------------------------------------------------------------------------- model


def test_the_forward_pass_is_that_of_pytorch_s_encoder(folder):
    model = minilm.pretrained(folder)
    reference = torch.nn.TransformerEncoder(
        torch.nn.TransformerEncoderLayer(
            8, 2, 12, dropout=0.0, activation="gelu", layer_norm_eps=1e-12, batch_first=True
        ),
        2,
        enable_nested_tensor=False,
    ).eval()
    with torch.no_grad():
        for theirs, ours in zip(reference.layers, model.layers, strict=True):
            theirs.self_attn.in_proj_weight.copy_(torch.cat([p.weight for p in (ours.query, ours.key, ours.value)]))
            theirs.self_attn.in_proj_bias.copy_(torch.cat([p.bias for p in (ours.query, ours.key, ours.value)]))
            pairs = [
                (theirs.self_attn.out_proj, ours.merge),
                (theirs.linear1, ours.widen),
                (theirs.linear2, ours.narrow),
            ]
            pairs += [(theirs.norm1, ours.norm_attention), (theirs.norm2, ours.norm_mlp)]
            for into, out in pairs:
                into.load_state_dict(out.state_dict())
        tokens = torch.tensor([[2, 4, 5, 3, 7, 3, 0, 0], [2, 8, 3, 0, 0, 0, 0, 0]])
        types = torch.tensor([[0, 0, 0, 0, 1, 1, 0, 0], [0] * 8])
        stream = model.norm(model.words(tokens) + model.positions.weight[:8] + model.types(types))
        last = reference(stream, src_key_padding_mask=tokens == 0)
        expected = torch.stack([last[0, :6].mean(0), last[1, :3].mean(0)])
        torch.testing.assert_close(model(tokens), expected)


def test_every_copy_is_its_own(folder):
    one, other = minilm.pretrained(folder), minilm.pretrained(folder)
    before = other.words.weight.clone()
    with torch.no_grad():
        one.words.weight.zero_()
    assert torch.equal(other.words.weight, before)


def test_only_the_last_layers_learn(folder):
    task = load_task("glue-minilm", {"task": "rte", "trained": 1}, folder)
    model = task.model()
    learning = {name.split(".")[2] for name, p in model.named_parameters() if p.requires_grad and "layers" in name}
    assert learning == {"1"}
    assert not model.bert.words.weight.requires_grad
    head_only = load_task("glue-minilm", {"task": "rte", "trained": 0}, folder)
    assert FlatModel(head_only.model()).size == 2 * 8 + 2
    assert FlatModel(load_task("glue-minilm", {}, folder).model()).size > 15 * 8


def frozen_and_whole(folder):
    """A model whose first layer is frozen, and the same without memory; texts of different lengths."""
    task = load_task("glue-minilm", {"task": "sst2", "trained": 1}, folder)
    torch.manual_seed(0)
    model = task.model()
    whole = load_task("glue-minilm", {"task": "sst2"}, folder).model()
    whole.load_state_dict(model.state_dict())
    assert not whole.bert._frozen()
    return model, whole, task.train.batch(np.arange(len(task.train)))


def test_what_frozen_layers_make_of_a_text_is_computed_once(folder, monkeypatch):
    model, whole, (tokens, _) = frozen_and_whole(folder)
    passed = []
    layer = type(model.bert.layers[0])
    monkeypatch.setattr(layer, "forward", counted(layer.forward, passed, model.bert.layers[0]))
    texts = {tuple(row) for row in tokens.tolist()}
    assert len(texts) < len(tokens)  # The folder's texts come again and again.
    for _ in range(3):
        torch.testing.assert_close(model(tokens), whole(tokens))
    assert len(passed) == len(texts)


def counted(forward, passed, of):
    def count(self, *given):
        if self is of:
            passed.append(1)
        return forward(self, *given)

    return count


def test_only_so_many_texts_are_remembered(folder, monkeypatch):
    monkeypatch.setattr(minilm, "REMEMBERED", 1)
    model, whole, (tokens, _) = frozen_and_whole(folder)
    torch.testing.assert_close(model(tokens), whole(tokens))
    torch.testing.assert_close(model(tokens), whole(tokens))
    assert len(model.bert._known) == 1


def test_what_is_remembered_does_not_depend_on_its_company(folder):
    """Else a run that was resumed, and met its texts in other batches, would not be the same to the last bit."""
    model, _, (tokens, _) = frozen_and_whole(folder)
    other, _, _ = frozen_and_whole(folder)
    other(tokens[1:2])
    other(tokens[:3])
    assert torch.equal(model(tokens), other(tokens))


def test_gradients_are_those_without_memory(folder):
    model, whole, (tokens, targets) = frozen_and_whole(folder)
    for one in (model, whole):
        for _ in range(2):
            one.zero_grad()
            torch.nn.functional.cross_entropy(one(tokens), targets).backward()
    found = {name: p.grad for name, p in model.named_parameters() if p.requires_grad}
    assert {name.split(".")[2] for name in found if "layers" in name} == {"1"}
    for name, parameter in whole.named_parameters():
        if name in found:
            torch.testing.assert_close(found[name], parameter.grad)


def test_memory_ends_with_what_it_is_of(folder):
    model, whole, (tokens, targets) = frozen_and_whole(folder)
    before = model(tokens)
    for one in (model, whole):
        with torch.no_grad():
            one.bert.layers[0].widen.weight.mul_(3.0)
    assert not torch.allclose(before, whole(tokens))
    torch.testing.assert_close(model(tokens), whole(tokens))
    model.requires_grad_(True)
    torch.nn.functional.cross_entropy(model(tokens), targets).backward()
    assert model.bert.words.weight.grad.abs().sum() > 0


def test_a_model_with_frozen_layers_can_be_vectorised(folder):
    model, whole, (tokens, _) = frozen_and_whole(folder)
    model(tokens)
    values = {name: torch.stack([p, p * 1.5]).detach() for name, p in model.named_parameters() if p.requires_grad}

    def summed(values, tokens, model=model):
        return torch.func.functional_call(model, values, (tokens,)).sum()

    both = torch.stack([tokens, tokens.flip(0)])
    found = torch.func.vmap(torch.func.grad(summed))(values, both)
    shared = torch.func.vmap(torch.func.grad(summed), in_dims=(0, None))(values, tokens)
    for at, batch in enumerate(both):
        own = {name: p.detach().clone() for name, p in whole.named_parameters()}
        own |= {name: value[at] for name, value in values.items()}
        expected = torch.func.grad(summed)(own, batch, whole)
        for name in values:
            torch.testing.assert_close(found[name][at], expected[name], rtol=1e-4, atol=1e-5)
            if at == 0:
                torch.testing.assert_close(shared[name][0], expected[name], rtol=1e-4, atol=1e-5)


def test_texts_of_the_four_tasks(folder):
    pieces = minilm.tokenizer(folder)
    expected = {
        "sst2": ("[CLS] the [UNK] film [UNK] is good [SEP]", [1, 0]),
        "cola": ("[CLS] the film is good . [SEP]", [1, 0]),
        "mrpc": ("[CLS] the film [SEP] a film [SEP]", [1, 0]),
        "rte": ("[CLS] the film is good [SEP] good film [SEP]", [0, 1]),
    }
    for name, (text, labels) in expected.items():
        task = load_task("glue-minilm", {"task": name}, folder)
        inputs, targets = task.train.batch(np.array([0]))
        assert names(pieces, inputs[0].tolist()) == text.split()
        assert task.train.labels()[:2].tolist() == labels
        assert targets.tolist() == labels[:1]


def test_a_batch_is_as_wide_as_its_longest_text_and_that_changes_nothing(folder):
    task = load_task("glue-minilm", {"task": "sst2"}, folder)
    torch.manual_seed(0)
    model = task.model()
    short, _ = task.train.batch(np.array([1]))
    both, _ = task.train.batch(np.array([0, 1]))
    assert short.shape[1] < both.shape[1]
    torch.testing.assert_close(model(short)[0], model(both)[1])


def test_a_label_that_is_none_is_named(folder, tmp_path):
    shutil.copytree(folder / "minilm-l6", tmp_path / "minilm-l6")
    shutil.copytree(folder / "glue", tmp_path / "glue")
    (tmp_path / "glue/RTE/train.tsv").write_text("index\ts\tt\tlabel\n0\ta\tb\tmaybe\n")
    with pytest.raises(InputError, match="label 'maybe' is not one of entailment, not_entailment"):
        load_task("glue-minilm", {"task": "rte"}, tmp_path)


def test_weights_that_are_not_those_of_the_configuration(folder, tmp_path):
    shutil.copytree(folder / "minilm-l6", tmp_path / "minilm-l6")
    config = tmp_path / "minilm-l6/config.json"
    config.write_text(config.read_text().replace('"intermediate_size": 12', '"intermediate_size": 13'))
    with pytest.raises(InputError, match=r"not the model of config.json: .*size mismatch"):
        minilm.pretrained(tmp_path)
    config.write_text('{"vocab_size": 5}')
    minilm._config.cache_clear()
    with pytest.raises(InputError, match="no hidden_size, num_hidden_layers"):
        minilm.pretrained(tmp_path)


# --------------------------------------------------------------------------------------------------------- embeddings


def test_embeddings_are_computed_once_and_kept(folder, tmp_path, monkeypatch):
    monkeypatch.setenv("HEMIOLA_CACHE", str(tmp_path))
    calls = []
    embed = minilm.embed
    monkeypatch.setattr(minilm, "embed", lambda *given: calls.append(1) or embed(*given))
    task = load_task("sst2-logistic", {"examples": 5}, folder)
    assert not calls  # nothing is embedded before it is asked for
    inputs, targets = task.train.batch(np.arange(5))
    torch.testing.assert_close(inputs.square().mean(dim=1), torch.ones(5))
    assert targets.tolist() == [1, 0, 1, 0, 1]
    torch.testing.assert_close(inputs[0], inputs[2])
    again = type(task.train)(folder, "train", 5)
    torch.testing.assert_close(again.batch(np.arange(5))[0], inputs, rtol=0, atol=0)
    assert len(calls) == 1
    (kept,) = (tmp_path / "embeddings").iterdir()
    kept.write_bytes(kept.read_bytes()[:-3])  # A damaged file counts as absent.
    torch.testing.assert_close(type(task.train)(folder, "train", 5).batch(np.arange(5))[0], inputs)
    assert len(calls) == 2
    assert task.convex
    assert not load_task("sst2-logistic", {"l2": 0.0}, folder).convex


def test_an_embedding_does_not_depend_on_its_company(folder):
    texts = [minilm.tokenizer(folder).encode([text], 20) for text in ("a film", "the film is good , good .", "bad")]
    together = minilm.embed(folder, texts)
    np.testing.assert_allclose(together, np.concatenate([minilm.embed(folder, [text]) for text in texts]), atol=1e-6)


def test_arrays_of_the_cache(tmp_path):
    path = tmp_path / "deep" / "x.npy"
    assert cache.kept_array(path, 2) is None
    cache.keep_array(path, np.eye(2))
    assert np.array_equal(cache.kept_array(path, 2), np.eye(2))
    assert cache.kept_array(path, 3) is None
    cache.keep_array(path, np.array([1.0, np.nan]))
    assert cache.kept_array(path, 2) is None
    (tmp_path / "file").write_text("")
    cache.keep_array(tmp_path / "file" / "x.npy", np.eye(2))  # Not a folder: nothing is kept, nothing raised.


# ------------------------------------------------------------------------------------------------------- the real one


@pytest.mark.data
def test_the_real_model_is_that_of_transformers(real_data):
    if importlib.util.find_spec("transformers") is None:
        pytest.skip("transformers is not installed")
    from transformers import AutoTokenizer, BertModel

    folder = real_data / "minilm-l6"
    texts = [("The sea is blue.", "It isn’t green; it's blue!"), ("Señor Ångström", "paid £5")]
    theirs = AutoTokenizer.from_pretrained(folder)(texts, padding=True, return_tensors="pt")
    pieces = minilm.tokenizer(real_data)
    tokens = minilm.padded([pieces.encode(pair, 128) for pair in texts], pieces.pad)
    assert torch.equal(tokens, theirs["input_ids"][:, : tokens.shape[1]])
    reference = BertModel.from_pretrained(folder).eval()
    with torch.no_grad():
        last = reference(**theirs).last_hidden_state
        mask = theirs["attention_mask"].unsqueeze(-1)
        expected = (last * mask).sum(1) / mask.sum(1)
        torch.testing.assert_close(minilm.pretrained(real_data)(tokens), expected, atol=1e-5, rtol=1e-4)


@pytest.mark.data
def test_real_sentences_that_mean_the_same_are_close(real_data):
    if not (Path(real_data) / "minilm-l6/model.safetensors").exists():
        pytest.skip("minilm not in HEMIOLA_DATA")
    pieces = minilm.tokenizer(real_data)
    texts = ["A man is playing the guitar.", "Someone plays a guitar.", "The stock market fell sharply."]
    one, same, other = minilm.embed(real_data, [pieces.encode([text], 128) for text in texts])
    assert one @ same > 0.7
    assert one @ other < 0.2

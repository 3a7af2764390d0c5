"""Language models whose MLPs are mixtures of experts, run through SparseNVFP4Experts."""

from __future__ import annotations

import copy

import pytest
import torch

from farro.evaluation.metrics import kl_divergence
from tests import moe_model

transformers = pytest.importorskip("transformers")


def tiny():
    config = transformers.LlamaConfig(
        vocab_size=97,
        hidden_size=64,
        intermediate_size=192,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=64,
        initializer_range=0.2,
    )
    return transformers.LlamaForCausalLM(config).eval()


@torch.no_grad()
def logits(model, ids):
    return model(ids, use_cache=False).logits[0].double()


def swapped(model, experts, topk):
    """(the model with experts, with sparse ones, with the weights that those stand for)"""
    moe = copy.deepcopy(model)
    names = moe_model.split_mlps_(moe, experts, topk)
    assert len(names) == model.config.num_hidden_layers
    sparse = copy.deepcopy(moe)
    assert moe_model.sparsify_(sparse) == names
    restored = copy.deepcopy(moe)
    for name in names:
        restored.set_submodule(name, moe_model.restored(sparse.get_submodule(name)))
    return moe, sparse, restored


def check(model, ids, experts, topk):
    """All experts are the model; sparse ones are near the weights that they stand for."""
    want = logits(model, ids)
    whole = copy.deepcopy(model)
    moe_model.split_mlps_(whole, experts)
    assert (logits(whole, ids) - want).norm() < 1e-4 * want.norm()
    moe, sparse, restored = (logits(m, ids) for m in swapped(model, experts, topk))
    if topk < experts:
        assert (moe - want).norm() > 1e-3 * want.norm()  # something is left out
    near = kl_divergence(restored, sparse) / len(sparse)
    far = kl_divergence(moe, sparse) / len(sparse)
    return near, far


def test_a_tiny_model(generator):
    torch.manual_seed(generator.initial_seed())
    ids = torch.randint(97, (1, 40), generator=generator)
    near, far = check(tiny(), ids, experts=3, topk=2)
    assert 0 < near < 0.3 * far


def test_its_answers_do_not_change_with_the_layout(generator):
    torch.manual_seed(generator.initial_seed())
    model, ids = tiny(), torch.randint(97, (1, 9), generator=generator)
    moe_model.split_mlps_(model, 3, 2)
    padded = copy.deepcopy(model)
    moe_model.sparsify_(model, backend="reference")
    moe_model.sparsify_(padded, backend="reference", capacity=18)
    assert torch.equal(logits(model, ids), logits(padded, ids))


@pytest.mark.slow
def test_the_demo_model():
    from farro.evaluation.loading import (
        EvaluationError,
        cut_windows,
        find_model,
        load_model,
        load_text,
    )

    try:
        path = find_model(None)
    except EvaluationError as error:
        pytest.skip(str(error))
    model, tokenizer = load_model(path, torch.float32, torch.device("cpu"))
    ids = cut_windows(tokenizer, load_text(None), 128, 1, 0).ids
    # all of them: with fewer, a routing that small changes turn over hides what is measured here
    near, far = check(model, ids, experts=8, topk=8)
    assert 0 < near < 0.2 * far

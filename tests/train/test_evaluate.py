"""Held-out bits per byte, computed by hand; whole documents, whatever the batches."""

import math
from dataclasses import replace

import pytest
import torch
from awake import awake
from tiny_run import tiny_run

from k3.data.loader import Loader
from k3.model.transformer import K3
from k3.ops.spans import Spans
from k3.parallel.mesh import Mesh
from k3.train.evaluate import evaluate, samples

ALONE = Mesh(0, 1, torch.device("cpu"))


@pytest.fixture(scope="module")
def made(corpus):
    run = tiny_run(corpus)
    torch.manual_seed(0)
    model = awake(K3(run.model, dtype=torch.float32))
    return run, model, Loader(run.data)


def test_bits_per_byte_by_hand(made):
    run, model, loader = made
    found = evaluate(model, loader, 10_000, ALONE)
    bits = size = count = 0
    for document in loader.held_out_documents():
        ids = torch.tensor([*loader.tokenizer.encode(document.decode()), 512 - 255])
        with torch.no_grad():
            logp = model.logits(model(ids, Spans.from_lengths([len(ids)])).h_TD).log_softmax(-1)
        bits -= float(logp[:-1].gather(1, ids[1:, None]).double().sum()) / math.log(2)
        size += len(document) - len(loader.tokenizer.token_bytes(int(ids[0])))
        count += len(ids) - 1
    assert (found["eval_bytes"], found["eval_tokens"]) == (size, count)
    assert found["eval_bpb"] == pytest.approx(bits / size, rel=1e-5)
    assert found["eval_loss"] == pytest.approx(bits * math.log(2) / count, rel=1e-5)


def test_batches_do_not_matter_and_context_does(made):
    run, model, loader = made
    small = Loader(replace(run.data, tokens_per_micro_batch=40))
    whole, again, short = (
        evaluate(model, which, context, ALONE)["eval_bpb"]
        for which, context in ((loader, 32), (small, 32), (loader, 4))
    )
    assert again == pytest.approx(whole, rel=1e-6)
    assert short != pytest.approx(whole, rel=1e-6)


def test_a_limit_stops_early_and_the_mode_comes_back(made):
    run, model, loader = made
    model.train()
    few = evaluate(model, loader, 32, ALONE, max_tokens=64)
    assert 0 < few["eval_tokens"] < evaluate(model, loader, 32, ALONE)["eval_tokens"]
    assert model.training and torch.is_grad_enabled()


def test_samples_continue_the_prompts_the_same_way_each_time(made):
    run, model, loader = made
    run = replace(run, sample_prompts=("def f", "x"), sample_tokens=4)
    first = samples(model, loader, run, 3)
    assert [row["prompt"] for row in first] == ["def f", "x"]
    assert all(row["step"] == 3 and row["text"] for row in first)
    assert samples(model, loader, run, 3) == first
    assert samples(model, loader, replace(run, sample_prompts=()), 3) == []

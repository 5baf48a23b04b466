"""The loop on CUDA: bf16 activations, recomputation, going on."""

import math
from dataclasses import replace

import pytest
from tiny_run import rows, tiny_run

from k3.train import pretrain as loop
from k3.train.pretrain import pretrain

pytestmark = pytest.mark.gpu


class Killed(BaseException):
    pass


@pytest.mark.parametrize("remat", ["none", "layer"])
def test_bfloat16_training_follows_float32_on_the_cpu(corpus, straight, tmp_path, remat):
    pretrain(tiny_run(corpus, device="cuda", remat=remat), tmp_path)
    exact, found = ([r["loss"] for r in rows(out) if "loss" in r] for out in (straight, tmp_path))
    # The initial weights come from another generator, so only the course is the same.
    assert found[0] == pytest.approx(math.log(512), rel=0.15)
    assert abs(found[-1] - exact[-1]) < 0.2 * (exact[0] - exact[-1]) + 0.1
    assert rows(tmp_path)[0]["memory_mb"] > 0


def test_a_killed_run_goes_on(corpus, tmp_path, monkeypatch):
    run = replace(tiny_run(corpus, device="cuda", dtype="float32"), steps=8)
    pretrain(run, tmp_path / "straight")
    plain, calls = loop.losses, []

    def dying(model, batch):
        calls.append(None)
        if len(calls) == 9:
            raise Killed
        return plain(model, batch)

    monkeypatch.setattr(loop, "losses", dying)
    with pytest.raises(Killed):
        pretrain(run, tmp_path / "again")
    monkeypatch.undo()
    pretrain(run, tmp_path / "again")
    straight, again = (
        [row["loss"] for row in rows(tmp_path / name) if "loss" in row]
        for name in ("straight", "again")
    )
    # Sums of atomics come in another order each time.
    assert again == pytest.approx(straight, abs=1e-3)

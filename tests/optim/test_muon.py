"""Muon: heads apart, one batch per shape, AdamW for the rest, state by name."""

import itertools
import re

import pytest
import torch
from torch import nn

from k3 import UserError
from k3.ops.facts import ParamFacts
from k3.optim.muon import Muon, OptimConfig, blocks, build_optimizer

MATRIX = ParamFacts("matrix", decay=True)
NORM = ParamFacts("norm", decay=False)


def one_step(weight, grad, facts, **config):
    """The change of one parameter after one step."""
    param = nn.Parameter(weight.clone())
    optimizer = Muon([("w", param)], {"w": facts}, OptimConfig(**{"weight_decay": 0.0} | config))
    param.grad = grad.clone()
    optimizer.step()
    return param.detach() - weight


def head_rms(kind):
    """RMS of each of eight heads' steps when their gradients fall by sqrt(10) from head to head."""
    torch.manual_seed(0)
    fall = torch.tensor(10.0) ** (-0.5 * torch.arange(8))
    grad = torch.randn(8, 64, 512) * fall[:, None, None]
    facts = ParamFacts("matrix", decay=True, heads=8)
    step = one_step(torch.zeros(512, 512), grad.view(512, 512), facts, kind=kind, lr=1.0)
    return step.view(8, -1).square().mean(1).sqrt()


def test_per_head_steps_are_equal_and_whole_matrix_steps_are_not():
    even, uneven = head_rms("per_head"), head_rms("whole")
    assert even.max() / even.min() < 1.02
    assert uneven.max() / uneven.min() > 50
    # An orthogonal 64x512 block has RMS 1/sqrt(512); the scale makes that 0.2 (Newton-Schulz leaves
    # 0.7-1.1 of it).
    assert ((even > 0.2 * 0.7) & (even < 0.2 * 1.1)).all()


def test_blocks_of_interleaved_rows_are_cut_per_head():
    facts = ParamFacts("matrix", decay=True, heads=2, head_rows=(3, 2))
    x = torch.arange(10.0)[:, None].expand(10, 4).contiguous()
    nope, value = blocks(x, facts)
    assert nope[..., 0].tolist() == [[0, 1, 2], [5, 6, 7]]
    assert value[..., 0].tolist() == [[3, 4], [8, 9]]
    assert nope.data_ptr() == x.data_ptr()


def test_a_batch_of_equal_blocks_equals_each_alone():
    torch.manual_seed(1)
    facts = {
        "tall": MATRIX,
        "wide": MATRIX,
        "experts": ParamFacts("expert", decay=True, expert_axis=0),
        "q": ParamFacts("matrix", decay=True, heads=2),
        "kv": ParamFacts("matrix", decay=True, heads=2, head_rows=(16, 8)),
    }
    shapes = {
        "tall": (24, 16), "wide": (16, 24), "experts": (3, 16, 24), "q": (32, 24), "kv": (48, 24)
    }  # fmt: skip
    params = {name: nn.Parameter(torch.randn(shape)) for name, shape in shapes.items()}
    before = {name: param.detach().clone() for name, param in params.items()}
    grads = {name: torch.randn_like(param) for name, param in params.items()}
    optimizer = build_optimizer(params.items(), facts, OptimConfig(weight_decay=0.0))
    for name, param in params.items():
        param.grad = grads[name].clone()
    optimizer.step()
    for name, param in params.items():
        alone = one_step(before[name], grads[name], facts[name])
        torch.testing.assert_close(param.detach() - before[name], alone, rtol=1e-4, atol=1e-6)
    for expert in range(3):
        alone = one_step(before["experts"][expert], grads["experts"][expert], MATRIX)
        step = (params["experts"].detach() - before["experts"])[expert]
        torch.testing.assert_close(step, alone, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("shape", ((48, 32), (32, 48), (24, 24), (8, 96)), ids=str)
def test_two_dimensional_muon_equals_torch(shape, monkeypatch):
    """50 steps down a least-squares slope: an early difference would come back in the gradient."""
    # torch iterates in bfloat16 whatever it is given; in float32 the two agree to rounding.
    monkeypatch.setattr(torch.Tensor, "bfloat16", torch.Tensor.float)
    torch.manual_seed(2)
    start, x, y = torch.randn(shape), torch.randn(64, shape[1]), torch.randn(64, shape[0])

    def descend(make, **changes):
        weight = nn.Parameter(start.clone())
        optimizer = make(weight, **{"lr": 0.02, "weight_decay": 0.1, "momentum": 0.95} | changes)
        for _ in range(50):
            optimizer.zero_grad()
            (x @ weight.T - y).square().mean().backward()
            optimizer.step()
        return weight.detach()

    def ours(weight, **numbers):
        return Muon([("w", weight)], {"w": MATRIX}, OptimConfig(kind="whole", **numbers))

    def theirs(weight, **numbers):
        return torch.optim.Muon([weight], adjust_lr_fn="match_rms_adamw", **numbers)

    expected = descend(theirs)
    torch.testing.assert_close(descend(ours), expected, rtol=0, atol=3e-6)
    assert (expected - start).abs().max() > 0.1
    for wrong in ({"momentum": 0.949}, {"weight_decay": 0.09}, {"nesterov": False}):
        assert (descend(ours, **wrong) - expected).abs().max() > 1e-4, wrong


def test_adamw_group_equals_torch():
    torch.manual_seed(3)
    facts = {"gain": NORM, "embed": ParamFacts("embedding", decay=True)}
    ours = {"gain": nn.Parameter(torch.ones(8)), "embed": nn.Parameter(torch.randn(16, 8))}
    theirs = {name: nn.Parameter(param.detach().clone()) for name, param in ours.items()}
    config = OptimConfig(lr=0.01, adamw_lr_scale=0.5)
    optimizer = Muon(ours.items(), facts, config)
    groups = [
        {"params": [theirs["gain"]], "weight_decay": 0.0},
        {"params": [theirs["embed"]], "weight_decay": 0.1},
    ]
    reference = torch.optim.AdamW(groups, lr=0.005, betas=config.betas, eps=config.eps)
    for _ in range(5):
        for name in ours:
            ours[name].grad = torch.randn_like(ours[name])
            theirs[name].grad = ours[name].grad.clone()
        optimizer.step()
        reference.step()
    for name in ours:
        torch.testing.assert_close(ours[name].detach(), theirs[name].detach(), rtol=0, atol=1e-6)


def test_adamw_kind_gives_no_matrix_to_muon():
    param = nn.Parameter(torch.randn(4, 4))
    optimizer = Muon([("w", param)], {"w": MATRIX}, OptimConfig(kind="adamw"))
    assert sorted(optimizer.state_dict()) == ["exp_avg.w", "exp_avg_sq.w", "step.w"]


def test_conv_router_and_query_are_not_orthogonalised():
    facts = {role: ParamFacts(role, decay=False) for role in ("conv", "router", "query", "head")}
    shapes = {"conv": (8, 1, 4), "router": (4, 8), "query": (1, 8), "head": (32, 8)}
    named = [(name, nn.Parameter(torch.randn(shape))) for name, shape in shapes.items()]
    keys = Muon(named, facts, OptimConfig()).state_dict()
    assert not [key for key in keys if key.startswith("momentum")]


def test_parameters_without_gradient_keep_value_and_state():
    facts = {"a": MATRIX, "b": MATRIX, "c": NORM, "d": ParamFacts("query", False, frozen=True)}
    params = {n: nn.Parameter(torch.randn(4, 4)) for n in "ab"} | {
        n: nn.Parameter(torch.randn(4)) for n in "cd"
    }
    optimizer = Muon(params.items(), facts, OptimConfig(lr=0.1))
    before = {name: param.detach().clone() for name, param in params.items()}
    params["a"].grad = torch.randn(4, 4)
    optimizer.step()
    assert not torch.equal(params["a"], before["a"])
    assert all(torch.equal(params[name], before[name]) for name in "bcd")
    state = optimizer.state_dict()
    assert state["momentum.b"].abs().sum() == 0 and int(state["step.c"]) == 0
    assert not [key for key in state if key.endswith(".d")]


def make(dtype=torch.float32, seed=4):
    torch.manual_seed(seed)
    facts = {
        "w": ParamFacts("matrix", True, heads=2),
        "n": NORM,
        "e": ParamFacts("embedding", True),
    }
    params = {
        "w": nn.Parameter(torch.randn(8, 6).to(dtype)),
        "n": nn.Parameter(torch.ones(6, dtype=dtype)),
        "e": nn.Parameter(torch.randn(10, 6).to(dtype)),
    }
    return params, Muon(params.items(), facts, OptimConfig(lr=0.05))


def feed(params, optimizer, seeds):
    for seed in seeds:
        torch.manual_seed(100 + seed)
        for param in params.values():
            param.grad = torch.randn_like(param)
        optimizer.step()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_state_round_trip_gives_the_same_next_updates(dtype):
    straight, optimizer = make(dtype)
    feed(straight, optimizer, range(4))
    first, saving = make(dtype)
    feed(first, saving, range(2))
    saved = {key: value.clone() for key, value in saving.state_dict().items()}
    second, loading = make(dtype, seed=5)
    for name, param in second.items():
        param.data.copy_(first[name].data)
    loading.load_state_dict(saved)
    feed(second, loading, range(2, 4))
    assert all(torch.equal(straight[name], second[name]) for name in straight)
    forgetful, fresh = make(dtype, seed=5)
    for name, param in forgetful.items():
        param.data.copy_(first[name].data)
    feed(forgetful, fresh, range(2, 4))
    assert not torch.equal(straight["w"], forgetful["w"])


def test_state_is_float32_for_bfloat16_gradients_and_small_steps_add_up():
    params, optimizer = make(torch.bfloat16)
    feed(params, optimizer, range(1))
    state = optimizer.state_dict()
    assert all(v.dtype == torch.float32 for k, v in state.items() if not k.startswith("step"))
    gain = nn.Parameter(torch.ones(4, dtype=torch.bfloat16))
    tiny = Muon([("n", gain)], {"n": NORM}, OptimConfig(lr=1e-3))
    for _ in range(20):
        gain.grad = torch.ones_like(gain)
        tiny.step()
    # Twenty steps of 1e-3, each below bfloat16's half spacing of 2e-3 under 1: all would vanish
    # without a master.
    assert abs(float(gain.detach()[0]) - 0.98) < 4e-3


def test_the_master_follows_a_parameter_that_someone_else_wrote():
    params, optimizer = make(torch.bfloat16)
    feed(params, optimizer, range(1))
    with torch.no_grad():
        params["w"].mul_(0.5)
    halved = params["w"].detach().clone()
    for param in params.values():
        param.grad = torch.zeros_like(param)
    optimizer.set_lr(0.0)
    optimizer.step()
    assert torch.equal(params["w"], halved)


def test_wrong_state_is_refused_by_name():
    _, optimizer = make()
    state = optimizer.state_dict()
    without = {key: value for key, value in state.items() if key != "momentum.w"}
    with pytest.raises(UserError, match=r"'momentum\.w' is missing"):
        optimizer.load_state_dict(without)
    with pytest.raises(UserError, match=r"'momentum\.ghost' is not expected"):
        optimizer.load_state_dict(state | {"momentum.ghost": torch.zeros(1)})
    with pytest.raises(UserError, match=re.escape("shape (2, 2), expected (8, 6)")):
        optimizer.load_state_dict(state | {"momentum.w": torch.zeros(2, 2)})


def test_learning_rate_and_decay_apply_to_both_rules():
    params, optimizer = make()
    before = {name: param.detach().clone() for name, param in params.items()}
    for param in params.values():
        param.grad = torch.zeros_like(param)
    optimizer.set_lr(0.5)
    optimizer.step()
    shrink = 1 - 0.05 * 0.5 * 0.1
    torch.testing.assert_close(params["w"].detach(), before["w"] * shrink)
    torch.testing.assert_close(params["e"].detach(), before["e"] * shrink)
    assert torch.equal(params["n"], before["n"])


def test_matrices_take_lr_under_either_rule_and_queries_less():
    facts = {"w": MATRIX, "n": NORM, "q": ParamFacts("query", decay=False)}
    for kind in ("per_head", "adamw"):
        params = {"w": torch.ones(4, 16), "n": torch.ones(16), "q": torch.ones(1, 16)}
        named = [(name, nn.Parameter(value)) for name, value in params.items()]
        optimizer = Muon(named, facts, OptimConfig(kind=kind, lr=0.1, adamw_lr_scale=2.0))
        names = {
            optimizer.names[param]: group["initial_lr"]
            for group in optimizer.param_groups
            for param in group["params"]
        }
        assert names == pytest.approx({"w": 0.1, "n": 0.2, "q": 0.2 / 4})


def test_facts_that_do_not_fit_are_refused():
    for shape, facts in [
        ((4, 4, 4), MATRIX),
        ((9, 4), ParamFacts("matrix", True, heads=2)),
        ((8, 4), ParamFacts("matrix", True, heads=2, head_rows=(3, 2))),
        ((4, 4), ParamFacts("expert", True, expert_axis=0)),
    ]:
        with pytest.raises(ValueError, match="^w: "):
            Muon([("w", nn.Parameter(torch.randn(shape)))], {"w": facts}, OptimConfig())


def test_a_large_stack_is_cut_into_batches(monkeypatch):
    torch.manual_seed(6)
    weight, grad = torch.randn(5, 8, 12), torch.randn(5, 8, 12)
    facts = ParamFacts("expert", True, expert_axis=0)
    whole = one_step(weight, grad, facts)
    monkeypatch.setattr("k3.optim.muon.MAX_BATCH", 2 * 8 * 12)
    torch.testing.assert_close(one_step(weight, grad, facts), whole, rtol=1e-4, atol=1e-6)


def test_bad_config_names_field_and_value():
    for field, value in itertools.chain(
        [("kind", "muon"), ("lr", 0.0), ("momentum", 1.0), ("ns_dtype", "int8")],
        [("betas", (0.9, 1.0)), ("grad_clip", -1.0), ("qk_clip", 0.0), ("weight_decay", -0.1)],
    ):
        with pytest.raises(UserError, match=rf"optim\.{field}.*{re.escape(str(value))}"):
            OptimConfig(**{field: value})

"""One rank without torch.distributed, several through it, one line when it can't be had."""

import re

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from k3 import UserError
from k3.parallel.data_parallel import same_everywhere, sum_gradients
from k3.parallel.mesh import ENVIRONMENT, Mesh, open_mesh, pick_device


@pytest.fixture(autouse=True)
def _no_torchrun(monkeypatch):
    for name in ENVIRONMENT:
        monkeypatch.delenv(name, raising=False)


def test_one_rank_needs_no_process_group():
    with open_mesh("cpu") as mesh:
        assert (mesh.rank, mesh.world, mesh.device) == (0, 1, torch.device("cpu"))
        assert mesh.is_main and not dist.is_initialized()
        x = torch.arange(3)
        assert mesh.sum_(x) is x and mesh.max_(x) is x and mesh.gather_rows(x) is x
        assert mesh.largest(7) == 7
        mesh.barrier()


def test_a_device_that_is_not_there_is_named():
    assert pick_device("cpu") == torch.device("cpu")
    with pytest.raises(UserError, match="device: auto, cpu or cuda, got 'gpu'"):
        pick_device("gpu")
    if not torch.cuda.is_available():
        assert pick_device("auto") == torch.device("cpu")
        with pytest.raises(UserError, match="no CUDA device"):
            pick_device("cuda")


def test_an_incomplete_environment_is_one_line(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "0")
    with (
        pytest.raises(UserError, match="LOCAL_RANK is not: start ranks with torchrun"),
        open_mesh("cpu"),
    ):
        pass


def test_ranks_that_never_come_are_one_line(monkeypatch):
    port = str(free_port())
    values = dict(zip(ENVIRONMENT, ("0", "2", "0", "127.0.0.1", port), strict=True))
    for name, value in values.items():
        monkeypatch.setenv(name, value)
    expected = re.escape(f"rank 0 of 2 could not join gloo at 127.0.0.1:{port}: ")
    with pytest.raises(UserError, match=expected) as caught, open_mesh("cpu", timeout_s=1.0):
        pass
    assert "\n" not in str(caught.value)


def free_port() -> int:
    import socket

    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return int(s.getsockname()[1])


def in_ranks(function, world, *args):
    """Runs function(mesh, *args) in `world` gloo processes."""
    mp.start_processes(
        _rank, args=(function, world, free_port(), args), nprocs=world, start_method="spawn"
    )


def _rank(rank, function, world, port, args):
    import os

    torch.set_num_threads(1)
    values = (str(rank), str(world), str(rank), "127.0.0.1", str(port))
    os.environ.update(zip(ENVIRONMENT, values, strict=True))
    with open_mesh("cpu") as mesh:
        function(mesh, *args)


def check_three_ranks(mesh: Mesh) -> None:
    assert mesh.sum_(torch.tensor([mesh.rank, 1])).tolist() == [3, 3]
    assert mesh.max_(torch.tensor([-mesh.rank])).item() == 0
    assert mesh.largest(int(mesh.rank == 1)) == 1
    rows = mesh.gather_rows(torch.full((mesh.rank, 2), float(mesh.rank)))
    assert rows.tolist() == [[1.0, 1.0], [2.0, 2.0], [2.0, 2.0]]

    params = [torch.nn.Parameter(torch.zeros(n)) for n in (3, 4, 5)]
    params[0].grad = torch.full((3,), float(mesh.rank + 1))
    if mesh.rank == 2:
        params[1].grad = torch.arange(4.0)
    sum_gradients(params, mesh)
    assert params[0].grad.tolist() == [6.0] * 3
    assert params[1].grad.tolist() == [0.0, 1.0, 2.0, 3.0]
    assert params[2].grad is None

    equal = torch.arange(5.0)
    assert same_everywhere([equal, equal.to(torch.bfloat16)], mesh)
    equal[0] += 1e-20 * mesh.rank
    assert not same_everywhere([equal], mesh)


def check_small_buckets(mesh: Mesh) -> None:
    import k3.parallel.data_parallel as data_parallel

    data_parallel.BUCKET = 6
    dtypes = (torch.float32, torch.bfloat16, torch.float32, torch.float32)
    params = [
        torch.nn.Parameter(torch.zeros(2, n, dtype=d))
        for n, d in zip((2, 1, 9, 1), dtypes, strict=True)
    ]
    for index, param in enumerate(params):
        param.grad = torch.full_like(param, index + mesh.rank)
    sum_gradients(params, mesh)
    for index, param in enumerate(params):
        assert torch.equal(param.grad, torch.full_like(param, 2 * index + 1))


def test_sums_maxima_and_gradients_over_three_gloo_ranks():
    in_ranks(check_three_ranks, 3)


def test_gradients_travel_in_buckets_of_one_dtype():
    in_ranks(check_small_buckets, 2)

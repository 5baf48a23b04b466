"""Packed MXFP4 bytes against compressed-tensors, of rows and of a whole checkpoint."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from mlx_peer import MLX
from tiny_models import comparable, logits, random_model, tiny
from torch import Tensor
from vendor import package_folder, stored

from k3.checkpoint.layout import tensor_specs
from k3.checkpoint.released import load_released, quantization_config, save_released
from k3.ops.mx import pack_mxfp4, unpack_mxfp4

pytestmark = pytest.mark.peers


@pytest.fixture(scope="module")
def theirs() -> Any:
    """Their compressor with the scheme that our config.json declares."""
    package_folder("compressed_tensors")
    package_folder("transformers")
    return _Theirs(quantization_config())


class _Theirs:
    def __init__(self, declared: dict[str, Any]) -> None:
        from compressed_tensors.compressors.mxfp4 import MXFP4PackedCompressor
        from compressed_tensors.quantization import QuantizationConfig

        self.compressor = MXFP4PackedCompressor
        self.scheme = QuantizationConfig(**declared).config_groups["group_0"]

    def pack(self, w_OI: Tensor) -> tuple[Tensor, Tensor]:
        from compressed_tensors.quantization.utils import calculate_qparams

        w_OG32 = w_OI.unflatten(-1, (-1, 32))
        scale, _ = calculate_qparams(w_OG32.amin(-1), w_OG32.amax(-1), self.scheme.weights)
        packed = self.compressor.compress({"weight": w_OI, "weight_scale": scale}, self.scheme)
        return packed["weight_packed"], packed["weight_scale"]

    def unpack(self, packed: Tensor, scale: Tensor) -> Tensor:
        stored = {"weight_packed": packed, "weight_scale": scale}
        return self.compressor.decompress(stored, self.scheme)["weight"]


def rows() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    normal = torch.randn(64, 96, generator=generator)
    grid = torch.arange(32) / 4 - 4.0  # every quarter from -4 to 3.75: all values and all ties
    ends = torch.cat([grid[:-1], torch.tensor([6.0])])
    peaks = torch.tensor([1.0, 1.5, 1.7499, 1.75, 1.7501, 1.99, 3.5, 6.0, 6.9, 7.0, 7.5, 8.0])
    peaked = normal[: len(peaks), :32].clamp(-1, 1) * peaks[:, None] / 2
    peaked[:, 5] = peaks
    powers = 2.0 ** torch.arange(-120, 120, 5)
    return {
        "normal": normal,
        "initial weights": 0.02 * normal,
        "ties": torch.stack([ends * 2.0**n for n in (-20, -2, 0, 1, 17)]),
        "peaks around the bump": torch.cat([peaked, -peaked]),
        "zeros": torch.zeros(2, 64),
        "signed zeros": torch.tensor([[0.0, -0.0] * 16, [4.0, -0.0, 0.0, -0.01] * 8]),
        "one value": torch.eye(32) * -3.0,
        "from tiny to huge": normal[: len(powers), :32].clamp(-2, 2) * powers[:, None],
        "wide inside a group": (2.0 ** (8 * normal)).clamp(max=1e30) * normal.sign(),
    }


@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16), ids=str)
@pytest.mark.parametrize("name", rows())
def test_bytes(theirs: _Theirs, name: str, dtype: torch.dtype) -> None:
    w_OI = rows()[name].to(dtype)
    packed, scale = pack_mxfp4(w_OI)
    their_packed, their_scale = theirs.pack(w_OI)
    assert torch.equal(scale, their_scale)
    assert torch.equal(packed, their_packed)
    value = unpack_mxfp4(packed, scale)
    assert torch.equal(value, theirs.unpack(packed, scale).to(value.dtype))


def test_every_byte_means_the_same(theirs: _Theirs) -> None:
    """Every pair of values at one scale, and every scale but the last, which is not a number."""
    packed = torch.arange(256, dtype=torch.uint8).repeat(16, 1)
    scale = torch.arange(256).clamp(max=254).to(torch.uint8).view(16, 16)
    value = unpack_mxfp4(packed, scale)
    assert torch.equal(value, theirs.unpack(packed, scale).to(value.dtype))


def test_packed_checkpoint(theirs: _Theirs, tmp_path: Path) -> None:
    model = random_model(tiny(4, kda__head_dim=24, attnres__block_size=3), 0)
    save_released(model, tmp_path / "packed", experts="mxfp4")
    tensors, again = stored(tmp_path / "packed"), load_released(tmp_path / "packed")
    declared = json.loads((tmp_path / "packed" / "config.json").read_text())
    theirs = _Theirs(declared["text_config"]["quantization_config"])
    seen = 0
    for spec in tensor_specs(model.config, "mxfp4"):
        if not spec.name.endswith(".weight_packed"):
            continue
        scale_name = spec.name.replace("_packed", "_scale")
        packed, scale = theirs.pack(model.get_parameter(spec.source).detach()[spec.expert])
        assert torch.equal(tensors[spec.name], packed), spec.name
        assert torch.equal(tensors[scale_name], scale), scale_name
        value = again.get_parameter(spec.source).detach()[spec.expert]
        assert torch.equal(value, theirs.unpack(packed, scale).to(value.dtype)), spec.name
        seen += 1
    assert seen == 3 * 3 * 8


def test_mlx_runs_the_packed_checkpoint(tmp_path: Path) -> None:
    """Nibble order, scales and the declared scheme, end to end through their quantised experts."""
    package_folder("mlx_lm")
    model, ids = comparable(tiny(4), 24)
    save_released(model, tmp_path / "packed", dtype="float32", experts="mxfp4")
    packed = logits(load_released(tmp_path / "packed"), ids)
    theirs = MLX(tmp_path / "packed")
    assert theirs.config["quantization"]["mode"] == "mxfp4"
    assert float((theirs.logits(ids) - packed).abs().max()) <= 1e-4
    assert float((logits(model, ids) - packed).abs().max()) > 1e-2

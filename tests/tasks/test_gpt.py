"""The GPT: its sizes, its causality, its positions."""

import math

import pytest
import torch

from thinwire.tasks.gpt import GPT, SIZES, Attention, GPTConfig, rotary_angles, rotate

TINY = GPTConfig(vocab=11, context=8, layers=2, width=16, heads=2)


@pytest.mark.parametrize(
    ("size", "millions"),
    [("pico", 0.1150), ("micro", 0.4266), ("nano", 0.820), ("small", 3.213), ("medium", 10.721), ("124m", 123.55)],
)
def test_parameter_counts(size: str, millions: float):
    config = SIZES[size]
    with torch.device("meta"):
        model = GPT(config)
    count = sum(p.numel() for p in model.parameters())
    # 12 C^2 and two norms per layer, one norm, and one embedding for both ends.
    c, n = config.width, config.layers
    assert count == n * (12 * c * c + 2 * c) + c + config.vocab * c
    assert count / 1e6 == pytest.approx(millions, rel=1e-3)


def test_every_parameter_is_a_matrix_or_a_norm():
    shapes = {name: parameter.dim() for name, parameter in GPT(TINY).named_parameters()}
    assert all(dim == (1 if "norm" in name else 2) for name, dim in shapes.items())


def test_a_later_token_does_not_change_earlier_scores():
    torch.manual_seed(0)
    model = GPT(TINY)
    tokens = torch.randint(0, 11, (3, 8))
    changed = tokens.clone()
    changed[:, 5] = (changed[:, 5] + 1) % 11
    before, after = model(tokens), model(changed)
    assert before.shape == (3, 8, 11)
    torch.testing.assert_close(before[:, :5], after[:, :5], rtol=0, atol=0)
    assert ((before[:, 5:] - after[:, 5:]).abs().amax(dim=(0, 2)) > 1e-6).all()


def test_a_prefix_has_the_scores_of_the_whole():
    torch.manual_seed(0)
    model = GPT(TINY)
    tokens = torch.randint(0, 11, (2, 8))
    torch.testing.assert_close(model(tokens[:, :3]), model(tokens)[:, :3])


def test_order_of_tokens_matters():
    model = GPT(TINY)
    a, b = model(torch.tensor([[1, 2, 3]])), model(torch.tensor([[2, 1, 3]]))
    # Attention alone would see the same set of tokens before the last one.
    assert (a[0, -1] - b[0, -1]).abs().max() > 1e-6


def test_rotation_keeps_lengths_and_knows_distances_only():
    cos, sin = rotary_angles(context=16, features=8)
    torch.manual_seed(0)
    q, k = torch.randn(2, 8)
    turned_q, turned_k = (rotate(v.expand(1, 1, 16, 8), cos, sin)[0, 0] for v in (q, k))
    torch.testing.assert_close(turned_q.norm(dim=-1), q.norm().expand(16))
    scores = turned_q @ turned_k.T  # [16, 16]
    for distance in range(16):
        line = scores.diagonal(-distance)
        torch.testing.assert_close(line, line[:1].expand_as(line), rtol=1e-4, atol=1e-5)


def test_attention_does_not_change_when_all_positions_move():
    torch.manual_seed(0)
    attention, x = Attention(TINY), torch.randn(2, 8, 16)
    cos, sin = rotary_angles(context=20, features=8)
    here, moved = attention(x, cos[:8], sin[:8]), attention(x, cos[12:], sin[12:])
    torch.testing.assert_close(here, moved, rtol=1e-4, atol=1e-5)
    assert not torch.allclose(here, attention(x, torch.ones(8, 4), torch.zeros(8, 4)), atol=1e-3)


def test_initial_weights():
    torch.manual_seed(0)
    config = SIZES["nano"]
    for name, weight in GPT(config).named_parameters():
        if weight.dim() == 1:
            assert torch.equal(weight, torch.ones_like(weight)), name
        else:
            residual = name.endswith(("out.weight", "down.weight"))
            expected = 0.02 / math.sqrt(2 * config.layers) if residual else 0.02
            assert weight.std().item() == pytest.approx(expected, rel=0.03), name


def test_angles_are_not_in_the_checkpoint():
    assert not {"cos", "sin"} & set(GPT(TINY).state_dict())


def test_too_long_a_sequence():
    with pytest.raises(ValueError, match="at most 8 tokens, got 9"):
        GPT(TINY)(torch.zeros(1, 9, dtype=torch.long))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"width": 100, "heads": 8}, r"width must be a multiple of 2 \* heads = 16, got 100"),
        ({"width": 6, "heads": 2}, r"width must be a multiple of 2 \* heads = 4, got 6"),
        ({"layers": 0}, "layers must be at least 1, got 0"),
    ],
)
def test_impossible_shapes(settings: dict[str, int], message: str):
    with pytest.raises(ValueError, match=message):
        GPTConfig(**settings)

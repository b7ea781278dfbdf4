"""What one tensor-parallel process of test_head.py does: its part against one process that holds everything."""

from __future__ import annotations

import torch
import torch.distributed as dist

from rl360.trainers.logprobs import Predictions, backward_through_head, token_logprobs
from rl360.trainers.megatron.head import HeadPredictions, head_logprobs, head_loss

GARBAGE = 3.0e4  # in the padded rows: would win every softmax


def case(seed, positions, tokens, vocab, width=6, dtype=torch.float64):
    """Several tokens may follow a position, and some are the same token; every position predicts at least one."""
    generator = torch.Generator().manual_seed(seed)
    hidden = torch.randn(positions, width, generator=generator, dtype=torch.float64)
    head = torch.randn(vocab, width, generator=generator, dtype=torch.float64)
    slots = torch.cat([torch.arange(positions), torch.randint(max(positions, 1), (tokens,), generator=generator)])
    slots = slots.sort().values if positions else slots[:0]
    targets = torch.randint(vocab, (slots.numel(),), generator=generator)
    if slots.numel() > 3:  # twice the same token from the same position, for certain
        slots[1], targets[1] = slots[0], targets[0]
    temperatures = torch.rand(positions, generator=generator) + 0.5
    return hidden.to(dtype), head.to(dtype), temperatures, slots, targets


def on_host(temperatures, slots, targets):
    return HeadPredictions.of(temperatures.numpy(), slots.numpy(), targets.numpy())


def shard(head, rank, size, multiple):
    """This rank's rows, padded as Megatron pads: to a multiple of `multiple` rows a rank."""
    rows = -(-head.shape[0] // (multiple * size)) * multiple
    padded = torch.full((rows * size, head.shape[1]), GARBAGE, dtype=head.dtype)
    padded[: head.shape[0]] = head
    return padded[rank * rows : (rank + 1) * rows].clone(), rank * rows


def check(rank, size, group, *, seed, positions, tokens, vocab, multiple, chunk, dtype=torch.float64, **tolerance):
    hidden, head, *rest = case(seed, positions, tokens, vocab, dtype=dtype)
    predictions = on_host(*rest)
    coefficients = torch.randn(predictions.slots_M.numel(), generator=torch.Generator().manual_seed(seed)).double()

    def token_loss(part, logprobs):
        return (coefficients[part] * logprobs.double().exp()).to(logprobs.dtype)

    exact_hidden, exact_head = hidden.double(), head.double()
    head_grad = torch.ones_like(exact_head)
    plain = Predictions(predictions.temperatures_U, predictions.slots_M, predictions.targets_M)
    if positions:
        logprobs = token_logprobs(exact_hidden, exact_head, plain, 1000)
        hidden_grad, entropy = backward_through_head(exact_hidden, exact_head, plain, 1000, token_loss, head_grad)
    else:
        logprobs, hidden_grad, entropy = torch.zeros(0), torch.zeros_like(exact_hidden), torch.zeros(())

    weight, start = shard(head, rank, size, multiple)
    own_grad = torch.ones(weight.shape, dtype=torch.float32 if dtype == torch.bfloat16 else dtype)
    leaf = hidden.clone().requires_grad_()
    found = head_logprobs(leaf, weight, predictions, chunk, group, start, vocab)
    assert found.dtype == (torch.float64 if dtype == torch.float64 and positions else torch.float32)
    zero, entropy_sum = head_loss(leaf, weight, predictions, chunk, token_loss, own_grad, group, start, vocab)
    assert zero.item() == 0.0
    (2 * zero).backward()  # what arrives scales what is handed back
    assert leaf.grad.dtype == dtype
    total = leaf.grad.double() / 2
    if group is not None:
        dist.all_reduce(total, group=group)
        everyone = [torch.empty_like(found) for _ in range(size)]
        dist.all_gather(everyone, found, group=group)
        assert all(torch.equal(found, other) for other in everyone), "ranks disagree in bits"

    def close(a, b):
        torch.testing.assert_close(a.double(), b.double(), **tolerance)

    close(found, logprobs)
    close(entropy_sum, entropy)
    close(total, hidden_grad)
    real = max(0, min(weight.shape[0], vocab - start))
    close(own_grad[:real], head_grad[start : start + real])
    assert (own_grad[real:] == 1).all(), "padded rows got a gradient"


CASES = [
    {"seed": 1, "positions": 11, "tokens": 9, "vocab": 64, "multiple": 1, "chunk": 4},
    {"seed": 2, "positions": 7, "tokens": 0, "vocab": 61, "multiple": 1, "chunk": 100},
    {
        "seed": 3,
        "positions": 5,
        "tokens": 20,
        "vocab": 97,
        "multiple": 128,
        "chunk": 1,
    },  # ranks after the first hold only padding
    {"seed": 4, "positions": 23, "tokens": 30, "vocab": 300, "multiple": 128, "chunk": 8},
    {"seed": 5, "positions": 0, "tokens": 0, "vocab": 64, "multiple": 1, "chunk": 4},
    {
        "seed": 6,
        "positions": 11,
        "tokens": 9,
        "vocab": 61,
        "multiple": 8,
        "chunk": 3,
        "dtype": torch.float32,
        "rtol": 2e-5,
        "atol": 2e-6,
    },
    {
        "seed": 7,
        "positions": 11,
        "tokens": 9,
        "vocab": 61,
        "multiple": 8,
        "chunk": 5,
        "dtype": torch.bfloat16,
        "rtol": 0.05,
        "atol": 0.06,
    },
]


def run_rank(rank: int, size: int, store: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=size)
    try:
        for arguments in CASES:
            check(rank, size, dist.group.WORLD, **arguments)
    finally:
        dist.destroy_process_group()

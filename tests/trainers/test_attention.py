import pytest
import torch
from torch.nn import functional

from rl360.trainers import attention
from rl360.trainers.attention import tree_attend
from rl360.trainers.packing import Tree

TREES = {
    "prefix": (Tree(5, (3, 1, 4)),),
    "prefix, a branch without own tokens": (Tree(5, (3, 0)),),
    "equal branches": (Tree(4, (3, 3)),),
    "no prefix": (Tree(0, (6, 2, 4)),),
    "one sequence": (Tree(0, (7,)),),
    "several trees": (Tree(5, (3, 1)), Tree(0, (2, 4)), Tree(3, (2, 2, 2))),
}


def separately(trees, q, k, v):
    """Each branch as a sequence of its own, in plain fp64 matrix form."""
    out = torch.zeros_like(q)
    offset, shared = 0, q.shape[1] // k.shape[1]
    for tree in trees:
        prefix = list(range(offset, offset + tree.prefix_length))
        offset += tree.prefix_length
        for length in tree.branch_lengths:
            rows = prefix + list(range(offset, offset + length))
            offset += length
            for head in range(q.shape[1]):
                scores = q[rows, head] @ k[rows, head // shared].T / q.shape[2] ** 0.5
                scores = scores.masked_fill(~torch.ones(len(rows), len(rows)).tril().bool(), float("-inf"))
                part = functional.softmax(scores, -1) @ v[rows, head // shared]
                out = out.index_put((torch.tensor(rows), torch.tensor(head)), part)
    return out


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("name", TREES)
def test_equals_separate_sequences_forward_and_backward(name, fused, monkeypatch):
    monkeypatch.setattr(attention, "MAX_PLAIN_SCORES", 0 if fused else 10**9)
    trees = TREES[name]
    generator = torch.Generator().manual_seed(0)
    total = sum(t.prefix_length + sum(t.branch_lengths) for t in trees)
    inputs = [
        torch.randn(total, heads, 8, generator=generator, dtype=torch.float64, requires_grad=True)
        for heads in (6, 2, 2)
    ]
    upstream = torch.randn(total, 6, 8, generator=generator, dtype=torch.float64)
    # A shared prefix row gets its gradient once a row here, so compare with one output row a packed row.
    found = tree_attend(trees, torch.float64)(0, *inputs)
    expected = separately(trees, *inputs)
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-12)
    for a, b in zip(
        torch.autograd.grad(found, inputs, upstream), torch.autograd.grad(expected, inputs, upstream), strict=True
    ):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-12)

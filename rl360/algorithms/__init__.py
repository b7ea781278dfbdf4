"""Pure maths of policy optimisation: groups in, a weighted batch out; logprobs in, a loss and metric sums out."""

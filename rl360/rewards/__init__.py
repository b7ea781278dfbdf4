"""Rewards: one signal a module. An attempt's reward is the sum of the shaped scores; see rl360.types.Attempt."""

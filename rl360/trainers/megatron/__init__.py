"""The Megatron trainer: a driver side, and ranks that are processes of their own. Only ranks import Megatron."""

"""Inference servers that a run starts and keeps alive: command lines, processes, the fleet that watches them."""

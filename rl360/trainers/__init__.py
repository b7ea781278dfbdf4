"""Trainers: a global batch in, an optimizer step and its metrics out."""

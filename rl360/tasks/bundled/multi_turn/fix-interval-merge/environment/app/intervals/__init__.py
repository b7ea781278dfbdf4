"""Intervals of whole numbers."""

from intervals.merge import covered, gaps, merge

__all__ = ["covered", "gaps", "merge"]

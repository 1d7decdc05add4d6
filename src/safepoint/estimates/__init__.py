"""Figures that pods and planning both compute: pure arithmetic."""

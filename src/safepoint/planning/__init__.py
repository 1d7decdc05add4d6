"""Computes what a run will need and lose before it begins: storage, cost, interval, and a simulated cluster.

Pure arithmetic and simulation with the standard library only; nothing here reads a job or writes a file.
"""

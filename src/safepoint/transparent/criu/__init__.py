"""Runs CRIU: finds it, dumps and restores a process tree, and turns its log into messages."""

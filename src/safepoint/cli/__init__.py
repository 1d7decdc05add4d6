"""The commands that a person types. Only functions import torch, so that `safepoint --help` starts fast."""

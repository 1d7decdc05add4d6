"""Training loops written by hand: `holdfast.session`."""

"""What strangers try. One file a class; each runs by itself."""

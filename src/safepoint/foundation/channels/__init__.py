"""How processes of one machine talk: frames with descriptors over a Unix socket, and dataclasses as JSON in them."""

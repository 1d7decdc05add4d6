"""Messages between processes of one machine: frames with descriptors over a Unix socket, dataclasses as JSON in them, and
which user has opened a TCP socket."""

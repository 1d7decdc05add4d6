"""Messages between processes of one machine: frames with descriptors over a Unix socket, and dataclasses as JSON in
them. Also finds the user who has opened a TCP socket."""

"""What happens to a run, as typed records: the stream that keeps them, and the console that prints them."""

"""What is seen through watches: changes arrive by themselves, and no request is repeated."""
